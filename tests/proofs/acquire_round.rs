//! The decision of an acquire round whose grants carry one number, against an independent oracle.

#![allow(
    clippy::needless_pass_by_value,
    reason = "an answer reads best where it is given"
)]

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tower_redlock::protocol::acquire::{AcquireRound, AcquireStep, Refusal, RefusalKind};
use tower_redlock::protocol::message::{Answer, Reply};

use crate::round_cases::{
    HELD, Verdict, assignments, cases, granted, majority, orders, quorum, verdict, verdict_of,
};

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

/// Drives one round and holds every step, not just the outcome, against the rule: so a decision
/// can be neither wrong nor early nor late.
fn check_split(fates: &[Fate], order: &[usize]) {
    let nodes = fates.len();
    let mut round = AcquireRound::new(quorum(nodes), None);
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
        let found = verdict_of(&step);
        assert_eq!(
            round.refused().contains(node),
            fates[node] == Fate::Held,
            "{}",
            context()
        );
        assert_eq!(round.silent().len(), silent, "{}", context());
        if decided != Verdict::Open {
            // A late answer cannot change a decision.
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
        match &step {
            AcquireStep::Granted(token) => assert_eq!(*token, 7),
            AcquireStep::Refused(refusal) => {
                assert_eq!(refusal.is_split, granted > 0, "{}", context());
                assert_eq!(refusal.voted.len(), reached, "{}", context());
            }
            AcquireStep::Wait | AcquireStep::Confirm(_) => {}
            AcquireStep::Repair(_) | AcquireStep::Decided(_) => panic!("no node has a record"),
        }
    }
    assert_ne!(
        decided,
        Verdict::Open,
        "{fates:?} in order {order:?} never ends"
    );
}

// Rules: lock.refusal
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
fn second_answer_of_a_node_is_not_a_second_vote() {
    let mut round = AcquireRound::new(quorum(3), None);
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
        let mut round = AcquireRound::new(quorum(nodes), None);
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
            last = round.on_acquire(node, &Answer::Replied(Reply::Held { expires_in, shown: None }));
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

#[test]
fn free_slots_are_those_that_most_refusals_name() {
    let refusal = |free| {
        Answer::Replied(Reply::HeldSlot {
            expires_in: Some(Duration::ZERO),
            free,
        })
    };
    for (answers, expected) in [
        (vec![refusal(0b011), refusal(0b110)], 0b010),
        (vec![refusal(0b111), refusal(0b111)], 0b111),
        (vec![refusal(0b001), refusal(0b000)], 0b000),
        (vec![granted(7), refusal(0b100), refusal(0b110)], 0b100),
        // A node that says nothing of the slots does not count.
        (vec![HELD, refusal(0b101)], 0b101),
        (vec![HELD, HELD], 0),
    ] {
        let mut round = AcquireRound::new(quorum(3), None);
        let mut last = AcquireStep::Wait;
        for (node, answer) in answers.iter().enumerate() {
            last = round.on_acquire(node, answer);
        }
        let AcquireStep::Refused(Refusal { free, .. }) = last else {
            panic!("{answers:?}: {last:?}");
        };
        assert_eq!(free, expected, "{answers:?}");
    }
}
