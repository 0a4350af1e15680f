//! The rules of records, one by one, and secrets that no reply may contain.

use support::{assert_matches, ms};
use tower_redlock::FencingToken;
use tower_redlock::protocol::Record;
use tower_redlock::protocol::message::{Op, Reply};

use crate::record_contract::pair::Pair;
use crate::record_contract::wire::{
    INTENTS, PLAIN, SCRIPTS, STEP, TTL, acquire, all_ops, bytes_of, command, execution,
    fingerprint, name_of, owner, record, send, send_raw, start_node,
};

#[test]
fn scripts_return_every_byte_of_a_record() {
    let mut pair = Pair::new();
    let bytes: Vec<u8> = (0..=u8::MAX).chain(*b"\r\n$-1\r\n\0").collect();
    for how in ["record", "top up"] {
        pair.forget();
        let kept = Record::new(execution(1), fingerprint(1), [0xff; 32], &bytes);
        let (record, retention) = (kept.clone(), STEP);
        pair.ask(&acquire(1), how);
        let op = match how {
            "record" => Op::Record { record, retention },
            _ => Op::TopUp { record, retention },
        };
        pair.ask(&command(1, INTENTS, op), how);
        for reading in [command(2, INTENTS, Op::Look), acquire(2)] {
            let Reply::Done { record, .. } = pair.ask(&reading, how) else {
                panic!("{how}: no record");
            };
            assert_eq!(record.as_bytes(), kept.as_bytes(), "{how}");
            assert_eq!(record.rest(), bytes, "{how}");
        }
        let fetched = pair.ask(&command(2, INTENTS, Op::Fetch), how);
        assert_eq!(fetched, Reply::Whole(kept), "{how}");
    }
}

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

/// Too short, what was executed could not be recorded; without an end, servers get full.
#[test]
fn fence_lives_for_its_retention_from_the_last_request_of_its_key() {
    let mut pair = Pair::new();
    let mut ask = |proposal: Option<u64>, number, steps, vanished, what| {
        let (ttl, retention) = (TTL, STEP * steps);
        let token = Some(number);
        let op = match proposal {
            Some(_) => Op::Acquire {
                proposal,
                ttl,
                retention,
            },
            None => Op::Confirm {
                token,
                ttl,
                retention,
            },
        };
        if vanished {
            pair.node.call(&["DEL", &name_of("fence")]);
        }
        pair.ask(&command(1, INTENTS, op), what);
        let left = pair.node.call(&["PTTL", &name_of("fence")]);
        let left = u64::try_from(left.as_int().unwrap()).expect("it has an end");
        let late = retention.abs_diff(ms(left));
        assert!(late < STEP / 5, "{what}: {left} ms");
    };
    ask(Some(5), 0, 30, false, "granted");
    ask(Some(5), 0, 32, false, "granted again");
    ask(None, 7, 34, false, "raised");
    ask(None, 7, 36, false, "confirmed");
    ask(None, 9, 38, true, "vanished");
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
                    send(&mut node, &acquire(id), None).unwrap();
                    if executed {
                        send(&mut node, &command(id, INTENTS, Op::ReleaseExecuted), None).unwrap();
                    }
                    let raw = send_raw(&mut node, &command(asking, INTENTS, op.clone()), None);
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
        let held = send(&mut pair.node, &acquire(3), None).unwrap();
        let unknown = Reply::Held {
            expires_in: None,
            shown: None,
        };
        assert_eq!(held, unknown, "{value}");
    }
}

#[test]
fn scripts_have_the_record_sizes_of_the_reference() {
    let [acquire, confirm, _, _, record, top_up, look] = SCRIPTS;
    for script in [acquire, confirm, look] {
        assert!(script.contains(&format!("> {} then", Record::MAX_INLINE)));
    }
    for script in [acquire, confirm, record, top_up, look] {
        // Both ends count.
        let head = format!(", 0, {})", Record::HEAD - 1);
        let [heads, whole] = ["'GETRANGE'", &head].map(|text| script.matches(text).count());
        assert!(heads > 0 && whole == heads, "{script}");
    }
    assert!(record.contains(&format!("string.sub(ARGV[2], 1, {})", Record::HEAD)));
    assert!(acquire.contains(&format!("fence > {} then", FencingToken::MAX)));
    // Of the owner, the half that tells what is asked for.
    assert!(acquire.contains("string.sub(holder, 33)") && owner(PLAIN).to_value().len() == 32);
}
