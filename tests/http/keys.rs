//! Rules for all keys: missing, invalid and misconfigured ones, tuples, closures, and constant keys.
//!
//! No request makes a layer panic, lock on an empty key, or call a handler without its lock.

use std::sync::Arc;

use axum::body::Body;
use http::{HeaderValue, Request, Uri};
use proptest::prelude::*;
use support::{Log, paused_runtime, secs};
use tower::Layer;
use tower_redlock::{IdempotencyLayer, KeyError, KeyExtractor, LockKey, LockKeys, key, scope};

use crate::key_service::Treatment::{Locked, NotFound, Refused};
use crate::key_service::{INVALID, MISCONFIGURED, MISSING, Service, Treatment, locked, router, to};

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
        Arc::new("all".when(|_| true).or("others")),
        Arc::new("all".when(|_| true).or(key::query("id"))),
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
        let head = request.into_parts().0;
        paused_runtime().block_on(async {
            let service = Service::new();
            let extractors: [Arc<dyn KeyExtractor>; 4] = [
                Arc::new(key::path("id")),
                Arc::new(key::query("id")),
                Arc::new(key::header("x-key")),
                Arc::new(("a", key::path("id"), key::query("id"), key::header("x-key"))),
            ];
            for extractor in extractors {
                let app = router().layer(service.layer(extractor));
                let copy = Request::from_parts(head.clone(), Body::empty());
                let treatment = service.treatment(&app, copy, "").await;
                let expected = match &treatment {
                    Locked(_) | NotFound => true,
                    // `/things/?..` and more slashes match no route, or one without the parameter.
                    Refused(status, _) => [400, 500].contains(status),
                };
                assert!(expected, "{treatment:?}");
            }
        });
    }
}
