//! Records on a server with foreign keys, without its memory, or out of memory.

use std::time::Duration;

use support::{MonitorLog, ScriptNode, assert_matches};
use tower_redlock::protocol::OwnerToken;
use tower_redlock::protocol::admission::Generation;
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::{Redlock, RestartGuard};

use crate::node_contract::{
    acquire as plain_acquire, command as plain_command, confirm as plain_confirm,
};
use crate::record_contract::requests::{
    INTENTS, ROLES, acquire, all_ops, command, confirm, keep, kind, name_of, named, owner, record,
};
use crate::wire::{GENERATION, Pair, STEP, send, start_node};

/// An error, or an answer that is no vote; and an error means that nothing was written at all.
// Rules: node.foreign
#[test]
fn foreign_keys_get_no_vote_and_are_not_overwritten() {
    let mut node = start_node();
    let recorded = |id| all_ops(id).map(|op| command(id, INTENTS, op)).to_vec();
    let plain = |id| {
        let ops = [plain_acquire(7, STEP), plain_confirm(9, STEP), Op::Release];
        ops.map(|op| plain_command(&["k"], id, op)).to_vec()
    };
    let requests: [(&[&str], fn(u8) -> Vec<Command>, bool); 3] = [
        (&ROLES, recorded, false),
        (&ROLES[..2], plain, false),
        (&ROLES[..2], plain, true),
    ];
    let mut asked = 0;
    for (roles, requests, as_set) in requests {
        for (role, kind) in cases(roles, &["list", "hash", "string", "empty"]) {
            for (held, id) in cases(&[false, true], &[1, 2]) {
                for command in requests(id) {
                    let what =
                        format!("{kind} as {role}, held: {held}, as a set: {as_set}: {command:?}");
                    node.call(&["FLUSHALL"]);
                    if held {
                        send(&mut node, &requests(1)[0], as_set).unwrap();
                    }
                    node.put_foreign(&name_of(role), kind);
                    let before = ROLES.map(|role| node.dump(&name_of(role)));
                    let reply = send(&mut node, &command, as_set);
                    let after = ROLES.map(|role| node.dump(&name_of(role)));
                    let place = ROLES.iter().position(|each| *each == role).unwrap();
                    assert_eq!(after[place], before[place], "{what}: {reply:?}");
                    // A plain lock's fence may have been raised.
                    if reply.is_err() && roles.len() == 4 {
                        assert_eq!(after, before, "{what}: {reply:?}");
                    }
                    let op = &command.op;
                    let is_acquire = matches!(op, Op::Acquire { .. });
                    let wants_vote = is_acquire || matches!(op, Op::Confirm { .. });
                    let uses_it = role != "intent" || is_acquire;
                    // A plain lock that is asked for again by its holder keeps its token.
                    let is_told_again = roles.len() == 2 && role == "fence" && held && id == 1;
                    if wants_vote && uses_it && !(is_acquire && is_told_again) {
                        let granted = matches!(reply, Ok(Reply::Granted(_) | Reply::At(_)));
                        assert!(!granted, "{what}: {reply:?}");
                    }
                    let is_release = matches!(op, Op::Release | Op::ReleaseExecuted);
                    let must_fail = match role {
                        "record" => !is_release,
                        "fence" => is_acquire && !held,
                        "lock" => is_acquire && ["list", "hash"].contains(&kind),
                        _ => false,
                    };
                    assert!(reply.is_err() || !must_fail, "{what}: {reply:?}");
                    asked += 1;
                }
            }
        }
    }
    assert_eq!(asked, 4 * 4 * 2 * 2 * 8 + 2 * (2 * 4 * 2 * 2 * 3));
}

/// All pairs of these.
fn cases<A: Copy, B: Copy>(ones: &[A], others: &[B]) -> Vec<(A, B)> {
    let with_each = |one: &A| {
        others
            .iter()
            .map(|other| (*one, *other))
            .collect::<Vec<_>>()
    };
    ones.iter().flat_map(with_each).collect()
}

/// A lock shows it as well: its node is spoken to by the same means.
#[tokio::test]
async fn foreign_key_in_place_of_a_lock_is_reported_with_a_remedy() {
    let mut node = start_node();
    let builder = Redlock::builder().url(node.server.url());
    let redlock = builder.restart_guard(RestartGuard::Off).build().unwrap();
    for (role, kind) in [("lock", "list"), ("fence", "hash"), ("fence", "string")] {
        node.call(&["FLUSHALL"]);
        node.put_foreign(&name_of(role), kind);
        let refused = redlock.try_lock("k").await.unwrap_err().to_string();
        assert!(refused.contains("WRONGTYPE"), "{role}: {refused}");
        assert!(refused.contains("delete it there"), "{role}: {refused}");
        assert!(!refused.contains("{k}"), "{role}: {refused}");
    }
}

/// A lock is replaced by a foreign key: the intent is still withdrawn.
#[test]
fn release_withdraws_the_intent_beside_a_foreign_lock_key() {
    let mut node = start_node();
    for (record_it, reply) in [(false, "nothing to release"), (true, "done: head")] {
        node.call(&["FLUSHALL"]);
        send(&mut node, &acquire(1), false).unwrap();
        node.put_foreign(&name_of("lock"), "list");
        let op = if record_it { keep(1) } else { Op::Release };
        let command = command(1, INTENTS, op);
        let answer = send(&mut node, &command, false).unwrap();
        assert_eq!(kind(&command.op, &answer), reply);
        assert!(!node.server.exists(&name_of("intent")), "{reply}");
    }
}

// Rules: guard.quarantine
#[test]
fn quarantined_node_grants_no_lock_and_still_releases_and_records() {
    let mut pair = Pair::new();
    for intents in [None, INTENTS] {
        for lost in [false, true] {
            pair.forget();
            let random = OwnerToken::from_random([9; 16]);
            let known = pair.store.admit(&random, "run", Duration::ZERO);
            pair.node.call(&["SET", GENERATION, known.as_str()]);
            let mut ask = |op| pair.ask_in(&known, &command(1, intents, op), "guarded");
            assert_matches!(ask(acquire(1).op), Reply::Granted(_));
            assert_matches!(ask(confirm(9)), Reply::At(_));
            if lost {
                pair.forget();
            }
            let mut seen = Vec::new();
            for op in all_ops(1) {
                let command = command(1, intents, op);
                let reply = pair.ask_in(&known, &command, "after that");
                seen.push((kind(&command.op, &reply), reply == Reply::Amnesia));
            }
            let amnesia: Vec<bool> = seen.iter().map(|(_, amnesia)| *amnesia).collect();
            // Acquire and confirm; then release, release-executed, record, top-up, look and fetch.
            let expected = [lost, lost, false, false, false, false, false, false];
            assert_eq!(amnesia, expected, "{seen:?}");
        }
    }
    // Neither a record that is there is told before the memory is known to be the one that was seen.
    pair.forget();
    let topped = command(1, None, all_ops(1)[5].clone());
    pair.ask(&topped, "top up");
    let known = Generation::parse("r:1:1:run").unwrap();
    assert_eq!(pair.ask_in(&known, &acquire(2), "recorded"), Reply::Amnesia);
}

// Rules: node.order
#[test]
fn full_node_keeps_no_record_and_no_partial_write() {
    let mut node = start_node();
    let full = |node: &mut ScriptNode, full: bool| {
        let limit = if full { "1" } else { "0" };
        node.call(&["CONFIG", "SET", "maxmemory", limit]);
    };
    node.call(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    full(&mut node, true);
    let refused = |reply: Result<Reply, String>| {
        let error = reply.unwrap_err();
        assert!(error.contains("OOM"), "{error}");
    };
    let ask = |node: &mut ScriptNode, id, op| send(node, &command(id, INTENTS, op), false);
    refused(ask(&mut node, 1, acquire(1).op));
    refused(ask(&mut node, 1, all_ops(1)[5].clone()));
    assert_eq!(node.server.keys("*"), [""; 0]);
    full(&mut node, false);
    ask(&mut node, 1, acquire(1).op).unwrap();
    full(&mut node, true);
    let before = ROLES.map(|role| node.dump(&name_of(role)));
    refused(ask(&mut node, 1, keep(1)));
    refused(ask(&mut node, 1, confirm(900)));
    assert_eq!(ROLES.map(|role| node.dump(&name_of(role))), before);
    // What needs no memory goes on: the lock that is held, and what it leaves.
    assert_eq!(ask(&mut node, 1, acquire(1).op), Ok(Reply::Granted(7)));
    assert_eq!(ask(&mut node, 1, confirm(7)), Ok(Reply::At(7)));
    assert_eq!(ask(&mut node, 1, Op::Look), Ok(Reply::NotDone));
    full(&mut node, false);
    ask(&mut node, 1, keep(1)).unwrap();
    full(&mut node, true);
    for op in [Op::Look, acquire(2).op, keep(2), all_ops(2)[5].clone()] {
        let reply = ask(&mut node, 2, op.clone());
        assert_matches!(reply, Ok(Reply::Done { .. }), "{op:?}");
    }
}

/// Were a script to die half-way: no lock without its fence and its intent, and no free key of which
/// the record is not there yet.
// Rules: node.order
#[test]
fn scripts_write_fence_and_intent_before_the_lock() {
    let mut node = start_node();
    let log = MonitorLog::start(&node.server);
    send(&mut node, &acquire(1), false).unwrap();
    send(&mut node, &command(1, INTENTS, keep(1)), false).unwrap();
    let lines = log.lines();
    let mut written = Vec::new();
    for line in lines.iter().filter(|line| line.contains(" lua] ")) {
        let command = line.split(" lua] ").nth(1).unwrap().replace('"', "");
        let mut words = command.split(' ');
        let (verb, key) = (words.next().unwrap(), words.next().unwrap());
        if ["set", "del"].contains(&verb.to_lowercase().as_str()) {
            let role = ROLES.into_iter().find(|role| name_of(role) == key).unwrap();
            written.push(format!("{} {role}", verb.to_lowercase()));
        }
    }
    let expected = [
        "set fence",
        "set intent",
        "set lock",
        "set record",
        "del lock",
        "del intent",
    ];
    assert_eq!(written, expected);
}

/// As the chapter on idempotency says.
#[test]
fn record_of_a_kibibyte_takes_less_than_two_of_a_node() {
    const RECORDED: i64 = 2_000;
    let mut node = start_node();
    let memory = |node: &mut ScriptNode| {
        let info = node.call(&["INFO", "memory"]);
        let mut lines = info.as_str().unwrap().lines();
        let used = lines.find_map(|line| line.strip_prefix("used_memory:"));
        used.unwrap().parse::<i64>().unwrap()
    };
    let before = memory(&mut node);
    for number in 0..RECORDED {
        let of = |op| Command {
            names: [named(&format!("order-{number:08}"), INTENTS)].into(),
            owner: owner(1),
            op,
        };
        send(&mut node, &of(acquire(1).op), false).unwrap();
        let (record, retention) = (record(1, 1024), STEP * 864);
        send(&mut node, &of(Op::Record { record, retention }), false).unwrap();
    }
    // The record and the fence.
    assert_eq!(node.call(&["DBSIZE"]).as_int(), Some(2 * RECORDED));
    let each = (memory(&mut node) - before) / RECORDED;
    println!("{each} bytes for each record of 1 KiB with its fence");
    assert!(each < 2 * 1024, "{each} bytes each");
}
