//! Extractors of what a layer says about its lock.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::request::Parts;

use crate::lock::LockHandle;
use crate::middleware::{LockHandles, NotLocked, Rejection, RequestKind, refusal};
use crate::protocol::{FencingToken, KeyError};

/// The handle of the innermost [`RedlockLayer`](crate::RedlockLayer) around the handler; none if that
/// let the request pass without a lock, also if layers further out have one: [`LockHandles`] has all.
///
/// To test a handler without the layer, put a handle into the extensions:
/// `router.layer(axum::Extension(guard.handle()))`, with a guard of
/// [`Redlock::in_memory`](crate::Redlock::in_memory).
impl<S: Send + Sync> FromRequestParts<S> for LockHandle {
    type Rejection = LockHandleRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        if let Some(handle) = parts.extensions.get::<Self>() {
            return Ok(handle.clone());
        }
        Err(LockHandleRejection {
            passed: parts.extensions.get::<NotLocked>().copied(),
            kind: RequestKind::of(parts),
        })
    }
}

/// `None` if the request is served without a lock.
impl<S: Send + Sync> OptionalFromRequestParts<S> for LockHandle {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// The token of the [`LockHandle`] that the handler would get.
impl<S: Send + Sync> FromRequestParts<S> for FencingToken {
    type Rejection = LockHandleRejection;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let handle = <LockHandle as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        handle.fencing_token().ok_or_else(|| LockHandleRejection {
            passed: Some(NotLocked::Unfenced),
            kind: RequestKind::of(parts),
        })
    }
}

/// `None` if the request is served without a lock, or fencing is off.
impl<S: Send + Sync> OptionalFromRequestParts<S> for FencingToken {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        let handle = parts.extensions.get::<LockHandle>();
        Ok(handle.and_then(LockHandle::fencing_token))
    }
}

/// Never fails: without a lock there are no handles.
impl<S: Send + Sync> FromRequestParts<S> for LockHandles {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(&mut parts.extensions))
    }
}

/// Why there is no [`LockHandle`]: a mistake of the program, 500, which says what to do.
#[derive(Debug, Clone)]
pub struct LockHandleRejection {
    /// Why the layer let the request pass without a lock; without a layer nothing says.
    passed: Option<NotLocked>,
    kind: RequestKind,
}

impl LockHandleRejection {
    fn reason(&self) -> &'static str {
        match self.passed {
            None => "no RedlockLayer around the handler; apply one to its route",
            Some(NotLocked::Method) => {
                "a method that the layer does not lock; take Option<LockHandle>, or name it in `methods`"
            }
            Some(NotLocked::Skipped) => {
                "a request that the layer is told to skip; take Option<LockHandle>"
            }
            Some(NotLocked::NoKey) => {
                "a request that names no resource; take Option<LockHandle>, or leave `missing_key` at Reject"
            }
            Some(NotLocked::Unfenced) => {
                "a lock without a token; leave `fencing` on, or take Option<FencingToken>"
            }
            Some(NotLocked::Unavailable) => {
                "proceeded without a quorum, as `on_unavailable` says; take Option<LockHandle>"
            }
        }
    }
}

impl IntoResponse for LockHandleRejection {
    fn into_response(self) -> Response {
        let error = KeyError::misconfigured(self.to_string());
        tracing::error!(%error, "redlock handler asks for a lock that there is not");
        refusal(Rejection::Misconfigured(error), self.kind).into_response()
    }
}

impl std::fmt::Display for LockHandleRejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the handler has no lock: {}", self.reason())
    }
}

impl std::error::Error for LockHandleRejection {}
