//! The extractor that locks what a handler's own arguments are about.

use std::sync::Arc;

use axum::extract::{FromRef, FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::request::Parts;

use crate::extract::LockResource;
use crate::lock::{LockGuard, Redlock};
use crate::middleware::{LockHandles, OnLost, Passage, Rejection, RequestKind, refusal};

/// Extracts `T` and locks the resource that it names, before the handler is called.
///
/// Like the layer it fails fast: when somebody else holds the lock, the handler is not called and
/// the client gets 423. A lock that a layer or an extractor before it took for the same request is
/// shared as it was taken: the resource's own options do not apply to it.
///
/// The lock is held from here on, also while an extractor behind it reads the body: put a
/// [`BufferBodyLayer`](crate::BufferBodyLayer) outside if uploads may be slow.
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
///         LockKey::from(("order", self.0.to_string())).into()
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
/// When the guard is dropped, in the background: the client's next request may be refused then.
/// End it in order with [`LockGuard::hold_until_sent`], or with [`LockGuard::release`] before
/// responding. When the lock is lost, nothing stops the handler: it asks
/// [`LockGuard::is_valid`], or works beside [`LockGuard::lost`].
///
/// # Forms
///
/// `Result<Locked<T>, LockedRejection<_>>` gives the refusal to the handler. A handler that answers with it
/// states that it did nothing: an [`IdempotencyLayer`](crate::IdempotencyLayer) outside executes the next
/// request with the key. `Option<Locked<T>>` is `None` only when `Option<T>` is, never for contention.
///
/// # When it does not compile
///
/// *`OrderId` does not say which resource to lock*: implement [`LockResource`] for it, as above.
///
/// *`Redlock: FromRef<AppState>` is not satisfied*: the extractor takes the [`Redlock`] from the
/// router's state. Derive `FromRef` for the state (axum's feature `macros`), as above, or write
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
#[derive(Debug)]
#[must_use = "dropping the guard releases the lock at once"]
pub struct Locked<T>(
    /// The lock.
    pub LockGuard,
    /// What names the resource.
    pub T,
);

impl<S, T> FromRequestParts<S> for Locked<T>
where
    S: Send + Sync,
    T: FromRequestParts<S> + LockResource + Send,
    Redlock: FromRef<S>,
{
    type Rejection = LockedRejection<T::Rejection>;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let resource = T::from_request_parts(parts, state).await;
        let resource = resource.map_err(LockedRejection::Inner)?;
        let guard = lock(parts, state, &resource).await;
        Ok(Self(guard.map_err(LockedRejection::Lock)?, resource))
    }
}

impl<S, T> OptionalFromRequestParts<S> for Locked<T>
where
    S: Send + Sync,
    T: OptionalFromRequestParts<S> + LockResource + Send,
    Redlock: FromRef<S>,
{
    type Rejection = LockedRejection<T::Rejection>;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &S,
    ) -> Result<Option<Self>, Self::Rejection> {
        let resource = T::from_request_parts(parts, state).await;
        let Some(resource) = resource.map_err(LockedRejection::Inner)? else {
            return Ok(None);
        };
        let guard = lock(parts, state, &resource).await;
        Ok(Some(Self(guard.map_err(LockedRejection::Lock)?, resource)))
    }
}

/// Takes the lock on a resource for a request.
fn lock<S, T>(
    parts: &mut Parts,
    state: &S,
    resource: &T,
) -> impl Future<Output = Result<LockGuard, LockRefused>> + Send + use<S, T>
where
    T: LockResource,
    Redlock: FromRef<S>,
{
    let (redlock, kind) = (Redlock::from_ref(state), RequestKind::of(parts));
    let (keys, options) = (resource.lock_keys(), resource.options());
    let passage = Passage::of(&parts.extensions);
    let held = LockHandles::of(&mut parts.extensions);
    let options = redlock.request_options(options);
    let locking = held.lock(&redlock, keys, |request| request.options(options));
    async move {
        match locking.await {
            Ok(guard) => {
                // The handler is not stopped when it loses the lock.
                held.add(&guard.handle(), OnLost::Notify);
                Ok(guard)
            }
            Err(error) => {
                let rejection = Rejection::from(error.clone());
                if matches!(rejection, Rejection::Misconfigured(_)) {
                    tracing::error!(%error, "redlock handler asks for a lock that there cannot be");
                } else if matches!(rejection, Rejection::KeyInvalid(_)) {
                    tracing::debug!(%error, "redlock handler asks for a key that there cannot be");
                }
                Err(LockRefused {
                    rejection,
                    kind,
                    passage,
                })
            }
        }
    }
}

/// Why there is no [`Locked`]: what it is made from could not be extracted, or not be locked.
#[derive(Debug)]
#[non_exhaustive]
pub enum LockedRejection<R> {
    /// The rejection of the inner extractor.
    Inner(R),
    /// The lock was refused.
    Lock(LockRefused),
}

/// The refusal of a lock, which answers like the layer's.
#[derive(Debug, Clone)]
pub struct LockRefused {
    rejection: Rejection,
    kind: RequestKind,
    /// For an idempotency layer outside, which is told that the handler was not called.
    passage: Option<Arc<Passage>>,
}

impl LockRefused {
    /// Returns why the lock was refused.
    #[must_use]
    pub fn rejection(&self) -> &Rejection {
        &self.rejection
    }
}

impl<R: IntoResponse> IntoResponse for LockedRejection<R> {
    fn into_response(self) -> Response {
        match self {
            Self::Inner(rejection) => rejection.into_response(),
            Self::Lock(refused) => refused.into_response(),
        }
    }
}

impl IntoResponse for LockRefused {
    fn into_response(self) -> Response {
        if let Some(passage) = &self.passage {
            passage.refused();
        }
        refusal(self.rejection, self.kind).into_response()
    }
}

impl<R: std::fmt::Display> std::fmt::Display for LockedRejection<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Inner(rejection) => rejection.fmt(f),
            Self::Lock(refused) => refused.fmt(f),
        }
    }
}

impl std::fmt::Display for LockRefused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the lock was refused: {}", self.rejection)
    }
}

impl<R: std::error::Error + 'static> std::error::Error for LockedRejection<R> {}

impl std::error::Error for LockRefused {}
