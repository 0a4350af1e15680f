//! Executions whose service is ready late, and lease tasks that panic, over scripted nodes.

use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Router};
use support::{Executed, SlowReadiness, assert_matches, ms, once, secs, set_all};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{ExecutionHandle, LockError, OnceError, Outcome, Redlock, RedlockBuilder};

use crate::payments::{counts_begun, pay, request};

/// Counts an execution when the handler begins, and answers with the validity that is left.
fn validity_left(executed: &Executed) -> Router {
    let executed = executed.clone();
    let pay = async move |Extension(execution): Extension<ExecutionHandle>| {
        executed.one_more();
        format!("{}", execution.valid_for().as_millis())
    };
    Router::new().route("/payments", post(pay))
}

/// Executes with a service that is ready after so long.
async fn pay_late(redlock: &Redlock, executed: &Executed, after: Duration) -> Response {
    let slow = once(redlock).layer(SlowReadiness::of_clones(validity_left(executed), after));
    slow.oneshot(request("/payments", "a"))
        .await
        .unwrap()
        .map(Body::new)
}

async fn text(response: Response) -> String {
    let body = axum::body::to_bytes(response.into_body(), 1 << 20).await;
    String::from_utf8(body.unwrap().to_vec()).unwrap()
}

fn scripted(nodes: &ScriptedNodes) -> RedlockBuilder {
    Redlock::builder().scripted(nodes)
}

#[tokio::test(start_paused = true)]
async fn late_execution_does_not_exceed_its_max_hold() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = scripted(&nodes).build().unwrap();
    let layer = once(&redlock).max_hold(secs(12));
    let slow = layer.layer(SlowReadiness::of_clones(validity_left(&executed), secs(11)));
    let valid_for = text(
        slow.oneshot(request("/payments", "a"))
            .await
            .unwrap()
            .map(Body::new),
    )
    .await;
    let valid_for: u64 = valid_for.parse().unwrap();
    assert!((900..1_100).contains(&valid_for), "{valid_for} ms");
}

/// While the handler runs, without HTTP, and before it begins.
#[tokio::test(start_paused = true)]
async fn execution_is_renewed_with_renew_off() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = scripted(&nodes).renew(false).build().unwrap();
    let app = counts_begun(&executed).layer(once(&redlock));
    let (first, second) = tokio::join!(pay(&app, "/payments?ms=30000", "b"), async {
        sleep(secs(25)).await;
        pay(&app, "/payments?ms=30000", "b").await
    });
    assert_eq!(
        (first.status, second.code()),
        (StatusCode::OK, "request-in-progress")
    );
    assert_eq!(executed.count(), 1);

    let work = |executed: &Executed| {
        let executed = executed.clone();
        redlock.once("c").run(async move |_| {
            sleep(secs(30)).await;
            Ok::<_, ()>(executed.one_more())
        })
    };
    let (first, second) = tokio::join!(work(&executed), async {
        sleep(secs(25)).await;
        work(&executed).await
    });
    assert_eq!(first, Ok(Outcome::Executed(2)));
    let second = second.unwrap_err();
    assert_matches!(second, OnceError::Lock(LockError::Contended { .. }));

    let late = text(pay_late(&redlock, &executed, secs(25)).await).await;
    assert!(late.parse::<u64>().is_ok(), "{late}");
    assert_eq!(executed.count(), 3);

    // A plain lock of the same service is not renewed.
    let guard = redlock.try_lock("d").await.unwrap();
    sleep(secs(11)).await;
    assert!(!guard.is_valid());
}

#[tokio::test(start_paused = true)]
async fn lock_lost_before_the_execution_begins_leaves_no_key() {
    for (gone, status) in [(secs(1), 503), (secs(20), 503)] {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let redlock = scripted(&nodes).build().unwrap();
        let layer = once(&redlock).at_most_once(true);
        let slow = layer.layer(SlowReadiness::of_clones(validity_left(&executed), secs(25)));
        let going = async {
            sleep(gone).await;
            nodes.wipe(0);
            nodes.wipe(1);
        };
        let (answer, ()) = tokio::join!(slow.oneshot(request("/payments", "a")), going);
        assert_eq!(answer.unwrap().status(), status);
        assert_eq!(executed.count(), 0);
        sleep(secs(1)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "{gone:?}");
        let app = validity_left(&executed).layer(once(&redlock).at_most_once(true));
        assert_eq!(pay(&app, "/payments", "a").await.status, StatusCode::OK);
    }
}

#[tokio::test(start_paused = true)]
async fn drain_before_an_execution_begins_ends_the_request_in_order() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = scripted(&nodes).build().unwrap();
    let draining = async {
        sleep(secs(1)).await;
        redlock.drain(secs(30)).await
    };
    let (answer, drained) = tokio::join!(pay_late(&redlock, &executed, secs(5)), draining);
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(drained.is_clean(), "{drained:?}");
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0, 0, 0]));
}

/// However many times its future was polled: nothing was executed, so nothing is left.
#[tokio::test(start_paused = true)]
async fn request_dropped_before_its_execution_leaves_no_intent() {
    for gate in [Gate::Ready, Gate::Slow(ms(5))] {
        for late in [Duration::ZERO, ms(10), ms(200)] {
            for polls in 1..40 {
                let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
                (0..3).for_each(|node| nodes.set(node, gate));
                let redlock = scripted(&nodes).build().unwrap();
                let layer = || once(&redlock).at_most_once(true);
                let slow = layer().layer(SlowReadiness::of_clones(validity_left(&executed), late));
                let mut asked = tokio_test::task::spawn(slow.oneshot(request("/payments", "a")));
                let mut done = false;
                for _ in 0..polls {
                    done |= asked.poll().is_ready();
                    if done {
                        break;
                    }
                    for _ in 0..3 {
                        tokio::task::yield_now().await;
                    }
                    if polls > 5 && !asked.is_woken() {
                        sleep(ms(3)).await;
                    }
                }
                drop(asked);
                if executed.count() > 0 || done {
                    continue;
                }
                sleep(secs(60)).await;
                if executed.count() > 0 {
                    continue;
                }
                let again = pay(&validity_left(&executed).layer(layer()), "/payments", "a").await;
                let code = again.code();
                assert_eq!(
                    again.status,
                    StatusCode::OK,
                    "{gate:?} {late:?} {polls} {code}"
                );
            }
        }
    }
}

/// A lease task that dies while its execution runs leaves the lock to its ttl, and that is told.
#[tokio::test(start_paused = true)]
async fn drain_reports_the_lock_of_a_lease_task_that_panicked_in_an_execution() {
    let nodes = ScriptedNodes::new(3);
    let redlock = scripted(&nodes).build().unwrap();
    let pay = Router::new().route("/payments", post(async || sleep(secs(5)).await));
    let pay = pay.layer(once(&redlock));
    let executing = tokio::spawn(pay.oneshot(request("/payments", "a")));
    sleep(secs(1)).await;
    nodes.set_for(1, OpKind::Confirm, Gate::Panic);
    executing.await.unwrap().unwrap();
    assert_eq!(nodes.locks(), [1, 1, 1]);
    let drained = redlock.drain(secs(1)).await;
    assert!(!drained.is_clean(), "{drained:?}");
    assert_eq!(drained.unconfirmed.len(), 3, "{drained:?}");
    sleep(secs(20)).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
    assert!(redlock.drain(secs(1)).await.is_clean());
}

#[tokio::test(start_paused = true)]
async fn drain_reports_the_lock_of_a_lease_task_that_panicked_under_its_guard() {
    let nodes = ScriptedNodes::new(3);
    let redlock = scripted(&nodes).build().unwrap();
    let guard = redlock.lock("k").await.unwrap();
    nodes.set_for(1, OpKind::Confirm, Gate::Panic);
    sleep(secs(5)).await;
    assert!(!guard.is_valid());
    assert_eq!(nodes.locks(), [1, 1, 1]);
    let drained = redlock.drain(secs(1)).await;
    assert_eq!(drained.unconfirmed.len(), 3, "{drained:?}");
    drop(guard);
    sleep(secs(20)).await;
    assert!(redlock.drain(secs(1)).await.is_clean());
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
                let redlock = scripted(&nodes).build().unwrap();
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
async fn guard_dropped_during_an_extension_leaves_no_lock() {
    for (slow, pause) in [(5, 0), (5, 3), (30, 10), (200, 60)] {
        let nodes = ScriptedNodes::new(3);
        let redlock = scripted(&nodes).build().unwrap();
        let guard = redlock.lock("k").await.unwrap();
        set_all(&nodes, OpKind::Confirm, Gate::Slow(ms(slow)));
        {
            let mut extending = tokio_test::task::spawn(guard.extend(secs(10)));
            assert!(extending.poll().is_pending());
            sleep(ms(pause)).await;
        }
        drop(guard);
        sleep(ms(500)).await;
        assert_eq!(nodes.locks(), [0, 0, 0], "{slow} {pause}");
        assert!(redlock.try_lock("k").await.is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn caller_dropped_during_a_repair_leaves_no_lock_and_the_record() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = scripted(&nodes).build().unwrap();
    let app = validity_left(&executed).layer(once(&redlock));
    for node in 0..2 {
        nodes.set_for(node, OpKind::Record, Gate::Failing);
        nodes.set_for(node, OpKind::Look, Gate::Failing);
    }
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

#[tokio::test(start_paused = true)]
async fn two_phases_share_one_deadline_with_a_long_node_timeout() {
    for node_timeout in [ms(2), ms(50), secs(4)] {
        let nodes = ScriptedNodes::new(3);
        let redlock = scripted(&nodes).node_timeout(node_timeout).build().unwrap();
        // Unequal numbers, so that there is a second phase.
        for node in 0..3 {
            let other = scripted(&nodes).build().unwrap();
            (0..3).for_each(|other| nodes.set(other, Gate::Down));
            nodes.set(node, Gate::Ready);
            drop(other.try_lock("k").await);
            nodes.set(node, Gate::Ready);
            sleep(ms(1)).await;
        }
        (0..3).for_each(|node| nodes.set(node, Gate::Slow(node_timeout * 6 / 10)));
        sleep(secs(20)).await;
        let began = Instant::now();
        let asked = redlock.try_lock("k").await;
        let took = began.elapsed();
        assert!(took <= node_timeout * 2, "{took:?} {asked:?}");
        drop(asked);
        sleep(secs(30)).await;
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}
