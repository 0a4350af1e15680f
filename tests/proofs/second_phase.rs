//! The second phase of an acquire round, whose grants carry different numbers.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;
use tower_redlock::protocol::acquire::{AcquireRound, AcquireStep, Refusal};
use tower_redlock::protocol::message::{Answer, Reply};

use crate::round_cases::{AMNESIA, HELD, LOST, asked, at, cases, granted, majority, quorum};

/// A request that is under way.
#[derive(Debug, Clone, Copy)]
struct Pending {
    node: usize,
    /// 0 is the `ACQUIRE`.
    step: u8,
    target: u64,
}

/// What the test itself knows of a round: the answers, and nothing of how they are judged.
#[derive(Default)]
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
        let numbers = answers.filter_map(|(node, answer)| Some((*node, of(answer)?)));
        numbers.collect()
    }

    /// How many nodes answered exactly `token`, to the `ACQUIRE` or the current `CONFIRM`.
    fn exact(&self, token: u64) -> usize {
        let nodes: BTreeSet<usize> = self
            .numbers(number_of)
            .into_iter()
            // A key that is known to be gone vouches for nothing.
            .filter(|(node, number)| *number == token && !self.lost.contains(node))
            .map(|(node, _)| node)
            .collect();
        nodes.len()
    }

    fn has_granted(&self, node: usize) -> bool {
        let answer = self.acquired.get(&node);
        matches!(answer, Some(Answer::Replied(Reply::Granted(_))))
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

fn number_of(answer: &Answer) -> Option<u64> {
    match answer {
        Answer::Replied(Reply::Granted(number) | Reply::At(number)) => Some(*number),
        Answer::Replied(_) | Answer::Failed | Answer::NeverSent => None,
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
        ..Journal::default()
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
        } else if request.step == journal.step {
            round.on_confirm(request.node, &answer.clone())
        } else {
            round.on_other(request.node, &answer.clone())
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
        highest = number_of(&answer).map_or(highest, |number| highest.max(number));
        let enough = majority(nodes);
        let grants = (0..nodes).filter(|node| journal.has_granted(*node)).count();
        match step {
            AcquireStep::Repair(_) | AcquireStep::Decided(_) => {
                prop_assert!(false, "no node has a record")
            }
            AcquireStep::Wait => {
                if journal.step == 0 {
                    prop_assert!(grants < enough, "a majority granted");
                } else {
                    prop_assert!(journal.exact(journal.target) < enough, "that is a token");
                    let possible = journal.exact(journal.target) + journal.outstanding();
                    prop_assert!(possible >= enough, "nothing to wait for");
                }
                let awaited: Vec<usize> = round.silent().iter().collect();
                prop_assert!(!awaited.is_empty(), "waits for no node");
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
                let is_out = journal.step == 0 || possible < enough;
                prop_assert!(is_out, "the target was in reach");
                prop_assert_eq!(target, highest);
                journal.step += 1;
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
                let step = journal.step;
                let request = |node: &usize| Pending {
                    node: *node,
                    step,
                    target,
                };
                pending.extend(journal.asked.iter().map(request));
            }
            AcquireStep::Refused(refusal) => {
                let contended = match refusal {
                    Refusal::Contended(contention) => {
                        prop_assert_eq!(contention.is_split, grants > 0);
                        true
                    }
                    Refusal::Unavailable { voted, .. } => {
                        prop_assert!(voted.len() < enough);
                        false
                    }
                };
                if journal.step == 0 {
                    let possible = grants + nodes - journal.acquired.len();
                    prop_assert!(possible < enough, "too early");
                } else {
                    let possible = journal.exact(journal.target) + journal.outstanding();
                    prop_assert!(possible < enough, "the target was in reach");
                    let is_last = !journal.may_go_on(highest, false);
                    prop_assert!(is_last, "a higher target was in reach");
                    prop_assert!(contended, "a majority had granted");
                }
                return Ok(None);
            }
        }
    }
    let why = "all nodes answered and nothing was decided";
    Err(TestCaseError::fail(why))
}

proptest! {
    #![proptest_config(cases(4_000))]

    // Rules: lock.confirm, lock.exact, lock.straggler
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
    assert_eq!(round.on_confirm(2, &LOST), AcquireStep::Wait);
    round.on_confirm(3, &at(2));
    assert_eq!(round.on_confirm(4, &at(3)), AcquireStep::Confirm(3));
    assert_eq!(asked(&round), [0, 3, 4]);
    for (node, answer) in [(0, at(5)), (4, at(3)), (3, at(6))] {
        round.on_confirm(node, &answer);
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
    let step = round.on_confirm(0, &at(1));
    assert!(step != AcquireStep::Wait || !round.silent().is_empty());
}
