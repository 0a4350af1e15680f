//! Duplicates of running and recorded executions, and requests that are dropped.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use support::{Executed, ms, once, redlock, secs, set_all};
use tokio::time::{Instant, sleep};
use tower_redlock::RedlockLayer;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

use crate::payments::{counts_ended, layer, pay, pay_for, scene};

/// The record comes with the answers to that command, up to 16 KiB with its headers, and one node is asked for the rest.
#[tokio::test(start_paused = true)]
async fn execution_costs_two_commands_per_node_and_a_replay_one() {
    for (target, fetched) in [
        ("/payments", 0),
        ("/payments?size=16000", 0),
        ("/payments?size=17000", 1),
    ] {
        let (nodes, _, app) = scene();
        let sent = |kind| [0, 1, 2].map(|node| nodes.sent(node, kind));
        pay(&app, target, "a").await;
        assert_eq!(sent(OpKind::Acquire), [1, 1, 1]);
        assert_eq!(sent(OpKind::Record), [1, 1, 1], "in place of the release");
        assert_eq!(sent(OpKind::Release), [0, 0, 0]);
        for node in 0..3 {
            // The third answers after the replay is decided.
            nodes.set(node, Gate::Slow(ms(1 + node as u64)));
        }
        assert!(pay(&app, target, "a").await.is_replayed());
        sleep(secs(1)).await;
        assert_eq!(sent(OpKind::Acquire), [2, 2, 2]);
        for other in [OpKind::Confirm, OpKind::Release, OpKind::Look] {
            assert_eq!(sent(other), [0, 0, 0], "{other:?}");
        }
        assert_eq!(sent(OpKind::Record), [1, 1, 1]);
        let read: usize = sent(OpKind::Fetch).iter().sum();
        assert_eq!(read, fetched, "{target}");
    }
}

// Rules: request-in-progress
#[tokio::test(start_paused = true)]
async fn duplicate_of_a_running_execution_is_refused_or_waits() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    // So that one duplicate comes while another one is asking.
    (0..3).for_each(|node| nodes.set(node, Gate::Slow(ms(1))));
    let slow = "/payments?ms=1000";
    for elsewhere in [false, true] {
        let app = counts_ended(&executed).layer(layer(&nodes));
        let another = counts_ended(&executed).layer(layer(&nodes));
        let other = if elsewhere { another } else { app.clone() };
        let patient = counts_ended(&executed).layer(layer(&nodes).wait(secs(5)));
        let before = executed.count();
        let key = if elsewhere { "a" } else { "b" };
        let later = async |app: &Router, body| {
            sleep(ms(100)).await;
            pay_for(app, slow, key, body).await
        };
        let (first, refused, reused, waited) = tokio::join!(
            pay(&app, slow, key),
            later(&other, ""),
            later(&other, "amount=6"),
            later(&patient, ""),
        );
        assert_eq!(first.status, StatusCode::OK);
        assert_eq!(refused.told(), (409, "request-in-progress"));
        assert_eq!(refused.headers["retry-after"], "1");
        assert_eq!(reused.told(), (422, "idempotency-key-reused"));
        assert!(waited.is_replayed());
        assert_eq!(waited.body, first.body);
        assert_eq!(executed.count(), before + 1);
        let later = pay_for(&other, slow, key, "amount=6").await;
        assert_eq!(later.code(), "idempotency-key-reused");
    }
}

// Rules: idempotency-key-reused
#[tokio::test(start_paused = true)]
async fn concurrent_request_is_refused_as_soon_as_the_first_executes() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    set_all(&nodes, OpKind::Acquire, Gate::Slow(ms(20)));
    for (round, layer) in [layer(&nodes), layer(&nodes).max_waiters(1)]
        .into_iter()
        .enumerate()
    {
        let app = counts_ended(&executed).layer(layer);
        let (slow, key) = ("/payments?ms=1000", round.to_string());
        let began = Instant::now();
        // All of them come while the first is only asking.
        let (first, reused, (refused, after)) = tokio::join!(
            pay(&app, slow, &key),
            pay_for(&app, slow, &key, "amount=6"),
            async { (pay(&app, slow, &key).await, began.elapsed()) },
        );
        assert_eq!(first.status, StatusCode::OK);
        assert_eq!(refused.code(), "request-in-progress");
        // The nodes' round trip, and not twice what they may take at most.
        assert!(after < ms(25), "{after:?}");
        if round == 0 {
            assert_eq!(reused.code(), "idempotency-key-reused");
        }
    }
    assert_eq!(executed.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn concurrent_duplicates_of_a_record_are_all_replayed() {
    let (nodes, executed, app) = scene();
    (0..3).for_each(|node| nodes.set(node, Gate::Slow(ms(5))));
    let first = pay(&app, "/payments", "a").await;
    let duplicates = (0..200).map(|_| pay(&app, "/payments", "a"));
    let (duplicates, reused) = tokio::join!(
        futures_util::future::join_all(duplicates),
        pay_for(&app, "/payments", "a", "amount=6")
    );
    for duplicate in duplicates {
        assert!(duplicate.is_replayed(), "{}", duplicate.code());
        assert_eq!(duplicate.body, first.body);
    }
    assert_eq!(reused.code(), "idempotency-key-reused");
    assert_eq!(executed.count(), 1);
    // The first of them asks for all.
    assert_eq!(nodes.sent(0, OpKind::Acquire), 2);
}

#[tokio::test(start_paused = true)]
async fn inner_lock_waits_whatever_its_key_and_redlock() {
    let (nodes, others) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
    let same = redlock(&nodes);
    // Sorts before all keys of idempotent requests.
    for (key, locks) in [("a", same.clone()), ("b", redlock(&others))] {
        let within = RedlockLayer::new(locks.clone(), "0").wait(secs(5));
        let app = Router::new()
            .route("/payments", post(async || "paid").layer(within))
            .layer(once(&same));
        let other = locks.lock("0").await.unwrap();
        let (paid, _) = tokio::join!(pay(&app, "/payments", key), async {
            sleep(secs(1)).await;
            other.release().await.unwrap();
        });
        assert_eq!(paid.status, StatusCode::OK, "{key}");
    }
}
