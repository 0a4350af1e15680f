//! The layer, and what happens to a request whose client disconnects: it is dropped, or its handler runs to completion.
//!
//! # Implementation details
//!
//! With [`RunToCompletion`], the future of the layer goes on in a task if it is dropped while its handler runs. It ends
//! there as it would have ended here: with the response, or with the lock.

use std::future::pending;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Method, Request, Response, StatusCode};
use http_body::Body;
use tokio::runtime::Handle;
use tower::{BoxError, Layer, Service};
use tracing::{Instrument, Span};

use crate::lock::{BuildError, Left, LockOptions, Redlock, WaiterCap};
use crate::middleware::body::LockBody;
use crate::middleware::config::{Config, OnLost, OnMissingKey, OnUnavailable, ReleaseAt};
use crate::middleware::key::KeyExtractor;
use crate::middleware::response::{Refusals, RejectionResponse};
use crate::middleware::service::{RedlockService, ResponseFuture};
use crate::node::telemetry;
use crate::protocol::lease::Access;

/// Layer that applies the [`RedlockService`] middleware: a lock per resource around a service.
///
/// Requests exclude each other by resource, in all processes that share the nodes. The inner service's
/// error type is kept and a refusal is a response, so no `HandleErrorLayer` is needed.
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
///
/// A handler under the layer holds the lock, and must not request it from the [`Redlock`] again: locks are not
/// re-entrant. It gets a share from [`LockHandle::upgrade`](crate::LockHandle::upgrade). A
/// [`Locked`](crate::Locked) extractor of the handler shares the lock by itself.
///
/// # Panics
///
/// The future of a locked request panics outside of a tokio runtime with a timer.
#[derive(Clone)]
#[must_use = "a layer does nothing until it is applied"]
pub struct RedlockLayer<D = CancelOnDisconnect> {
    config: Config,
    on_disconnect: PhantomData<D>,
}

impl RedlockLayer {
    /// Creates a layer that locks the resource that `key` finds in each request.
    ///
    /// If the key consists of literals only, all requests share one lock. That is rarely intended, so
    /// the layer logs a warning.
    pub fn new(redlock: Redlock, key: impl KeyExtractor) -> Self {
        let description = key.describe();
        let label = description.label.unwrap_or(telemetry::UNNAMED);
        if description.is_constant {
            tracing::warn!(
                resource = label,
                "the key of a RedlockLayer is the same for every request, so all requests share one lock; \
                 add a part that names the resource, such as `key::path`"
            );
        }
        Self {
            config: Config {
                redlock,
                // The label is never from the key of a request, which clients choose.
                options: LockOptions::default().label(label),
                options_of: None,
                key: Arc::new(key),
                methods: None,
                shared_methods: None,
                skip: None,
                missing_key: OnMissingKey::Reject,
                on_unavailable: OnUnavailable::Reject,
                release_at: ReleaseAt::BodyEnd,
                await_release: true,
                on_lost: OnLost::Abort,
                contended_status: StatusCode::LOCKED,
                refusals: Refusals::new(),
                forward_token: None,
                expose_token: None,
                expose_holder: false,
            },
            on_disconnect: PhantomData,
        }
    }
}

impl<D> RedlockLayer<D> {
    layer_setters! {
        /// Sets how long a request waits for a held lock. Default: zero, fail fast.
        ///
        /// A waiting request holds no readiness of the inner service.
        wait(wait: Duration) => config.options.wait = Some(wait);

        /// Sets how many requests may wait in this layer at once; one more gets 503. Default: no limit.
        max_waiters(max_waiters: usize) => config.options.cap = Some(WaiterCap::new(max_waiters));

        /// Sets the time after which a lock is not renewed any more. Default: the builder's, or 60 s if the
        /// builder has none.
        max_hold(max_hold: Duration) => config.options.max_hold = Some(max_hold);

        /// Sets how refusals look. Default: problem+json (RFC 9457), or a gRPC status.
        rejection(rejection: impl RejectionResponse) => config.refusals.response = Arc::new(rejection);

        /// Sets the methods that are locked. Default: all but GET, HEAD, OPTIONS, TRACE and QUERY,
        /// which are safe (RFC 9110, section 9.2.1) and pass through unlocked.
        ///
        /// This list replaces the default. GET stands for HEAD too, for which routers run the handler of GET.
        methods(methods: impl IntoIterator<Item = Method>) => config.methods = Some(methods.into_iter().collect());

        /// Sets the methods that take the lock as readers: their requests run beside each other, but not beside one of
        /// the other locked methods. Default: none. They are locked, whether [`methods`](Self::methods) names them or not.
        ///
        /// GET stands for HEAD too. A request that waits to hold the lock alone keeps new readers out. Readers have no
        /// fencing token; see [`LockRequest::shared`](crate::LockRequest::shared) for what they are protected from.
        ///
        /// ```
        /// use axum::{Router, routing::get};
        /// use http::Method;
        /// use tower_redlock::{Redlock, RedlockLayer, key};
        ///
        /// # async fn read() {}
        /// # async fn write() {}
        /// let layer = RedlockLayer::new(Redlock::in_memory(3), ("page", key::path("id")));
        /// let app: Router = Router::new()
        ///     .route("/pages/{id}", get(read).put(write))
        ///     .route_layer(layer.shared_methods([Method::GET]));
        /// ```
        shared_methods(methods: impl IntoIterator<Item = Method>) =>
            config.shared_methods = Some(methods.into_iter().collect());

        /// Lets up to `n` requests for a resource run at a time, between 1 and 64. Default: one. Only
        /// [`methods`](Self::methods) that are locked are limited.
        ///
        /// One more is answered 429 `too-many-concurrent` with `Retry-After`, or waits with [`wait`](Self::wait). Each
        /// request holds one of `n` slots; see [`LockRequest::slots`](crate::LockRequest::slots). All layers for a resource
        /// must use the same `n`. Without a part of the request in the key, `n` bounds all requests of all processes:
        ///
        /// ```
        /// use axum::{Router, routing::post};
        /// use tower_redlock::{Redlock, RedlockLayer, key};
        ///
        /// # async fn convert() {}
        /// let layer = RedlockLayer::new(Redlock::in_memory(3), ("converter", key::header("x-tenant")));
        /// let app: Router = Router::new()
        ///     .route("/convert", post(convert))
        ///     .route_layer(layer.max_concurrent(5));
        /// ```
        ///
        /// With an `n` out of this range, or with [`shared_methods`](Self::shared_methods), each request is answered 500 `misconfigured`.
        /// A kind of lock that [`options`](Self::options) chooses for a request applies to it instead.
        max_concurrent(n: usize) => config.options.access = Some(Access::Slot(n));

        /// Sets which requests of the locked [`methods`](Self::methods) pass through unlocked. Default: none.
        skip(skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) => config.skip = Some(Arc::new(skip));

        /// Sets the options of the lock for each request. Default: those of the layer, for all requests.
        ///
        /// An option that the function does not set is that of the layer. The function is called for requests that are
        /// locked. Choose among few values, because clients make the requests:
        ///
        /// ```
        /// use std::time::Duration;
        /// use http::request::Parts;
        /// use tower_redlock::{LockOptions, Redlock, RedlockLayer, key};
        ///
        /// /// Imports take longer, and wait for each other.
        /// fn options(parts: &Parts) -> LockOptions {
        ///     let options = LockOptions::default();
        ///     if parts.uri.path().ends_with("/import") {
        ///         return options.wait(Duration::from_secs(30)).max_hold(Duration::from_secs(600));
        ///     }
        ///     options
        /// }
        ///
        /// let layer = RedlockLayer::new(Redlock::in_memory(3), ("catalogue", key::path("id")))
        ///     .max_hold(Duration::from_secs(10))
        ///     .options(options);
        /// # let _: RedlockLayer = layer;
        /// ```
        ///
        /// A request whose ttl exceeds the `max_ttl` of the [`Redlock`], or is used up by clock drift, is refused with 500
        /// `misconfigured`. A lock that the request holds already keeps the options with which it was acquired.
        options(options: impl Fn(&Parts) -> LockOptions + Send + Sync + 'static) =>
            config.options_of = Some(Arc::new(options));

        /// Sets what happens to a request that names no resource. Default: [`OnMissingKey::Reject`].
        ///
        /// A request that matched no route of an axum router passes by default, to the router's fallback. If
        /// the fallback needs the lock, set [`OnMissingKey::RejectAlways`].
        missing_key(missing_key: OnMissingKey) => config.missing_key = missing_key;

        /// Sets what happens when no majority can be reached. Default: [`OnUnavailable::Reject`].
        on_unavailable(on_unavailable: OnUnavailable) => config.on_unavailable = on_unavailable;

        /// Sets when the lock is released. Default: [`ReleaseAt::BodyEnd`].
        release_at(release_at: ReleaseAt) => config.release_at = release_at;

        /// Sets whether the last frame of the response waits until a majority has confirmed the
        /// release. Default: true.
        ///
        /// False saves a round trip per request, but then the client's next request may find the lock still
        /// held.
        await_release(await_release: bool) => config.await_release = await_release;

        /// Sets what happens when the lock is lost. Default: [`OnLost::Abort`].
        on_lost(on_lost: OnLost) => config.on_lost = on_lost;

        /// Sets the status of a refusal because of contention. Default: 423 Locked, also in place of a status that is no
        /// error.
        contended_status(contended_status: StatusCode) => config.contended_status = error_or_locked(contended_status);

        /// Sets the name of the kind of resource, for spans and metrics, which never show a key. Default:
        /// the first literal part of the key, or `unnamed`.
        label(label: &'static str) => config.options.label = Some(label);

        /// Puts the fencing token into this header of the inner request. Default: none.
        ///
        /// From every request, locked or not, the layer first removes headers with that name, headers with a name
        /// that equals it once `_` is read as `-` (as CGI and WSGI do), and the name among the options of
        /// `Connection`, which would make an inner proxy drop the token. So a client cannot forge a token. Trailers
        /// are not changed: a service that merges trailers into headers must not read the token from there.
        forward_token(header: HeaderName) => config.forward_token = Some(header);

        /// Puts the fencing token into this header of the response. Default: none.
        expose_token(header: HeaderName) => config.expose_token = Some(header);

        /// Sets whether a refusal because of contention says who holds the lock, in the member `holder` of its body. Default:
        /// false.
        ///
        /// The member has the `label` of the holder's process and the `note` on its lock, as far as they are set; see
        /// [`Holder`](crate::Holder). Every client can read them then.
        expose_holder(expose_holder: bool) => config.expose_holder = expose_holder;
    }

    /// Lets a handler that has started run to completion when its client disconnects. Default:
    /// [`CancelOnDisconnect`], which drops the handler.
    ///
    /// Requires the inner service, its future, response and error, and the body of the request to be `Send + 'static`;
    /// this future is not:
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
            config: self.config,
            on_disconnect: PhantomData,
        }
    }

    fn around<S>(&self, inner: S) -> RedlockService<S> {
        telemetry::register(self.config.label(), false);
        let config = Arc::new(self.config.clone());
        RedlockService { inner, config }
    }
}

impl<S> Layer<S> for RedlockLayer<CancelOnDisconnect> {
    type Service = RedlockService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        self.around(inner)
    }
}

impl<S> Layer<S> for RedlockLayer<RunToCompletion> {
    type Service = RunToCompletionService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        let inner = self.around(inner);
        RunToCompletionService { inner }
    }
}

/// Others would be told that they have what they asked for, or may not have a body.
fn error_or_locked(status: StatusCode) -> StatusCode {
    match status.is_client_error() || status.is_server_error() {
        true => status,
        false => StatusCode::LOCKED,
    }
}

opaque_debug! { RedlockLayer<D> [redlock = config.redlock] }

/// Drop the handler when the client disconnects, at any `await`, and release the lock, as hyper
/// does without a lock. The default of [`RedlockLayer`](crate::RedlockLayer).
#[derive(Debug, Clone)]
pub struct CancelOnDisconnect;

/// Let a handler that has started run to completion under its lock when the client disconnects.
///
/// From then on, the handler runs in a task of its own, in the span of the request. When it completes, the lock is
/// released and the response dropped. With [`OnLost::Abort`](crate::OnLost::Abort) the handler ends with the lock, so
/// `max_hold` bounds it. A client whose request was aborted may meet its own lock with its next request.
#[derive(Debug, Clone, Copy)]
pub struct RunToCompletion;

/// [`RedlockService`] that lets handlers run to completion.
#[derive(Debug, Clone)]
#[expect(
    unnameable_types,
    reason = "it differs from a `RedlockService` in the bounds only"
)]
pub struct RunToCompletionService<S> {
    inner: RedlockService<S>,
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for RunToCompletionService<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    ReqBody: Send + 'static,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    boxed_service!(Response<LockBody<ResBody>>);

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (runtime, span) = (Handle::try_current().ok(), Span::current());
        let go_on = move |running: Pin<Box<ResponseFuture<S, ReqBody>>>| {
            if let Some(runtime) = &runtime
                && running.is_handling()
            {
                runtime.spawn(running.instrument(span.clone()));
            }
        };
        let mut left = Left(Some(Box::pin(self.inner.call(request))), go_on);
        Box::pin(async move {
            match &mut left.0 {
                Some(running) => running.await,
                // It is there until the drop.
                None => pending().await,
            }
        })
    }
}
