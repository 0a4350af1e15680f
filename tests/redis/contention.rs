//! Contention of several processes over real nodes: one winner, a correct answer for the others, and no lost
//! update.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::post;
use futures_util::future::join_all;
use support::http::{Client, Response, serve};
use support::{ChildProcess, Cluster, alone, ms, quorum, secs};
use tokio::time::Instant;
use tower_redlock::{Redlock, RedlockLayer, key};

use crate::patient::builder;

/// How long a withdrawal thinks; longer than eight requests are apart on a busy machine.
const HOLD: Duration = ms(100);

/// Starts two `quickstart` processes that share the nodes of a cluster.
fn two_servers(cluster: &Cluster) -> [(ChildProcess, SocketAddr); 2] {
    let urls = cluster.urls().join(",");
    let envs = quorum(&urls);
    [(); 2].map(|()| ChildProcess::serve("quickstart", &envs, "Ctrl-C stops it"))
}

/// Four withdrawals at each of two servers, all at once, on kept connections.
async fn eight_at_once(clients: &mut [Client], path: impl Fn(usize) -> String) -> Vec<Response> {
    let requests = clients.iter_mut().enumerate();
    let requests = requests.map(|(i, client)| {
        let path = path(i);
        async move { client.request("POST", &path, &[], b"").await }
    });
    join_all(requests).await
}

async fn eight_clients(cluster: &Cluster) -> ([(ChildProcess, SocketAddr); 2], Vec<Client>) {
    let servers = two_servers(cluster);
    let addrs = servers.iter().map(|(_, addr)| *addr).cycle().take(8);
    let clients = join_all(addrs.map(Client::connect)).await;
    (servers, clients)
}

fn assert_honest_refusal(refusal: &Response, account: &str, nodes: &[String]) {
    assert_eq!(refusal.status, 423);
    let retry_after: u64 = refusal.header("retry-after").unwrap().parse().unwrap();
    assert!(retry_after >= 1);
    let content_type = refusal.header("content-type");
    assert_eq!(content_type, Some("application/problem+json"));
    assert_eq!(refusal.json()["code"], "lock-contended");
    let text = refusal.text();
    assert!(!text.contains(account), "it repeats the key: {text}");
    for node in nodes {
        let address = node.trim_start_matches("redis://");
        assert!(!text.contains(address), "it names a node: {text}");
    }
    // Owner tokens are 32 hexadecimal digits.
    let words = text.split(|c: char| !c.is_ascii_hexdigit());
    let longest = words.map(str::len).max();
    assert!(longest < Some(32), "it shows an owner token: {text}");
}

#[tokio::test]
async fn eight_concurrent_withdrawals_over_two_servers_grant_one() {
    let _alone = alone().await;
    let cluster = Cluster::start(3);
    let (_servers, mut clients) = eight_clients(&cluster).await;
    let account = "account-no-4711";
    let hold = HOLD.as_millis();
    let path = format!("/accounts/{account}/withdraw?amount=0&hold_ms={hold}");
    // Opens the connections to the nodes.
    for client in &mut clients {
        let warm = "/accounts/warm/withdraw?amount=0&hold_ms=0";
        client.request("POST", warm, &[], b"").await;
    }
    let (mut not_one_winner, mut void) = (0, 0);
    for round in 0..100 {
        let began = Instant::now();
        let responses = eight_at_once(&mut clients, |_| path.clone()).await;
        let won = responses.iter().filter(|response| response.status == 200);
        let won = u32::try_from(won.count()).expect("eight at most");
        // A request that comes late finds the lock free again: side by side they cannot have been.
        let elapsed = began.elapsed();
        let apart = won <= 1 || elapsed >= won * HOLD;
        assert!(apart, "round {round}: {won} held it at once");
        // The servers have the default node timeout, which a machine that stands still may miss.
        let (slow, answered): (Vec<_>, Vec<_>) = responses.iter().partition(|r| r.status == 503);
        for refusal in &slow {
            assert_eq!(refusal.json()["code"], "lock-unavailable");
        }
        void += u32::from(!slow.is_empty());
        not_one_winner += u32::from(slow.is_empty() && won != 1);
        for refusal in answered.iter().filter(|response| response.status != 200) {
            assert_honest_refusal(refusal, account, &cluster.urls());
        }
    }
    println!("rounds in which nodes were too slow: {void} of 100");
    assert!(void <= 10, "the machine is too slow");
    println!("rounds without exactly one winner: {not_one_winner} of 100");
    assert!(not_one_winner <= 1);
    cluster.wait_until_free(secs(2)).await;
}

#[tokio::test]
async fn different_keys_never_contend() {
    let _alone = alone().await;
    let cluster = Cluster::start(3);
    let (_servers, mut clients) = eight_clients(&cluster).await;
    for _ in 0..25 {
        let path = |i| format!("/accounts/{i}/withdraw?amount=0&hold_ms=10");
        for response in eight_at_once(&mut clients, path).await {
            assert_eq!(response.status, 200, "{}", response.text());
        }
    }
}

const ACCOUNTS: usize = 10;
const CLIENTS: usize = 1_000;

#[derive(Default)]
struct Bank {
    withdrawn: std::sync::Mutex<HashMap<String, usize>>,
    inside: [AtomicUsize; ACCOUNTS],
    overlaps: AtomicUsize,
}

/// A withdrawal that has begun. A handler whose lock is lost is dropped: it is no longer inside, and writes nothing.
struct Inside<'a>(&'a AtomicUsize);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Reads, lets others run, and writes: loses updates unless it is alone with its account.
async fn withdraw(State(bank): State<Arc<Bank>>, Path(account): Path<String>) {
    let index: usize = account.parse().expect("accounts are numbers");
    if bank.inside[index].fetch_add(1, Ordering::SeqCst) > 0 {
        bank.overlaps.fetch_add(1, Ordering::SeqCst);
    }
    let _inside = Inside(&bank.inside[index]);
    let withdrawn = || bank.withdrawn.lock().unwrap();
    let before = withdrawn().get(&account).copied().unwrap_or(0);
    tokio::time::sleep(ms(1)).await;
    withdrawn().insert(account, before + 1);
}

/// A server of its own over a Redlock of its own, as another process would have.
async fn bank_server(bank: &Arc<Bank>, redlock: Option<Redlock>) -> SocketAddr {
    let mut app = Router::new()
        .route("/accounts/{id}/withdraw", post(withdraw))
        .with_state(Arc::clone(bank));
    if let Some(redlock) = redlock {
        app = app.route_layer(RedlockLayer::new(redlock, ("account", key::path("id"))));
    }
    serve(app).await.0
}

/// Withdraws once for every client, retrying while refused, and returns what the bank counted.
async fn thousand_withdrawals(locked: bool) -> Arc<Bank> {
    let cluster = Cluster::start(5);
    let bank = Arc::<Bank>::default();
    let mut servers = Vec::new();
    for _ in 0..2 {
        let redlock = builder(cluster.urls()).build().unwrap();
        servers.push(bank_server(&bank, locked.then_some(redlock)).await);
    }
    let clients = (0..CLIENTS).map(|i| {
        let addr = servers[i % 2];
        let path = format!("/accounts/{}/withdraw", i % ACCOUNTS);
        tokio::spawn(async move {
            let mut client = Client::connect(addr).await;
            for attempt in 0..2_000_u64 {
                let response = client.request("POST", &path, &[], b"").await;
                match response.status {
                    200 => return,
                    423 | 503 => {
                        // Apart from each other: neither in step nor for ever.
                        let pause = 5 + (i as u64 * 7 + attempt * 13) % 50;
                        tokio::time::sleep(ms(pause)).await;
                    }
                    status => panic!("{status}: {}", response.text()),
                }
            }
            panic!("client {i} never got its turn");
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("every client withdraws");
    }
    cluster.wait_until_free(secs(2)).await;
    bank
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_clients_withdraw_exactly_once_each() {
    let _alone = alone().await;
    let bank = thousand_withdrawals(true).await;
    assert_eq!(bank.overlaps.load(Ordering::SeqCst), 0);
    let withdrawn = bank.withdrawn.lock().unwrap();
    for account in 0..ACCOUNTS {
        assert_eq!(withdrawn[&account.to_string()], CLIENTS / ACCOUNTS);
    }
}

/// The same run without the layer: so the test above can fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_without_the_layer_loses_updates() {
    let _alone = alone().await;
    let bank = thousand_withdrawals(false).await;
    let withdrawn = bank.withdrawn.lock().unwrap();
    assert!(withdrawn.values().sum::<usize>() < CLIENTS);
    assert!(bank.overlaps.load(Ordering::SeqCst) > 0);
}
