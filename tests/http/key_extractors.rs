//! `key::header`, `extension` and `path`: which lock a request gets.

use std::any::type_name;

use axum::Router;
use axum::routing::post;
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
    let huge = "k".repeat(1024 * 1024);
    let rows: [(&[&[u8]], Treatment); 5] = [
        (&[], MISSING),
        (&[b"a b\t:{}"], locked("a b\t:{}")),
        (&[huge.as_bytes()], locked(huge.as_str())),
        (&[b"", b"7"], INVALID),
        (&[b"\xff"], INVALID),
    ];
    for (values, expected) in rows {
        service.check(&app, with_headers(values), expected).await;
    }
    service.check(&app, to("/nowhere"), NotFound).await;
    // A key that cannot be read is not a missing one.
    let pass = service.layer(key::header("x-key"));
    let app = router().layer(pass.missing_key(OnMissingKey::Pass));
    service.check(&app, with_headers(&[b"\xff"]), INVALID).await;
}

#[tokio::test(start_paused = true)]
async fn key_extension_without_the_extension_is_misconfigured_and_names_the_type() {
    let (log, _guard) = Log::subscribed();
    let service = Service::new();
    let by_user = || key::extension::<User>(User::name);
    let inserted = axum::Extension(User("alice"));
    for missing_key in [OnMissingKey::Reject, OnMissingKey::Pass] {
        let layer = || service.layer(by_user()).missing_key(missing_key);
        // Authentication that stands inside comes too late.
        for app in [
            router().layer(layer()),
            router().layer((layer(), inserted.clone())),
        ] {
            for _ in 0..2 {
                service.check(&app, to("/things"), MISCONFIGURED).await;
            }
        }
        let (outside, expected) = (router().layer((inserted.clone(), layer())), locked("alice"));
        service.check(&outside, to("/things"), expected).await;
    }
    let app = router().layer(service.layer(by_user().or(key::header("x-key"))));
    let by_header = with_headers(&[b"7"]);
    service.check(&app, by_header, MISCONFIGURED).await;
    let log = log.text();
    assert_eq!(log.matches(type_name::<User>()).count(), 5, "{log}");
    let mut nameless = to("/things");
    nameless.extensions_mut().insert(User(""));
    let app = router().layer(service.layer(by_user()));
    service.check(&app, nameless, MISSING).await;
}

#[tokio::test(start_paused = true)]
async fn key_path_locks_its_parameter() {
    let service = Service::new();
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
    }
    let app = router().layer(service.layer(key::path("path")));
    let expected = locked("a/b/c");
    service.check(&app, to("/files/a/b%2Fc"), expected).await;
}

#[tokio::test(start_paused = true)]
async fn key_matched_path_is_the_route_and_key_typed_path_what_its_parameters_parse_to() {
    let service = Service::new();
    let by_route = router().layer(service.layer(key::matched_path()));
    let by_type = router().layer(service.layer(key::typed_path::<OrderId>()));
    for (app, target, expected) in [
        (&by_route, "/things/7", locked("/things/{id}")),
        (&by_route, "/nowhere", NotFound),
        (&by_type, "/things/7", locked(("order", "7"))),
        (&by_type, "/things/x", INVALID),
        (&by_type, "/things", MISCONFIGURED),
        (&by_type, "/nowhere", NotFound),
    ] {
        service.check(app, to(target), expected).await;
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
            ("/t/acme/things/%FF", INVALID),
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
