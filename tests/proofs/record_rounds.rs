//! Rounds of requests whose grants carry one number, and of those whose outcome is recorded, against independent oracles.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use support::secs;
use tower_redlock::protocol::acquire::{AcquireRound, AcquireStep, Refusal};
use tower_redlock::protocol::message::{Answer, Reply};
use tower_redlock::protocol::round::{Decided, LookRound, LookStep, Sought, VoteRound, VoteStep};
use tower_redlock::protocol::{ExecutionId, Fingerprint, Record, Shown};

use crate::round_cases::{assignments, cases, for_all, majority, orders, quorum};

/// What a node answers, or fails to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Granted(u64),
    At(u64),
    Held,
    /// Held for a request of another payload.
    HeldForOther,
    Intended,
    Lost,
    NotDone,
    /// The record of this execution; the executions from [`OTHERS`] on are of another payload.
    Done(u8),
    /// The node answers, but gives no vote.
    Overflow,
    Failed,
}

const PLAIN: [Fate; 4] = [Fate::Granted(7), Fate::Held, Fate::Overflow, Fate::Failed];

const ACQUIRED: [Fate; 8] = [
    Fate::Granted(7),
    Fate::Held,
    Fate::HeldForOther,
    Fate::Intended,
    Fate::Done(1),
    Fate::Done(2),
    Fate::Done(OTHERS),
    Fate::Failed,
];

const OTHERS: u8 = 9;

impl Fate {
    fn answer(self) -> Answer {
        Answer::Replied(match self {
            Self::Granted(number) => Reply::Granted(number),
            Self::At(number) => Reply::At(number),
            Self::Held => held_for(0),
            Self::HeldForOther => held_for(1),
            Self::Intended => Reply::Intended,
            Self::Lost => Reply::Lost,
            Self::NotDone => Reply::NotDone,
            Self::Done(execution) => done(record(execution)),
            Self::Overflow => Reply::Overflow,
            Self::Failed => return Answer::Failed,
        })
    }

    fn record(self) -> Option<u8> {
        match self {
            Self::Done(execution) => Some(execution),
            _ => None,
        }
    }
}

fn held_for(payload: u8) -> Reply {
    Reply::Held {
        expires_in: None,
        shown: Shown::new(Some(Fingerprint::from_digest([payload; 32])), None).map(Arc::new),
    }
}

pub(crate) fn done(record: Record) -> Reply {
    Reply::Done {
        record,
        expires_in: secs(1),
    }
}

fn execution(number: u8) -> ExecutionId {
    ExecutionId::from_random([number; 16])
}

pub(crate) fn record(number: u8) -> Record {
    let payload = Fingerprint::from_digest([u8::from(number >= OTHERS); 32]);
    Record::new(execution(number), payload, [number; 32], &[number])
}

fn head(number: u8) -> Record {
    let record = record(number);
    Record::from_bytes(record.as_bytes()[..Record::HEAD].into()).expect("a head")
}

fn number_of(record: &Record) -> u8 {
    record.digest()[0]
}

fn once_round(nodes: usize) -> AcquireRound {
    AcquireRound::of_execution(quorum(nodes), Fingerprint::from_digest([0; 32]))
}

// ---- Acquiring ---------------------------------------------------------------------------------

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Open,
    Confirm(u64),
    Execute(u64),
    Repair(u8),
    Replay(u8),
    OtherRequest,
    Undecided,
    Conflicting,
    Unknown,
    Contended,
    Unavailable,
}

fn verdict_of(step: &AcquireStep) -> Verdict {
    match step {
        AcquireStep::Wait => Verdict::Open,
        AcquireStep::Confirm(token) => Verdict::Confirm(*token),
        AcquireStep::Granted(token) => Verdict::Execute(*token),
        AcquireStep::Refused(Refusal::Contended(_)) => Verdict::Contended,
        AcquireStep::Refused(Refusal::Unavailable { .. }) => Verdict::Unavailable,
        AcquireStep::Repair(record) => Verdict::Repair(number_of(record)),
        AcquireStep::Decided(Decided::Recorded(record)) => Verdict::Replay(number_of(record)),
        AcquireStep::Decided(Decided::OtherRequest) => Verdict::OtherRequest,
        AcquireStep::Decided(Decided::Undecided) => Verdict::Undecided,
        AcquireStep::Decided(Decided::Conflicting) => Verdict::Conflicting,
        AcquireStep::Decided(Decided::Unknown) => Verdict::Unknown,
    }
}

/// The record with the most copies, and their number.
fn most(records: &[Option<u8>]) -> Option<(usize, u8)> {
    let mut copies = BTreeMap::new();
    for record in records.iter().flatten() {
        *copies.entry(*record).or_insert(0) += 1;
    }
    let copies = copies.into_iter();
    copies.map(|(record, copies)| (copies, record)).max()
}

/// What a minority's records come to when no more of them can be written.
fn stuck(records: &[Option<u8>], fates: &[Option<Fate>]) -> Verdict {
    let (copies, best) = most(records).expect("there is a record");
    let nodes = records.iter().zip(fates);
    let without = nodes.filter(|(record, _)| record.is_none());
    // Nodes with an intent take no record of another owner.
    let (closed, open): (Vec<_>, Vec<_>) =
        without.partition(|(_, fate)| **fate == Some(Fate::Intended));
    if best >= OTHERS {
        Verdict::OtherRequest
    } else if copies + open.len() >= majority(records.len()) {
        Verdict::Undecided
    } else if copies + open.len() + closed.len() >= majority(records.len()) {
        Verdict::Unknown
    } else {
        Verdict::Conflicting
    }
}

fn decided(copies: usize, best: u8, nodes: usize) -> Option<Verdict> {
    let other = best >= OTHERS;
    let enough = copies >= majority(nodes);
    enough.then_some(if other {
        Verdict::OtherRequest
    } else {
        Verdict::Replay(best)
    })
}

/// What follows from the answers to `ACQUIRE` so far, where all grants carry the same number.
fn verdict(told: &[Option<Fate>]) -> Verdict {
    let nodes = told.len();
    let count = |kinds: &[Fate]| {
        let among = |fate: &&Option<Fate>| fate.is_some_and(|fate| kinds.contains(&fate));
        told.iter().filter(among).count()
    };
    let silent = told.iter().filter(|fate| fate.is_none()).count();
    let granted = count(&[Fate::Granted(7)]);
    let records = told.iter().map(|fate| fate.and_then(Fate::record));
    let records: Vec<_> = records.collect();
    if let Some((copies, best)) = most(&records) {
        return match decided(copies, best, nodes) {
            Some(verdict) => verdict,
            None if silent > 0 => Verdict::Open,
            None if copies + granted >= majority(nodes) => Verdict::Repair(best),
            None => stuck(&records, told),
        };
    }
    let (intended, other) = (count(&[Fate::Intended]), count(&[Fate::HeldForOther]));
    let reached = reached(told);
    let possible = granted + silent >= majority(nodes);
    let known = reached >= majority(nodes) || reached + silent < majority(nodes);
    if granted >= majority(nodes) {
        Verdict::Execute(7)
    } else if possible || !known {
        Verdict::Open
    } else if nodes - intended < majority(nodes) {
        Verdict::Unknown
    } else if other >= majority(nodes) {
        Verdict::OtherRequest
    } else if reached >= majority(nodes) {
        Verdict::Contended
    } else {
        Verdict::Unavailable
    }
}

/// How many nodes have voted.
fn reached(told: &[Option<Fate>]) -> usize {
    let is_no_vote = |fate: &Fate| [Fate::Overflow, Fate::Failed].contains(fate);
    told.iter()
        .flatten()
        .filter(|fate| !is_no_vote(fate))
        .count()
}

/// Drives one round and holds every step against the rule, so that a decision can be neither wrong nor early nor late.
/// Ends with what it asks to repair.
fn check_acquire(mut round: AcquireRound, fates: &[Fate], order: &[usize]) -> Option<AcquireRound> {
    let mut told = vec![None; fates.len()];
    for node in order {
        let step = round.on_acquire(*node, &fates[*node].answer());
        told[*node] = Some(fates[*node]);
        let context = || format!("{fates:?} in order {order:?} at node {node}: {step:?}");
        assert_eq!(verdict_of(&step), verdict(&told), "{}", context());
        let silent = told.iter().filter(|fate| fate.is_none()).count();
        match &step {
            AcquireStep::Wait => {
                assert_eq!(round.silent().len(), silent, "{}", context());
                continue;
            }
            AcquireStep::Refused(Refusal::Contended(contention)) => {
                let granted = told.contains(&Some(Fate::Granted(7)));
                assert_eq!(contention.is_split, granted, "{}", context());
            }
            AcquireStep::Refused(Refusal::Unavailable { voted, .. }) => {
                assert_eq!(voted.len(), reached(&told), "{}", context());
            }
            AcquireStep::Repair(_) => {
                let granted = (0..fates.len()).filter(|node| fates[*node] == Fate::Granted(7));
                assert!(round.repairers().iter().eq(granted), "{}", context());
                return Some(round);
            }
            _ => {}
        }
        return None;
    }
    panic!("{fates:?} in order {order:?} never ends");
}

// Rules: lock.refusal
#[test]
fn acquire_round_of_up_to_five_nodes_is_decided_as_early_as_possible() {
    for_all(&PLAIN, |fates, order| {
        let mut round = AcquireRound::new(quorum(fates.len()));
        check_acquire(round.clone(), fates, order);
        let mut decided = Verdict::Open;
        for node in order {
            let found = verdict_of(&round.on_acquire(*node, &fates[*node].answer()));
            let is_held = fates[*node] == Fate::Held;
            assert_eq!(round.refused().contains(*node), is_held);
            if decided == Verdict::Open {
                decided = found;
            }
            // A late answer cannot change a decision.
            let is_same = [decided, Verdict::Open].contains(&found);
            assert!(is_same, "{fates:?} in order {order:?}: {found:?}");
        }
    });
}

#[test]
fn once_round_of_up_to_four_nodes_is_decided_as_early_as_possible() {
    for nodes in 1..=4 {
        let orders = orders(nodes);
        for fates in assignments(&ACQUIRED, nodes) {
            for order in &orders {
                check_acquire(once_round(nodes), &fates, order);
            }
        }
    }
}

/// Before a majority has voted, the nodes that have not are late and not silent; and a silent node may have the copy that
/// makes a majority of a record.
#[test]
fn a_node_breaks_a_tie_only_where_a_majority_voted_and_no_record_was_seen() {
    let (granted, held, done) = (Fate::Granted(1), Fate::Held, Fate::Done(1));
    for (answers, breaks) in [
        (&[granted, held][..], false),
        (&[granted, granted], false),
        (&[granted, held, Fate::Failed], false),
        (&[granted, held, held], true),
        (&[granted, granted, held], true),
        (&[granted, granted, held, held], true),
        (&[granted, granted, held, done], false),
    ] {
        let mut round = once_round(5);
        for (node, fate) in answers.iter().enumerate() {
            round.on_acquire(node, &fate.answer());
        }
        assert_eq!(round.tie_breakers().contains(4), breaks, "{answers:?}");
    }
}

#[test]
fn repair_ends_with_the_records_of_the_nodes_at_that_time() {
    let [one, other, of_others] = [1, 2, OTHERS].map(Fate::Done);
    let answers = [one, other, of_others, Fate::Lost, Fate::Failed];
    for fates in assignments(&ACQUIRED, 3) {
        let Some(round) = check_acquire(once_round(3), &fates, &[0, 1, 2]) else {
            continue;
        };
        let repairers: Vec<usize> = round.repairers().iter().collect();
        for answers in assignments(&answers, repairers.len()) {
            for order in orders(repairers.len()) {
                check_repair(round.clone(), &fates, &repairers, &answers, &order);
            }
        }
    }
}

fn check_repair(
    mut round: AcquireRound,
    fates: &[Fate],
    repairers: &[usize],
    answers: &[Fate],
    order: &[usize],
) {
    let mut records: Vec<Option<u8>> = fates.iter().map(|fate| fate.record()).collect();
    let acquired: Vec<Option<Fate>> = fates.iter().copied().map(Some).collect();
    for (told, place) in order.iter().enumerate() {
        let step = round.on_record(repairers[*place], &answers[*place].answer());
        records[repairers[*place]] = answers[*place].record();
        let (copies, best) = most(&records).expect("there is a record");
        let last = told + 1 == order.len();
        let expected = match decided(copies, best, fates.len()) {
            Some(verdict) => verdict,
            None if last => stuck(&records, &acquired),
            None => Verdict::Open,
        };
        let context = format!("{fates:?}, then {answers:?} of {repairers:?} in order {order:?}");
        assert_eq!(verdict_of(&step), expected, "{context}");
        if expected != Verdict::Open {
            return;
        }
    }
}

#[test]
fn record_found_by_an_earlier_second_phase_prevents_an_execution() {
    let mut round = once_round(5);
    round.on_acquire(0, &Fate::Granted(1).answer());
    round.on_acquire(1, &Fate::Granted(2).answer());
    let step = round.on_acquire(2, &Fate::Granted(1).answer());
    assert_eq!(step, AcquireStep::Confirm(2));
    round.on_confirm(0, &Fate::At(5).answer());
    round.on_confirm(2, &Fate::At(5).answer());
    let step = round.on_confirm(3, &Answer::Failed);
    assert_eq!(step, AcquireStep::Confirm(5));
    let step = round.on_other(4, &Fate::Done(1).answer());
    assert_eq!(step, AcquireStep::Wait);
    for node in 0..3 {
        let step = round.on_confirm(node, &Fate::At(5).answer());
        assert_eq!(step, AcquireStep::Wait);
    }
    assert_eq!(round.silent().iter().collect::<Vec<_>>(), [3, 4]);
    round.on_acquire(3, &Answer::Failed);
    let step = round.on_acquire(4, &Answer::Failed);
    assert_eq!(step, AcquireStep::Repair(record(1)));
}

#[test]
fn whole_record_is_preferred_to_its_head() {
    for heads in assignments(&[false, true], 2) {
        let mut round = once_round(5);
        for (node, only_head) in heads.iter().enumerate() {
            let record = if *only_head { head(1) } else { record(1) };
            round.on_acquire(node, &Answer::Replied(done(record)));
        }
        for node in [2, 3] {
            round.on_acquire(node, &Fate::Granted(7).answer());
        }
        let step = round.on_acquire(4, &Answer::Failed);
        let whole = heads.contains(&false);
        let expected = if whole { record(1) } else { head(1) };
        assert_eq!(step, AcquireStep::Repair(expected), "{heads:?}");
    }
}

proptest! {
    #![proptest_config(cases(2_000))]

    #[test]
    fn once_round_decides_answers_of_five_nodes_by_the_rule(
        fates in vec(select(&ACQUIRED), 5),
        order in Just((0..5).collect::<Vec<usize>>()).prop_shuffle(),
        answers in vec(select(&[Fate::Done(1), Fate::Done(2), Fate::Lost, Fate::Failed]), 5),
    ) {
        if let Some(round) = check_acquire(once_round(5), &fates, &order) {
            let repairers: Vec<usize> = round.repairers().iter().collect();
            let places: Vec<usize> = (0..repairers.len()).rev().collect();
            check_repair(round, &fates, &repairers, &answers, &places);
        }
    }
}

// ---- Recording and looking ---------------------------------------------------------------------

#[test]
fn record_round_is_decided_by_the_majority_as_early_as_possible() {
    let kinds = [Fate::Done(1), Fate::Done(2), Fate::Lost, Fate::Failed];
    for_all(&kinds, check_recording);
}

fn check_recording(fates: &[Fate], order: &[usize]) {
    let mut round = VoteRound::new(quorum(fates.len()), Sought::Record(execution(1)));
    for (told, node) in (1..).zip(order) {
        let answer = match fates[*node] {
            // A node that keeps one answers its head.
            Fate::Done(number) => Answer::Replied(done(head(number))),
            fate => fate.answer(),
        };
        let step = round.on_answer(*node, &answer);
        let own = |node: &&usize| fates[**node] == Fate::Done(1);
        let recorded = order[..told].iter().filter(own).count();
        let expected = if recorded >= majority(fates.len()) {
            VoteStep::Agreed
        } else if recorded + fates.len() - told < majority(fates.len()) {
            VoteStep::Missed { reached: recorded }
        } else {
            VoteStep::Wait
        };
        assert_eq!(step, expected, "{fates:?} in order {order:?} at {node}");
        assert_eq!(round.silent().len(), fates.len() - told);
        assert_eq!(round.without().len(), fates.len() - recorded);
    }
}

#[test]
fn look_round_tells_records_of_a_majority_a_minority_and_none_apart() {
    let kinds = [Fate::Done(1), Fate::Done(2), Fate::NotDone, Fate::Failed];
    for_all(&kinds, check_look);
}

fn check_look(fates: &[Fate], order: &[usize]) {
    let mut round = LookRound::new(quorum(fates.len()), execution(1));
    let mut records = vec![None; fates.len()];
    for (told, node) in (1..).zip(order) {
        let step = round.on_look(*node, &fates[*node].answer());
        records[*node] = fates[*node].record();
        let expected = match most(&records) {
            Some((copies, best)) if copies >= majority(fates.len()) => {
                LookStep::Found(record(best))
            }
            _ if told < fates.len() => LookStep::Wait,
            Some((copies, best)) => {
                let own = records.iter().filter(|record| **record == Some(1)).count();
                // Among equals, the own one.
                let leader = if own == copies { 1 } else { best };
                LookStep::Minority(record(leader))
            }
            None => LookStep::Nothing,
        };
        assert_eq!(step, expected, "{fates:?} in order {order:?} at {node}");
        assert_eq!(round.silent().len(), fates.len() - told);
    }
}

#[test]
fn second_answer_of_a_node_is_not_counted() {
    let mut recording = VoteRound::new(quorum(3), Sought::Record(execution(1)));
    let mut look = LookRound::new(quorum(3), execution(1));
    let mut acquiring = once_round(3);
    for _ in 0..2 {
        let (done, granted) = (Fate::Done(1).answer(), Fate::Granted(7).answer());
        assert_eq!(recording.on_answer(0, &done), VoteStep::Wait);
        assert_eq!(look.on_look(0, &done), LookStep::Wait);
        assert_eq!(acquiring.on_acquire(0, &granted), AcquireStep::Wait);
    }
    for _ in 0..2 {
        let step = acquiring.on_acquire(1, &Fate::Done(1).answer());
        assert_eq!(step, AcquireStep::Wait);
    }
    let before = acquiring.clone();
    for answer in [Fate::Granted(9), Fate::Held, Fate::Failed] {
        let step = acquiring.on_acquire(0, &answer.answer());
        assert_eq!((step, &acquiring), (AcquireStep::Wait, &before));
    }
}
