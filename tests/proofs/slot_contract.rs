//! The scripts for slots, for locks that stay taken, and for operators mirror the reference node: the same requests,
//! sent to a real server and applied to `protocol::Store`, get the same answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use support::{Connection, Random, ScriptNode, ms, secs};
use tower_redlock::protocol::message::{Command, HolderMark, KeyState, Op, Reply, Seen, SharedOp};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, Shown};

use crate::node_contract::{NOT_HELD, Pair, STEP, held, names, owner, text};

const SCRIPTS: [&str; 6] = [
    include_str!("../../src/node/redis/scripts/acquire_all.lua"),
    concat!(
        include_str!("../../src/node/redis/scripts/notify.lua"),
        include_str!("../../src/node/redis/scripts/release_after.lua")
    ),
    include_str!("../../src/node/redis/scripts/inspect.lua"),
    concat!(
        include_str!("../../src/node/redis/scripts/notify.lua"),
        include_str!("../../src/node/redis/scripts/revoke.lua")
    ),
    concat!(
        include_str!("../../src/node/redis/scripts/shared.lua"),
        include_str!("../../src/node/redis/scripts/acquire_shared.lua")
    ),
    concat!(
        include_str!("../../src/node/redis/scripts/shared.lua"),
        include_str!("../../src/node/redis/scripts/notify.lua"),
        include_str!("../../src/node/redis/scripts/release_shared.lua")
    ),
];

const RETENTION: Duration = secs(100_000);
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

/// Sends a request as the headers of the scripts say.
fn send(node: &mut ScriptNode, command: &Command) -> Reply {
    let Command { names, owner, op } = command;
    let owner = owner.to_value();
    let millis = |time: Duration| time.as_millis().to_string();
    let locks = names.iter().map(|name| &*name.lock);
    let fences = names.iter().map(|name| &*name.fence);
    let shared = || names.iter().filter_map(|name| name.shared.as_ref());
    let readers = shared().map(|shared| &*shared.readers);
    let writers = shared().map(|shared| &*shared.writer);
    let all_slots = names.iter().filter_map(|name| name.slots.as_deref());
    let records = names.iter().filter_map(|name| name.record.as_ref());
    let records = records.map(|record| &*record.done);
    let (script, keys, args): (_, Vec<&[u8]>, Vec<String>) = match *op {
        Op::Acquire {
            proposal,
            ttl,
            retention,
        } => {
            let slots = all_slots.clone().flat_map(|slots| &slots.locks);
            let count = all_slots.map(|slots| slots.locks.len()).max().unwrap_or(0);
            let times = [ttl, retention].map(millis);
            let counts = [names.len(), count].map(|count| count.to_string());
            let args = [owner, proposal.unwrap().to_string()].into_iter();
            (
                0,
                locks
                    .chain(fences)
                    .chain(slots.map(|slot| &**slot))
                    .collect(),
                args.chain(times).chain(counts).collect(),
            )
        }
        Op::Release => (1, locks.collect(), vec![owner, "0".into()]),
        Op::ReleaseAfter { left } => (1, locks.collect(), vec![owner, millis(left)]),
        Op::Inspect => (
            2,
            locks.chain(readers).chain(fences).chain(records).collect(),
            vec![],
        ),
        Op::Revoke { ref holder, until } => {
            let holder = text(holder.as_bytes());
            (
                3,
                locks.chain(readers).collect(),
                vec![holder, millis(until)],
            )
        }
        Op::Shared(SharedOp::Acquire { ttl }) => (
            4,
            locks.chain(readers).chain(writers).collect(),
            vec![owner, millis(ttl), names.len().to_string()],
        ),
        Op::Shared(SharedOp::Release) => (5, locks.chain(readers).collect(), vec![owner]),
        ref op => panic!("{op:?} is not sent here"),
    };
    let args: Vec<&[u8]> = args.iter().map(|arg| arg.as_bytes()).collect();
    let reply = node.eval(script, &keys, &args).unwrap();
    let has_slots = names.iter().any(|name| name.slots.is_some());
    decode(op, &reply, has_slots)
}

fn decode(op: &Op, reply: &support::Reply, has_slots: bool) -> Reply {
    let left = |pttl: i64| u64::try_from(pttl).ok().map(Duration::from_millis);
    if let Some(number) = reply.as_int() {
        return match op {
            Op::Acquire { .. } => Reply::Granted(u64::try_from(number).unwrap()),
            Op::Shared(SharedOp::Acquire { .. }) => Reply::Granted(0),
            _ if number == NOT_HELD => Reply::Lost,
            _ => Reply::Released,
        };
    }
    let parts = reply.as_array().unwrap();
    let number = |part: usize| parts[part].as_int().unwrap();
    match (op, parts.len()) {
        (Op::Acquire { .. }, 3) if matches!(parts[2], support::Reply::Int(_)) => {
            Reply::HeldShared {
                expires_in: left(number(1)),
            }
        }
        (_, 3) if !has_slots => held(parts),
        (Op::Acquire { .. }, 3) => {
            let digits = parts[2].as_str().unwrap().chars().rev();
            Reply::HeldSlot {
                expires_in: left(number(1)),
                free: digits.fold(0, |free, digit| 2 * free + u64::from(digit == '1')),
            }
        }
        (Op::Revoke { .. }, 1) if number(0) == -1 => Reply::TooLate,
        (Op::Revoke { .. }, 1) => Reply::Revoked {
            was_held: number(0) == 1,
        },
        (Op::Inspect, 8) => Reply::Seen(Box::new(Seen {
            state: match (number(0), usize::try_from(number(2))) {
                (0, _) => KeyState::Free,
                (_, Ok(readers)) => KeyState::Shared {
                    readers,
                    left: left(number(1)),
                },
                _ => KeyState::Held {
                    left: left(number(1)),
                },
            },
            fence: u64::try_from(number(3)).ok(),
            is_recorded: number(4) > 0,
            at: ms(u64::try_from(number(5)).unwrap()),
            mark: {
                let digest = parts[6].as_str().unwrap().as_bytes();
                (!digest.is_empty()).then(|| HolderMark::from_bytes(digest))
            },
            holders: {
                let shown = parts[7].as_array().unwrap().iter();
                let shown = shown.map(|shown| shown.as_str().unwrap().as_bytes());
                let holders = shown.filter_map(|shown| Shown::parse(shown)?.holder);
                holders.collect()
            },
        })),
        _ => panic!("{op:?} is answered {reply:?}"),
    }
}

/// Rounds the times in an answer, which differ by the time that the requests take.
fn rounded(reply: &Reply) -> Reply {
    let round =
        |left: Option<Duration>| left.map(|left| (left + STEP / 2).as_secs() / STEP.as_secs());
    let round = |left| round(left).map(|steps| STEP * u32::try_from(steps).unwrap());
    match *reply {
        Reply::Held { expires_in, .. } => Reply::Held {
            expires_in: round(expires_in),
            // Of several keys, either may be the last by a moment.
            shown: None,
        },
        Reply::HeldShared { expires_in } => Reply::HeldShared {
            expires_in: round(expires_in),
        },
        Reply::HeldSlot { expires_in, free } => Reply::HeldSlot {
            expires_in: round(expires_in),
            free,
        },
        Reply::Seen(ref seen) => Reply::Seen(Box::new(Seen {
            mark: seen.mark.as_ref().map(|_| HolderMark::from_bytes(b"some")),
            // Each node has an order of its own.
            holders: BTreeSet::from_iter(seen.holders.clone())
                .into_iter()
                .collect(),
            state: match seen.state {
                KeyState::Held { left } => KeyState::Held { left: round(left) },
                KeyState::Shared { readers, left } => KeyState::Shared {
                    readers,
                    left: round(left),
                },
                other => other,
            },
            // Each node has a clock of its own.
            at: Duration::ZERO,
            ..**seen
        })),
        ref other => other.clone(),
    }
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
    let acquire = Op::Acquire {
        proposal: Some(step),
        ttl,
        retention: RETENTION,
    };
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
    let mut pair = Pair::of(ScriptNode::start(&SCRIPTS));
    let mut random = Random(3);
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
                send(&mut pair.node, &inspect),
            ];
            for (command, seen) in both.iter_mut().zip(seen) {
                if let Some(holder) = mark_of(&seen) {
                    command.op = Op::Revoke { holder, until };
                }
            }
        }
        let theirs = send(&mut pair.node, &both[1]);
        let ours = pair.store.apply(&both[0], pair.now());
        assert_eq!(rounded(&ours), rounded(&theirs), "{step}: {command:?}");
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
    let mut node = ScriptNode::start(&SCRIPTS);
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
    let told = send(&mut node, &command);
    assert_eq!(rounded(&told), Reply::Seen(seen));
    assert!(mark_of(&told).unwrap().as_bytes() != b"the owner");
    assert_eq!(names(&["x"])[0].lock, name.lock);
}

/// A message means that a lock can be taken now.
#[test]
fn release_after_publishes_only_locks_that_it_frees() {
    let mut node = ScriptNode::start(&SCRIPTS);
    let mut subscriber = Connection::open(node.server.addr()).unwrap();
    subscriber.call(&["SUBSCRIBE", "kept", "freed"]).unwrap();
    for (left, channel, subscribers) in [("5000", "kept", -2), ("0", "freed", 1)] {
        node.call(&["SET", "lock", "owner", "PX", "100000"]);
        let args = ["owner", left, channel].map(str::as_bytes);
        let reply = node.eval(1, &[b"lock"], &args).unwrap();
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

macro_rules! publishing {
    ($($name:literal),+) => {
        [$(concat!(
            include_str!("../../src/node/redis/scripts/shared.lua"),
            include_str!("../../src/node/redis/scripts/notify.lua"),
            include_str!(concat!("../../src/node/redis/scripts/", $name, ".lua"))
        )),+]
    };
}

/// The processes that wait choose by that number which of them try. The one that releases learns it too.
#[test]
fn each_script_that_frees_a_lock_publishes_the_number_of_its_subscribers() {
    let scripts = publishing!(
        "release",
        "release_all",
        "release_batch",
        "release_once",
        "release_shared",
        "release_after",
        "record",
        "revoke"
    );
    let mut node = ScriptNode::start(&scripts);
    let digest = node.call(&["EVAL", "return redis.sha1hex('owner')", "0"]);
    let cases: [(&[&str], &[&str]); 8] = [
        (&["lock"], &["owner", "1"]),
        (&["unheard", "lock"], &["owner", "1"]),
        (&["unheard", "lock"], &["1", "owner", "owner"]),
        (&["lock", "intent"], &["owner", "1"]),
        (&["lock", "readers"], &["owner", "1"]),
        (&["unheard", "lock"], &["owner", "0", "unheard", "lock"]),
        (&["lock", "fence", "record"], &["owner", "1", "1000", "1"]),
        (
            &["lock", "readers"],
            &[digest.as_str().unwrap(), "9999999999999", "1"],
        ),
    ];
    let mut subscribers = Vec::new();
    for (script, (keys, args)) in cases.into_iter().enumerate() {
        // Another number each time.
        let mut subscriber = Connection::open(node.server.addr()).unwrap();
        subscriber.call(&["SUBSCRIBE", "lock"]).unwrap();
        subscribers.push(subscriber);
        let count = i64::try_from(subscribers.len()).unwrap();
        let is_shared = keys[1..] == ["readers"] && args[0] == "owner";
        let value = if is_shared { "shared" } else { "owner" };
        for (key, value) in [("lock", value), ("unheard", value), ("fence", "1 owner")] {
            node.call(&["SET", key, value]);
        }
        node.call(&["ZADD", "readers", "9999999999999", "owner"]);
        let [keys, args] = [keys, args].map(|parts| {
            let parts = parts.iter().map(|part| part.as_bytes());
            parts.collect::<Vec<_>>()
        });
        let reply = node.eval(script, &keys, &args).unwrap();
        if script < 6 {
            let last = reply.as_array().and_then(|parts| parts.last());
            let told = last.unwrap_or(&reply);
            assert_eq!(told.as_int(), Some(count), "script {script}: {reply:?}");
        }
        for subscriber in &mut subscribers {
            let message = subscriber.read_reply().unwrap();
            let parts = message.as_array().unwrap();
            assert_eq!(parts[0].as_str(), Some("message"));
            let told = parts[2].as_str().unwrap();
            assert_eq!(told, count.to_string(), "script {script}");
        }
    }
}
