//! Locks that readers share, beside clients and faults that the reference node knows nothing of.

use std::sync::Arc;

use support::{ScriptNode, assert_matches};
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

#[test]
fn reader_excludes_the_plain_set_of_other_redlock_clients_and_is_excluded_by_it() {
    let mut pair = Pair::new();
    let ttl = STEP * 2;
    let lock = text(&shared_names(&["x"])[0].lock);
    let share = Op::Shared(SharedOp::Acquire { ttl });
    pair.ask(&command(&["x"], 1, share.clone()), "a reader");
    let plain = ["SET", &lock, "another client's", "NX", "PX", "1000"];
    let set = pair.node.call(&plain);
    assert_eq!(set.as_str(), None, "{set:?}");
    let release = Op::Shared(SharedOp::Release);
    pair.ask(&command(&["x"], 1, release), "the reader leaves");
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
    let names = &shared_names(&["x"])[0];
    let lock = text(&names.lock);
    let readers = text(&names.shared.as_ref().unwrap().readers);
    let ask = |node: &mut ScriptNode, id, op| send(node, &command(&["x"], id, op), false).unwrap();
    let write = acquire(1, ttl);
    let share = Op::Shared(SharedOp::Acquire { ttl });
    for leaves in [true, false] {
        assert_eq!(ask(&mut node, reader, share.clone()), Reply::Granted(0));
        // A release that does not find its reader must not free a lock that others read under.
        let ends = [&lock, &readers].map(|key| node.call(&["PTTL", key]).as_int());
        assert!(ends[0] < ends[1], "{ends:?}");
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
