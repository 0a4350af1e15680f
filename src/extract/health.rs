//! A router that reports the health of the nodes.

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, StatusCode};

use crate::lock::{Health, NodeHealth, Redlock};
use crate::middleware::escape_json;
use crate::node::{NodeState, whole_seconds};

/// Creates a router that answers `GET /` with the [`Health`] of the nodes, for a load balancer or an
/// orchestrator: 200 while locks can be acquired, else 503.
///
/// The response shows the addresses of the nodes, so do not expose it to clients.
///
/// ```
/// use axum::Router;
/// use tower_redlock::{Redlock, health_router};
///
/// let redlock = Redlock::in_memory(3);
/// let app: Router = Router::new().nest("/readyz", health_router(redlock));
/// ```
pub fn health_router(redlock: Redlock) -> Router {
    let health = move || {
        let redlock = redlock.clone();
        async move { redlock.health().await }
    };
    Router::new().route("/", get(health))
}

/// JSON with `status` (a [`Readiness`](crate::Readiness) in lower case), `quorum`, `needed` and
/// `nodes`; 200 while a majority may vote, else 503. Caches must not store it.
impl IntoResponse for Health {
    fn into_response(self) -> Response {
        let nodes: Vec<String> = self.nodes.iter().map(node).collect();
        let body = format!(
            r#"{{"status":"{}","quorum":{},"needed":{},"nodes":[{}]}}"#,
            self.readiness(),
            self.has_quorum(),
            self.needed,
            nodes.join(",")
        );
        let status = if self.has_quorum() {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        let headers = [
            (CONTENT_TYPE, HeaderValue::from_static("application/json")),
            (CACHE_CONTROL, HeaderValue::from_static("no-store")),
        ];
        (status, headers, body).into_response()
    }
}

fn node(health: &NodeHealth) -> String {
    let state = match &health.state {
        NodeState::Up => {
            let latency = health.latency.unwrap_or_default().as_micros();
            format!(r#""state":"up","latency_us":{latency}"#)
        }
        NodeState::Quarantined { left } => {
            let seconds = whole_seconds(*left);
            format!(r#""state":"quarantined","seconds_left":{seconds}"#)
        }
        NodeState::Unreachable { why, since } => format!(
            r#""state":"unreachable","since_seconds":{},"why":"{}""#,
            since.as_secs(),
            escape_json(why)
        ),
    };
    format!(r#"{{"node":"{}",{state}}}"#, escape_json(&health.node))
}
