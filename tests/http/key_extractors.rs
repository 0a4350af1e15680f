//! `key::header`, `query`, `cookie`, `host`, `extension` and `path`: which lock a request gets.

use std::any::type_name;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use http::header::{COOKIE, HOST};
use http::{HeaderValue, Request};
use support::{Answer, Log};
use tower::Layer;
use tower_redlock::{KeyExtractor, OnMissingKey, RedlockLayer, key};

use crate::key_service::Treatment::NotFound;
use crate::key_service::{
    INVALID, MISCONFIGURED, MISSING, Service, Treatment, User, handler, locked, router, to,
    with_headers,
};
use crate::shop::OrderId;

// Rules: key-missing
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
    let example = || locked(("tenant", "a.example"));
    let local = || locked(("tenant", "[::1]"));
    let rows: [(&str, &[&str], Treatment); 26] = [
        ("/things", &["A.Example"], example()),
        ("/things", &["a.example:8080"], example()),
        ("/things", &["a.example."], example()),
        ("/things", &["A.Example.:80"], example()),
        ("http://A.example/things", &[], example()),
        ("http://a.example./things", &["a.example"], example()),
        ("http://a.example:80/things", &["A.EXAMPLE"], example()),
        ("http://a.example/things", &["a.example:8080"], example()),
        ("http://a.example:80/things", &["a.example:80"], example()),
        ("/things", &["[::1]:80"], local()),
        ("http://[::1]/things", &["[::1]:80"], local()),
        ("/things", &[], MISSING),
        ("/things", &[""], MISSING),
        ("http://a.example/things", &["b.example"], INVALID),
        ("http://a.example/things", &["a.example.b"], INVALID),
        ("http://a.example/things", &[""], INVALID),
        ("http://a.example/things", &["a.example"; 2], INVALID),
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
async fn key_extension_without_the_extension_is_misconfigured_and_names_the_type() {
    let (log, _guard) = Log::subscribed();
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
        let layer = || service.layer(by_user()).missing_key(missing_key);
        let inside = router().layer((layer(), inserted.clone()));
        service.check(&inside, to("/things"), MISCONFIGURED).await;
        let (outside, expected) = (router().layer((inserted, layer())), locked("alice"));
        service.check(&outside, to("/things"), expected).await;
    }
    let fallback = by_user().or(key::header("x-key"));
    let (app, request) = (
        router().layer(service.layer(fallback)),
        with_headers(&[b"7"]),
    );
    service.check(&app, request, MISCONFIGURED).await;
    service.check(&app, to("/nowhere"), NotFound).await;
    let log = log.text();
    assert_eq!(log.matches(type_name::<User>()).count(), 5, "{log}");
}

#[tokio::test(start_paused = true)]
async fn key_extension_locks_the_value_of_the_extension() {
    let service = Service::new();
    let app = router().layer(service.layer(key::extension::<User>(User::name)));
    for (user, expected) in [
        (None, MISCONFIGURED),
        (Some(""), MISSING),
        (Some("alice"), locked("alice")),
    ] {
        let mut request = with_headers(&[b"7"]);
        if let Some(name) = user {
            request.extensions_mut().insert(User(name));
        }
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
    let expected = locked("a/b/c");
    service.check(&app, to("/files/a/b%2Fc"), expected).await;
}

#[tokio::test(start_paused = true)]
async fn key_matched_path_is_the_route_and_not_the_target() {
    let service = Service::new();
    let app = router().layer(service.layer(key::matched_path()));
    let expected = locked("/things/{id}");
    service.check(&app, to("/things/7"), expected).await;
    service.check(&app, to("/nowhere"), NotFound).await;
}

#[tokio::test(start_paused = true)]
async fn key_typed_path_refuses_a_path_that_does_not_parse() {
    let service = Service::new();
    let app = router().layer(service.layer(key::typed_path::<OrderId>()));
    for (target, expected) in [
        ("/things/7", locked(("order", "7"))),
        ("/things/x", INVALID),
        ("/things", MISCONFIGURED),
        ("/nowhere", NotFound),
    ] {
        service.check(&app, to(target), expected).await;
    }
}

#[tokio::test(start_paused = true)]
async fn key_path_reads_parameters_of_nested_routers() {
    let service = Service::new();
    let by_both = || (key::path("tenant"), key::path("id"));
    let inside = router().route_layer(service.layer(by_both()));
    let nested = || Router::new().nest("/t/{tenant}", router());
    let apps = [
        Router::new().nest("/t/{tenant}", inside),
        nested().layer(service.layer(by_both())),
        nested().route_layer(service.layer(by_both())),
        Router::new().merge(nested().layer(service.layer(by_both()))),
    ];
    for app in apps {
        for (target, expected) in [
            ("/t/acme/things/7", locked(("acme", "7"))),
            ("/t/a%2Fc/things/7", locked(("a/c", "7"))),
            ("/t/%FF/things/7", INVALID),
            ("/t/acme/things", MISCONFIGURED),
            ("/t/acme/nowhere", NotFound),
            ("/nowhere", NotFound),
        ] {
            service.check(&app, to(target), expected).await;
        }
    }
    // axum tells middleware no `MatchedPath` before a nested service, as it does for its fallback.
    let app = Router::new().nest_service("/t/{tenant}", router());
    let app = app.layer(service.layer(("thing", key::path("tenant"))));
    let expected = locked(("thing", "acme"));
    service.check(&app, to("/t/acme/things/7"), expected).await;
    let app = Router::new().nest_service("/t", router());
    let app = app.layer(service.layer(key::header("x-key")));
    service.check(&app, to("/t/things/7"), MISSING).await;
    // Two parameters of one name.
    let inner = Router::new().route("/things/{id}", post(handler));
    let inner = inner.layer(service.layer(("thing", key::path("id"))));
    let app = Router::new().nest("/t/{id}", inner.clone());
    let app = app.nest("/of/{tenant}", inner);
    service
        .check(&app, to("/t/1/things/7"), MISCONFIGURED)
        .await;
    let expected = locked(("thing", "7"));
    service.check(&app, to("/of/1/things/7"), expected).await;
}

#[tokio::test(start_paused = true)]
async fn key_path_outside_of_the_router_is_misconfigured_and_never_unlocked() {
    let service = Service::new();
    for missing_key in [OnMissingKey::Reject, OnMissingKey::Pass] {
        let by_path = service.layer(("thing", key::path("id")));
        for layer in [by_path, service.layer(key::matched_path())] {
            let outside = layer.missing_key(missing_key).layer(router());
            let refused = Answer::to(&outside, to("/things/7")).await;
            assert_eq!(refused.told(), (500, "misconfigured"));
        }
    }
}
