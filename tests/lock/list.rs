//! The locks of a process, and those on the nodes, with embedded nodes on a paused clock.

use std::convert::Infallible;
use std::sync::Arc;

use support::{assert_matches, list_all, ms, secs, set_all};
use tokio::time::sleep;
use tower_redlock::protocol::message::{Op, Reply, Scanned, Seen};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes, SimNetwork, SimRequest};
use tower_redlock::{
    Inspection, KeyState, ListCursor, LockError, LockKey, LockKeys, LostReason, Redlock,
};

use crate::common::{Foreign, builder, processes, processes_of};
use crate::groups::{self, keys_of};

fn held(redlock: &Redlock) -> Vec<LockKeys> {
    let held = redlock.held().into_iter();
    held.map(|lock| lock.keys).collect()
}

/// Returns the locks with a prefix, page after page from a cursor on.
async fn listed(
    redlock: &Redlock,
    prefix: impl Into<LockKey>,
    from: Option<ListCursor>,
) -> Vec<Inspection> {
    let (prefix, mut listed, mut cursor) = (prefix.into(), Vec::new(), from);
    while let Some(from) = cursor {
        let page = redlock.list(&prefix, from).await.unwrap();
        listed.extend(page.locks);
        cursor = page.next;
    }
    listed
}

#[tokio::test(start_paused = true)]
async fn held_tells_each_kind_of_lock_and_the_longest_first() {
    let (_nodes, [redlock, other]) = processes();
    assert!(redlock.held().is_empty());
    let both = redlock.lock_all(["b", "a"]).label("transfer").ttl(secs(9));
    let both = both.await.unwrap();
    sleep(secs(1)).await;
    let reader = redlock.lock(("doc", 7)).label("doc").shared();
    let reader = reader.await.unwrap();
    sleep(secs(1)).await;
    let slot = redlock.lock("pool").label("list").slots(3).await.unwrap();
    let work = |_| async {
        sleep(secs(5)).await;
        Ok::<_, Infallible>(1)
    };
    sleep(secs(1)).await;
    let executing = tokio::spawn(redlock.once(("invoice", 1)).run(work));
    sleep(ms(1)).await;

    let held = redlock.held();
    let [first, second, third, fourth] = &*held else {
        panic!("{held:?}");
    };
    assert_eq!(first.keys, ["a", "b"].into_iter().collect());
    assert_eq!((first.resource, first.held_for), ("transfer", ms(3_001)));
    assert_eq!((first.is_shared, first.slot), (false, None));
    assert_eq!(first.fencing_token, both.fencing_token());
    assert_eq!(first.valid_for, both.valid_for());
    assert_eq!((second.resource, second.is_shared), ("doc", true));
    assert_eq!(second.valid_for, reader.valid_for());
    assert_eq!((third.slot, third.is_shared), (slot.slot(), false));
    assert_eq!(third.keys.as_slice(), slot.keys());
    assert_eq!(fourth.keys, LockKey::from(("invoice", 1)).into());
    assert_eq!((fourth.resource, fourth.held_for), ("invoice", ms(1)));
    assert!(other.held().is_empty(), "they are of another process");

    drop((both, reader, slot));
    assert_eq!(redlock.held().len(), 1);
    executing.await.unwrap().unwrap();
    assert!(redlock.held().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_lock_is_not_held_from_its_last_share_or_its_loss_on() {
    let (nodes, [redlock, other]) = processes();
    let guard = redlock.lock("k").await.unwrap();
    let share = guard.handle().upgrade().unwrap();
    drop(guard);
    assert_eq!(held(&redlock), [LockKey::from("k").into()]);
    // No node confirms the release.
    set_all(&nodes, OpKind::Release, Gate::Never);
    drop(share);
    assert!(redlock.held().is_empty());
    sleep(ms(1)).await;
    assert!(redlock.held().is_empty());

    let revoked = redlock.lock("revoked").label("list").await.unwrap();
    assert_eq!(redlock.held().len(), 1);
    other.revoke("revoked").await.unwrap();
    assert_eq!(revoked.lost().await, LostReason::Gone);
    assert!(redlock.held().is_empty());

    let silent = redlock.lock("silent").label("list").ttl(secs(3));
    let silent = silent.await.unwrap();
    (0..3).for_each(|node| nodes.set(node, Gate::Never));
    assert_eq!(redlock.held().len(), 1);
    assert_eq!(silent.lost().await, LostReason::Expired);
    assert!(redlock.held().is_empty());
}

#[tokio::test(start_paused = true)]
async fn list_selects_plain_keys_and_tuples_by_their_beginning() {
    let (_nodes, [redlock, other]) = processes();
    let job = LockKey::from("job");
    let (seventh, eu) = (LockKey::from(("job", 7)), LockKey::from(("job", "eu")));
    let tuples: Vec<LockKey> = vec![
        seventh.clone(),
        eu.clone(),
        ("job", "eu", 7).into(),
        (("job", 7), "slot", 0).into(),
    ];
    let plain: Vec<LockKey> = vec![
        job.clone(),
        "job:7".into(),
        "jobs".into(),
        ("jobs", 7).into(),
        (&job, "slot", 0).into(),
    ];
    let others: Vec<LockKey> = vec![("nightly", "job").into(), "a job".into(), "3:job".into()];
    let all: Vec<_> = [&tuples, &plain, &others].into_iter().flatten().collect();
    let mut held = Vec::new();
    for key in &all {
        let lock = match key {
            // The only slots of their keys.
            key if **key == tuples[3] => redlock.lock(&seventh).slots(1),
            key if **key == plain[4] => redlock.lock(&job).slots(1),
            key => redlock.lock(*key),
        };
        // Not its own kind, of which a process has room for a few.
        held.push(lock.label("list").await.unwrap());
    }
    let of = |keys: &[&LockKey]| {
        let mut keys: Vec<LockKey> = keys.iter().copied().cloned().collect();
        keys.sort();
        keys
    };
    assert_eq!(list_all(&other, "").await, of(&all));
    // The first part of the slots of `job`, too.
    let in_tuple: Vec<_> = tuples.iter().chain(&plain[4..]).collect();
    assert_eq!(list_all(&other, ("job",)).await, of(&in_tuple));
    let begin: Vec<_> = tuples.iter().chain(&plain).collect();
    assert_eq!(list_all(&other, "job").await, of(&begin));
    assert_eq!(list_all(&other, &eu).await, of(&[&eu, &tuples[2]]));
    let whole = of(&[&seventh, &tuples[3]]);
    assert_eq!(list_all(&other, &seventh).await, whole);
    assert!(list_all(&other, "absent").await.is_empty());
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn list_shows_locks_only_and_what_the_nodes_know_of_them() {
    let (_nodes, [redlock, other]) = processes();
    let once = redlock.once("recorded").label("list");
    once.run(|_| async { Ok::<_, Infallible>(1) })
        .await
        .unwrap();
    drop(redlock.lock("fenced").label("list").await.unwrap());
    let readers = [
        redlock.lock("read").label("list").shared().await.unwrap(),
        other.lock("read").label("list").shared().await.unwrap(),
    ];
    sleep(ms(10)).await;
    let found = listed(&redlock, "", Some(ListCursor::default())).await;
    let [lock] = &*found else {
        panic!("{found:?}");
    };
    assert_eq!(lock.key, LockKey::from("read"));
    let state = lock.state();
    assert_matches!(state, Some(KeyState::Shared { readers: 2, .. }));
    drop(readers);
}

/// Each majority and each minority of five nodes.
#[tokio::test(start_paused = true)]
async fn list_has_each_lock_of_a_majority_once_and_none_of_a_minority() {
    let nodes = ScriptedNodes::new(5);
    let [redlock] = processes_of(&nodes);
    let mut expected = Vec::new();
    for set in 1..32_u32 {
        let foreign = Foreign::new(&set.to_string());
        for node in (0..5).filter(|node| set >> node & 1 == 1) {
            foreign.acquire(&nodes, node, secs(10));
        }
        if set.count_ones() >= 3 {
            expected.push(LockKey::from(set));
        }
    }
    expected.sort();
    assert_eq!(list_all(&redlock, "").await, expected);
    sleep(secs(10)).await;
    assert!(list_all(&redlock, "").await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn list_skips_nodes_that_are_down_while_a_majority_is_there() {
    let (nodes, [redlock, other]) = processes();
    let mut guards = Vec::new();
    // The last page of a node is not empty: without keys, no majority is asked.
    for key in 0..240 {
        guards.push(other.lock(("k", key)).await.unwrap());
    }
    sleep(ms(1)).await;
    let all: Vec<LockKey> = list_all(&redlock, "").await;
    assert_eq!(all.len(), 240);
    let [failing, down, never] = [Gate::Failing, Gate::Down, Gate::Never];
    for (down, gate) in [(0, failing), (1, down), (2, never), (0, never)] {
        nodes.set(down, gate);
        assert_eq!(list_all(&redlock, "").await, all, "{down} {gate:?}");
        nodes.set(down, Gate::Ready);
    }

    // In the middle of its scan: the others have its keys.
    let first = redlock.list("", ListCursor::default()).await.unwrap();
    assert_eq!(first.locks.len(), 50);
    nodes.set(0, Gate::Failing);
    let mut listed: Vec<LockKey> = first.locks.into_iter().map(|lock| lock.key).collect();
    let mut cursor = first.next;
    while let Some(from) = cursor {
        let page = redlock.list("", from.clone()).await.unwrap();
        // No majority for a while, and then the same cursor goes on.
        nodes.set(1, Gate::Failing);
        let refused = redlock.list("", from).await.unwrap_err();
        match &refused {
            LockError::Unavailable {
                reached: 0 | 1,
                needed: 2,
                nodes,
                ..
            } => {
                assert_eq!(nodes.len(), 2, "{refused}");
            }
            _ => panic!("{refused:?}"),
        }
        nodes.set(1, Gate::Ready);
        listed.extend(page.locks.into_iter().map(|lock| lock.key));
        cursor = page.next;
    }
    listed.sort();
    listed.dedup();
    assert_eq!(listed, all);
}

#[tokio::test(start_paused = true)]
async fn list_goes_through_the_groups_and_names_that_of_each_lock() {
    let scripted = groups::groups::<3>();
    let [redlock, other] = [(); 2].map(|()| groups::builder(&scripted).build().unwrap());
    let keys = keys_of(&redlock, 3).await;
    let guard = redlock.lock_all(&keys).label("list").await.unwrap();
    assert_eq!(redlock.held().len(), 3);
    sleep(ms(1)).await;
    let listed = listed(&other, ("account",), Some(ListCursor::default())).await;
    let groups = listed.iter().map(|lock| lock.group.to_string());
    assert_eq!(groups.collect::<Vec<_>>(), ["0", "1", "2"]);
    let listed = listed.into_iter().map(|lock| lock.key);
    assert_eq!(listed.collect::<Vec<_>>(), keys);
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn list_with_the_cursor_of_a_service_with_more_nodes_does_not_panic() {
    let nodes = ScriptedNodes::new(5);
    let many = builder(&nodes).build().unwrap();
    let mut page = many.list("", ListCursor::default()).await.unwrap();
    while let Some(from) = &page.next {
        let one = Redlock::in_memory(1);
        one.list("", from.clone()).await.unwrap();
        page = many.list("", from.clone()).await.unwrap();
    }
}

/// Names every key twice, and the last key of each page again on the next one, as a Redis server may.
#[derive(Debug)]
struct Repeating;

impl SimNetwork for Repeating {
    fn carry(&self, _: usize, request: SimRequest) {
        let reply = match &request.command().op {
            Op::Scan { position, .. } => {
                let page: usize = std::str::from_utf8(position).unwrap().parse().unwrap_or(0);
                let keys = [page, page, page + 1, page + 1];
                let next = page + 1;
                Reply::Scanned(Box::new(Scanned {
                    names: keys
                        .map(|key| format!("redlock:{{{key}}}").into_bytes().into())
                        .into(),
                    next: (next < 5).then(|| next.to_string().into_bytes().into()),
                }))
            }
            _ => Reply::Seen(Box::new(Seen {
                state: KeyState::Held { left: None },
                fence: None,
                is_recorded: false,
                at: secs(1),
                mark: None,
                holders: Vec::new(),
            })),
        };
        request.answer(Ok(reply));
    }
}

#[tokio::test(start_paused = true)]
async fn list_has_a_lock_once_that_a_server_names_several_times() {
    let redlock = Redlock::builder().simulated(3, Arc::new(Repeating));
    let listed = list_all(&redlock.build().unwrap(), "").await;
    assert_eq!(listed, (0..6).map(LockKey::from).collect::<Vec<_>>());
}

/// A node that is silent for a moment, while the one before it names a key that the third does not have.
#[tokio::test(start_paused = true)]
async fn a_key_is_listed_although_a_node_fails_for_a_moment() {
    let (nodes, [redlock]) = processes();
    nodes.set(2, Gate::Down);
    let _guard = redlock.lock("k").await.unwrap();
    nodes.set(2, Gate::Ready);
    nodes.set_for(1, OpKind::Inspect, Gate::Failing);
    let first = redlock.list("", ListCursor::default()).await.unwrap();
    assert!(first.locks.is_empty(), "{first:?}");
    nodes.set_for(1, OpKind::Inspect, Gate::Ready);
    let [lock] = &listed(&redlock, "", first.next).await[..] else {
        panic!("it is not listed once");
    };
    assert_eq!(lock.key, LockKey::from("k"));
}
