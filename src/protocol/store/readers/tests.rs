//! One node, in the situations that a model of the protocol found to break wrong variants of it: without the rule that
//! a test is about, the writer at its end would be granted the key beside a reader that relies on it.

use super::*;
use crate::protocol::message::{Command, Op};
use crate::protocol::{LockKey, LockKeys, Namespace};

const START: Duration = Duration::from_secs(100);

/// A node at which everything takes whole ticks.
#[derive(Default)]
struct Node {
    store: Store,
    now: u32,
}

const A: u8 = 1;
const B: u8 = 2;
const W: u8 = 3;

fn ticks(ticks: u32) -> Duration {
    Duration::from_secs(ticks.into())
}

fn granted() -> Reply {
    Reply::Granted(0)
}

impl Node {
    fn send(&mut self, client: u8, op: Op) -> Reply {
        self.send_for(&["k"], client, op)
    }

    fn send_for(&mut self, keys: &[&str], client: u8, op: Op) -> Reply {
        let keys: LockKeys = keys.iter().map(|key| LockKey::from(*key)).collect();
        let namespace = Namespace::default();
        let names = namespace.names(&keys, |_| [0; 32]).unwrap();
        let names = names.iter().cloned();
        let names = names.map(|name| namespace.with_shared(name));
        let command = Command {
            names: names.collect(),
            owner: OwnerToken::from_random([client; 16]),
            op,
        };
        self.store.apply(&command, START + ticks(self.now))
    }

    fn read(&mut self, client: u8, ttl: u32) -> Reply {
        let ttl = ticks(ttl);
        self.send(client, Op::Shared(SharedOp::Acquire { ttl }))
    }

    fn extend(&mut self, client: u8, ttl: u32) -> Reply {
        let ttl = ticks(ttl);
        self.send(client, Op::Shared(SharedOp::Confirm { ttl }))
    }

    fn leave(&mut self, client: u8) {
        let reply = self.send(client, Op::Shared(SharedOp::Release));
        assert!(matches!(reply, Reply::Released | Reply::Lost));
    }

    fn announce(&mut self, client: u8, patience: u32) {
        let patience = ticks(patience);
        let reply = self.send(client, Op::Shared(SharedOp::Announce { patience }));
        assert_eq!(reply, Reply::Released);
    }

    fn withdraw(&mut self, client: u8) {
        self.send(client, Op::Shared(SharedOp::Withdraw));
    }

    fn write(&mut self, client: u8) -> Reply {
        let op = Op::Acquire {
            proposal: Some(1),
            ttl: ticks(2),
            retention: ticks(1_000),
        };
        self.send(client, op)
    }

    fn end_write(&mut self, client: u8) {
        self.send(client, Op::Release);
    }

    /// As by another client's `DEL`, or by an eviction.
    fn lose_the_lock(&mut self) {
        self.store.locks.clear();
    }
}

fn held_by_readers(left: u32) -> Reply {
    Reply::HeldShared {
        expires_in: Some(ticks(left)),
    }
}

fn held(left: u32) -> Reply {
    Reply::Held {
        expires_in: Some(ticks(left)),
        shown: None,
    }
}

// Rules: shared.exclusion
#[test]
fn readers_share_a_key_and_exclude_writers_who_exclude_readers() {
    let mut node = Node::default();
    assert_eq!(node.read(A, 2), granted());
    assert_eq!(node.read(B, 3), granted());
    assert_eq!(node.write(W), held_by_readers(3));
    node.leave(B);
    assert_eq!(node.write(W), held_by_readers(2));
    node.leave(A);
    assert!(matches!(node.write(W), Reply::Granted(_)));
    assert_eq!(node.read(A, 2), held(2));
    node.end_write(W);
    assert_eq!(node.read(A, 2), granted());
}

/// T21.
// Rules: shared.release
#[test]
fn release_by_a_caller_that_is_no_reader_frees_nothing() {
    let mut node = Node::default();
    node.read(A, 2);
    node.leave(B);
    assert_eq!(node.write(W), held_by_readers(2));
}

/// T22.
#[test]
fn reader_with_a_short_ttl_does_not_shorten_the_lock() {
    let mut node = Node::default();
    node.read(A, 3);
    node.read(B, 1);
    node.now = 2;
    assert_eq!(node.write(W), held_by_readers(1));
}

/// T23.
#[test]
fn extension_by_a_short_ttl_does_not_shorten_the_lock() {
    let mut node = Node::default();
    node.read(A, 3);
    assert_eq!(node.extend(A, 1), Reply::At(0));
    node.now = 2;
    assert_eq!(node.write(W), held_by_readers(1));
}

/// T24.
#[test]
fn repeated_acquisition_does_not_take_an_extension_back() {
    let mut node = Node::default();
    node.read(A, 2);
    node.now = 1;
    node.extend(A, 3);
    node.read(A, 2);
    node.now = 3;
    assert_eq!(node.write(W), held_by_readers(1));
}

/// T25.
// Rules: shared.end
#[test]
fn end_of_a_reader_is_not_shortened_for_a_later_release() {
    let mut node = Node::default();
    node.read(A, 3);
    node.read(B, 3);
    node.extend(A, 1);
    node.now = 2;
    node.leave(B);
    assert_eq!(node.write(W), held_by_readers(1));
}

/// T26.
#[test]
fn readers_of_a_lock_that_vanished_are_forgotten() {
    let mut node = Node::default();
    node.read(A, 9);
    node.lose_the_lock();
    node.write(W);
    node.lose_the_lock();
    assert_eq!(node.read(B, 2), granted());
    assert_eq!(node.extend(A, 2), Reply::Lost);
}

/// T27, T28.
// Rules: shared.release
#[test]
fn extension_does_not_bring_a_reader_back() {
    let mut node = Node::default();
    node.read(A, 3);
    node.leave(A);
    node.read(B, 2);
    assert_eq!(node.extend(A, 3), Reply::Lost);
    node.now = 2;
    assert!(matches!(node.write(W), Reply::Granted(_)));
}

/// T30.
#[test]
fn late_release_after_the_readers_are_forgotten_frees_nothing() {
    let mut node = Node::default();
    node.read(A, 2);
    node.now = 2;
    node.read(B, 2);
    node.now = 3;
    node.leave(A);
    assert_eq!(node.write(W), held_by_readers(1));
}

/// T31.
#[test]
fn release_of_a_reader_does_not_free_a_writer() {
    let mut node = Node::default();
    node.read(B, 2);
    node.lose_the_lock();
    assert!(matches!(node.write(W), Reply::Granted(_)));
    node.leave(B);
    assert_eq!(node.read(A, 2), held(2));
}

/// T34.
#[test]
fn node_that_lost_its_memory_grants_and_extends_nothing() {
    let random = |id| OwnerToken::from_random([id; 16]);
    let mut store = Store::new();
    let generation = store.admit(&random(1), "run", START);
    store = Store::new();
    store.admit(&random(2), "run", START);
    let namespace = Namespace::default();
    let keys = LockKeys::from_iter(["k"]);
    let names = namespace.names(&keys, |_| [0; 32]).unwrap();
    let names: Arc<[_]> = [namespace.with_shared(names[0].clone())].into();
    let mut send = |op| {
        let command = Command {
            names: Arc::clone(&names),
            owner: random(A),
            op: Op::Shared(op),
        };
        store.apply_in(&generation, &command, START)
    };
    let ttl = ticks(2);
    assert_eq!(send(SharedOp::Acquire { ttl }), Reply::Amnesia);
    assert_eq!(send(SharedOp::Confirm { ttl }), Reply::Amnesia);
    assert_eq!(send(SharedOp::Release), Reply::Lost);
}

/// T35.
// Rules: shared.waiting
#[test]
fn reader_that_comes_after_a_waiting_writer_waits_also_where_nobody_holds_the_key() {
    let mut node = Node::default();
    node.read(A, 3);
    node.announce(W, 2);
    assert_eq!(node.read(B, 3), held(2));
    // A reader that is in may stay.
    assert_eq!(node.extend(A, 3), Reply::At(0));
    node.leave(A);
    assert_eq!(node.read(B, 3), held(2));
    // It asks after it has not read for a while, so it is a new reader.
    assert_eq!(node.read(A, 3), held(2));
    node.withdraw(B);
    assert_eq!(node.read(B, 3), held(2));
    node.withdraw(W);
    assert_eq!(node.read(B, 3), granted());
}

// Rules: shared.waiting
#[test]
fn announcement_lapses_and_is_made_only_where_readers_hold_the_key() {
    let mut node = Node::default();
    node.announce(W, 2);
    assert_eq!(node.read(A, 9), granted());
    node.announce(W, 2);
    node.now = 2;
    assert_eq!(node.read(B, 2), granted());
}

// Rules: shared.end
#[test]
fn last_reader_frees_the_key_and_ended_readers_do_not_hold_it() {
    let mut node = Node::default();
    node.read(A, 1);
    node.read(B, 9);
    node.now = 2;
    node.leave(B);
    assert!(matches!(node.write(W), Reply::Granted(_)));
}

#[test]
fn set_is_shared_all_or_nothing() {
    let mut node = Node::default();
    let ttl = ticks(2);
    let both = |node: &mut Node, op| node.send_for(&["k", "l"], B, Op::Shared(op));
    node.write(W);
    assert_eq!(both(&mut node, SharedOp::Acquire { ttl }), held(2));
    assert_eq!(node.store.held(START), 1);
    node.end_write(W);
    assert_eq!(both(&mut node, SharedOp::Acquire { ttl }), granted());
    assert_eq!(both(&mut node, SharedOp::Confirm { ttl }), Reply::At(0));
    assert_eq!(node.write(W), held_by_readers(2));
    node.leave(B);
    assert_eq!(both(&mut node, SharedOp::Confirm { ttl }), Reply::Lost);
    both(&mut node, SharedOp::Release);
    assert_eq!(node.store.held(START), 0);
    assert!(node.store.readers.is_empty());
}

#[test]
fn sweep_frees_the_memory_of_readers_and_announcements() {
    let mut node = Node::default();
    for i in 0..1_000 {
        node.now = 10 * i;
        let (ttl, key) = (ticks(1), i.to_string());
        let mut send = |op| node.send_for(&[&key], A, Op::Shared(op));
        send(SharedOp::Acquire { ttl });
        send(SharedOp::Announce { patience: ttl });
    }
    assert!(node.store.entries() < 200);
}
