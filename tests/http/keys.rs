//! Which lock a request gets, and how requests are treated that name none, name it badly, or meet a
//! layer that is set up wrongly: never a panic, never a lock on "", never an unlocked handler.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::header::{COOKIE, HOST};
use http::{HeaderName, HeaderValue, Method, Request, StatusCode, Uri};
use proptest::prelude::*;
use tower::{Layer, ServiceExt};
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{
    IdempotencyLayer, KeyError, KeyExtractor, LockHandle, LockKey, LockKeys, OnMissingKey, Redlock,
    RedlockLayer, Rejection, key, scope,
};

use crate::support::{Log, subscribe};

/// How a request is to be treated.
#[derive(Debug, Clone, PartialEq)]
enum Treatment {
    /// Served under these locks.
    Locked(LockKeys),
    /// Refused with a status and a code, without asking any node.
    Refused(u16, &'static str),
    /// Not refused, and not served by the handler either.
    NotFound,
}

use Treatment::{Locked, NotFound, Refused};

const MISSING: Treatment = Refused(400, "key-missing");
const INVALID: Treatment = Refused(400, "key-invalid");
const MISCONFIGURED: Treatment = Refused(500, "misconfigured");

fn locked(key: impl Into<LockKey>) -> Treatment {
    Locked(key.into().into())
}

/// The user that an authentication in front of the layer found.
#[derive(Debug, Clone)]
struct User(&'static str);

impl User {
    fn name(&self) -> &str {
        self.0
    }
}

/// The handler: answers only under a lock, with the keys in an extension for the test.
async fn handler(request: axum::extract::Request) -> Response {
    let handle = request.extensions().get::<LockHandle>();
    let Some(handle) = handle else {
        panic!(
            "{} {} is served without a lock",
            request.method(),
            request.uri()
        );
    };
    assert!(!handle.keys().is_empty());
    assert!(handle.keys().iter().all(|key| !key.is_empty()));
    let mut response = StatusCode::OK.into_response();
    let keys: LockKeys = handle.keys().iter().cloned().collect();
    response.extensions_mut().insert(keys);
    response
}

fn router() -> Router {
    Router::new()
        .route("/things", post(handler))
        .route("/things/{id}", post(handler))
        .route("/files/{*path}", post(handler))
}

/// Sends requests to an app under the layer and checks each treatment twice: as it is, and while the
/// lock that is expected to be taken is held by somebody else.
struct Service {
    nodes: ScriptedNodes,
    redlock: Redlock,
}

impl Service {
    fn new() -> Self {
        Self::in_namespace("redlock")
    }

    fn in_namespace(namespace: &str) -> Self {
        let nodes = ScriptedNodes::new(3);
        let redlock = Redlock::builder().scripted(&nodes).namespace(namespace);
        let redlock = redlock.build().unwrap();
        Self { nodes, redlock }
    }

    fn layer(&self, key: impl KeyExtractor) -> RedlockLayer {
        RedlockLayer::new(self.redlock.clone(), key)
    }

    async fn check(&self, app: &Router, request: Request<Body>, expected: Treatment) {
        let what: String = format!("{request:?}").chars().take(200).collect();
        let copy = copy_of(&request);
        assert_eq!(
            self.treatment(app, request, &what).await,
            expected,
            "{what}"
        );
        if let Locked(keys) = expected {
            let elsewhere = self.redlock.lock_all(keys.as_slice().to_vec()).await;
            let refused = self.treatment(app, copy, &what).await;
            assert_eq!(refused, Refused(423, "lock-contended"), "{what}");
            elsewhere.unwrap().release().await.unwrap();
        }
    }

    async fn treatment(&self, app: &Router, request: Request<Body>, what: &str) -> Treatment {
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

fn copy_of(request: &Request<Body>) -> Request<Body> {
    let mut copy = Request::new(Body::empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    copy
}

fn to(uri: &str) -> Request<Body> {
    Request::post(uri).body(Body::empty()).unwrap()
}

fn with_headers(values: &[&[u8]]) -> Request<Body> {
    let mut request = to("/things");
    for value in values {
        let value = HeaderValue::from_bytes(value).unwrap();
        let name = HeaderName::from_static("x-key");
        request.headers_mut().append(name, value);
    }
    request
}

#[tokio::test(start_paused = true)]
async fn key_header_locks_one_value_and_refuses_the_rest() {
    let service = Service::new();
    let app = router().layer(service.layer(key::header("x-key")));
    let (long, huge) = ("k".repeat(64 * 1024), "k".repeat(1024 * 1024));
    let rows: [(&[&[u8]], Treatment); 9] = [
        (&[], MISSING),
        (&[b""], MISSING),
        (&[b"7"], locked("7")),
        (&[b"a b\t:{}"], locked("a b\t:{}")),
        (&["\u{20ac}".as_bytes()], locked("\u{20ac}")),
        (&[b"7", b"7"], INVALID),
        (&[b"", b"7"], INVALID),
        (&[b"\xff"], INVALID),
        (&[b"7\xc3"], INVALID),
    ];
    for (values, expected) in rows {
        service.check(&app, with_headers(values), expected).await;
    }
    for key in [long, huge] {
        let request = with_headers(&[key.as_bytes()]);
        service.check(&app, request, locked(key)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn key_query_locks_one_value_and_refuses_the_rest() {
    let service = Service::new();
    let app = router().layer(service.layer(key::query("id")));
    for (uri, expected) in [
        ("/things", MISSING),
        ("/things?", MISSING),
        ("/things?id", MISSING),
        ("/things?id=", MISSING),
        ("/things?ID=7&xid=7", MISSING),
        ("/things?a=1&id=7&&", locked("7")),
        ("/things?%69d=%41+b", locked("A b")),
        ("/things?id=a%2Fb%00", locked("a/b\0")),
        ("/things?id=%", locked("%")),
        ("/things?id=%7", locked("%7")),
        ("/things?id=a=b", locked("a=b")),
        ("/things?id=%FF", INVALID),
        ("/things?id=7&id=7", INVALID),
        ("/things?id=&id=7", INVALID),
        ("/things?id=7&%69d=8", INVALID),
    ] {
        service.check(&app, to(uri), expected).await;
    }
}

/// A request with these cookies, each in a header of its own.
fn with_cookies(values: &[&[u8]]) -> Request<Body> {
    let mut request = to("/things");
    for value in values {
        let value = HeaderValue::from_bytes(value).unwrap();
        request.headers_mut().append(COOKIE, value);
    }
    request
}

#[tokio::test(start_paused = true)]
async fn key_cookie_reads_the_value_of_a_cookie_jar() {
    let service = Service::new();
    let app = router().layer(service.layer(key::cookie("sid")));
    let rows: [(&[&[u8]], Treatment); 22] = [
        (&[b"sid=REAL"], locked("REAL")),
        (&[b"sid=%52EAL"], locked("REAL")),
        (&[b"%73id=REAL"], locked("REAL")),
        (&[b"a=1; %73%69%64 = %52%45%41%4c ;b=2"], locked("REAL")),
        (&[b"sid=\"REAL\""], locked("REAL")),
        (&[b"sid=%22REAL%22"], locked("REAL")),
        (&[b"sid=%22%52EAL\""], locked("REAL")),
        (&[b"sid=a%3Bb"], locked("a;b")),
        (&[b"sid=a=b"], locked("a=b")),
        (&[b"sid=%"], locked("%")),
        (&[b"sid=%zz"], locked("%zz")),
        (&[b"sid=a+b"], locked("a+b")),
        (&[b"SID=REAL"], MISSING),
        (&[b"sid=%22%22"], MISSING),
        (&[b"sid="], MISSING),
        (&[b"%73id"], MISSING),
        (&[b"sid=%ff"], INVALID),
        (&[b"sid=\xff"], INVALID),
        (&[b"%73id=\xff"], INVALID),
        (&[b"sid=1; %73id=2"], INVALID),
        (&[b"sid=1", b"%73id=1"], INVALID),
        (&[b"sid=; %73id=1"], INVALID),
    ];
    for (values, expected) in rows {
        service.check(&app, with_cookies(values), expected).await;
    }
}

#[tokio::test(start_paused = true)]
async fn key_host_requires_target_and_header_to_agree() {
    let service = Service::new();
    let app = router().layer(service.layer(("tenant", key::host())));
    let tenant = |host: &str| locked(("tenant", host));
    let rows: [(&str, &[&str], Treatment); 26] = [
        ("/things", &["A.Example"], tenant("a.example")),
        ("/things", &["a.example:8080"], tenant("a.example")),
        ("/things", &["a.example."], tenant("a.example")),
        ("/things", &["A.Example.:80"], tenant("a.example")),
        ("http://A.example/things", &[], tenant("a.example")),
        (
            "http://a.example./things",
            &["a.example"],
            tenant("a.example"),
        ),
        (
            "http://a.example:80/things",
            &["A.EXAMPLE"],
            tenant("a.example"),
        ),
        (
            "http://a.example/things",
            &["a.example:8080"],
            tenant("a.example"),
        ),
        (
            "http://a.example:80/things",
            &["a.example:80"],
            tenant("a.example"),
        ),
        ("/things", &["[::1]:80"], tenant("[::1]")),
        ("http://[::1]/things", &["[::1]:80"], tenant("[::1]")),
        ("/things", &[], MISSING),
        ("/things", &[""], MISSING),
        ("http://a.example/things", &["b.example"], INVALID),
        ("http://a.example/things", &["a.example.b"], INVALID),
        ("http://a.example/things", &[""], INVALID),
        (
            "http://a.example/things",
            &["a.example", "a.example"],
            INVALID,
        ),
        ("http://a.example:80/things", &["a.example:8080"], INVALID),
        ("http://user@a.example/things", &[], INVALID),
        ("http://b.example@a.example/things", &["a.example"], INVALID),
        ("/things", &["b.example@a.example"], INVALID),
        ("/things", &["."], INVALID),
        ("/things", &["a.example.."], INVALID),
        ("/things", &["%61.example"], INVALID),
        ("/things", &["a.example,b.example"], INVALID),
        ("/things", &["a example"], INVALID),
    ];
    for (target, hosts, expected) in rows {
        let mut request = to(target);
        for host in hosts {
            let host = HeaderValue::from_str(host).unwrap();
            request.headers_mut().append(HOST, host);
        }
        service.check(&app, request, expected).await;
    }
}

#[tokio::test(start_paused = true)]
async fn methods_with_get_include_head() {
    let service = Service::new();
    let app = Router::new().route("/things/{id}", get(handler));
    let app = app.layer(service.layer(key::path("id")).methods([Method::GET]));
    for method in [Method::GET, Method::HEAD] {
        let mut request = to("/things/7");
        *request.method_mut() = method;
        service.check(&app, request, locked("7")).await;
    }
    let free = Router::new().route("/things/{id}", get(async || "unlocked"));
    let only_post = service.layer(key::path("id")).methods([Method::POST]);
    let mut request = to("/things/7");
    *request.method_mut() = Method::HEAD;
    let elsewhere = service.redlock.lock("7").await.unwrap();
    let response = free.layer(only_post).oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    drop(elsewhere);
}

#[tokio::test(start_paused = true)]
async fn key_extension_without_the_extension_is_misconfigured_and_names_the_type() {
    let log = Log::default();
    let _guard = log.subscribe();
    let service = Service::new();
    let by_user = || key::extension::<User>(User::name);
    for missing_key in [OnMissingKey::Reject, OnMissingKey::Pass] {
        let layer = service.layer(("user", by_user())).missing_key(missing_key);
        let app = router().layer(layer);
        for _ in 0..3 {
            service.check(&app, to("/things"), MISCONFIGURED).await;
        }
        // Authentication that stands inside comes too late.
        let inserted = axum::Extension(User("alice"));
        let layer = service.layer(by_user()).missing_key(missing_key);
        let inside = router().layer((layer, inserted.clone()));
        service.check(&inside, to("/things"), MISCONFIGURED).await;
        let layer = service.layer(by_user()).missing_key(missing_key);
        let outside = router().layer((inserted, layer));
        service
            .check(&outside, to("/things"), locked("alice"))
            .await;
    }
    let fallback = by_user().or(key::header("x-key"));
    let app = router().layer(service.layer(fallback));
    service
        .check(&app, with_headers(&[b"7"]), MISCONFIGURED)
        .await;
    service.check(&app, to("/nowhere"), NotFound).await;
    assert_eq!(
        log.text().matches("http::keys::User").count(),
        5,
        "{}",
        log.text()
    );
}

#[tokio::test(start_paused = true)]
async fn key_extension_optional_without_the_extension_is_missing() {
    let service = Service::new();
    let by_user = || key::extension::<User>(User::name).optional();
    let app = router().layer(service.layer(("user", by_user())));
    service.check(&app, to("/things"), MISSING).await;
    let app = router().layer(service.layer(by_user().or(key::header("x-key"))));
    service
        .check(&app, with_headers(&[b"7"]), locked("7"))
        .await;
    let mut request = with_headers(&[b"7"]);
    request.extensions_mut().insert(User("alice"));
    service.check(&app, request, locked("alice")).await;
}

#[tokio::test(start_paused = true)]
async fn layer_with_a_constant_key_warns_once() {
    let constant: Vec<Arc<dyn KeyExtractor>> = vec![
        Arc::new("all"),
        Arc::new(key::literal("all")),
        Arc::new(("all", "things")),
        Arc::new("all".prefix("a").and("b")),
        Arc::new(key::each("a", "b")),
        Arc::new(("all", "b".hashed())),
        Arc::new("all".map(|key| LockKey::from(("mapped", key)))),
        Arc::new("all".or(key::path("id"))),
        Arc::new(Arc::new("all") as Arc<dyn KeyExtractor>),
    ];
    let different: Vec<Arc<dyn KeyExtractor>> = vec![
        Arc::new(("all", key::path("id"))),
        Arc::new(key::each("a", key::query("id"))),
        Arc::new(key::header("x-key").or("all")),
        Arc::new("".or(key::path("id"))),
        Arc::new(key::header("x-key").hashed().prefix("all")),
        Arc::new(key::from_fn(|_| "all")),
        // Whether the condition is ever false is not known.
        Arc::new("all".when(|_| true)),
        Arc::new(key::method()),
        Arc::new(key::host()),
        Arc::new(key::matched_path()),
    ];
    let service = Service::new();
    let warnings = |key: Arc<dyn KeyExtractor>| {
        let log = Log::default();
        let _guard = log.subscribe();
        let layer = service.layer(key).max_hold(Duration::from_secs(1));
        let _clones = (layer.clone().layer(router()), layer);
        log.text()
    };
    for key in constant {
        let (label, log) = (key.label().unwrap_or("unnamed"), warnings(key));
        assert_eq!(log.matches("WARN").count(), 1, "{log}");
        assert!(
            log.contains("share one lock") && log.contains(label),
            "{log}"
        );
    }
    for key in different {
        assert_eq!(warnings(key), "");
    }
    let log = Log::default();
    let _guard = log.subscribe();
    let _public = IdempotencyLayer::new(service.redlock.clone(), scope::public());
    assert_eq!(log.text(), "");
}

#[tokio::test(start_paused = true)]
async fn key_extension_locks_the_value_of_the_extension() {
    let service = Service::new();
    let app = router().layer(service.layer(key::extension::<User>(User::name)));
    service.check(&app, to("/things"), MISCONFIGURED).await;
    for (name, expected) in [("", MISSING), ("alice", locked("alice"))] {
        let mut request = to("/things");
        request.extensions_mut().insert(User(name));
        service.check(&app, request, expected).await;
    }
}

#[tokio::test(start_paused = true)]
async fn key_path_locks_its_parameter() {
    let service = Service::new();
    let long = "k".repeat(32 * 1024);
    let all: [fn(Router, RedlockLayer) -> Router; 2] = [Router::layer, Router::route_layer];
    for apply in all {
        let app = apply(router(), service.layer(key::path("id")));
        for (uri, expected) in [
            ("/things/7", locked("7")),
            ("/things/7?id=8", locked("7")),
            ("/things/a%2Fb", locked("a/b")),
            ("/things/a%2fb", locked("a/b")),
            ("/things/a%20b+c", locked("a b+c")),
            ("/things/%E2%82%AC", locked("\u{20ac}")),
            ("/things/%00", locked("\0")),
            ("/things/%", locked("%")),
            ("/things/%zz", locked("%zz")),
            ("/things/..", locked("..")),
            ("/things/%FF", INVALID),
            ("/things/7%C3", INVALID),
            ("/things/", NotFound),
            ("/things/a/b", NotFound),
            ("/things", MISCONFIGURED),
            ("/files/a", MISCONFIGURED),
        ] {
            service.check(&app, to(uri), expected).await;
        }
        let uri = format!("/things/{long}");
        service.check(&app, to(&uri), locked(long.as_str())).await;
    }
    let app = router().layer(service.layer(key::path("path")));
    service
        .check(&app, to("/files/a/b%2Fc"), locked("a/b/c"))
        .await;
}

#[tokio::test(start_paused = true)]
async fn key_path_reads_parameters_of_nested_routers() {
    let service = Service::new();
    let by_both = || (key::path("tenant"), key::path("id"));
    let inside = router().route_layer(service.layer(by_both()));
    let apps = [
        Router::new().nest("/t/{tenant}", inside),
        Router::new()
            .nest("/t/{tenant}", router())
            .layer(service.layer(by_both())),
        Router::new()
            .nest("/t/{tenant}", router())
            .route_layer(service.layer(by_both())),
        Router::new().merge(
            Router::new()
                .nest("/t/{tenant}", router())
                .layer(service.layer(by_both())),
        ),
    ];
    for app in apps {
        let expected = locked(("acme", "7"));
        service.check(&app, to("/t/acme/things/7"), expected).await;
        let expected = locked(("a/c", "7"));
        service.check(&app, to("/t/a%2Fc/things/7"), expected).await;
        service.check(&app, to("/t/%FF/things/7"), INVALID).await;
        service
            .check(&app, to("/t/acme/things"), MISCONFIGURED)
            .await;
        service.check(&app, to("/t/acme/nowhere"), NotFound).await;
        service.check(&app, to("/nowhere"), NotFound).await;
    }
}

#[tokio::test(start_paused = true)]
async fn key_path_outside_of_a_nested_service_finds_its_parameter() {
    let service = Service::new();
    // axum tells middleware no `MatchedPath` here, as it does for its fallback.
    let behind = |layer: RedlockLayer| {
        Router::new()
            .nest_service("/t/{tenant}", router())
            .layer(layer)
    };
    let app = behind(service.layer(("thing", key::path("tenant"))));
    let expected = locked(("thing", "acme"));
    service.check(&app, to("/t/acme/things/7"), expected).await;
}

#[tokio::test(start_paused = true)]
async fn missing_key_is_refused_before_a_nested_service() {
    let service = Service::new();
    let app = Router::new()
        .nest_service("/t", router())
        .layer(service.layer(key::header("x-key")));
    service.check(&app, to("/t/things/7"), MISSING).await;
}

#[tokio::test(start_paused = true)]
async fn key_path_outside_of_the_router_is_misconfigured_and_never_unlocked() {
    let service = Service::new();
    for missing_key in [OnMissingKey::Reject, OnMissingKey::Pass] {
        let layer = service.layer(("thing", key::path("id")));
        let outside = layer.missing_key(missing_key).layer(router());
        let response = outside.oneshot(to("/things/7")).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let rejection = response.extensions().get::<Rejection>().unwrap();
        assert_eq!(rejection.code(), "misconfigured");
    }
}

#[tokio::test(start_paused = true)]
async fn on_missing_key_pass_still_refuses_invalid_and_misconfigured_keys() {
    let service = Service::new();
    let pass = |key| service.layer(key).missing_key(OnMissingKey::Pass);
    let key: Arc<dyn KeyExtractor> = Arc::new(key::header("x-key"));
    let app = router().layer(pass(key));
    service.check(&app, with_headers(&[b"\xff"]), INVALID).await;
    let key: Arc<dyn KeyExtractor> = Arc::new(key::path("nonsense"));
    let app = router().layer(pass(key));
    service.check(&app, to("/things/7"), MISCONFIGURED).await;
}

#[tokio::test(start_paused = true)]
async fn key_tuple_is_missing_if_any_part_is_missing() {
    let service = Service::new();
    let by = ("thing", key::path("id"), key::query("part"));
    let app = router().layer(service.layer(by));
    for (uri, expected) in [
        ("/things/7?part=a", locked(("thing", "7", "a"))),
        // Not what ("thing", "7a", "") or ("thing7", "a") would be.
        ("/things/7a?part=", MISSING),
        ("/things/7", MISSING),
        ("/things/7?part=%FF", INVALID),
        ("/things/%FF?part=a", INVALID),
        ("/things?part=a", MISCONFIGURED),
    ] {
        service.check(&app, to(uri), expected).await;
    }
    let nested = (("a", key::path("id")), "b");
    let app = router().layer(service.layer(nested));
    let expected = locked((("a", "7"), "b"));
    service.check(&app, to("/things/7"), expected).await;
}

#[tokio::test(start_paused = true)]
async fn lock_key_from_values_equals_the_key_of_the_extractor() {
    let service = Service::new();
    let app = router().layer(service.layer(("account", key::path("id"))));
    let expected = locked(LockKey::from(("account", "7")));
    service.check(&app, to("/things/7"), expected).await;
    // Look-alikes are other resources.
    for other in [
        LockKey::from("7"),
        LockKey::from("account7"),
        LockKey::from("account:7"),
        LockKey::from(("accoun", "t7")),
        LockKey::from(("account", "7", "")),
    ] {
        let elsewhere = service.redlock.lock(other).await.unwrap();
        let response = app.clone().oneshot(to("/things/7")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        drop((elsewhere, response));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn key_from_a_closure_or_literal_is_checked_like_any_other() {
    let service = Service::new();
    let several = |count: usize| (0..count).map(|i| i.to_string()).collect::<LockKeys>();
    let rows: Vec<(Arc<dyn KeyExtractor>, Treatment)> = vec![
        (Arc::new(""), MISSING),
        (Arc::new("all"), locked("all")),
        // An empty part of a composite must not become a lock for all who have none.
        (Arc::new(("all", "")), MISSING),
        (Arc::new(("all", key::from_fn(|_| String::new()))), MISSING),
        (
            Arc::new(("all", key::from_fn(|_| LockKeys::from_iter(["a", ""])))),
            MISSING,
        ),
        (Arc::new(key::from_fn(|_| String::new())), MISSING),
        (Arc::new(key::from_fn(|_| None::<String>)), MISSING),
        (Arc::new(key::from_fn(|_| LockKey::from(""))), MISSING),
        (Arc::new(key::from_fn(|_| Vec::<u8>::new())), MISSING),
        (Arc::new(key::from_fn(move |_| several(0))), MISSING),
        (
            Arc::new(key::from_fn(|_| LockKeys::from_iter(["a", ""]))),
            MISSING,
        ),
        (
            Arc::new(key::from_fn(move |_| several(32))),
            Locked(several(32)),
        ),
        (Arc::new(key::from_fn(move |_| several(33))), INVALID),
        (
            Arc::new(key::from_fn(|_| {
                Err::<String, _>(KeyError::malformed("no"))
            })),
            INVALID,
        ),
        (
            Arc::new(key::from_fn(|_| {
                Err::<String, _>(KeyError::misconfigured("no"))
            })),
            MISCONFIGURED,
        ),
        (
            Arc::new(key::from_fn(|_| vec![0xff, 0])),
            locked(vec![0xff, 0]),
        ),
    ];
    for (key, expected) in rows {
        let app = router().layer(service.layer(key));
        service.check(&app, to("/things"), expected).await;
    }
}

#[tokio::test(start_paused = true)]
async fn empty_namespace_refuses_keys_over_512_bytes_and_names_of_fences() {
    let service = Service::in_namespace("");
    let app = router().layer(service.layer(key::header("x-key")));
    let (longest, longer) = ("k".repeat(512), "k".repeat(513));
    for (key, expected) in [
        (longest.as_str(), locked(longest.as_str())),
        (&longer, INVALID),
        ("redlock:fence:{a}", INVALID),
    ] {
        let request = with_headers(&[key.as_bytes()]);
        service.check(&app, request, expected).await;
    }
}

#[tokio::test(start_paused = true)]
async fn misconfigured_key_is_logged_once_by_name_and_hidden_from_clients() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
    let _guard = subscribe(subscriber.finish());
    let service = Service::new();
    let layer = service.layer(key::path("nonsense"));
    let other = Router::new().route("/others/{other}", post(handler));
    let app = router().merge(other).layer(layer);
    let other = app.clone().oneshot(to("/others/7")).await.unwrap();
    assert_eq!(other.status(), StatusCode::INTERNAL_SERVER_ERROR);
    for _ in 0..3 {
        let response = app.clone().oneshot(to("/things/7")).await.unwrap();
        let body = axum::body::to_bytes(response.into_body(), 10_000).await;
        let body = String::from_utf8(body.unwrap().to_vec()).unwrap();
        assert!(body.contains("misconfigured"), "{body}");
        assert!(!body.contains("nonsense"), "{body}");
    }
    let log = log.text();
    for route in ["/things/{id}", "/others/{other}"] {
        assert_eq!(log.matches(route).count(), 1, "{log}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the bytes are: an answer, and the handler only under a lock.
    #[test]
    fn no_request_makes_a_key_extractor_panic(
        path in any::<Vec<u8>>(),
        raw in "[ -~]{0,30}",
        headers in proptest::collection::vec(any::<Vec<u8>>(), 0..3),
        escaped in any::<bool>(),
    ) {
        let escape = |bytes: &[u8]| bytes.iter().map(|byte| format!("%{byte:02X}")).collect();
        let escaped: String = if escaped { escape(&path) } else { raw };
        let Ok(uri) = format!("/things/{escaped}?id={escaped}").parse::<Uri>() else {
            return Ok(());
        };
        let mut request = to("/");
        *request.uri_mut() = uri;
        for value in headers {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                request.headers_mut().append("x-key", value);
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let service = Service::new();
            let extractors: [Arc<dyn KeyExtractor>; 4] = [
                Arc::new(key::path("id")),
                Arc::new(key::query("id")),
                Arc::new(key::header("x-key")),
                Arc::new(("a", key::path("id"), key::query("id"), key::header("x-key"))),
            ];
            for extractor in extractors {
                let app = router().layer(service.layer(extractor));
                let treatment = service.treatment(&app, copy_of(&request), "").await;
                let expected = match &treatment {
                    Locked(_) | NotFound => true,
                    // `/things/?..` and more slashes match no route, or one without the parameter.
                    Refused(status, _) => [400, 500].contains(status),
                };
                assert!(expected, "{treatment:?}");
            }
        });
    }

    /// What one `CookieJar` takes for one session is one key, or refused.
    #[test]
    fn key_cookie_gives_equal_cookies_one_key(
        one in any_cookies(),
        other in any_cookies(),
    ) {
        let session = |header: &str| {
            let mut jar = cookie::CookieJar::new();
            for pair in header.split(';') {
                if let Ok(read) = cookie::Cookie::parse_encoded(pair.to_owned()) {
                    jar.add_original(read);
                }
            }
            jar.get("s").map(|read| read.value().to_owned())
        };
        let extracted = |header: &str| {
            let request = Request::get("/").header(COOKIE, header).body(()).unwrap();
            key::cookie("s").extract(&request.into_parts().0)
        };
        if let (Ok(mine), Ok(theirs)) = (extracted(&one), extracted(&other)) {
            if session(&one) == session(&other) {
                prop_assert_eq!(&mine, &theirs, "{} {}", one, other);
            }
            // No session without its key, and no key of a session that is not there.
            let quoted_nothing = [Some(""), Some("\"\"")];
            let session = session(&one);
            let is_there = session.is_some() && !quoted_nothing.contains(&session.as_deref());
            prop_assert_eq!(mine.is_some(), is_there, "{}", one);
        }
    }

    /// Whatever the parts are: the composite that an extractor makes of them is the one of their values,
    /// and of other parts it is another.
    #[test]
    fn key_tuples_are_equal_only_if_their_parts_are(
        one in any_parts(),
        other in any_parts(),
    ) {
        let composite = ("thing", key::header("x-key"), key::query("id"), key::extension(Text::text));
        let extracted = |(header, query, text): &(String, String, String)| {
            let escaped: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
            let request = Request::get(format!("/?id={escaped}")).header("x-key", header);
            let request = request.extension(Text(text.clone())).body(()).unwrap();
            composite.extract(&request.into_parts().0).unwrap()
        };
        let of_values = |(header, query, text): &(String, String, String)| {
            let parts = ("thing", header.as_str(), query.as_str(), text.as_str());
            LockKeys::from(LockKey::from(parts))
        };
        prop_assert_eq!(extracted(&one), Some(of_values(&one)));
        prop_assert_eq!(extracted(&one) == extracted(&other), one == other);
    }
}

#[derive(Clone)]
struct Text(String);

impl Text {
    fn text(&self) -> &str {
        &self.0
    }
}

/// Cookies named `s`, in many spellings.
fn any_cookies() -> impl Strategy<Value = String> {
    let name = prop_oneof![Just("s"), Just("%73"), Just(" s "), Just("s%"), Just("S")];
    let value = "(A|%41|\"|%22| |%20|%|%ff|=|%3B){0,3}";
    let cookie = (name, "=|", value).prop_map(|(name, sign, value)| [name, &sign, &value].concat());
    proptest::collection::vec(cookie, 1..3).prop_map(|cookies| cookies.join(";"))
}

/// Few letters, among them those of the encoding, so that parts are alike often.
fn any_parts() -> impl Strategy<Value = (String, String, String)> {
    ("[1:,a]{1,3}", "[1:,é&%]{1,3}", "[1:, \"]{1,3}")
}
