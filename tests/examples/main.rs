//! The examples do what they say, and what they print can be typed.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]
#![allow(
    clippy::print_stdout,
    reason = "what a line printed explains its failure"
)]

mod clients;
mod documented;
mod exactly_once_sql;
mod grpc;
mod kinds_of_locks;
mod openapi;
mod playground;
mod recipes;
mod statements;
mod testing_your_handlers;
mod websocket;

use std::io;
use std::process::Command;
use std::time::Duration;

use documented::Example;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use support::http::request;
use support::{ChildProcess, Cluster, example_path, not_run, quorum, secs, wait_until};

const PATIENCE: Duration = secs(20);

/// Runs a line as a user would who pastes it into a terminal.
fn paste(line: &str) -> String {
    try_paste(line).unwrap_or_else(|| panic!("this fails: {line}"))
}

/// Runs a line that an example prints. A shell's prompt must not follow the answer on its last line.
fn paste_printed(line: &str) -> String {
    let answer = paste(line);
    assert!(answer.ends_with('\n'), "{line}: {answer:?}");
    answer
}

/// As `paste`; `None` if the line fails.
fn try_paste(line: &str) -> Option<String> {
    let output = Command::new("sh").args(["-c", line]).output().unwrap();
    if !output.status.success() {
        println!("{line}: {output:?}");
        return None;
    }
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Returns what a response of `curl -i` has below its head, and all of one of `curl`.
fn body(response: &str) -> Value {
    let body = response.rsplit("\r\n\r\n").next().unwrap();
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {response}"))
}

fn has_curl() -> bool {
    match Command::new("curl").arg("--version").output() {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            not_run("the curl lines of the examples: curl is missing");
            false
        }
        Err(error) => panic!("curl does not start: {error}"),
    }
}

#[test]
fn the_curl_lines_of_the_quickstart_work_as_printed() {
    if !has_curl() {
        return;
    }
    let Example { mut process, .. } = Example::start("quickstart", &[]);
    let said = process.stdout();
    assert!(said.contains(", locking over 3 embedded nodes"), "{said}");
    let lines = said.lines().map(str::trim);
    let lines: Vec<&str> = lines.filter(|line| line.starts_with("curl ")).collect();
    let [withdraw, two_at_once, ship, pay, balance, health] = lines[..] else {
        panic!("other curl lines than this test knows: {lines:#?}");
    };

    let withdrawn = paste_printed(withdraw);
    assert!(withdrawn.starts_with("HTTP/1.1 200"), "{withdrawn}");
    let withdrawn = body(&withdrawn);
    assert_eq!(withdrawn["account"], "alice");
    assert_eq!(withdrawn["balance"], 95);
    // Microseconds since 1970, so that the numbers grow over a restart too.
    assert!(withdrawn["fencing_token"].as_u64() > Some(1_700_000_000_000_000));

    let two = paste_printed(two_at_once);
    assert_eq!(two.matches("HTTP/1.1 423").count(), 1, "{two}");
    assert_eq!(two.matches("HTTP/1.1").count(), 1, "only one has -i: {two}");
    assert!(two.to_lowercase().contains("\r\nretry-after: "), "{two}");
    assert!(two.contains(r#""code":"lock-contended""#), "{two}");
    assert_eq!(two.matches(r#""balance":95"#).count(), 1, "{two}");

    let shipped = paste_printed(ship);
    assert!(shipped.starts_with("HTTP/1.1 200"), "{shipped}");
    assert_eq!(body(&shipped)["order"], 7);

    let paid = [pay, pay].map(paste_printed);
    assert_eq!(body(&paid[0]), body(&paid[1]));
    assert_eq!(body(&paid[0])["balance"], 95);
    let replayed = "idempotency-replayed: true";
    assert_eq!(paid.map(|paid| paid.contains(replayed)), [false, true]);
    let other = paste(&pay.replace("\"amount\":5", "\"amount\":6"));
    assert!(other.starts_with("HTTP/1.1 422"), "{other}");
    assert_eq!(body(&other)["code"], "idempotency-key-reused");

    let balance = body(&paste_printed(balance));
    assert_eq!(balance, json!({"account": "alice", "balance": 95}));
    let health = body(&paste_printed(health));
    assert_eq!(health["quorum"], true);
    assert_eq!(health["nodes"].as_array().unwrap().len(), 3);

    process.signal(Signal::SIGTERM);
    assert!(process.wait(PATIENCE).success());
    process.wait_for_line("drained: 0 released, 0 still held", PATIENCE);
}

#[tokio::test]
async fn transfers_in_both_directions_lose_no_money() {
    let example = Example::start("transfer", &[]);
    let transfer = async |from: &str, to: &str, amount: usize| {
        let transfer = format!(r#"{{"from":"{from}","to":"{to}","amount":{amount}}}"#);
        let headers = [("content-type", "application/json")];
        let body = transfer.as_bytes();
        request(example.addr, "POST", "/transfers", &headers, body).await
    };
    let transfers = (0..20).map(|number| match number % 2 {
        0 => transfer("alice", "bob", number),
        _ => transfer("bob", "alice", number),
    });
    for response in futures_util::future::join_all(transfers).await {
        // Refused, if others were there for a second.
        if response.status != 423 {
            assert_eq!(response.status, 200, "{}", response.text());
            let both = response.json();
            let sum = both["alice"].as_u64().unwrap() + both["bob"].as_u64().unwrap();
            assert_eq!(sum, 200, "{both}");
        }
    }
    let to_itself = transfer("carol", "carol", 5).await;
    assert_eq!(to_itself.json()["carol"], 100);
}

#[tokio::test]
async fn quickstart_shares_locks_over_redis_nodes() {
    let cluster = Cluster::start(3);
    let urls = cluster.urls().join(",");
    let envs = quorum(&urls);
    let [one, other] = [(); 2].map(|()| Example::start("quickstart", &envs));
    let path = "/accounts/carol/withdraw?hold_ms=1500";
    let first = request(one.addr, "POST", path, &[], b"");
    let second = async {
        let locked = || !cluster.lock_keys().is_empty();
        wait_until("locked", PATIENCE, locked).await;
        request(other.addr, "POST", path, &[], b"").await
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!((first.told().0, second.told().0), (200, 423));
}

/// Waits for the end of a lock without HTTP, and checks its outcome and the last line that it printed.
#[track_caller]
fn assert_ends(mut process: ChildProcess, code: i32, line: &str) {
    let status = process.wait(PATIENCE);
    assert_eq!(status.code(), Some(code), "{}", process.stderr());
    assert_eq!(process.stdout().lines().last(), Some(line));
}

#[test]
fn lock_without_http_ends_with_the_outcome_of_its_lock() {
    let mut cluster = Cluster::start(3);
    let urls = cluster.urls().join(",");
    let lock = |args: &[&str]| {
        let program = example_path("lock_without_http");
        ChildProcess::start(program, args, &quorum(&urls))
    };
    let free = lock(&["report", "10"]);
    let acquired = free.wait_for_line("acquired report", PATIENCE);
    let token = acquired.strip_prefix("acquired report token=").unwrap();
    assert!(token.parse::<u64>().is_ok(), "{token}");
    assert_ends(free, 0, "released report");

    let holder = lock(&["report", "60000"]);
    holder.wait_for_line("acquired report", PATIENCE);
    assert_ends(lock(&["report", "10", "100"]), 1, "contended report");

    // Another client takes the lock on a majority; the next renewal detects it.
    for server in &cluster.servers[..2] {
        server.command(&["SET", "redlock:{report}", "foreign", "PX", "60000"]);
    }
    assert_ends(holder, 3, "lost report");
    let left = cluster.servers[0].command(&["GET", "redlock:{report}"]);
    assert_eq!(left.as_str(), Some("foreign"), "it is not the holder's");

    (0..2).for_each(|node| cluster.servers[node].kill());
    assert_ends(lock(&["other", "10"]), 2, "unavailable");
}
