//! Waits in real time for conditions.

use std::future::{Future, ready};
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tower_redlock::Redlock;

use crate::deadline::POLL;

/// Waits until a condition holds; panics after `longest`.
pub async fn wait_until(what: &str, longest: Duration, holds: impl Fn() -> bool) {
    until(what, longest, || ready(holds())).await;
}

/// Waits like [`wait_until`] for a condition that takes an await.
pub async fn until<F: Future<Output = bool>>(
    what: &str,
    longest: Duration,
    mut holds: impl FnMut() -> F,
) {
    let waiting = async {
        while !holds().await {
            sleep(POLL).await;
        }
    };
    let waited = timeout(longest, waiting).await;
    assert!(waited.is_ok(), "not {what} after {longest:?}");
}

/// Waits until every node of a `Redlock` is up.
pub async fn until_all_up(redlock: &Redlock, longest: Duration) {
    until("up", longest, || async {
        let health = redlock.health().await;
        health.up() == health.nodes.len()
    })
    .await;
}
