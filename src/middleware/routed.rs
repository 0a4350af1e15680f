//! Detects requests that a router found no route for.
//!
//! axum runs `Router::layer` for its fallback too, and a request for a missing page is a 404, not a missing key.
//! Any other request without a key is for a handler that must not run without its lock.

use axum::Router;
use axum::extract::{MatchedPath, NestedPath, OriginalUri, Request};
use axum::routing::any;
use futures_util::FutureExt;
use http::StatusCode;
use http::request::Parts;
use tower::Service;

/// Returns whether an axum router has looked at a request and matched no route.
pub(crate) fn matched_no_route(parts: &Parts) -> bool {
    let routed = parts.extensions.get::<OriginalUri>().is_some();
    let matched = parts.extensions.get::<MatchedPath>().is_some();
    routed && !matched && !is_in_nested_service(parts)
}

/// Returns whether the request is for a `Router::nest_service`.
///
/// axum does not show the path of the nesting to layers around the nested service, but adds it in front of the
/// matched paths further in. So this sends a request with the same extensions through a router of one route, and
/// compares the matched path. It runs only for requests without a key and without a matched path.
fn is_in_nested_service(parts: &Parts) -> bool {
    let report = async |matched: MatchedPath| match matched.as_str() {
        "/" => StatusCode::NO_CONTENT,
        _ => StatusCode::OK,
    };
    let mut router: Router = Router::new().route("/", any(report));
    let mut probe: Request = Request::default();
    *probe.extensions_mut() = parts.extensions.clone();
    let response = Service::call(&mut router, probe).now_or_never();
    // The handler never waits. If it ever does, the request must not pass without its lock.
    response.is_none_or(|Ok(response)| response.status() != StatusCode::NO_CONTENT)
}

/// Returns the route that an axum router has matched, for the log.
pub(crate) fn route_of(parts: &Parts) -> Option<&str> {
    let matched = parts.extensions.get::<MatchedPath>()?;
    Some(matched.as_str())
}

/// Returns how many segments of the path nested routers have taken off.
pub(crate) fn nested_segments(parts: &Parts) -> usize {
    let nested = parts.extensions.get::<NestedPath>();
    let nested = nested.map_or("", |nested| nested.as_str());
    nested.trim_end_matches('/').matches('/').count()
}
