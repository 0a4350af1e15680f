//! The scripts for slots, for locks that stay taken, and for operators mirror the reference node: the same requests,
//! sent to a real server and applied to `protocol::Store`, get the same answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use support::{Connection, Random};
use tower_redlock::protocol::message::{Command, HolderMark, KeyState, Op, Reply, Seen, SharedOp};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace};

use crate::node_contract::{acquire, names, owner};
use crate::wire::{Pair, STEP, assert_same, eval, rounded, send, start_node, text};

const SLOTS: usize = 3;

/// The names of a plain lock, with all that may be beside it.
fn plain(key: &str) -> Arc<[KeyNames]> {
    let namespace = Namespace::default();
    let names = namespace.names_with_record(&key.into(), None, |_| [0; 32]);
    [namespace.with_shared(names.unwrap())].into()
}

fn slots(keys: &[&str]) -> Vec<Arc<[KeyNames]>> {
    let keys = LockKeys::from_iter(keys.iter().copied());
    let names = Namespace::default().slot_names(&keys, SLOTS, |_| [0; 32]);
    names.unwrap()
}

/// Both nodes mark holders in their own ways.
fn mark_of(seen: &Reply) -> Option<HolderMark> {
    match seen {
        Reply::Seen(seen) => seen.mark.clone(),
        other => panic!("{other:?}"),
    }
}

/// The names and the kind of a request that is made often enough to meet every answer.
fn request(random: &mut Random, step: u64) -> (Arc<[KeyNames]>, Op) {
    let steps = |random: &mut Random| STEP * u32::try_from(1 + random.below(6)).unwrap();
    let ttl = steps(random);
    let acquire = acquire(step, ttl);
    let key = random.one_of(&["x", "y"]);
    match random.below(22) {
        0..8 => {
            let keys = random.one_of::<&[&str]>(&[&["x"], &["y"], &["x", "y"]]);
            let slot = usize::try_from(random.below(SLOTS as u64)).unwrap();
            let op = match random.below(8) {
                0..5 => acquire,
                5..7 => Op::Release,
                _ => Op::ReleaseAfter {
                    left: steps(random),
                },
            };
            (Arc::clone(&slots(keys)[slot]), op)
        }
        8..11 => (plain(key), acquire),
        11..13 => (plain(key), Op::Release),
        13..14 => {
            let left = steps(random);
            (plain(key), Op::ReleaseAfter { left })
        }
        14..16 => (plain(key), Op::Shared(SharedOp::Acquire { ttl })),
        16..17 => (plain(key), Op::Shared(SharedOp::Release)),
        17..18 => {
            // Both clocks are far between these.
            let until = random.one_of(&[Duration::ZERO, Duration::MAX / 1_000_000]);
            let holder = HolderMark::from_bytes(b"another");
            (plain(key), Op::Revoke { holder, until })
        }
        _ => (plain(key), Op::Inspect),
    }
}

#[test]
fn random_requests_for_slots_and_of_operators_match_the_reference() {
    let (mut pair, mut random) = (Pair::new(), Random(3));
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for step in 1..2_500 {
        if random.below(8) == 0 {
            let time = STEP * u32::try_from(1 + random.below(3)).unwrap();
            pair.pass(time);
            continue;
        }
        let (names, op) = request(&mut random, step);
        let command = Command {
            names,
            owner: owner(u8::try_from(random.below(4)).unwrap()),
            op,
        };
        let mut both = [command.clone(), command.clone()];
        if let Op::Revoke { until, .. } = command.op
            && random.below(3) > 0
        {
            let inspect = Command {
                op: Op::Inspect,
                ..command.clone()
            };
            let seen = [
                pair.store.apply(&inspect, pair.now()),
                send(&mut pair.node, &inspect, true).unwrap(),
            ];
            for (command, seen) in both.iter_mut().zip(seen) {
                if let Some(holder) = mark_of(&seen) {
                    command.op = Op::Revoke { holder, until };
                }
            }
        }
        let theirs = send(&mut pair.node, &both[1], true).unwrap();
        let ours = pair.store.apply(&both[0], pair.now());
        assert_same(&command, &ours, &theirs, &step.to_string());
        let kind = match (&command.op, theirs) {
            (_, Reply::Granted(_)) => "granted",
            (_, Reply::HeldSlot { free: 0, .. }) => "no free slot",
            (_, Reply::HeldSlot { .. }) => "another slot is free",
            (_, Reply::Held { .. }) => "held",
            (_, Reply::HeldShared { .. }) => "held by readers",
            (Op::ReleaseAfter { .. }, _) => "released after a while",
            (_, Reply::Released) => "released",
            (_, Reply::Lost) => "nothing to release",
            (_, Reply::TooLate) => "too late to revoke",
            (_, Reply::Revoked { was_held: true }) => "revoked",
            (_, Reply::Revoked { was_held: false }) => "nothing to revoke",
            (_, Reply::Seen(seen)) => match seen.state {
                KeyState::Free if seen.fence.is_none() => "never held",
                KeyState::Free => "free",
                KeyState::Held { .. } => "seen held",
                KeyState::Shared { readers: 1, .. } => "seen with a reader",
                _ => "seen with readers",
            },
            (op, other) => panic!("{op:?} is answered {other:?}"),
        };
        *seen.entry(kind).or_default() += 1;
    }
    let is_rare = |(kind, times): (&&str, &usize)| *kind != "never held" && *times < 8;
    assert!(!seen.iter().any(is_rare), "{seen:?}");
    assert_eq!(seen.len(), 16, "{seen:?}");
}

#[test]
fn record_of_a_key_is_seen_and_its_owner_is_not() {
    let mut node = start_node();
    let name = &plain("x")[0];
    let record = text(&name.record.as_ref().unwrap().done);
    node.call(&["SET", &record, "a record"]);
    node.call(&["SET", &text(&name.lock), "the owner"]);
    let command = Command {
        names: plain("x"),
        owner: owner(1),
        op: Op::Inspect,
    };
    let seen = Box::new(Seen {
        state: KeyState::Held { left: None },
        fence: None,
        is_recorded: true,
        at: Duration::ZERO,
        mark: Some(HolderMark::from_bytes(b"some")),
        holders: Vec::new(),
    });
    let told = send(&mut node, &command, false).unwrap();
    assert_eq!(rounded(1, &told), Reply::Seen(seen));
    assert!(mark_of(&told).unwrap().as_bytes() != b"the owner");
    assert_eq!(names(&["x"])[0].lock, name.lock);
}

/// A message means that a lock can be taken now.
#[test]
fn release_after_publishes_only_locks_that_it_frees() {
    let mut node = start_node();
    let mut subscriber = Connection::open(node.server.addr()).unwrap();
    subscriber.call(&["SUBSCRIBE", "kept", "freed"]).unwrap();
    for (left, channel, subscribers) in [("5000", "kept", -2), ("0", "freed", 1)] {
        node.call(&["SET", "lock", "owner", "PX", "100000"]);
        let args = ["owner", left, channel].map(str::as_bytes);
        let reply = eval(&mut node, "release_after", &[b"lock"], &args).unwrap();
        assert_eq!(reply.as_int(), Some(subscribers), "{channel}");
    }
    loop {
        let message = subscriber.read_reply().unwrap();
        let parts = message.as_array().unwrap();
        if parts[0].as_str() == Some("message") {
            assert_eq!(parts[1].as_str(), Some("freed"));
            break;
        }
    }
}

/// The processes that wait choose by that number which of them try. The one that releases learns it too.
#[test]
fn each_script_that_frees_a_lock_publishes_the_number_of_its_subscribers() {
    let mut node = start_node();
    let digest = node.call(&["EVAL", "return redis.sha1hex('owner')", "0"]);
    let digest = digest.as_str().unwrap();
    let mut subscribers = Vec::new();
    for (script, keys, args) in [
        ("release", "lock", "owner 1"),
        ("release_all", "unheard lock", "owner 1"),
        ("release_batch", "unheard lock", "1 owner owner"),
        ("release_once", "lock intent", "owner 1"),
        ("release_shared", "lock readers", "owner 1"),
        ("release_after", "unheard lock", "owner 0 unheard lock"),
        ("record", "lock fence record", "owner 1 1000 1"),
        ("revoke", "lock readers", "DIGEST 9999999999999 1"),
    ] {
        // Another number each time.
        let mut subscriber = Connection::open(node.server.addr()).unwrap();
        subscriber.call(&["SUBSCRIBE", "lock"]).unwrap();
        subscribers.push(subscriber);
        let count = i64::try_from(subscribers.len()).unwrap();
        let is_shared = script == "release_shared";
        let value = if is_shared { "shared" } else { "owner" };
        for (key, value) in [("lock", value), ("unheard", value), ("fence", "1 owner")] {
            node.call(&["SET", key, value]);
        }
        node.call(&["ZADD", "readers", "9999999999999", "owner"]);
        let args = args.replace("DIGEST", digest);
        let [keys, args] =
            [keys, &args].map(|parts| parts.split(' ').map(str::as_bytes).collect::<Vec<_>>());
        let reply = eval(&mut node, script, &keys, &args).unwrap();
        if script.starts_with("release") {
            let last = reply.as_array().and_then(|parts| parts.last());
            let told = last.unwrap_or(&reply);
            assert_eq!(told.as_int(), Some(count), "{script}: {reply:?}");
        }
        for subscriber in &mut subscribers {
            let message = subscriber.read_reply().unwrap();
            let parts = message.as_array().unwrap();
            assert_eq!(parts[0].as_str(), Some("message"));
            let told = parts[2].as_str().unwrap();
            assert_eq!(told, count.to_string(), "{script}");
        }
    }
}
