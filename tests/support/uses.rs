//! Everything that the crate does with a server, to see whether all of it works there.

use std::fmt::Display;
use std::future::IntoFuture;
use std::time::Duration;

use axum::Router;
use axum::http::Method;
use axum::routing::post;
use tokio::time::{sleep, timeout};
use tower_redlock::deadpool_redis::redis::{Client, cmd};
use tower_redlock::{
    ListCursor, LockError, LockKey, NodeState, Redlock, RedlockBuilder, Rejection, Retry,
};

use crate::answer::Answer;
use crate::idempotent::{keyed_request, once};
use crate::waiting::wait_until;

/// Locks a key that is free, and releases it on a majority.
pub async fn lock_and_release(redlock: &Redlock, key: impl Into<LockKey>) {
    let guard = redlock.try_lock(key).await.unwrap();
    guard.release().await.unwrap();
}

/// What went wrong, of all that was tried.
#[derive(Default)]
struct Complaints(Vec<String>);

impl Complaints {
    /// Notes what an attempt has failed with.
    fn note<T, E: Display>(&mut self, what: &str, tried: Result<T, E>) -> Option<T> {
        let noted = tried.map_err(|error| self.0.push(format!("{what}: {error}")));
        noted.ok()
    }
}

/// Locks, waits, contends, extends, releases and records, and returns what went wrong.
pub async fn use_all(builder: impl Fn() -> RedlockBuilder, key: &str) -> Vec<String> {
    let mut complaints = Complaints::default();
    for fencing in [true, false] {
        let redlock = builder().fencing(fencing).ttl(TTL).build().unwrap();
        for node in redlock.health().await.nodes {
            if let NodeState::Unreachable { why, .. } = node.state {
                complaints.0.push(format!("health: {}: {why}", node.node));
            }
        }
        for keys in [
            vec![format!("{key}1")],
            vec![format!("{key}2"), format!("{key}3")],
        ] {
            let keys = keys.into_iter().map(|key| format!("{key}{fencing}"));
            let locked = redlock.lock_all(keys).wait(Duration::ZERO).await;
            let Some(guard) = complaints.note("lock", locked) else {
                continue;
            };
            let refused = redlock.try_lock(guard.key()).await;
            if !matches!(refused, Err(LockError::Contended { .. })) {
                complaints.note("contend", refused);
            }
            complaints.note("extend", guard.extend(TTL).await);
            complaints.note("release", guard.release().await);
        }
    }
    use_other_kinds(&builder, key, &mut complaints).await;
    let [ours, theirs] = [(); 2].map(|()| builder().ttl(TTL).build().unwrap());
    if let Ok(guard) = ours.try_lock(format!("{key}4")).await {
        let waiting = tokio::spawn(theirs.lock(format!("{key}4")).wait(TTL).into_future());
        sleep(Duration::from_millis(50)).await;
        drop(guard);
        complaints.note("wait", waiting.await.unwrap());
    }
    // Records that come with every answer of a node, and that do not.
    for size in [1, 20_000] {
        let redlock = builder().ttl(TTL).build().unwrap();
        let pay = post(async move || "x".repeat(size));
        let app = Router::new().route("/", pay).route_layer(once(&redlock));
        for replayed in [false, true] {
            let key = format!("{key}-{size}");
            let answer = Answer::to(&app, keyed_request(Method::POST, "/", key.as_bytes())).await;
            match &answer.rejection {
                Some(Rejection::Failed(error)) => complaints.0.push(format!("pay: {error}")),
                Some(refused) => complaints.0.push(format!("pay: {refused:?}")),
                None => {
                    let is_recorded = !answer.headers.contains_key("idempotency-recorded");
                    if answer.is_replayed() != replayed || !is_recorded {
                        complaints.0.push(format!("pay: {answer:?}"));
                    }
                }
            }
        }
    }
    complaints.0
}

/// Uses every connection of a node: that for locks, that for subscriptions, and those that read records.
pub async fn use_every_connection(url: &str, builder: impl Fn() -> RedlockBuilder) {
    let complaints = use_all(&builder, "k").await;
    assert!(complaints.is_empty(), "{complaints:#?}");
    let [ours, theirs] = [(); 2].map(|()| polls_rarely(builder()).build().unwrap());
    let held = ours.lock("waited-for").await.unwrap();
    let waiting = tokio::spawn(theirs.lock("waited-for").wait(2 * PATIENCE).into_future());
    wait_until("subscribed", PATIENCE, || channels(url) == 1).await;
    held.release().await.unwrap();
    let granted = timeout(PATIENCE, waiting).await;
    assert!(granted.unwrap().unwrap().unwrap().is_valid());
}

/// Returns the keys with a prefix that a majority has locked, in order: all pages of the list.
pub async fn list_all(redlock: &Redlock, prefix: impl Into<LockKey>) -> Vec<LockKey> {
    let (prefix, mut keys) = (prefix.into(), Vec::new());
    let mut cursor = Some(ListCursor::default());
    while let Some(from) = cursor {
        let page = redlock.list(&prefix, from).await.unwrap();
        keys.extend(page.locks.into_iter().map(|lock| lock.key));
        cursor = page.next;
    }
    keys.sort();
    keys
}

/// Returns how many locks of a server are subscribed to.
fn channels(url: &str) -> usize {
    let mut connection = Client::open(url).unwrap().get_connection().unwrap();
    let channels = cmd("PUBSUB").arg("CHANNELS").query(&mut connection);
    channels
        .map(|channels: Vec<String>| channels.len())
        .unwrap()
}

/// Returns why the only node does not answer.
pub async fn why_unreachable(builder: RedlockBuilder) -> String {
    let refused = builder.build().unwrap().try_lock("k").await.unwrap_err();
    assert!(
        matches!(refused, LockError::Unavailable { .. }),
        "{refused:?}"
    );
    refused.to_string()
}

/// Polls so rarely that a waiter that is granted in time was notified.
pub fn polls_rarely(builder: RedlockBuilder) -> RedlockBuilder {
    let retry = Retry::new(Duration::from_millis(10), HOUR);
    builder.retry(retry.poll_interval(HOUR))
}

/// Longer than any step, and short enough for a restart guard that a test can wait for.
pub const TTL: Duration = Duration::from_millis(1500);

const PATIENCE: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);

/// Readers with a writer that waits for them, slots, a key that stays taken, and the requests of operators.
async fn use_other_kinds(
    builder: &impl Fn() -> RedlockBuilder,
    key: &str,
    complaints: &mut Complaints,
) {
    let [ours, theirs] = [(); 2].map(|()| builder().ttl(TTL).build().unwrap());
    let read = ours.try_lock(format!("{key}5")).shared().await;
    if let Some(reader) = complaints.note("read", read) {
        complaints.note("extend a reader", reader.extend(TTL).await);
        for node in ours.inspect(format!("{key}5")).await.nodes {
            complaints.note("inspect", node.outcome);
        }
        let writing = theirs.lock(format!("{key}5")).wait(2 * TTL).into_future();
        let writing = tokio::spawn(writing);
        sleep(Duration::from_millis(50)).await;
        complaints.note("release a reader", reader.release().await);
        complaints.note("write after a reader", writing.await.unwrap());
    }
    let slot = || ours.try_lock(format!("{key}6")).slots(2);
    let slots = [
        slot().await,
        slot().hold_at_least(TTL / 2).await,
        slot().await,
    ];
    match slots {
        [Ok(one), Ok(other), Err(LockError::Contended { .. })] => {
            for guard in [one, other] {
                complaints.note("release a slot", guard.release().await);
            }
        }
        slots => complaints.0.push(format!("slots: {slots:?}")),
    }
    complaints.note("revoke", ours.revoke(format!("{key}6")).await);
    complaints.note("list", ours.list("nothing", ListCursor::default()).await);
}
