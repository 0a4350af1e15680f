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
        let nodes: Vec<String> = nodes.collect();
        let groups: Vec<String> = self.groups.iter().map(group).collect();
        let groups = match is_told {
            true => format!(r#","groups":[{}]"#, groups.join(",")),
            false => String::new(),
        };
        let draining = self.is_draining.then(|| "draining".to_owned());
        let readiness = draining.unwrap_or_else(|| self.readiness().to_string());
        let body = format!(
            r#"{{"status":"{readiness}","quorum":{},"needed":{},"nodes":[{}]{groups}}}"#,
            self.has_quorum(),
            self.needed,
            nodes.join(",")
        );
        let status = if self.has_quorum() && !self.is_draining {
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
        r#"{{"group":"{}","status":"{}","quorum":{},"needed":{}}}"#,
        escape_json(&health.name),
        health.readiness(),
        health.has_quorum(),
        health.needed
    )
}

/// Returns the health of a node, with the name of its group if there are several.
fn node(health: &NodeHealth, group: Option<&str>) -> String {
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
    let group = group.map(|name| format!(r#""group":"{}","#, escape_json(name)));
    let group = group.unwrap_or_default();
    format!(
        r#"{{"node":"{}",{group}{state}}}"#,
        escape_json(&health.node)
    )
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
            r#"{"node":"redis-\"1\"","state":"up","latency_us":1500}"#
        );
        let left = Duration::from_millis(1_001);
        let quarantined = known(NodeState::Quarantined { left }, None);
        assert_eq!(
            node(&quarantined, Some("a\"b")),
            r#"{"node":"redis-\"1\"","group":"a\"b","state":"quarantined","seconds_left":2}"#
        );
        let why = "said \"no\"".into();
        let since = Duration::from_secs(7);
        let unreachable = known(NodeState::Unreachable { why, since }, None);
        assert_eq!(
            node(&unreachable, None),
            r#"{"node":"redis-\"1\"","state":"unreachable","since_seconds":7,"why":"said \"no\""}"#
        );
    }
}
