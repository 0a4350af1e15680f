//! Extractors of what a layer puts into a request: the handle and the token of its lock, the idempotency key.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use http::request::Parts;

use crate::extract::rejection::ExtractorRejection;
use crate::lock::LockHandle;
use crate::middleware::{LockHandles, NotLocked};
use crate::protocol::FencingToken;

/// Makes an extension that a layer puts into a request an extractor, also in an `Option`. The function makes the rejection of a request
/// without the extension.
macro_rules! extension_extractor {
    ($(#[$doc:meta])+ $extension:ty, $missing:ident; $none:literal) => {
        $(#[$doc])+
        impl<S: Send + Sync> FromRequestParts<S> for $extension {
            type Rejection = ExtractorRejection;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ExtractorRejection> {
                let extension = parts.extensions.get::<Self>().cloned();
                extension.ok_or_else(|| $missing(parts))
            }
        }

        #[doc = $none]
        impl<S: Send + Sync> OptionalFromRequestParts<S> for $extension {
            type Rejection = Infallible;

            async fn from_request_parts(
                parts: &mut Parts,
                _: &S,
            ) -> Result<Option<Self>, Infallible> {
                Ok(parts.extensions.get().cloned())
            }
        }
    };
}

extension_extractor! {
    /// The handle of the innermost [`RedlockLayer`](crate::RedlockLayer) around the handler. Rejected if that layer
    /// served the request without a lock, even if outer layers have one; [`LockHandles`] has all of them.
    ///
    /// To test a handler without the layer, put a handle into the extensions:
    /// `router.layer(axum::Extension(guard.handle()))`, with a guard of
    /// [`Redlock::in_memory`](crate::Redlock::in_memory).
    LockHandle, without_lock; "`None` if the request is served without a lock."
}

#[cfg(feature = "idempotency")]
extension_extractor! {
    /// The key of a request that an [`IdempotencyLayer`](crate::IdempotencyLayer) passed on.
    ///
    /// To test a handler without the layer, put one into the extensions: `"a1".parse::<IdempotencyKey>()`.
    crate::middleware::idempotency_key::IdempotencyKey, without_key; "`None` if the request has no key, or no layer is applied."
}

/// The fencing token of the [`LockHandle`] that the handler would get.
impl<S: Send + Sync> FromRequestParts<S> for FencingToken {
    type Rejection = ExtractorRejection;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let handle = <LockHandle as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        let token = handle.fencing_token();
        let reason = "the lock has no fencing token, because it is that of a reader or `fencing` is off; extract LockHandle";
        token.ok_or_else(|| no_lock(parts, reason))
    }
}

/// Never fails: without a lock there are no handles.
impl<S: Send + Sync> FromRequestParts<S> for LockHandles {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::from_extensions(&mut parts.extensions))
    }
}

/// Creates the rejection of a request that the layer served without a lock, or that has no layer.
fn without_lock(parts: &Parts) -> ExtractorRejection {
    let reason = parts.extensions.get().map_or(
        "no RedlockLayer is around it; apply one with `route_layer`, or take the guard of `Locked`",
        |NotLocked(reason)| reason,
    );
    no_lock(parts, reason)
}

fn no_lock(parts: &Parts, reason: &str) -> ExtractorRejection {
    let mistake = "redlock handler extracts the lock of a request without one";
    ExtractorRejection::misplaced(parts, mistake, &format!("lock: {reason}"))
}

#[cfg(feature = "idempotency")]
fn without_key(parts: &Parts) -> ExtractorRejection {
    let mistake = "handler extracts an idempotency key from a request without one";
    let lacking = "idempotency key; apply an IdempotencyLayer with `required(true)`, or extract Option<IdempotencyKey>";
    ExtractorRejection::misplaced(parts, mistake, lacking)
}
