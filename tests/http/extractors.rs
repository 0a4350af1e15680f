//! The extractors: locks by a handler's own signature, shares of one lock, and what layers tell.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRef, FromRequestParts, Path, Query, State};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::{Extension, Router, debug_handler};
use http::request::Parts;
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::time::{Instant, sleep};
use tower::{Service, ServiceExt};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    LockHandle, LockHandles, LockKey, LockKeys, LockOptions, LockResource, Locked, LockedRejection,
    OnLost, OnMissingKey, OnUnavailable, Redlock, RedlockLayer, Rejection, health_router, key,
};

use crate::support::{redlock, secs};

#[derive(Debug, Deserialize)]
struct OrderId(u64);

impl LockResource for OrderId {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("order", self.0.to_string())).into()
    }
}

/// Two accounts, locked together, for which one waits.
#[derive(Debug, Clone, Deserialize)]
struct Transfer {
    from: String,
    to: String,
}

impl LockResource for Transfer {
    fn lock_keys(&self) -> LockKeys {
        [("account", &self.from), ("account", &self.to)]
            .into_iter()
            .collect()
    }

    fn options(&self) -> LockOptions {
        LockOptions::default().wait(secs(2)).ttl(secs(5))
    }
}

#[derive(Clone, FromRef)]
struct AppState {
    redlock: Redlock,
}

async fn send(app: &Router, method: &str, target: &str) -> (StatusCode, String) {
    let request = Request::builder().method(method).uri(target);
    let response = app
        .clone()
        .oneshot(request.body(Body::empty()).unwrap())
        .await;
    text(response.unwrap()).await
}

async fn text(response: Response) -> (StatusCode, String) {
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

/// Waits until no node holds a lock: what is dropped is released in the background.
async fn until_free(nodes: &ScriptedNodes) {
    while nodes.locks().iter().any(|locks| *locks > 0) {
        sleep(Duration::from_millis(1)).await;
    }
}

#[debug_handler(state = AppState)]
async fn ship(Locked(guard, Path(id)): Locked<Path<OrderId>>) -> Response {
    assert!(guard.is_valid() && guard.fencing_token().is_some());
    let response = format!("{} {:?}", id.0, guard.keys()).into_response();
    guard.hold_until_sent(response).into_response()
}

fn shop(redlock: &Redlock) -> Router {
    let redlock = redlock.clone();
    Router::new()
        .route("/orders/{id}/ship", post(ship))
        .with_state(AppState { redlock })
}

#[tokio::test(start_paused = true)]
async fn locked_calls_the_handler_under_the_lock_of_its_path() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
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
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
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
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
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
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
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
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
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
async fn locked_shares_the_lock_of_a_layer_with_the_same_key() {
    async fn handler(
        handle: LockHandle,
        handles: LockHandles,
        Locked(guard, _): Locked<Path<OrderId>>,
    ) -> String {
        assert_eq!(guard.fencing_token(), handle.fencing_token());
        assert_eq!(handles.to_vec().len(), 1);
        // The layer's share keeps the lock.
        drop(guard);
        assert!(handle.is_valid());
        "shared".to_owned()
    }
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let by_order = key::typed_path::<OrderId>();
    let app = Router::new()
        .route("/orders/{id}", post(handler))
        .route_layer(RedlockLayer::new(redlock.clone(), by_order))
        .route_layer(RedlockLayer::new(
            redlock.clone(),
            ("order", key::path("id")),
        ))
        .with_state(redlock);
    let (status, body) = send(&app, "POST", "/orders/7").await;
    assert_eq!((status, &*body), (StatusCode::OK, "shared"));
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
    assert_eq!(nodes.sent(0, OpKind::Release), 1);
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn locked_takes_only_keys_that_the_request_does_not_hold() {
    #[debug_handler(state = AppState)]
    async fn handler(handles: LockHandles, Locked(guard, _): Locked<Query<Transfer>>) -> String {
        let held: usize = handles
            .to_vec()
            .iter()
            .map(|handle| handle.keys().len())
            .sum();
        assert_eq!(guard.keys(), [LockKey::from(("account", "b"))]);
        format!("{held}")
    }
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let app = Router::new()
        .route("/transfer", post(handler))
        .route_layer(RedlockLayer::new(
            redlock.clone(),
            ("account", key::query("from")),
        ))
        .with_state(redlock);
    let (status, body) = send(&app, "POST", "/transfer?from=a&to=b").await;
    assert_eq!((status, &*body), (StatusCode::OK, "2"));
    until_free(&nodes).await;
}

/// The second extractor takes one account, and shares the other with the first.
#[tokio::test(start_paused = true)]
async fn locked_guard_extends_and_releases_shared_and_own_keys() {
    #[derive(Deserialize)]
    struct From {
        from: String,
    }
    impl LockResource for From {
        fn lock_keys(&self) -> LockKeys {
            LockKey::from(("account", &*self.from)).into()
        }
    }
    async fn handler(
        Locked(first, _): Locked<Query<From>>,
        Locked(both, _): Locked<Query<Transfer>>,
    ) -> String {
        drop(first);
        both.extend(secs(20)).await.unwrap();
        let extended = both.valid_for() > secs(15);
        let handle = both.handle();
        let released = both.release().await;
        format!("{extended} {released:?} {}", handle.is_valid())
    }
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder().scripted(&nodes).max_ttl(secs(20));
    let app = Router::new()
        .route("/transfer", post(handler))
        .with_state(redlock.build().unwrap());
    let (_, body) = send(&app, "POST", "/transfer?from=a&to=b").await;
    assert_eq!(body, "true Ok(Freed) false");
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

/// An extractor that takes longer than a lock lasts.
struct SlowBody;

impl<S: Send + Sync> FromRequestParts<S> for SlowBody {
    type Rejection = Infallible;

    async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, Infallible> {
        sleep(secs(60)).await;
        Ok(Self)
    }
}

#[tokio::test(start_paused = true)]
async fn locked_does_not_share_a_lost_lock() {
    async fn handler(_: SlowBody, Locked(guard, _): Locked<Path<OrderId>>) -> String {
        format!("{}", guard.is_valid())
    }
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let layer = RedlockLayer::new(redlock.clone(), ("order", key::path("id")));
    let app = Router::new()
        .route("/orders/{id}", post(handler))
        .route_layer(layer.on_lost(OnLost::Notify).max_hold(secs(5)))
        .with_state(redlock);
    let (status, body) = send(&app, "POST", "/orders/7").await;
    assert_ne!((status, &*body), (StatusCode::OK, "false"));
    until_free(&nodes).await;
}

#[tokio::test(start_paused = true)]
async fn locked_does_not_share_the_same_key_of_another_redlock() {
    async fn handler(handles: LockHandles, _: Locked<Path<OrderId>>) -> String {
        format!("{}", handles.to_vec().len())
    }
    let nodes = ScriptedNodes::new(3);
    let others = Redlock::in_memory(1);
    let app = Router::new()
        .route("/orders/{id}", post(handler))
        .route_layer(RedlockLayer::new(others, ("order", key::path("id"))))
        .with_state(redlock(&nodes));
    assert_eq!(send(&app, "POST", "/orders/7").await.1, "2");
    assert_eq!(nodes.sent(0, OpKind::Acquire), 1);
}

/// Two routes that take the same two keys in opposite orders, with a wait for each.
#[tokio::test(start_paused = true)]
async fn nested_layers_in_opposite_orders_do_not_deadlock() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let layer = |key: &'static str| RedlockLayer::new(redlock.clone(), key).wait(secs(3));
    let handler = || async { sleep(Duration::from_millis(100)).await };
    let app = Router::new()
        .route("/ab", post(handler).layer((layer("a"), layer("b"))))
        .route("/ba", post(handler).layer((layer("b"), layer("a"))));
    let mut served = 0;
    for _ in 0..20 {
        let began = Instant::now();
        let requests = ["/ab", "/ba", "/ab", "/ba"].map(|target| {
            let app = app.clone();
            async move { send(&app, "POST", target).await.0 }
        });
        for status in futures_util::future::join_all(requests).await {
            served += usize::from(status == StatusCode::OK);
            assert!([StatusCode::OK, StatusCode::LOCKED].contains(&status));
        }
        assert!(began.elapsed() < secs(7), "a request outlasted its waits");
    }
    assert!(served >= 20, "{served} of 80");
    until_free(&nodes).await;
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
    for node in 0..2 {
        nodes.set(node, Gate::Down);
    }
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
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
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
async fn fencing_token_of_returns_the_token_of_each_key() {
    async fn handler(layer: LockHandle, Locked(guard, _): Locked<Query<Transfer>>) -> String {
        let [a, b, c] = ["a", "b", "c"].map(|id| LockKey::from(("account", id)));
        assert_eq!(guard.fencing_token_of(&a), layer.fencing_token());
        assert_eq!(guard.fencing_token_of(&b), guard.fencing_token());
        assert_eq!(guard.handle().fencing_token_of(&a), layer.fencing_token());
        assert_ne!(guard.fencing_token(), layer.fencing_token());
        format!("{:?}", guard.fencing_token_of(&c))
    }
    let redlock = redlock(&ScriptedNodes::new(3));
    let by_from = ("account", key::query("from"));
    let app = Router::new()
        .route("/transfer", post(handler))
        .route_layer(RedlockLayer::new(redlock.clone(), by_from))
        .with_state(redlock);
    assert_eq!(send(&app, "POST", "/transfer?from=a&to=b").await.1, "None");
}

#[tokio::test(start_paused = true)]
async fn lock_handle_is_none_when_only_an_outer_layer_locked() {
    async fn handler(handle: Option<LockHandle>) -> String {
        format!("{:?}", handle.map(|handle| handle.keys().to_vec()))
    }
    let nodes = ScriptedNodes::new(3);
    let inner = RedlockLayer::new(redlock(&nodes), ("account", key::query("id")))
        .on_unavailable(OnUnavailable::Proceed)
        .missing_key(OnMissingKey::Pass)
        .skip(|parts| parts.uri.path() == "/skipped");
    let outer = RedlockLayer::new(Redlock::in_memory(1), "tenant");
    let outer = outer.methods([Method::POST, Method::GET]);
    let app: Router = Router::new()
        .route("/", any(handler))
        .route("/skipped", any(handler))
        .layer(inner)
        .layer(outer);
    assert_eq!(send(&app, "POST", "/").await.1, "None");
    assert_eq!(send(&app, "GET", "/?id=7").await.1, "None");
    assert_eq!(send(&app, "POST", "/skipped?id=7").await.1, "None");
    for node in 0..3 {
        nodes.set(node, Gate::Down);
    }
    assert_eq!(send(&app, "POST", "/?id=7").await.1, "None");
}

/// Two routes that lock in two services in opposite orders: there is no order between services.
#[tokio::test(start_paused = true)]
async fn nested_layers_of_two_services_in_opposite_orders_do_not_deadlock() {
    let (one, other) = (Redlock::in_memory(3), Redlock::in_memory(3));
    let a = RedlockLayer::new(one, "a").wait(secs(30));
    let b = RedlockLayer::new(other, "b").wait(secs(30));
    let handler = || async { sleep(Duration::from_millis(100)).await };
    // Both have their first lock before either asks for its second.
    let between = from_fn(async |request: axum::extract::Request, next: Next| {
        sleep(Duration::from_millis(10)).await;
        next.run(request).await
    });
    let app = Router::new()
        .route(
            "/ab",
            post(handler).layer((a.clone(), between.clone(), b.clone())),
        )
        .route("/ba", post(handler).layer((b, between, a)));
    let began = Instant::now();
    let (first, second) = tokio::join!(send(&app, "POST", "/ab"), send(&app, "POST", "/ba"));
    assert!([first.0, second.0].contains(&StatusCode::LOCKED));
    assert!(began.elapsed() < secs(1));
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
