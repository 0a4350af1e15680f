//! A lock per resource on a quorum of Redis nodes: a tower layer, axum extractors and a plain async lock.
//!
#![doc = include_str!("guide/links.md")]
#![doc = include_str!("guide/images/playground.md")]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(all(feature = "full", feature = "unstable-protocol")),
    allow(
        rustdoc::broken_intra_doc_links,
        rustdoc::private_intra_doc_links,
        reason = "the guide and its list of links also name items of features that are off"
    )
)]

#[macro_use]
mod macros;

#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "axum")]
mod extract;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
pub mod guide;
#[cfg(feature = "idempotency")]
pub mod idempotency;
mod lock;
pub mod middleware;
mod node;
mod once;
#[cfg(not(feature = "unstable-protocol"))]
#[allow(
    dead_code,
    unreachable_pub,
    unnameable_types,
    unused_imports,
    clippy::enum_variant_names,
    reason = "it is public for the proofs, with a feature"
)]
mod protocol;
#[cfg(feature = "unstable-protocol")]
pub mod protocol;

#[cfg(feature = "redis")]
#[doc(no_inline)]
pub use deadpool_redis;
#[cfg(feature = "axum")]
pub use extract::{
    ExtractorRejection, LockResource, Locked, LockedRejection, admin_router, health_router,
};
#[cfg(feature = "idempotency")]
#[doc(inline)]
pub use idempotency::layer::IdempotencyLayer;
pub use lock::*;
#[cfg(any(feature = "client", feature = "idempotency"))]
#[doc(inline)]
pub use middleware::idempotency_key::IdempotencyKey;
#[doc(inline)]
pub use middleware::{
    body::LockBody,
    buffer::BufferBodyLayer,
    buffered::BufferedBody,
    config::{OnLost, OnMissingKey, OnUnavailable, ReleaseAt},
    held::LockHandles,
    key::KeyExtractor,
    layer::{CancelOnDisconnect, RedlockLayer, RunToCompletion},
    rejection::Rejection,
    response::{RejectionResponse, RequestKind},
};
#[cfg(feature = "metrics")]
pub use node::LATENCY_BUCKETS;
#[cfg(feature = "redis")]
pub use node::{Credentials, CredentialsProvider};
pub use node::{NodeFailure, NodeState};
pub use once::*;
pub use protocol::message::KeyState;
#[doc(inline)]
pub use protocol::{
    FencingToken, Holder, KeyError, LockKey, LockKeys, ParseFencingTokenError, Retry,
};

/// Extractors of lock keys: one function per part of a request.
///
/// The key of a [`RedlockLayer`] is usually a tuple of a literal and an extractor. The literal names the kind of
/// resource, and keeps its keys distinct from those of other kinds:
///
/// ```
/// use tower_redlock::{Redlock, RedlockLayer, key};
///
/// let redlock = Redlock::in_memory(3);
/// let per_tenant = ("invoice", key::header("x-tenant"), key::query("number"));
/// let layer = RedlockLayer::new(redlock, per_tenant);
/// # let _: RedlockLayer = layer;
/// ```
///
/// | part of a request | extractor |
/// |---|---|
/// | path parameter, of a route of axum | [`path`](key::path), [`typed_path`](key::typed_path) |
/// | matched route, of axum | [`matched_path`](key::matched_path) |
/// | header, cookie | [`header`](key::header), [`cookie`](key::cookie) |
/// | query string | [`query`](key::query) |
/// | host, method | [`host`](key::host), [`method`](key::method) |
/// | value that another layer has put into the extensions | [`extension`](key::extension) |
/// | body, behind a [`BufferBodyLayer`] | [`form_field`](key::form_field); with the feature `json`, [`json_pointer`](key::json_pointer) |
/// | anything in the head | a closure, [`from_fn`](key::from_fn) |
/// | nothing: the same for all requests | a `&'static str`, [`literal`](key::literal) |
/// | two resources at once | [`each`](key::each) |
///
/// [`KeyExtractor`] has methods that combine and change extractors: `prefix`, `and`, `map`, `hashed`, `or` and
/// `when`.
pub mod key {
    #[cfg(feature = "axum")]
    pub use crate::extract::{matched_path, path, typed_path};
    #[cfg(feature = "json")]
    pub use crate::middleware::key::json_pointer;
    pub use crate::middleware::key::{
        cookie, each, extension, form_field, from_fn, header, host, literal, method, query,
    };
}

/// Scopes for [`IdempotencyLayer::new`]: which caller an idempotency key belongs to.
#[cfg(feature = "idempotency")]
pub mod scope {
    pub use crate::idempotency::layer::public;
}

/// Tools for tests: embedded nodes whose answers can be delayed, lost or forged, and a
/// simulation of several processes.
#[cfg(feature = "test-util")]
pub mod test_util {
    pub use crate::lock::traces::Traces;
    pub use crate::node::scripted::{Gate, OpKind, ScriptedNodes};
    #[cfg(feature = "unstable-protocol")]
    pub use crate::node::sim::{SimNetwork, SimRequest, SimSubscriber};
    #[cfg(feature = "unstable-protocol")]
    pub use crate::node::sim_env::SimEnv;
}
