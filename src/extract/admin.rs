//! Routers for operators: the health of the nodes, which keys are held and by whom, and the page that shows it.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::convert::Infallible;
use std::time::{Duration, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{Query, State};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::stream::unfold;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ORIGIN, VARY};
use http::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};

use crate::extract::key_path::{key_of_uri, path_of_key, prefix_of_path};
use crate::lock::{Health, HeldLock, LockError, NodeHealth, Readiness, Redlock};
use crate::node::{NodeState, random_u64, whole_seconds};
use crate::once::{Inspection, ListCursor};
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
        let mut body = summary(self.readiness(), self.has_quorum(), self.needed);
        body["nodes"] = nodes.collect();
        if self.is_draining {
            body["status"] = json!("draining");
        }
        if is_told {
            let groups = self.groups.iter().map(|group| {
                let mut told = summary(group.readiness(), group.has_quorum(), group.needed);
                told["group"] = json!(&*group.name);
                told
            });
            body["groups"] = groups.collect();
        }
        let status = match self.has_quorum() && !self.is_draining {
            true => StatusCode::OK,
            false => StatusCode::SERVICE_UNAVAILABLE,
        };
        answer(status, &body)
    }
}

fn summary(readiness: Readiness, has_quorum: bool, needed: usize) -> Value {
    json!({ "status": readiness.to_string(), "quorum": has_quorum, "needed": needed })
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
/// | `GET /` | the health of the nodes, as [`health_router`](crate::health_router); for a browser, a page that shows all of this |
/// | `GET /held` | the locks of this process, and the keys that its callers wait for: at most 1,000 of each; see [`Redlock::held`] |
/// | `GET /locks?prefix={key}` | the locks on the nodes, as lines of JSON; see [`Redlock::list`] |
/// | `GET /locks/{key}` | what each node, and a majority, knows of the key; see [`Redlock::inspect`] |
/// | `DELETE /locks/{key}` | frees the key; see [`Redlock::revoke`] |
///
/// The parts of a key are segments of the path, as in `/locks/account/7` for the [`LockKey`](crate::LockKey) of the
/// tuple `("account", 7)`; one segment is a plain key, or the text of any key, such as `7:account,1:7,`. Segments are
/// percent-encoded. A plain key `.` or `..` has no path that clients keep. The bodies are JSON, and show the addresses of the nodes but no owner values; `path` in them is the
/// path of a key. Caches must not store them.
///
/// A list has a line for each page, with `locks` and `complete`, or with `error` if no majority of the nodes answers. It
/// goes on as fast as the client reads. The prefix `job` selects every key that begins so, and `job/` the keys whose first
/// part is `job`.
///
/// A request of a browser frees a key only if it has the header `X-Requested-With`, which neither a form nor, without the
/// permission of the application's CORS rules, a script of another site can send. Otherwise it is answered with 403.
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
    Router::new()
        .route("/", get(home))
        .route("/held", get(held))
        .route("/locks", get(list))
        .route("/locks/{*key}", get(inspect).delete(revoke))
        .with_state(redlock)
}

async fn home(State(redlock): State<Redlock>, headers: HeaderMap) -> Response {
    let accepted = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let is_browser = accepted.is_some_and(|accepted| accepted.contains("text/html"));
    let response = match is_browser {
        true => page(),
        false => redlock.health().await.into_response(),
    };
    ([(VARY, "accept")], response).into_response()
}

/// The page, whose script gets all that it shows from the other routes.
fn page() -> Response {
    let nonce = format!("{:016x}", random_u64());
    // Its own style and script, and no other: whatever a key or a label may contain, none of it runs. It cannot be framed,
    // so that no other site leads the operator's clicks.
    let policy = format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    );
    let page = Html(include_str!("admin.html").replace("{nonce}", &nonce));
    let headers = [
        (CACHE_CONTROL, "no-store"),
        (CONTENT_SECURITY_POLICY, &*policy),
    ];
    (headers, page).into_response()
}

async fn held(State(redlock): State<Redlock>) -> Response {
    let (locks, mut waited) = (redlock.held(), redlock.waited_for());
    waited.sort_by_key(|(_, callers)| Reverse(*callers));
    let waited = waited
        .iter()
        .take(MOST_SHOWN)
        .map(|(key, callers)| with(json!({ "callers": callers }), key));
    let body = json!({
        "count": locks.len(),
        "held": locks.iter().take(MOST_SHOWN).map(held_lock).collect::<Vec<_>>(),
        "waited_for": waited.collect::<Vec<_>>(),
    });
    answer(StatusCode::OK, &body)
}

fn held_lock(lock: &HeldLock) -> Value {
    let keys = lock.keys.as_slice().iter();
    json!({
        "keys": keys.map(|key| with(json!({}), key)).collect::<Vec<_>>(),
        "shared": lock.is_shared,
        "slot": lock.slot,
        "fencing_token": lock.fencing_token.map(|token| token.as_u64()),
        "held_ms": millis(lock.held_for),
        "valid_ms": millis(lock.valid_for),
        "resource": lock.resource,
        "holders": lock.holder.iter().map(holder).collect::<Vec<_>>(),
    })
}

/// Answers with a line for each page. The next page is asked for when the client has taken the last one.
async fn list(
    State(redlock): State<Redlock>,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    let prefix = prefix_of_path(query.get("prefix").map_or("", String::as_str));
    let first = Some((redlock, prefix, ListCursor::default()));
    let lines = unfold(first, async |at| {
        let (redlock, prefix, cursor) = at?;
        let (line, next) = match redlock.list(&prefix, cursor).await {
            Ok(page) => {
                let locks = page.locks.iter().map(|lock| with(known(lock), &lock.key));
                let locks: Vec<_> = locks.collect();
                let line = json!({ "locks": locks, "complete": page.next.is_none() });
                (line, page.next)
            }
            Err(error) => (json!({ "error": error.to_string() }), None),
        };
        let next = next.map(|cursor| (redlock, prefix, cursor));
        Some((Ok::<_, Infallible>(format!("{line}\n")), next))
    });
    let headers = [
        (CACHE_CONTROL, "no-store"),
        (CONTENT_TYPE, "application/x-ndjson"),
    ];
    (headers, Body::from_stream(lines)).into_response()
}

async fn inspect(State(redlock): State<Redlock>, uri: Uri) -> Response {
    let key = key_of_uri(&uri);
    let inspection = redlock.inspect(&key).await;
    let status = match inspection.state() {
        Some(_) => StatusCode::OK,
        None if !redlock.is_valid_key(&key) => StatusCode::BAD_REQUEST,
        // No majority agrees, for whatever reason.
        None => StatusCode::SERVICE_UNAVAILABLE,
    };
    answer(status, &with(body(&inspection), &key))
}

async fn revoke(State(redlock): State<Redlock>, uri: Uri, headers: HeaderMap) -> Response {
    let key = key_of_uri(&uri);
    // Browsers send one of the first two with each request that changes something, and let no script change them.
    let is_of_browser = headers.contains_key(ORIGIN) || headers.contains_key("sec-fetch-site");
    if is_of_browser && !headers.contains_key("x-requested-with") {
        let why = "a request of a browser must have the header X-Requested-With, so that it is of no other site";
        return answer(StatusCode::FORBIDDEN, &with(json!({ "error": why }), &key));
    }
    let revoked = redlock.revoke(&key).await;
    let status = match &revoked {
        Ok(_) => StatusCode::OK,
        Err(LockError::Key(_)) => StatusCode::BAD_REQUEST,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = match revoked {
        Ok(revoked) => json!({
            "was_held": revoked.was_held(),
            "nodes_held": revoked.held,
            "failures": revoked.failures.iter().map(ToString::to_string).collect::<Vec<_>>(),
        }),
        Err(error) => json!({ "error": error.to_string() }),
    };
    answer(status, &with(body, &key))
}

fn body(inspection: &Inspection) -> Value {
    let nodes = inspection.nodes.iter().map(|node| {
        let mut entry = state(node.outcome.as_ref().ok().map(|known| known.state));
        entry["node"] = json!(&*node.node);
        match &node.outcome {
            Ok(known) => {
                entry["fencing_token"] = json!(known.fencing_token.map(|token| token.as_u64()));
                entry["recorded"] = json!(known.is_recorded);
            }
            Err(failure) => entry["error"] = json!(failure.to_string()),
        }
        entry
    });
    let mut body = known(inspection);
    body["needed"] = json!(inspection.needed);
    body["nodes"] = nodes.collect();
    if let Some(next) = &inspection.next {
        body["next"] = self::body(next);
    }
    body
}

/// What a majority knows.
fn known(inspection: &Inspection) -> Value {
    let mut known = state(inspection.state());
    known["group"] = json!(&*inspection.group);
    known["fencing_token"] = json!(inspection.fencing_token().map(|token| token.as_u64()));
    known["recorded"] = json!(inspection.is_recorded());
    known["holders"] = inspection.holders().iter().map(holder).collect();
    known
}

/// Adds a key to what is known of it.
fn with(mut body: Value, key: &LockKey) -> Value {
    body["key"] = json!(String::from_utf8_lossy(key.as_bytes()));
    body["path"] = json!(path_of_key(key));
    body
}

fn holder(holder: &Holder) -> Value {
    let since = holder.since();
    // By two wall clocks.
    let age = since.elapsed().unwrap_or_default().as_secs();
    let since = since.duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_default().as_secs();
    json!({ "label": holder.label(), "note": holder.note(), "since": since, "since_seconds": age })
}

fn state(state: Option<KeyState>) -> Value {
    match state {
        Some(KeyState::Free) => json!({ "state": "free" }),
        Some(KeyState::Held { left }) => json!({ "state": "held", "left_ms": left.map(millis) }),
        Some(KeyState::Shared { readers, left }) => {
            json!({ "state": "shared", "readers": readers, "left_ms": left.map(millis) })
        }
        None => json!({ "state": "unknown" }),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn answer(status: StatusCode, body: &Value) -> Response {
    (status, [(CACHE_CONTROL, "no-store")], Json(body)).into_response()
}

/// How many locks of this process, and keys that its callers wait for, a response has at most.
const MOST_SHOWN: usize = 1_000;

#[cfg(test)]
mod tests {
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
