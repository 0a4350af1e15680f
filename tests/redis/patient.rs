//! Builders without the restart guard and with patience for a busy machine, and payments over them.

use std::time::Duration;

use axum::extract::Request;
use axum::routing::post;
use axum::{Extension, Router};
use support::{Answer, Executed, ms, request_with, secs, until};
use tokio::runtime::{Builder, Runtime};
use tower_redlock::{
    ExecutionHandle, LockError, LockKey, NodeFailure, Redlock, RedlockBuilder, RestartGuard,
};

pub(crate) const LONGEST: Duration = secs(15);

/// Without the restart guard, and with patience: a busy machine may be slow.
pub(crate) fn builder(urls: impl IntoIterator<Item = String>) -> RedlockBuilder {
    let builder = Redlock::builder().urls(urls).node_timeout(ms(400));
    builder.restart_guard(RestartGuard::Off)
}

/// Why nodes gave no vote.
#[track_caller]
pub(crate) fn failures(refused: &LockError) -> &[NodeFailure] {
    let LockError::Unavailable { nodes, .. } = refused else {
        panic!("not unavailable: {refused:?}");
    };
    nodes
}

/// Waits until a key is granted, and releases it.
pub(crate) async fn until_locked(redlock: &Redlock, key: impl Into<LockKey>) {
    let key = key.into();
    until("locked", LONGEST, || async {
        match redlock.try_lock(&key).await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
}

pub(crate) fn many_threads() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
}

/// A runtime that does nothing but while it is blocked on.
pub(crate) fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

pub(crate) fn name_of(key: &str) -> String {
    format!("redlock:{{{key}}}")
}

/// Counts an execution when the handler begins, and answers with the validity that is left.
pub(crate) fn app_of(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move |Extension(execution): Extension<ExecutionHandle>| {
        executed.one_more();
        format!("{}", execution.valid_for().as_millis())
    };
    Router::new().route("/", post(pay))
}

pub(crate) fn request(key: &str) -> Request {
    request_with("POST", "/", &[("idempotency-key", key)])
}

pub(crate) async fn pay(app: &Router, key: &str) -> Answer {
    Answer::to(app, request(key)).await
}

pub(crate) const TTL: Duration = secs(1);

pub(crate) const WINDOW: Duration = secs(2);

pub(crate) fn guarded(urls: impl IntoIterator<Item = String>) -> RedlockBuilder {
    let builder = builder(urls).ttl(TTL);
    builder.restart_guard(RestartGuard::For(WINDOW))
}
