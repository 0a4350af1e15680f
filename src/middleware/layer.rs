//! The layer and its settings.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{HeaderName, Method, StatusCode};
use tower::Layer;

use crate::lock::{BuildError, LockFuture, LockOptions, Redlock, WaiterCap};
use crate::middleware::disconnect::{CancelOnDisconnect, RunToCompletion, RunToCompletionService};
use crate::middleware::held::LockHandles;
use crate::middleware::key::{KeyExtractor, present};
use crate::middleware::refusals::Refusals;
use crate::middleware::rejection::{Rejection, RejectionResponse};
use crate::middleware::routed::matched_no_route;
use crate::middleware::service::RedlockService;
use crate::node::telemetry;
use crate::protocol::LockKeys;

/// Layer that applies the [`RedlockService`] middleware: a lock per resource around a service.
///
/// Unlike a concurrency limit it excludes requests by what they are about, and across all
/// processes that share the nodes. The service's error stays the inner one's, so no
/// `HandleErrorLayer` is needed: a refusal is a response.
///
/// ```
/// use axum::{Router, routing::post};
/// use tower_redlock::{Redlock, RedlockLayer, key};
///
/// # async fn withdraw() {}
/// let redlock = Redlock::in_memory(3);
/// let app: Router = Router::new()
///     .route("/accounts/{id}/withdraw", post(withdraw))
///     .route_layer(RedlockLayer::new(redlock, ("account", key::path("id"))));
/// ```
#[derive(Clone)]
#[must_use = "a layer does nothing until it is applied"]
pub struct RedlockLayer<D = CancelOnDisconnect> {
    config: Config,
    on_disconnect: PhantomData<D>,
}

/// What the service does with each request; shared by all clones of it.
#[derive(Clone)]
pub(super) struct Config {
    redlock: Redlock,
    key: Arc<dyn KeyExtractor>,
    pub(super) label: Option<&'static str>,
    methods: Option<Arc<[Method]>>,
    skip: Option<Arc<dyn Fn(&Parts) -> bool + Send + Sync>>,
    ttl: Option<Duration>,
    pub(super) wait: Duration,
    waiters: Option<Arc<WaiterCap>>,
    max_hold: Option<Duration>,
    missing_key: OnMissingKey,
    pub(super) on_unavailable: OnUnavailable,
    pub(super) release_at: ReleaseAt,
    pub(super) await_release: bool,
    pub(super) on_lost: OnLost,
    pub(super) contended_status: StatusCode,
    pub(super) refusals: Refusals,
    pub(super) forward_token: Option<HeaderName>,
    pub(super) expose_token: Option<HeaderName>,
    pub(super) runs_to_completion: bool,
}

/// What to do with a request that does not name a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// Answer 400: a client must not be able to leave the lock out by leaving the key out.
    ///
    /// What matched no route of an axum router passes all the same, to its 404.
    Reject,
    /// Answer 400 also to what matched no route: for a layer around a fallback that does something,
    /// such as a proxy.
    RejectAlways,
    /// Serve it without a lock.
    Pass,
}

/// What to do when no majority of the nodes can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnUnavailable {
    /// Answer 503.
    Reject,
    /// Serve the request without a lock, with a warning in the log and [`Unprotected`] in its
    /// extensions. For locks that save work, never for locks that keep data right.
    Proceed,
}

/// When the lock is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReleaseAt {
    /// With the last piece of the response body.
    BodyEnd,
    /// Before the head of the response is sent; for big or slow downloads.
    ResponseHead,
}

/// What to do when the lock is lost while it is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnLost {
    /// Stop the handler and answer 503; a body that is being sent ends with an error.
    Abort,
    /// Go on; the handler can ask the [`LockHandle`](crate::LockHandle) in its extensions.
    Notify,
}

/// Extension of a request that [`OnUnavailable::Proceed`] let through without a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unprotected;

/// Why the layer let a request pass without a lock; in the request's extensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotLocked {
    Method,
    Skipped,
    NoKey,
    Unavailable,
    /// With a lock that has no token; not the layer, but an extractor says so.
    #[cfg(feature = "axum")]
    Unfenced,
}

impl RedlockLayer {
    /// Makes a layer that locks what `key` finds in each request.
    ///
    /// With a key of literals only all requests share one lock, which is rarely meant: that is logged as
    /// a warning.
    pub fn new(redlock: Redlock, key: impl KeyExtractor) -> Self {
        if key.is_constant() {
            tracing::warn!(
                resource = key.label().unwrap_or(telemetry::UNNAMED),
                "the key of a RedlockLayer is the same for every request: all of them share one lock"
            );
        }
        Self {
            config: Config {
                redlock,
                label: key.label(),
                key: Arc::new(key),
                methods: None,
                skip: None,
                ttl: None,
                wait: Duration::ZERO,
                waiters: None,
                max_hold: None,
                missing_key: OnMissingKey::Reject,
                on_unavailable: OnUnavailable::Reject,
                release_at: ReleaseAt::BodyEnd,
                await_release: true,
                on_lost: OnLost::Abort,
                contended_status: StatusCode::LOCKED,
                refusals: Refusals::new(),
                forward_token: None,
                expose_token: None,
                runs_to_completion: false,
            },
            on_disconnect: PhantomData,
        }
    }
}

impl<D> RedlockLayer<D> {
    /// Sets the ttl of the locks. Default: that of the [`Redlock`].
    ///
    /// # Errors
    ///
    /// [`BuildError`] if it is over the `max_ttl` of the [`Redlock`], or so short that clock drift
    /// leaves nothing of it.
    pub fn ttl(mut self, ttl: Duration) -> Result<Self, BuildError> {
        self.config.redlock.check_ttl(ttl)?;
        self.config.ttl = Some(ttl);
        Ok(self)
    }

    /// Sets how long a request waits while others hold the lock. Default: zero, fail fast.
    ///
    /// A waiting request holds no readiness of the inner service.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.config.wait = wait;
        self
    }

    /// Sets how many requests may wait in this layer at once; one more gets 503. Default: no limit.
    pub fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.config.waiters = Some(WaiterCap::new(max_waiters));
        self
    }

    /// Sets after what time a lock is not renewed any more. Default: the builder's, and 60 s if that has none.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.config.max_hold = Some(max_hold);
        self
    }

    /// Sets the methods that are locked. Default: all but GET, HEAD, OPTIONS, TRACE and QUERY,
    /// which are safe (RFC 9110, section 9.2.1) and pass through unlocked.
    ///
    /// GET stands for HEAD too, for which routers run the handler of GET.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.config.methods = Some(methods.into_iter().collect());
        self
    }

    /// Sets which requests pass through unlocked besides. Default: none.
    pub fn skip(mut self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.config.skip = Some(Arc::new(skip));
        self
    }

    /// Sets what happens to a request that names no resource. Default: [`OnMissingKey::Reject`].
    ///
    /// A request that matched no route of an axum router passes by default, to the router's fallback: if
    /// that does what needs a lock, set [`OnMissingKey::RejectAlways`].
    pub fn missing_key(mut self, missing_key: OnMissingKey) -> Self {
        self.config.missing_key = missing_key;
        self
    }

    /// Sets what happens when no majority can be reached. Default: [`OnUnavailable::Reject`].
    pub fn on_unavailable(mut self, on_unavailable: OnUnavailable) -> Self {
        self.config.on_unavailable = on_unavailable;
        self
    }

    /// Sets when the lock is released. Default: [`ReleaseAt::BodyEnd`].
    pub fn release_at(mut self, release_at: ReleaseAt) -> Self {
        self.config.release_at = release_at;
        self
    }

    /// Sets whether the last piece of the response waits until a majority has confirmed the
    /// release. Default: true.
    ///
    /// False saves a round trip per request, and a client's next request may then find its own
    /// lock still there.
    pub fn await_release(mut self, await_release: bool) -> Self {
        self.config.await_release = await_release;
        self
    }

    /// Sets what happens when the lock is lost. Default: [`OnLost::Abort`].
    pub fn on_lost(mut self, on_lost: OnLost) -> Self {
        self.config.on_lost = on_lost;
        self
    }

    /// Sets what kind of resource is locked, for spans and metrics, which never show a key. Default:
    /// the first literal part of the key, or `unnamed`.
    pub fn label(mut self, label: &'static str) -> Self {
        self.config.label = Some(label);
        self
    }

    /// Lets a handler that has begun run to its end when its client goes away. Default:
    /// [`CancelOnDisconnect`], it is dropped.
    ///
    /// Asks that the inner service's future, response and error be `Send + 'static`; this one's
    /// future is not:
    ///
    /// ```compile_fail,E0277
    /// # use std::{convert::Infallible, rc::Rc};
    /// # use http::{Request, Response};
    /// # use http_body_util::Full;
    /// # use tower::{Layer, Service, service_fn};
    /// # use tower_redlock::{Redlock, RedlockLayer, RunToCompletion};
    /// let inner = service_fn(async |_: Request<()>| {
    ///     let local = Rc::new(());
    ///     tokio::task::yield_now().await;
    ///     drop(local);
    ///     Ok::<_, Infallible>(Response::new(Full::<bytes::Bytes>::default()))
    /// });
    /// let layer = RedlockLayer::new(Redlock::in_memory(1), "key");
    /// let layer = layer.on_disconnect(RunToCompletion); // compiles without this line
    /// layer.layer(inner).call(Request::new(()));
    /// ```
    pub fn on_disconnect(self, _: RunToCompletion) -> RedlockLayer<RunToCompletion> {
        RedlockLayer {
            config: Config {
                runs_to_completion: true,
                ..self.config
            },
            on_disconnect: PhantomData,
        }
    }

    /// Sets the status for a lock that somebody else holds. Default: 423 Locked.
    pub fn contended_status(mut self, status: StatusCode) -> Self {
        self.config.contended_status = status;
        self
    }

    /// Sets how refusals look. Default: problem+json (RFC 9457), or a gRPC status.
    pub fn rejection(mut self, rejection: impl RejectionResponse) -> Self {
        self.config.refusals.set_response(rejection);
        self
    }

    /// Puts the fencing token into this header of the inner request. Default: none.
    ///
    /// From every request, locked or not, what a client sent in its place is removed first: headers of that
    /// name, those whose name is the same once `_` is read as `-` (as CGI and WSGI do), and the name among
    /// the options of `Connection`, with which a proxy further in would drop the token. Trailers are left as
    /// they are: a service that merges them into headers must not read the token from there.
    pub fn forward_token(mut self, header: HeaderName) -> Self {
        self.config.forward_token = Some(header);
        self
    }

    /// Puts the fencing token into this header of the response. Default: none.
    pub fn expose_token(mut self, header: HeaderName) -> Self {
        self.config.expose_token = Some(header);
        self
    }
}

impl<S> Layer<S> for RedlockLayer<CancelOnDisconnect> {
    type Service = RedlockService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        RedlockService::new(inner, Arc::new(self.config.clone()))
    }
}

impl<S> Layer<S> for RedlockLayer<RunToCompletion> {
    type Service = RedlockService<RunToCompletionService<S>>;

    fn layer(&self, inner: S) -> Self::Service {
        let inner = RunToCompletionService::new(inner);
        RedlockService::new(inner, Arc::new(self.config.clone()))
    }
}

impl<D> fmt::Debug for RedlockLayer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedlockLayer")
            .field("redlock", &self.config.redlock)
            .finish_non_exhaustive()
    }
}

impl Config {
    /// Returns the keys to lock for a request, or why it passes through unlocked.
    pub(super) fn keys(&self, parts: &Parts) -> Result<Result<LockKeys, NotLocked>, Rejection> {
        let locked = match &self.methods {
            Some(methods) => are_meant(methods, &parts.method),
            None => !is_safe(&parts.method),
        };
        if !locked {
            return Ok(Err(NotLocked::Method));
        }
        if self.skip.as_ref().is_some_and(|skip| skip(parts)) {
            return Ok(Err(NotLocked::Skipped));
        }
        let keys = self.key.extract(parts).map_err(Rejection::of_key)?;
        match keys {
            Some(keys) if present(&keys) => Ok(Ok(keys)),
            _ => match self.missing_key {
                OnMissingKey::Pass => Ok(Err(NotLocked::NoKey)),
                OnMissingKey::Reject if matched_no_route(parts) => Ok(Err(NotLocked::NoKey)),
                OnMissingKey::Reject | OnMissingKey::RejectAlways => Err(Rejection::KeyMissing),
            },
        }
    }

    pub(super) fn lock(&self, keys: LockKeys, held: &LockHandles) -> LockFuture {
        held.lock(&self.redlock, keys, |request| {
            let options = LockOptions {
                ttl: self.ttl,
                wait: Some(self.wait),
                max_hold: self.max_hold,
                label: self.label,
            };
            let options = self.redlock.request_options(options);
            request.options(options).cap(self.waiters.clone())
        })
    }
}

/// Whether a method is among these, or runs the handler of one that is.
pub(crate) fn are_meant(methods: &[Method], method: &Method) -> bool {
    methods.contains(method) || (*method == Method::HEAD && methods.contains(&Method::GET))
}

/// Listed by hand: `Method::is_safe` changes with the version of `http`.
fn is_safe(method: &Method) -> bool {
    matches!(
        method.as_str(),
        "GET" | "HEAD" | "OPTIONS" | "TRACE" | "QUERY"
    )
}
