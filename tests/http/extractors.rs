//! `Locked`, `LockHandle` and `health_router`: locks by a handler's own signature.

use axum::extract::{FromRef, Path, Query, State};
use axum::routing::{get, post};
use axum::{Extension, Router, debug_handler};
use http::StatusCode;
use serde::Deserialize;
use support::{redlock, secs, send, three_nodes};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    LockHandle, LockKey, LockKeys, LockOptions, LockResource, Locked, OnLost, OnMissingKey,
    OnUnavailable, Redlock, RedlockLayer, Rejection, admin_router, health_router, key,
};

use crate::shop::{AppState, OrderId, Transfer, ship, shop, until_free};

#[tokio::test(start_paused = true)]
async fn locked_calls_the_handler_under_the_lock_of_its_path_only() {
    let (nodes, redlock) = three_nodes();
    let app = shop(&redlock);
    let served = send(&app, "POST", "/orders/7/ship").await;
    assert_eq!(served.status, StatusCode::OK);
    let expected = LockKey::from(("order", "7"));
    assert_eq!(served.text(), format!("7 {:?}", [expected]));
    let free = [0, 0, 0];
    assert_eq!(nodes.locks(), free, "the body waits for the release");
    // A held lock is refused as by the layer.
    let guard = redlock.try_lock(("order", "7")).await.unwrap();
    let refused = send(&app, "POST", "/orders/07/ship").await;
    assert_eq!(refused.told(), (423, "lock-contended"));
    drop(guard);
    // No lock is taken when the extractor fails.
    let asked = nodes.sent(0, OpKind::Acquire);
    assert_eq!(send(&app, "POST", "/orders/x/ship").await.status, 400);
    assert_eq!(nodes.sent(0, OpKind::Acquire), asked);
}

#[tokio::test(start_paused = true)]
async fn optional_locked_is_none_only_without_its_resource() {
    #[debug_handler(state = AppState)]
    async fn handler(locked: Option<Locked<Extension<Transfer>>>) -> String {
        format!("{:?}", locked.map(|Locked(guard, _)| guard.keys().len()))
    }
    let (nodes, redlock) = three_nodes();
    let app = Router::new()
        .route("/", post(handler))
        .with_state(redlock.clone());
    assert_eq!(send(&app, "POST", "/").await.text(), "None");
    let [from, to] = ["a", "b"].map(String::from);
    let app = app.layer(Extension(Transfer { from, to }));
    assert_eq!(send(&app, "POST", "/").await.text(), "Some(2)");
    until_free(&nodes).await;
    let guard = redlock.try_lock(("account", "b")).await.unwrap();
    assert_eq!(send(&app, "POST", "/").await.status, StatusCode::LOCKED);
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn lock_resource_sets_wait_and_ttl() {
    #[debug_handler(state = AppState)]
    async fn transfer(Locked(guard, Query(_)): Locked<Query<Transfer>>) -> String {
        format!("{:?}", guard.valid_for() < secs(5))
    }
    let (_nodes, redlock) = three_nodes();
    let app = Router::new()
        .route("/transfer", post(transfer))
        .with_state(redlock.clone());
    let guard = redlock.try_lock(("account", "a")).await.unwrap();
    tokio::spawn(async move {
        sleep(secs(1)).await;
        drop(guard);
    });
    assert_eq!(
        send(&app, "POST", "/transfer?from=b&to=a").await.text(),
        "true"
    );
}

#[tokio::test(start_paused = true)]
async fn lock_handle_without_a_lock_names_the_missing_layer() {
    async fn handler(handle: LockHandle) -> String {
        format!("{:?}", handle.keys())
    }
    let nodes = ScriptedNodes::new(3);
    let layer = RedlockLayer::new(redlock(&nodes), key::query("id"))
        .missing_key(OnMissingKey::Pass)
        .on_unavailable(OnUnavailable::Proceed)
        .skip(|parts| parts.headers.contains_key("x-skip"));
    let bare: Router = Router::new().route("/", get(handler).post(handler));
    let layered = bare.clone().layer(layer);
    assert_eq!(send(&layered, "POST", "/?id=7").await.status, 200);
    for (app, method, target, expected) in [
        (&bare, "POST", "/?id=7", "no RedlockLayer"),
        (&layered, "GET", "/?id=7", "does not lock"),
        (&layered, "POST", "/", "names no resource"),
        (&layered, "POST", "/?id=8", "without a quorum"),
    ] {
        if expected == "without a quorum" {
            (0..2).for_each(|node| nodes.set(node, Gate::Down));
        }
        let refused = send(app, method, target).await;
        assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR);
        let Some(Rejection::Misconfigured(error)) = refused.rejection else {
            panic!("{method} {target} is not misconfigured");
        };
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn lock_handle_from_an_extension_needs_no_layer() {
    async fn handler(handle: LockHandle) -> String {
        handle.fencing_token().unwrap().to_string()
    }
    #[debug_handler(state = AppState)]
    async fn optional(handle: Option<LockHandle>) -> String {
        format!("{}", handle.is_some())
    }
    let guard = Redlock::in_memory(1).lock("anything").await.unwrap();
    let app: Router = Router::new()
        .route("/", post(handler))
        .layer(Extension(guard.handle()))
        .route("/optional", post(optional));
    let token = guard.fencing_token().unwrap().to_string();
    assert_eq!(send(&app, "POST", "/").await.text(), token);
    assert_eq!(send(&app, "POST", "/optional").await.text(), "false");
    // A handler is a function: its arguments can be made by hand.
    let guard = Redlock::in_memory(1).lock(("order", "7")).await.unwrap();
    let response = ship(Locked(guard, Path(OrderId(7)))).await;
    assert_eq!(response.status(), StatusCode::OK);
}

/// A state that is no resource of its own can be one too.
#[derive(Clone)]
struct Report(&'static str);

impl LockResource for Report {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(self.0).into()
    }
}

#[derive(Clone, FromRef)]
struct ReportState {
    redlock: Redlock,
    report: Report,
}

#[tokio::test(start_paused = true)]
async fn locked_takes_its_resource_from_the_state() {
    async fn handler(Locked(guard, State(_)): Locked<State<Report>>) -> String {
        format!("{:?}", guard.key())
    }
    let (_nodes, redlock) = three_nodes();
    let state = |report| ReportState {
        redlock: redlock.clone(),
        report: Report(report),
    };
    let app = Router::new().route("/", post(handler));
    let named = app.clone().with_state(state("nightly"));
    assert_eq!(
        send(&named, "POST", "/").await.text(),
        "LockKey(\"nightly\")"
    );
    let refused = send(&app.with_state(state("")), "POST", "/").await;
    assert_eq!(refused.told(), (400, "key-missing"));
}

#[tokio::test(start_paused = true)]
async fn health_router_reports_the_quorum_and_names_the_nodes() {
    let nodes = ScriptedNodes::new(3);
    let app = Router::new().nest("/healthz", health_router(redlock(&nodes)));
    for (down, expected, status) in [
        (0, StatusCode::OK, "ready"),
        (1, StatusCode::OK, "degraded"),
        (2, StatusCode::SERVICE_UNAVAILABLE, "down"),
    ] {
        for node in 0..down {
            nodes.set(node, Gate::Failing);
        }
        let answer = send(&app, "GET", "/healthz").await;
        assert_eq!(answer.status, expected);
        let body = answer.json();
        assert_eq!(body["status"], status);
        assert_eq!(body["quorum"], expected == StatusCode::OK);
        assert_eq!(body["needed"], 2);
        let states = (0..3).map(|node| body["nodes"][node]["state"] == "up");
        assert_eq!(states.filter(|up| *up).count(), 3 - down);
        assert_eq!(body["nodes"][2]["node"], "embedded-2");
    }
}

#[tokio::test(start_paused = true)]
async fn health_router_is_503_while_the_service_drains() {
    let (_nodes, redlock) = three_nodes();
    let app = Router::new()
        .nest("/healthz", health_router(redlock.clone()))
        .nest("/admin", admin_router(redlock.clone()))
        // The application has a state of its own.
        .route("/", get(async |_: State<u8>| "ok"))
        .with_state(7);
    for (status, readiness) in [
        (StatusCode::OK, "ready"),
        (StatusCode::SERVICE_UNAVAILABLE, "draining"),
    ] {
        for target in ["/healthz", "/admin"] {
            let answer = send(&app, "GET", target).await;
            let body = answer.json();
            assert_eq!(
                (answer.status, &body["status"]),
                (status, &readiness.into())
            );
            assert_eq!(body["quorum"], true, "the nodes are up");
        }
        redlock.drain(secs(0)).await;
    }
}

/// An order whose lock is held for four seconds.
#[derive(Debug, Deserialize)]
struct BriefOrder(u64);

impl LockResource for BriefOrder {
    fn lock_keys(&self) -> LockKeys {
        OrderId(self.0).lock_keys()
    }

    fn options(&self) -> LockOptions {
        LockOptions::default().max_hold(secs(4))
    }
}

#[tokio::test(start_paused = true)]
async fn max_hold_of_the_builder_is_the_default_of_layers_and_locked() {
    async fn layered(handle: LockHandle) -> String {
        handle.lost().await.to_string()
    }
    async fn locked<R: LockResource>(Locked(guard, _): Locked<Path<R>>) -> String {
        guard.lost().await.to_string()
    }
    for (of_builder, of_all) in [(None, 60), (Some(2), 2), (Some(100), 100)] {
        let nodes = ScriptedNodes::new(3);
        let mut builder = Redlock::builder().scripted(&nodes).ttl(secs(1));
        if let Some(max_hold) = of_builder {
            builder = builder.max_hold(secs(max_hold));
        }
        let redlock = builder.build().unwrap();
        let layer = || {
            let layer = RedlockLayer::new(redlock.clone(), ("order", key::path("id")));
            layer.on_lost(OnLost::Notify)
        };
        let brief_layer = layer().max_hold(secs(4));
        let app = Router::new()
            .route("/layer/{id}", post(layered).layer(layer()))
            .route("/brief_layer/{id}", post(layered).layer(brief_layer))
            .route("/locked/{id}", post(locked::<OrderId>))
            .route("/brief/{id}", post(locked::<BriefOrder>))
            .with_state(redlock);
        for (route, expected) in [
            ("layer", of_all),
            ("brief_layer", 4),
            ("locked", of_all),
            ("brief", 4),
        ] {
            let began = Instant::now();
            let answer = send(&app, "POST", &format!("/{route}/7")).await;
            assert_eq!(answer.status, StatusCode::OK, "{route}: {answer:?}");
            assert_eq!(began.elapsed().as_secs(), expected, "{route}: {answer:?}");
            assert!(answer.text().contains("max_hold"), "{route}: {answer:?}");
            until_free(&nodes).await;
        }
    }
}
