//! `valid_for`, `is_valid` and the deadline of an acquisition, on a paused clock.

use support::{ms, secs, set_all};
use tokio::task::yield_now;
use tokio::time::{Instant, advance, sleep};
use tower_redlock::test_util::{Gate, OpKind};
use tower_redlock::{LockError, LostReason};

use crate::common::{process_with, processes, spread_fences};

#[tokio::test(start_paused = true)]
async fn acquisition_slower_than_the_ttl_is_expired_and_released() {
    // The validity of 40 ms is 37.6 ms.
    for (delay, granted) in [(37, true), (38, false), (45, false)] {
        let (nodes, [redlock]) = processes();
        for node in 1..3 {
            nodes.set_for(node, OpKind::Acquire, Gate::Slow(ms(delay)));
        }
        match redlock.try_lock("k").ttl(ms(40)).await {
            Ok(guard) => assert!(granted && guard.is_valid(), "{delay}"),
            Err(LockError::Expired { ttl, elapsed }) => {
                assert_eq!((ttl, elapsed, granted), (ms(40), ms(delay), false));
            }
            Err(error) => panic!("{delay}: {error}"),
        }
        // Well before the ttl would have ended it: the slow nodes got the request just now.
        for _ in 0..5 {
            yield_now().await;
        }
        assert_eq!(nodes.locks(), [0, 0, 0], "{delay}");
        let released = [0, 1, 2].map(|node| nodes.sent(node, OpKind::Release));
        assert_eq!(released, [1, 1, 1], "{delay}");
    }
}

#[tokio::test(start_paused = true)]
async fn is_valid_compares_the_clock_without_a_running_task() {
    let (_nodes, [redlock]) = processes();
    let guard = redlock.try_lock("k").await.unwrap();
    assert!(guard.is_valid());
    // As after a pause of the whole process: the lease task has had no turn yet.
    let mut paused = Box::pin(advance(secs(10)));
    assert!(futures_util::poll!(&mut paused).is_pending());
    assert!(!guard.is_valid() && guard.valid_for().is_zero());
    paused.await;
    assert_eq!(guard.lost().await, LostReason::Expired);
}

// Rules: lock.confirm
#[tokio::test(start_paused = true)]
async fn acquisition_has_one_deadline_for_both_phases() {
    // With the default node timeout of 50 ms, and with a long one.
    for (slow, is_granted, node_timeout) in [
        (ms(20), true, ms(50)),
        (ms(40), false, ms(50)),
        (ms(2_500), false, secs(4)),
    ] {
        let (nodes, redlock) = process_with(|builder| builder.node_timeout(node_timeout));
        spread_fences(&nodes, "k");
        set_all(&nodes, OpKind::Acquire, Gate::Slow(slow));
        set_all(&nodes, OpKind::Confirm, Gate::Slow(slow));
        let began = Instant::now();
        let outcome = redlock.try_lock("k").await;
        assert_eq!(outcome.is_ok(), is_granted, "{outcome:?}");
        let took = began.elapsed();
        assert!(took <= node_timeout + ms(2), "{slow:?}: {took:?}");
        if let Ok(guard) = outcome {
            assert_eq!(guard.valid_for(), secs(10) - 2 * slow - ms(102));
        }
        sleep(secs(5)).await;
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}
