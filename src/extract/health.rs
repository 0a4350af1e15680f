//! A router that reports the health of the nodes.

use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::StatusCode;
use http::header::CACHE_CONTROL;
use serde_json::{Value, json};

use crate::lock::{GroupHealth, Health, NodeHealth, Redlock};
use crate::node::{NodeState, whole_seconds};

/// Creates a router that answers `GET /` with the [`Health`] of the nodes, for a load balancer or an
/// orchestrator: 200 while locks can be acquired, else 503; also 503 once [`Redlock::drain`] was called.
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
pub fn health_router<S: Clone + Send + Sync + 'static>(redlock: Redlock) -> Router<S> {
    let health = move || {
        let redlock = redlock.clone();
        async move { redlock.health().await }
    };
    Router::new().route("/", get(health))
}

/// JSON with `status` (a [`Readiness`](crate::Readiness) in lower case, or `draining`), `quorum`, `needed` and
/// `nodes`; 200 while a majority may vote and the service does not drain, else 503. Caches must not store it.
///
/// If there are several groups, each node has its `group`, and `groups` has the same of each group. 200 then means that
/// a majority of one group may vote: all instances of a service see the same failed group, so taking one out of service
/// helps no request.
impl IntoResponse for Health {
    fn into_response(self) -> Response {
        let is_told = self.groups.len() > 1;
        let nodes = self.groups.iter().flat_map(|group| {
            let name = is_told.then_some(&*group.name);
            group.nodes.iter().map(move |health| node(health, name))
        });
        let mut body = json!({
            "status": self.readiness().to_string(),
            "quorum": self.has_quorum(),
            "needed": self.needed,
            "nodes": nodes.collect::<Vec<_>>(),
        });
        if self.is_draining {
            body["status"] = json!("draining");
        }
        if is_told {
            body["groups"] = self.groups.iter().map(group).collect();
        }
        let status = match self.has_quorum() && !self.is_draining {
            true => StatusCode::OK,
            false => StatusCode::SERVICE_UNAVAILABLE,
        };
        (status, [(CACHE_CONTROL, "no-store")], Json(body)).into_response()
    }
}

fn group(health: &GroupHealth) -> Value {
    json!({
        "group": &*health.name,
        "status": health.readiness().to_string(),
        "quorum": health.has_quorum(),
        "needed": health.needed,
    })
}

/// Returns the health of a node, with the name of its group if there are several.
fn node(health: &NodeHealth, group: Option<&str>) -> Value {
    let mut node = match &health.state {
        NodeState::Up => {
            let latency = health.latency.unwrap_or_default().as_micros();
            json!({ "state": "up", "latency_us": u64::try_from(latency).unwrap_or(u64::MAX) })
        }
        NodeState::Quarantined { left } => {
            json!({ "state": "quarantined", "seconds_left": whole_seconds(*left) })
        }
        NodeState::Unreachable { why, since } => {
            json!({ "state": "unreachable", "since_seconds": since.as_secs(), "why": &**why })
        }
    };
    node["node"] = json!(&*health.node);
    if let Some(group) = group {
        node["group"] = json!(group);
    }
    node
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_state_of_a_node_is_json() {
        let known = |state, latency| NodeHealth {
            node: "redis-\"1\"".into(),
            state,
            latency,
        };
        let up = known(NodeState::Up, Some(Duration::from_micros(1_500)));
        assert_eq!(
            node(&up, None),
            json!({ "node": "redis-\"1\"", "state": "up", "latency_us": 1500 })
        );
        let left = Duration::from_millis(1_001);
        let quarantined = known(NodeState::Quarantined { left }, None);
        assert_eq!(
            node(&quarantined, Some("a\"b")),
            json!({ "node": "redis-\"1\"", "group": "a\"b", "state": "quarantined", "seconds_left": 2 })
        );
        let why = "said \"no\"".into();
        let since = Duration::from_secs(7);
        let unreachable = known(NodeState::Unreachable { why, since }, None);
        assert_eq!(
            node(&unreachable, None),
            json!({ "node": "redis-\"1\"", "state": "unreachable", "since_seconds": 7, "why": "said \"no\"" })
        );
    }
}
