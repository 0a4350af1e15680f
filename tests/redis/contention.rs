//! Contention of several processes over real nodes: one winner, and a correct answer for the others.

use std::time::Duration;

use futures_util::future::join_all;
use support::http::Client;
use support::{Answer, ChildProcess, Cluster, alone, ms, quorum, secs};
use tokio::time::Instant;

/// How long a withdrawal thinks; longer than eight requests are apart on a busy machine.
const HOLD: Duration = ms(100);

const ROUNDS: u32 = 40;

fn assert_honest_refusal(refusal: &Answer, account: &str, nodes: &[String]) {
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
    let urls = cluster.urls().join(",");
    let servers =
        [(); 2].map(|()| ChildProcess::serve("quickstart", &quorum(&urls), "Ctrl-C stops it"));
    let addrs = servers.iter().map(|(_, addr)| *addr).cycle().take(8);
    let mut clients = join_all(addrs.map(Client::connect)).await;
    let account = "account-no-4711";
    let hold = HOLD.as_millis();
    let path = format!("/accounts/{account}/withdraw?amount=0&hold_ms={hold}");
    // Opens the connections to the nodes.
    for client in &mut clients {
        let warm = "/accounts/warm/withdraw?amount=0&hold_ms=0";
        client.request("POST", warm, &[], b"").await;
    }
    let (mut not_one_winner, mut void) = (0, 0);
    for round in 0..ROUNDS {
        let began = Instant::now();
        // Four withdrawals at each of two servers, all at once, on kept connections.
        let withdrawals = clients.iter_mut();
        let withdrawals = withdrawals.map(|client| client.request("POST", &path, &[], b""));
        let responses = join_all(withdrawals).await;
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
    println!("rounds in which nodes were too slow: {void} of {ROUNDS}");
    assert!(void <= ROUNDS / 10, "the machine is too slow");
    println!("rounds without exactly one winner: {not_one_winner} of {ROUNDS}");
    assert!(not_one_winner <= 1);
    cluster.wait_until_free(secs(2)).await;
}
