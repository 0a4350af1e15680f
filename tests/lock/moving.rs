//! `moving_to`: processes that know the present groups, both, or the new ones, while keys move.

use support::{assert_matches, ms, secs, set_all};
use tokio::time::{Instant, sleep};
use tower_redlock::deadpool_redis::{Config, ConnectionAddr, ConnectionInfo, RedisConnectionInfo};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    FencingToken, KeyState, LockError, LockKey, LostReason, NodeGroup, OnceError, Outcome,
    Readiness, Redlock, RedlockBuilder, Released,
};

use crate::common::{Foreign, is_contended};
use crate::groups::{builder, groups, key_of};
use crate::lock_all::contend;

/// Processes at each step of a change from some of the groups to others.
pub(crate) struct Steps {
    pub(crate) old: Redlock,
    pub(crate) both: Redlock,
    pub(crate) new: Redlock,
}

fn named(groups: &[ScriptedNodes]) -> Vec<NodeGroup> {
    let groups = groups.iter().enumerate();
    let named = groups.map(|(name, nodes)| NodeGroup::new().name(name.to_string()).scripted(nodes));
    named.collect()
}

impl Steps {
    pub(crate) fn with(
        old: &[ScriptedNodes],
        new: &[ScriptedNodes],
        set: impl Fn(RedlockBuilder) -> RedlockBuilder,
    ) -> Self {
        let both = builder(old).moving_to(named(new));
        let [old, both, new] = [builder(old), both, builder(new)].map(|builder| {
            let built = set(builder).build();
            built.unwrap()
        });
        Self { old, both, new }
    }

    pub(crate) fn from(old: &[ScriptedNodes], new: &[ScriptedNodes]) -> Self {
        Self::with(old, new, |builder| builder)
    }

    /// The processes that run at the same time, in either order.
    fn in_sequence(&self) -> [(&Redlock, &Redlock); 4] {
        let Self { old, both, new } = self;
        [(old, both), (both, old), (both, new), (new, both)]
    }

    /// A key that moves from one group to the other, with a number.
    pub(crate) async fn moving(&self, from: &str, to: &str, number: usize) -> LockKey {
        let mut found = 0;
        for candidate in 0.. {
            let key = key_of(&self.old, from, candidate).await;
            if *self.new.inspect(&key).await.group == *to {
                if found == number {
                    return key;
                }
                found += 1;
            }
        }
        unreachable!("some key moves")
    }
}

/// Two groups, of which the second is added, and a key that moves to it.
pub(crate) async fn growing() -> ([ScriptedNodes; 2], Steps, LockKey) {
    let (all, steps) = adding();
    let key = steps.moving("0", "1", 0).await;
    (all, steps, key)
}

/// Two groups, of which the second is added.
fn adding() -> ([ScriptedNodes; 2], Steps) {
    let all = groups();
    let steps = Steps::from(&all[..1], &all);
    (all, steps)
}

/// The groups before and after a change, and the names between which a key moves: once in the order of all locks, once
/// against it.
pub(crate) fn both_ways(
    all: &[ScriptedNodes; 2],
) -> [(&[ScriptedNodes], &[ScriptedNodes], &str, &str); 2] {
    [(&all[..1], all, "0", "1"), (all, &all[..1], "1", "0")]
}

fn total(nodes: &ScriptedNodes) -> usize {
    nodes.locks().iter().sum()
}

async fn is_held(by: &Redlock, key: &LockKey) -> bool {
    match by.try_lock(key).await {
        Ok(guard) => {
            guard.release().await.unwrap();
            false
        }
        Err(LockError::Contended { .. }) => true,
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(start_paused = true)]
async fn process_that_moves_excludes_those_before_and_after_it() {
    let (_, steps, key) = growing().await;
    for (holder, others) in [
        (&steps.old, [&steps.both, &steps.both]),
        (&steps.both, [&steps.old, &steps.new]),
        (&steps.new, [&steps.both, &steps.both]),
    ] {
        let guard = holder.lock(&key).await.unwrap();
        for other in others {
            assert!(is_held(other, &key).await);
        }
        assert_eq!(guard.release().await, Ok(Released::Freed));
        sleep(ms(1)).await;
        for other in others {
            assert!(!is_held(other, &key).await);
        }
    }
    // What the rules forbid: these do not know of each other.
    let guard = steps.old.lock(&key).await.unwrap();
    assert!(!is_held(&steps.new, &key).await);
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn only_keys_that_move_are_locked_twice() {
    let (all, steps) = adding();
    let moves = steps.moving("0", "1", 0).await;
    let stays = steps.moving("0", "0", 0).await;
    let guard = steps.both.lock(&stays).await.unwrap();
    assert_eq!([total(&all[0]), total(&all[1])], [3, 0]);
    drop(guard);
    sleep(ms(1)).await;
    let guard = steps.both.lock(&moves).await.unwrap();
    assert_eq!([total(&all[0]), total(&all[1])], [3, 3]);
    // The new group takes the token of the present one, so no fence has to be raised.
    let confirmed = all.iter().map(|nodes| nodes.sent(0, OpKind::Confirm));
    assert_eq!(confirmed.sum::<usize>(), 0);
    assert_eq!(guard.keys(), std::slice::from_ref(&moves));
    drop(guard);
    sleep(ms(1)).await;
    let guard = steps.both.lock_all([&moves, &stays]).await.unwrap();
    assert_eq!(guard.keys().len(), 2);
    sleep(secs(60)).await;
    assert!(guard.is_valid());
    assert_eq!([total(&all[0]), total(&all[1])], [6, 3]);
    assert_eq!(guard.release().await, Ok(Released::Freed));
    sleep(ms(1)).await;
    assert_eq!([total(&all[0]), total(&all[1])], [0, 0]);
}

#[tokio::test(start_paused = true)]
async fn failure_of_the_new_group_frees_the_old_one() {
    let (all, steps) = adding();
    let moves = steps.moving("0", "1", 0).await;
    let stays = steps.moving("0", "0", 0).await;
    (0..2).for_each(|node| all[1].set(node, Gate::Failing));
    let refused = steps.both.try_lock(&moves).await;
    assert_matches!(refused, Err(LockError::Unavailable { .. }));
    assert_eq!(total(&all[0]), 0);
    assert!(steps.old.try_lock(&moves).await.is_ok());
    assert!(steps.both.try_lock(&stays).await.is_ok());
    let health = steps.both.health().await;
    assert_eq!(health.readiness(), Readiness::Degraded);
    let groups = health.groups.iter();
    let states: Vec<_> = groups.map(|group| group.readiness()).collect();
    assert_eq!(states, [Readiness::Ready, Readiness::Down]);
}

/// A key that moves to a group before its own in the order of all locks is not waited for there while the other group is
/// held, and is locked all the same.
#[tokio::test(start_paused = true)]
async fn caller_waits_for_a_key_in_whichever_order_it_moves() {
    let all = groups::<2>();
    for (old, new, from, to) in both_ways(&all) {
        let steps = Steps::from(old, new);
        let key = steps.moving(from, to, 0).await;
        for holder in [&steps.old, &steps.new, &steps.both] {
            let held = holder.lock(&key).await.unwrap();
            let waiting = tokio::spawn(steps.both.lock(&key).into_future());
            sleep(secs(2)).await;
            assert!(!waiting.is_finished());
            let (token, began) = (held.fencing_token(), Instant::now());
            drop(held);
            let guard = waiting.await.unwrap().unwrap();
            assert!(began.elapsed() < secs(1), "{:?}", began.elapsed());
            assert!(guard.fencing_token() > token);
            drop(guard);
            sleep(ms(1)).await;
        }
        let held = steps.new.lock(&key).await.unwrap();
        let asked = Instant::now();
        assert!(is_contended(&steps.both.lock(&key).wait(secs(3)).await));
        let waited = asked.elapsed();
        assert!((secs(2)..secs(4)).contains(&waited), "{waited:?}");
        drop(held);
        sleep(ms(1)).await;
        assert_eq!([total(&all[0]), total(&all[1])], [0, 0]);
    }
}

/// In the order of all locks, the new processes take the key that moves first, and the others take it last.
#[tokio::test(start_paused = true)]
async fn sets_are_locked_without_a_deadlock_while_a_group_is_removed() {
    for gate in [Gate::Ready, Gate::Slow(ms(5))] {
        let all = groups::<3>();
        let steps = Steps::from(&all, &all[..2]);
        let moves = steps.moving("2", "0", 0).await;
        let stays = steps.moving("1", "1", 0).await;
        for nodes in &all {
            (0..3).for_each(|node| nodes.set(node, gate));
        }
        let Steps { both, new, .. } = &steps;
        let began = Instant::now();
        contend(&[both, new, both, new], &[vec![moves, stays]]).await;
        // 80 holds of some ms; with a deadlock, each would last until the end of a wait.
        assert!(began.elapsed() < secs(60), "{:?}", began.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn readers_slots_and_least_times_hold_in_both_groups() {
    let (_, steps, key) = growing().await;
    let Steps { old, both, new } = &steps;
    let reader = both.lock(&key).shared().await.unwrap();
    for other in [old, new] {
        assert!(is_held(other, &key).await);
        assert!(other.try_lock(&key).shared().await.is_ok());
    }
    drop(reader);
    sleep(ms(1)).await;
    // The slots of a key move with it.
    for beside in [old, new] {
        let slot = both.try_lock(&key).slots(2).await.unwrap();
        let other = beside.try_lock(&key).slots(2).await.unwrap();
        assert_ne!(slot.slot(), other.slot());
        assert_eq!(slot.keys().len(), 1);
        for third in [beside, both] {
            assert!(is_contended(&third.try_lock(&key).slots(2).await));
        }
        drop((slot, other));
        sleep(ms(1)).await;
    }
    let guard = both.lock(&key).hold_at_least(secs(5)).await.unwrap();
    assert_eq!(guard.release().await, Ok(Released::Freed));
    assert!(is_held(old, &key).await && is_held(new, &key).await);
    sleep(secs(6)).await;
    assert!(!is_held(old, &key).await && !is_held(new, &key).await);
}

#[tokio::test(start_paused = true)]
async fn operators_see_and_free_a_key_in_both_groups() {
    let (all, steps, key) = growing().await;
    let guard = steps.both.lock(&key).await.unwrap();
    for nodes in &all {
        set_all(nodes, OpKind::Inspect, Gate::Slow(ms(20)));
    }
    let began = Instant::now();
    let inspection = steps.both.inspect(&key).await;
    assert_eq!(began.elapsed(), ms(20), "both are asked at once");
    let next = inspection.next.as_ref().unwrap();
    assert_eq!((&*inspection.group, &*next.group), ("0", "1"));
    for inspection in [&inspection, next] {
        assert_matches!(inspection.state(), Some(KeyState::Held { .. }));
        assert_eq!(inspection.fencing_token(), guard.fencing_token());
    }
    assert_eq!(steps.both.revoke(&key).await.unwrap().held, 6);
    assert_eq!(guard.lost().await, LostReason::Revoked);
    assert!(!is_held(&steps.old, &key).await && !is_held(&steps.new, &key).await);
    assert_eq!([total(&all[0]), total(&all[1])], [0, 0]);
}

#[tokio::test(start_paused = true)]
async fn revoke_tells_of_the_nodes_that_failed_in_either_group() {
    for failing in 0..2 {
        let (all, steps, key) = growing().await;
        let _guard = steps.both.lock(&key).await.unwrap();
        all[failing].set(0, Gate::Failing);
        let revoked = steps.both.revoke(&key).await.unwrap();
        assert_eq!((revoked.held, revoked.failures.len()), (5, 1));
        let guard = steps.both.lock(&key).await.unwrap();
        all[failing].set(1, Gate::Failing);
        let refused = steps.both.revoke(&key).await.unwrap_err();
        assert_matches!(refused, LockError::Unavailable { .. });
        // The other group has freed it all the same.
        assert_eq!(total(&all[1 - failing]), 0);
        assert_eq!(guard.lost().await, LostReason::Revoked);
    }
}

async fn execute(
    redlock: &Redlock,
    key: &LockKey,
    result: u32,
) -> Result<Outcome<u32>, OnceError<(), u32>> {
    let once = redlock.once(key).wait(secs(5)).retention(secs(86_400));
    once.run(move |_| async move { Ok(result) }).await
}

#[tokio::test(start_paused = true)]
async fn executions_are_replayed_by_the_processes_of_the_next_step() {
    let (all, steps) = adding();
    let Steps { old, both, new } = &steps;
    let later = [vec![both], vec![old, new, both], vec![both]];
    for (number, (first, later)) in [old, both, new].into_iter().zip(later).enumerate() {
        let key = steps.moving("0", "1", number).await;
        assert_eq!(execute(first, &key, 1).await, Ok(Outcome::Executed(1)));
        for redlock in later {
            assert_eq!(execute(redlock, &key, 2).await, Ok(Outcome::Replayed(1)));
        }
    }
    let large = steps.moving("0", "1", 9).await;
    let text = "x".repeat(60_000);
    let run = |redlock: &Redlock| {
        let (once, text) = (redlock.once(&large), text.clone());
        once.run(move |_| async move { Ok::<_, ()>(text) })
    };
    assert_eq!(run(new).await, Ok(Outcome::Executed(text.clone())));
    assert_eq!(run(both).await, Ok(Outcome::Replayed(text.clone())));
    sleep(ms(10)).await;
    assert_eq!([total(&all[0]), total(&all[1])], [0, 0]);
    assert!(both.drain(secs(1)).await.is_clean());
}

#[tokio::test(start_paused = true)]
async fn executions_of_different_steps_wait_for_each_other() {
    let (_all, steps) = adding();
    for (number, (first, second)) in steps.in_sequence().into_iter().enumerate() {
        let key = steps.moving("0", "1", number).await;
        let slow = first.once(&key).run(|execution| async move {
            sleep(secs(2)).await;
            assert!(execution.is_valid());
            Ok::<_, ()>(execution.fencing_token().unwrap())
        });
        let slow = tokio::spawn(slow);
        sleep(ms(100)).await;
        let waiting = second.once(&key).wait(secs(5));
        let replayed = waiting.run(|_| async { Err::<FencingToken, _>(()) });
        let replayed = replayed.await.unwrap();
        let executed = slow.await.unwrap().unwrap();
        assert!(replayed.is_replayed());
        assert_eq!(replayed.into_inner(), executed.into_inner());
    }
}

/// Both groups get the same token, also if the fence of the new group is ahead.
#[tokio::test(start_paused = true)]
async fn execution_has_one_token_in_both_groups() {
    let (all, steps, key) = growing().await;
    Foreign::raise_fences(&key, &all[1], 8_000_000_000_000_000);
    let once = steps.both.once(&key);
    let executed =
        once.run(|execution| async move { Ok::<_, ()>(execution.fencing_token().unwrap()) });
    let token = executed.await.unwrap().into_inner();
    assert!(token.as_u64() > 8_000_000_000_000_000);
    let inspection = steps.both.inspect(&key).await;
    assert_eq!(inspection.fencing_token(), Some(token));
    assert_eq!(inspection.next.unwrap().fencing_token(), Some(token));
}

#[tokio::test(start_paused = true)]
async fn result_that_one_group_did_not_record_is_not_recorded() {
    for failing in 0..2 {
        let (all, steps, key) = growing().await;
        (0..2).for_each(|node| all[failing].set_for(node, OpKind::Record, Gate::Failing));
        let executed = execute(&steps.both, &key, 1).await;
        assert_eq!(executed, Err(OnceError::Unrecorded(1)));
        (0..2).for_each(|node| all[failing].set(node, Gate::Ready));
        sleep(secs(20)).await;
        // The other group has it. The next call copies it.
        for redlock in [&steps.both, &steps.old, &steps.new, &steps.both] {
            assert_eq!(execute(redlock, &key, 3).await, Ok(Outcome::Replayed(1)));
        }
        // It expires in both groups at the same time, although it was copied later.
        sleep(secs(86_400 - 19)).await;
        let anew = execute(&steps.both, &key, 4).await;
        assert_eq!(anew, Ok(Outcome::Executed(4)));
    }
}

/// Neither is answered, because processes that know only one of the groups answer different ones.
#[tokio::test(start_paused = true)]
async fn different_results_in_both_groups_are_a_conflict() {
    let (_, steps, key) = growing().await;
    // These must not run side by side.
    assert_eq!(execute(&steps.old, &key, 1).await, Ok(Outcome::Executed(1)));
    assert_eq!(execute(&steps.new, &key, 2).await, Ok(Outcome::Executed(2)));
    let conflict = execute(&steps.both, &key, 3).await;
    assert_eq!(conflict, Err(OnceError::Conflicting));
}

/// A result that cannot be copied is not answered yet: it does not count in the other group.
#[tokio::test(start_paused = true)]
async fn result_of_one_group_is_replayed_only_with_a_majority_of_the_other() {
    for group in 0..2 {
        let (all, steps, key) = growing().await;
        let first = [&steps.old, &steps.new][group];
        assert_eq!(execute(first, &key, 1).await, Ok(Outcome::Executed(1)));
        let other = &all[1 - group];
        (0..2).for_each(|node| other.set_for(node, OpKind::Record, Gate::Failing));
        let undecided = execute(&steps.both, &key, 2).await;
        assert_eq!(undecided, Err(OnceError::Undecided));
        (0..2).for_each(|node| other.set(node, Gate::Failing));
        let refused = execute(&steps.both, &key, 2).await;
        assert_matches!(refused, Err(OnceError::Lock(LockError::Unavailable { .. })));
        (0..2).for_each(|node| other.set(node, Gate::Ready));
        sleep(secs(20)).await;
        let replayed = execute(&steps.both, &key, 2).await;
        assert_eq!(replayed, Ok(Outcome::Replayed(1)));
    }
}

#[tokio::test(start_paused = true)]
async fn execution_of_unknown_outcome_is_unknown_to_the_next_step() {
    let (_all, steps) = adding();
    for (number, (first, second)) in steps.in_sequence().into_iter().enumerate() {
        let key = steps.moving("0", "1", number).await;
        let failed = first.once(&key).at_most_once(true);
        let failed = failed.run(|_| async { Err::<u32, _>("no") }).await;
        assert_eq!(failed, Err(OnceError::Work("no")));
        let later = second.once(&key).at_most_once(true).wait(secs(1));
        let later = later.run(|_| async { Ok::<u32, &str>(1) }).await;
        assert_eq!(later, Err(OnceError::Unknown));
    }
}

#[tokio::test(start_paused = true)]
async fn execution_that_is_refused_in_the_new_group_leaves_nothing() {
    let (all, steps, key) = growing().await;
    (0..2).for_each(|node| all[1].set(node, Gate::Failing));
    let refused = steps.both.once(&key).at_most_once(true);
    let refused = refused.run(|_| async { Ok::<u32, ()>(1) }).await;
    assert_matches!(refused, Err(OnceError::Lock(LockError::Unavailable { .. })));
    assert_eq!(total(&all[0]), 0);
    let executed = steps.old.once(&key).at_most_once(true);
    let executed = executed.run(|_| async { Ok::<u32, ()>(1) }).await;
    assert_eq!(executed, Ok(Outcome::Executed(1)));
}

/// So the wait before the new processes begin counts the longest of these times too.
#[tokio::test(start_paused = true)]
async fn key_that_stays_taken_outlives_its_process_in_the_old_group_only() {
    let (_, steps, key) = growing().await;
    let guard = steps.old.lock(&key).hold_at_least(secs(60)).await.unwrap();
    guard.release().await.unwrap();
    assert!(steps.old.drain(secs(1)).await.is_clean());
    let began = Instant::now();
    // After `max_ttl`: the new processes know nothing of it yet.
    sleep(secs(20)).await;
    assert!(is_held(&steps.both, &key).await && !is_held(&steps.new, &key).await);
    while is_held(&steps.both, &key).await {
        sleep(ms(100)).await;
    }
    let held = began.elapsed();
    assert!(held >= secs(59) && held <= secs(61), "{held:?}");
}

fn url(url: &str) -> NodeGroup {
    NodeGroup::new().url(url)
}

fn connection(addr: ConnectionAddr, db: i64) -> NodeGroup {
    let redis = RedisConnectionInfo {
        db,
        ..RedisConnectionInfo::default()
    };
    let info = ConnectionInfo { addr, redis };
    NodeGroup::new().pool_config(Config::from_connection_info(info))
}

/// The spellings of each of some nodes. The first two are databases of one server, and so are the two with a socket.
fn spellings() -> [Vec<NodeGroup>; 6] {
    let tcp = |host: &str, port| ConnectionAddr::Tcp(host.to_owned(), port);
    let socket = || ConnectionAddr::Unix("/run/Redis.sock".into());
    [
        vec![
            url("redis://localhost"),
            url("redis://user:secret@LocalHost:6379/"),
            url("rediss://localhost/0"),
            url("valkey://localhost"),
            NodeGroup::new().pool_config(Config::from_url("redis://:secret@localhost")),
            connection(tcp("LOCALHOST", 6379), 0),
        ],
        vec![
            url("redis://localhost/1"),
            url("redis://user@localhost:6379/1/"),
            url("rediss://LOCALHOST/01"),
            connection(tcp("localhost", 6379), 1),
        ],
        vec![
            url("redis://localhost:7001"),
            connection(tcp("localhost", 7001), 0),
        ],
        vec![
            url("redis://[::1]"),
            url("redis://[0:0:0:0:0:0:0:1]/0"),
            connection(tcp("0:0::1", 6379), 0),
        ],
        vec![
            url("unix:///run/Redis.sock"),
            url("unix:///run//Redis.sock"),
            url("redis+unix:///run/./Redis.sock?db=0&pass=secret"),
            connection(socket(), 0),
        ],
        vec![url("unix:///run/Redis.sock?db=1"), connection(socket(), 1)],
    ]
}

#[test]
fn group_that_stays_has_the_same_servers_and_databases_in_every_spelling() {
    let nodes = spellings();
    let nodes = nodes.iter().enumerate();
    let nodes: Vec<_> = nodes
        .flat_map(|(node, spellings)| spellings.iter().map(move |group| (node, group)))
        .collect();
    for (node, group) in &nodes {
        for (other, moved) in &nodes {
            let moving = Redlock::builder().node_group((*group).clone());
            let built = moving.moving_to([(*moved).clone()]).build();
            let case = format!("{group:?} moves to {moved:?}");
            assert_eq!(built.is_ok(), node == other, "{case}");
            if let Err(error) = built {
                let error = error.to_string();
                assert!(error.contains("database"), "{error}");
                assert!(!error.contains("secret"), "{error}");
            }
            // Two databases of one server are not independent.
            let server = |node: usize| [0, 0, 2, 3, 4, 4][node];
            let named = |name, group: &NodeGroup| group.clone().name(name);
            let both = Redlock::builder().node_group(named("a", group));
            let both = both.node_group(named("b", moved)).build();
            assert_eq!(both.is_ok(), server(*node) != server(*other), "{case}");
        }
    }
}
