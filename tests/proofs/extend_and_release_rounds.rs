//! The decisions of extend and release rounds, against independent oracles.

use tower_redlock::protocol::NodeSet;
use tower_redlock::protocol::message::{Answer, Reply};
use tower_redlock::protocol::round::{ReleaseRound, Sought, VoteRound, VoteStep};

use crate::record_rounds::{done, record};
use crate::round_cases::{LOST, at, for_all, granted, majority, quorum};

const TOKEN: u64 = 7;

/// Answers `node` twice: the second time must change nothing.
fn extend_once(round: &mut VoteRound, node: usize, answer: &Answer) -> VoteStep {
    let step = round.on_answer(node, answer);
    let before = round.clone();
    assert_eq!(round.on_answer(node, &at(TOKEN)), VoteStep::Wait);
    assert_eq!(*round, before);
    step
}

#[test]
fn extend_round_of_up_to_five_nodes_is_decided_as_early_as_possible() {
    // A record has taken the place of the lock. The last is an answer that does not belong to a confirmation.
    let gone_answers = [LOST, at(TOKEN + 1), Answer::Replied(done(record(1)))];
    let others = [at(TOKEN), Answer::Failed, granted(TOKEN)];
    let answers = [&gone_answers[..], &others].concat();
    for_all(&answers, |answers, order| {
        let nodes = answers.len();
        let mut round = VoteRound::new(quorum(nodes), Sought::Token(TOKEN));
        let (mut kept, mut gone) = (0, 0);
        for (index, node) in order.iter().enumerate() {
            let answer = &answers[*node];
            let step = extend_once(&mut round, *node, answer);
            kept += usize::from(*answer == at(TOKEN));
            gone += usize::from(gone_answers.contains(answer));
            let silent = nodes - 1 - index;
            assert_eq!(round.silent().len(), silent);
            let expected = if kept >= majority(nodes) {
                VoteStep::Agreed
            } else if gone >= majority(nodes) {
                VoteStep::Lost
            } else if kept.max(gone) + silent >= majority(nodes) {
                VoteStep::Wait
            } else {
                let reached = kept + gone;
                VoteStep::Missed { reached }
            };
            assert_eq!(step, expected, "{answers:?} in order {order:?} at {node}");
            if step != VoteStep::Wait {
                break;
            }
            assert!(silent > 0, "{answers:?} in order {order:?} never ends");
        }
    });
}

#[test]
fn release_round_of_up_to_five_nodes_is_decided_as_early_as_possible() {
    let released = Answer::Replied(Reply::Released);
    for_all(
        &[released.clone(), Answer::Failed, LOST],
        |answers, order| {
            let nodes = answers.len();
            let mut round = ReleaseRound::new(quorum(nodes), NodeSet::all(quorum(nodes)));
            let (mut done, mut gone) = (0, 0);
            let mut last = VoteStep::Wait;
            for (index, node) in order.iter().enumerate() {
                let (silent, answer) = (nodes - 1 - index, &answers[*node]);
                done += usize::from(*answer != Answer::Failed);
                gone += usize::from(*answer == LOST);
                round.on_release(*node, answer);
                let step = round.step();
                // A doubled answer is not a second one, and nothing new either, unless the first was a failure.
                let again = match answer {
                    Answer::Failed | Answer::NeverSent => &Answer::Failed,
                    Answer::Replied(_) => &released,
                };
                round.on_release(*node, again);
                assert_eq!(round.step(), step);
                assert_eq!((round.released(), round.silent().len()), (done, silent));
                let expected = if gone >= majority(nodes) {
                    VoteStep::Lost
                } else if done >= majority(nodes) && gone + silent >= majority(nodes) {
                    // More answers tell whether it was lost.
                    VoteStep::Wait
                } else if done >= majority(nodes) {
                    VoteStep::Agreed
                } else if done + silent >= majority(nodes) {
                    VoteStep::Wait
                } else {
                    VoteStep::Missed { reached: done }
                };
                assert_eq!(step, expected, "{answers:?} in order {order:?} at {node}");
                last = step;
            }
            assert_ne!(last, VoteStep::Wait, "{answers:?} in order {order:?}");
        },
    );
}
