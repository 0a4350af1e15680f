//! The Redis node mirrors the reference node: the same random requests, sent as scripts to a real server and applied to
//! `protocol::Store`, get the same answers, while time passes on both.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use support::Random;
use tower_redlock::FencingToken;
use tower_redlock::protocol::message::{Command, HolderMark, Op, Reply, SharedOp};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, Record};

use crate::node_contract::{command, owner};
use crate::record_contract::requests::{self, PLAIN, kind, record};
use crate::shared_contract::shared_names;
use crate::wire::{Pair, STEP, assert_same, send};

/// A request, and whether it is sent by the scripts for several keys.
type Request = (Command, bool);

/// A time of so many steps, or some more.
pub(crate) fn steps(random: &mut Random, least: u64, count: u64) -> Duration {
    STEP * u32::try_from(least + random.below(count)).unwrap()
}

/// Returns an `ACQUIRE` and a `CONFIRM` of random times, with a number around the last one, now and then with the least one
/// or up to `jump` above.
fn votes(random: &mut Random, fencing: bool, last: u64, [least, jump]: [u64; 2]) -> [Op; 2] {
    // A fence outlives the locks under it.
    let (ttl, retention) = (steps(random, 1, 9), steps(random, 10, 5));
    let near = (last + random.below(4)).saturating_sub(1).max(least);
    let number = match random.below(8) {
        0 => least,
        1 => near + random.below(jump),
        _ => near,
    };
    let acquire = Op::Acquire {
        proposal: fencing.then_some(number),
        ttl,
        retention,
    };
    let confirm = Op::Confirm {
        // What is confirmed is never beyond what nodes grant.
        token: fencing.then_some(number.min(FencingToken::MAX.as_u64())),
        ttl,
        retention,
    };
    [acquire, confirm]
}

/// For keys and sets of keys.
fn locks(random: &mut Random, last: u64, fencing: bool) -> Request {
    let keys = random.one_of::<&[&str]>(&[
        &["x"],
        &["y"],
        &["z"],
        &["x", "y"],
        &["y", "z"],
        &["x", "y", "z"],
    ]);
    // Without fencing, the node asks for single keys with plain commands or as sets.
    let as_set = keys.len() > 1 || !fencing || random.is_one_in(4);
    let [acquire, confirm] = votes(random, fencing, last, [0, 1_000]);
    let op = match random.below(9) {
        0..4 => acquire,
        4..7 => confirm,
        _ => Op::Release,
    };
    (command(keys, any_owner(random), op), as_set)
}

fn any_owner(random: &mut Random) -> u8 {
    u8::try_from(random.below(3)).unwrap()
}

/// For a key that keeps records, with intents that live for one of these numbers of steps.
fn records(random: &mut Random, last: u64, intents: &[Option<u32>]) -> Request {
    let id = random.one_of(&[1, 2, 3, PLAIN]);
    let intent = random.one_of(intents).map(|steps| STEP * steps);
    let [acquire, confirm] = votes(random, true, last, [1, 50]);
    // As little as there may be, the most that is answered as a whole, one more, and much.
    let inline = Record::MAX_INLINE - Record::HEAD;
    let record = record(id, random.one_of(&[1, inline, inline + 1, 64 * 1024]));
    let retention = steps(random, 1, 19);
    let op = match random.below(17) {
        0..6 => acquire,
        6..9 => confirm,
        9..11 => Op::Release,
        11 => Op::ReleaseExecuted,
        12..14 => Op::Record { record, retention },
        14 => Op::TopUp { record, retention },
        15 => Op::Look,
        _ => Op::Fetch,
    };
    (requests::command(id, intent, op), false)
}

/// The names of a lock, with all that may be beside it.
pub(crate) fn seen_names(key: &str) -> Arc<[KeyNames]> {
    let namespace = Namespace::default();
    let names = namespace.names_with_record(&key.into(), None, |_| [0; 32]);
    [namespace.with_shared(names.unwrap())].into()
}

/// For keys that readers share, slots, and keys that operators look into.
fn kinds_of_locks(random: &mut Random, last: u64) -> Request {
    const SLOTS: usize = 3;
    let keys = random.one_of::<&[&str]>(&[&["x"], &["x"], &["y"], &["x", "y"]]);
    let [acquire, _] = votes(random, true, last, [0, 50]);
    let (ttl, left) = (steps(random, 1, 6), steps(random, 1, 6));
    let share = Op::Shared(SharedOp::Acquire { ttl });
    let (names, op) = match random.below(30) {
        0..8 => {
            let keys = LockKeys::from_iter(keys.iter().copied());
            let slots = Namespace::default().slot_names(&keys, SLOTS, |_| [0; 32]);
            let slot = Arc::clone(&slots.unwrap()[random.index(SLOTS)]);
            let op = match random.below(8) {
                0..5 => acquire,
                5..7 => Op::Release,
                _ => Op::ReleaseAfter { left },
            };
            (slot, op)
        }
        8..26 => {
            let op = match random.below(18) {
                0..4 => acquire,
                4..6 => Op::Release,
                6 => Op::ReleaseAfter { left },
                7..11 => share,
                11..13 => Op::Shared(SharedOp::Confirm { ttl }),
                13..15 => Op::Shared(SharedOp::Release),
                15..17 => Op::Shared(SharedOp::Announce { patience: STEP * 2 }),
                _ => Op::Shared(SharedOp::Withdraw),
            };
            (shared_names(keys), op)
        }
        26..28 => {
            // Both clocks are far between these.
            let until = random.one_of(&[Duration::ZERO, Duration::MAX / 1_000_000]);
            let holder = HolderMark::from_bytes(b"another");
            (seen_names(keys[0]), Op::Revoke { holder, until })
        }
        _ => (seen_names(keys[0]), Op::Inspect),
    };
    let owner = owner(any_owner(random));
    (Command { names, owner, op }, false)
}

/// Asks both nodes. Each marks holders in its own way, and mostly the one that is there is revoked.
fn ask(pair: &mut Pair, random: &mut Random, (command, as_set): &Request, what: &str) -> Reply {
    let Op::Revoke { until, .. } = command.op else {
        return pair.ask_as(command, *as_set, what);
    };
    let look = Command {
        op: Op::Inspect,
        ..command.clone()
    };
    let seen = [
        pair.store.apply(&look, pair.now()),
        send(&mut pair.node, &look, false).unwrap(),
    ];
    let mut both = [command.clone(), command.clone()];
    let is_for_the_holder = !random.is_one_in(3);
    for (command, seen) in both.iter_mut().zip(seen) {
        if let Reply::Seen(seen) = seen
            && let Some(holder) = seen.mark.filter(|_| is_for_the_holder)
        {
            command.op = Op::Revoke { holder, until };
        }
    }
    let theirs = send(&mut pair.node, &both[1], false).unwrap();
    let ours = pair.store.apply(&both[0], pair.now());
    assert_same(command, &ours, &theirs, what);
    theirs
}

/// Sends as many random requests in each round, which begins with nodes without a memory. These kinds of answers must come.
fn compare(
    seed: u64,
    [rounds, steps]: [u32; 2],
    first_number: u64,
    draw: impl Fn(&mut Random, u64) -> Request,
    expected: &str,
) {
    let (mut pair, mut random) = (Pair::new(), Random(seed));
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for round in 0..rounds {
        pair.forget();
        let mut last = first_number;
        for step in 0..steps {
            let what = format!("seed {seed}, round {round}, step {step}");
            if random.is_one_in(7) {
                let time = self::steps(&mut random, 1, 6);
                pair.pass(time);
                continue;
            }
            let request = draw(&mut random, last);
            let reply = ask(&mut pair, &mut random, &request, &what);
            if let Reply::Granted(number) | Reply::At(number) = reply {
                last = number.max(first_number);
            }
            *seen.entry(kind(&request.0.op, &reply)).or_default() += 1;
        }
    }
    println!("seed {seed}: {seen:?}");
    let expected: BTreeSet<_> = expected.split(", ").collect();
    assert_eq!(seen.into_keys().collect::<BTreeSet<_>>(), expected);
}

const LOCKS: &str =
    "at, granted, held, held for an owner, lost to confirm, nothing to release, released";

const RECORDS: &str = "at, done: head, done: whole, granted, held, held for an owner, lost to confirm, lost to record, not done, \
                       nothing to release, released, whole";

#[test]
fn random_locks_with_small_numbers_match_the_reference() {
    compare(
        1,
        [3, 250],
        1,
        |random, last| locks(random, last, true),
        LOCKS,
    );
}

#[test]
fn random_locks_with_current_numbers_match_the_reference() {
    let number = 1_763_659_999_000_003;
    compare(
        2,
        [3, 250],
        number,
        |random, last| locks(random, last, true),
        LOCKS,
    );
}

// Rules: node.digits
#[test]
fn random_locks_at_the_largest_numbers_match_the_reference() {
    let number = FencingToken::MAX.as_u64() - 300;
    let expected = format!("{LOCKS}, overflow");
    compare(
        3,
        [3, 250],
        number,
        |random, last| locks(random, last, true),
        &expected,
    );
}

#[test]
fn random_locks_without_fencing_match_the_reference() {
    compare(
        4,
        [3, 250],
        1,
        |random, last| locks(random, last, false),
        LOCKS,
    );
}

#[test]
fn random_records_without_intents_match_the_reference() {
    compare(
        1,
        [4, 400],
        1,
        |random, last| records(random, last, &[None]),
        RECORDS,
    );
}

#[test]
fn random_records_with_intents_match_the_reference() {
    let number = 1_763_659_999_000_003;
    let expected = format!("{RECORDS}, intended");
    compare(
        2,
        [4, 400],
        number,
        |random, last| records(random, last, &[Some(15)]),
        &expected,
    );
}

/// Clients that want intents beside such that do not, and fences that are at their end.
#[test]
fn random_records_at_the_largest_numbers_match_the_reference() {
    let number = FencingToken::MAX.as_u64() - 60;
    let expected = format!("{RECORDS}, intended, overflow");
    let intents = [None, Some(5), Some(40)];
    compare(
        3,
        [4, 400],
        number,
        |random, last| records(random, last, &intents),
        &expected,
    );
}

#[test]
fn random_requests_of_readers_for_slots_and_of_operators_match_the_reference() {
    let expected = "announced, another slot is free, granted, held, held by readers, held for an owner, no free slot, \
                    nothing to release, nothing to revoke, reader extended, reader granted, reader lost, \
                    reader refused, reader released, released, released after a while, revoked, seen free, \
                    seen held, seen with a reader, seen with readers, too late to revoke";
    compare(3, [2, 2_000], 1, kinds_of_locks, expected);
}
