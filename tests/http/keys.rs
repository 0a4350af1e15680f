//! Rules for all keys: missing, invalid and misconfigured ones, tuples, closures, and constant keys.
//!
//! No request makes a layer panic, lock on an empty key, or call a handler without its lock.

use std::sync::Arc;

use axum::Router;
use axum::routing::post;
use http::{HeaderValue, Request, Uri};
use proptest::prelude::*;
use support::{Log, secs, send};
use tower::Layer;
use tower_redlock::{
    IdempotencyLayer, KeyError, KeyExtractor, LockKey, LockKeys, OnMissingKey, key, scope,
};

use crate::key_service::Treatment::{Locked, NotFound, Refused};
use crate::key_service::{
    INVALID, MISCONFIGURED, MISSING, Service, Treatment, copy_of, handler, locked, router, to,
    with_headers,
};

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
        let (log, _guard) = Log::subscribed();
        let layer = service.layer(key).max_hold(secs(1));
        let _clones = (layer.clone().layer(router()), layer);
        log.text()
    };
    for key in constant {
        let (label, log) = (key.describe().label.unwrap_or("unnamed"), warnings(key));
        assert_eq!(log.matches("WARN").count(), 1, "{log}");
        for part in ["share one lock", label] {
            assert!(log.contains(part), "{log}");
        }
    }
    for key in different {
        assert_eq!(warnings(key), "");
    }
    let (log, _guard) = Log::subscribed();
    let _public = IdempotencyLayer::new(service.redlock.clone(), scope::public());
    assert_eq!(log.text(), "");
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
async fn key_from_a_closure_or_literal_is_checked_like_any_other() {
    let service = Service::new();
    let several = |count: usize| (0..count).map(|i| i.to_string()).collect::<LockKeys>();
    let one_empty = || key::from_fn(|_| LockKeys::from_iter(["a", ""]));
    let malformed = key::from_fn(|_| Err::<String, _>(KeyError::malformed("no")));
    let misconfigured = key::from_fn(|_| Err::<String, _>(KeyError::misconfigured("no")));
    let bytes = vec![0xff, 0];
    let rows: Vec<(Arc<dyn KeyExtractor>, Treatment)> = vec![
        (Arc::new(""), MISSING),
        (Arc::new("all"), locked("all")),
        // An empty part of a composite must not become a lock for all who have none.
        (Arc::new(("all", "")), MISSING),
        (Arc::new(("all", key::from_fn(|_| String::new()))), MISSING),
        (Arc::new(("all", one_empty())), MISSING),
        (Arc::new(key::from_fn(|_| String::new())), MISSING),
        (Arc::new(key::from_fn(|_| None::<String>)), MISSING),
        (Arc::new(key::from_fn(|_| LockKey::from(""))), MISSING),
        (Arc::new(key::from_fn(|_| Vec::<u8>::new())), MISSING),
        (Arc::new(key::from_fn(move |_| several(0))), MISSING),
        (Arc::new(one_empty()), MISSING),
        (
            Arc::new(key::from_fn(move |_| several(32))),
            Locked(several(32)),
        ),
        (Arc::new(key::from_fn(move |_| several(33))), INVALID),
        (Arc::new(malformed), INVALID),
        (Arc::new(misconfigured), MISCONFIGURED),
        (Arc::new(key::from_fn(|_| vec![0xff, 0])), locked(bytes)),
    ];
    for (key, expected) in rows {
        let app = router().layer(service.layer(key));
        service.check(&app, to("/things"), expected).await;
    }
}

// Rules: misconfigured
#[tokio::test(start_paused = true)]
async fn misconfigured_key_is_logged_once_by_name_and_hidden_from_clients() {
    let (log, _guard) = Log::subscribed();
    let layer = Service::new().layer(key::path("nonsense"));
    let other = Router::new().route("/others/{other}", post(handler));
    let app = router().merge(other).layer(layer);
    for target in ["/others/7", "/things/7", "/things/7", "/things/7"] {
        let refused = send(&app, "POST", target).await;
        assert_eq!(refused.told(), (500, "misconfigured"));
        assert!(!refused.text().contains("nonsense"), "{refused:?}");
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

/// Few letters, among them those of the encoding, so that parts are alike often.
fn any_parts() -> impl Strategy<Value = (String, String, String)> {
    ("[1:,a]{1,3}", "[1:,é&%]{1,3}", "[1:, \"]{1,3}")
}
