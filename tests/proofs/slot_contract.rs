//! What operators see of a key with a record, and which releases are published to how many subscribers.

use std::time::Duration;

use support::Connection;
use tower_redlock::protocol::message::{Command, HolderMark, KeyState, Op, Reply, Seen};

use crate::node_contract::owner;
use crate::random_contract::seen_names;
use crate::wire::{eval, rounded, send, start_node, text};

#[test]
fn record_of_a_key_is_seen_and_its_owner_is_not() {
    let mut node = start_node();
    let name = &seen_names("x")[0];
    let record = text(name.record.as_ref().unwrap());
    node.call(&["SET", &record, "a record"]);
    node.call(&["SET", &text(&name.lock), "the owner"]);
    let command = Command {
        names: seen_names("x"),
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
    let Reply::Seen(told) = told else {
        panic!("{told:?}")
    };
    assert!(told.mark.unwrap().as_bytes() != b"the owner");
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
