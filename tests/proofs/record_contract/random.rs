//! Random requests over time: both nodes give the same answers.

use std::collections::BTreeSet;

use support::Random;
use tower_redlock::FencingToken;
use tower_redlock::protocol::Record;
use tower_redlock::protocol::message::{Op, Reply};

use crate::node_contract::random_votes;
use crate::record_contract::requests::{PLAIN, command, kind, record};
use crate::wire::{Pair, STEP};

#[test]
fn random_requests_without_intents_match_the_reference() {
    let seen = compare(1, 1, &[None]);
    assert_eq!(seen, BTreeSet::from(ALWAYS));
}

#[test]
fn random_requests_with_intents_match_the_reference() {
    let seen = compare(2, 1_763_659_999_000_003, &[Some(15)]);
    let expected = ALWAYS.into_iter().chain(["intended"]);
    assert_eq!(seen, expected.collect());
}

/// Clients that want intents beside such that do not, and fences that are at their end.
#[test]
fn random_requests_at_the_largest_numbers_match_the_reference() {
    let number = FencingToken::MAX.as_u64() - 60;
    let seen = compare(3, number, &[None, Some(5), Some(40)]);
    let expected = ALWAYS.into_iter().chain(["intended", "overflow"]);
    assert_eq!(seen, expected.collect());
}

/// Sends random requests of several owners for one key to both nodes, and lets time pass on both.
/// Returns what kinds of answers came. `intents` are the choices of how many steps intents live.
fn compare(seed: u64, first_number: u64, intents: &[Option<u32>]) -> BTreeSet<&'static str> {
    let (mut pair, mut random) = (Pair::new(), Random(seed));
    let mut seen = BTreeSet::new();
    for round in 0..4 {
        pair.forget();
        let mut last_number = first_number;
        for step in 0..400 {
            let what = format!("seed {seed}, round {round}, step {step}");
            let id = random.one_of(&[1, 2, 3, PLAIN]);
            let intent = random.one_of(intents).map(|steps| STEP * steps);
            let [acquire, confirm] = random_votes(&mut random, true, last_number, [1, 50]);
            let retention = STEP * u32::try_from(1 + random.below(19)).unwrap();
            let some_record = random.one_of(&RECORDS);
            let record = record(id, some_record);
            let op = match random.below(20) {
                0..6 => acquire,
                6..9 => confirm,
                9..11 => Op::Release,
                11 => Op::ReleaseExecuted,
                12..14 => Op::Record { record, retention },
                14 => Op::TopUp { record, retention },
                15 => Op::Look,
                16 => Op::Fetch,
                _ => {
                    pair.pass(STEP * u32::try_from(1 + random.below(6)).unwrap());
                    continue;
                }
            };
            let command = command(id, intent, op);
            let reply = pair.ask(&command, &what);
            if let Reply::Granted(number) | Reply::At(number) = reply {
                last_number = number;
            }
            seen.insert(kind(&command.op, &reply));
        }
    }
    seen
}

/// How many bytes a record has behind its head: as little as there may be, the most that is answered as a
/// whole, one more, and much.
const RECORDS: [usize; 4] = [
    1,
    Record::MAX_INLINE - Record::HEAD,
    Record::MAX_INLINE - Record::HEAD + 1,
    64 * 1024,
];

/// The answers that every run of random requests has.
const ALWAYS: [&str; 12] = [
    "granted",
    "held",
    "held for an owner",
    "at",
    "lost to confirm",
    "lost to record",
    "released",
    "nothing to release",
    "done: whole",
    "done: head",
    "whole",
    "not done",
];
