//! Refusals as responses of an OpenAPI document, by utoipa.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use utoipa::openapi::schema::Schema;
use utoipa::openapi::{RefOr, Response};
use utoipa::{PartialSchema, ToSchema};

use crate::lock::LockError;
use crate::middleware::buffer::BufferBodyLayer;
use crate::middleware::layer::RedlockLayer;
use crate::middleware::rejection::{ROWS, Rejection, Row};

/// The responses of an operation, by status.
pub(crate) type Responses = BTreeMap<String, RefOr<Response>>;

into_responses! {
    /// All refusals of this crate.
    Rejection: _,

    /// The refusals of the layer, with its default `contended_status` and `rejection`.
    ///
    /// 429 is for a layer with [`max_concurrent`](Self::max_concurrent). The responses of another
    /// [`contended_status`](Self::contended_status) are those of a type of your own:
    ///
    /// ```
    /// use std::collections::BTreeMap;
    ///
    /// use tower_redlock::RedlockLayer;
    /// use utoipa::IntoResponses;
    /// use utoipa::openapi::{RefOr, Response};
    ///
    /// struct OrderLock;
    ///
    /// impl IntoResponses for OrderLock {
    ///     fn responses() -> BTreeMap<String, RefOr<Response>> {
    ///         let mut responses = RedlockLayer::responses();
    ///         responses.remove("429");
    ///         let contended = responses.remove("423");
    ///         responses.extend(contended.map(|response| ("409".to_owned(), response)));
    ///         responses
    ///     }
    /// }
    ///
    /// #[utoipa::path(post, path = "/orders/{id}/ship", responses((status = 200), OrderLock))]
    /// async fn ship() {}
    /// # let responses = OrderLock::responses();
    /// # assert!(responses.contains_key("409") && !responses.contains_key("423"));
    /// ```
    ///
    /// # Design
    ///
    /// utoipa keeps one response for each status, the last of an operation. So that several layers can be named in any
    /// order, the response for a status has the codes of all layers. That of a `contended_status` takes the place of the
    /// response with its status.
    RedlockLayer: 400 | 423 | 429 | 500 | 503,

    /// The refusals of the layer, with its default `rejection`; see those of a [`RedlockLayer`].
    BufferBodyLayer: 400 | 408 | 413,

    /// The responses of a handler that returns the error.
    LockError: 400 | 423 | 500 | 503,
}

impl PartialSchema for Rejection {
    fn schema() -> RefOr<Schema> {
        serde_json::from_value(problem(ROWS)).expect("this is a schema")
    }
}

/// The problem details (RFC 9457) in the body of a refusal.
impl ToSchema for Rejection {}

/// Returns the responses for the statuses that are selected.
pub(crate) fn responses(has: impl Fn(u16) -> bool) -> Responses {
    let mut by_status: BTreeMap<u16, Vec<Row>> = BTreeMap::new();
    for row in ROWS.iter().filter(|row| has(row.0)) {
        by_status.entry(row.0).or_default().push(*row);
    }
    let responses = by_status.into_iter();
    responses
        .map(|(status, rows)| (status.to_string(), response(&rows).into()))
        .collect()
}

/// Returns the response for a status with these rows.
fn response(rows: &[Row]) -> Response {
    let titles: BTreeSet<&str> = rows.iter().map(|row| row.3).collect();
    let titles: Vec<&str> = titles.into_iter().collect();
    let mut response = json!({
        "description": titles.join("; "),
        "content": { "application/problem+json": { "schema": problem(rows) } },
    });
    let retried = rows.iter().filter(|row| row.4).map(|row| row.2);
    let retried: Vec<&str> = retried.collect();
    if !retried.is_empty() {
        let after = retried.join(", ");
        response["headers"]["Retry-After"] = json!({
            "description": format!("Seconds until a retry makes sense, after {after}"),
            "schema": { "type": "integer", "minimum": 1 },
        });
    }
    serde_json::from_value(response).expect("this is an OpenAPI response")
}

/// Returns the schema of the problem details of these rows.
fn problem(rows: &[Row]) -> Value {
    let codes: BTreeSet<&str> = rows.iter().map(|row| row.2).collect();
    let mut problem = json!({
        "type": "object",
        "description": "Problem details (RFC 9457)",
        "properties": {
            "type": { "type": "string", "format": "uri" },
            "title": { "type": "string" },
            "status": { "type": "integer" },
            "detail": { "type": "string" },
            "code": { "type": "string", "enum": codes },
        },
        "required": ["type", "title", "status", "detail", "code"],
    });
    if codes.contains("lock-contended") {
        // Only a layer with `expose_holder` names it.
        problem["properties"]["holder"] = json!({
            "type": "object",
            "description": "Who holds the lock, if that is known and may be told",
            "properties": {
                "label": { "type": ["string", "null"], "description": "The label of the process" },
                "note": { "type": ["string", "null"], "description": "The note of the lock" },
            },
        });
    }
    problem
}
