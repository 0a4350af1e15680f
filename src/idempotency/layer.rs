//! The layer, with its settings, and its service: reads the request, and replays its response or starts its execution.

use std::fmt::Debug;
use std::future::{pending, ready};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryFutureExt;
use http::request::Parts;
use http::{HeaderName, Method, Request, Response, response};
use http_body::Body;
use tower::{BoxError, Layer, Service, ServiceExt};

#[cfg(feature = "encryption")]
use crate::idempotency::RecordKeys;
use crate::idempotency::codec::Codec;
use crate::idempotency::config::{ActiveExecutions, Config};
use crate::idempotency::fingerprint;
use crate::idempotency::task::{ExecutionTask, Responder};
use crate::lock::{BuildError, LockOptions, Redlock, WaiterCap};
use crate::middleware::key::literal;
use crate::middleware::{
    CallToken, CallTracker, KeyExtractor, LockBody, LockHandles, ReadBody, Refusals,
    RejectionResponse, RequestKind, matched_no_route, read,
};
use crate::node::telemetry;
use crate::once::{DAY, MAX_BODY, RETENTION, bound, run_to_end};
use crate::protocol::lease::Effect;

/// Layer that applies the [`IdempotencyService`] middleware: one execution per idempotency key and
/// caller, and the recorded response for every duplicate.
///
/// ```
/// use axum::{Router, routing::post};
/// use tower_redlock::{IdempotencyLayer, Redlock, key};
///
/// #[derive(Clone)]
/// struct UserId(String); // put into the extensions by an authentication layer outside
///
/// # async fn pay() {}
/// let redlock = Redlock::in_memory(3);
/// let caller = key::extension::<UserId>(|user| &user.0);
/// let app: Router = Router::new()
///     .route("/payments", post(pay))
///     .route_layer(IdempotencyLayer::new(redlock, caller));
/// ```
///
/// # Guarantees
///
/// While leases hold, each key has one execution at a time. Once a majority has recorded the response, the key has
/// no further execution for as long as the record is kept. If a handler is paused for longer than its lock, or a
/// process dies between its effect and the record, a retry executes again. Only a storage that keeps the
/// [`IdempotencyKey`](crate::IdempotencyKey) in the transaction of the effect prevents that.
/// [`at_most_once`](Self::at_most_once) refuses such retries instead.
///
/// An execution that has begun keeps its lock, and a share of every other lock that the request holds, until
/// it ends, even if the client disconnects, or an outer layer drops the request or calls again. It ends with the body
/// of its response, which is read to its end also without the client: an endless body needs
/// [`max_hold`](Self::max_hold). A body that is streamed in HTTP/1, but for
/// gRPC, ends with its `Content-Length`.
///
/// If an outer [`RedlockLayer`](crate::RedlockLayer) loses its lock, the execution is stopped, unless that
/// layer is set to [`OnLost::Notify`](crate::OnLost::Notify).
///
/// An execution that ends without a response, by an error or a panic, may have had an effect. Its key stays
/// locked until its ttl; after that, a retry executes, or gets 409 `outcome-unknown` with
/// [`at_most_once`](Self::at_most_once). The error of tower's `LoadShed`, or of an inner service that does not become
/// ready, shows that the handler was not called: it frees the key. A handler that has had an effect must not return
/// such an error of a client of its own, nor the refusal of another service that uses this crate: in both cases, a
/// retry executes.
///
/// The key of a request is its `Idempotency-Key` within the caller, the method and the path. A request that a handler
/// sends on with its extensions, as batches and gateways do, is another one if it goes to another path. A layer passes
/// a request through that it executes already; a second layer executes it with a key of its own.
///
/// The extensions of the handler's request have an [`ExecutionHandle`](crate::ExecutionHandle) and the
/// [`IdempotencyKey`](crate::IdempotencyKey). [`LockHandle`](crate::LockHandle) and
/// [`FencingToken`](crate::FencingToken) belong to resource layers only.
///
/// The inner service gets the body as a [`ReadBody`]. One that takes axum's body only, such as
/// `axum::middleware::from_fn` in a `ServiceBuilder`, needs tower-http's `MapRequestBodyLayer::new(Body::new)` before it.
/// Routers and handlers take any body.
///
/// # Panics
///
/// The future of a request with a key panics outside of a tokio runtime with a timer.
#[derive(Clone)]
#[must_use = "a layer does nothing until it is applied"]
pub struct IdempotencyLayer {
    config: Config,
}

impl IdempotencyLayer {
    /// Creates a layer. Requests are keyed by `Idempotency-Key` within the caller that `scope` finds.
    ///
    /// The scope has no default: without one, a caller would get the responses to other callers. The hash of a
    /// credential is no scope, because it changes when the credential is refreshed. [`scope::public`] is for
    /// services without tenants. If the scope finds no caller, the request is refused with 500 `scope-missing`.
    ///
    /// [`scope::public`]: crate::scope::public
    pub fn new(redlock: Redlock, scope: impl KeyExtractor) -> Self {
        Self {
            config: Config {
                redlock,
                scope: Arc::new(scope),
                header: HeaderName::from_static("idempotency-key"),
                methods: [Method::POST, Method::PATCH].into(),
                required: false,
                retention: DAY,
                fingerprint: Arc::new(fingerprint::of_request),
                record_if: None,
                max_request_body: 2 * 1024 * 1024,
                max_response_body: 64 * 1024,
                options: LockOptions::default().label(LABEL),
                at_most_once: false,
                require_record: false,
                codec: Codec::default(),
                refusals: Refusals::new(),
            },
        }
    }

    layer_setters! {
        /// Sets how long a duplicate waits for the first execution, to replay its response. Default: zero,
        /// the duplicate is refused with 409 `request-in-progress`.
        wait(wait: Duration) => config.options.wait = Some(wait);

        /// Sets how many requests may wait in this layer at once; one more gets 503. Default: no limit.
        max_waiters(max_waiters: usize) => config.options.cap = Some(WaiterCap::new(max_waiters));

        /// Sets how long an execution may take. Default: no bound. An execution that has begun keeps its lock
        /// until it ends; the `max_hold` of the [`Redlock`] does not apply to it.
        ///
        /// The lock is acquired and renewed for that long, and at least for two node timeouts. At the bound the
        /// execution is stopped, so that no other execution runs at the same time: the client gets 503
        /// `lock-lost`, an error event is logged, and `redlock_lost_total` counts it with the reason `max_hold`.
        /// The effect of the stopped execution is unknown. A retry executes again once the lock has ended by its
        /// ttl, or gets 409 `outcome-unknown` with [`at_most_once`](Self::at_most_once).
        max_hold(max_hold: Duration) => config.options.max_hold = Some(max_hold);

        /// Sets how refusals look. Default: problem+json (RFC 9457), or a gRPC status.
        rejection(rejection: impl RejectionResponse) => config.refusals.response = Arc::new(rejection);

        /// Sets the header that carries the key. Default: `Idempotency-Key`.
        header(header: HeaderName) => config.header = header;

        /// Sets whether a request without a key is refused with 400 `key-missing`. Default: false, it is
        /// served without the layer.
        ///
        /// A request that matched no route of an axum router always passes, to its 404. A fallback that does work
        /// must ask for the [`IdempotencyKey`](crate::IdempotencyKey) itself.
        required(required: bool) => config.required = required;

        /// Sets the methods that are executed once per key. Default: POST and PATCH. The others are idempotent
        /// (RFC 9110, section 9.2.2) or safe, and pass through. GET stands for HEAD too.
        methods(methods: impl IntoIterator<Item = Method>) => config.methods = methods.into_iter().collect();

        /// Sets how long responses are kept, between a millisecond and 100 years of 365 days. Default: 24 h.
        ///
        /// A value out of that range is replaced by the nearest one in it, with a warning in the log.
        retention(retention: Duration) =>
            config.retention = bound("an IdempotencyLayer", "retention", retention, RETENTION);

        /// Sets the bytes by which two requests with one key are the same request; a different request is refused
        /// with 422 `idempotency-key-reused`. Default: the method, the path and the query, the headers `If-Match`,
        /// `Content-Type` and `Content-Encoding`, and the body. `/~a` and `/%7Ea` are the same path (RFC 3986, section 6.2.2).
        /// Of a request that was sent on with the extensions of another, the original path and query count as well.
        ///
        /// All other headers are left out, such as `Accept`, `Cookie` and `If-None-Match`: a duplicate gets the recorded
        /// response whatever they say, and whatever the `Vary` of that response says.
        ///
        /// The bytes are hashed with SHA-256.
        fingerprint(fingerprint: impl Fn(&Parts, &[u8]) -> Vec<u8> + Send + Sync + 'static) =>
            config.fingerprint = Arc::new(fingerprint);

        /// Sets which responses are recorded. Default: final ones.
        ///
        /// By default these are not recorded, because the answer to a retry may differ: 5xx, 401, 407, 408,
        /// 423, 425 and 429, a 409 with `Retry-After`, 405, and a 404 of a request for which an axum router
        /// around the layer has matched no route; gRPC statuses 1, 4, 8, 10, 13, 14 and 16, in the head or in the
        /// trailers. A function that is set here decides alone, by the head.
        ///
        /// If the function returns false, the operation must not have had an effect: a retry executes it.
        ///
        /// Refusals of inner layers and extractors of this crate, such as 423 of a
        /// [`RedlockLayer`](crate::RedlockLayer), are never recorded and not passed to the function, because the
        /// handler was not called. If a lock was lost and the handler stopped midway, nothing is recorded either: its
        /// effect is unknown, and the key stays locked until its ttl.
        record_if(record_if: impl Fn(&response::Parts) -> bool + Send + Sync + 'static) =>
            config.record_if = Some(Arc::new(record_if));

        /// Sets the largest response body, in bytes, that is kept: at most 1 MiB, because records share the
        /// connection with all locks. Default: 64 KiB.
        ///
        /// If the body is larger, if its size has no bound in advance, or if headers and trailers together exceed
        /// 64 KiB, the record says only that the request was executed: a duplicate gets 409 `result-not-kept`, and
        /// is not executed. Such a body is sent while the execution goes on, which ends, and is recorded, with the body.
        ///
        /// A value over 1 MiB is replaced by 1 MiB, with a warning in the log.
        max_response_body(bytes: usize) =>
            config.max_response_body = bound("an IdempotencyLayer", "max_response_body", bytes, 0..=MAX_BODY);

        /// Sets the largest request body in bytes; a larger one is refused with 413. Default: 2 MiB.
        max_request_body(max_request_body: usize) => config.max_request_body = max_request_body;

        /// Sets whether a request that may have been executed is never executed again. Default: false.
        ///
        /// If true, a retry gets 409 `outcome-unknown` for a day after a crash between grant and record, after a
        /// panic, and after a response for which [`record_if`](Self::record_if) returned false. This holds as long as a
        /// majority of the nodes remembers the intent to execute.
        at_most_once(at_most_once: bool) => config.at_most_once = at_most_once;

        /// Sets whether a response that no majority recorded is replaced by 409 `outcome-unknown`. Default: false, it is
        /// sent with the header `Idempotency-Recorded: false`.
        require_record(require_record: bool) => config.require_record = require_record;

        /// Sets above how many bytes records are compressed (LZ4). Default: never.
        ///
        /// All servers that share records need the feature `compression` to read them: enable it on all of them
        /// first. If records are encrypted as well, their size reveals something about their content; see
        /// [the chapter](crate::guide::idempotency).
        #[cfg(feature = "compression")]
        compress_above(bytes: usize) => config.codec.compress_above = Some(bytes);

        /// Sets the keys with which records are encrypted. Default: none, records are stored in clear.
        #[cfg(feature = "encryption")]
        encrypt(keys: RecordKeys) => config.codec.keys = Some(keys);
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        telemetry::register(LABEL, true);
        let config = Arc::new(self.config.clone());
        IdempotencyService { inner, config }
    }
}

#[cfg(feature = "utoipa")]
into_responses! {
    /// The refusals of the layer, with its default `rejection`; see those of a [`RedlockLayer`](crate::RedlockLayer).
    ///
    /// A replay is one of the handler's own responses.
    IdempotencyLayer: 400 | 408 | 409 | 413 | 422 | 500 | 503,
}

opaque_debug! { IdempotencyLayer [redlock = config.redlock] }

/// Returns the scope of a service without tenants: every client that sends a key gets the response that was
/// recorded for it.
///
/// For services whose keys cannot be guessed, or whose responses are not secret. All other services identify
/// the caller by the result of authentication: `key::extension::<UserId>(..)`. Do not use an address, or a
/// credential: a refreshed credential would count as another caller and execute again.
#[must_use]
pub fn public() -> impl KeyExtractor + Clone {
    literal(("scope", "public"))
}

/// Middleware that executes a request once per idempotency key, and replays its response.
///
/// Created by [`IdempotencyLayer`], which has an example.
#[derive(Clone)]
pub struct IdempotencyService<S> {
    inner: S,
    config: Arc<Config>,
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for IdempotencyService<S>
where
    S: Service<Request<ReadBody<ReqBody>>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    ReqBody: Body<Data = Bytes, Error: Into<BoxError> + Send> + Send + 'static,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    boxed_service!(Response<LockBody<ResBody>>);

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        // Before the key is read: extractors of axum copy the extensions. Until the execution starts, each early return is a
        // refusal for an idempotency layer outside.
        let outer_calls = parts.extensions.remove();
        let outer_calls = outer_calls.as_ref().map(CallToken::take_over);
        let (key, resource) = match self.config.keyed(&parts) {
            Ok(Some(keyed)) => keyed,
            Ok(None) => {
                if let Some(outer_calls) = outer_calls {
                    outer_calls.pass_on(&mut parts.extensions);
                }
                let body = ReadBody::unread(body);
                let inner = self.inner.call(Request::from_parts(parts, body));
                return Box::pin(inner.map_ok(|response| response.map(LockBody::unlocked)));
            }
            Err(rejection) => {
                let refusal = self.config.refusals.refuse_request(rejection, &parts);
                return Box::pin(ready(Ok(refusal.map(LockBody::boxed))));
            }
        };
        // Reading the body and asking the nodes may take long: give up readiness, such as a permit, and ask for it again
        // before the inner service is called.
        self.inner = self.inner.clone();
        let mut inner = self.inner.clone();
        let mut responder = Responder {
            config: Arc::clone(&self.config),
            once: self.config.once(resource),
            kind: RequestKind::of(&parts),
            outer_calls,
        };
        // Dropped before the execution starts, this gives the key back. After that, the execution continues without it.
        Box::pin(async move {
            let body = match read(body, responder.config.max_request_body).await {
                Ok(body) => body,
                Err(rejection) => return Ok(responder.refuse(rejection)),
            };
            let fingerprint = (responder.config.fingerprint)(&parts, &body.bytes);
            responder.once = responder.once.fingerprint(fingerprint);
            let execution = match responder.once.acquire().await {
                Ok(execution) => execution,
                Err(denied) => return Ok(responder.denied(denied).await),
            };
            if let Err(error) = inner.ready().await {
                // Before the error is returned: a retry must not meet the lock of the request that it repeats.
                execution.release(Effect::NotBegun).await;
                return Err(error);
            }
            let handle = execution.handle();
            let active: &mut ActiveExecutions = parts.extensions.get_or_insert_default();
            let is_answered = active.push(handle.clone(), &responder.config);
            parts.extensions.insert(handle);
            parts.extensions.insert(key);
            // Before the token is put in, which would count as copied.
            let matched_no_route = matched_no_route(&parts);
            let calls = Arc::<CallTracker>::default();
            calls.pass_on(&mut parts.extensions);
            let held = parts.extensions.get::<LockHandles>();
            let held = held.map(LockHandles::share).unwrap_or_default();
            let request = Request::from_parts(parts, body);
            let task = ExecutionTask {
                execution,
                held,
                calls,
                matched_no_route,
                version: request.version(),
                is_answered,
                responder,
            };
            match run_to_end(task.run(inner, request)).await {
                Some(answered) => answered,
                // The runtime is shutting down, and this future with it.
                None => pending().await,
            }
        })
    }
}

opaque_debug! { IdempotencyService<S> [inner = inner] where S: Debug }

/// The kind of resource in spans and metrics.
const LABEL: &str = "idempotency";
