//! Everything that the crate does with a server, to see whether all of it works there.

use std::future::IntoFuture;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::routing::post;
use tokio::time::timeout;
use tower::ServiceExt;
use tower_redlock::deadpool_redis::redis::{Client, cmd};
use tower_redlock::{
    IdempotencyLayer, ListCursor, LockError, LockKey, NodeState, Redlock, RedlockBuilder,
    Rejection, Retry, scope,
};

use crate::waiting::wait_until;

/// Locks a key that is free, and releases it on a majority.
pub async fn lock_and_release(redlock: &Redlock, key: impl Into<LockKey>) {
    let guard = redlock.try_lock(key).await.unwrap();
    guard.release().await.unwrap();
}

/// Locks, waits, contends, extends, releases and records, and returns what went wrong.
pub async fn use_all(builder: impl Fn() -> RedlockBuilder, key: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    for fencing in [true, false] {
        let redlock = builder().fencing(fencing).ttl(TTL).build().unwrap();
        for node in redlock.health().await.nodes {
            if let NodeState::Unreachable { why, .. } = node.state {
                complaints.push(format!("health: {}: {why}", node.node));
            }
        }
        for keys in [
            vec![format!("{key}1")],
            vec![format!("{key}2"), format!("{key}3")],
        ] {
            let keys = keys.into_iter().map(|key| format!("{key}{fencing}"));
            let guard = match redlock.lock_all(keys).wait(Duration::ZERO).await {
                Ok(guard) => guard,
                Err(error) => {
                    complaints.push(format!("lock: {error}"));
                    continue;
                }
            };
            let key = guard.key().clone();
            if let Err(error) = redlock.try_lock(key).await
                && !matches!(error, LockError::Contended { .. })
            {
                complaints.push(format!("contend: {error}"));
            }
            if let Err(error) = guard.extend(TTL).await {
                complaints.push(format!("extend: {error}"));
            }
            if let Err(error) = guard.release().await {
                complaints.push(format!("release: {error}"));
            }
        }
    }
    use_other_kinds(&builder, key, &mut complaints).await;
    let [ours, theirs] = [(); 2].map(|()| builder().ttl(TTL).build().unwrap());
    if let Ok(guard) = ours.try_lock(format!("{key}4")).await {
        let waiting = tokio::spawn(theirs.lock(format!("{key}4")).wait(TTL).into_future());
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(guard);
        if let Err(error) = waiting.await.unwrap() {
            complaints.push(format!("wait: {error}"));
        }
    }
    // Records that come with every answer of a node, and that do not.
    for size in [1, 20_000] {
        let redlock = builder().ttl(TTL).build().unwrap();
        let layer = IdempotencyLayer::new(redlock, scope::public());
        let pay = post(async move || "x".repeat(size));
        let app = Router::new().route("/", pay).route_layer(layer);
        for replayed in [false, true] {
            let request = Request::post("/").header("idempotency-key", format!("{key}-{size}"));
            let request = request.body(Body::empty()).unwrap();
            let Ok(answer) = app.clone().oneshot(request).await;
            match answer.extensions().get() {
                Some(Rejection::Failed(error)) => complaints.push(format!("pay: {error}")),
                Some(refused) => complaints.push(format!("pay: {refused:?}")),
                None => {
                    let has = |name| answer.headers().contains_key(name);
                    if has("idempotency-replayed") != replayed || has("idempotency-recorded") {
                        complaints.push(format!("pay: {answer:?}"));
                    }
                }
            }
        }
    }
    complaints
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
    complaints: &mut Vec<String>,
) {
    let [ours, theirs] = [(); 2].map(|()| builder().ttl(TTL).build().unwrap());
    let complain = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    match ours.try_lock(format!("{key}5")).shared().await {
        Ok(reader) => {
            if let Err(error) = reader.extend(TTL).await {
                complaints.push(complain("extend a reader", &error));
            }
            let seen = ours.inspect(format!("{key}5")).await;
            for error in seen
                .nodes
                .iter()
                .filter_map(|node| node.outcome.as_ref().err())
            {
                complaints.push(complain("inspect", error));
            }
            let writing = theirs.lock(format!("{key}5")).wait(2 * TTL).into_future();
            let writing = tokio::spawn(writing);
            tokio::time::sleep(Duration::from_millis(50)).await;
            if let Err(error) = reader.release().await {
                complaints.push(complain("release a reader", &error));
            }
            if let Err(error) = writing.await.unwrap() {
                complaints.push(complain("write after a reader", &error));
            }
        }
        Err(error) => complaints.push(complain("read", &error)),
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
                if let Err(error) = guard.release().await {
                    complaints.push(complain("release a slot", &error));
                }
            }
        }
        slots => complaints.push(format!("slots: {slots:?}")),
    }
    if let Err(error) = ours.revoke(format!("{key}6")).await {
        complaints.push(complain("revoke", &error));
    }
    if let Err(error) = ours.list("nothing", ListCursor::default()).await {
        complaints.push(complain("list", &error));
    }
}
