//! The layer and its settings.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::request::Parts;
use http::{Extensions, HeaderName, Method, StatusCode, response};
use tower::Layer;

use crate::idempotency::codec::Codec;
#[cfg(feature = "encryption")]
use crate::idempotency::codec::RecordKeys;
use crate::idempotency::fingerprint;
use crate::idempotency::header::IdempotencyKey;
use crate::idempotency::service::IdempotencyService;
use crate::lock::{BuildError, LockOptions, Redlock, WaiterCap};
use crate::middleware::{
    KeyExtractor, Refusals, Rejection, RejectionResponse, are_meant, matched_no_route, present,
};
use crate::node::sha256;
use crate::once::{ExecuteOnce, ExecutionHandle};
use crate::protocol::{Fingerprint, LockKey, MAX_CLEAR_KEY};

/// Layer that applies the [`IdempotencyService`] middleware: one execution per idempotency key and
/// caller, and the recorded response for every duplicate.
///
/// ```
/// use axum::{Router, routing::post};
/// use tower_redlock::{IdempotencyLayer, Redlock, key};
///
/// #[derive(Clone)]
/// struct UserId(String); // put into the extensions by authentication, which stands outside
///
/// # async fn pay() {}
/// let redlock = Redlock::in_memory(3);
/// let whose = key::extension::<UserId>(|user| &user.0);
/// let app: Router = Router::new()
///     .route("/payments", post(pay))
///     .route_layer(IdempotencyLayer::new(redlock, whose));
/// ```
///
/// # What it promises
///
/// While leases hold, one execution per key; after a majority has recorded the response, none any more,
/// for as long as it is kept. A handler that is paused for longer than its lock, or a process that dies
/// between its effect and the record, lets a retry execute again: only a storage that keeps the
/// [`IdempotencyKey`] in the transaction of the effect makes that impossible.
/// [`at_most_once`](Self::at_most_once) refuses such retries instead.
///
/// An execution that has begun keeps its lock, and a share of every other lock that the request holds, until
/// it ends: also when the client goes away, when a layer outside drops the request, or when it calls again.
/// If a [`RedlockLayer`](crate::RedlockLayer) outside loses its lock, the execution is stopped, unless that
/// layer is set to [`OnLost::Notify`](crate::OnLost::Notify).
///
/// An execution that ends without a response, by an error or a panic, may have had an effect: its key stays
/// locked until its ttl, and a retry executes after that, or gets 409 `outcome-unknown` with
/// [`at_most_once`](Self::at_most_once).
///
/// The handler finds an [`ExecutionHandle`] and the [`IdempotencyKey`] in the extensions of its request.
/// [`LockHandle`](crate::LockHandle) and [`FencingToken`](crate::FencingToken) are those of the resource
/// layers alone.
#[derive(Clone)]
#[must_use = "a layer does nothing until it is applied"]
pub struct IdempotencyLayer {
    config: Config,
}

/// What to answer when the response could not be recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnUnrecorded {
    /// The response, with the header `Idempotency-Recorded: false`.
    Answer,
    /// 409 `outcome-unknown`.
    Fail,
}

/// What the service does with each request; shared by all clones of it.
#[derive(Clone)]
pub(super) struct Config {
    pub(super) redlock: Redlock,
    scope: Arc<dyn KeyExtractor>,
    header: HeaderName,
    methods: Arc<[Method]>,
    required: bool,
    pub(super) retention: Duration,
    fingerprint: Arc<dyn Fn(&Parts, &[u8]) -> Vec<u8> + Send + Sync>,
    /// `None` for the default, which also looks at the request.
    record_if: Option<Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>>,
    pub(super) max_request_body: usize,
    pub(super) max_response_body: usize,
    pub(super) options: LockOptions,
    waiters: Option<Arc<WaiterCap>>,
    pub(super) replay_header: HeaderName,
    pub(super) keep_cookies: bool,
    at_most_once: bool,
    pub(super) on_unrecorded: OnUnrecorded,
    pub(super) codec: Codec,
    pub(super) refusals: Refusals,
}

/// An idempotent request, once its head has been read.
pub(super) struct Asked {
    pub(super) key: IdempotencyKey,
    /// What is locked and recorded.
    pub(super) resource: LockKey,
    /// Whether a router has found no route for the request, as far as is known.
    pub(super) matched_no_route: bool,
}

impl IdempotencyLayer {
    /// Makes a layer for the keys of those whom `scope` tells apart.
    ///
    /// There is no default: without a scope one caller would be shown what another was answered, and
    /// the hash of a credential changes when that is refreshed. [`scope::public`] says that there are no
    /// tenants. A request for which the scope finds nothing is refused with 500 `scope-missing`.
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
                options: LockOptions::default().label("idempotency"),
                waiters: None,
                replay_header: HeaderName::from_static("idempotency-replayed"),
                keep_cookies: false,
                at_most_once: false,
                on_unrecorded: OnUnrecorded::Answer,
                codec: Codec::default(),
                refusals: Refusals::new(),
            },
        }
    }

    /// Sets the header that carries the key. Default: `Idempotency-Key`.
    pub fn header(mut self, header: HeaderName) -> Self {
        self.config.header = header;
        self
    }

    /// Sets the methods that are made idempotent. Default: POST and PATCH; the others are idempotent
    /// (RFC 9110, section 9.2.2) or safe, and pass through. GET stands for HEAD too.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.config.methods = methods.into_iter().collect();
        self
    }

    /// Sets whether a request without a key is refused with 400 `key-missing`. Default: false, it is
    /// served as if there were no layer.
    ///
    /// One that matched no route of an axum router passes in any case, to its 404: a fallback that does
    /// something asks for the [`IdempotencyKey`] itself.
    pub fn required(mut self, required: bool) -> Self {
        self.config.required = required;
        self
    }

    /// Sets how long responses are kept, between a millisecond and 100 years of 365 days. Default: 24 h.
    ///
    /// Outside of that range the nearest end of it is taken, with a warning in the log.
    pub fn retention(mut self, retention: Duration) -> Self {
        // A node takes no record without a ttl, nor with one that it cannot add to its clock.
        let used = retention.clamp(SHORTEST, LONGEST);
        if used != retention {
            tracing::warn!(
                setting = "retention", asked = ?retention, ?used,
                "a setting of an IdempotencyLayer is out of its range"
            );
        }
        self.config.retention = used;
        self
    }

    /// Sets what makes two requests with one key the same request; another is refused with 422
    /// `idempotency-key-reused`. Default: method, path, query, content type and body, where `/~a` and `/%7Ea`
    /// are one path (RFC 3986, section 6.2.2).
    ///
    /// The bytes are hashed with SHA-256.
    pub fn fingerprint(
        mut self,
        fingerprint: impl Fn(&Parts, &[u8]) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        self.config.fingerprint = Arc::new(fingerprint);
        self
    }

    /// Sets which responses are recorded. Default: those that a handler gives for good.
    ///
    /// By default these are not recorded, because a retry may be answered differently: 5xx, 401, 407, 408,
    /// 423, 425 and 429, a 409 with `Retry-After`, 405, and a 404 of a request for which an axum router
    /// around the layer has found no route. With a function of your own, it alone decides about these.
    ///
    /// To refuse a response is to state that the operation had no effect: a retry executes it.
    ///
    /// Refusals of this crate's layers and extractors within, such as 423 of a
    /// [`RedlockLayer`](crate::RedlockLayer), are never recorded and never given to the function: the handler
    /// was not called. Nor is anything recorded if a lock was lost and the handler stopped midway: what it
    /// did is not known, and the key stays locked until its ttl.
    pub fn record_if(
        mut self,
        record_if: impl Fn(&response::Parts) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.config.record_if = Some(Arc::new(record_if));
        self
    }

    /// Sets the largest request body in bytes; a larger one is refused with 413. Default: 2 MiB.
    pub fn max_request_body(mut self, bytes: usize) -> Self {
        self.config.max_request_body = bytes;
        self
    }

    /// Sets the largest response body, in bytes, that is kept: at most 1 MiB, because it travels on the
    /// connection of all locks. Default: 64 KiB.
    ///
    /// Of a larger one, of one whose size is not bounded beforehand, and of a response whose headers and
    /// trailers together are over 64 KiB, it is recorded only that there was one: a duplicate gets 409
    /// `result-not-kept`, and nothing is executed again.
    ///
    /// Over 1 MiB that is taken, with a warning in the log.
    pub fn max_response_body(mut self, bytes: usize) -> Self {
        let used = bytes.min(LARGEST);
        if used != bytes {
            tracing::warn!(
                setting = "max_response_body",
                asked = bytes,
                used,
                "a setting of an IdempotencyLayer is out of its range"
            );
        }
        self.config.max_response_body = used;
        self
    }

    /// Sets how long a duplicate waits for the first execution, to replay its response. Default: zero,
    /// it is refused with 409 `lock-contended`.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.config.options = self.config.options.wait(wait);
        self
    }

    /// Sets how many requests may wait in this layer at once; one more gets 503. Default: no limit.
    pub fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.config.waiters = Some(WaiterCap::new(max_waiters));
        self
    }

    /// Sets the ttl of the lock under which a request is executed. Default: that of the [`Redlock`].
    ///
    /// # Errors
    ///
    /// As [`RedlockLayer::ttl`](crate::RedlockLayer::ttl).
    pub fn ttl(mut self, ttl: Duration) -> Result<Self, BuildError> {
        self.config.redlock.check_ttl(ttl)?;
        self.config.options = self.config.options.ttl(ttl);
        Ok(self)
    }

    /// Sets how long an execution may take. Default: no bound; an execution that has begun keeps its lock
    /// until it ends, and the `max_hold` of the [`Redlock`] does not apply to it.
    ///
    /// The lock is asked for and renewed for so long, at least for two node timeouts, and at the bound the
    /// execution is stopped: two executions must not run at once. The caller gets 503 `lock-lost`, an error event is logged, and `redlock_lost_total`
    /// counts it with the reason `max_hold`. What the stopped execution did is not known: a retry executes
    /// again once the lock has ended by its ttl, or gets 409 `outcome-unknown` with
    /// [`at_most_once`](Self::at_most_once).
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.config.options = self.config.options.max_hold(max_hold);
        self
    }

    /// Sets the header that marks a replayed response with `true`. Default: `Idempotency-Replayed`.
    pub fn replay_header(mut self, header: HeaderName) -> Self {
        self.config.replay_header = header;
        self
    }

    /// Sets whether `Set-Cookie` is recorded too. Default: false, a session is given out once.
    pub fn keep_cookies(mut self, keep_cookies: bool) -> Self {
        self.config.keep_cookies = keep_cookies;
        self
    }

    /// Sets whether what may have been executed is never executed again. Default: false.
    ///
    /// Then a retry after a crash between grant and record, after a panic and after a response that
    /// was refused by [`record_if`](Self::record_if) gets 409 `outcome-unknown` instead, for a day.
    /// It does so as long as a majority of the nodes remembers that something began.
    pub fn at_most_once(mut self, at_most_once: bool) -> Self {
        self.config.at_most_once = at_most_once;
        self
    }

    /// Sets what is answered when no majority took the record. Default: [`OnUnrecorded::Answer`].
    pub fn on_unrecorded(mut self, on_unrecorded: OnUnrecorded) -> Self {
        self.config.on_unrecorded = on_unrecorded;
        self
    }

    /// Sets above how many bytes records are compressed (LZ4). Default: never.
    ///
    /// All servers that share records need the feature `compression` to read them: give it to all before
    /// this is set. Where records are encrypted, the size tells of what is in them; see
    /// [the chapter](crate::guide::idempotency).
    #[cfg(feature = "compression")]
    pub fn compress_above(mut self, bytes: usize) -> Self {
        self.config.codec.compress_above = Some(bytes);
        self
    }

    /// Sets the keys with which records are encrypted. Default: none, they are kept as they are.
    #[cfg(feature = "encryption")]
    pub fn encrypt(mut self, keys: RecordKeys) -> Self {
        self.config.codec.keys = Some(keys);
        self
    }

    /// Sets how refusals look. Default: problem+json (RFC 9457), or a gRPC status.
    pub fn rejection(mut self, rejection: impl RejectionResponse) -> Self {
        self.config.refusals.set_response(rejection);
        self
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService::new(inner, Arc::new(self.config.clone()))
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("redlock", &self.config.redlock)
            .finish_non_exhaustive()
    }
}

impl Config {
    /// Returns what a request asks for; `None` if it passes through.
    pub(super) fn asked(&self, parts: &Parts) -> Result<Option<Asked>, Rejection> {
        if !are_meant(&self.methods, &parts.method) {
            return Ok(None);
        }
        let key = IdempotencyKey::of(parts, &self.header).map_err(Rejection::KeyInvalid)?;
        let Some(key) = key else {
            return if self.required && !matched_no_route(parts) {
                Err(Rejection::KeyMissing)
            } else {
                Ok(None)
            };
        };
        let scope = self.scope.extract(parts).map_err(Rejection::of_key)?;
        let scope = scope.filter(present).ok_or(Rejection::ScopeMissing)?;
        // A scope of several keys is as one: it is not what is locked.
        let scope = LockKey::from_parts(scope.as_slice().iter().map(LockKey::as_bytes));
        let resource = LockKey::from_parts([
            b"idempotency",
            scope.as_bytes(),
            parts.method.as_str().as_bytes(),
            fingerprint::resource_path(parts).as_bytes(),
            key.as_str().as_bytes(),
        ]);
        // Not all namespaces take long keys, and this one is no other client's.
        let resource = if resource.as_bytes().len() > MAX_CLEAR_KEY {
            LockKey::from_parts([b"idempotency", &sha256(resource.as_bytes())[..]])
        } else {
            resource
        };
        // The same layer further out: the lock that would refuse this request is its own. One that has ended
        // does not count: a retry in between asks anew.
        let executing = parts.extensions.get::<Executing>();
        if executing.is_some_and(|executing| executing.has(&self.redlock, &resource)) {
            return Ok(None);
        }
        Ok(Some(Asked {
            key,
            resource,
            matched_no_route: matched_no_route(parts),
        }))
    }

    pub(super) fn fingerprint_of(&self, parts: &Parts, body: &[u8]) -> Fingerprint {
        fingerprint::digest(&(self.fingerprint)(parts, body))
    }

    pub(super) fn once(&self, resource: LockKey, fingerprint: Fingerprint) -> ExecuteOnce {
        let once = self.redlock.once(resource).digest(fingerprint);
        let once = once.options(self.options).cap(self.waiters.clone());
        once.at_most_once(self.at_most_once)
    }

    /// Whether the response of a handler is recorded.
    pub(super) fn is_recorded(&self, head: &response::Parts, matched_no_route: bool) -> bool {
        match &self.record_if {
            Some(record_if) => record_if(head),
            None => is_final(head, matched_no_route),
        }
    }
}

/// The executions that a request is part of, outermost first; in its extensions.
#[derive(Debug, Clone, Default)]
pub(super) struct Executing(Vec<(ExecutionHandle, Answered)>);

/// Whether the inner service has answered. What has the extensions of its request from then on, such as a task that
/// its handler has left behind, is no part of the execution any more, while that is being recorded.
#[derive(Debug, Clone, Default)]
pub(super) struct Answered(Arc<AtomicBool>);

impl Executing {
    /// Returns those of a request.
    pub(super) fn of(extensions: &Extensions) -> Self {
        extensions.get::<Self>().cloned().unwrap_or_default()
    }

    /// Adds one, and returns what is to be told when it is answered.
    pub(super) fn push(&mut self, execution: ExecutionHandle) -> Answered {
        let answered = Answered::default();
        self.0.push((execution, answered.clone()));
        answered
    }

    fn has(&self, redlock: &Redlock, resource: &LockKey) -> bool {
        let mut executions = self.0.iter();
        executions.any(|(execution, answered)| {
            !answered.is_set() && execution.is_executing(redlock, resource)
        })
    }
}

impl Answered {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Whether a retry would be answered the same: not where the service failed, or asked to come back or to
/// authenticate first, or had no route for the request.
fn is_final(head: &response::Parts, matched_no_route: bool) -> bool {
    let transient = match head.status {
        StatusCode::UNAUTHORIZED
        | StatusCode::PROXY_AUTHENTICATION_REQUIRED
        | StatusCode::REQUEST_TIMEOUT
        | StatusCode::LOCKED
        | StatusCode::TOO_EARLY
        | StatusCode::TOO_MANY_REQUESTS => true,
        StatusCode::CONFLICT => head.headers.contains_key(RETRY_AFTER),
        // Also the router's: the next version may have a route for it.
        StatusCode::METHOD_NOT_ALLOWED => true,
        StatusCode::NOT_FOUND => matched_no_route,
        status => status.is_server_error(),
    };
    // A refusal that was made from one of ours, say by `map_response`.
    let refused = head.extensions.get::<Rejection>().is_some();
    !transient && !refused
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Larger records keep the nodes from answering other locks within the node timeout.
const LARGEST: usize = 1024 * 1024;

const SHORTEST: Duration = Duration::from_millis(1);

const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
