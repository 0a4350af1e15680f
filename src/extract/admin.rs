//! Routers for operators: the health of the nodes, and whether a key is held.

use std::time::UNIX_EPOCH;

use axum::extract::{FromRequestParts, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::StatusCode;
use http::header::CACHE_CONTROL;
use http::request::Parts;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use crate::lock::{GroupHealth, Health, LockError, NodeHealth, Redlock};
use crate::node::{NodeState, whole_seconds};
use crate::once::Inspection;
use crate::protocol::message::KeyState;
use crate::protocol::{Holder, LockKey};

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
    let health = async |State(redlock): State<Redlock>| redlock.health().await;
    Router::new().route("/", get(health)).with_state(redlock)
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
        answer(status, &body)
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

/// Creates a router for operators, which must stand behind the authentication of the application: it has none of its
/// own, and every caller who reaches it can free every lock.
///
/// | request | response |
/// |---|---|
/// | `GET /` | the health of the nodes, as [`health_router`](crate::health_router) |
/// | `GET /locks/{key}` | what each node, and a majority, knows of the key; see [`Redlock::inspect`] |
/// | `DELETE /locks/{key}` | frees the key; see [`Redlock::revoke`] |
///
/// The parts of a key are segments of the path, as in `/locks/account/7` for the [`LockKey`](crate::LockKey) of the
/// tuple `("account", 7)`; one segment is a plain key, or the text of any key, such as `7:account,1:7,`. Segments are
/// percent-encoded. A key that is not UTF-8 has no path. The bodies are JSON, and show the addresses of the nodes but no
/// owner values. Caches must not store them.
///
/// ```
/// use axum::Router;
/// use axum::extract::Request;
/// use axum::http::StatusCode;
/// use axum::middleware::{Next, from_fn};
/// use axum::response::Response;
/// use tower_redlock::{Redlock, admin_router};
///
/// /// The authentication of the application.
/// async fn for_operators(request: Request, next: Next) -> Result<Response, StatusCode> {
///     match request.headers().get("authorization") {
///         Some(value) if value == "Bearer secret" => Ok(next.run(request).await),
///         _ => Err(StatusCode::UNAUTHORIZED),
///     }
/// }
///
/// let redlock = Redlock::in_memory(3);
/// let admin = admin_router(redlock).layer(from_fn(for_operators));
/// let app: Router = Router::new().nest("/admin", admin);
/// ```
pub fn admin_router<S: Clone + Send + Sync + 'static>(redlock: Redlock) -> Router<S> {
    let locks = Router::new().route("/locks/{*key}", get(inspect).delete(revoke));
    health_router(redlock.clone()).merge(locks.with_state(redlock))
}

/// The key that a path names, and its text.
struct KeyOfPath(LockKey, String);

impl<S: Sync> FromRequestParts<S> for KeyOfPath {
    type Rejection = StatusCode;

    /// From the path itself: a captured one is decoded, and a slash within a part would be one between two.
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        let key = parts.uri.path().split_once("/locks/");
        let segments = key.map_or("", |(_, key)| key).split('/');
        let decoded = segments.map(|segment| percent_decode_str(segment).decode_utf8());
        let decoded: Result<Vec<_>, _> = decoded.collect();
        let decoded = decoded.map_err(|_| StatusCode::BAD_REQUEST)?;
        let key = match &*decoded {
            [text] => LockKey::from(&**text),
            parts => LockKey::from_parts(parts.iter().map(|part| part.as_bytes())),
        };
        let text = String::from_utf8_lossy(key.as_bytes()).into_owned();
        Ok(Self(key, text))
    }
}

async fn inspect(State(redlock): State<Redlock>, KeyOfPath(key, text): KeyOfPath) -> Response {
    let inspection = redlock.inspect(key).await;
    let status = match inspection.state() {
        Some(_) => StatusCode::OK,
        None if inspection.is_of_invalid_key() => StatusCode::BAD_REQUEST,
        // No majority agrees, for whatever reason.
        None => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut shown = body(&inspection);
    shown["key"] = json!(text);
    answer(status, &shown)
}

async fn revoke(State(redlock): State<Redlock>, KeyOfPath(key, text): KeyOfPath) -> Response {
    match redlock.revoke(key).await {
        Ok(revoked) => {
            let failures = revoked.failures.iter().map(ToString::to_string);
            let body = json!({
                "key": text,
                "was_held": revoked.was_held(),
                "nodes_held": revoked.held,
                "failures": failures.collect::<Vec<_>>(),
            });
            answer(StatusCode::OK, &body)
        }
        Err(error) => {
            let status = match error {
                LockError::Key(_) => StatusCode::BAD_REQUEST,
                _ => StatusCode::SERVICE_UNAVAILABLE,
            };
            let body = json!({ "key": text, "error": error.to_string() });
            answer(status, &body)
        }
    }
}

fn body(inspection: &Inspection) -> Value {
    let nodes = inspection.nodes.iter().map(|node| match &node.outcome {
        Ok(known) => {
            let mut entry = state(Some(known.state));
            entry["node"] = json!(&*node.node);
            entry["fencing_token"] = json!(known.fencing_token.map(|token| token.as_u64()));
            entry["recorded"] = json!(known.is_recorded);
            entry
        }
        Err(failure) => json!({
            "node": &*node.node,
            "state": "unknown",
            "error": failure.to_string(),
        }),
    });
    let mut body = state(inspection.state());
    body["group"] = json!(&*inspection.group);
    body["fencing_token"] = json!(inspection.fencing_token().map(|token| token.as_u64()));
    body["recorded"] = json!(inspection.is_recorded());
    body["holders"] = inspection.holders().iter().map(holder).collect();
    body["needed"] = json!(inspection.needed);
    body["nodes"] = nodes.collect();
    if let Some(next) = &inspection.next {
        body["next"] = self::body(next);
    }
    body
}

fn holder(holder: &Holder) -> Value {
    let since = holder.since().duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_default().as_secs();
    json!({ "label": holder.label(), "note": holder.note(), "since": since })
}

fn state(state: Option<KeyState>) -> Value {
    let millis = |left: Option<std::time::Duration>| {
        left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
    };
    match state {
        Some(KeyState::Free) => json!({ "state": "free" }),
        Some(KeyState::Held { left }) => json!({ "state": "held", "left_ms": millis(left) }),
        Some(KeyState::Shared { readers, left }) => {
            json!({ "state": "shared", "readers": readers, "left_ms": millis(left) })
        }
        None => json!({ "state": "unknown" }),
    }
}

fn answer(status: StatusCode, body: &Value) -> Response {
    (status, [(CACHE_CONTROL, "no-store")], Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_key_that_never_expires_has_null_left() {
        let held = |left| state(Some(KeyState::Held { left }));
        assert_eq!(held(None), json!({ "state": "held", "left_ms": null }));
        let left = Some(Duration::from_millis(1_500));
        assert_eq!(held(left), json!({ "state": "held", "left_ms": 1_500 }));
    }

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
