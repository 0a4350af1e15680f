//! `Redlock::serve_until` with servers that are plain futures.

use std::future::{pending, ready};
use std::sync::Arc;

use support::{ms, secs};
use tokio::time::{Instant, sleep};
use tokio_test::{assert_pending, assert_ready, task};
use tower_redlock::protocol::LockKeys;
use tower_redlock::test_util::OpKind;
use tower_redlock::{LockError, Redlock};

use crate::common::processes;

#[tokio::test(start_paused = true)]
async fn serve_until_serves_until_the_signal_and_waits_for_holders_and_server() {
    // The server ends after its last lock, or before a lock that outlives its request.
    for (held, serving) in [(300, 400), (400, 300)] {
        let (nodes, [redlock]) = processes();
        let began = Instant::now();
        let served = redlock.serve_until(sleep(secs(60)), secs(10), |stopping| async {
            let early = redlock.try_lock("early").await.unwrap();
            early.release().await.unwrap();
            stopping.await;
            assert_eq!(began.elapsed(), secs(60));
            sleep(ms(serving)).await;
            let late = redlock.try_lock("late").await;
            assert_eq!(late.unwrap_err(), LockError::Closed);
            "the server's result"
        });
        let holder = async {
            sleep(secs(59)).await;
            let guard = redlock.try_lock("k").await.unwrap();
            sleep(secs(1) + ms(held)).await;
            assert!(guard.is_valid());
            drop(guard);
        };
        let ((output, drained), ()) = tokio::join!(served, holder);
        assert_eq!(began.elapsed(), secs(60) + ms(400));
        assert!(drained.is_clean(), "{drained:?}");
        assert_eq!(output, Some("the server's result"));
        assert_eq!(drained.released, 1);
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn serve_until_drops_the_server_at_the_end_of_the_grace_period() {
    let (nodes, [redlock]) = processes();
    let guard = redlock.try_lock("k").await.unwrap();
    let began = Instant::now();
    let owned = Arc::new(());
    let in_server = Arc::clone(&owned);
    let server = |_stopping| async {
        pending::<()>().await;
        drop(in_server);
    };
    let (output, drained) = redlock.serve_until(ready(()), secs(2), server).await;
    assert_eq!(began.elapsed(), secs(2));
    assert_eq!(Arc::strong_count(&owned), 1, "the server is dropped");
    assert!(output.is_none() && !drained.is_clean());
    // Not released under its holder.
    assert_eq!(drained.held, [LockKeys::from_iter(["k"])]);
    assert!(guard.is_valid());
    assert_eq!(nodes.locks(), [1, 1, 1]);
    assert_eq!(nodes.sent(0, OpKind::Release), 0);
}

#[tokio::test(start_paused = true)]
async fn serve_until_of_a_server_that_ends_by_itself_drains_the_locks() {
    let redlock = Redlock::in_memory(3);
    let began = Instant::now();
    let guard = redlock.try_lock("k").await.unwrap();
    let server = |_stopping| ready(Err::<(), &str>("out of file descriptors"));
    let served = redlock.serve_until(pending(), secs(10), server);
    let holder = async {
        sleep(ms(30)).await;
        drop(guard);
    };
    let ((output, drained), ()) = tokio::join!(served, holder);
    assert_eq!(began.elapsed(), ms(30));
    assert_eq!(output, Some(Err("out of file descriptors")));
    assert!(drained.is_clean() && drained.released == 1);
    assert_eq!(redlock.lock("k").await.unwrap_err(), LockError::Closed);
}

/// A server that was spawned outlives the future, and must not accept for ever.
#[tokio::test(start_paused = true)]
async fn serve_until_that_is_dropped_stops_the_server_and_refuses_no_lock_before_the_signal() {
    let redlock = Redlock::in_memory(3);
    let mut taken = None;
    let mut serving = task::spawn(redlock.serve_until(pending(), secs(10), |stopping| {
        taken = Some(stopping);
        pending::<()>()
    }));
    assert_pending!(serving.poll());
    drop(serving);
    let mut stopping = task::spawn(taken.unwrap());
    assert_ready!(stopping.poll());
    assert!(redlock.try_lock("k").await.is_ok());
}
