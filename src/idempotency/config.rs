//! The settings of the layer, and how it reads the head of a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, response};

use crate::idempotency::codec::Codec;
use crate::idempotency::fingerprint;
use crate::idempotency::header::read_key;
use crate::lock::{LockOptions, Redlock};
use crate::middleware::idempotency_key::IdempotencyKey;
use crate::middleware::{KeyExtractor, Refusals, Rejection, has_method, matched_no_route, present};
use crate::node::sha256;
use crate::once::{ExecuteOnce, ExecutionHandle};
use crate::protocol::{LockKey, MAX_CLEAR_KEY};

/// Settings of an [`IdempotencyLayer`](crate::IdempotencyLayer), shared by all clones of its service.
#[derive(Clone)]
pub(super) struct Config {
    pub(super) redlock: Redlock,
    pub(super) scope: Arc<dyn KeyExtractor>,
    pub(super) header: HeaderName,
    pub(super) methods: Arc<[Method]>,
    pub(super) required: bool,
    pub(super) retention: Duration,
    pub(super) fingerprint: Arc<dyn Fn(&Parts, &[u8]) -> Vec<u8> + Send + Sync>,
    /// `None` for the default, which depends on the request too.
    pub(super) record_if: Option<Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>>,
    pub(super) max_request_body: usize,
    pub(super) max_response_body: usize,
    pub(super) options: LockOptions,
    pub(super) at_most_once: bool,
    pub(super) require_record: bool,
    pub(super) codec: Codec,
    pub(super) refusals: Refusals,
}

/// The executions that a request is part of, outermost first; an extension of the request.
///
/// Each has a flag that is set once the inner service has answered. From then on, requests with a clone of these
/// extensions, such as those of a task that the handler spawned, are no longer part of the execution.
#[derive(Clone, Default)]
pub(super) struct ActiveExecutions(Vec<(ExecutionHandle, LayerId, Arc<AtomicBool>)>);

/// The scope of a layer. Clones of the layer share it, and no other layer does.
type LayerId = Arc<dyn KeyExtractor>;

impl Config {
    /// Reads the idempotency key of a request, and makes the key that is locked and recorded; `None` if the request passes
    /// through.
    pub(super) fn keyed(
        &self,
        parts: &Parts,
    ) -> Result<Option<(IdempotencyKey, LockKey)>, Rejection> {
        if !has_method(&self.methods, &parts.method) {
            return Ok(None);
        }
        let key = read_key(parts, &self.header).map_err(Rejection::KeyInvalid)?;
        let Some(key) = key else {
            if self.required && !matched_no_route(parts) {
                let source = format!("header `{}`", self.header);
                let required = "which `required(true)` of an IdempotencyLayer demands";
                let lacking = || format!("they lack the {source}, {required}");
                self.refusals.log_lacking(lacking);
                return Err(Rejection::key_missing(Some(source)));
            }
            return Ok(None);
        };
        let scope = self.scope.extract(parts);
        let scope = scope.map_err(Rejection::from_key_error)?;
        let Some(scope) = scope.filter(present) else {
            let source = self.scope.describe().source;
            let mistake = format!(
                "the scope of an IdempotencyLayer found no caller in {}",
                source.as_deref().unwrap_or("the result of its function")
            );
            self.refusals.log_misconfigured("scope", &mistake);
            return Err(Rejection::ScopeMissing);
        };
        // A scope of several keys becomes one part of the key.
        let scope = LockKey::from_parts(scope.as_slice().iter().map(LockKey::as_bytes));
        let paths = fingerprint::resource_paths(parts);
        let mut named = vec![scope.as_bytes(), parts.method.as_str().as_bytes()];
        named.extend(paths.iter().map(String::as_bytes));
        named.push(key.as_str().as_bytes());
        let mut resource = resource_of(&named);
        // An execution that has ended does not count, so that a retry between the two layers executes again.
        let active = parts.extensions.get::<ActiveExecutions>();
        while let Some(layer) = active.and_then(|all| all.layer_of(&self.redlock, &resource)) {
            // This layer executes this very request already, and its lock would refuse it.
            if Arc::ptr_eq(layer, &self.scope) {
                return Ok(None);
            }
            // Another layer does, which would refuse it too, and whose record is not this layer's.
            resource = resource_of(&[b"within", resource.as_bytes()]);
        }
        Ok(Some((key, resource)))
    }

    pub(super) fn once(&self, resource: LockKey) -> ExecuteOnce {
        let mut once = self.redlock.once(resource);
        once.options = self.options.clone();
        once.at_most_once = self.at_most_once;
        once.retention = self.retention;
        once
    }

    /// Returns whether the response of a handler is recorded.
    pub(super) fn is_recorded(&self, head: &response::Parts, matched_no_route: bool) -> bool {
        match &self.record_if {
            Some(record_if) => record_if(head),
            None => is_final(head, matched_no_route),
        }
    }

    /// Returns whether the trailers agree, of a response that is recorded by its head.
    pub(super) fn is_recorded_with(&self, trailers: Option<&HeaderMap>) -> bool {
        self.record_if.is_some() || !trailers.is_some_and(has_transient_status)
    }
}

impl ActiveExecutions {
    /// Adds an execution of a layer, and returns the flag to set once it is answered.
    pub(super) fn push(&mut self, execution: ExecutionHandle, layer: &Config) -> Arc<AtomicBool> {
        let is_answered = Arc::<AtomicBool>::default();
        let layer = Arc::clone(&layer.scope);
        self.0.push((execution, layer, Arc::clone(&is_answered)));
        is_answered
    }

    /// Returns the layer that executes a resource.
    fn layer_of(&self, redlock: &Redlock, resource: &LockKey) -> Option<&LayerId> {
        self.0.iter().find_map(|(execution, layer, is_answered)| {
            let is_of_key = redlock.owns(&execution.0) && execution.key() == resource;
            let is_active = !is_answered.load(Ordering::Relaxed);
            (is_active && is_of_key && execution.0.lease().is_shared()).then_some(layer)
        })
    }
}

/// Returns the key of these parts. Not all namespaces accept long keys; no other client uses this key, so it can be
/// hashed.
fn resource_of(parts: &[&[u8]]) -> LockKey {
    let resource = LockKey::from_parts([&[&b"idempotency"[..]], parts].concat());
    if resource.as_bytes().len() > MAX_CLEAR_KEY {
        LockKey::from_parts([b"idempotency", &sha256(resource.as_bytes())[..]])
    } else {
        resource
    }
}

/// Returns whether a retry would be answered the same: not after a failure, not if the client is asked to retry or
/// to authenticate, and not if no route matched.
fn is_final(head: &response::Parts, matched_no_route: bool) -> bool {
    let is_transient = match head.status {
        StatusCode::UNAUTHORIZED
        | StatusCode::PROXY_AUTHENTICATION_REQUIRED
        | StatusCode::REQUEST_TIMEOUT
        | StatusCode::LOCKED
        | StatusCode::TOO_EARLY
        | StatusCode::TOO_MANY_REQUESTS => true,
        StatusCode::CONFLICT => head.headers.contains_key(RETRY_AFTER),
        // Even from the router: the next version may have a route.
        StatusCode::METHOD_NOT_ALLOWED => true,
        StatusCode::NOT_FOUND => matched_no_route,
        status => status.is_server_error(),
    };
    // A refusal of this crate that a layer such as `map_response` has changed.
    let is_refused = head.extensions.get::<Rejection>().is_some();
    !is_transient && !is_refused && !has_transient_status(&head.headers)
}

/// Returns whether headers or trailers have a gRPC status with which a call failed for the moment: CANCELLED,
/// DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, ABORTED, INTERNAL, UNAVAILABLE or UNAUTHENTICATED.
fn has_transient_status(fields: &HeaderMap) -> bool {
    let status = fields.get("grpc-status").map(HeaderValue::as_bytes);
    matches!(
        status,
        Some(b"1" | b"4" | b"8" | b"10" | b"13" | b"14" | b"16")
    )
}
