//! `exactly_once_sql`: executed twice, booked once.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use futures_util::future::join_all;
use rusqlite::Connection;
use support::Answer;
use support::http::request;
use tokio::time::timeout;

use crate::documented::Example;

const KILLS: u32 = 10;

/// How many payments are sent to each server for the first time. All earlier ones are sent again.
const FRESH: u32 = 3;

/// The nodes of each server die with it, and so do their locks and records: only the file outlives it.
#[tokio::test]
async fn payments_of_killed_servers_are_booked_once() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("exactly_once.sqlite");
    fs::remove_file(&file).ok();
    let envs = [("DATABASE", file.to_str().unwrap())];
    let mut random = fastrand::Rng::with_seed(7);
    for round in 1..=KILLS {
        let mut example = Example::start("exactly_once_sql", &envs);
        let paying = join_all((0..FRESH * round).map(|key| pay(example.addr, key)));
        // No magnitude is more likely than another: machines are fast and slow.
        let magnitude = random.u32(10..18);
        let later = (1 << magnitude) + random.u64(..1 << magnitude);
        timeout(Duration::from_micros(later), paying).await.ok();
        example.kill();
    }

    let example = Example::start("exactly_once_sql", &envs);
    for key in 0..FRESH * KILLS {
        let paid = pay(example.addr, key).await;
        assert_eq!(paid.status, 200, "{}", paid.text());
    }
    let database = Connection::open(&file).unwrap();
    let number = |sql| -> u32 { database.query_row(sql, [], |row| row.get(0)).unwrap() };
    let again = number("SELECT count(*) FROM payment WHERE executions > 1");
    assert!(again > 0, "all were executed once, so that is why");
    assert_eq!(number("SELECT count(*) FROM payment"), FRESH * KILLS);
    assert_eq!(number("SELECT 100 - balance FROM account"), FRESH * KILLS);
}

async fn pay(addr: SocketAddr, key: u32) -> Answer {
    let headers = [("idempotency-key", &*key.to_string())];
    request(addr, "POST", "/payments?amount=1", &headers, b"").await
}
