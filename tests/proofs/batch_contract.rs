//! A script for several requests answers each of them as the reference node does, and leaves the same state; what one
//! request meets is no matter of the others.

use std::collections::BTreeSet;

use support::{self, Connection, Random, ScriptNode};
use tower_redlock::FencingToken;
use tower_redlock::protocol::OwnerToken;
use tower_redlock::protocol::message::{Command, Op, Reply, SharedOp};

use crate::node_contract::{acquire, command, confirm, names, owner};
use crate::random_contract::{seen_names, steps};
use crate::record_contract::requests::kind;
use crate::shared_contract::shared_names;
use crate::wire::{
    GENERATION, Pair, RETENTION, STEP, assert_same, decode, eval, number_of, send, start_node, text,
};

type Answer = Result<Reply, String>;

/// The keys that requests are about: so few that most meet what others have left.
const POOL: u64 = 80;

const KNOWN: &str = "r:100:999999:run";

/// Sends requests of one kind as one call, which compares the generation if that is known.
fn send_batch(node: &mut ScriptNode, commands: &[Command], known: Option<&str>) -> Vec<Answer> {
    let (script, times) = match commands[0].op {
        Op::Acquire {
            proposal: Some(_),
            ttl,
            retention,
        } => ("acquire_batch", vec![ttl, retention]),
        Op::Confirm { ttl, retention, .. } => ("confirm_batch", vec![ttl, retention]),
        Op::Acquire { ttl, .. } => ("acquire_batch_unfenced", vec![ttl]),
        _ => ("release_batch", vec![]),
    };
    let mut keys: Vec<&[u8]> = Vec::new();
    let mut own = Vec::new();
    let fences: Vec<_> = commands.iter().map(|one| one.names[0].fence()).collect();
    for (Command { names, owner, op }, fence) in commands.iter().zip(&fences) {
        keys.push(&names[0].lock);
        own.push(owner.to_value());
        if let Some(number) = number_of(op) {
            keys.push(fence);
            own.push(number.to_string());
        }
    }
    // Releases need no vote.
    let known = known.filter(|_| script != "release_batch");
    keys.extend(known.map(|_| GENERATION.as_bytes()));
    let mut args: Vec<_> = times.iter().map(|t| t.as_millis().to_string()).collect();
    args.push(known.unwrap_or_default().to_owned());
    args.extend(own);
    let args: Vec<&[u8]> = args.iter().map(|arg| arg.as_bytes()).collect();
    let whole = match eval(node, script, &keys, &args) {
        Ok(whole) => whole,
        Err(error) => return vec![Err(error); commands.len()],
    };
    let parts = whole.as_array();
    if let Some(parts) = parts.filter(|parts| parts.len() == commands.len()) {
        let answer = |(command, part): (&Command, &support::Reply)| match part {
            support::Reply::Error(error) => Err(error.clone()),
            part => decode(command, part),
        };
        return commands.iter().zip(parts).map(answer).collect();
    }
    let is_as_asked = whole.as_int() == Some(1);
    let answers = commands.iter().map(|command| match &command.op {
        op @ Op::Acquire { .. } if is_as_asked => Ok(Reply::Granted(number_of(op).unwrap_or(0))),
        op @ Op::Confirm { .. } if is_as_asked => Ok(Reply::At(number_of(op).unwrap_or(0))),
        _ => decode(command, &whole),
    });
    answers.collect()
}

/// Sends a batch, and compares each answer, and what is there afterwards, with those of the reference node.
#[track_caller]
pub(crate) fn ask(
    pair: &mut Pair,
    commands: &[Command],
    known: Option<&str>,
    what: &str,
) -> Vec<Reply> {
    let is_vote = !matches!(commands[0].op, Op::Release);
    let is_forgotten = is_vote && known.is_some_and(|known| known != KNOWN);
    let answers = send_batch(&mut pair.node, commands, known).into_iter();
    let answers: Vec<Reply> = answers.map(|answer| answer.expect(what)).collect();
    for (command, theirs) in commands.iter().zip(&answers) {
        let ours = match is_forgotten {
            true => Reply::Amnesia,
            false => pair.store.apply(command, pair.now()),
        };
        assert_same(command, &ours, theirs, what);
    }
    for command in commands.iter().take(8) {
        let look = Command {
            names: seen_names(&key_of(command)),
            owner: owner(0),
            op: Op::Inspect,
        };
        let mut ours = pair.store.apply(&look, pair.now());
        if let Reply::Seen(seen) = &mut ours {
            // A key that was locked without fencing only.
            seen.fence.take_if(|fence| *fence == 0);
        }
        let theirs = send(&mut pair.node, &look, false).unwrap();
        assert_same(&look, &ours, &theirs, what);
    }
    answers
}

fn key_of(command: &Command) -> String {
    let lock = text(&command.names[0].lock);
    let key = lock.trim_start_matches("redlock:{");
    key.trim_end_matches('}').to_owned()
}

fn holder(pair: &Pair, key: &str) -> Option<OwnerToken> {
    let holder = pair.store.holder(&names(&[key])[0], pair.now());
    holder.cloned()
}

/// A number around one that rises, and now and then another one.
fn number(random: &mut Random, rising: u64) -> u64 {
    match random.below(60) {
        0 => 0,
        1 => random.below(10_000),
        2 => FencingToken::MAX.as_u64() - 1 + random.below(4),
        3..30 => rising.saturating_sub(random.below(3_000)),
        _ => rising + random.below(4),
    }
}

/// Returns requests of one kind. Half of the batches are *tame*: each request is to succeed as it was asked.
fn batch(random: &mut Random, pair: &Pair, rising: u64) -> Vec<Command> {
    let (kind, is_tame) = (random.below(8), random.is_one_in(2));
    let (ttl, retention) = (steps(random, 1, 9), steps(random, 10, 5));
    let (first, count) = (random.below(POOL), 2 + random.below(63));
    let mut commands = Vec::new();
    for key in (first..first + count).map(|key| format!("key {}", key % POOL)) {
        let holder = holder(pair, &key);
        let is_free = pair.store.is_free(&names(&[&key])[0], pair.now());
        let succeeds = if kind < 4 { is_free } else { holder.is_some() };
        if is_tame && !succeeds {
            continue;
        }
        let any = owner(u8::try_from(random.below(3)).unwrap());
        // Half of the locks are asked for by their owner.
        let is_own = is_tame || random.is_one_in(2);
        let owner = holder.filter(|_| is_own).unwrap_or(any);
        let number = match is_tame {
            true => rising,
            false => number(random, rising),
        };
        let op = match kind {
            0..4 => Op::Acquire {
                proposal: (kind < 3).then_some(number),
                ttl,
                retention,
            },
            4..6 => Op::Confirm {
                // What is confirmed is never beyond what nodes grant.
                token: Some(number.min(FencingToken::MAX.as_u64())),
                ttl,
                retention,
            },
            _ => Op::Release,
        };
        commands.push(Command {
            owner,
            ..command(&[&key], 0, op)
        });
    }
    commands
}

/// Gives some keys to a reader.
fn put_readers(random: &mut Random, pair: &mut Pair) {
    for _ in 0..8 {
        let (key, ttl) = (random.below(POOL), steps(random, 1, 9));
        let command = Command {
            names: shared_names(&[&format!("key {key}")]),
            ..command(&["k"], 0, Op::Shared(SharedOp::Acquire { ttl }))
        };
        pair.ask(&command, "a reader");
    }
}

fn compare(seed: u64, base: u64) {
    let (mut pair, mut random) = (Pair::new(), Random(seed));
    let (mut seen, mut whole, mut mixed) = (BTreeSet::new(), 0, 0);
    for step in 0..240 {
        let what = format!("seed {seed}, step {step}");
        if step % 60 == 0 {
            pair.forget();
            pair.node.call(&["SET", GENERATION, KNOWN]);
        }
        match random.below(8) {
            0 => {
                let time = steps(&mut random, 1, 6);
                pair.pass(time);
            }
            1 => put_readers(&mut random, &mut pair),
            _ => {}
        }
        let commands = batch(&mut random, &pair, base + 1_000 * step);
        if commands.len() < 2 {
            continue;
        }
        let is_unfenced = matches!(commands[0].op, Op::Acquire { proposal: None, .. });
        let known = match random.below(6) {
            0 => Some("r:100:999999:another"),
            1..4 => Some(KNOWN),
            // Without the generation, such requests are sent as plain commands.
            _ => is_unfenced.then_some(KNOWN),
        };
        let answers = ask(&mut pair, &commands, known, &what);
        let as_asked = |(command, answer): (&Command, &Reply)| match answer {
            Reply::Granted(number) | Reply::At(number) => {
                *number == number_of(&command.op).unwrap_or(0)
            }
            _ => false,
        };
        let succeeded = commands
            .iter()
            .zip(&answers)
            .filter(|it| as_asked(*it))
            .count();
        whole += usize::from(succeeded == commands.len());
        mixed += usize::from(0 < succeeded && succeeded < commands.len());
        seen.extend(
            commands
                .iter()
                .zip(&answers)
                .map(|(command, answer)| kind(&command.op, answer)),
        );
    }
    println!("seed {seed}: {whole} batches were answered as asked, {mixed} in part: {seen:?}");
    assert!(whole >= 10 && mixed >= 10);
    let expected = "amnesia, at, granted, held, held by readers, held for an owner, lost to confirm, \
                    nothing to release, overflow, released";
    assert_eq!(seen, expected.split(", ").collect());
}

#[test]
fn batches_with_small_numbers_match_the_reference() {
    compare(1, 1);
}

// Rules: node.never_shorter
#[test]
fn batches_with_current_numbers_match_the_reference() {
    compare(2, 1_763_659_999_000_003);
}

#[test]
fn batches_with_numbers_of_fifteen_and_sixteen_digits_match_the_reference() {
    compare(3, 999_999_999_900_000);
}

#[test]
fn batches_at_the_largest_numbers_match_the_reference() {
    compare(4, FencingToken::MAX.as_u64() - 200_000);
}

/// The requests of one owner for `key 0` and so on, with the generation where the script needs it.
fn send_all(node: &mut ScriptNode, count: usize, op: &Op) -> Vec<Answer> {
    let keys = (0..count).map(|key| format!("key {key}"));
    let commands = keys.map(|key| command(&[&key], 1, op.clone()));
    send_batch(node, &commands.collect::<Vec<_>>(), Some(KNOWN))
}

const UNFENCED: Op = Op::Acquire {
    proposal: None,
    ttl: STEP,
    retention: RETENTION,
};

#[test]
fn foreign_data_refuses_its_own_request_of_a_batch_and_is_not_overwritten() {
    let mut node = start_node();
    for (op, refused) in [
        (acquire(9, STEP), &[1, 3, 4][..]),
        (UNFENCED, &[1]),
        // Foreign data is not an owner's lock.
        (confirm(9, STEP), &[3, 4]),
        (Op::Release, &[]),
    ] {
        node.call(&["FLUSHALL"]);
        node.call(&["SET", GENERATION, KNOWN]);
        let is_acquire = matches!(op, Op::Acquire { .. });
        if !is_acquire {
            send_all(&mut node, 6, &acquire(9, STEP));
        }
        let foreign = [
            ("redlock:{key 1}", "list"),
            ("redlock:{key 3}:fence", "hash"),
            ("redlock:{key 4}:fence", "number"),
        ];
        for (key, kind) in foreign {
            node.put_foreign(key, kind);
        }
        let before = foreign.map(|(key, _)| node.dump(key));
        let answers = send_all(&mut node, 6, &op);
        let errors = (0..6).filter(|key| answers[*key].is_err());
        assert_eq!(errors.collect::<Vec<_>>(), refused, "{op:?}: {answers:?}");
        for (key, answer) in answers.iter().enumerate() {
            match answer {
                Err(why) => assert!(why.contains("WRONGTYPE"), "{op:?}: {why}"),
                Ok(answer) => assert_eq!(*answer == Reply::Lost, !is_acquire && key == 1),
            }
        }
        assert_eq!(foreign.map(|(key, _)| node.dump(key)), before, "{op:?}");
    }
}

#[test]
fn full_server_grants_no_request_of_a_batch_and_releases_all() {
    let mut node = start_node();
    node.call(&["SET", GENERATION, KNOWN]);
    send_all(&mut node, 4, &acquire(9, STEP));
    node.call(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(
        send_all(&mut node, 4, &Op::Release)
            .iter()
            .all(|answer| *answer == Ok(Reply::Released))
    );
    for op in [acquire(9, STEP), UNFENCED] {
        for answer in send_all(&mut node, 8, &op) {
            assert!(answer.unwrap_err().contains("OOM"), "{op:?}");
        }
    }
    assert_eq!(node.server.keys("redlock:{*}"), [""; 0]);
}

/// A number that no fence is must not be raised: it is another application's.
#[test]
fn fence_keys_that_hold_other_numbers_are_not_overwritten() {
    let mut node = start_node();
    let numbers = "42,-42,1763659999,1763659999.00001,1e15,0x1234,nan,inf, 42,1763659999000003,42\n,, ,42 ours";
    let foreign: Vec<_> = numbers.split(',').collect();
    for op in [
        acquire(1_763_659_999_000_009, STEP),
        confirm(1_763_659_999_000_009, STEP),
    ] {
        node.call(&["FLUSHALL"]);
        node.call(&["SET", GENERATION, KNOWN]);
        for (key, value) in foreign.iter().enumerate() {
            node.call(&["SET", &format!("redlock:{{key {key}}}:fence"), value]);
            if !matches!(op, Op::Acquire { .. }) {
                node.call(&[
                    "SET",
                    &format!("redlock:{{key {key}}}"),
                    &owner(1).to_value(),
                ]);
            }
        }
        let answers = send_all(&mut node, foreign.len(), &op);
        let (last, others) = answers.split_last().unwrap();
        assert!(last.is_ok(), "{last:?}");
        assert!(others.iter().all(Result::is_err), "{others:?}");
        for (key, value) in foreign.iter().enumerate().take(others.len()) {
            let left = node.call(&["GET", &format!("redlock:{{key {key}}}:fence")]);
            assert_eq!(left.as_str(), Some(*value));
        }
    }
}

/// Subscribers of each lock are counted, and notified of its release, as by the script for one lock.
#[test]
fn release_batch_notifies_the_subscribers_of_each_lock() {
    let mut node = start_node();
    let locks: Vec<_> = (0..5).map(|key| format!("redlock:{{{key}}}")).collect();
    let subscribed = [0, 2, 0, 1, 0];
    let mut subscribers = Vec::new();
    for lock in [1, 1, 3] {
        let mut connection = Connection::open(node.server.addr()).unwrap();
        connection.call(&["SUBSCRIBE", &locks[lock]]).unwrap();
        subscribers.push((lock, connection));
    }
    let ours = owner(1).to_value();
    let mut notified = 0;
    let (none, all): (&[usize], &[usize]) = (&[], &[0, 1, 2, 3, 4]);
    for (held, asked) in [
        (&all[..4], 0..5),
        (all, 0..5),
        (all, 1..2),
        (all, 2..5),
        (none, 0..5),
        (&all[..2], 1..4),
        (&[1, 3, 4], 0..5),
    ] {
        for notifies in ["1", ""] {
            let what = format!("{held:?} held, {asked:?} asked, notifies: {notifies:?}");
            // The others belong to another owner.
            for (place, lock) in locks.iter().enumerate() {
                let is_ours = held.contains(&place);
                let holder = if is_ours { &*ours } else { "theirs" };
                node.call(&["SET", lock, holder, "PX", "100000"]);
            }
            let keys = locks[asked.clone()].iter().map(String::as_bytes);
            let keys: Vec<_> = keys.collect();
            let mut args = vec![notifies.as_bytes()];
            args.extend(keys.iter().map(|_| ours.as_bytes()));
            let reply = eval(&mut node, "release_batch", &keys, &args).unwrap();
            let told = match reply.as_array() {
                Some(parts) => parts.iter().map(|part| part.as_int().unwrap()).collect(),
                None => vec![reply.as_int().unwrap(); keys.len()],
            };
            let expected = asked.clone().map(|lock| match held.contains(&lock) {
                false => -3,
                true if notifies.is_empty() => -2,
                true => subscribed[lock],
            });
            assert_eq!(told, expected.collect::<Vec<_>>(), "{what}");
            let is_told =
                |lock: &usize| !notifies.is_empty() && held.contains(lock) && asked.contains(lock);
            // An unexpected message would be the next one's.
            for (lock, connection) in subscribers.iter_mut().filter(|(lock, _)| is_told(lock)) {
                let message = connection.read_reply().expect(&what);
                let count = message.as_array().unwrap()[2].as_int();
                assert_eq!(count, Some(subscribed[*lock]), "{what}");
                notified += 1;
            }
        }
    }
    assert_eq!(notified, 14);
}
