//! Slots of a key, of which several callers hold one each, with embedded nodes on a paused clock.

use std::future::IntoFuture;

use support::{assert_matches, ms, secs};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockError, LockKey, LostReason, Redlock};

use crate::common::{held_for, is_contended, polling, processes, processes_of};

// Rules: slots
#[tokio::test(start_paused = true)]
async fn so_many_callers_hold_a_slot_as_there_are_in_one_and_in_several_processes() {
    for count in [1, 2, 5, 64] {
        let nodes = ScriptedNodes::new(3);
        let processes = processes_of::<3>(&nodes);
        let mut guards = Vec::new();
        for number in 0..count {
            let redlock = &processes[number % 3];
            guards.push(redlock.try_lock("k").slots(count).await.unwrap());
        }
        let mut slots: Vec<_> = guards.iter().map(|guard| guard.slot().unwrap()).collect();
        slots.sort_unstable();
        assert_eq!(slots, (0..count).collect::<Vec<_>>());
        for redlock in &processes {
            assert!(is_contended(&redlock.try_lock("k").slots(count).await));
        }
        let freed = guards.swap_remove(count / 2);
        let slot = freed.slot();
        freed.release().await.unwrap();
        let again = processes[2].try_lock("k").slots(count).await.unwrap();
        assert_eq!(again.slot(), slot);
    }
}

#[tokio::test(start_paused = true)]
async fn a_slot_is_the_lock_of_its_own_key_and_no_other() {
    let (_nodes, [redlock, other]) = processes();
    let first = redlock.try_lock("k").slots(2).await.unwrap();
    let slot = first.slot().unwrap();
    assert_eq!(first.keys(), [LockKey::from(("k", "slot", slot))]);
    assert!(first.fencing_token().is_some());
    assert!(other.try_lock(("k", "slot", slot)).await.is_err());
    drop(other.try_lock(("k", "slot", 1 - slot)).await.unwrap());
    // The key itself is another resource, and has no slot; another one only looks like its slots.
    let whole = redlock.try_lock("k").await.unwrap();
    assert_eq!(whole.slot(), None);
    assert!(redlock.try_lock(("k", "slot")).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_is_free_at_a_majority_is_found_while_a_node_is_down() {
    let (nodes, [holder, other]) = processes();
    nodes.set(2, Gate::Failing);
    let _first = holder.try_lock("k").slots(2).await.unwrap();
    drop(other.try_lock("k").slots(2).await.unwrap());
    nodes.set(1, Gate::Failing);
    let refused = other.try_lock("k").slots(2).await;
    assert_matches!(refused, Err(LockError::Unavailable { .. }));
}

#[tokio::test(start_paused = true)]
async fn slots_of_several_keys_are_taken_together() {
    let (_nodes, [redlock, other]) = processes();
    let both = redlock.lock_all(["a", "b"]).slots(2).await.unwrap();
    let slot = both.slot().unwrap();
    let keys = ["a", "b"].map(|key| LockKey::from((key, "slot", slot)));
    assert_eq!(both.keys(), keys);
    let second = other.lock_all(["a", "b"]).slots(2).await.unwrap();
    assert_ne!(second.slot(), both.slot());
    let at_once = |redlock: &Redlock| redlock.lock_all(["a", "b"]).slots(2).wait(ms(0));
    assert!(at_once(&other).await.is_err());
    drop(second);
    sleep(ms(20)).await;
    // Free for one of the keys only.
    let one = other.try_lock("b").slots(2).await.unwrap();
    assert_ne!(one.slot(), both.slot());
    assert!(at_once(&redlock).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn slots_that_cannot_be_are_refused_without_a_request() {
    let (nodes, [redlock]) = processes();
    for asked in [0, 65, usize::MAX] {
        let refused = redlock.try_lock("k").slots(asked).await.unwrap_err();
        assert_eq!(refused, LockError::InvalidSlots { asked, max: 64 });
        let told = refused.to_string();
        assert!(told.contains("between 1 and 64"), "{told}");
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
}

#[tokio::test(start_paused = true)]
async fn a_slot_is_renewed_extended_lost_and_named_by_the_drain() {
    let (nodes, [redlock, other]) = processes();
    let guard = redlock.try_lock("k").slots(2).await.unwrap();
    sleep(secs(45)).await;
    assert!(guard.is_valid());
    guard.extend(secs(9)).await.unwrap();
    let second = redlock.try_lock("k").slots(2).await.unwrap();
    assert!(other.try_lock("k").slots(2).await.is_err());
    let key = second.keys()[0].clone();
    let held = redlock.drain(ms(10)).await.held;
    assert!(held.contains(&key.into()), "{held:?}");
    (0..3).for_each(|node| nodes.wipe(node));
    assert_eq!(second.lost().await, LostReason::Expired);
}

#[tokio::test(start_paused = true)]
async fn the_refusal_says_when_the_first_slot_ends() {
    let (_nodes, [one, other, third]) = processes();
    let _long = one.try_lock("k").slots(2).ttl(secs(10)).await.unwrap();
    let _short = other.try_lock("k").slots(2).ttl(secs(5)).await.unwrap();
    for redlock in [third, one, other] {
        let left = held_for(redlock.try_lock("k").slots(2)).await;
        assert!(left <= secs(5), "{left:?}");
    }
}

/// Dropped while it waits, which must not use up a slot or a number.
#[tokio::test(start_paused = true)]
async fn callers_that_give_up_leave_no_slot_behind() {
    let (nodes, [one, other]) = processes();
    for _ in 0..50 {
        let first = one.try_lock("k").slots(2).await.unwrap();
        let second = other.try_lock("k").slots(2).await.unwrap();
        let waiting = one.lock("k").slots(2).wait(secs(60)).into_future();
        assert!(tokio::time::timeout(ms(7), waiting).await.is_err());
        drop((first, second));
        sleep(ms(30)).await;
    }
    let of_other = other.try_lock("k").slots(2).await.unwrap();
    drop((of_other, one.try_lock("k").slots(2).await.unwrap()));
    sleep(ms(30)).await;
    assert_eq!(nodes.locks(), [0; 3]);
}

/// Neither while it waits for a turn, nor while it sleeps: its number would be in the way of a caller that is told that the
/// slot is free.
#[tokio::test(start_paused = true)]
async fn a_caller_that_waits_for_several_keys_keeps_no_slot_from_others() {
    for _ in 0..20 {
        let (_nodes, [holder, waiter]) = processes();
        let mut of_b = Vec::new();
        let mut of_c = Vec::new();
        for _ in 0..2 {
            of_b.push(holder.try_lock("b").slots(2).await.unwrap());
            of_c.push(holder.try_lock("c").slots(2).await.unwrap());
        }
        let both = waiter.lock_all(["c", "b"]).slots(2).wait(secs(60));
        let both = tokio::spawn(both.into_future());
        sleep(ms(50)).await;
        let one = tokio::spawn(waiter.lock("b").slots(2).wait(secs(60)).into_future());
        sleep(ms(50)).await;
        drop(of_b.pop());
        let began = Instant::now();
        drop(one.await.unwrap().unwrap());
        assert!(began.elapsed() < secs(2), "{:?}", began.elapsed());
        sleep(ms(50)).await;
        drop(waiter.try_lock("b").slots(2).await.unwrap());
        both.abort();
    }
}

/// Callers of one number do not keep those of a higher one from slots that are free on the nodes.
#[tokio::test(start_paused = true)]
async fn slots_of_a_higher_number_are_free_beside_those_of_a_lower_one() {
    for wait in [ms(0), secs(5)] {
        let (_nodes, [redlock]) = processes();
        let slots = |count| redlock.lock("k").slots(count).wait(wait);
        let mut guards = vec![slots(2).await.unwrap(), slots(2).await.unwrap()];
        let began = Instant::now();
        for _ in 0..3 {
            guards.push(slots(5).await.unwrap());
        }
        assert!(began.elapsed() < ms(100), "{:?}", began.elapsed());
        let mut numbers: Vec<_> = guards.iter().map(|guard| guard.slot().unwrap()).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4]);
        for count in [2, 5] {
            assert!(is_contended(&slots(count).await));
        }
    }
}

/// Wherever the callers wait. A slot that was kept for the callers of one process would stay free beside them; the next
/// poll comes after seconds.
#[tokio::test(start_paused = true)]
async fn slots_that_are_released_at_once_are_all_taken() {
    const SLOTS: usize = 3;
    for waiting in [[0, 4, 0], [1, 1, 2], [2, 2, 0], [2, 1, 2], [4, 0, 0]] {
        for round in 0..8 {
            let nodes = ScriptedNodes::new(3);
            let processes = polling::<3>(&nodes, secs(3_600));
            let mut held = Vec::new();
            for _ in 0..SLOTS {
                held.push(processes[0].try_lock("k").slots(SLOTS).await.unwrap());
            }
            let mut waiters = Vec::new();
            for (redlock, count) in processes.iter().zip(waiting) {
                for _ in 0..count {
                    let lock = redlock.lock("k").slots(SLOTS).wait(secs(600));
                    waiters.push(tokio::spawn(lock.into_future()));
                }
            }
            sleep(secs(1)).await;
            // With the first release, the process learns how many others wait.
            drop(held.pop());
            sleep(ms(300)).await;
            assert_eq!(nodes.locks(), [SLOTS; 3], "{waiting:?}, round {round}");
            drop(held);
            sleep(ms(300)).await;
            assert_eq!(nodes.locks(), [SLOTS; 3], "{waiting:?}, round {round}");
            let granted = waiters.iter().filter(|waiter| waiter.is_finished());
            assert_eq!(granted.count(), SLOTS, "{waiting:?}, round {round}");
        }
    }
}

/// As of a key that a node has forgotten: it might be a split vote.
// Rules: lock.split
#[tokio::test(start_paused = true)]
async fn a_slot_that_one_node_knows_nothing_of_delays_contended_by_at_most_one_node_timeout() {
    let (nodes, [holder, other]) = processes();
    let mut held = Vec::new();
    for gate in [Gate::Failing, Gate::Ready, Gate::Ready, Gate::Ready] {
        nodes.set(0, gate);
        held.push(holder.try_lock("k").slots(4).await.unwrap());
    }
    for _ in 0..50 {
        let asked = Instant::now();
        assert!(is_contended(&other.try_lock("k").slots(4).await));
        // And one tick of the timer.
        assert!(asked.elapsed() <= ms(51), "{:?}", asked.elapsed());
    }
}

/// So that callers of several processes do not all ask for the same one.
#[tokio::test(start_paused = true)]
async fn callers_choose_among_free_slots_at_random() {
    let nodes = ScriptedNodes::new(3);
    let mut chosen = std::collections::BTreeSet::new();
    for [redlock] in (0..64).map(|_| processes_of(&nodes)) {
        let guard = redlock.try_lock("k").slots(8).await.unwrap();
        chosen.insert(guard.slot());
        guard.release().await.unwrap();
    }
    assert!(chosen.len() > 3, "{chosen:?}");
}
