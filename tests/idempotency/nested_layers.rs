//! Layers within layers: nested calls, refusals by an inner lock, and nested idempotency scopes.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Query, Request};
use axum::http::{Extensions, HeaderName, StatusCode};
use axum::middleware::map_response;
use axum::response::IntoResponse;
use axum::routing::post;
use http_body_util::Full;
use support::{
    Answer, Executed, SlowReadiness, ms, once, redlock, request_with, secs, set_all, three_nodes,
};
use tokio::time::sleep;
use tower::{Layer, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    IdempotencyLayer, Locked, LockedRejection, LostReason, OnLost, OnUnavailable, Redlock,
    RedlockLayer, Rejection, RequestKind, key,
};

use crate::payments::{Account, counts_begun, counts_ended, pay, per_account, rebuilt, request};

/// An app whose handler pays, and then makes a request of its own, with its extensions, to `within`.
fn calling(executed: &Executed, within: &Router, key: &'static str) -> Router {
    let (executed, within) = (executed.clone(), within.clone());
    let pay = async move |extensions: Extensions| {
        let number = executed.one_more();
        let mut call = request("/payments?account=1&ms=1000", key);
        *call.extensions_mut() = extensions;
        let answer = Answer::to(&within, call).await;
        format!("payment {number}, then {}", answer.status.as_u16())
    };
    Router::new().route("/payments", post(pay))
}

/// By a lock, or by an idempotency layer, which stops the first one, and refuses the second.
#[tokio::test(start_paused = true)]
async fn handler_whose_nested_call_is_refused_or_stopped_is_recorded() {
    for at_most_once in [false, true] {
        let redlock = redlock(&ScriptedNodes::new(3));
        let _other = redlock.lock(("account", "1")).await.unwrap();
        let locked = counts_begun(&Executed::default()).layer(per_account(&redlock));
        let stopped = once(&redlock).max_hold(ms(500)).ttl(ms(200)).unwrap();
        let stopped = counts_begun(&Executed::default()).layer(stopped);
        for (key, within, refusal) in [
            ("refused", &locked, 423),
            ("stopped", &stopped, 503),
            ("in-progress", &stopped, 409),
        ] {
            let executed = Executed::default();
            let app = calling(&executed, within, "inner");
            let app = app.layer(once(&redlock).at_most_once(at_most_once));
            let first = pay(&app, "/payments", key).await;
            assert_eq!(first.text(), format!("payment 1, then {refusal}"));
            let again = pay(&app, "/payments", key).await;
            assert!(again.is_replayed(), "{again:?}");
            assert_eq!((again.body, executed.count()), (first.body, 1));
        }
    }
}

/// An inner layer skips the request, one finds no key in it, and one proceeds without a lock.
#[tokio::test(start_paused = true)]
async fn execution_that_inner_layers_pass_on_is_recorded() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let down = ScriptedNodes::new(3);
    (0..3).for_each(|node| down.set(node, Gate::Failing));
    let without = per_account(&self::redlock(&down)).on_unavailable(OnUnavailable::Proceed);
    for inner in [0, 1, 2] {
        let executed = Executed::default();
        let handler = counts_begun(&executed);
        let passed_on = match inner {
            0 => handler.layer(per_account(&redlock).skip(|_| true)),
            1 => handler.layer(once(&redlock).header(HeaderName::from_static("x-other-key"))),
            _ => handler.layer(without.clone()),
        };
        let app = passed_on.layer(once(&redlock).at_most_once(true));
        let (path, key) = ("/payments?account=1&ms=1", inner.to_string());
        assert_eq!(pay(&app, path, &key).await.status, StatusCode::OK);
        assert!(pay(&app, path, &key).await.is_replayed(), "{inner}");
        assert_eq!(executed.count(), 1, "{inner}");
    }
}

#[tokio::test(start_paused = true)]
async fn task_with_the_extensions_of_a_recorded_execution_gets_a_replay() {
    for late in [5, 15, 500] {
        let nodes = ScriptedNodes::new(3);
        set_all(&nodes, OpKind::Record, Gate::Slow(ms(20)));
        let redlock = redlock(&nodes);
        let (executed, again) = (Executed::default(), Executed::default());
        let behind = counts_begun(&again).layer(once(&redlock).wait(secs(1)));
        let (sender, answered) = tokio::sync::oneshot::channel();
        let sender = Arc::new(std::sync::Mutex::new(Some(sender)));
        let counted = executed.clone();
        let pay_and_leave = async move |extensions: Extensions| {
            let sender = sender.lock().unwrap().take().unwrap();
            tokio::spawn(async move {
                sleep(ms(late)).await;
                let mut call = request("/payments", "a");
                *call.extensions_mut() = extensions;
                sender.send(Answer::to(&behind, call).await).unwrap();
            });
            format!("payment {}", counted.one_more())
        };
        let app = Router::new().route("/payments", post(pay_and_leave));
        let app = app.layer(once(&redlock));
        assert_eq!(pay(&app, "/payments", "a").await.body, "payment 1");
        let answer = answered.await.unwrap();
        assert!(answer.is_replayed(), "after {late} ms: {answer:?}");
        assert_eq!((executed.count(), again.count()), (1, 0), "after {late} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn outer_lock_lost_while_the_key_is_confirmed_again_prevents_the_execution() {
    for on_lost in [OnLost::Abort, OnLost::Notify] {
        let (accounts, records) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
        let locks = Redlock::builder().scripted(&accounts).ttl(secs(3));
        let locks = locks.build().unwrap();
        let executed = Executed::default();
        // Asked for at 980 ms, it begins at 1,960 ms and asks until 2,005 ms; the account's lock is renewed
        // at 1,980 ms.
        set_all(&records, OpKind::Confirm, Gate::Slow(ms(45)));
        let slow = SlowReadiness::new(counts_begun(&executed), ms(980));
        let slow = once(&redlock(&records)).at_most_once(true).layer(slow);
        let service = per_account(&locks).on_lost(on_lost).layer(slow);
        let call = service.oneshot(request("/payments?account=1", "a"));
        let (answer, ()) = tokio::join!(call, async {
            sleep(ms(1_500)).await;
            (0..3).for_each(|node| accounts.wipe(node));
        });
        assert_eq!(answer.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
        sleep(secs(1)).await;
        assert_eq!(executed.count(), 0, "{on_lost:?}");
        assert_eq!(records.locks(), [0, 0, 0], "{on_lost:?}");
        let app = counts_begun(&executed).layer(once(&redlock(&records)).at_most_once(true));
        let paid = pay(&app, "/payments?account=1", "a").await;
        assert_eq!(paid.body, "payment 1");
    }
}

/// What a refusal within is made to look like.
fn refusing_layers(redlock: &Redlock) -> Vec<(&'static str, RedlockLayer)> {
    let ok = |_: &Rejection, _: &RequestKind| http::Response::new(Full::from("please wait"));
    let with = |status| per_account(redlock).contended_status(status);
    vec![
        ("200", with(StatusCode::OK)),
        ("404", with(StatusCode::NOT_FOUND)),
        ("409", with(StatusCode::CONFLICT)),
        ("503", with(StatusCode::SERVICE_UNAVAILABLE)),
        (
            "a response of the user's",
            per_account(redlock).rejection(ok),
        ),
    ]
}

/// The payments behind an inner lock, whose refusals some other layer may rebuild on their way out.
fn once_around(redlock: &Redlock, layer: RedlockLayer, rebuilds: bool) -> (Router, Executed) {
    let executed = Executed::default();
    let mut app = counts_begun(&executed).layer(layer);
    if rebuilds {
        app = app.layer(map_response(rebuilt));
    }
    (app.layer(once(redlock).at_most_once(true)), executed)
}

#[tokio::test(start_paused = true)]
async fn inner_refusal_is_no_execution_whatever_its_response() {
    let redlock = redlock(&ScriptedNodes::new(3));
    for rebuilds in [false, true] {
        for content_type in ["application/json", "application/grpc"] {
            for (number, (name, layer)) in refusing_layers(&redlock).into_iter().enumerate() {
                let (app, executed) = once_around(&redlock, layer, rebuilds);
                let key = format!("{rebuilds}-{content_type}-{number}").replace('/', "-");
                let headers = [("idempotency-key", &*key), ("content-type", content_type)];
                let call = || request_with("POST", "/payments?account=1", &headers);
                let other = redlock.lock(("account", "1")).await.unwrap();
                let refused = Answer::to(&app, call()).await;
                assert_eq!(executed.count(), 0);
                other.release().await.unwrap();
                let paid = Answer::to(&app, call()).await;
                let what = format!("{name}, {content_type}, rebuilt: {rebuilds}");
                assert_eq!(executed.count(), 1, "{what}: {refused:?}, then {paid:?}");
                assert!(Answer::to(&app, call()).await.is_replayed(), "{what}");
            }
        }
    }
}

/// The client sends the header that it forgot.
#[tokio::test(start_paused = true)]
async fn inner_refusal_for_a_missing_key_is_no_execution() {
    for rebuilds in [false, true] {
        let redlock = redlock(&ScriptedNodes::new(3));
        let layer = RedlockLayer::new(redlock.clone(), ("account", key::header("x-account")));
        let (app, _) = once_around(&redlock, layer, rebuilds);
        let refused = pay(&app, "/payments", "a").await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        let headers = [("idempotency-key", "a"), ("x-account", "7")];
        let call = || request_with("POST", "/payments", &headers);
        let paid = Answer::to(&app, call()).await;
        assert_eq!(paid.body, "payment 1", "{refused:?}, then {paid:?}");
        assert!(Answer::to(&app, call()).await.is_replayed());
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_by_the_second_of_two_inner_locks_is_no_execution() {
    let (nodes, redlock) = three_nodes();
    for extractor in [false, true] {
        let executed = Executed::default();
        let counted = executed.clone();
        let locked = async move |_: Locked<Query<Account>>| counted.one_more().to_string();
        let app = if extractor {
            let app = Router::new().route("/payments", post(locked));
            app.with_state(redlock.clone())
        } else {
            counts_begun(&executed).layer(per_account(&redlock))
        };
        let first = RedlockLayer::new(redlock.clone(), ("tenant", key::query("tenant")));
        let app = app.layer(first).layer(map_response(rebuilt));
        let app = app.layer(once(&redlock).at_most_once(true));
        let target = "/payments?account=1&tenant=2";
        let key = format!("extractor-{extractor}");
        let other = redlock.lock(("account", "1")).await.unwrap();
        pay(&app, target, &key).await;
        assert_eq!((executed.count(), nodes.locks()), (0, vec![1; 3]));
        other.release().await.unwrap();
        // No majority is no execution either.
        (0..2).for_each(|node| nodes.set_for(node, OpKind::Acquire, Gate::Failing));
        assert!(!pay(&app, target, &key).await.status.is_success());
        (0..2).for_each(|node| nodes.set(node, Gate::Ready));
        pay(&app, target, &key).await;
        assert_eq!((executed.count(), nodes.locks()), (1, vec![0; 3]));
        assert!(pay(&app, target, &key).await.is_replayed());
    }
}

#[tokio::test(start_paused = true)]
async fn handler_that_ignores_its_lock_rejection_is_recorded_and_one_that_returns_it_is_no_execution()
 {
    type Refused = LockedRejection<axum::extract::rejection::QueryRejection>;
    for ignores in [true, false] {
        let redlock = redlock(&ScriptedNodes::new(3));
        let executed = Executed::default();
        let counted = executed.clone();
        let pay_anyway = async move |locked: Result<Locked<Query<Account>>, Refused>| match locked {
            Err(refused) if !ignores => refused.into_response(),
            locked => format!("payment {} {}", counted.one_more(), locked.is_ok()).into_response(),
        };
        let app = Router::new().route("/payments", post(pay_anyway));
        let app = app.with_state(redlock.clone()).layer(map_response(rebuilt));
        let app = app.layer(once(&redlock).at_most_once(true));
        let other = redlock.lock(("account", "1")).await.unwrap();
        let target = "/payments?account=1";
        let first = pay(&app, target, "a").await;
        assert_eq!(first.status, StatusCode::BAD_REQUEST, "as all are made");
        other.release().await.unwrap();
        let again = pay(&app, target, "a").await;
        assert_eq!(again.is_replayed(), ignores);
        assert_eq!(again.body, format!("payment 1 {}", !ignores));
        assert!(pay(&app, target, "a").await.is_replayed());
        assert_eq!(executed.count(), 1);
    }
}

fn scoped(redlock: &Redlock, header: &'static str) -> IdempotencyLayer {
    IdempotencyLayer::new(redlock.clone(), key::header(header)).at_most_once(true)
}

#[tokio::test(start_paused = true)]
async fn nested_scopes_each_replay_their_own_records() {
    for of_two_services in [false, true] {
        let nodes = [ScriptedNodes::new(3), ScriptedNodes::new(3)];
        let executed = Executed::default();
        let outer = redlock(&nodes[0]);
        let inner = redlock(&nodes[usize::from(of_two_services)]);
        let app = counts_begun(&executed).layer(scoped(&inner, "x-tenant"));
        let app = app.layer(scoped(&outer, "x-user"));
        let call = async |user: &str, tenant: &str| {
            let key = ("idempotency-key", "a");
            let headers = [key, ("x-user", user), ("x-tenant", tenant)];
            Answer::to(&app, request_with("POST", "/payments", &headers)).await
        };
        assert!(!call("ann", "t").await.is_replayed());
        assert!(call("ann", "t").await.is_replayed());
        // By the inner layer, and by the outer layer.
        assert!(call("bob", "t").await.is_replayed());
        assert!(call("bob", "other").await.is_replayed());
        assert_eq!(executed.count(), 1);
        assert_eq!(call("eve", "other").await.body, "payment 2");
        assert_eq!(nodes.map(|nodes| nodes.locks()), [[0; 3], [0; 3]]);
    }
}

#[tokio::test(start_paused = true)]
async fn duplicate_refused_by_the_inner_scope_leaves_the_outer_key_free() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let executed = Executed::default();
    let inner = counts_begun(&executed).layer(once(&redlock).at_most_once(true));
    let outer = inner.clone().layer(scoped(&redlock, "host"));
    let headers = [("idempotency-key", "a"), ("host", "a")];
    let call = || request_with("POST", "/payments?ms=100", &headers);
    let (first, refused) = tokio::join!(Answer::to(&inner, call()), async {
        sleep(ms(10)).await;
        Answer::to(&outer, call()).await
    });
    assert_eq!(first.body, "payment 1");
    assert_eq!(refused.code(), "request-in-progress");
    let again = Answer::to(&outer, call()).await;
    assert_eq!(again.body, "payment 1", "{again:?}");
    assert_eq!(executed.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn inner_lock_refused_by_drain_is_no_execution() {
    let (executed, (nodes, redlock)) = (Executed::default(), three_nodes());
    let locked = per_account(&redlock).layer(counts_begun(&executed));
    let slow = SlowReadiness::new(locked, ms(300));
    let service = once(&redlock).at_most_once(true).layer(slow);
    let call = tokio::spawn(service.oneshot(request("/payments?account=1", "a")));
    sleep(ms(400)).await;
    assert!(redlock.drain(secs(5)).await.held.is_empty());
    let refused = call.await.unwrap().unwrap();
    let rejection = refused.extensions().get::<Rejection>();
    assert_eq!(rejection.map(Rejection::code), Some("shutting-down"));
    assert_eq!((executed.count(), nodes.locks()), (0, vec![0; 3]));
    // Another server takes it.
    let app = counts_begun(&executed).layer(once(&self::redlock(&nodes)).at_most_once(true));
    let paid = pay(&app, "/payments?account=1", "a").await;
    assert_eq!(paid.body, "payment 1");
}

#[tokio::test(start_paused = true)]
async fn inner_refusal_of_a_copied_request_is_outcome_unknown() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let executed = Executed::default();
    let app = counts_begun(&executed).layer(per_account(&redlock));
    // Drops the request, and sends a copy of it.
    let copying = service_fn(move |request: Request| {
        let (app, (parts, body)) = (app.clone(), request.into_parts());
        let copy = Request::from_parts(parts.clone(), body);
        drop(parts);
        app.oneshot(copy)
    });
    let app = Router::new().fallback_service(copying);
    let app = app.layer(once(&redlock).at_most_once(true));
    let target = "/payments?account=1";
    let other = redlock.lock(("account", "1")).await.unwrap();
    assert_eq!(pay(&app, target, "a").await.status, StatusCode::LOCKED);
    other.release().await.unwrap();
    assert_eq!(pay(&app, target, "a").await.code(), "outcome-unknown");
    assert_eq!(pay(&app, target, "b").await.body, "payment 1");
    assert!(pay(&app, target, "b").await.is_replayed());
}

#[tokio::test(start_paused = true)]
async fn lock_lost_while_an_inner_layer_waits_frees_the_key() {
    let (accounts, records) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
    let (redlock, records) = (redlock(&accounts), redlock(&records));
    let executed = Executed::default();
    let app = counts_begun(&executed)
        .layer(per_account(&redlock).wait(secs(60)))
        .layer(RedlockLayer::new(redlock.clone(), "0"))
        .layer(once(&records).at_most_once(true));
    let other = redlock.lock(("account", "1")).await.unwrap();
    let (first, ()) = tokio::join!(pay(&app, "/payments?account=1", "a"), async {
        sleep(secs(1)).await;
        redlock.revoke("0").await.unwrap();
    });
    assert_eq!((first.code(), executed.count()), ("lock-lost", 0));
    other.release().await.unwrap();
    let paid = pay(&app, "/payments?account=1", "a").await;
    assert_eq!(paid.body, "payment 1");
}

/// The handler was stopped midway, so its effect is unknown to the outer layer, too.
#[tokio::test(start_paused = true)]
async fn execution_that_an_inner_layer_stops_leaves_the_outer_key_locked() {
    let (outer, inner) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
    let executed = Executed::default();
    let app = counts_ended(&executed)
        .layer(once(&redlock(&inner)).max_hold(secs(2)))
        .layer(once(&redlock(&outer)));
    let stopped = pay(&app, "/payments?ms=20000", "a").await;
    assert_eq!(stopped.told(), (503, "lock-lost"));
    let reason = Some(Rejection::Lost(LostReason::MaxHold));
    assert_eq!(stopped.rejection, reason);
    sleep(secs(1)).await;
    assert_eq!(outer.locks(), [1, 1, 1]);
}
