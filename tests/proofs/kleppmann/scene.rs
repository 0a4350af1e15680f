//! Settings, clocks and helpers that the scenes share.

use std::time::Duration;

use support::{Deadline, RedisServer, secs};

use crate::kleppmann::client::{Acquired, Client, Setup, Written};
use crate::kleppmann::storage::Storage;

pub(crate) const fn unguarded(ttl: Duration) -> Setup {
    Setup { ttl, guard: None }
}

pub(crate) const fn guarded(ttl: Duration, window: Duration) -> Setup {
    Setup {
        ttl,
        guard: Some(window),
    }
}

/// Checks that the second client's update is in the register that checks tokens, and lost in the
/// other one.
#[track_caller]
pub(crate) fn assert_lost_update(storage: &Storage, first: Acquired, second: Acquired) {
    assert!(second.token > first.token, "{first:?} {second:?}");
    let content = storage.content();
    assert_eq!(content.fenced, "two ");
    assert_eq!(content.plain, "one ", "the update of two is lost");
}

/// Makes a server the replica of an empty one and, once it has forgotten its own data, a master.
pub(crate) fn become_a_replica_and_a_master(server: &RedisServer) {
    let empty = RedisServer::start();
    empty.command(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    server.command(&["REPLICAOF", "127.0.0.1", &empty.port().to_string()]);
    let deadline = Deadline::after(PATIENCE);
    let synced = || {
        let info = server.command(&["INFO", "replication"]);
        let info = info.as_str().unwrap_or_default();
        info.contains("master_link_status:up")
    };
    while !synced() {
        assert!(deadline.pause(), "the replica does not sync");
    }
    server.command(&["REPLICAOF", "NO", "ONE"]);
}

/// Waits until the wall clock is about to begin a new second, at which uptimes grow: a server that
/// is restarted now begins in this second and is connected to again in the next.
pub(crate) fn wait_for_the_end_of_a_second(server: &RedisServer) {
    let deadline = Deadline::after(secs(2));
    while clock_of(server) % 1_000_000 < 885_000 && deadline.pause() {}
}

/// Returns a server's wall clock in microseconds.
#[track_caller]
pub(crate) fn clock_of(server: &RedisServer) -> u64 {
    let time = server.command(&["TIME"]);
    let parts = time.as_array().expect("seconds and microseconds");
    let number = |index: usize| {
        let part = parts.get(index).and_then(|part| part.as_int());
        u64::try_from(part.expect("a number")).expect("it is after 1970")
    };
    number(0) * 1_000_000 + number(1)
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("a test is short")
}

/// Of nodes, where they have names.
pub(crate) const B: usize = 1;

pub(crate) const C: usize = 2;

/// Longer than any test; nothing is renewed and the ttl frees nothing.
pub(crate) const LONG_TTL: Duration = secs(120);

pub(crate) const PATIENCE: Duration = secs(30);

pub(crate) const ON_TIME: Written = Written {
    was_valid: true,
    fenced: true,
};

/// Of a client that cannot know that another client holds its lock.
pub(crate) const BESIDE_ANOTHER: Written = Written {
    was_valid: true,
    fenced: false,
};

/// By a client that could have known.
pub(crate) const TOO_LATE: Written = Written {
    was_valid: false,
    fenced: false,
};

/// Checks that both hold the lock, and that what the second, who holds it beside the first, writes is kept.
#[track_caller]
pub(crate) fn write_beside_each_other(one: &Client, two: &Client) {
    assert!(one.valid_until().is_some() && two.valid_until().is_some());
    two.read();
    assert_eq!(two.write(), ON_TIME);
    assert_eq!(one.write(), BESIDE_ANOTHER);
}
