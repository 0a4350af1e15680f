//! The extractor that locks the resource in a handler's arguments.
//!
//! # Implementation details
//!
//! The extractor shares the locks of the request through [`LockHandles`], like a layer. It copies the
//! `CallToken` of the request before it waits, because the request may be consumed when the refusal becomes a
//! response. That response takes the call back: a handler that returns it has had no effect.

use std::any::type_name;

use axum::extract::{
    Extension, FromRef, FromRequest, FromRequestParts, OptionalFromRequest,
    OptionalFromRequestParts, Path, Query, Request, State,
};
use axum::response::{IntoResponse, Response};
use axum::{Form, Json};
use futures_util::future::OptionFuture;
use http::request::Parts;

use crate::extract::rejection::{ExtractorRejection, RequestContext, into_rejection};
use crate::lock::{LockGuard, LockOptions, Redlock};
use crate::middleware::{LockHandles, OnLost};
use crate::node::telemetry::UNNAMED;
use crate::protocol::LockKeys;

/// Extracts `T` and locks the resource that it names, before the handler is called.
///
/// Like the layer, it fails fast: if another request holds the lock, the handler is not called and
/// the client gets 423. A lock that a layer or an earlier extractor took for the same request is
/// shared with the options that it was taken with; those of the resource do not apply to it.
///
/// The lock is held from here on, also while a later extractor reads the body: put a
/// [`BufferBodyLayer`](crate::BufferBodyLayer) outside if uploads may be slow. If the resource is in the body, as with
/// `Locked<Json<T>>`, the body is read before the lock is taken.
///
/// ```
/// use axum::extract::{FromRef, Path};
/// use axum::{Router, response::Response, response::IntoResponse, routing::post};
/// use serde::Deserialize;
/// use tower_redlock::{LockKey, LockKeys, LockResource, Locked, Redlock};
///
/// #[derive(Clone, FromRef)]
/// struct AppState {
///     redlock: Redlock,
/// }
///
/// #[derive(Deserialize)]
/// struct OrderId(u64);
///
/// impl LockResource for OrderId {
///     fn lock_keys(&self) -> LockKeys {
///         LockKey::from(("order", self.0)).into()
///     }
/// }
///
/// async fn ship(Locked(guard, Path(id)): Locked<Path<OrderId>>) -> Response {
///     let response = format!("order {} is shipped\n", id.0).into_response();
///     guard.hold_until_sent(response).into_response()
/// }
///
/// let redlock = Redlock::in_memory(3);
/// let app: Router = Router::new()
///     .route("/orders/{id}/ship", post(ship))
///     .with_state(AppState { redlock });
/// ```
///
/// # When it is released
///
/// Dropping the guard releases the lock in the background, so the client's next request may be refused.
/// To release in order, use [`LockGuard::hold_until_sent`], or [`LockGuard::release`] before
/// responding. The loss of the lock does not stop the handler: check
/// [`LockGuard::is_valid`], or `select!` on [`LockGuard::lost`].
///
/// # Refusals
///
/// `Retry-After` of a refusal is one second, as for a [`RedlockLayer`](crate::RedlockLayer), or the
/// remaining ttl of a lock with [`hold_at_least`](crate::LockOptions::hold_at_least).
///
/// A [`RejectionResponse`](crate::RejectionResponse) in the extensions of the request sets how refusals look.
///
/// # Forms
///
/// `Result<Locked<T>, LockedRejection<_>>` passes the refusal to the handler. A handler that answers with it
/// must not have had an effect: an [`IdempotencyLayer`](crate::IdempotencyLayer) outside executes the next
/// request with the key. `Option<Locked<T>>` is `None` only if `Option<T>` is, never for contention.
///
/// # Panics
///
/// The extractor panics outside of a tokio runtime with a timer.
///
/// # When it does not compile
///
/// *`OrderId` does not say which resource to lock*: implement [`LockResource`] for it, as above.
///
/// *expected `Redlock`, found `AppState`*, or with axum's `debug_handler` *the trait `FromRequest<AppState, _>` is not
/// implemented for `Locked<Path<OrderId>>`*: the extractor gets the [`Redlock`] from the router's state. Derive
/// `FromRef` for the state (axum's feature `macros`), as above, or write
///
/// ```
/// # use axum::extract::FromRef;
/// # use tower_redlock::Redlock;
/// # struct AppState { redlock: Redlock }
/// impl FromRef<AppState> for Redlock {
///     fn from_ref(state: &AppState) -> Self {
///         state.redlock.clone()
///     }
/// }
/// ```
///
/// A state of type `Arc<AppState>` can do neither, as both types are foreign: put what it shares into an `Arc` inside.
///
/// *`Handler` is not satisfied*: one of these, or a `Locked<Json<T>>` or `Locked<Form<T>>` that is not the last argument.
///
/// # Design
///
/// The type itself has the bound `LockResource`. With the bound on the extractor traits alone, the compiler reports only
/// that `Locked<T>` is no extractor, because it has several implementations to choose from.
#[derive(Debug)]
#[must_use = "dropping the guard releases the lock at once"]
pub struct Locked<T: LockResource>(
    /// The lock.
    pub LockGuard,
    /// The extracted resource.
    pub T,
);

/// Extracts a resource and takes its lock, for each trait of axum that extracts something or nothing, from the head of a
/// request or all of it.
macro_rules! extract_locked {
    ($($trait:ident::$extract:ident($input:ty) by $locks:ident -> $output:ty, by $lock:ident;)+) => {$(
        impl<S, T> $trait<S> for Locked<T>
        where
            S: Send + Sync,
            T: $trait<S> + LockResource + Send,
            Redlock: FromRef<S>,
        {
            type Rejection = LockedRejection<T::Rejection>;

            async fn $extract(input: $input, state: &S) -> Result<$output, Self::Rejection> {
                let (input, locks) = RequestLocks::$locks(input, Redlock::from_ref(state));
                let resource = T::$extract(input, state).await.map_err(LockedRejection::Inner)?;
                locks.$lock(resource).await
            }
        }
    )+};
}

extract_locked! {
    FromRequestParts::from_request_parts(&mut Parts) by from_parts -> Self, by lock;
    OptionalFromRequestParts::from_request_parts(&mut Parts) by from_parts -> Option<Self>, by lock_any;
    FromRequest::from_request(Request) by from_request -> Self, by lock;
    OptionalFromRequest::from_request(Request) by from_request -> Option<Self>, by lock_any;
}

/// The refusals for the lock; see those of a [`RedlockLayer`](crate::RedlockLayer).
///
/// Those of `T` itself are not among them. 429 is for a resource with [`slots`](crate::LockOptions::slots).
#[cfg(feature = "utoipa")]
impl<T: LockResource> utoipa::IntoResponses for Locked<T> {
    fn responses() -> crate::middleware::Responses {
        crate::RedlockLayer::<crate::CancelOnDisconnect>::responses()
    }
}

/// Type that names a resource to lock, such as an id from the path; used by [`Locked`].
///
/// The crate implements it for axum's [`Path`], [`Query`], [`Extension`], [`State`], [`Json`] and [`Form`] of anything
/// that implements it. Implement it for an extractor of your own to use that with [`Locked`].
///
/// ```
/// use serde::Deserialize;
/// use tower_redlock::{LockKey, LockKeys, LockResource};
///
/// #[derive(Deserialize)]
/// struct Seat {
///     flight: String,
///     row: u16,
/// }
///
/// impl LockResource for Seat {
///     fn lock_keys(&self) -> LockKeys {
///         LockKey::from(("seat", self.flight.as_str(), self.row)).into()
///     }
/// }
/// ```
///
/// A body may name several keys, and a resource has the options of its lock:
///
/// ```
/// use std::time::Duration;
/// use axum::{Json, response::IntoResponse, response::Response};
/// use serde::Deserialize;
/// use tower_redlock::{LockKeys, LockOptions, LockResource, Locked};
///
/// #[derive(Deserialize)]
/// struct Transfer {
///     from: String,
///     to: String,
/// }
///
/// impl LockResource for Transfer {
///     fn lock_keys(&self) -> LockKeys {
///         let accounts = [self.from.as_str(), self.to.as_str()];
///         accounts.into_iter().map(|account| ("account", account)).collect()
///     }
///
///     fn options(&self) -> LockOptions {
///         LockOptions::default().wait(Duration::from_secs(1))
///     }
/// }
///
/// async fn transfer(Locked(guard, Json(transfer)): Locked<Json<Transfer>>) -> Response {
///     let response = format!("from {} to {}\n", transfer.from, transfer.to).into_response();
///     guard.hold_until_sent(response).into_response()
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say which resource to lock",
    label = "`Locked` needs `LockResource` for this",
    note = "implement `tower_redlock::LockResource` for the type inside of `Path`, `Query`, `Json`, `Form`, `Extension` or `State`; a `u64` or a tuple needs a type of your own around it"
)]
pub trait LockResource {
    /// Returns the keys to lock, all or nothing.
    ///
    /// An empty key, or an empty set of keys, is refused with 400 `key-missing`. A tuple with an empty part is a key: refuse
    /// such values when you parse them.
    fn lock_keys(&self) -> LockKeys;

    /// Returns the options of the lock. Default: the builder's ttl and `max_hold` (60 s if that
    /// is not set), without waiting, and `unnamed` in spans and metrics: the key comes from a client, and is no label.
    fn options(&self) -> LockOptions {
        LockOptions::default()
    }
}

/// Makes an extractor of axum around a resource a resource.
macro_rules! around_resource {
    ($($extractor:ident)+) => {$(
        // The text at the trait names them all.
        #[doc(hidden)]
        impl<T: LockResource> LockResource for $extractor<T> {
            fn lock_keys(&self) -> LockKeys {
                self.0.lock_keys()
            }

            fn options(&self) -> LockOptions {
                self.0.options()
            }
        }
    )+};
}

around_resource! { Path Query Extension State Json Form }

/// The parts of a request that its locks need. Kept apart, because the extractor of the resource may consume the
/// request.
struct RequestLocks {
    redlock: Redlock,
    request: RequestContext,
    handles: LockHandles,
}

impl RequestLocks {
    fn from_parts(parts: &mut Parts, redlock: Redlock) -> (&mut Parts, Self) {
        let locks = Self {
            redlock,
            request: RequestContext::new(parts),
            handles: LockHandles::from_extensions(&mut parts.extensions),
        };
        (parts, locks)
    }

    fn from_request(request: Request, redlock: Redlock) -> (Request, Self) {
        let (mut parts, body) = request.into_parts();
        let (_, locks) = Self::from_parts(&mut parts, redlock);
        (Request::from_parts(parts, body), locks)
    }

    /// Takes the lock on a resource.
    async fn lock<T: LockResource, R>(self, resource: T) -> Result<Locked<T>, LockedRejection<R>> {
        let (keys, mut options) = (resource.lock_keys(), resource.options());
        // Never from the key, which clients choose.
        options.label.get_or_insert(UNNAMED);
        let (handles, redlock) = (&self.handles, &self.redlock);
        let locking = LockHandles::lock(Some(handles), redlock, keys, options.clone());
        match locking.await {
            Ok(guard) => {
                // The loss of the lock does not stop the handler.
                handles.add(&guard.handle(), OnLost::Notify);
                if let Some(token) = &self.request.token {
                    token.accept();
                }
                Ok(Locked(guard, resource))
            }
            Err(error) => {
                let rejection = into_rejection(&error, &options, Some(type_name::<T>()));
                Err(LockedRejection::Lock(ExtractorRejection {
                    rejection,
                    request: self.request,
                }))
            }
        }
    }

    /// Takes the lock on a resource, if the request names any.
    async fn lock_any<T: LockResource, R>(
        self,
        resource: Option<T>,
    ) -> Result<Option<Locked<T>>, LockedRejection<R>> {
        let locking = resource.map(|resource| self.lock(resource));
        OptionFuture::from(locking).await.transpose()
    }
}

/// Rejection of [`Locked`]: the resource could not be extracted, or not be locked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockedRejection<R> {
    /// The rejection of the inner extractor.
    #[error(transparent)]
    Inner(R),
    /// The lock was refused.
    #[error(transparent)]
    Lock(ExtractorRejection),
}

impl<R: IntoResponse> IntoResponse for LockedRejection<R> {
    fn into_response(self) -> Response {
        match self {
            Self::Inner(rejection) => rejection.into_response(),
            Self::Lock(refused) => refused.into_response(),
        }
    }
}
