//! What a refused acquire round says of the holders.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tower_redlock::protocol::acquire::{AcquireRound, AcquireStep, Contention, Refusal};
use tower_redlock::protocol::message::{Answer, Reply};

use crate::round_cases::{HELD, cases, granted, majority, quorum};

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
            last = round.on_acquire(node, &Answer::Replied(Reply::Held { expires_in, shown: None }));
        }
        let AcquireStep::Refused(Refusal::Contended(Contention { expires_in, .. })) = last else {
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
fn free_slots_are_those_that_most_or_else_any_refusals_name() {
    let refusal = |free| {
        Answer::Replied(Reply::HeldSlot {
            expires_in: Some(Duration::ZERO),
            free,
        })
    };
    for (nodes, answers, expected) in [
        (3, vec![refusal(0b011), refusal(0b110)], 0b010),
        (3, vec![refusal(0b111), refusal(0b111)], 0b111),
        (3, vec![granted(7), refusal(0b100), refusal(0b110)], 0b100),
        // They agree on none.
        (3, vec![refusal(0b1100), refusal(0b0001)], 0b1101),
        (
            5,
            vec![refusal(0b100), refusal(0b000), refusal(0b000)],
            0b100,
        ),
        (
            5,
            vec![refusal(0b110), refusal(0b100), refusal(0b000)],
            0b100,
        ),
        (3, vec![refusal(0b000), refusal(0b000)], 0b000),
        (1, vec![refusal(0b000)], 0b000),
        // A node that says nothing of the slots does not count.
        (3, vec![HELD, refusal(0b101)], 0b101),
        (3, vec![HELD, HELD], 0),
    ] {
        let mut round = AcquireRound::new(quorum(nodes));
        let mut last = AcquireStep::Wait;
        for (node, answer) in answers.iter().enumerate() {
            last = round.on_acquire(node, answer);
        }
        let AcquireStep::Refused(Refusal::Contended(Contention { free, .. })) = last else {
            panic!("{answers:?}: {last:?}");
        };
        assert_eq!(free, expected, "{answers:?}");
    }
}
