//! The functions of [`routed`](crate::middleware::routed) without axum: no router has looked at a request.

use http::request::Parts;

pub(crate) fn matched_no_route(_: &Parts) -> bool {
    false
}

pub(crate) fn route_of(_: &Parts) -> Option<&str> {
    None
}

pub(crate) fn nested_segments(_: &Parts) -> usize {
    0
}
