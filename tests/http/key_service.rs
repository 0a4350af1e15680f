//! A service that reports how its layer treated the key of a request.

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::{HeaderValue, Request, StatusCode};
use support::{request, three_nodes};
use tower::ServiceExt;
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{
    KeyExtractor, LockHandle, LockKey, LockKeys, Redlock, RedlockLayer, Rejection,
};

use crate::key_service::Treatment::{Locked, NotFound, Refused};

/// How a request is to be treated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Treatment {
    /// Served under these locks.
    Locked(LockKeys),
    /// Refused with a status and a code, without asking any node.
    Refused(u16, &'static str),
    /// Not refused, and not served by the handler either.
    NotFound,
}

pub(crate) const MISSING: Treatment = Refused(400, "key-missing");

pub(crate) const INVALID: Treatment = Refused(400, "key-invalid");

pub(crate) const MISCONFIGURED: Treatment = Refused(500, "misconfigured");

pub(crate) fn locked(key: impl Into<LockKey>) -> Treatment {
    Locked(key.into().into())
}

/// The user that an authentication in front of the layer found.
#[derive(Debug, Clone)]
pub(crate) struct User(pub(crate) &'static str);

impl User {
    pub(crate) fn name(&self) -> &str {
        self.0
    }
}

/// The handler: answers only under a lock, with the keys in an extension for the test.
pub(crate) async fn handler(request: axum::extract::Request) -> Response {
    let handle = request.extensions().get::<LockHandle>();
    let handle = handle.unwrap_or_else(|| panic!("{request:?} is served without a lock"));
    assert!(!handle.keys().is_empty());
    assert!(handle.keys().iter().all(|key| !key.is_empty()));
    let mut response = StatusCode::OK.into_response();
    let keys: LockKeys = handle.keys().iter().cloned().collect();
    response.extensions_mut().insert(keys);
    response
}

pub(crate) fn router() -> Router {
    Router::new()
        .route("/things", post(handler))
        .route("/things/{id}", post(handler))
        .route("/files/{*path}", post(handler))
}

/// Sends requests to an app under the layer and checks each treatment twice: as it is, and while the
/// expected lock is held by another client.
pub(crate) struct Service {
    pub(crate) nodes: ScriptedNodes,
    pub(crate) redlock: Redlock,
}

impl Service {
    pub(crate) fn new() -> Self {
        let (nodes, redlock) = three_nodes();
        Self { nodes, redlock }
    }

    pub(crate) fn layer(&self, key: impl KeyExtractor) -> RedlockLayer {
        RedlockLayer::new(self.redlock.clone(), key)
    }

    pub(crate) async fn check(&self, app: &Router, request: Request<Body>, expected: Treatment) {
        let what: String = format!("{request:?}").chars().take(200).collect();
        let head = request.into_parts().0;
        let request = || Request::from_parts(head.clone(), Body::empty());
        let treatment = self.treatment(app, request(), &what).await;
        assert_eq!(treatment, expected, "{what}");
        if let Locked(keys) = expected {
            let elsewhere = self.redlock.lock_all(keys.as_slice().to_vec()).await;
            let refused = self.treatment(app, request(), &what).await;
            assert_eq!(refused, Refused(423, "lock-contended"), "{what}");
            elsewhere.unwrap().release().await.unwrap();
        }
    }

    pub(crate) async fn treatment(
        &self,
        app: &Router,
        request: Request<Body>,
        what: &str,
    ) -> Treatment {
        let asked = self.nodes.sent(0, OpKind::Acquire);
        let response = app.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let treatment = match response.extensions().get::<Rejection>() {
            Some(rejection) => {
                assert_eq!(rejection.status(), status, "{what}");
                Refused(status.as_u16(), rejection.code())
            }
            None if status == StatusCode::NOT_FOUND => NotFound,
            None => Locked(response.extensions().get::<LockKeys>().unwrap().clone()),
        };
        let asked = self.nodes.sent(0, OpKind::Acquire) - asked;
        match treatment {
            Locked(_) => assert_eq!(asked, 1, "{what}"),
            Refused(..) => assert_eq!(asked, 0, "{what}: {treatment:?}"),
            // A request that names its key is locked even on its way to a 404.
            NotFound => assert!(asked <= 1, "{what}"),
        }
        treatment
    }
}

pub(crate) fn to(uri: &str) -> Request<Body> {
    request("POST", uri)
}

pub(crate) fn with_headers(values: &[&[u8]]) -> Request<Body> {
    let mut request = to("/things");
    for value in values {
        let value = HeaderValue::from_bytes(value).unwrap();
        request.headers_mut().append("x-key", value);
    }
    request
}
