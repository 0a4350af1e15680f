//! The rules of records, one by one, and secrets that no reply may contain.

use support::assert_matches;
use tower_redlock::protocol::message::{Op, Reply};

use crate::record_contract::requests::{
    INTENTS, PLAIN, TTL, acquire, all_ops, bytes_of, command, execution, fingerprint, name_of,
    owner, record,
};
use crate::wire::{Pair, STEP, send, send_raw, start_node};

// Rules: node.record
#[test]
fn record_is_written_once_and_only_by_the_latest_owner() {
    let mut pair = Pair::new();
    let keep = |id| {
        let (record, retention) = (record(id, 1), STEP * 90);
        command(id, INTENTS, Op::Record { record, retention })
    };
    let kept = |reply: Reply| match reply {
        Reply::Done { record, .. } => record.execution(),
        other => panic!("no record: {other:?}"),
    };
    assert_eq!(pair.ask(&keep(1), "never granted"), Reply::Lost);
    pair.ask(&acquire(1), "first");
    assert_eq!(pair.ask(&keep(2), "another's"), Reply::Lost);
    pair.pass(TTL);
    // Too late to hold the lock, but no later owner exists.
    assert_eq!(kept(pair.ask(&keep(1), "late")), execution(1));
    assert_eq!(kept(pair.ask(&keep(2), "second")), execution(1));
    pair.forget();
    pair.ask(&acquire(1), "first");
    pair.ask(&command(1, INTENTS, Op::Release), "first");
    pair.ask(&acquire(2), "second");
    assert_eq!(pair.ask(&keep(1), "overtaken"), Reply::Lost);
    assert_eq!(kept(pair.ask(&keep(2), "second")), execution(2));
    // With the record the lock and the intent were given back.
    let left = ["lock", "intent"].map(|role| pair.node.server.exists(&name_of(role)));
    assert_eq!(left, [false; 2]);
}

/// An intent lives for a day, and a record for as long as its user says.
#[test]
fn key_is_granted_after_the_end_of_its_record_however_a_node_got_it() {
    let mut pair = Pair::new();
    for id in [1, PLAIN] {
        for how in ["record", "top up", "top up before the record"] {
            pair.forget();
            pair.ask(&acquire(id), how);
            let (record, retention) = (record(id, 1), STEP * 4);
            if how != "record" {
                // As a replay by another client does.
                let record = record.clone();
                let op = Op::TopUp { record, retention };
                pair.ask(&command(2, INTENTS, op), how);
            }
            if how != "top up" {
                pair.ask(&command(id, INTENTS, Op::Record { record, retention }), how);
            }
            pair.pass(STEP * 5);
            let granted = pair.ask(&acquire(3), how);
            assert_matches!(granted, Reply::Granted(_), "{how}");
        }
    }
}

/// The random half of an owner token suffices to release its lock.
// Rules: node.held
#[test]
fn no_reply_contains_the_random_half_of_an_owner_token() {
    let mut node = start_node();
    let owners = [owner(1), owner(PLAIN)];
    let mut asked = 0;
    for (id, held_by) in [(1, &owners[0]), (PLAIN, &owners[1])] {
        for asking in [id, 2] {
            for op in all_ops(asking) {
                for executed in [false, true] {
                    node.call(&["FLUSHALL"]);
                    send(&mut node, &acquire(id), false).unwrap();
                    if executed {
                        send(&mut node, &command(id, INTENTS, Op::ReleaseExecuted), false).unwrap();
                    }
                    let raw = send_raw(
                        &mut node,
                        &command(asking, INTENTS, op.clone()),
                        false,
                        None,
                    );
                    let said = bytes_of(&raw.unwrap());
                    let half = &held_by.to_value().into_bytes()[..32];
                    let shown = |digits: &[u8]| said.windows(digits.len()).any(|w| w == digits);
                    assert!(!half.chunks(4).any(shown), "{op:?} tells whose lock it is");
                    asked += 1;
                }
            }
        }
    }
    assert_eq!(asked, 2 * 2 * 8 * 2);
}

// Rules: node.held
#[test]
fn held_reply_has_the_fingerprint_of_the_holder() {
    let mut pair = Pair::new();
    let mut told = |id| {
        pair.forget();
        pair.ask(&acquire(id), "first");
        match pair.ask(&acquire(3), "second") {
            Reply::Held { shown, .. } => shown.and_then(|shown| shown.fingerprint),
            other => panic!("not held: {other:?}"),
        }
    };
    assert_eq!(told(1), Some(fingerprint(1)));
    assert_eq!(told(2), Some(fingerprint(2)));
    assert_eq!(told(PLAIN), None);
    // Another Redlock client's value, which may be long, is not told to others as one of ours.
    for value in ["0123456789abcdef", &"z".repeat(64), &"z".repeat(80)] {
        pair.node.call(&["SET", &name_of("lock"), value]);
        let held = send(&mut pair.node, &acquire(3), false).unwrap();
        let unknown = Reply::Held {
            expires_in: None,
            shown: None,
        };
        assert_eq!(held, unknown, "{value}");
    }
}
