//! Which responses are recorded, for how long, and what follows when nodes refuse, fail or forget.

use axum::http::StatusCode;
use support::{Executed, ms, once, redlock, secs};
use tokio::time::sleep;
use tower_redlock::idempotency::RecordKeys;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

use crate::payments::{counts_ended, gate_records, layer, pay, scene};

// Rules: outcome-unknown
#[tokio::test(start_paused = true)]
async fn response_too_large_to_record_is_sent_once_and_never_executed_again() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = counts_ended(&executed).layer(layer(&nodes).max_response_body(100));
    let large = pay(&app, "/payments?size=200", "a").await;
    assert_eq!((large.status, large.body.len()), (StatusCode::OK, 209));
    assert_eq!(large.headers["content-length"], "209");
    let again = pay(&app, "/payments?size=200", "a").await;
    assert_eq!(again.told(), (409, "result-not-kept"));
    // At the limit, and one byte over.
    let full = pay(&app, "/payments?size=91", "b").await;
    assert_eq!(full.body.len(), 100);
    assert_eq!(pay(&app, "/payments?size=91", "b").await.body, full.body);
    assert_eq!(pay(&app, "/payments?size=92", "c").await.body.len(), 101);
    let again = pay(&app, "/payments?size=92", "c").await;
    assert_eq!(again.code(), "result-not-kept");
    assert_eq!(executed.count(), 3);
    // What would keep the nodes from answering others is not kept, whatever is asked for.
    let app = counts_ended(&executed).layer(layer(&nodes).max_response_body(usize::MAX));
    let huge = "/payments?size=1100000";
    assert_eq!(pay(&app, huge, "d").await.status, StatusCode::OK);
    assert_eq!(pay(&app, huge, "d").await.code(), "result-not-kept");
    // Nor is the upgrade of a connection.
    assert_eq!(pay(&app, "/payments?status=101", "e").await.status, 101);
    let again = pay(&app, "/payments?status=101", "e").await;
    assert_eq!((again.code(), executed.count()), ("result-not-kept", 5));
}

#[tokio::test(start_paused = true)]
async fn replays_repair_a_record_that_one_node_after_another_forgets() {
    let (nodes, executed, app) = scene();
    let first = pay(&app, "/payments", "a").await;
    for round in 0..2 {
        for node in 0..3 {
            nodes.wipe(node);
            let again = pay(&app, "/payments", "a").await;
            assert!(again.is_replayed(), "round {round}, node {node}");
            assert_eq!(again.body, first.body);
            // Time for what is done in the background.
            sleep(secs(1)).await;
        }
    }
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0, 0, 0]));
    // Two without a replay in between are one too many: the documented limit.
    nodes.wipe(0);
    nodes.wipe(1);
    nodes.set(2, Gate::Down);
    assert!(!pay(&app, "/payments", "a").await.is_replayed());
    assert_eq!(executed.count(), 2);
}

// Rules: once.late
#[tokio::test(start_paused = true)]
async fn execution_that_outlived_its_lock_is_recorded_without_a_rival() {
    let (nodes, executed, app) = scene();
    (0..2).for_each(|node| nodes.set_for(node, OpKind::Confirm, Gate::Failing));
    let slow = "/payments?ms=60000";
    let first = pay(&app, slow, "a").await;
    assert_eq!(first.status, StatusCode::OK);
    assert!(!first.headers.contains_key("idempotency-recorded"));
    assert!(pay(&app, slow, "a").await.is_replayed());
    assert_eq!(executed.count(), 1);
}

/// The lock of the execution is still there, and keeps a new owner from recording.
#[tokio::test(start_paused = true)]
async fn record_of_a_minority_is_completed_as_soon_as_a_majority_answers() {
    for mute in [Gate::Never, Gate::Failing] {
        let (nodes, executed, app) = scene();
        for node in 0..2 {
            nodes.set_for(node, OpKind::Record, mute);
            nodes.set_for(node, OpKind::Look, Gate::Slow(ms(20)));
        }
        // After they were asked to record, and before their answers to the look.
        let back = async {
            while nodes.sent(0, OpKind::Look) == 0 {
                sleep(ms(1)).await;
            }
            (0..2).for_each(|node| nodes.set(node, Gate::Ready));
        };
        let (first, ()) = tokio::join!(pay(&app, "/payments", "a"), back);
        assert_eq!(first.status, StatusCode::OK);
        let is_marked = first.headers.contains_key("idempotency-recorded");
        assert!(!is_marked, "{mute:?}");
        assert!(pay(&app, "/payments", "a").await.is_replayed());
        assert_eq!((executed.count(), nodes.locks()), (1, vec![0, 0, 0]));
    }
}

// Rules: once.unrecorded
#[tokio::test(start_paused = true)]
async fn response_without_a_majority_of_records_is_marked_unrecorded() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = redlock(&nodes);
    let app = counts_ended(&executed).layer(once(&redlock));
    gate_records(&nodes, 0..2, Gate::Failing);
    let first = pay(&app, "/payments", "a").await;
    assert_eq!(first.status, StatusCode::OK);
    assert_eq!(first.headers["idempotency-recorded"], "false");
    // The lock stays until its ttl: an execution has begun.
    let again = pay(&app, "/payments", "a").await;
    assert_eq!(again.status, StatusCode::CONFLICT);
    assert_eq!(executed.count(), 1);
    // Drain reports where it stays.
    let drained = redlock.drain(secs(1)).await;
    assert!(!drained.is_clean(), "{drained:?}");
}

#[tokio::test(start_paused = true)]
async fn compressed_and_encrypted_response_is_replayed_with_the_answers_of_the_nodes() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let keys = RecordKeys::new(1, &[1; 32]);
    let app = counts_ended(&executed).layer(layer(&nodes).compress_above(1024).encrypt(keys));
    let large = "/payments?size=60000";
    let answer = pay(&app, large, "a").await;
    assert_eq!(answer.status, StatusCode::OK);
    let again = pay(&app, large, "a").await;
    assert!(again.is_replayed());
    assert_eq!((again.body, executed.count()), (answer.body, 1));
    assert_eq!(nodes.sent(0, OpKind::Fetch), 0);
}

#[tokio::test(start_paused = true)]
async fn require_record_answers_outcome_unknown_without_a_majority_of_records() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let once = layer(&nodes).require_record(true);
    let app = counts_ended(&executed).layer(once.ttl(secs(2)).unwrap());
    gate_records(&nodes, 0..2, Gate::Failing);
    nodes.set(2, Gate::Down);
    let failed = pay(&app, "/payments", "a").await;
    assert_eq!(failed.told(), (409, "outcome-unknown"));
    assert!(!failed.body.starts_with(b"payment"), "{:?}", failed.body);
    let again = pay(&app, "/payments", "a").await;
    assert_eq!(again.code(), "request-in-progress");
    // The lock has ended by its ttl, and no node has a record.
    sleep(secs(3)).await;
    (0..3).for_each(|node| nodes.set(node, Gate::Ready));
    gate_records(&nodes, 0..2, Gate::Ready);
    let second = pay(&app, "/payments", "a").await;
    assert_eq!(second.body, "payment 2");
    assert!(pay(&app, "/payments", "a").await.is_replayed());
}

// Rules: once.at_most, outcome-unknown
#[tokio::test(start_paused = true)]
async fn at_most_once_is_outcome_unknown_while_a_majority_keeps_the_intent() {
    let failing = "/payments?status=503";
    for (is_down, wiped, then) in [
        (false, &[1][..], "outcome-unknown"),
        (false, &[1, 2], ""),
        (true, &[2], "outcome-unknown"),
        (true, &[1], ""),
    ] {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let app = counts_ended(&executed).layer(layer(&nodes).at_most_once(true));
        if is_down {
            // It never hears that anything has begun.
            nodes.set(2, Gate::Down);
        }
        let failed = pay(&app, failing, "a").await;
        assert_eq!(failed.status, StatusCode::SERVICE_UNAVAILABLE);
        nodes.set(2, Gate::Ready);
        assert_eq!(pay(&app, failing, "a").await.code(), "outcome-unknown");
        wiped.iter().for_each(|node| nodes.wipe(*node));
        let again = pay(&app, failing, "a").await;
        assert_eq!(again.code(), then, "{is_down}, {wiped:?}");
        let times = if then.is_empty() { 2 } else { 1 };
        assert_eq!(executed.count(), times, "{is_down}, {wiped:?}");
    }
}
