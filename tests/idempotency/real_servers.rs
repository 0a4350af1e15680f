//! Idempotency over real Redis servers: crowds of duplicates, and nodes that forget, hang or break connections.

use std::time::Duration;

use futures_util::future::join_all;
use support::http::Client;
use support::{Answer, Cluster, Executed, Proxy, ms, once, secs, wait_until};
use tokio::time::sleep;
use tower_redlock::IdempotencyLayer;

use crate::bank::{
    KEY, NODE_TIMEOUT, PATIENCE, RETRIES, Server, is_contended, is_executed, pay, redlock, routes,
    said,
};

/// A hundred clients of two servers, which send the same at once.
struct Crowd(Vec<Client>);

impl Crowd {
    async fn connect(servers: &[Server; 2]) -> Self {
        let addr = |client: usize| servers[client % servers.len()].addr;
        Self(join_all((0..CROWD).map(|client| Client::connect(addr(client)))).await)
    }

    /// Sends duplicates until one is executed, and returns its answer.
    async fn pay(&mut self, path: &str, key: &str, bank: &Executed) -> Answer {
        let before = bank.count();
        for _ in 0..RETRIES {
            let headers = [(KEY, key)];
            let clients = self.0.iter_mut();
            let asked = clients.map(|client| client.request("POST", path, &headers, b"amount=5"));
            let answers = join_all(asked).await;
            let executed = bank.count() - before;
            let (mut winners, others): (Vec<_>, Vec<_>) =
                answers.into_iter().partition(is_executed);
            assert_eq!(winners.len(), executed, "{key}");
            assert!(executed <= 1, "{key} was executed {executed} times");
            let winner = winners.pop();
            for other in others {
                if other.is_replayed() {
                    let winner = winner.as_ref().map(Answer::as_recorded);
                    assert_eq!(Some(other.as_recorded()), winner, "{key}");
                } else {
                    assert!(is_contended(&other), "{}", said(&other));
                }
            }
            if let Some(winner) = winner {
                return winner;
            }
        }
        panic!("no request won {key} in {RETRIES} rounds");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundred_duplicates_execute_once_and_are_refused_or_replayed() {
    let mut cluster = Cluster::start(3);
    let bank = Executed::default();
    let servers = [
        Server::start(&cluster, &bank).await,
        Server::start(&cluster, &bank).await,
    ];
    let mut crowd = Crowd::connect(&servers).await;
    let rounds = rounds();
    // Some end while others are still asking, some are still executed when all others have asked.
    let paths = ["/payments", "/payments?ms=3", "/payments?ms=30"];
    let mut first = Vec::new();
    for round in 0..rounds {
        let (path, key) = (paths[round % paths.len()], format!("round-{round}"));
        let winner = crowd.pay(path, &key, &bank).await;
        for server in &servers {
            server.replays(path, &key, &winner).await;
        }
        first.push((path, key, winner));
    }
    cluster.wait_until_free(PATIENCE).await;

    cluster.servers[0].kill();
    let late = Server::start(&cluster, &bank).await;
    for (path, key, winner) in &first {
        for server in [&servers[0], &servers[1], &late] {
            server.replays(path, key, winner).await;
        }
    }
    assert_eq!(bank.count(), rounds);
}

/// The wires swallow what is sent, or its answers, and then the connections break.
#[tokio::test]
async fn response_is_recorded_although_connections_break_while_recording() {
    for (lost, arrives) in [(3, false), (2, false), (3, true)] {
        let cluster = Cluster::start(3);
        let wires = cluster.proxies().await;
        let urls = wires.iter().map(Proxy::url).collect();
        let redlock = redlock(urls, 3, secs(2)).await;
        let layer = once(&redlock);
        let bank = Executed::default();
        let server = Server::serve(routes(&bank).route_layer(layer)).await;
        let paying = pay(server.addr, "/payments?ms=300", "a");
        let breaking = async {
            wait_until("executed", PATIENCE, || bank.count() != 0).await;
            for wire in &wires[..lost] {
                match arrives {
                    true => wire.delay(PATIENCE),
                    false => wire.black_hole(),
                }
            }
            // It is sent 300 ms after the execution began, and given up two seconds later.
            sleep(ms(1_000)).await;
            wires.iter().for_each(Proxy::cut);
            wires.iter().for_each(Proxy::pass);
        };
        let (first, ()) = tokio::join!(paying, breaking);
        let what = format!("{lost} lost, arrives: {arrives}: {}", said(&first));
        assert!(is_executed(&first), "{what}");
        let again = pay(server.addr, "/payments?ms=300", "a").await;
        assert!(again.is_replayed(), "{what}, then {}", said(&again));
        assert_eq!(bank.count(), 1);
        cluster.wait_until_free(PATIENCE).await;
    }
}

const CROWD: usize = 100;

/// `DUPLICATES_ROUNDS` asks for more.
fn rounds() -> usize {
    let rounds = std::env::var("DUPLICATES_ROUNDS").ok();
    rounds.map_or(12, |rounds| rounds.parse().expect("it is a number"))
}

#[tokio::test]
async fn retention_of_zero_and_duration_max_is_accepted_by_redis() {
    let cluster = Cluster::start(3);
    let bank = Executed::default();
    for retention in [Duration::ZERO, Duration::MAX] {
        let set = |layer: IdempotencyLayer| layer.retention(retention);
        let server = Server::start_with(&cluster, &bank, NODE_TIMEOUT, set).await;
        let paid = server.pay("/payments", &format!("{retention:?}")).await;
        assert!(is_executed(&paid), "{}", said(&paid));
    }
}
