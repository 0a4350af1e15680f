//! `Locked`, `LockHandle` and `health_router`: locks by a handler's own signature.

use axum::body::Body;
use axum::extract::{FromRef, Path, Query, State};
use axum::routing::{get, post};
use axum::{Extension, Router, debug_handler};
use http::{Request, StatusCode};
use serde::Deserialize;
use support::{redlock, secs, three_nodes};
use tokio::time::{Instant, sleep};
use tower::{Service, ServiceExt};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    LockHandle, LockKey, LockKeys, LockOptions, LockResource, Locked, LockedRejection, OnLost,
    OnMissingKey, OnUnavailable, Redlock, RedlockLayer, Rejection, admin_router, health_router,
    key,
};

use crate::shop::{AppState, OrderId, Transfer, send, ship, shop, until_free};

#[tokio::test(start_paused = true)]
async fn locked_calls_the_handler_under_the_lock_of_its_path() {
    let (nodes, redlock) = three_nodes();
    let app = shop(&redlock);
    let (status, body) = send(&app, "POST", "/orders/7/ship").await;
    assert_eq!(status, StatusCode::OK);
    let expected = LockKey::from(("order", "7"));
    assert_eq!(body, format!("7 {:?}", [expected]));
    assert_eq!(
        nodes.locks(),
        [0, 0, 0],
        "the body did not wait for the release"
    );
}

#[tokio::test(start_paused = true)]
async fn locked_refuses_a_held_lock_like_the_layer_without_calling_the_handler() {
    let (_nodes, redlock) = three_nodes();
    let guard = redlock.try_lock(("order", "7")).await.unwrap();
    let (status, body) = send(&shop(&redlock), "POST", "/orders/07/ship").await;
    assert_eq!(status, StatusCode::LOCKED);
    assert!(body.contains("lock-contended"), "{body}");
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn locked_takes_no_lock_when_its_extractor_fails() {
    let nodes = ScriptedNodes::new(3);
    let (status, _) = send(&shop(&redlock(&nodes)), "POST", "/orders/x/ship").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
}

#[tokio::test(start_paused = true)]
async fn locked_as_a_result_hands_the_rejection_to_the_handler() {
    async fn handler(locked: Result<Locked<Path<OrderId>>, LockedRejection<impl Sized>>) -> String {
        match locked {
            Ok(_) => "locked".to_owned(),
            Err(LockedRejection::Lock(refused)) => {
                let contended = matches!(refused.rejection(), Rejection::Contended { .. });
                format!("contended: {contended}")
            }
            Err(_) => "no order".to_owned(),
        }
    }
    let (nodes, redlock) = three_nodes();
    let handler = |locked: Result<Locked<Path<OrderId>>, LockedRejection<_>>| handler(locked);
    let app = Router::new()
        .route("/orders/{id}", post(handler))
        .with_state(redlock.clone());
    assert_eq!(send(&app, "POST", "/orders/7").await.1, "locked");
    until_free(&nodes).await;
    let guard = redlock.try_lock(("order", "7")).await.unwrap();
    assert_eq!(send(&app, "POST", "/orders/7").await.1, "contended: true");
    assert_eq!(send(&app, "POST", "/orders/x").await.1, "no order");
    drop(guard);
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
    assert_eq!(send(&app, "POST", "/").await.1, "None");
    let transfer = Transfer {
        from: "a".into(),
        to: "b".into(),
    };
    let app = app.layer(Extension(transfer));
    assert_eq!(send(&app, "POST", "/").await.1, "Some(2)");
    until_free(&nodes).await;
    let guard = redlock.try_lock(("account", "b")).await.unwrap();
    assert_eq!(send(&app, "POST", "/").await.0, StatusCode::LOCKED);
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
    let (status, body) = send(&app, "POST", "/transfer?from=b&to=a").await;
    assert_eq!((status, &*body), (StatusCode::OK, "true"));
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
    let told = async |app: &Router, method: &str, target: &str| {
        let request = Request::builder().method(method).uri(target);
        let request = request.body(Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        response.extensions().get::<Rejection>().unwrap().clone()
    };
    for (app, method, target, expected) in [
        (&bare, "POST", "/?id=7", "no RedlockLayer"),
        (&layered, "GET", "/?id=7", "does not lock"),
        (&layered, "POST", "/", "names no resource"),
    ] {
        let Rejection::Misconfigured(error) = told(app, method, target).await else {
            panic!("not misconfigured");
        };
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert_eq!(send(&layered, "POST", "/?id=7").await.0, StatusCode::OK);
    (0..2).for_each(|node| nodes.set(node, Gate::Down));
    let Rejection::Misconfigured(error) = told(&layered, "POST", "/?id=8").await else {
        panic!("not misconfigured");
    };
    assert!(error.to_string().contains("without a quorum"), "{error}");
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
    assert_eq!(send(&app, "POST", "/").await.1, token);
    assert_eq!(send(&app, "POST", "/optional").await.1, "false");
    // A handler is a function: its arguments can be made by hand.
    let guard = Redlock::in_memory(1).lock(("order", "7")).await.unwrap();
    let response = ship(Locked(guard, Path(OrderId(7)))).await;
    assert_eq!(response.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn key_matched_path_is_the_route_and_not_the_target() {
    async fn handler(handle: LockHandle) -> String {
        format!("{:?}", handle.keys())
    }
    let nodes = ScriptedNodes::new(3);
    let layer = RedlockLayer::new(redlock(&nodes), key::matched_path());
    let app: Router = Router::new()
        .route("/orders/{id}", post(handler))
        .layer(layer.clone());
    let expected = format!("{:?}", [LockKey::from("/orders/{id}")]);
    assert_eq!(send(&app, "POST", "/orders/7").await.1, expected);
    assert_eq!(
        send(&app, "POST", "/nowhere").await.0,
        StatusCode::NOT_FOUND
    );
    let mut outside = tower::Layer::layer(&layer, app.into_service());
    let request = Request::post("/orders/7").body(Body::empty()).unwrap();
    let response = outside.ready().await.unwrap().call(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test(start_paused = true)]
async fn key_typed_path_refuses_a_path_that_does_not_parse() {
    let nodes = ScriptedNodes::new(3);
    let layer = RedlockLayer::new(redlock(&nodes), key::typed_path::<OrderId>());
    let app: Router = Router::new()
        .route("/orders/{id}", post(async || "ok"))
        .route("/no/parameters", post(async || "ok"))
        .layer(layer);
    assert_eq!(send(&app, "POST", "/orders/7").await.0, StatusCode::OK);
    assert_eq!(
        send(&app, "POST", "/orders/x").await.0,
        StatusCode::BAD_REQUEST
    );
    let (status, _) = send(&app, "POST", "/no/parameters").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(
        send(&app, "POST", "/nowhere").await.0,
        StatusCode::NOT_FOUND
    );
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
    assert_eq!(send(&named, "POST", "/").await.1, "LockKey(\"nightly\")");
    let (status, body) = send(&app.with_state(state("")), "POST", "/").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(body.contains("key-missing"), "{body}");
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
        let (code, body) = send(&app, "GET", "/healthz").await;
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(code, expected);
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
            let (code, body) = send(&app, "GET", target).await;
            let body: serde_json::Value = serde_json::from_str(&body).unwrap();
            assert_eq!((code, &body["status"]), (status, &readiness.into()));
            assert_eq!(body["quorum"], true, "the nodes are up");
        }
        redlock.drain(secs(0)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn key_path_with_an_ambiguous_parameter_is_misconfigured() {
    let layer = RedlockLayer::new(Redlock::in_memory(1), ("account", key::path("id")));
    let accounts = Router::new()
        .route("/accounts/{id}", post(async || "ok"))
        .layer(layer);
    let app: Router = Router::new()
        .nest("/tenants/{id}", accounts.clone())
        .nest("/of/{tenant}", accounts);
    let (status, body) = send(&app, "POST", "/tenants/1/accounts/7").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(body.contains("misconfigured"), "{body}");
    assert_eq!(
        send(&app, "POST", "/of/1/accounts/7").await.0,
        StatusCode::OK
    );
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
    async fn locked(Locked(guard, _): Locked<Path<OrderId>>) -> String {
        guard.lost().await.to_string()
    }
    async fn brief(Locked(guard, _): Locked<Path<BriefOrder>>) -> String {
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
        let app = Router::new()
            .route("/layer/{id}", post(layered).layer(layer()))
            .route(
                "/brief_layer/{id}",
                post(layered).layer(layer().max_hold(secs(4))),
            )
            .route("/locked/{id}", post(locked))
            .route("/brief/{id}", post(brief))
            .with_state(redlock);
        for (route, expected) in [
            ("layer", of_all),
            ("brief_layer", 4),
            ("locked", of_all),
            ("brief", 4),
        ] {
            let began = Instant::now();
            let (status, body) = send(&app, "POST", &format!("/{route}/7")).await;
            assert_eq!(
                (status, began.elapsed().as_secs()),
                (StatusCode::OK, expected),
                "{route} {body}"
            );
            assert!(body.contains("max_hold"), "{route}: {body}");
            until_free(&nodes).await;
        }
    }
}
