//! The protocol as pure data: what clients conclude from answers, against independent oracles, and
//! what they may rely on when messages are lost, late and doubled.

#![allow(
    clippy::needless_pass_by_value,
    reason = "an answer reads best where it is given"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::round::{
    AcquireRound, AcquireStep, Answer, ExtendRound, ExtendStep, Refusal, RefusalKind, ReleaseRound,
    ReleaseStep,
};
use tower_redlock::protocol::{
    KeyError, KeyNames, LockKey, LockKeys, MAX_CLEAR_KEY, Namespace, OwnerToken, Quorum, Retry,
    Store, validity,
};

const fn granted(number: u64) -> Answer {
    Answer::Replied(Reply::Granted(number))
}

const fn at(number: u64) -> Answer {
    Answer::Replied(Reply::At(number))
}

const HELD: Answer = Answer::Replied(Reply::Held {
    expires_in: None,
    fingerprint: None,
});
const LOST: Answer = Answer::Replied(Reply::Lost);
const AMNESIA: Answer = Answer::Replied(Reply::Amnesia);

fn quorum(nodes: usize) -> Quorum {
    Quorum::new(nodes).expect("at least one node")
}

/// Failures are printed, shrunk; there is no file of them to keep.
fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// More than half; spelled differently from the code under test.
fn majority(nodes: usize) -> usize {
    (1..=nodes).find(|group| 2 * group > nodes).expect("one is")
}

/// All ways to give each of `nodes` nodes one of `kinds`.
fn assignments<T: Clone>(kinds: &[T], nodes: usize) -> Vec<Vec<T>> {
    let mut all = vec![Vec::new()];
    for _ in 0..nodes {
        all = all
            .iter()
            .flat_map(|start| {
                kinds
                    .iter()
                    .map(move |kind| [start.as_slice(), std::slice::from_ref(kind)].concat())
            })
            .collect();
    }
    all
}

/// All orders of up to four nodes; of more, the rotations and the reverse.
fn orders(nodes: usize) -> Vec<Vec<usize>> {
    let straight: Vec<usize> = (0..nodes).collect();
    if nodes <= 4 {
        return assignments(&straight, nodes)
            .into_iter()
            .filter(|order| order.iter().collect::<BTreeSet<_>>().len() == nodes)
            .collect();
    }
    let rotations = (0..nodes).map(|by| {
        let mut order = straight.clone();
        order.rotate_left(by);
        order
    });
    let reverse = straight.iter().rev().copied().collect();
    rotations.chain([reverse]).collect()
}

// ---- Acquiring when all grants carry the same number -------------------------------------------

/// What becomes of one `ACQUIRE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Granted,
    Held,
    /// No answer, until patience is over.
    Silent,
    /// The node answers, but gives no vote.
    Refused,
    /// The connection breaks.
    Error,
}

const FATES: [Fate; 5] = [
    Fate::Granted,
    Fate::Held,
    Fate::Silent,
    Fate::Refused,
    Fate::Error,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Open,
    Granted,
    Contended,
    Unavailable,
}

/// The rule for refusals, from the numbers of nodes alone: success must be impossible, *and*
/// either a majority has spoken or none can.
fn verdict(nodes: usize, granted: usize, reached: usize, silent: usize) -> Verdict {
    let majority = majority(nodes);
    if granted >= majority {
        Verdict::Granted
    } else if granted + silent < majority && reached >= majority {
        Verdict::Contended
    } else if reached + silent < majority {
        Verdict::Unavailable
    } else {
        Verdict::Open
    }
}

fn verdict_of(step: AcquireStep) -> Verdict {
    match step {
        AcquireStep::Wait => Verdict::Open,
        AcquireStep::Granted(_) => Verdict::Granted,
        AcquireStep::Confirm(_) => panic!("equal numbers need no second phase"),
        AcquireStep::Refused(Refusal { kind, .. }) => match kind {
            RefusalKind::Contended { .. } => Verdict::Contended,
            RefusalKind::Unavailable => Verdict::Unavailable,
        },
    }
}

/// Drives one round and holds every step, not just the outcome, against the rule: so a decision
/// can be neither wrong nor early nor late.
fn check_split(fates: &[Fate], order: &[usize]) {
    let nodes = fates.len();
    let mut round = AcquireRound::new(quorum(nodes));
    let (mut granted, mut reached, mut silent) = (0, 0, nodes);
    let mut decided = Verdict::Open;
    let (late, prompt): (Vec<usize>, Vec<usize>) =
        order.iter().partition(|node| fates[**node] == Fate::Silent);
    for node in prompt.into_iter().chain(late) {
        let answer = match fates[node] {
            Fate::Granted => self::granted(7),
            Fate::Held => HELD,
            Fate::Refused => Answer::Replied(Reply::Overflow),
            Fate::Silent | Fate::Error => Answer::Failed,
        };
        granted += usize::from(fates[node] == Fate::Granted);
        reached += usize::from(matches!(fates[node], Fate::Granted | Fate::Held));
        silent -= 1;
        let step = round.on_acquire(node, &answer);
        let context = || format!("{fates:?} in order {order:?} at node {node}: {step:?}");
        let found = verdict_of(step);
        assert_eq!(
            round.is_refused_by(node),
            fates[node] == Fate::Held,
            "{}",
            context()
        );
        assert_eq!(round.silent().count(), silent, "{}", context());
        if decided != Verdict::Open {
            // Whoever is late cannot turn a decision round.
            assert!([decided, Verdict::Open].contains(&found), "{}", context());
            continue;
        }
        assert_eq!(
            found,
            verdict(nodes, granted, reached, silent),
            "{}",
            context()
        );
        decided = found;
        match step {
            AcquireStep::Granted(token) => assert_eq!(token, 7),
            AcquireStep::Refused(refusal) => {
                assert_eq!(refusal.is_split, granted > 0, "{}", context());
                assert_eq!(refusal.reached, reached, "{}", context());
            }
            AcquireStep::Wait | AcquireStep::Confirm(_) => {}
        }
    }
    assert_ne!(
        decided,
        Verdict::Open,
        "{fates:?} in order {order:?} never ends"
    );
}

#[test]
fn acquire_round_of_up_to_five_nodes_is_decided_as_early_as_possible() {
    for nodes in 1..=5 {
        let orders = orders(nodes);
        for fates in assignments(&FATES, nodes) {
            for order in &orders {
                check_split(&fates, order);
            }
        }
    }
}

#[test]
fn one_held_node_among_failed_ones_is_unavailable() {
    let mut round = AcquireRound::new(quorum(3));
    assert_eq!(round.on_acquire(0, &HELD), AcquireStep::Wait);
    // Success is still possible here, and after the next answer it is not; but what is known then
    // is one node's word.
    assert_eq!(round.on_acquire(1, &Answer::Failed), AcquireStep::Wait);
    let step = round.on_acquire(2, &Answer::Failed);
    assert_eq!(verdict_of(step), Verdict::Unavailable);
}

#[test]
fn second_answer_of_a_node_is_not_a_second_vote() {
    let mut round = AcquireRound::new(quorum(3));
    round.on_acquire(0, &granted(7));
    let before = round.clone();
    for answer in [granted(7), granted(9), HELD, Answer::Failed] {
        assert_eq!(round.on_acquire(0, &answer), AcquireStep::Wait);
        assert_eq!(round, before);
    }
}

proptest! {
    #![proptest_config(cases(500))]

    /// A refused caller that waits wants to know when a majority is free again at the earliest.
    #[test]
    fn refusal_reports_when_enough_holders_expire(
        expiries in vec(proptest::option::weighted(0.8, 0_u64..20), 1..=5),
        failed in 0_usize..=4,
    ) {
        let nodes = expiries.len() + failed.min(5 - expiries.len());
        let mut round = AcquireRound::new(quorum(nodes));
        let mut last = AcquireStep::Wait;
        for node in expiries.len()..nodes {
            last = round.on_acquire(node, &Answer::Failed);
        }
        let mut known = Vec::new();
        for (node, expiry) in expiries.iter().enumerate() {
            if last != AcquireStep::Wait {
                break;
            }
            let expires_in = expiry.map(Duration::from_millis);
            known.push(expires_in);
            last = round.on_acquire(node, &Answer::Replied(Reply::Held { expires_in, fingerprint: None }));
        }
        let AcquireStep::Refused(Refusal { kind: RefusalKind::Contended { expires_in }, .. }) = last
        else {
            return Ok(());
        };
        let free_at = |time: Duration| {
            let held_then = known.iter().filter(|left| left.is_none_or(|left| left > time)).count();
            nodes - held_then >= majority(nodes)
        };
        let expected = known.iter().copied().flatten().filter(|time| free_at(*time)).min();
        prop_assert_eq!(expires_in, expected);
    }
}

// ---- Acquiring when the numbers differ ---------------------------------------------------------

/// A round of five nodes whose first three granted 5, 6 and 7; node 3 said held, node 4 nothing.
fn unequal() -> AcquireRound {
    let mut round = AcquireRound::new(quorum(5));
    assert_eq!(round.on_acquire(3, &HELD), AcquireStep::Wait);
    assert_eq!(round.on_acquire(0, &granted(5)), AcquireStep::Wait);
    assert_eq!(round.on_acquire(2, &granted(7)), AcquireStep::Wait);
    assert_eq!(round.on_acquire(1, &granted(6)), AcquireStep::Confirm(7));
    round
}

fn asked(round: &AcquireRound) -> Vec<usize> {
    round.unconfirmed().collect()
}

#[test]
fn second_phase_asks_silent_nodes_and_those_with_other_numbers() {
    let round = unequal();
    assert_eq!(round.step(), 1);
    assert_eq!(asked(&round), [0, 1, 4]);
}

#[test]
fn second_phase_does_not_ask_a_failed_node() {
    let mut round = AcquireRound::new(quorum(3));
    round.on_acquire(0, &Answer::Failed);
    round.on_acquire(1, &granted(1));
    assert_eq!(round.on_acquire(2, &granted(2)), AcquireStep::Confirm(2));
    assert_eq!(asked(&round), [1]);
}

#[test]
fn token_needs_a_majority_of_exact_answers_of_both_phases() {
    let mut round = unequal();
    assert_eq!(round.on_confirm(0, 1, &at(7)), AcquireStep::Wait);
    assert_eq!(round.on_confirm(4, 1, &at(7)), AcquireStep::Granted(7));
}

#[test]
fn higher_number_is_not_counted_and_becomes_the_next_target() {
    let mut round = unequal();
    assert_eq!(round.on_confirm(0, 1, &at(7)), AcquireStep::Wait);
    // Counting "at least seven" would be a token here.
    assert_eq!(round.on_confirm(1, 1, &at(9)), AcquireStep::Wait);
    assert_eq!(round.on_confirm(4, 1, &at(8)), AcquireStep::Confirm(9));
    assert_eq!(round.step(), 2);
    // Also those that acknowledged the old target.
    assert_eq!(asked(&round), [0, 1, 2, 4]);
}

#[test]
fn answers_to_an_earlier_second_phase_are_ignored() {
    let mut round = unequal();
    assert_eq!(round.on_confirm(0, 1, &at(8)), AcquireStep::Wait);
    assert_eq!(round.on_confirm(1, 1, &at(8)), AcquireStep::Confirm(8));
    assert_eq!(asked(&round), [0, 1, 2, 4]);
    let before = round.clone();
    for answer in [at(8), at(9), LOST, Answer::Failed] {
        assert_eq!(round.on_confirm(0, 1, &answer), AcquireStep::Wait);
        assert_eq!(round, before);
    }
    round.on_confirm(0, 2, &at(8));
    round.on_confirm(1, 2, &at(8));
    assert_eq!(round.on_confirm(2, 2, &at(8)), AcquireStep::Granted(8));
}

#[test]
fn acquire_round_has_no_fourth_second_phase() {
    let mut round = AcquireRound::new(quorum(2));
    round.on_acquire(0, &granted(1));
    assert_eq!(round.on_acquire(1, &granted(2)), AcquireStep::Confirm(2));
    assert_eq!(round.on_confirm(0, 1, &at(3)), AcquireStep::Confirm(3));
    round.on_confirm(0, 2, &at(3));
    assert_eq!(round.on_confirm(1, 2, &at(4)), AcquireStep::Confirm(4));
    round.on_confirm(1, 3, &at(4));
    let step = round.on_confirm(0, 3, &at(5));
    assert_eq!(verdict_of(step), Verdict::Contended);
    assert_eq!(round.step(), 3);
}

#[test]
fn late_answer_with_the_target_counts_without_a_confirmation() {
    let mut round = unequal();
    assert_eq!(round.on_acquire(4, &granted(7)), AcquireStep::Wait);
    assert_eq!(round.on_confirm(1, 1, &at(7)), AcquireStep::Granted(7));
}

#[test]
fn late_answer_and_confirmation_of_a_node_count_once() {
    let mut round = unequal();
    assert_eq!(round.on_acquire(4, &granted(7)), AcquireStep::Wait);
    assert_eq!(round.on_confirm(4, 1, &at(7)), AcquireStep::Wait);
}

#[test]
fn late_answer_with_the_target_is_not_awaited_as_a_second_node() {
    let mut round = unequal();
    assert_eq!(round.on_acquire(4, &granted(7)), AcquireStep::Wait);
    assert_eq!(round.on_confirm(0, 1, &LOST), AcquireStep::Wait);
    // Nodes 2 and 4 agree, and what node 4 will say to the confirmation cannot make them three.
    let step = round.on_confirm(1, 1, &LOST);
    assert_eq!(verdict_of(step), Verdict::Contended);
}

#[test]
fn late_answer_with_a_higher_number_raises_the_next_target() {
    let mut round = unequal();
    assert_eq!(round.on_acquire(4, &granted(9)), AcquireStep::Wait);
    round.on_confirm(4, 1, &at(9));
    // Two exact ones, of nodes 2 and 0, and no third one in sight.
    assert_eq!(round.on_confirm(0, 1, &at(7)), AcquireStep::Wait);
    assert_eq!(
        round.on_confirm(1, 1, &Answer::Failed),
        AcquireStep::Confirm(9)
    );
    assert_eq!(asked(&round), [0, 1, 2]);
}

#[test]
fn keys_lost_while_confirming_end_the_round_without_a_majority() {
    let mut round = unequal();
    assert_eq!(round.on_confirm(0, 1, &LOST), AcquireStep::Wait);
    let AcquireStep::Refused(refusal) = round.on_confirm(1, 1, &LOST) else {
        panic!("only nodes 2 and 4 are left");
    };
    assert!(matches!(refusal.kind, RefusalKind::Contended { .. }));
    assert!(refusal.is_split);
    assert_eq!(refusal.reached, 4);
}

/// A request that is under way.
#[derive(Debug, Clone, Copy)]
struct Pending {
    node: usize,
    /// 0 is the `ACQUIRE`.
    step: u8,
    target: u64,
}

/// What the test itself knows of a round: the answers, and nothing of how they are judged.
struct Journal {
    nodes: usize,
    acquired: BTreeMap<usize, Answer>,
    /// Of the current second phase only.
    confirmed: BTreeMap<usize, Answer>,
    /// Asked in the current second phase.
    asked: Vec<usize>,
    /// Lost their key in any phase.
    lost: BTreeSet<usize>,
    step: u8,
    target: u64,
}

impl Journal {
    fn numbers(&self, of: impl Fn(&Answer) -> Option<u64>) -> Vec<(usize, u64)> {
        let answers = self.acquired.iter().chain(&self.confirmed);
        answers
            .filter_map(|(node, answer)| Some((*node, of(answer)?)))
            .collect()
    }

    /// How many nodes answered exactly `token`, to the `ACQUIRE` or the current `CONFIRM`.
    fn exact(&self, token: u64) -> usize {
        let nodes: BTreeSet<usize> = self
            .numbers(|answer| number_of(answer.clone()))
            .into_iter()
            // A key that is known to be gone vouches for nothing.
            .filter(|(node, number)| *number == token && !self.lost.contains(node))
            .map(|(node, _)| node)
            .collect();
        nodes.len()
    }

    fn has_granted(&self, node: usize) -> bool {
        matches!(
            self.acquired.get(&node),
            Some(Answer::Replied(Reply::Granted(_)))
        )
    }

    /// Whether an `ACQUIRE` of the node may still turn out to have been granted.
    fn may_hold(&self, node: usize) -> bool {
        !self.acquired.contains_key(&node) || self.has_granted(node)
    }

    /// How many nodes may yet answer exactly the target that have not.
    fn outstanding(&self) -> usize {
        self.asked
            .iter()
            .filter(|node| !self.confirmed.contains_key(node) && self.may_hold(**node))
            .filter(|node| self.acquired.get(node) != Some(&granted(self.target)))
            .count()
    }

    /// Whether the next second phase, with a higher target, could reach a majority: `with_lost` if
    /// keys that were lost could come back, which a round need not believe.
    fn may_go_on(&self, highest: u64, with_lost: bool) -> bool {
        let able = (0..self.nodes).filter(|node| {
            self.may_hold(*node)
                && (with_lost || !self.lost.contains(node))
                && !matches!(
                    self.confirmed.get(node).cloned(),
                    Some(Answer::Failed | AMNESIA)
                )
        });
        self.step < 3 && highest > self.target && able.count() >= majority(self.nodes)
    }
}

fn number_of(answer: Answer) -> Option<u64> {
    match answer {
        Answer::Replied(Reply::Granted(number) | Reply::At(number)) => Some(number),
        Answer::Replied(_) | Answer::Failed => None,
    }
}

/// An answer drawn by `dice`. A node raises its fence to the target before it answers, so there
/// are no confirmations of less.
fn answer_to(request: Pending, dice: u16) -> Answer {
    let small = u64::from(dice / 16 % 4);
    match (request.step, dice % 16) {
        (0, 0..=10) => granted(small),
        (0, 11..=13) => HELD,
        (0, 14) => Answer::Replied(Reply::Overflow),
        (1.., 0..=8) => at(request.target),
        (1.., 9..=11) => at(request.target + small),
        (1.., 12..=13) => LOST,
        _ if dice & 64 == 0 => AMNESIA,
        _ => Answer::Failed,
    }
}

/// Answers all requests of one round, in the order and the way that `dice` says, and holds each
/// step against the journal. Returns the token, if there is one.
fn check_unequal(nodes: usize, dice: &[(u16, u16)]) -> Result<Option<u64>, TestCaseError> {
    let mut round = AcquireRound::new(quorum(nodes));
    let mut journal = Journal {
        nodes,
        acquired: BTreeMap::new(),
        confirmed: BTreeMap::new(),
        asked: Vec::new(),
        lost: BTreeSet::new(),
        step: 0,
        target: 0,
    };
    let request = |node| Pending {
        node,
        step: 0,
        target: 0,
    };
    let mut pending: Vec<Pending> = (0..nodes).map(request).collect();
    let mut highest = 0;
    let mut dice = dice.iter().copied().chain(std::iter::repeat((0, 0)));
    while !pending.is_empty() {
        let (which, what) = dice.next().expect("endless");
        let request = pending.swap_remove(usize::from(which) % pending.len());
        let answer = answer_to(request, what);
        let before = round.clone();
        let step = if request.step == 0 {
            round.on_acquire(request.node, &answer.clone())
        } else {
            round.on_confirm(request.node, request.step, &answer.clone())
        };
        if request.step == 0 {
            journal.acquired.insert(request.node, answer.clone());
        } else if request.step == journal.step {
            journal.confirmed.insert(request.node, answer.clone());
            if answer == LOST {
                journal.lost.insert(request.node);
            }
        } else {
            prop_assert_eq!(step, AcquireStep::Wait);
            prop_assert_eq!(&round, &before, "an answer to an earlier phase was counted");
            continue;
        }
        highest = number_of(answer).map_or(highest, |number| highest.max(number));
        let enough = majority(nodes);
        let grants = (0..nodes).filter(|node| journal.has_granted(*node)).count();
        match step {
            AcquireStep::Wait => {
                if journal.step == 0 {
                    prop_assert!(grants < enough, "a majority granted");
                } else {
                    prop_assert!(journal.exact(journal.target) < enough, "that is a token");
                    let possible = journal.exact(journal.target) + journal.outstanding();
                    prop_assert!(possible >= enough, "nothing to wait for");
                }
                let awaited: Vec<usize> = round.silent().collect();
                prop_assert!(!awaited.is_empty(), "waits for nobody");
                for node in awaited {
                    let outstanding = pending.iter().any(|request| {
                        request.node == node && [0, journal.step].contains(&request.step)
                    });
                    prop_assert!(outstanding, "waits for node {} in vain", node);
                }
            }
            AcquireStep::Granted(token) => {
                prop_assert!(journal.exact(token) >= enough, "not exactly {}", token);
                prop_assert!(journal.step == 0 || token == journal.target);
                return Ok(Some(token));
            }
            AcquireStep::Confirm(target) => {
                prop_assert!(grants >= enough);
                prop_assert!(journal.step == 0 || journal.may_go_on(highest, true));
                let possible = journal.exact(journal.target) + journal.outstanding();
                prop_assert!(
                    journal.step == 0 || possible < enough,
                    "the target was in reach"
                );
                prop_assert_eq!(target, highest);
                journal.step += 1;
                prop_assert_eq!(round.step(), journal.step);
                prop_assert!(journal.step <= 3);
                journal.target = target;
                journal.confirmed.clear();
                journal.asked = asked(&round);
                for node in 0..nodes {
                    let other = journal.may_hold(node)
                        && journal.acquired.get(&node) != Some(&granted(target));
                    let is_asked = journal.asked.contains(&node);
                    // Asking where the key was lost is vain, but not wrong.
                    prop_assert!(is_asked == other || !is_asked && journal.lost.contains(&node));
                }
                let (nodes, step) = (journal.asked.iter(), journal.step);
                pending.extend(nodes.map(|node| Pending {
                    node: *node,
                    step,
                    target,
                }));
            }
            AcquireStep::Refused(refusal) => {
                let contended = matches!(refusal.kind, RefusalKind::Contended { .. });
                prop_assert_eq!(refusal.is_split, grants > 0);
                prop_assert_eq!(contended, refusal.reached >= enough);
                if journal.step == 0 {
                    prop_assert!(
                        grants + nodes - journal.acquired.len() < enough,
                        "too early"
                    );
                } else {
                    let possible = journal.exact(journal.target) + journal.outstanding();
                    prop_assert!(possible < enough, "the target was in reach");
                    prop_assert!(
                        !journal.may_go_on(highest, false),
                        "a higher target was in reach"
                    );
                    prop_assert!(contended, "a majority had granted");
                }
                return Ok(None);
            }
        }
    }
    Err(TestCaseError::fail(
        "all nodes answered and nothing was decided",
    ))
}

proptest! {
    #![proptest_config(cases(4_000))]

    #[test]
    fn round_with_all_answers_ends_and_its_token_was_answered_by_a_majority(
        nodes in 1_usize..=5,
        dice in vec(any::<(u16, u16)>(), 20),
    ) {
        check_unequal(nodes, &dice)?;
    }
}

/// A lost key does not come back for its owner, whatever number the node once granted.
#[test]
fn node_that_lost_the_key_after_granting_the_target_is_not_asked_again() {
    let mut round = AcquireRound::new(quorum(5));
    round.on_acquire(1, &HELD);
    round.on_acquire(4, &granted(1));
    round.on_acquire(0, &granted(2));
    assert_eq!(round.on_acquire(3, &granted(1)), AcquireStep::Confirm(2));
    round.on_acquire(2, &granted(3));
    assert_eq!(round.on_confirm(2, 1, &LOST), AcquireStep::Wait);
    round.on_confirm(3, 1, &at(2));
    assert_eq!(round.on_confirm(4, 1, &at(3)), AcquireStep::Confirm(3));
    assert_eq!(asked(&round), [0, 3, 4]);
    for (node, answer) in [(0, at(5)), (4, at(3)), (3, at(6))] {
        round.on_confirm(node, 2, &answer);
        assert!(!asked(&round).contains(&2));
    }
}

/// No node that follows the protocol confirms less than it was asked to; the round must not wait
/// for ever all the same.
#[test]
fn confirm_below_the_target_does_not_leave_the_round_waiting() {
    let mut round = AcquireRound::new(quorum(2));
    round.on_acquire(0, &granted(1));
    assert_eq!(round.on_acquire(1, &granted(2)), AcquireStep::Confirm(2));
    let step = round.on_confirm(0, 1, &at(1));
    assert!(step != AcquireStep::Wait || round.silent().count() > 0);
}

// ---- Several clients ---------------------------------------------------------------------------

const TTL: Duration = Duration::from_millis(1_000);
const RETENTION: Duration = Duration::from_secs(3_600);

/// What a request belongs to; answers are counted nowhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Acquire,
    Confirm(u8),
    Extend(usize),
    Release,
}

#[derive(Debug, Clone)]
struct Request {
    client: usize,
    attempt: usize,
    purpose: Purpose,
    node: usize,
    command: Command,
}

#[derive(Debug, Clone)]
struct Response {
    client: usize,
    attempt: usize,
    purpose: Purpose,
    node: usize,
    reply: Reply,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Acquiring(AcquireRound),
    Holding {
        token: u64,
        until: Duration,
        extension: Option<Extension>,
    },
}

#[derive(Debug)]
struct Extension {
    round: ExtendRound,
    sent: Duration,
    /// Tells it from older ones, whose answers vouch for an older expiry.
    number: usize,
}

/// One client, in its current attempt.
#[derive(Debug)]
struct Client {
    attempt: usize,
    /// Index of its set of keys.
    keys: usize,
    names: Arc<[KeyNames]>,
    owner: OwnerToken,
    /// When it sent its first request, on the clock and in the order of events.
    started: Duration,
    began: usize,
    phase: Phase,
}

/// An acquisition that got a token.
#[derive(Debug, Clone, Copy)]
struct Completed {
    keys: usize,
    token: u64,
    began: usize,
    completed: usize,
}

/// What a schedule came across; to know that the schedules are worth something.
#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    tokens: usize,
    second_phases: usize,
    third_phases: usize,
    extensions: usize,
    losses: usize,
    too_late: usize,
}

/// Clients and nodes, and everything that is under way between them.
struct World {
    sets: Vec<LockKeys>,
    nodes: Vec<Store>,
    clients: Vec<Client>,
    requests: Vec<Request>,
    responses: Vec<Response>,
    now: Duration,
    event: usize,
    attempts: usize,
    completed: Vec<Completed>,
    seen: Seen,
}

impl World {
    fn new(nodes: usize, clients: usize, sets: &[&[&str]]) -> Self {
        let sets: Vec<LockKeys> = sets
            .iter()
            .map(|set| set.iter().copied().collect())
            .collect();
        let client = |_| Client {
            attempt: 0,
            keys: 0,
            names: Arc::new([]),
            owner: OwnerToken::from_random([0; 16]),
            started: Duration::ZERO,
            began: 0,
            phase: Phase::Idle,
        };
        Self {
            sets,
            nodes: vec![Store::new(); nodes],
            clients: (0..clients).map(client).collect(),
            requests: Vec::new(),
            responses: Vec::new(),
            now: Duration::from_secs(1),
            event: 0,
            attempts: 0,
            completed: Vec::new(),
            seen: Seen::default(),
        }
    }

    /// Lets one thing happen.
    fn happen(&mut self, what: u8, pick: u16) -> Result<(), TestCaseError> {
        self.event += 1;
        let index = usize::from(pick);
        match what % 32 {
            0..=9 => {
                if let Some(request) = take(&mut self.requests, index) {
                    self.deliver(&request);
                }
            }
            // Doubled: it arrives now and once more some time later.
            10..=11 => {
                if let Some(request) = take(&mut self.requests, index) {
                    self.requests.push(request.clone());
                    self.deliver(&request);
                }
            }
            12 => drop(take(&mut self.requests, index)),
            13..=22 => {
                if let Some(response) = take(&mut self.responses, index) {
                    self.receive(&response);
                }
            }
            23 => drop(take(&mut self.responses, index)),
            24..=28 => self.act(index % self.clients.len(), pick),
            29 => self.lose_patience(index % self.clients.len()),
            _ => self.now += TTL / 16 * u32::from(pick % 12),
        }
        self.check_exclusion()
    }

    fn deliver(&mut self, request: &Request) {
        let reply = self.nodes[request.node].apply(&request.command, self.now);
        self.responses.push(Response {
            client: request.client,
            attempt: request.attempt,
            purpose: request.purpose,
            node: request.node,
            reply,
        });
    }

    fn send(&mut self, id: usize, nodes: &[usize], purpose: Purpose, op: Op) {
        let client = &self.clients[id];
        for node in nodes {
            self.requests.push(Request {
                client: id,
                attempt: client.attempt,
                purpose,
                node: *node,
                command: Command {
                    names: Arc::clone(&client.names),
                    owner: client.owner.clone(),
                    op: op.clone(),
                },
            });
        }
    }

    fn all_nodes(&self) -> Vec<usize> {
        (0..self.nodes.len()).collect()
    }

    /// The client does what it likes to: begin, extend, or release.
    fn act(&mut self, id: usize, pick: u16) {
        match &self.clients[id].phase {
            Phase::Idle => self.begin(id, pick),
            Phase::Acquiring(_) => {}
            Phase::Holding {
                token,
                until,
                extension,
            } => {
                let token = *token;
                if extension.is_none() && *until > self.now && pick & 8 == 0 {
                    self.extend(id, token);
                } else {
                    let nodes = self.all_nodes();
                    self.release(id, &nodes);
                }
            }
        }
    }

    fn begin(&mut self, id: usize, pick: u16) {
        self.attempts += 1;
        let attempts = u8::try_from(self.attempts).expect("schedules are short");
        let keys = usize::from(pick / 16) % self.sets.len();
        let names = Namespace::default().names(&self.sets[keys], |_| [0; 32]);
        let quorum = quorum(self.nodes.len());
        self.clients[id] = Client {
            attempt: self.attempts,
            keys,
            names: names.expect("good keys").into(),
            owner: OwnerToken::from_random([attempts; 16]),
            started: self.now,
            began: self.event,
            phase: Phase::Acquiring(AcquireRound::new(quorum)),
        };
        // Clocks that disagree: proposals somewhat below and above what has been granted, so that
        // the nodes' numbers differ often.
        let top = self
            .completed
            .iter()
            .map(|done| done.token)
            .max()
            .unwrap_or(3);
        let op = Op::Acquire {
            proposal: Some((top + u64::from(pick / 64 % 32)).saturating_sub(24)),
            ttl: TTL,
            retention: RETENTION,
        };
        let nodes = self.all_nodes();
        self.send(id, &nodes, Purpose::Acquire, op);
    }

    fn confirm(token: u64) -> Op {
        Op::Confirm {
            token: Some(token),
            ttl: TTL,
            retention: RETENTION,
        }
    }

    fn extend(&mut self, id: usize, token: u64) {
        let (nodes, number) = (self.all_nodes(), self.event);
        let round = ExtendRound::new(quorum(nodes.len()), token);
        if let Phase::Holding { extension, .. } = &mut self.clients[id].phase {
            *extension = Some(Extension {
                round,
                sent: self.now,
                number,
            });
            self.send(id, &nodes, Purpose::Extend(number), Self::confirm(token));
        }
    }

    fn release(&mut self, id: usize, nodes: &[usize]) {
        self.send(id, nodes, Purpose::Release, Op::Release);
        self.clients[id].phase = Phase::Idle;
    }

    fn receive(&mut self, response: &Response) {
        let id = response.client;
        if self.clients[id].attempt != response.attempt {
            return;
        }
        self.answer(
            id,
            response.node,
            response.purpose,
            Answer::Replied(response.reply.clone()),
        );
    }

    fn answer(&mut self, id: usize, node: usize, purpose: Purpose, answer: Answer) {
        match (&mut self.clients[id].phase, purpose) {
            (Phase::Acquiring(round), Purpose::Acquire) => {
                let step = round.on_acquire(node, &answer);
                self.follow(id, step);
            }
            (Phase::Acquiring(round), Purpose::Confirm(number)) => {
                let step = round.on_confirm(node, number, &answer);
                self.follow(id, step);
            }
            (
                Phase::Holding {
                    until, extension, ..
                },
                Purpose::Extend(number),
            ) => {
                let Some(Extension { round, sent, .. }) = extension
                    .as_mut()
                    .filter(|extension| extension.number == number)
                else {
                    return;
                };
                match round.on_confirm(node, &answer) {
                    ExtendStep::Wait => {}
                    ExtendStep::Extended => {
                        let lifetime = validity::lifetime(TTL).expect("longer than the drift");
                        // An extension of a lock that has ended is none.
                        if *until > self.now {
                            *until = (*until).max(*sent + lifetime);
                            self.seen.extensions += 1;
                        }
                        *extension = None;
                    }
                    ExtendStep::Lost => {
                        self.seen.losses += 1;
                        let nodes = self.all_nodes();
                        self.release(id, &nodes);
                    }
                    ExtendStep::Missed { .. } => *extension = None,
                }
            }
            _ => {}
        }
    }

    fn follow(&mut self, id: usize, step: AcquireStep) {
        let client = &mut self.clients[id];
        let Phase::Acquiring(round) = &client.phase else {
            return;
        };
        match step {
            AcquireStep::Wait => {}
            AcquireStep::Confirm(target) => {
                let (nodes, step) = (asked(round), round.step());
                self.seen.second_phases += usize::from(step == 1);
                self.seen.third_phases += usize::from(step == 2);
                self.send(id, &nodes, Purpose::Confirm(step), Self::confirm(target));
            }
            AcquireStep::Granted(token) => {
                self.seen.tokens += 1;
                self.completed.push(Completed {
                    keys: client.keys,
                    token,
                    began: client.began,
                    completed: self.event,
                });
                if let Some(left) = validity::remaining(TTL, self.now - client.started) {
                    let until = self.now + left;
                    client.phase = Phase::Holding {
                        token,
                        until,
                        extension: None,
                    };
                } else {
                    self.seen.too_late += 1;
                    let nodes = self.all_nodes();
                    self.release(id, &nodes);
                }
            }
            AcquireStep::Refused(_) => {
                // A node that said no to the only request of this attempt has nothing to release.
                let held = |node: &usize| !round.is_refused_by(*node);
                let nodes: Vec<usize> = (0..self.nodes.len()).filter(held).collect();
                self.release(id, &nodes);
            }
        }
    }

    /// The client takes the silent nodes for failed.
    fn lose_patience(&mut self, id: usize) {
        let (purpose, silent): (Purpose, Vec<usize>) = match &self.clients[id].phase {
            Phase::Acquiring(round) if round.step() == 0 => {
                (Purpose::Acquire, round.silent().collect())
            }
            Phase::Acquiring(round) => (Purpose::Confirm(round.step()), round.silent().collect()),
            Phase::Holding {
                extension: Some(extension),
                ..
            } => (
                Purpose::Extend(extension.number),
                extension.round.silent().collect(),
            ),
            Phase::Idle | Phase::Holding { .. } => return,
        };
        for node in silent {
            self.answer(id, node, purpose, Answer::Failed);
        }
    }

    fn overlap(&self, one: usize, other: usize) -> bool {
        let keys = self.sets[one].as_slice();
        self.sets[other]
            .as_slice()
            .iter()
            .any(|key| keys.contains(key))
    }

    /// With clocks that run equally fast, no two clients rely on the same key at the same time.
    fn check_exclusion(&self) -> Result<(), TestCaseError> {
        let valid = |client: &&Client| match client.phase {
            Phase::Holding { until, .. } => until > self.now,
            Phase::Idle | Phase::Acquiring(_) => false,
        };
        let holders: Vec<&Client> = self.clients.iter().filter(valid).collect();
        for (index, one) in holders.iter().enumerate() {
            for other in &holders[..index] {
                let clash = self.overlap(one.keys, other.keys);
                prop_assert!(!clash, "{:?} and {:?} at {:?}", one, other, self.now);
            }
        }
        Ok(())
    }

    /// Holds also for acquisitions whose majority came too late to be worth anything: tokens are
    /// unique and ordered without any clock.
    fn check_tokens(&self) -> Result<(), TestCaseError> {
        for (index, b) in self.completed.iter().enumerate() {
            for a in &self.completed[..index] {
                if self.overlap(a.keys, b.keys) {
                    prop_assert_ne!(a.token, b.token, "{:?} {:?}", a, b);
                    let ordered = b.began <= a.completed || b.token > a.token;
                    prop_assert!(ordered, "{:?} {:?}", a, b);
                }
            }
        }
        Ok(())
    }
}

fn take<T>(from: &mut Vec<T>, index: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(index % from.len()))
}

const ONE_KEY: &[&[&str]] = &[&["k"]];
/// Sets of different sizes: raising the fences of only some keys of a set shows with these alone.
const UNEQUAL_SETS: &[&[&str]] = &[&["x", "y"], &["x"], &["y"]];

fn run(
    nodes: usize,
    clients: usize,
    sets: &[&[&str]],
    schedule: &[(u8, u16)],
) -> Result<Seen, TestCaseError> {
    let mut world = World::new(nodes, clients, sets);
    for (what, pick) in schedule {
        world.happen(*what, *pick)?;
    }
    world.check_tokens()?;
    Ok(world.seen)
}

fn schedules() -> impl Strategy<Value = Vec<(u8, u16)>> {
    vec(any::<(u8, u16)>(), 100..500)
}

proptest! {
    #![proptest_config(cases(600))]

    #[test]
    fn fencing_tokens_of_one_key_are_unique_and_grow_in_real_time_order(
        nodes in 1_usize..=5,
        clients in 2_usize..=4,
        schedule in schedules(),
    ) {
        run(nodes, clients, ONE_KEY, &schedule)?;
    }

    #[test]
    fn fencing_tokens_of_overlapping_sets_are_unique_and_grow_in_real_time_order(
        nodes in 1_usize..=5,
        clients in 2_usize..=4,
        schedule in schedules(),
    ) {
        run(nodes, clients, UNEQUAL_SETS, &schedule)?;
    }
}

/// The properties above are worth as much as what the random schedules come across.
#[test]
fn random_schedules_cover_second_phases_extensions_and_losses() {
    for sets in [ONE_KEY, UNEQUAL_SETS] {
        let mut sum = Seen::default();
        let mut state = 1_u64;
        for round in 0..1_000_usize {
            let schedule: Vec<(u8, u16)> = (0..400)
                .map(|_| {
                    // Knuth's multiplier; the upper bits are random enough.
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let [a, b, c, ..] = state.to_be_bytes();
                    (a, u16::from_be_bytes([b, c]))
                })
                .collect();
            let seen = run(1 + round % 5, 2 + round % 3, sets, &schedule).expect("no violation");
            sum.tokens += seen.tokens;
            sum.second_phases += seen.second_phases;
            sum.third_phases += seen.third_phases;
            sum.extensions += seen.extensions;
            sum.losses += seen.losses;
            sum.too_late += seen.too_late;
        }
        assert!(sum.tokens > 500, "{sum:?}");
        assert!(sum.second_phases > 50 && sum.third_phases > 0, "{sum:?}");
        assert!(
            sum.extensions > 10 && sum.losses > 5 && sum.too_late > 5,
            "{sum:?}"
        );
    }
}

// ---- Extending and releasing -------------------------------------------------------------------

const TOKEN: u64 = 7;

/// Answers `node` twice: the second time must change nothing.
fn extend_once(round: &mut ExtendRound, node: usize, answer: Answer) -> ExtendStep {
    let step = round.on_confirm(node, &answer);
    let before = round.clone();
    assert_eq!(round.on_confirm(node, &at(TOKEN)), ExtendStep::Wait);
    assert_eq!(*round, before);
    step
}

#[test]
fn extend_round_of_up_to_five_nodes_is_decided_as_early_as_possible() {
    // The last is an answer that does not belong to a confirmation.
    let answers = [
        at(TOKEN),
        at(TOKEN + 1),
        LOST,
        Answer::Failed,
        granted(TOKEN),
    ];
    for nodes in 1..=5 {
        let orders = orders(nodes);
        for answers in assignments(&answers, nodes) {
            for order in &orders {
                let mut round = ExtendRound::new(quorum(nodes), TOKEN);
                let (mut kept, mut gone) = (0, 0);
                for (index, node) in order.iter().enumerate() {
                    let answer = answers[*node].clone();
                    let step = extend_once(&mut round, *node, answer.clone());
                    kept += usize::from(answer == at(TOKEN));
                    gone += usize::from(answer == LOST || answer == at(TOKEN + 1));
                    let silent = nodes - 1 - index;
                    assert_eq!(round.silent().count(), silent);
                    let expected = if kept >= majority(nodes) {
                        ExtendStep::Extended
                    } else if gone >= majority(nodes) {
                        ExtendStep::Lost
                    } else if kept + silent >= majority(nodes) || gone + silent >= majority(nodes) {
                        ExtendStep::Wait
                    } else {
                        ExtendStep::Missed {
                            reached: kept + gone,
                        }
                    };
                    assert_eq!(step, expected, "{answers:?} in order {order:?} at {node}");
                    if step != ExtendStep::Wait {
                        break;
                    }
                    assert!(silent > 0, "{answers:?} in order {order:?} never ends");
                }
            }
        }
    }
}

#[test]
fn release_round_of_up_to_five_nodes_is_decided_as_early_as_possible() {
    let released = Answer::Replied(Reply::Released);
    let answers = [released.clone(), Answer::Failed, LOST];
    for nodes in 1..=5 {
        let orders = orders(nodes);
        for answers in assignments(&answers, nodes) {
            for order in &orders {
                let mut round = ReleaseRound::new(quorum(nodes));
                let mut done = 0;
                let mut last = ReleaseStep::Wait;
                for (index, node) in order.iter().enumerate() {
                    let silent = nodes - 1 - index;
                    done += usize::from(answers[*node] == released);
                    let step = round.on_release(*node, &answers[*node]);
                    // A doubled answer is not a second one, and nothing new either.
                    assert_eq!(round.on_release(*node, &released), step);
                    assert_eq!((round.released(), round.silent().count()), (done, silent));
                    let expected = if done >= majority(nodes) {
                        ReleaseStep::Freed
                    } else if done + silent >= majority(nodes) {
                        ReleaseStep::Wait
                    } else {
                        ReleaseStep::Unconfirmed
                    };
                    assert_eq!(step, expected, "{answers:?} in order {order:?} at {node}");
                    last = step;
                }
                assert_ne!(last, ReleaseStep::Wait, "{answers:?} in order {order:?}");
            }
        }
    }
}

// ---- Keys, names, delays -----------------------------------------------------------------------

/// Bytes that the encodings themselves are made of, so that wrong ones collide soon.
fn tricky_bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        4 => proptest::sample::select(b"012:,{}a".to_vec()),
        1 => any::<u8>(),
    ];
    let pieces: [&[u8]; 7] = [
        b":fence",
        b"}",
        b"{",
        b"redlock:fence:",
        b"1:a,",
        b"}:fence",
        b"ns:{",
    ];
    let piece = prop_oneof![
        byte.prop_map(|byte| vec![byte]),
        proptest::sample::select(pieces.map(<[u8]>::to_vec).to_vec()),
    ];
    vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

/// Two keys, often such that one looks like a name of the other.
fn tricky_pair() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    (tricky_bytes(), tricky_bytes(), 0..6).prop_map(|(one, other, relation)| {
        let (before, after): (&[u8], &[u8]) = match relation {
            0 => (b"", b":fence"),
            1 => (b"", b"}:fence"),
            2 => (b"redlock:fence:{", b"}"),
            3 => (b"{", b"}"),
            4 => (b"", b""),
            _ => return (one, other),
        };
        let related = [before, &one, after].concat();
        (one, related)
    })
}

/// Reads a composite key back, as any other language would: netstrings, one after the other.
fn parts_of(mut key: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = Vec::new();
    while !key.is_empty() {
        let colon = key.iter().position(|byte| *byte == b':').expect("a length");
        let length = std::str::from_utf8(&key[..colon]).expect("digits");
        let length: usize = length.parse().expect("a number");
        let (part, rest) = key[colon + 1..].split_at(length);
        parts.push(part.to_vec());
        key = rest.strip_prefix(b",").expect("a comma");
    }
    parts
}

/// Not SHA-256, but different for different keys of one length and first bytes.
fn digest(key: &[u8]) -> [u8; 32] {
    let mut digest = [0xff; 32];
    digest[0] = u8::try_from(key.len() % 256).expect("is less");
    for (into, byte) in digest[1..].iter_mut().zip(key) {
        *into = *byte;
    }
    digest
}

fn names(namespace: &str, key: &[u8]) -> Result<KeyNames, KeyError> {
    let namespace = Namespace::new(namespace).expect("no braces");
    let mut names = namespace.names(&LockKeys::from(LockKey::from(key)), digest)?;
    Ok(names.remove(0))
}

proptest! {
    #![proptest_config(cases(500))]

    #[test]
    fn composite_keys_can_be_read_back_so_no_two_of_them_are_equal(
        parts in vec(tricky_bytes(), 0..6),
    ) {
        let key = LockKey::from_parts(&parts);
        prop_assert_eq!(parts_of(key.as_bytes()), parts);
    }

    #[test]
    fn composite_keys_are_equal_only_if_their_parts_are(
        one in vec(tricky_bytes(), 0..4),
        other in vec(tricky_bytes(), 0..4),
    ) {
        let equal = LockKey::from_parts(&one) == LockKey::from_parts(&other);
        prop_assert_eq!(equal, one == other);
    }

    #[test]
    fn keys_of_a_namespace_have_distinct_names_of_locks_and_fences(
        namespace in proptest::sample::select(vec!["", "redlock", "ns", ":", "redlock:fence:"]),
        (one, other) in tricky_pair(),
    ) {
        let (Ok(a), Ok(b)) = (names(namespace, &one), names(namespace, &other)) else {
            return Ok(());
        };
        prop_assert_eq!(a.lock == b.lock, one == other);
        prop_assert_eq!(a.fence == b.fence, one == other);
        prop_assert_ne!(&a.lock, &a.fence);
        prop_assert_ne!(&a.lock, &b.fence);
        prop_assert_ne!(&b.lock, &a.fence);
    }

    #[test]
    fn namespaces_keep_equal_keys_apart(
        one in "[a-z:]{1,8}",
        other in "[a-z:]{1,8}",
        (key, second) in tricky_pair(),
    ) {
        let (Ok(a), Ok(b)) = (names(&one, &key), names(&other, &second)) else {
            return Ok(());
        };
        let same = one == other && key == second;
        prop_assert_eq!(a.lock == b.lock, same);
        prop_assert_ne!(&a.lock, &b.fence);
        prop_assert_ne!(&a.fence, &b.lock);
    }

    #[test]
    fn long_keys_are_distinguished_by_their_digests(
        length in MAX_CLEAR_KEY + 1..MAX_CLEAR_KEY + 200,
        first in any::<u8>(),
        second in any::<u8>(),
    ) {
        let long = |byte| names("ns", &vec![byte; length]).expect("any length will do");
        prop_assert_eq!(long(first).lock == long(second).lock, first == second);
        prop_assert!(long(first).lock.len() < MAX_CLEAR_KEY);
    }

    #[test]
    fn retry_delay_stays_below_its_doubling_ceiling_the_maximum_and_the_expiry(
        base in 0_u64..10_000,
        max in 0_u64..100_000,
        attempt in any::<u32>(),
        hint in proptest::option::of(0_u64..100_000),
        random in any::<u64>(),
    ) {
        let (base, max) = (Duration::from_micros(base), Duration::from_micros(max));
        let hint = hint.map(Duration::from_micros);
        let retry = Retry::new(base, max);
        // A maximum below the base counts as the base.
        let max = max.max(base);
        let delay = retry.delay(attempt, hint, random);
        let ceiling = base.saturating_mul(2_u32.saturating_pow(attempt)).min(max);
        prop_assert!(delay <= ceiling);
        // Full jitter reaches all of the window, not just a part of it.
        prop_assert_eq!(retry.delay(attempt, hint, 0), Duration::ZERO);
        let longest = retry.delay(attempt, None, u64::MAX);
        prop_assert!(longest + Duration::from_nanos(1) >= ceiling.min(base.saturating_mul(1 << 16)));
        prop_assert!(retry.delay(attempt, hint, random / 2) <= delay);
        if let Some(left) = hint {
            prop_assert!(delay <= left + base);
        }
        let split = Retry::split_delay(attempt, base, random);
        prop_assert!(split <= base.saturating_mul(2_u32.saturating_pow(attempt.saturating_add(1))));
    }
}
