//! `exactly_once_sql`: executed twice, booked once.

use std::fs;
use std::path::PathBuf;
use std::process;
use std::time::Duration;

use futures_util::future::join_all;
use rusqlite::Connection;
use support::http::{Client, Response, request};
use support::{Cluster, Deadline};
use tokio::time::sleep;

use crate::PATIENCE;
use crate::documented::Example;

#[tokio::test]
async fn payment_that_failed_is_booked_once_by_its_retries() {
    let example = Example::start("exactly_once_sql", &[]);
    let pay = async |path| {
        let headers = [("idempotency-key", "key")];
        request(example.addr, "POST", path, &headers, b"").await
    };
    for _ in 0..3 {
        let failed = pay("/payments?amount=1&fail=true").await;
        assert_eq!(failed.status, 503);
    }
    let first = pay("/payments?amount=1").await;
    assert_eq!(first.json()["executions"], 4);
    assert_eq!(first.json()["balance"], 99);
    let replayed = pay("/payments?amount=1").await;
    assert_eq!(replayed.header("idempotency-replayed"), Some("true"));
    assert_eq!(replayed.body, first.body);
}

/// The example over nodes and a file that outlive it.
struct Bank {
    cluster: Cluster,
    file: PathBuf,
}

impl Bank {
    fn new() -> Self {
        let name = format!("tower-redlock-bank-{}.sqlite", process::id());
        let file = std::env::temp_dir().join(name);
        fs::remove_file(&file).ok();
        let cluster = Cluster::start(3);
        Self { cluster, file }
    }

    /// Starts it when nothing is locked any more that a killed one has left; by hand, as the ttl would.
    fn open(&self) -> Example {
        for node in &self.cluster.servers {
            for lock in self.cluster.lock_keys() {
                node.command(&["DEL", &lock]);
            }
        }
        let urls = self.cluster.urls().join(",");
        let file = self.file.to_str().unwrap();
        let envs = [
            ("DATABASE", file),
            ("REDLOCK_URLS", &*urls),
            ("REDLOCK_RESTART_GUARD", "off"),
        ];
        Example::start("exactly_once_sql", &envs)
    }

    /// Returns the only number that is selected.
    fn number(&self, sql: &str) -> u32 {
        let database = Connection::open(&self.file).unwrap();
        database.query_row(sql, [], |row| row.get(0)).unwrap()
    }
}

impl Drop for Bank {
    fn drop(&mut self) {
        for suffix in ["", "-journal"] {
            let file = format!("{}{suffix}", self.file.display());
            fs::remove_file(file).ok();
        }
    }
}

/// Sends a payment, unless the server is killed over it.
async fn try_pay(client: &mut Client, key: &str) -> Option<Response> {
    let headers = [("idempotency-key", key)];
    let answer = client.try_request("POST", "/payments?amount=1", &headers, b"");
    answer.await.ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payments_of_a_killed_server_are_booked_once() {
    let bank = Bank::new();
    let mut random = fastrand::Rng::with_seed(7);
    let mut keys = Vec::new();
    let mut unanswered: Vec<String> = Vec::new();
    let mut round = 0;
    // More, while no kill has come between an effect and its record.
    while round < kills() || (round < 4 * kills() && bank.number(EXECUTED_AGAIN) == 0) {
        let mut example = bank.open();
        // Of those before, some were booked and not recorded.
        unanswered.truncate(RETRIED);
        let fresh: Vec<String> = (0..FRESH).map(|of| format!("{round}-{of}")).collect();
        keys.extend_from_slice(&fresh);
        unanswered.extend(fresh);
        let addr = example.addr;
        let clients = join_all(unanswered.iter().map(|_| Client::connect(addr))).await;
        let paying: Vec<_> = clients
            .into_iter()
            .zip(unanswered)
            .map(|(mut client, key)| {
                tokio::spawn(async move {
                    let answer = try_pay(&mut client, &key).await;
                    (key, answer)
                })
            })
            .collect();
        // No magnitude is more likely than another: machines are fast and slow.
        let magnitude = random.u32(9..16);
        let later = (1 << magnitude) + random.u64(..1 << magnitude);
        sleep(Duration::from_micros(later)).await;
        example.kill();
        round += 1;
        unanswered = Vec::new();
        for paying in paying {
            let (key, answer) = paying.await.unwrap();
            if answer.is_none_or(|answer| answer.status != 200) {
                unanswered.push(key);
            }
        }
    }

    let example = bank.open();
    let mut replayed = 0;
    for key in &keys {
        let deadline = Deadline::after(PATIENCE);
        let answer = loop {
            let headers = [("idempotency-key", key.as_str())];
            let path = "/payments?amount=1";
            let answer = request(example.addr, "POST", path, &headers, b"").await;
            if answer.status == 200 {
                break answer;
            }
            // Late nodes are no outcome.
            assert!(
                [409, 503].contains(&answer.status) && !deadline.is_over(),
                "{key}: {}",
                answer.text()
            );
        };
        replayed += usize::from(answer.header("idempotency-replayed").is_some());
    }
    let again = bank.number(EXECUTED_AGAIN);
    println!(
        "{round} kills: {} payments, {again} executed again, {replayed} replayed in the end",
        keys.len()
    );
    assert!(again > 0, "all were executed once, so that is why");
    let payments = u32::try_from(keys.len()).unwrap();
    assert_eq!(bank.number("SELECT count(*) FROM payment"), payments);
    assert_eq!(bank.number("SELECT 100 - balance FROM account"), payments);
}

/// `KILLS` asks for more.
fn kills() -> usize {
    let kills = std::env::var("KILLS").ok();
    kills.map_or(100, |kills| kills.parse().expect("it is a number"))
}

/// How many payments are sent to each server that is killed, and for the first time.
const FRESH: usize = 3;

/// How many of those before are sent again at most.
const RETRIED: usize = 3;

const EXECUTED_AGAIN: &str = "SELECT count(*) FROM payment WHERE executions > 1";
