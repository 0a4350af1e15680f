//! Requests that are dropped before, during and after an execution.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::routing::post;
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use support::{Executed, SlowReadiness, ms, once, redlock, secs};
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt};
use tower_redlock::test_util::{Gate, ScriptedNodes};
use tower_redlock::{Redlock, RedlockLayer, RunToCompletion, key};

use crate::payments::{counts_begun, gate_records, pay, per_account, request};

/// Polls a request as often as `polls`, with time going on in between, and drops it then. Returns whether it
/// had ended.
async fn dropped_after(app: &Router, polls: usize) -> bool {
    let mut call = pin!(pay(app, "/payments?account=1&ms=30", "a"));
    for _ in 0..polls {
        let polled = poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_ready())).await;
        if polled {
            return true;
        }
        // Timers and tasks go on.
        sleep(ms(1)).await;
    }
    false
}

#[tokio::test(start_paused = true)]
async fn request_dropped_at_any_poll_leaves_no_key_or_one_recorded_execution() {
    type Stack = fn(Router, &Redlock) -> Router;
    let stacks: [(&str, Stack); 6] = [
        ("alone", |app, redlock| {
            app.layer(once(redlock).at_most_once(true))
        }),
        ("lock outside", |app, redlock| {
            app.layer(once(redlock).at_most_once(true))
                .layer(per_account(redlock))
        }),
        ("lock inside", |app, redlock| {
            app.layer(per_account(redlock))
                .layer(once(redlock).at_most_once(true))
        }),
        ("running on, outside", |app, redlock| {
            let app = app.layer(once(redlock).at_most_once(true));
            app.layer(per_account(redlock).on_disconnect(RunToCompletion))
        }),
        // Between the grant and the begin of the execution, too.
        ("ready late", |app, redlock| {
            let late = SlowReadiness::of_clones(app, ms(10));
            Router::new().route_service("/payments", once(redlock).at_most_once(true).layer(late))
        }),
        ("running on, inside", |app, redlock| {
            let app = app.layer(per_account(redlock).on_disconnect(RunToCompletion));
            app.layer(once(redlock).at_most_once(true))
        }),
    ];
    for (name, stack) in stacks {
        let mut outcomes = [0; 2];
        for polls in 0..90 {
            let nodes = ScriptedNodes::new(3);
            (0..3).for_each(|node| nodes.set(node, Gate::Slow(ms(5))));
            let (redlock, executed) = (redlock(&nodes), Executed::default());
            let app = stack(counts_begun(&executed), &redlock);
            let ended = dropped_after(&app, polls).await;
            sleep(ms(200)).await;
            let what = format!("{name}: dropped after {polls} polls");
            assert_eq!(nodes.locks(), [0, 0, 0], "{what}");
            let before = executed.count();
            assert!(before <= 1, "{what}");
            outcomes[before] += 1;
            let again = pay(&app, "/payments?account=1&ms=30", "a").await;
            assert_eq!(again.body, "payment 1", "{what}: {again:?}");
            assert_eq!(again.is_replayed(), before == 1, "{what}");
            assert_eq!(executed.count(), 1, "{what}");
            assert!(redlock.drain(secs(1)).await.held.is_empty(), "{what}");
            if ended {
                break;
            }
        }
        let few = outcomes.iter().filter(|count| **count <= 3).count();
        assert_eq!(few, 0, "{name}: {outcomes:?}");
    }
}

// Rules: http.execution_keeps
#[tokio::test(start_paused = true)]
async fn execution_without_its_client_keeps_all_outer_locks() {
    let nodes = ScriptedNodes::new(3);
    let (redlock, executed) = (redlock(&nodes), Executed::default());
    let tenant = RedlockLayer::new(redlock.clone(), ("tenant", key::query("tenant")));
    let app = counts_begun(&executed).layer(once(&redlock));
    let app = app.layer(per_account(&redlock)).layer(tenant);
    let call = pay(&app, "/payments?account=1&tenant=2&ms=1000", "a");
    assert!(timeout(ms(100), call).await.is_err());
    sleep(ms(100)).await;
    for target in [
        "/payments?account=1&tenant=3",
        "/payments?account=4&tenant=2",
    ] {
        let beside = pay(&app, target, "b").await;
        assert_eq!(beside.status, StatusCode::LOCKED, "{target}");
    }
    sleep(secs(1)).await;
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0; 3]));
}

/// A handler that counts the pieces of its body, one in 100 ms; 20 of them.
fn streams(status: StatusCode, pieces: &Executed, executed: &Executed) -> Router {
    let (pieces, executed) = (pieces.clone(), executed.clone());
    let streaming = async move || {
        executed.one_more();
        let pieces = stream::iter(0..20).then(move |_| {
            let pieces = pieces.clone();
            async move {
                sleep(ms(100)).await;
                Ok::<_, Infallible>(format!("{}\n", pieces.one_more()))
            }
        });
        (status, Body::from_stream(pieces))
    };
    Router::new().route("/payments", post(streaming))
}

// Rules: http.body_end
#[tokio::test(start_paused = true)]
async fn execution_ends_with_its_streamed_body_also_without_its_client() {
    for (status, then) in [
        (StatusCode::OK, "result-not-kept"),
        (StatusCode::SERVICE_UNAVAILABLE, ""),
    ] {
        for leaves in [false, true] {
            let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
            let (redlock, pieces) = (redlock(&nodes), Executed::default());
            let app = streams(status, &pieces, &executed);
            let app = app.layer(once(&redlock)).layer(per_account(&redlock));
            let what = format!("{status}, leaves: {leaves}");
            let (target, elsewhere) = ("/payments?account=1", "/payments?account=2");
            let response = app.clone().oneshot(request(target, "a")).await.unwrap();
            let mut body = response.into_body();
            let first = body.frame().await.unwrap().unwrap();
            assert_eq!(first.into_data().unwrap(), "1\n");
            let body = (!leaves).then_some(body);
            sleep(secs(1)).await;
            // The account is locked for others, and the key for duplicates.
            let beside = pay(&app, target, "b").await;
            assert_eq!(beside.status, StatusCode::LOCKED, "{what}");
            let alone = streams(status, &pieces, &executed).layer(once(&redlock));
            let duplicate = pay(&alone, target, "a").await;
            assert_eq!(duplicate.code(), "request-in-progress", "{what}");
            if let Some(body) = body {
                let rest = body.collect().await.unwrap().to_bytes();
                assert!(rest.ends_with(b"19\n20\n"), "{what}");
                assert_eq!(nodes.locks(), [0, 0, 0], "before the end is passed on");
            } else {
                let drained = redlock.drain(secs(60)).await;
                assert!(drained.is_clean(), "{what}: {drained:?}");
            }
            assert_eq!((pieces.count(), executed.count()), (20, 1), "{what}");
            assert_eq!(nodes.locks(), [0, 0, 0], "{what}");
            let redlock = self::redlock(&nodes);
            let app = streams(status, &pieces, &executed).layer(once(&redlock));
            assert_eq!(pay(&app, target, "a").await.code(), then, "{what}");
            let executions = if then.is_empty() { 2 } else { 1 };
            assert_eq!(executed.count(), executions, "{what}");
            assert_eq!(pay(&app, elsewhere, "c").await.status, status, "{what}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn streamed_body_of_a_stopped_execution_ends_with_an_error() {
    for (cause, leaves) in ["lost", "max_hold", "panic", "unrecorded"]
        .into_iter()
        .flat_map(|cause| [(cause, false), (cause, true)])
    {
        let (nodes, outer) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
        let (executed, pieces) = (Executed::default(), Executed::default());
        let layer = once(&redlock(&nodes)).at_most_once(true);
        let layer = match cause {
            "max_hold" => layer.max_hold(secs(1)),
            _ => layer.require_record(true),
        };
        let app = match cause {
            "panic" => Router::new().route("/payments", post(async || panics_at_its_fifth_piece())),
            _ => streams(StatusCode::OK, &pieces, &executed),
        };
        let account = per_account(&redlock(&outer)).ttl(secs(1)).unwrap();
        let app = app.layer(layer).layer(account);
        let pay = async || pay(&app, "/payments?account=1", "a").await;
        let call = request("/payments?account=1", "a");
        let mut body = app.clone().oneshot(call).await.unwrap().into_body();
        assert!(body.frame().await.unwrap().is_ok());
        match cause {
            "lost" => (0..3).for_each(|node| outer.wipe(node)),
            "unrecorded" => gate_records(&nodes, 0..3, Gate::Failing),
            _ => {}
        }
        let what = format!("{cause}, leaves: {leaves}");
        if leaves {
            drop(body);
        } else {
            assert!(body.collect().await.is_err(), "{what}");
        }
        sleep(secs(3)).await;
        let is_ended = cause == "unrecorded";
        assert_eq!(pieces.count() == 20, is_ended, "{what}: {pieces:?}");
        gate_records(&nodes, 0..3, Gate::Ready);
        // It may have had an effect, so its key is locked until the ttl, and what then is unknown.
        sleep(secs(11)).await;
        assert_eq!(pay().await.code(), "outcome-unknown", "{what}");
    }
}

fn panics_at_its_fifth_piece() -> Body {
    let pieces = stream::iter(1..10).then(|piece| async move {
        sleep(ms(100)).await;
        assert!(piece < 5, "as the test wants it");
        Ok::<_, Infallible>("piece")
    });
    Body::from_stream(pieces)
}
