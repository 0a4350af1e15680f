//! Rules for all keys: missing, invalid and misconfigured ones, tuples, closures, and constant keys.
//!
//! No request makes a layer panic, lock on an empty key, or call a handler without its lock.

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};
use http::header::COOKIE;
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use proptest::prelude::*;
use support::{Log, ms, secs, subscribe};
use tower::{Layer, ServiceExt};
use tower_redlock::{
    IdempotencyLayer, KeyError, KeyExtractor, LockKey, LockKeys, OnMissingKey, key, scope,
};

use crate::key_service::Treatment::{Locked, NotFound, Refused};
use crate::key_service::{
    INVALID, MISCONFIGURED, MISSING, Service, Treatment, copy_of, handler, locked, router, to,
    with_headers,
};

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
        Arc::new(Box::new("all") as Box<dyn KeyExtractor>),
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
        let (log, _guard) = Log::subscribed();
        let layer = service.layer(key).max_hold(secs(1));
        let _clones = (layer.clone().layer(router()), layer);
        log.text()
    };
    for key in constant {
        let (label, log) = (key.describe().label.unwrap_or("unnamed"), warnings(key));
        assert_eq!(log.matches("WARN").count(), 1, "{log}");
        assert!(
            log.contains("share one lock") && log.contains(label),
            "{log}"
        );
    }
    for key in different {
        assert_eq!(warnings(key), "");
    }
    let (log, _guard) = Log::subscribed();
    let _public = IdempotencyLayer::new(service.redlock.clone(), scope::public());
    assert_eq!(log.text(), "");
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
        tokio::time::sleep(ms(1)).await;
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
