//! Several groups of nodes: which group locks a key, one lock over several groups, and what a failure touches.

use std::collections::BTreeSet;

use support::{assert_matches, ms, secs};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    KeyState, LockError, LockKey, LostReason, NodeGroup, NodeState, Readiness, Redlock,
    RedlockBuilder, Released,
};

use crate::common::{Foreign, is_contended};
use crate::lock_all::contend;

/// Groups with the names `0`, `1` and so on.
pub(crate) fn groups<const N: usize>() -> [ScriptedNodes; N] {
    std::array::from_fn(|_| ScriptedNodes::new(3))
}

pub(crate) fn builder(groups: &[ScriptedNodes]) -> RedlockBuilder {
    let builder = Redlock::builder().ttl(secs(10)).wait(secs(60));
    let groups = groups.iter().map(|nodes| NodeGroup::new().scripted(nodes));
    groups.fold(builder, RedlockBuilder::node_group)
}

/// Keys that belong to the groups, one each: `keys_of(..)[2]` to the third.
pub(crate) async fn keys_of(redlock: &Redlock, count: usize) -> Vec<LockKey> {
    let mut keys = Vec::new();
    for group in 0..count {
        keys.push(key_of(redlock, &group.to_string(), 0).await);
    }
    keys
}

/// So many groups, and a key of each.
pub(crate) async fn with_keys<const N: usize>() -> ([ScriptedNodes; N], Redlock, Vec<LockKey>) {
    let groups = groups();
    let redlock = builder(&groups).build().unwrap();
    let keys = keys_of(&redlock, N).await;
    (groups, redlock, keys)
}

/// The key with a number of those that belong to a group.
pub(crate) async fn key_of(redlock: &Redlock, group: &str, number: usize) -> LockKey {
    let mut found = 0;
    for candidate in 0.. {
        let key = LockKey::from(("account", candidate));
        if *redlock.inspect(&key).await.group == *group {
            if found == number {
                return key;
            }
            found += 1;
        }
    }
    unreachable!("a group has keys")
}

fn total(nodes: &ScriptedNodes) -> usize {
    nodes.locks().iter().sum()
}

#[tokio::test(start_paused = true)]
async fn each_key_is_locked_in_its_group_only() {
    let (groups, redlock, keys) = with_keys::<3>().await;
    for (number, key) in keys.iter().enumerate() {
        let guard = redlock.lock(key).await.unwrap();
        sleep(ms(1)).await;
        for (other, nodes) in groups.iter().enumerate() {
            assert_eq!(total(nodes), if other == number { 3 } else { 0 });
        }
        assert_eq!(guard.keys(), std::slice::from_ref(key));
        assert_eq!(guard.release().await, Ok(Released::Freed));
    }
}

#[tokio::test(start_paused = true)]
async fn other_processes_find_the_key_in_the_same_group_whatever_the_order_of_the_groups() {
    let [north, south] = groups();
    let [n, s] = [("north", &north), ("south", &south)]
        .map(|(name, nodes)| NodeGroup::new().name(name).scripted(nodes));
    let one = Redlock::builder().node_group(n.clone());
    let one = one.node_group(s.clone());
    let other = Redlock::builder().node_group(s).node_group(n);
    let (one, other) = (one.build().unwrap(), other.build().unwrap());
    for number in 0..50 {
        let guard = one.try_lock(("account", number)).await.unwrap();
        assert!(is_contended(&other.try_lock(("account", number)).await));
        drop(guard);
    }
}

/// The last share ends the lock in all groups, wherever it is.
#[tokio::test(start_paused = true)]
async fn keys_of_several_groups_are_one_lock() {
    let (groups, redlock, keys) = with_keys::<3>().await;
    let guard = redlock.lock_all(&keys).await.unwrap();
    let sorted: BTreeSet<_> = keys.iter().cloned().collect();
    assert!(guard.keys().iter().eq(&sorted));
    assert_eq!(guard.key(), &guard.keys()[0]);
    let token = guard.fencing_token();
    assert!(token.is_some());
    for key in &keys {
        assert_eq!(redlock.inspect(key).await.fencing_token(), token);
        assert!(is_contended(&redlock.try_lock(key).await));
    }
    let handle = guard.handle();
    let share = handle.upgrade().unwrap();
    assert_eq!(guard.release().await, Ok(Released::Shared));
    sleep(secs(60)).await;
    assert!(handle.is_valid() && share.is_valid());
    assert!(share.keys().iter().eq(&sorted));
    assert_eq!(share.release().await, Ok(Released::Freed));
    assert!(!handle.is_valid());
    assert_eq!(handle.lost().await, LostReason::Released);
    sleep(ms(1)).await;
    assert_eq!(groups.iter().map(total).sum::<usize>(), 0);
    let later = redlock.try_lock(&keys[1]).await.unwrap();
    assert!(later.fencing_token() > token);
}

#[tokio::test(start_paused = true)]
async fn no_key_stays_locked_if_one_group_refuses() {
    let (groups, redlock, keys) = with_keys::<2>().await;
    for key in &keys {
        let held = redlock.lock(key).await.unwrap();
        assert!(is_contended(&redlock.lock_all(&keys).wait(ms(0)).await));
        held.release().await.unwrap();
    }
    (0..2).for_each(|node| groups[1].set(node, Gate::Failing));
    let refused = redlock.lock_all(&keys).wait(ms(0)).await;
    assert_matches!(refused, Err(LockError::Unavailable { .. }));
    assert_eq!(groups.iter().map(total).sum::<usize>(), 0);
    // And at once, without a wait for the own release.
    assert!(redlock.try_lock(&keys[0]).await.is_ok());
}

/// The fence of the second group is far ahead, so the first one gets the token of the second.
#[tokio::test(start_paused = true)]
async fn all_groups_get_the_highest_token() {
    let (groups, redlock, keys) = with_keys::<2>().await;
    let ahead = 8_000_000_000_000_000;
    Foreign::raise_fences(&keys[1], &groups[1], ahead);
    let guard = redlock.lock_all(&keys).await.unwrap();
    let token = guard.fencing_token();
    assert!(token.is_some_and(|token| token.as_u64() > ahead));
    for key in &keys {
        assert_eq!(redlock.inspect(key).await.fencing_token(), token);
    }
    // Renewals go on with it.
    sleep(secs(60)).await;
    assert!(guard.is_valid());
    drop(guard);
    sleep(ms(1)).await;
    let later = redlock.try_lock(&keys[0]).await.unwrap();
    assert!(later.fencing_token() > token);
}

#[tokio::test(start_paused = true)]
async fn loss_in_one_group_is_the_loss_of_the_lock() {
    for lost in 0..2 {
        let (groups, redlock, keys) = with_keys::<2>().await;
        let guard = redlock.lock_all(&keys).await.unwrap();
        (0..3).for_each(|node| groups[lost].wipe(node));
        let began = Instant::now();
        assert_eq!(guard.lost().await, LostReason::Gone);
        assert!(began.elapsed() < secs(4), "told at the next renewal");
        assert!(!guard.is_valid());
        assert!(guard.extend(secs(10)).await.is_err());
        drop(guard);
        sleep(ms(1)).await;
        assert_eq!(groups.iter().map(total).sum::<usize>(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn failure_of_one_group_touches_its_keys_only() {
    let (groups, redlock, keys) = with_keys::<3>().await;
    let guard = redlock.lock(&keys[0]).await.unwrap();
    (0..3).for_each(|node| groups[1].set(node, Gate::Down));
    for (number, key) in keys.iter().enumerate().skip(1) {
        let asked = Instant::now();
        let locked = redlock.try_lock(key).await;
        assert_eq!(asked.elapsed(), ms(0));
        match number {
            1 => assert_matches!(locked, Err(LockError::Unavailable { .. })),
            _ => assert!(locked.is_ok()),
        }
    }
    sleep(secs(30)).await;
    assert!(guard.is_valid());
    let health = redlock.health().await;
    let of_groups = health.groups.iter();
    let states: Vec<_> = of_groups.map(|group| group.readiness()).collect();
    let expected = [Readiness::Ready, Readiness::Down, Readiness::Ready];
    assert_eq!(states, expected);
    assert_eq!(&*health.groups[1].name, "1");
    assert_eq!(health.readiness(), Readiness::Degraded);
    assert!(health.has_quorum());
    assert_eq!((health.nodes.len(), health.needed, health.up()), (9, 6, 6));
    let nodes = health.nodes.iter();
    let down = nodes.filter(|node| node.state != NodeState::Up);
    assert_eq!(down.count(), 3);
}

/// Callers that lock overlapping sets in different orders, in three processes.
#[tokio::test(start_paused = true)]
async fn sets_of_several_groups_are_locked_without_a_deadlock() {
    let (groups, _redlock, keys) = with_keys::<3>().await;
    let processes = [(); 3].map(|()| builder(&groups).build().unwrap());
    let sets = [[0, 1], [1, 2], [2, 0]];
    let sets = sets.map(|set| set.map(|number| keys[number].clone()).to_vec());
    let granted = contend(&processes.each_ref(), &sets).await;
    assert!(granted.iter().all(|(_, count)| *count == 120));
}

#[tokio::test(start_paused = true)]
async fn readers_and_slots_work_in_several_groups() {
    let (_groups, redlock, keys) = with_keys::<2>().await;
    let one = redlock.lock_all(&keys).shared().await.unwrap();
    let other = redlock.lock_all(&keys).shared().wait(ms(0)).await.unwrap();
    assert!(redlock.try_lock(&keys[1]).await.is_err());
    drop((one, other));
    sleep(ms(1)).await;
    let slots = |count| redlock.lock_all(&keys).slots(count).wait(ms(0));
    let (one, other) = (slots(2).await.unwrap(), slots(2).await.unwrap());
    assert!(is_contended(&slots(2).await));
    assert_eq!((one.keys().len(), other.keys().len()), (2, 2));
    // All slots of a key are in its group, where inspections find them.
    for slot in one.keys().iter().chain(other.keys()) {
        let inspection = redlock.inspect(slot).await;
        assert_matches!(inspection.state(), Some(KeyState::Held { .. }), "{slot:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn operators_see_and_revoke_keys_of_every_group() {
    let (_groups, redlock, keys) = with_keys::<2>().await;
    let guard = redlock.lock_all(&keys).await.unwrap();
    for key in &keys {
        let inspection = redlock.inspect(key).await;
        assert_eq!(inspection.nodes.len(), 3);
        assert!(inspection.next.is_none());
    }
    let revoked = redlock.revoke(&keys[1]).await.unwrap();
    assert_eq!(revoked.held, 3);
    assert_eq!(guard.lost().await, LostReason::Revoked);
    assert!(redlock.try_lock(&keys[1]).await.is_ok());
    // The other key is still this caller's, until it drops the guard.
    assert!(redlock.try_lock(&keys[0]).await.is_err());
    drop(guard);
    sleep(ms(1)).await;
    assert!(redlock.try_lock(&keys[0]).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn executions_are_recorded_in_the_group_of_their_key() {
    let groups = groups::<2>();
    let redlock = builder(&groups).build().unwrap();
    for key in keys_of(&redlock, 2).await {
        for replayed in [false, true] {
            let once = redlock.once(&key).run(|_| async { Ok::<_, ()>(7) });
            assert_eq!(once.await.unwrap().is_replayed(), replayed);
        }
        assert!(redlock.inspect(&key).await.is_recorded());
    }
    for nodes in &groups {
        assert_eq!(nodes.sent(0, OpKind::Record), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn drain_waits_for_the_locks_of_all_groups() {
    let (groups, redlock, keys) = with_keys::<2>().await;
    let guard = redlock.lock_all(&keys).await.unwrap();
    let drained = redlock.clone();
    let draining = tokio::spawn(async move { drained.drain(secs(5)).await });
    sleep(secs(1)).await;
    assert_matches!(redlock.lock(&keys[1]).await, Err(LockError::Closed));
    drop(guard);
    let drained = draining.await.unwrap();
    assert!(drained.is_clean());
    assert_eq!(drained.released, 2, "one for each group");
    assert_eq!(groups.iter().map(total).sum::<usize>(), 0);
}

#[test]
fn settings_of_groups_that_cannot_work_are_refused() {
    let nodes = ScriptedNodes::new(3);
    let group = || NodeGroup::new().scripted(&nodes);
    let other = || NodeGroup::new().embedded(3);
    let of = |one| Redlock::builder().node_group(one);
    let two = |one, other| of(one).node_group(other);
    let url = || NodeGroup::new().url("redis://127.0.0.1:7001");
    let same_name = two(group().name("a"), other().name("a"));
    let same_number = two(group().name("1"), other());
    let nowhere = of(group()).moving_to(Vec::<NodeGroup>::new());
    let renamed = of(url()).moving_to([url().name("eu")]);
    for (builder, setting, told) in [
        (of(group()).embedded(3), "group", "belongs to one group"),
        (
            two(group(), NodeGroup::new()),
            "group 1",
            "there is no node;",
        ),
        (same_name, "is a:", "two groups have this name"),
        (same_number, "is 1:", "two groups have this name"),
        (nowhere, "moving_to", "no group to move to"),
        (
            of(group()).moving_to([other()]),
            "moving_to",
            "another name",
        ),
        (two(url(), url()), "127.0.0.1:7001", "listed twice"),
        (renamed, "127.0.0.1:7001", "keeps its name"),
    ] {
        let error = builder.build().unwrap_err().to_string();
        assert!(error.contains(setting) && error.contains(told), "{error}");
    }
}
