//! What the scripts for locks leave on a server, beside the reference node.

use std::sync::Arc;
use std::time::Duration;

use support::{self, ms, secs};
use tower_redlock::protocol::admission::Generation;
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, OwnerToken, Shown, holder};

use crate::batch_contract;
use crate::record_contract::requests::{INTENTS, named};
use crate::wire::{GENERATION, Pair, RETENTION, STEP, TOLERANCE, eval, send, start_node, text};

pub(crate) fn names(keys: &[&str]) -> Arc<[KeyNames]> {
    let keys = LockKeys::from_iter(keys.iter().copied());
    Namespace::default().names(&keys, |_| [0; 32]).unwrap()
}

/// Every other one shows who it is.
pub(crate) fn owner(id: u8) -> OwnerToken {
    let holder = holder::parse(format!("{id} host/{id}\ta note").as_bytes());
    let holder = holder.filter(|_| id % 2 == 1);
    OwnerToken::showing([id; 16], Shown::new(None, holder))
}

pub(crate) fn command(keys: &[&str], id: u8, op: Op) -> Command {
    Command {
        names: names(keys),
        owner: owner(id),
        op,
    }
}

pub(crate) fn acquire(proposal: u64, ttl: Duration) -> Op {
    Op::Acquire {
        proposal: Some(proposal),
        ttl,
        retention: RETENTION,
    }
}

pub(crate) fn confirm(token: u64, ttl: Duration) -> Op {
    Op::Confirm {
        token: Some(token),
        ttl,
        retention: RETENTION,
    }
}

/// Too short, the next token could be one that was, or what was executed could not be recorded; without an end, servers
/// get full.
// Rules: node.release
#[test]
fn fence_lives_for_its_retention_from_the_last_request_of_its_lock() {
    let mut pair = Pair::new();
    let recorded = [named("recorded", INTENTS)].into();
    for (names, in_batch) in [
        (names(&["k"]), false),
        (names(&["b"]), true),
        (names(&["x", "y"]), false),
        (recorded, false),
    ] {
        let tell = |pair: &mut Pair, command, what: &str| match in_batch {
            true => drop(batch_contract::ask(pair, &[command], None, what)),
            false => drop(pair.ask(&command, what)),
        };
        let command = |id, mut op, steps: u32| {
            if let Op::Acquire { retention, .. } | Op::Confirm { retention, .. } = &mut op {
                *retention = steps * STEP;
            }
            let (names, owner) = (Arc::clone(&names), owner(id));
            Command { names, owner, op }
        };
        let lives = |pair: &mut Pair, steps: u32, what: &str| {
            for name in names.iter() {
                let pttl = pair.node.call(&["PTTL", &text(&name.fence())]);
                let left = u64::try_from(pttl.as_int().unwrap());
                let left = ms(left.expect("it has an end"));
                let late = (steps * STEP).abs_diff(left);
                assert!(late < TOLERANCE, "{what}, {name:?}: {left:?}");
            }
        };
        let mut ask = |op, steps, what| {
            tell(&mut pair, command(1, op, steps), what);
            lives(&mut pair, steps, what);
            pair.pass(STEP);
            lives(&mut pair, steps - 1, what);
        };
        ask(acquire(5, 5 * STEP), 10, "granted");
        ask(acquire(5, 5 * STEP), 11, "granted again");
        ask(confirm(7, 5 * STEP), 12, "raised");
        ask(confirm(7, 5 * STEP), 14, "confirmed");
        // Also one that vanished: it would be the first that it grants.
        for name in names.iter() {
            pair.node.call(&["DEL", &text(&name.fence())]);
        }
        tell(&mut pair, command(1, confirm(9, STEP), 14), "vanished");
        lives(&mut pair, 14, "vanished");
        pair.pass(STEP);
        tell(&mut pair, command(1, Op::Release, 0), "release");
        lives(&mut pair, 13, "released");
        tell(&mut pair, command(2, acquire(1, STEP), 20), "next");
        lives(&mut pair, 20, "granted again");
    }
}

/// A restart with its data, an old backup and a promoted replica bring back a generation that is another
/// process's: by its age alone, a server that forgot locks would vote at once.
// Rules: guard.process
#[test]
fn generation_identifies_one_memory_of_one_process() {
    let mut pair = Pair::new();
    let mut admit = |random: u8, run_id: &str| {
        let random = owner(random);
        let digits = random.to_value();
        let args = [&digits, run_id].map(str::as_bytes);
        let reply = eval(&mut pair.node, "admit", &[GENERATION.as_bytes()], &args).unwrap();
        let [generation, seconds, micros] = reply.as_array().unwrap() else {
            panic!("{reply:?}");
        };
        let number = |reply: &support::Reply| u64::try_from(reply.as_int().unwrap()).unwrap();
        let now = secs(number(seconds)) + Duration::from_micros(number(micros));
        let theirs = Generation::parse(generation.as_str().unwrap()).unwrap();
        let began = now - theirs.age(now);
        let ours = pair.store.admit(&random, run_id, began);
        assert_eq!(theirs, ours, "{run_id}");
        let left = pair.node.call(&["PTTL", GENERATION]);
        assert_eq!(left.as_int(), Some(-1));
        theirs
    };
    let first = admit(1, "a");
    assert_eq!(admit(2, "a"), first);
    let second = admit(3, "b");
    assert_ne!(second, first);
    // Neither does it matter that the name begins alike, or ends so.
    for run_id in ["bb", "b"] {
        assert_ne!(admit(4, run_id), second, "{run_id}");
    }
    assert_ne!(admit(5, "a"), first);
}

#[test]
fn lock_key_without_expiry_is_held_without_a_remaining_time() {
    let mut node = start_node();
    node.call(&["SET", &text(&names(&["k"])[0].lock), "foreign"]);
    node.call(&["SET", &text(&names(&["l"])[0].lock), "foreign", "EX", "9"]);
    // Of several, one that never expires is the longest.
    for (keys, as_set) in [
        (&["k"][..], false),
        (&["k"], true),
        (&["k", "l"], true),
        (&["l", "k"], true),
    ] {
        let reply = send(&mut node, &command(keys, 1, acquire(1, STEP)), as_set);
        let held = Reply::Held {
            expires_in: None,
            shown: None,
        };
        assert_eq!(reply, Ok(held), "{keys:?}, as a set: {as_set}");
    }
}

#[test]
fn set_with_a_lock_key_of_another_type_gets_none_of_its_keys() {
    let mut node = start_node();
    node.put_foreign(&text(&names(&["k"])[0].lock), "list");
    let all = command(&["j", "k", "l"], 1, acquire(1, STEP));
    let error = send(&mut node, &all, true).unwrap_err();
    assert!(error.contains("WRONGTYPE"), "{error}");
    for key in ["j", "l"] {
        assert!(!node.server.exists(&text(&names(&[key])[0].lock)), "{key}");
    }
}
