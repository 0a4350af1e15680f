//! Many clients, few accounts, two processes, real nodes: one at a time, and no update is lost.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

mod support;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{Request, StatusCode};
use axum::routing::post;
use futures_util::future::join_all;
use support::http::{Client, Response};
use support::{ChildProcess, Cluster, example_path, free_port};
use tokio::sync::Barrier;
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt;
use tower_redlock::{Redlock, RedlockLayer, RestartGuard, key};

const PATIENCE: Duration = Duration::from_secs(20);

/// One process of the quickstart over the nodes of a cluster.
struct Quickstart {
    addr: SocketAddr,
    _process: ChildProcess,
}

impl Quickstart {
    fn start(cluster: &Cluster) -> Self {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let envs = [
            ("LISTEN", addr.to_string()),
            ("REDLOCK_URLS", cluster.urls().join(",")),
            ("REDLOCK_RESTART_GUARD", "off".to_owned()),
        ];
        let envs = envs.each_ref().map(|(name, value)| (*name, value.as_str()));
        let process = ChildProcess::start(example_path("quickstart"), &[], &envs);
        process.wait_for_line("Ctrl-C stops it", PATIENCE);
        Self {
            addr,
            _process: process,
        }
    }

    /// Returns the balance of an account as this process has it; each keeps its own.
    async fn balance(&self, account: &str) -> u64 {
        let path = format!("/accounts/{account}");
        let response = support::http::request(self.addr, "GET", &path, &[], b"").await;
        response.json()["balance"].as_u64().unwrap()
    }
}

/// Eight clients whose connections stand, so that their requests really come at once.
async fn eight_clients(servers: &[Quickstart; 2]) -> Vec<Client> {
    join_all((0..8).map(|i| Client::connect(servers[i % 2].addr))).await
}

/// Sends one withdrawal from each client at the same moment, each from an account of its own choice.
async fn withdraw_at_once(
    clients: Vec<Client>,
    path: impl Fn(usize) -> String,
) -> (Vec<Client>, Vec<Response>) {
    let start = Arc::new(Barrier::new(clients.len()));
    let jobs = clients.into_iter().enumerate().map(|(i, mut client)| {
        let (start, path) = (Arc::clone(&start), path(i));
        tokio::spawn(async move {
            start.wait().await;
            let response = client.request("POST", &path, &[], b"").await;
            (client, response)
        })
    });
    let done: Vec<_> = join_all(jobs).await.into_iter().map(Result::unwrap).collect();
    done.into_iter().unzip()
}

#[track_caller]
fn assert_is_contended(response: &Response) {
    assert_eq!(response.status, 423, "{response:?}");
    let seconds: u64 = response.header("retry-after").unwrap().parse().unwrap();
    assert!(seconds >= 1, "{response:?}");
    assert_eq!(
        response.header("content-type"),
        Some("application/problem+json")
    );
    assert_eq!(response.json()["code"], "lock-contended");
    assert_eq!(response.json()["status"], 423);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_eight_withdrawals_at_once_over_two_processes_one_wins() {
    const ROUNDS: usize = 100;
    const HOLD: Duration = Duration::from_millis(40);

    let cluster = Cluster::start(3);
    let servers = [Quickstart::start(&cluster), Quickstart::start(&cluster)];
    let mut clients = eight_clients(&servers).await;
    let (mut one_winner, mut reused_wins) = (0, [0, 0]);
    for round in 0..ROUNDS {
        // Every other round is on the same account, whose lock has just been released.
        let reused = round % 2 == 1;
        let account = if reused {
            "much-used".to_owned()
        } else {
            format!("fresh-{round}")
        };
        let began = Instant::now();
        let hold = HOLD.as_millis();
        let path = format!("/accounts/{account}/withdraw?amount=1&hold_ms={hold}");
        let responses;
        (clients, responses) = withdraw_at_once(clients, |_| path.clone()).await;
        let took = began.elapsed();

        let is_winner = |response: &&Response| response.status == 200;
        let winners = responses.iter().filter(is_winner).count();
        one_winner += usize::from(winners == 1);
        // A late request may win after the first, never beside it.
        let at_least = HOLD * u32::try_from(winners).unwrap();
        assert!(
            took >= at_least,
            "round {round}: {winners} winners in {took:?}"
        );
        for (i, response) in responses.iter().enumerate() {
            if response.status == 200 {
                reused_wins[i % 2] += u64::from(reused);
            } else {
                assert_is_contended(response);
                let text = response.text();
                for secret in [&account, "127.0.0.1", "account"] {
                    assert!(!text.contains(secret), "{secret} in {text}");
                }
            }
        }
    }
    eprintln!("{one_winner} of {ROUNDS} rounds had exactly one winner");
    // A machine that stops for as long as a lock is held may let a second one win after it.
    assert!(one_winner >= ROUNDS - 1, "{one_winner} of {ROUNDS}");
    for (server, wins) in servers.iter().zip(reused_wins) {
        let balance = server.balance("much-used").await;
        assert_eq!(balance, 100 - wins, "two at once in one process lose one");
    }
    cluster.wait_until_free(Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn different_accounts_never_contend() {
    let cluster = Cluster::start(3);
    let servers = [Quickstart::start(&cluster), Quickstart::start(&cluster)];
    let mut clients = eight_clients(&servers).await;
    for round in 0..20 {
        let responses;
        let path = |i| format!("/accounts/own-{i}/withdraw?amount=0&hold_ms=20");
        (clients, responses) = withdraw_at_once(clients, path).await;
        for response in responses {
            assert_eq!(response.status, 200, "round {round}: {response:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_names_neither_the_key_nor_its_holder_nor_a_node() {
    let mut cluster = Cluster::start(3);
    let servers = [Quickstart::start(&cluster), Quickstart::start(&cluster)];
    let path = "/accounts/hidden-account/withdraw?hold_ms=1000";
    let mut holder = Client::connect(servers[0].addr).await;
    let holding = tokio::spawn(async move { holder.request("POST", path, &[], b"").await.status });
    let names = timeout(PATIENCE, async {
        loop {
            let names = cluster.lock_keys();
            if names.len() == 3 {
                return names;
            }
            sleep(Duration::from_millis(5)).await;
        }
    });
    let names = names.await.unwrap();
    let owner = cluster.servers[0].command(&["GET", &names[0]]);
    let owner = owner.as_str().unwrap().to_owned();
    assert!(names[0].contains("hidden-account") && owner.len() >= 16);

    let mut secrets = vec!["hidden-account".to_owned(), owner, "127.0.0.1".to_owned()];
    let ports = cluster.servers.iter().map(|server| server.port());
    secrets.extend(ports.map(|port| port.to_string()));
    let assert_hides_all = |response: &Response| {
        let whole = format!("{:?} {}", response.headers, response.text());
        for secret in &secrets {
            assert!(!whole.contains(secret.as_str()), "{secret} in {whole}");
        }
    };
    // By the front of the holder's process, and by the nodes.
    for server in &servers {
        let refused = support::http::request(server.addr, "POST", path, &[], b"").await;
        assert_is_contended(&refused);
        assert_hides_all(&refused);
    }
    assert_eq!(holding.await.unwrap(), 200);

    cluster.servers[0].kill();
    cluster.servers[1].kill();
    for server in &servers {
        let refused = support::http::request(server.addr, "POST", path, &[], b"").await;
        assert_eq!(refused.status, 503);
        assert_eq!(refused.json()["code"], "lock-unavailable");
        assert_hides_all(&refused);
    }
}

const ACCOUNTS: usize = 10;
const CLIENTS: usize = 1_000;
const START_BALANCE: u64 = 1_000;

/// A store with no protection of its own: whoever writes last, wins.
type Balances = Arc<[AtomicU64; ACCOUNTS]>;

async fn withdraw_one(State(balances): State<Balances>, Path(account): Path<usize>) {
    let before = balances[account].load(Ordering::Relaxed);
    // Another request would come in between here.
    sleep(Duration::from_millis(1)).await;
    balances[account].store(before - 1, Ordering::Relaxed);
}

/// The service of one process; the balances are the database that all processes share.
fn service(balances: &Balances, locks: Option<RedlockLayer>) -> Router {
    let app = Router::new().route("/accounts/{id}/withdraw", post(withdraw_one));
    let app = match locks {
        Some(layer) => app.route_layer(layer),
        None => app,
    };
    app.with_state(Arc::clone(balances))
}

/// Asks until it is served, as a client does that heeds 423 and 503.
async fn withdraw_with_retries(server: Router, client: usize) {
    let account = client % ACCOUNTS;
    for attempt in 0..10_000_u32 {
        let request = Request::post(format!("/accounts/{account}/withdraw"));
        let request = request.body(Body::empty()).unwrap();
        let response = server.clone().oneshot(request).await.unwrap();
        let status = response.status();
        // To its end, as a client reads it: the lock is released there.
        axum::body::to_bytes(response.into_body(), 1_000)
            .await
            .unwrap();
        match status {
            StatusCode::OK => return,
            StatusCode::LOCKED | StatusCode::SERVICE_UNAVAILABLE => {}
            other => panic!("{other}"),
        }
        // Spread over the clients; `Retry-After` in whole seconds would take the test minutes.
        let ceiling = 10 << attempt.min(5);
        let drawn = (client * 31 + usize::try_from(attempt).unwrap() * 17) % ceiling;
        sleep(Duration::from_millis(u64::try_from(drawn + 5).unwrap())).await;
    }
    panic!("client {client} was never served");
}

/// Lets all clients withdraw at once over two services, and returns what is left on each account.
async fn run_on_the_bank(cluster: &Cluster, locked: bool) -> Vec<u64> {
    let balances: Balances = Arc::new([const { AtomicU64::new(START_BALANCE) }; ACCOUNTS]);
    // One Redlock each: they know of each other as little as two processes do.
    let services = [(); 2].map(|()| {
        let redlock = Redlock::builder()
            .urls(cluster.urls())
            .restart_guard(RestartGuard::Off)
            .build()
            .unwrap();
        let layer = RedlockLayer::new(redlock, ("account", key::path("id")));
        service(&balances, locked.then_some(layer))
    });
    let clients = (0..CLIENTS).map(|client| {
        // Not by the parity of the client, which is that of its account too.
        let server = services[(client / ACCOUNTS) % 2].clone();
        tokio::spawn(withdraw_with_retries(server, client))
    });
    let all = timeout(Duration::from_secs(100), join_all(clients)).await;
    all.expect("all are served").into_iter().for_each(Result::unwrap);
    let balances = balances.iter();
    balances.map(|balance| balance.load(Ordering::Relaxed)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_clients_with_retries_lose_no_update_and_without_the_layer_they_do() {
    let cluster = Cluster::start(5);
    let began = Instant::now();
    let exact = START_BALANCE - u64::try_from(CLIENTS / ACCOUNTS).unwrap();
    let locked = run_on_the_bank(&cluster, true).await;
    assert_eq!(locked, [exact; ACCOUNTS]);
    eprintln!("{CLIENTS} clients were served in {:?}", began.elapsed());
    cluster.wait_until_free(Duration::from_secs(1)).await;

    // The same run with nothing but the layer left out: so the test can fail.
    let unlocked = run_on_the_bank(&cluster, false).await;
    assert!(
        unlocked.iter().sum::<u64>() > exact * u64::try_from(ACCOUNTS).unwrap(),
        "no update was lost without locks: {unlocked:?}"
    );
}
