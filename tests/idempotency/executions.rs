//! When an execution begins, which locks it holds, and what it leaves behind in every ending.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::StatusCode;
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Router};
use support::{
    Answer, Executed, SlowReadiness, ms, once, redlock, secs, set_all, three_nodes,
    three_nodes_with,
};
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{BufferBodyLayer, ExecutionHandle, LockHandle, LockKey, OnLost, Redlock};

use crate::payments::{cloneable, counts_ended, gate_records, pay, per_account, rebuilt, request};

#[derive(Debug, PartialEq)]
struct BankIsGone;

#[tokio::test(start_paused = true)]
async fn execution_renews_its_lock_until_it_ends() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    // What the builder says of bounds and renewal is for locks, not for executions.
    let redlock = Redlock::builder().scripted(&nodes).max_hold(secs(5));
    let redlock = redlock.renew(false).build().unwrap();
    let app = counts_ended(&executed).layer(once(&redlock));
    let slow = "/payments?ms=90000";
    let (first, second) = tokio::join!(pay(&app, slow, "a"), async {
        sleep(secs(75)).await;
        pay(&app, slow, "a").await
    });
    assert_eq!(second.told(), (409, "request-in-progress"));
    assert_eq!((first.status, executed.count()), (StatusCode::OK, 1));
    assert!(pay(&app, slow, "a").await.is_replayed());
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

/// Of two layers with one lock, one that aborts is enough.
#[tokio::test(start_paused = true)]
async fn outer_lock_lost_stops_the_execution_unless_on_lost_is_notify() {
    use OnLost::{Abort, Notify};
    for (layers, executions) in [(&[Abort][..], 0), (&[Notify], 1), (&[Abort, Notify], 0)] {
        for leaves in [false, true] {
            let (accounts, records) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
            let executed = Executed::default();
            let locks = redlock(&accounts);
            let app = counts_ended(&executed).layer(once(&redlock(&records)));
            let app = layers.iter().fold(app, |app, on_lost| {
                app.layer(per_account(&locks).on_lost(*on_lost))
            });
            let slow = "/payments?account=1&ms=20000";
            let payer = app.clone();
            let paying = tokio::spawn(async move { pay(&payer, slow, "a").await });
            sleep(ms(100)).await;
            if leaves {
                paying.abort();
            }
            (0..3).for_each(|node| accounts.wipe(node));
            sleep(secs(30)).await;
            let what = format!("{layers:?}, the client leaves: {leaves}");
            assert_eq!(executed.count(), executions, "{what}");
            if !leaves {
                let code = if executions == 0 { "lock-lost" } else { "" };
                assert_eq!(paying.await.unwrap().code(), code, "{what}");
                if executions == 1 {
                    assert!(pay(&app, slow, "a").await.is_replayed(), "{what}");
                    assert_eq!(records.locks(), [0, 0, 0], "{what}");
                }
            }
        }
    }
}

/// Leaves a record at the last node only, and no lock.
async fn record_at_one_node(nodes: &ScriptedNodes, app: &Router, executed: &Executed) {
    gate_records(nodes, 0..2, Gate::Failing);
    let first = pay(app, "/payments", "a").await;
    assert_eq!(first.headers["idempotency-recorded"], "false");
    assert_eq!(executed.count(), 1);
    (0..2).for_each(|node| nodes.set(node, Gate::Ready));
    sleep(secs(60)).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn record_found_while_the_service_becomes_ready_is_replayed() {
    // The record comes with the grant, late, or only when the node is asked once more.
    for late in [Gate::Ready, Gate::Slow(ms(20)), Gate::Never] {
        let (executed, (nodes, redlock)) = (Executed::default(), three_nodes());
        let app = counts_ended(&executed).layer(once(&redlock));
        record_at_one_node(&nodes, &app, &executed).await;
        nodes.set_for(2, OpKind::Acquire, late);
        let slow = SlowReadiness::new(counts_ended(&executed), ms(200));
        let slow = once(&redlock).layer(slow);
        let answer = slow.oneshot(request("/payments", "a")).await.unwrap();
        let replayed = answer.headers().contains_key("idempotency-replayed");
        assert!(replayed, "{late:?}: {answer:?}");
        assert_eq!(executed.count(), 1, "{late:?}");
        nodes.set(2, Gate::Ready);
        sleep(secs(1)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "{late:?}");
        assert!(pay(&app, "/payments", "a").await.is_replayed());
    }
}

#[tokio::test(start_paused = true)]
async fn execution_after_a_long_wait_for_readiness_begins_with_full_validity() {
    let (nodes, redlock) = three_nodes_with(|builder| builder.renew(false));
    let executed = Executed::default();
    let slow = SlowReadiness::new(counts_ended(&executed), secs(100));
    let slow = once(&redlock).layer(slow);
    let answer = slow.oneshot(request("/payments", "a")).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0, 0, 0]));
}

#[tokio::test(start_paused = true)]
async fn execution_handle_and_lock_handle_reach_the_handler() {
    async fn see(
        Extension(execution): Extension<ExecutionHandle>,
        lock: Option<LockHandle>,
    ) -> String {
        assert!(execution.is_valid() && execution.fencing_token().is_some());
        let token = lock.as_ref().and_then(LockHandle::fencing_token);
        let account = lock.map(|lock| lock.keys()[0].clone());
        let expected = LockKey::from(("account", "1"));
        format!("{} {}", account == Some(expected), token.is_some())
    }
    let redlock = redlock(&ScriptedNodes::new(3));
    let alone = Router::new()
        .route("/payments", post(see))
        .layer(once(&redlock));
    assert_eq!(pay(&alone, "/payments", "a").await.body, "false false");
    let within = alone.clone().layer(per_account(&redlock));
    let within = pay(&within, "/payments?account=1", "b").await;
    assert_eq!(within.body, "true true");
    let around = Router::new().route("/payments", post(see));
    let around = around.layer(per_account(&redlock)).layer(once(&redlock));
    let around = pay(&around, "/payments?account=1", "c").await;
    assert_eq!(around.body, "true true");
    let forgotten = Router::new().route("/payments", post(see));
    let forgotten = pay(&forgotten, "/payments", "d").await;
    assert_eq!(forgotten.status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test(start_paused = true)]
async fn execution_stopped_by_a_lost_inner_lock_is_outcome_unknown() {
    for rebuilds in [false, true] {
        for at_most_once in [false, true] {
            let (accounts, records) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
            let executed = Executed::default();
            let mut app = counts_ended(&executed).layer(per_account(&redlock(&accounts)));
            if rebuilds {
                app = app.layer(map_response(rebuilt));
            }
            let app = app.layer(once(&redlock(&records)).at_most_once(at_most_once));
            let target = "/payments?account=1&ms=20000";
            let (stopped, ()) = tokio::join!(pay(&app, target, "a"), async {
                sleep(ms(100)).await;
                (0..3).for_each(|node| accounts.wipe(node));
            });
            assert!(!stopped.status.is_success());
            // The lock stays until its ttl.
            assert_eq!(pay(&app, target, "a").await.status, StatusCode::CONFLICT);
            sleep(secs(11)).await;
            let again = pay(&app, "/payments?account=1", "a").await;
            let code = if at_most_once { "outcome-unknown" } else { "" };
            assert_eq!((again.code(), again.is_replayed()), (code, false));
        }
    }
}

// Rules: once.kept
#[tokio::test(start_paused = true)]
async fn error_or_panic_of_an_execution_leaves_the_lock_to_its_ttl() {
    for panics in [false, true] {
        for at_most_once in [false, true] {
            let (executed, (nodes, redlock)) = (Executed::default(), three_nodes());
            let counted = executed.clone();
            let handler = service_fn(move |_| {
                let counted = counted.clone();
                async move {
                    tokio::task::yield_now().await;
                    assert!(counted.one_more() > 1 || !panics, "as the test wants it");
                    match counted.count() {
                        1 => Err(BankIsGone),
                        _ => Ok(Response::new(String::new())),
                    }
                }
            });
            let service = once(&redlock).at_most_once(at_most_once).layer(handler);
            let call = || {
                let call = service.clone().oneshot(request("/payments", "a"));
                let status = |response: Response<_>| response.status().as_u16();
                tokio::spawn(async move { call.await.map(status) })
            };
            let failed = call().await;
            assert!(!matches!(failed, Ok(Ok(_))), "{failed:?}");
            assert_eq!(nodes.locks(), [1, 1, 1], "panics: {panics}");
            sleep(secs(5)).await;
            assert_eq!(call().await.unwrap(), Ok(409));
            assert_eq!(executed.count(), 1);
            sleep(secs(6)).await;
            let then = if at_most_once { 409 } else { 200 };
            assert_eq!(call().await.unwrap(), Ok(then));
            let drained = redlock.drain(secs(1)).await;
            assert!(drained.held.is_empty(), "{drained:?}");
        }
    }
}

// Rules: http.recorded
#[tokio::test(start_paused = true)]
async fn transient_and_unrouted_statuses_are_not_recorded() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let transient = [401, 405, 407, 408, 423, 425, 429, 500, 503];
    let kept = [200, 201, 400, 402, 403, 404, 409, 410, 422];
    let executed = Executed::default();
    let app = counts_ended(&executed).layer(once(&redlock));
    for (statuses, is_replayed) in [(&transient[..], false), (&kept, true)] {
        for status in statuses {
            let target = format!("/payments?status={status}");
            let key = status.to_string();
            assert_eq!(pay(&app, &target, &key).await.status.as_u16(), *status);
            let again = pay(&app, &target, &key).await;
            assert_eq!(again.is_replayed(), is_replayed, "{status}");
        }
    }
    for status in [409, 423] {
        let come_back = post(move || async move {
            let status = StatusCode::from_u16(status).unwrap();
            (status, [("retry-after", "1")], "")
        });
        let app = Router::new().route("/payments", come_back);
        let app = app.layer(once(&redlock));
        let key = format!("come-back-{status}");
        pay(&app, "/payments", &key).await;
        let again = pay(&app, "/payments", &key).await;
        assert!(!again.is_replayed(), "{status}");
    }
    // The next version has the route, and the method.
    let old = Router::new().route("/payments", axum::routing::get(async || "list"));
    let old = old.layer(once(&redlock));
    for target in ["/payments", "/refunds"] {
        let refused = pay(&old, target, "deployed").await;
        assert!(refused.status.is_client_error());
        let new = Router::new().route(target, post(async || "done"));
        let new = pay(&new.layer(once(&redlock)), target, "deployed").await;
        assert_eq!(new.body, "done", "{target}");
    }
}

// Rules: http.errors
#[tokio::test(start_paused = true)]
async fn inner_error_under_a_lock_is_returned_after_the_release() {
    let (nodes, redlock) = three_nodes();
    set_all(&nodes, OpKind::Release, Gate::Slow(ms(20)));
    let failing = service_fn(async |_: http::Request<String>| {
        tokio::task::yield_now().await;
        Err::<Response<String>, _>("it failed")
    });
    let failing = per_account(&redlock).layer(failing);
    let failed = failing.clone().oneshot(cloneable("/?account=1", "a")).await;
    assert_eq!(failed.err(), Some("it failed"));
    assert_eq!(nodes.locks(), [0, 0, 0]);
    let panicking = async || -> &'static str { panic!("as the test wants it") };
    let app = Router::new().route("/payments", post(panicking));
    let app = app
        .layer(per_account(&redlock))
        .layer(CatchPanicLayer::new());
    for _ in 0..3 {
        let caught = pay(&app, "/payments?account=1", "a").await;
        assert_eq!(caught.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}

/// Behind the grant, the upload in a `BufferBodyLayer`, or the wait for a lock: the handler was not called.
#[tokio::test(start_paused = true)]
async fn poll_ready_error_of_an_inner_layer_is_no_execution() {
    for inner in ["none", "buffer", "lock"] {
        let (nodes, redlock) = three_nodes();
        set_all(&nodes, OpKind::Release, Gate::Slow(ms(20)));
        let layer = once(&redlock).at_most_once(true);
        // When the stack is called, when the key is granted, and not once more.
        let times = if inner == "none" { 1 } else { 2 };
        let ready = ReadyTimes(times, Arc::default());
        let call = || request("/payments?account=1", "a").map(|_| Body::from("amount=5"));
        let failed = match inner {
            "none" => layer.layer(ready).oneshot(call()).await.err(),
            "buffer" => {
                let service = layer.layer(BufferBodyLayer::new(64).layer(ready));
                service.oneshot(call()).await.err()
            }
            _ => {
                let service = layer.layer(per_account(&redlock).wait(secs(1)).layer(ready));
                service.oneshot(call()).await.err()
            }
        };
        assert_eq!(failed, Some("broken"), "{inner}");
        assert_eq!(nodes.locks(), [0; 3], "{inner}");
        let executed = Executed::default();
        let app = counts_ended(&executed).layer(once(&redlock).at_most_once(true));
        assert_eq!(Answer::to(&app, call()).await.body, "payment 1", "{inner}");
    }
}

/// A service that is ready so many times, and breaks then; with the number of times so far.
#[derive(Clone)]
struct ReadyTimes(usize, Arc<AtomicUsize>);

impl<R> Service<R> for ReadyTimes {
    type Response = Response<String>;
    type Error = &'static str;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match self.1.fetch_add(1, Ordering::SeqCst) {
            so_far if so_far < self.0 => Poll::Ready(Ok(())),
            _ => Poll::Ready(Err("broken")),
        }
    }

    fn call(&mut self, _: R) -> Self::Future {
        ready(Err("called"))
    }
}
