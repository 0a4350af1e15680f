//! The settings of the layer, and its decision about a request.

use std::sync::Arc;

use http::request::Parts;
use http::{HeaderName, Method, StatusCode};

use crate::lock::{LockError, LockOptions, Redlock};
use crate::middleware::key::{KeyExtractor, present};
use crate::middleware::rejection::Rejection;
use crate::middleware::response::Refusals;
use crate::middleware::routed::matched_no_route;
use crate::node::telemetry;
use crate::protocol::{KeyError, LockKeys};

/// Settings of a [`RedlockLayer`](crate::RedlockLayer), shared by all clones of its service.
#[derive(Clone)]
pub(super) struct Config {
    pub(super) redlock: Redlock,
    pub(super) key: Arc<dyn KeyExtractor>,
    pub(super) methods: Option<Arc<[Method]>>,
    pub(super) shared_methods: Option<Arc<[Method]>>,
    pub(super) skip: Option<Arc<dyn Fn(&Parts) -> bool + Send + Sync>>,
    pub(super) options: LockOptions,
    pub(super) options_of: Option<Arc<dyn Fn(&Parts) -> LockOptions + Send + Sync>>,
    pub(super) missing_key: OnMissingKey,
    pub(super) on_unavailable: OnUnavailable,
    pub(super) release_at: ReleaseAt,
    pub(super) await_release: bool,
    pub(super) on_lost: OnLost,
    pub(super) contended_status: StatusCode,
    pub(super) refusals: Refusals,
    pub(super) forward_token: Option<HeaderName>,
    pub(super) expose_token: Option<HeaderName>,
    pub(super) expose_holder: bool,
}

/// What to do with a request that does not name a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// Answer 400, so that a client cannot avoid the lock by leaving out the key.
    ///
    /// A request that matched no route of an axum router still passes, to its 404.
    Reject,
    /// Answer 400 also if no route matched: for a layer around a fallback that does work, such as a
    /// proxy.
    RejectAlways,
    /// Serve the request without a lock.
    Pass,
}

/// What to do when no majority of the nodes can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUnavailable {
    /// Answer 503.
    Reject,
    /// Serve the request without a lock, with a warning in the log and without a [`LockHandle`](crate::LockHandle) in its
    /// extensions. Use it for locks that save work, never for locks that keep data correct.
    Proceed,
}

/// When the lock is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseAt {
    /// With the last frame of the response body, or the one that completes its length. What the body does behind that, such
    /// as to make trailers, is done without the lock.
    BodyEnd,
    /// Before the head of the response is sent; for large or slow downloads.
    ResponseHead,
}

/// What to do when the lock is lost while it is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLost {
    /// Stop the handler and answer 503; a body that is being sent ends with an error.
    Abort,
    /// Continue; the handler can ask the [`LockHandle`](crate::LockHandle) in its extensions.
    Notify,
}

/// Why the layer serves a request without a lock, for the log of a handler that extracts the lock; an extension of the
/// request.
#[derive(Clone, Copy)]
pub(crate) struct NotLocked(pub(crate) &'static str);

impl NotLocked {
    const METHOD: Self = Self(
        "the layer does not lock this method; extract Option<LockHandle>, or add the method to `methods`",
    );
    const SKIPPED: Self =
        Self("the `skip` function of the layer matched the request; extract Option<LockHandle>");
    const NO_KEY: Self = Self(
        "the request names no resource; extract Option<LockHandle>, or leave `missing_key` at Reject",
    );
    pub(super) const UNAVAILABLE: Self = Self(
        "`on_unavailable(Proceed)` served the request without a quorum; extract Option<LockHandle>",
    );
}

impl Config {
    /// Decides with which keys a request is locked, or why it passes, if the layer does not refuse it.
    pub(super) fn keys(&self, parts: &Parts) -> Result<Result<LockKeys, NotLocked>, Rejection> {
        let is_locked = match &self.methods {
            Some(methods) => has_method(methods, &parts.method),
            None => !is_safe(&parts.method),
        };
        if !is_locked && !self.is_shared(&parts.method) {
            return Ok(Err(NotLocked::METHOD));
        }
        if self.shared_methods.is_some() && self.options.is_slot() {
            return Err(Rejection::Misconfigured(KeyError::misconfigured(
                "a RedlockLayer has both `max_concurrent` and `shared_methods`, whose locks would not exclude each other; \
                 use two layers, with a literal of its own in the key of each",
            )));
        }
        if self.skip.as_ref().is_some_and(|skip| skip(parts)) {
            return Ok(Err(NotLocked::SKIPPED));
        }
        let keys = self.key.extract(parts);
        if let Some(keys) = keys.map_err(Rejection::from_key_error)?.filter(present) {
            return Ok(Ok(keys));
        }
        match self.missing_key {
            OnMissingKey::Pass => Ok(Err(NotLocked::NO_KEY)),
            OnMissingKey::Reject if matched_no_route(parts) => Ok(Err(NotLocked::NO_KEY)),
            OnMissingKey::Reject | OnMissingKey::RejectAlways => {
                let source = self.key.describe().source;
                self.refusals.log_lacking(|| {
                    format!(
                        "they name no resource of `{}`, whose key comes from {}; set `missing_key` or `skip` if they need no lock",
                        self.label(),
                        source.as_deref().unwrap_or("a function"),
                    )
                });
                Err(Rejection::key_missing(source))
            }
        }
    }

    /// Returns the options of the lock of a request.
    pub(super) fn options(&self, parts: &Parts) -> LockOptions {
        let mut own = self.options.clone();
        if self.is_shared(&parts.method) {
            own = own.shared();
        }
        match &self.options_of {
            None => own,
            Some(options_of) => options_of(parts).or(own),
        }
    }

    /// Returns the refusal of a request whose lock has these options.
    pub(super) fn refusal(&self, error: LockError, options: &LockOptions) -> Rejection {
        let (status, exposes_holder) = (self.contended_status, self.expose_holder);
        Rejection::from_lock_error(error, options, status, exposes_holder)
    }

    fn is_shared(&self, method: &Method) -> bool {
        let methods = self.shared_methods.as_ref();
        methods.is_some_and(|methods| has_method(methods, method))
    }

    /// Returns the kind of resource in metrics.
    pub(super) fn label(&self) -> &'static str {
        self.options.label.unwrap_or(telemetry::UNNAMED)
    }
}

/// Returns whether the list has a method. GET stands for HEAD too, for which routers run the handler of GET.
pub(crate) fn has_method(methods: &[Method], method: &Method) -> bool {
    methods.contains(method) || (*method == Method::HEAD && methods.contains(&Method::GET))
}

/// Returns whether a method is safe. Listed here because `Method::is_safe` depends on the version of `http`.
fn is_safe(method: &Method) -> bool {
    matches!(
        method.as_str(),
        "GET" | "HEAD" | "OPTIONS" | "TRACE" | "QUERY"
    )
}
