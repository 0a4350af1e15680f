//! The scripts for locks that readers share mirror the reference node: the same requests, sent to a real server and
//! applied to `protocol::Store`, get the same answers and leave the same behind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use support::{Random, ScriptNode, assert_matches, secs};
use tower_redlock::protocol::message::{Command, Op, Reply, SharedOp};
use tower_redlock::protocol::{KeyNames, Namespace};

use crate::node_contract::{self, NOT_HELD, STEP, are_same, held, names, owner, text};

const SCRIPTS: [&str; 9] = [
    include_str!("../../src/node/redis/scripts/acquire.lua"),
    include_str!("../../src/node/redis/scripts/acquire_all.lua"),
    include_str!("../../src/node/redis/scripts/release.lua"),
    concat!(
        include_str!("../../src/node/redis/scripts/shared.lua"),
        include_str!("../../src/node/redis/scripts/acquire_shared.lua")
    ),
    concat!(
        include_str!("../../src/node/redis/scripts/shared.lua"),
        include_str!("../../src/node/redis/scripts/confirm_shared.lua")
    ),
    concat!(
        include_str!("../../src/node/redis/scripts/shared.lua"),
        include_str!("../../src/node/redis/scripts/notify.lua"),
        include_str!("../../src/node/redis/scripts/release_shared.lua")
    ),
    concat!(
        include_str!("../../src/node/redis/scripts/shared.lua"),
        include_str!("../../src/node/redis/scripts/announce.lua")
    ),
    include_str!("../../src/node/redis/scripts/withdraw.lua"),
    include_str!("../../src/node/redis/scripts/release_all.lua"),
];

const RETENTION: Duration = secs(100_000);

pub(crate) fn shared_names(keys: &[&str]) -> Arc<[KeyNames]> {
    let namespace = Namespace::default();
    let names = names(keys);
    let shared = names.iter().cloned();
    shared.map(|name| namespace.with_shared(name)).collect()
}

/// Sends a request as the headers of the scripts say.
fn send(node: &mut ScriptNode, command: &Command) -> Reply {
    let Command { names, owner, op } = command;
    let locks = || names.iter().map(|name| &*name.lock);
    let fences = names.iter().map(|name| &*name.fence);
    let shared = || names.iter().map(|name| name.shared.as_ref().unwrap());
    let readers = shared().map(|shared| &*shared.readers);
    let writers = shared().map(|shared| &*shared.writer);
    let millis = |time: Duration| time.as_millis().to_string();
    let count = names.len().to_string();
    let mut args = vec![owner.to_value()];
    let (script, keys): (_, Vec<&[u8]>) = match *op {
        Op::Acquire {
            proposal,
            ttl,
            retention,
        } => {
            args.push(proposal.unwrap().to_string());
            args.extend([ttl, retention].map(millis));
            if names.len() > 1 {
                args.extend([count, "0".into()]);
            }
            let is_set = usize::from(names.len() > 1);
            (is_set, locks().chain(fences).collect())
        }
        Op::Release => (if names.len() > 1 { 8 } else { 2 }, locks().collect()),
        Op::Shared(SharedOp::Acquire { ttl }) => {
            args.extend([millis(ttl), count]);
            (3, locks().chain(readers).chain(writers).collect())
        }
        Op::Shared(SharedOp::Confirm { ttl }) => {
            args.extend([millis(ttl), count]);
            (4, locks().chain(readers).collect())
        }
        Op::Shared(SharedOp::Release) => (5, locks().chain(readers).collect()),
        Op::Shared(SharedOp::Announce { patience }) => {
            args.push(millis(patience));
            (6, locks().chain(writers).collect())
        }
        Op::Shared(SharedOp::Withdraw) => (7, writers.collect()),
        ref op => panic!("{op:?} is not sent here"),
    };
    let args: Vec<&[u8]> = args.iter().map(|arg| arg.as_bytes()).collect();
    let reply = node.eval(script, &keys, &args).unwrap();
    let left = |pttl: i64| u64::try_from(pttl).ok().map(Duration::from_millis);
    if let Some(parts @ [_, _, support::Reply::Bulk(_)]) = reply.as_array() {
        return held(parts);
    }
    let parts = reply.as_array().map(|parts| {
        let numbers = parts.iter().map(|part| part.as_int().unwrap());
        numbers.collect::<Vec<_>>()
    });
    match (op, reply.as_int(), parts.as_deref()) {
        (Op::Acquire { .. }, Some(fence), _) => Reply::Granted(u64::try_from(fence).unwrap()),
        (Op::Shared(SharedOp::Acquire { .. }), Some(0), _) => Reply::Granted(0),
        (Op::Shared(SharedOp::Confirm { .. }), Some(0), _) => Reply::At(0),
        (Op::Release | Op::Shared(_), Some(NOT_HELD), _) => Reply::Lost,
        (Op::Release | Op::Shared(_), Some(_), _) => Reply::Released,
        (Op::Shared(SharedOp::Confirm { .. }), _, Some([0])) => Reply::Lost,
        (Op::Acquire { .. }, _, Some([0, pttl, 1])) => Reply::HeldShared {
            expires_in: left(*pttl),
        },
        _ => panic!("{op:?} is answered {reply:?}"),
    }
}

/// The two nodes side by side.
struct Pair(node_contract::Pair);

impl Pair {
    fn new() -> Self {
        Self(node_contract::Pair::of(ScriptNode::start(&SCRIPTS)))
    }

    #[track_caller]
    fn ask(&mut self, keys: &[&str], id: u8, op: Op, what: &str) -> Reply {
        let command = Command {
            names: shared_names(keys),
            owner: owner(id),
            op,
        };
        let theirs = send(&mut self.0.node, &command);
        let now = self.0.now();
        let ours = self.0.store.apply(&command, now);
        assert!(
            are_same(keys.len(), &ours, &theirs),
            "{what}: {command:?}\nreference: {ours:?}\nscript: {theirs:?}"
        );
        self.check_ends(what);
        theirs
    }

    /// The lock of readers ends with the last of them, and the server knows them for longer.
    #[track_caller]
    fn check_ends(&mut self, what: &str) {
        for key in ["x", "y"] {
            let name = &shared_names(&[key])[0];
            let (lock, readers) = (text(&name.lock), name.shared.as_ref().unwrap());
            let readers = text(&readers.readers);
            if self.0.node.call(&["GET", &lock]).as_str() != Some("shared") {
                continue;
            }
            let range = ["ZRANGE", &readers, "-1", "-1", "WITHSCORES"];
            let last = self.0.node.call(&range);
            let last = last.as_array().unwrap()[1].as_str().unwrap();
            let last: i64 = last.parse().unwrap();
            let time = self.0.node.call(&["TIME"]);
            let time = time.as_array().unwrap();
            let now = time[0].as_int().unwrap() * 1_000 + time[1].as_int().unwrap() / 1_000;
            let mut left = |key: &str| self.0.node.call(&["PTTL", key]).as_int().unwrap();
            let (lock, readers) = (left(&lock), left(&readers));
            // Ageing takes a moment between the two keys.
            let apart = (lock - (last - now)).abs();
            assert!(apart < 20_000, "{what}: {lock} {last}");
            assert!(readers > lock, "{what}: {readers} {lock}");
        }
    }
}

#[test]
fn random_requests_of_readers_and_writers_match_the_reference() {
    let mut pair = Pair::new();
    let mut random = Random(1);
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for step in 0..1_500 {
        let what = format!("step {step}");
        let id = u8::try_from(random.below(4)).unwrap();
        let keys = random.one_of::<&[&str]>(&[&["x"], &["x"], &["y"], &["x", "y"]]);
        let ttl = STEP * u32::try_from(1 + random.below(6)).unwrap();
        let op = match random.below(20) {
            0..6 => Op::Shared(SharedOp::Acquire { ttl }),
            6..9 => Op::Shared(SharedOp::Confirm { ttl }),
            9..12 => Op::Shared(SharedOp::Release),
            12..13 => Op::Shared(SharedOp::Announce { patience: STEP * 2 }),
            13..14 => Op::Shared(SharedOp::Withdraw),
            14..16 => Op::Acquire {
                proposal: Some(step),
                ttl,
                retention: RETENTION,
            },
            16..18 => Op::Release,
            _ => {
                pair.0
                    .pass(STEP * u32::try_from(1 + random.below(3)).unwrap());
                continue;
            }
        };
        let kind = match (&op, pair.ask(keys, id, op.clone(), &what)) {
            (Op::Shared(_), Reply::Granted(_)) => "reader granted",
            (_, Reply::Granted(_)) => "writer granted",
            (Op::Shared(_), Reply::Held { .. }) => "reader refused",
            (_, Reply::Held { .. }) => "writer refused by a writer",
            (_, Reply::HeldShared { .. }) => "writer refused by readers",
            (_, Reply::At(_)) => "extended",
            (_, Reply::Lost) => "lost",
            (_, Reply::Released) => "released",
            (_, other) => panic!("{what}: {other:?}"),
        };
        *seen.entry(kind).or_default() += 1;
    }
    let all_often = seen.values().all(|times| *times > 10);
    assert!(seen.len() == 8 && all_often, "{seen:?}");
}

#[test]
fn reader_excludes_the_plain_set_of_other_redlock_clients_and_is_excluded_by_it() {
    let mut pair = Pair::new();
    let ttl = STEP * 2;
    let lock = text(&shared_names(&["x"])[0].lock);
    pair.ask(&["x"], 1, Op::Shared(SharedOp::Acquire { ttl }), "a reader");
    let plain = ["SET", &lock, "another client's", "NX", "PX", "1000"];
    let set = pair.0.node.call(&plain);
    assert_eq!(set.as_str(), None, "{set:?}");
    let release = Op::Shared(SharedOp::Release);
    pair.ask(&["x"], 1, release, "the reader leaves");
    let set = pair.0.node.call(&plain);
    assert_eq!(set.as_str(), Some("OK"), "{set:?}");
    let command = Command {
        names: shared_names(&["x"]),
        owner: owner(1),
        op: Op::Shared(SharedOp::Acquire { ttl }),
    };
    assert_matches!(send(&mut pair.0.node, &command), Reply::Held { .. });
}

/// The lock of readers may go away by other means than their releases; the reference node knows no such means.
#[test]
fn readers_of_a_deleted_lock_neither_free_the_next_lock_nor_share_it() {
    let mut node = ScriptNode::start(&SCRIPTS);
    let [reader, next, writer] = [1, 2, 3];
    let (names, ttl) = (shared_names(&["x"]), STEP * 6);
    let lock = text(&names[0].lock);
    let ask = |node: &mut ScriptNode, id, op| {
        let command = Command {
            names: Arc::clone(&names),
            owner: owner(id),
            op,
        };
        send(node, &command)
    };
    let write = Op::Acquire {
        proposal: Some(1),
        ttl,
        retention: RETENTION,
    };
    let share = Op::Shared(SharedOp::Acquire { ttl });
    for leaves in [true, false] {
        assert_eq!(ask(&mut node, reader, share.clone()), Reply::Granted(0));
        node.call(&["DEL", &lock]);
        let written = ask(&mut node, writer, write.clone());
        assert_matches!(written, Reply::Granted(_));
        if leaves {
            ask(&mut node, reader, Op::Shared(SharedOp::Release));
            let refused = ask(&mut node, next, share.clone());
            assert_matches!(refused, Reply::Held { .. });
        }
        ask(&mut node, writer, Op::Release);
        assert_eq!(ask(&mut node, next, share.clone()), Reply::Granted(0));
        let extended = ask(&mut node, reader, Op::Shared(SharedOp::Confirm { ttl }));
        assert_eq!(extended, Reply::Lost);
        ask(&mut node, next, Op::Shared(SharedOp::Release));
        assert!(!node.server.exists(&lock));
    }
}

/// A script that has written something is not refused any more, whatever it writes then.
#[test]
fn server_that_is_out_of_memory_grants_and_extends_no_reader() {
    let mut node = ScriptNode::start(&SCRIPTS);
    let names = shared_names(&["x"]);
    let (lock, owner) = (&*names[0].lock, owner(1).to_value());
    let shared = names[0].shared.as_ref().unwrap();
    let (readers, writer) = (&*shared.readers, &*shared.writer);
    let args = [owner.as_bytes(), b"10000", b"1"];
    let acquire = |node: &mut ScriptNode| node.eval(3, &[lock, readers, writer], &args);
    let limit = |node: &mut ScriptNode, bytes| {
        node.call(&["CONFIG", "SET", "maxmemory", bytes]);
    };
    limit(&mut node, "1");
    let refused = acquire(&mut node).unwrap_err();
    assert!(refused.contains("OOM"), "{refused}");
    assert!(!node.server.exists(&text(lock)));
    limit(&mut node, "0");
    acquire(&mut node).unwrap();
    limit(&mut node, "1");
    let refused = node.eval(4, &[lock, readers], &args).unwrap_err();
    assert!(refused.contains("OOM"), "{refused}");
    // A reader can leave.
    node.eval(5, &[lock, readers], &args[..1]).unwrap();
    assert!(!node.server.exists(&text(lock)));
}
