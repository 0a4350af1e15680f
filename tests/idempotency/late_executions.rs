//! Executions whose service is ready late, and lease tasks that panic, over scripted nodes.

use axum::http::StatusCode;
use axum::routing::post;
use axum::{Extension, Router};
use support::{Executed, SlowReadiness, ms, once, redlock, secs, three_nodes};
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt};
use tower_redlock::ExecutionHandle;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

use crate::payments::{gate_records, pay, request};

/// Counts an execution when the handler begins, and answers with the validity that is left.
fn validity_left(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move |Extension(execution): Extension<ExecutionHandle>| {
        executed.one_more();
        format!("{}", execution.valid_for().as_millis())
    };
    Router::new().route("/payments", post(pay))
}

#[tokio::test(start_paused = true)]
async fn late_execution_does_not_exceed_its_max_hold() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = redlock(&nodes);
    let layer = once(&redlock).max_hold(secs(12));
    let slow = layer.layer(SlowReadiness::of_clones(validity_left(&executed), secs(11)));
    let app = Router::new().route_service("/payments", slow);
    let valid_for = pay(&app, "/payments", "a").await.text();
    let valid_for: u64 = valid_for.parse().unwrap();
    assert!((900..1_100).contains(&valid_for), "{valid_for} ms");
}

#[tokio::test(start_paused = true)]
async fn lock_lost_before_the_execution_begins_leaves_no_key() {
    for gone in [secs(1), secs(20)] {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let redlock = redlock(&nodes);
        let layer = once(&redlock).at_most_once(true);
        let slow = layer.layer(SlowReadiness::of_clones(validity_left(&executed), secs(25)));
        let going = async {
            sleep(gone).await;
            nodes.wipe(0);
            nodes.wipe(1);
        };
        let (answer, ()) = tokio::join!(slow.oneshot(request("/payments", "a")), going);
        assert_eq!(answer.unwrap().status(), 503);
        assert_eq!(executed.count(), 0);
        sleep(secs(1)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "{gone:?}");
        let app = validity_left(&executed).layer(once(&redlock).at_most_once(true));
        assert_eq!(pay(&app, "/payments", "a").await.status, StatusCode::OK);
    }
}

/// A lease task that dies while its execution runs, or under its guard, leaves the lock to its ttl, and that is told.
#[tokio::test(start_paused = true)]
async fn drain_reports_the_lock_of_a_lease_task_that_panicked() {
    for executes in [true, false] {
        let (nodes, redlock) = three_nodes();
        let service = redlock.clone();
        let holding = tokio::spawn(async move {
            if executes {
                let work = async |_| {
                    sleep(secs(5)).await;
                    Ok::<_, ()>(1)
                };
                service.once("k").run(work).await.unwrap_err();
            } else {
                let guard = service.lock("k").await.unwrap();
                sleep(secs(10)).await;
                assert!(!guard.is_valid());
            }
        });
        sleep(secs(1)).await;
        nodes.set_for(1, OpKind::Confirm, Gate::Panic);
        sleep(secs(5)).await;
        assert_eq!(nodes.locks(), [1, 1, 1]);
        let drained = redlock.drain(secs(1)).await;
        assert!(!drained.is_clean(), "{drained:?}");
        assert_eq!(drained.unconfirmed.len(), 3, "{drained:?}");
        sleep(secs(20)).await;
        holding.await.unwrap();
        assert_eq!(nodes.locks(), [0, 0, 0]);
        assert!(redlock.drain(secs(1)).await.is_clean());
    }
}

/// At each kind of request, before, in and after an execution: what is left ends by its ttl, the key is
/// free for others then, and intents stay only where something may have been executed.
#[tokio::test(start_paused = true)]
async fn lease_task_panic_at_any_request_of_an_execution_executes_at_most_once() {
    use OpKind::{Acquire, Confirm, Look, Record, Release};
    for kind in [Acquire, Confirm, Release, Record, Look] {
        for node in 0..3 {
            for (late, ms_executing) in [(0, 0), (200, 0), (0, 5_000)] {
                let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
                let redlock = redlock(&nodes);
                let counted = executed.clone();
                let pay_for = async move || {
                    counted.one_more();
                    sleep(ms(ms_executing)).await;
                };
                let inner = Router::new().route("/payments", post(pay_for));
                let layer = || once(&redlock).at_most_once(true);
                nodes.set_for(node, kind, Gate::Panic);
                let slow = layer().layer(SlowReadiness::of_clones(inner.clone(), ms(late)));
                let answer = timeout(secs(120), slow.oneshot(request("/payments", "a"))).await;
                let status = answer.expect("it hangs").unwrap().status();
                nodes.set(node, Gate::Ready);
                let count = executed.count();
                sleep(secs(30)).await;
                let case = format!("{kind:?} at {node}, {late}, {ms_executing}: {status}");
                assert_eq!(nodes.locks(), [0, 0, 0], "{case}");
                let again = timeout(secs(60), pay(&inner.layer(layer()), "/payments", "a")).await;
                let again = again.expect("it hangs");
                match count {
                    0 => assert_eq!(again.status, StatusCode::OK, "{case}"),
                    _ => assert_eq!(executed.count(), 1, "{case}: executed again"),
                }
                assert!(redlock.drain(secs(1)).await.is_clean(), "{case}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn caller_dropped_during_a_repair_leaves_no_lock_and_the_record() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = redlock(&nodes);
    let app = validity_left(&executed).layer(once(&redlock));
    gate_records(&nodes, 0..2, Gate::Failing);
    assert_eq!(pay(&app, "/payments", "a").await.status, StatusCode::OK);
    sleep(secs(60)).await;
    for node in 0..2 {
        nodes.set(node, Gate::Ready);
        nodes.set_for(node, OpKind::Record, Gate::Slow(ms(30)));
    }
    nodes.set_for(2, OpKind::Acquire, Gate::Never);
    let slow = once(&redlock).layer(SlowReadiness::of_clones(validity_left(&executed), ms(200)));
    let left = timeout(ms(215), slow.oneshot(request("/payments", "a"))).await;
    assert!(left.is_err(), "{left:?}");
    nodes.set(2, Gate::Ready);
    sleep(secs(1)).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
    assert!(pay(&app, "/payments", "a").await.is_replayed());
    assert_eq!(executed.count(), 1);
}
