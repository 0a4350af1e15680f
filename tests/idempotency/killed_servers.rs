//! Server processes that are killed after an execution, and what others answer.

use std::net::SocketAddr;

use nix::sys::signal::Signal;
use support::http::{Client, Response, request};
use support::{ChildProcess, Cluster, Deadline, quorum, wait_until};
use tokio::time::sleep;

use crate::bank::{
    KEY, PATIENCE, POLL, RETRIES, as_recorded, is_contended, is_executed, is_replayed, pttl, said,
};

/// A server that can be killed.
fn quickstart(cluster: &Cluster) -> (ChildProcess, SocketAddr) {
    let urls = cluster.urls().join(",");
    ChildProcess::serve("quickstart", &quorum(&urls), "istening on http://")
}

/// Pays at a quickstart, again if the nodes were late: its node timeout is short.
async fn pay_there(addr: SocketAddr, key: &str, amount: u32) -> Response {
    let headers = [(KEY, key), ("content-type", "application/json")];
    let body = format!("{{\"account\":\"dave\",\"amount\":{amount}}}");
    let deadline = Deadline::after(PATIENCE);
    loop {
        let answer = request(addr, "POST", HELD, &headers, body.as_bytes()).await;
        if answer.status != 503 || deadline.is_over() {
            return answer;
        }
        sleep(POLL).await;
    }
}

#[tokio::test]
async fn key_of_a_killed_server_is_locked_until_its_ttl_and_then_executed() {
    let cluster = Cluster::start(3);
    let (mut killed, addr) = quickstart(&cluster);
    let (_other, other) = quickstart(&cluster);
    let dying = tokio::spawn(async move {
        let mut client = Client::connect(addr).await;
        let headers = [(KEY, "a"), ("content-type", "application/json")];
        let body = b"{\"account\":\"dave\",\"amount\":5}";
        client.try_request("POST", HELD, &headers, body).await
    });
    wait_until("it is executed", PATIENCE, || {
        cluster.lock_keys().len() == 3
    })
    .await;
    killed.signal(Signal::SIGKILL);
    killed.wait(PATIENCE);
    assert!(dying.await.unwrap().is_err(), "it died over it");

    let refused = pay_there(other, "a", 5).await;
    assert!(is_contended(&refused), "{}", said(&refused));
    assert!(refused.header("retry-after").is_some());
    let reused = pay_there(other, "a", 6).await;
    assert_eq!(reused.status, 422, "{}", said(&reused));
    // By hand, what the ttl does some seconds later.
    for node in &cluster.servers {
        for lock in cluster.lock_keys() {
            let left = pttl(node, &lock);
            assert!((-2..=10_000).contains(&left) && left != -1, "{left} ms");
            node.command(&["DEL", &lock]);
        }
    }
    let executed = pay_there(other, "a", 5).await;
    assert!(is_executed(&executed), "{}", said(&executed));
    let again = pay_there(other, "a", 5).await;
    assert!(is_replayed(&again), "{}", said(&again));
    assert_eq!(as_recorded(&again), as_recorded(&executed));
}

#[tokio::test]
async fn record_of_a_killed_server_is_replayed_by_another_server() {
    let cluster = Cluster::start(3);
    let (mut killed, addr) = quickstart(&cluster);
    let (_other, other) = quickstart(&cluster);
    let mut keys = (0..RETRIES).map(|key| key.to_string());
    let (key, first) = loop {
        let key = keys.next().expect("the nodes are in time once");
        let first = pay_there(addr, &key, 5).await;
        // Executed and recorded; a majority may have been late for either.
        if is_executed(&first) {
            break (key, first);
        }
    };
    killed.signal(Signal::SIGKILL);
    killed.wait(PATIENCE);
    let again = pay_there(other, &key, 5).await;
    assert!(is_replayed(&again), "{}", said(&again));
    assert_eq!(as_recorded(&again), as_recorded(&first));
}

/// Long enough to be killed meanwhile.
const HELD: &str = "/payments?hold_ms=1000";
