//! HTTP servers over shared Redis nodes whose handler counts payments.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::response::IntoResponse;
use axum::routing::post;
use support::http::{request, serve};
use support::{Answer, Cluster, Executed, ms, once, secs, until};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tower_redlock::{IdempotencyLayer, Redlock, RestartGuard};

/// Pays once per key, which is counted over all servers of a test.
pub(crate) fn routes(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move |Query(form): Query<Form>| {
        let number = executed.one_more();
        sleep(ms(form.ms)).await;
        // Not text: what is replayed must be the same bytes.
        let mut body: Vec<u8> = (0..=u8::MAX).collect();
        body.extend(format!("payment {number} {:016x}", fastrand::u64(..)).bytes());
        body.resize(body.len() + form.size, b'x');
        ([("x-payment", number.to_string())], body).into_response()
    };
    Router::new().route("/payments", post(pay))
}

#[derive(Debug, serde::Deserialize)]
struct Form {
    #[serde(default)]
    ms: u64,
    #[serde(default)]
    size: usize,
}

/// One of the servers that share the nodes.
pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    pub(crate) serving: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(cluster: &Cluster, bank: &Executed) -> Self {
        Self::start_with(cluster, bank, NODE_TIMEOUT, |layer| layer).await
    }

    /// Starts it and waits until it is connected to all nodes that run.
    pub(crate) async fn start_with(
        cluster: &Cluster,
        bank: &Executed,
        node_timeout: Duration,
        set: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
    ) -> Self {
        let running = cluster.servers.iter().filter(|server| server.is_running());
        let redlock = redlock(cluster.urls(), running.count(), node_timeout).await;
        let layer = once(&redlock);
        Self::serve(routes(bank).route_layer(set(layer))).await
    }

    pub(crate) async fn serve(app: Router) -> Self {
        let (addr, serving, _) = serve(app).await;
        Self { addr, serving }
    }

    pub(crate) async fn pay(&self, path: &str, key: &str) -> Answer {
        pay(self.addr, path, key).await
    }

    /// Sends a duplicate that must be answered with what the first was.
    #[track_caller]
    pub(crate) fn replays(
        &self,
        path: &str,
        key: &str,
        first: &Answer,
    ) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        async move {
            let again = self.pay(path, key).await;
            assert!(again.is_replayed(), "{caller}: {}", said(&again));
            assert_eq!(again.as_recorded(), first.as_recorded(), "{caller}");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Makes a client and waits until it is connected to as many nodes as run.
pub(crate) async fn redlock(urls: Vec<String>, running: usize, node_timeout: Duration) -> Redlock {
    let redlock = Redlock::builder()
        .urls(urls)
        .node_timeout(node_timeout)
        .restart_guard(RestartGuard::Off)
        .build()
        .expect("the settings are valid");
    until("all nodes are reached", PATIENCE, || async {
        redlock.health().await.up() >= running
    })
    .await;
    redlock
}

pub(crate) async fn pay(addr: SocketAddr, path: &str, key: &str) -> Answer {
    request(addr, "POST", path, &[(KEY, key)], b"amount=5").await
}

/// An answer, for the messages of this test.
pub(crate) fn said(answer: &Answer) -> String {
    let text = answer.body.escape_ascii().to_string();
    format!("{} {text:.300}", answer.status)
}

/// Whether it was executed for this answer, and recorded.
pub(crate) fn is_executed(answer: &Answer) -> bool {
    let marks = ["idempotency-replayed", "idempotency-recorded"];
    answer.status == 200 && marks.iter().all(|mark| answer.header(mark).is_none())
}

pub(crate) fn is_contended(answer: &Answer) -> bool {
    answer.status == 409 && answer.json()["code"] == "request-in-progress"
}

/// A busy machine is no outage.
pub(crate) const NODE_TIMEOUT: Duration = ms(300);

/// How long anything may take that must happen.
pub(crate) const PATIENCE: Duration = secs(10);

pub(crate) const KEY: &str = "idempotency-key";

/// How often a crowd without a winner tries again.
pub(crate) const RETRIES: usize = 20;
