//! `try_lock` and `lock_all` without a wait: refusals at once, also behind a guard that is being released.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use support::{Executed, ms, redlock};
use tokio::task::{JoinSet, yield_now};
use tokio::time::Instant;
use tower_redlock::test_util::ScriptedNodes;

use crate::common::is_contended;

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
    assert!(is_contended(&both), "{both:?}");
    assert!(began.elapsed() < ms(5), "{:?}", began.elapsed());
    assert!(alone.is_ok(), "it is in no one's way: {alone:?}");
    drop(held);
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

/// Such as that of a client that reads a page, and then saves it.
#[tokio::test(start_paused = true)]
async fn try_lock_waits_only_for_a_guard_that_was_just_dropped() {
    let redlock = redlock(&ScriptedNodes::new(3));
    for _ in 0..10 {
        drop(redlock.try_lock("k").shared().await.unwrap());
        drop(redlock.try_lock("k").await.unwrap());
    }
    let one = redlock.try_lock("s").slots(2).await.unwrap();
    let _other = redlock.try_lock("s").slots(2).await.unwrap();
    drop(one);
    drop(redlock.try_lock("s").slots(2).await.unwrap());

    let guard = redlock.try_lock("k").await.unwrap();
    let share = guard.handle().upgrade().unwrap();
    drop(guard);
    assert!(redlock.try_lock("k").await.is_err(), "a share is left");
    drop(share);
    let (first, second) = tokio::join!(redlock.try_lock("k"), async {
        redlock.try_lock("k").into_future().now_or_never()
    });
    assert!(first.is_ok());
    assert!(second.is_some_and(|second| is_contended(&second)));
    drop(first);
    let both = redlock.lock_all(["j", "k"]).wait(Duration::ZERO);
    assert!(both.await.is_ok());
}
