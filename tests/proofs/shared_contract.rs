//! The scripts for locks that readers share mirror the reference node: the same requests, sent to a real server and
//! applied to `protocol::Store`, get the same answers and leave the same behind.

use std::collections::BTreeMap;
use std::sync::Arc;

use support::{Random, ScriptNode, assert_matches};
use tower_redlock::protocol::message::{Command, Op, Reply, SharedOp};
use tower_redlock::protocol::{KeyNames, Namespace};

use crate::node_contract::{acquire, names, owner};
use crate::wire::{Pair, STEP, eval, send, start_node, text};

pub(crate) fn shared_names(keys: &[&str]) -> Arc<[KeyNames]> {
    let namespace = Namespace::default();
    let names = names(keys);
    let shared = names.iter().cloned();
    shared.map(|name| namespace.with_shared(name)).collect()
}

fn command(keys: &[&str], id: u8, op: Op) -> Command {
    Command {
        names: shared_names(keys),
        owner: owner(id),
        op,
    }
}

/// Asks both nodes, and looks when the locks of readers end.
#[track_caller]
fn ask(pair: &mut Pair, keys: &[&str], id: u8, op: Op, what: &str) -> Reply {
    let reply = pair.ask(&command(keys, id, op), what);
    check_ends(&mut pair.node, what);
    reply
}

/// The lock of readers ends with the last of them, and the server knows them for longer.
#[track_caller]
fn check_ends(node: &mut ScriptNode, what: &str) {
    for key in ["x", "y"] {
        let name = &shared_names(&[key])[0];
        let (lock, readers) = (text(&name.lock), name.shared.as_ref().unwrap());
        let readers = text(&readers.readers);
        if node.call(&["GET", &lock]).as_str() != Some("shared") {
            continue;
        }
        let range = ["ZRANGE", &readers, "-1", "-1", "WITHSCORES"];
        let last = node.call(&range);
        let last = last.as_array().unwrap()[1].as_str().unwrap();
        let last: i64 = last.parse().unwrap();
        let time = node.call(&["TIME"]);
        let time = time.as_array().unwrap();
        let now = time[0].as_int().unwrap() * 1_000 + time[1].as_int().unwrap() / 1_000;
        let mut left = |key: &str| node.call(&["PTTL", key]).as_int().unwrap();
        let (lock, readers) = (left(&lock), left(&readers));
        // Ageing takes a moment between the two keys.
        let apart = (lock - (last - now)).abs();
        assert!(apart < 20_000, "{what}: {lock} {last}");
        assert!(readers > lock, "{what}: {readers} {lock}");
    }
}

#[test]
fn random_requests_of_readers_and_writers_match_the_reference() {
    let (mut pair, mut random) = (Pair::new(), Random(1));
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
            14..16 => acquire(step, ttl),
            16..18 => Op::Release,
            _ => {
                pair.pass(STEP * u32::try_from(1 + random.below(3)).unwrap());
                continue;
            }
        };
        let kind = match (&op, ask(&mut pair, keys, id, op.clone(), &what)) {
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
    let share = Op::Shared(SharedOp::Acquire { ttl });
    ask(&mut pair, &["x"], 1, share.clone(), "a reader");
    let plain = ["SET", &lock, "another client's", "NX", "PX", "1000"];
    let set = pair.node.call(&plain);
    assert_eq!(set.as_str(), None, "{set:?}");
    let release = Op::Shared(SharedOp::Release);
    ask(&mut pair, &["x"], 1, release, "the reader leaves");
    let set = pair.node.call(&plain);
    assert_eq!(set.as_str(), Some("OK"), "{set:?}");
    let held = send(&mut pair.node, &command(&["x"], 1, share), false);
    assert_matches!(held, Ok(Reply::Held { .. }));
}

/// The lock of readers may go away by other means than their releases; the reference node knows no such means.
#[test]
fn readers_of_a_deleted_lock_neither_free_the_next_lock_nor_share_it() {
    let mut node = start_node();
    let [reader, next, writer] = [1, 2, 3];
    let ttl = STEP * 6;
    let lock = text(&shared_names(&["x"])[0].lock);
    let ask = |node: &mut ScriptNode, id, op| send(node, &command(&["x"], id, op), false).unwrap();
    let write = acquire(1, ttl);
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
    let mut node = start_node();
    let names = shared_names(&["x"]);
    let (lock, owner) = (&*names[0].lock, owner(1).to_value());
    let shared = names[0].shared.as_ref().unwrap();
    let (readers, writer) = (&*shared.readers, &*shared.writer);
    let args = [owner.as_bytes(), b"10000", b"1"];
    let acquire =
        |node: &mut ScriptNode| eval(node, "acquire_shared", &[lock, readers, writer], &args);
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
    let refused = eval(&mut node, "confirm_shared", &[lock, readers], &args).unwrap_err();
    assert!(refused.contains("OOM"), "{refused}");
    // A reader can leave.
    eval(&mut node, "release_shared", &[lock, readers], &args[..1]).unwrap();
    assert!(!node.server.exists(&text(lock)));
}
