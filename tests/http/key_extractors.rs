//! `key::header`, `query`, `cookie`, `host`, `extension` and `path`: which lock a request gets.

use std::any::type_name;

use axum::Router;
use axum::body::Body;
use http::header::{COOKIE, HOST};
use http::{HeaderValue, Request, StatusCode};
use support::Log;
use tower::{Layer, ServiceExt};
use tower_redlock::{KeyExtractor, OnMissingKey, RedlockLayer, Rejection, key};

use crate::key_service::Treatment::NotFound;
use crate::key_service::{
    INVALID, MISCONFIGURED, MISSING, Service, Treatment, User, locked, router, to, with_headers,
};

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
        log.text().matches(type_name::<User>()).count(),
        5,
        "{}",
        log.text()
    );
}

#[tokio::test(start_paused = true)]
async fn key_optional_extension_without_the_extension_is_missing() {
    let service = Service::new();
    let by_user = || key::optional_extension::<User>(User::name);
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
