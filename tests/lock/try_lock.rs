//! `try_lock` and `lock_all` without a wait: refusals at once, also behind a guard that is being released.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use support::{Executed, assert_matches, ms, redlock};
use tokio::task::{JoinSet, yield_now};
use tokio::time::Instant;
use tower_redlock::LockError;
use tower_redlock::test_util::{Gate, ScriptedNodes};

#[tokio::test(start_paused = true)]
async fn lock_all_without_a_wait_is_contended_at_once_and_blocks_no_free_key() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let held = redlock.lock("b").await.unwrap();
    let ending = redlock.lock("a").await.unwrap();
    drop(ending);
    let began = Instant::now();
    let both = redlock.lock_all(["a", "b"]).wait(Duration::ZERO);
    let (both, alone) = tokio::join!(both, async {
        for _ in 0..3 {
            yield_now().await;
        }
        redlock.try_lock("a").await
    });
    assert_matches!(both, Err(LockError::Contended { .. }));
    assert!(began.elapsed() < ms(5), "{:?}", began.elapsed());
    assert!(alone.is_ok(), "it is in no one's way: {alone:?}");
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn try_lock_twice_behind_a_dropped_guard_refuses_the_second_at_once() {
    let redlock = redlock(&ScriptedNodes::new(3));
    drop(redlock.try_lock("k").await.unwrap());
    let began = Instant::now();
    let (first, second) = tokio::join!(redlock.try_lock("k"), async {
        redlock.try_lock("k").into_future().now_or_never()
    });
    assert!(first.is_ok() && matches!(second, Some(Err(LockError::Contended { .. }))));
    assert!(began.elapsed() < ms(5), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn concurrent_try_lock_calls_end_at_once_with_one_holder_at_a_time() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let (holders, granted) = (Arc::<AtomicUsize>::default(), Executed::default());
    let began = Instant::now();
    let mut calls = JoinSet::new();
    for number in 0..300_u32 {
        let (redlock, holders, granted) = (redlock.clone(), holders.clone(), granted.clone());
        calls.spawn(async move {
            for _ in 0..number % 7 {
                yield_now().await;
            }
            let guard = if number % 3 == 0 {
                redlock.lock_all(["k", "l"]).wait(Duration::ZERO).await
            } else {
                redlock.try_lock("k").await
            };
            if let Ok(guard) = guard {
                assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                granted.one_more();
                yield_now().await;
                holders.fetch_sub(1, Ordering::SeqCst);
                drop(guard);
            }
        });
    }
    calls.join_all().await;
    assert!(granted.count() > 0 && began.elapsed() < ms(50));
    assert!(redlock.try_lock("k").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn try_lock_waits_only_for_a_guard_that_was_just_dropped() {
    let redlock = redlock(&ScriptedNodes::new(3));
    for _ in 0..10 {
        drop(redlock.try_lock("k").await.unwrap());
    }
    let guard = redlock.try_lock("k").await.unwrap();
    let share = guard.handle().upgrade().unwrap();
    drop(guard);
    assert!(redlock.try_lock("k").await.is_err(), "a share is left");
    drop(share);
    let (one, other) = tokio::join!(redlock.try_lock("k"), redlock.try_lock("k"));
    assert_ne!(one.is_ok(), other.is_ok(), "the second is behind the first");
    drop((one, other));
    let both = redlock.lock_all(["j", "k"]).wait(Duration::ZERO);
    assert!(both.await.is_ok());
}

/// Also those that answered after a majority had decided.
#[tokio::test(start_paused = true)]
async fn unavailable_has_the_own_failure_of_each_node_that_answered_at_once() {
    let nodes = ScriptedNodes::new(5);
    (0..5).for_each(|node| nodes.set(node, Gate::Failing));
    let refused = redlock(&nodes).try_lock("k").await.unwrap_err();
    let LockError::Unavailable { nodes: failed, .. } = &refused else {
        panic!("{refused}");
    };
    assert_eq!(failed.len(), 5);
    for failure in failed {
        assert!(failure.to_string().contains("scripted"), "{failure}");
    }
}
