//! Rules for all keys: missing, invalid and misconfigured ones, tuples, closures, and constant keys.

use std::sync::Arc;

use support::{Log, secs};
use tower::Layer;
use tower_redlock::{IdempotencyLayer, KeyError, KeyExtractor, LockKey, LockKeys, key, scope};

use crate::key_service::Treatment::Locked;
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
        Arc::new("all".when(|_| true).or("others")),
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
    let misconfigured = key::from_fn(|_| Err::<String, _>(KeyError::misconfigured("no")));
    let many = Locked(several(32));
    let rows: [(Arc<dyn KeyExtractor>, Treatment); 9] = [
        (Arc::new("all"), locked("all")),
        (Arc::new(key::from_fn(|_| None::<String>)), MISSING),
        (Arc::new(key::from_fn(|_| Vec::<u8>::new())), MISSING),
        (Arc::new(key::from_fn(move |_| several(0))), MISSING),
        (Arc::new(one_empty()), MISSING),
        // An empty part of a composite must not become a lock for all who have none.
        (Arc::new(("all", one_empty())), MISSING),
        (Arc::new(key::from_fn(move |_| several(32))), many),
        (Arc::new(key::from_fn(move |_| several(33))), INVALID),
        (Arc::new(misconfigured), MISCONFIGURED),
    ];
    for (key, expected) in rows {
        let app = router().layer(service.layer(key));
        service.check(&app, to("/things"), expected).await;
    }
}
