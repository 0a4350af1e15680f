//! A router that reports the health of the nodes.

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, StatusCode};

use crate::lock::{GroupHealth, Health, NodeHealth, Redlock};
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
///
/// If there are several groups, `groups` has the same of each, and 200 means that a majority of one group may vote: the
/// failure of another group is none of this process, so an orchestrator must not restart it or take it out of service.
impl IntoResponse for Health {
    fn into_response(self) -> Response {
        let groups: Vec<String> = self.groups.iter().map(group).collect();
        let groups = match groups.len() {
            0 | 1 => String::new(),
            _ => format!(r#","groups":[{}]"#, groups.join(",")),
        };
        let body = format!(
            r#"{{"status":"{}","quorum":{},"needed":{},"nodes":{}{groups}}}"#,
            self.readiness(),
            self.has_quorum(),
            self.needed,
            nodes(&self.nodes)
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

fn group(health: &GroupHealth) -> String {
    format!(
        r#"{{"group":"{}","status":"{}","quorum":{},"needed":{},"nodes":{}}}"#,
        escape_json(&health.name),
        health.readiness(),
        health.has_quorum(),
        health.needed,
        nodes(&health.nodes)
    )
}

fn nodes(nodes: &[NodeHealth]) -> String {
    let nodes: Vec<String> = nodes.iter().map(node).collect();
    format!("[{}]", nodes.join(","))
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
