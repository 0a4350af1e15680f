//! Keys from path parameters.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{FromRequestParts, MatchedPath, OriginalUri, RawPathParams};
use http::request::Parts;

use crate::middleware::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the key from the path parameter `name` of the matched axum route, percent-decoded.
///
/// Empty: the request names no resource. Not UTF-8 when decoded: the request is malformed. A route
/// that has no such parameter, or a layer that stands outside of any axum router, is a mistake in
/// the program: 500 `misconfigured`, never an unlocked handler. Around `nest_service` the layer sees no
/// parameter of the routes in there: 400 `key-missing`.
///
/// The key is the text: a handler that reads it as a number takes `7`, `07` and `+7` for one resource,
/// and these are three keys, of which the client chooses. Use
/// [`typed_path`](crate::key::typed_path) there.
///
/// Path parameters say nothing about the route they are in: put a literal beside them
/// (`("account", key::path("id"))`), or `/accounts/7` and `/orders/7` are one resource.
#[must_use]
pub fn path(name: &'static str) -> Path {
    Path { name }
}

/// Extractor of [`path`].
#[derive(Debug, Clone)]
pub struct Path {
    name: &'static str,
}

impl KeyExtractor for Path {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        let name = self.name;
        let params = raw_path_params(parts)?;
        let mut params = params.iter().flat_map(RawPathParams::iter);
        let Some((_, value)) = params.find(|(found, _)| *found == name) else {
            return match parts.extensions.get::<MatchedPath>() {
                Some(route) => Err(KeyError::misconfigured(format!(
                    "the route `{}` has no path parameter `{name}`",
                    route.as_str()
                ))),
                None => unrouted(parts, "key::path()"),
            };
        };
        // The outer of two nested routers would win, and the inner's resources be one.
        if params.any(|(found, _)| found == name) {
            return Err(KeyError::misconfigured(format!(
                "the path parameter `{name}` is there twice, by nesting; give them different names"
            )));
        }
        Ok((!value.is_empty()).then(|| LockKey::from(value).into()))
    }
}

/// What becomes of a request that no route is known of, for an extractor that needs one.
pub(super) fn unrouted(parts: &Parts, extractor: &str) -> Result<Option<LockKeys>, KeyError> {
    if parts.extensions.get::<OriginalUri>().is_some() {
        // A nested service, or no route at all; the layer tells.
        return Ok(None);
    }
    Err(KeyError::misconfigured(format!(
        "{extractor} stands outside of any axum router; apply the layer with `Router::route_layer` or `Router::layer`"
    )))
}

/// Reads what axum's router found. axum 0.8 has no synchronous way to it, so its extractor, which
/// waits for nothing, is polled once on a copy of the extensions.
fn raw_path_params(parts: &Parts) -> Result<Option<RawPathParams>, KeyError> {
    let (mut scratch, ()) = http::Request::new(()).into_parts();
    scratch.extensions = parts.extensions.clone();
    let extracting = pin!(RawPathParams::from_request_parts(&mut scratch, &()));
    match extracting.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(params)) => Ok(Some(params)),
        Poll::Ready(Err(RawPathParamsRejection::InvalidUtf8InPathParam(_))) => {
            Err(KeyError::malformed("a path parameter is not UTF-8"))
        }
        Poll::Ready(Err(_)) | Poll::Pending => Ok(None),
    }
}
