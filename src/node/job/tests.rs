//! Tests of the votes channel.

use tokio::time::advance;
use tokio_test::task::spawn;
use tokio_test::{assert_pending, assert_ready};

use super::*;

#[cfg(shuttle)]
mod schedules;

/// This many votes of a phase.
fn at_least(answers: usize, number: u32) -> Awaited {
    Awaited { number, answers }
}

#[test]
fn recv_wakes_once_by_the_vote_that_reaches_the_threshold() {
    let names = vec![Arc::from("n"); 5].into();
    let mut votes = VoteReceiver::new(&names);
    let earlier = votes.sender(0);
    let phase = votes.next_phase();
    let mut senders: Vec<_> = (0..5).map(|node| votes.sender(node)).collect();
    let send = |sender: VoteSender| sender.send(Ok(Reply::Released));
    let mut waiting = spawn(votes.recv(at_least(3, phase)));
    assert_pending!(waiting.poll());
    send(earlier);
    send(senders.pop().unwrap());
    send(senders.pop().unwrap());
    assert!(!waiting.is_woken());
    send(senders.pop().unwrap());
    assert!(waiting.is_woken());
    assert_eq!(assert_ready!(waiting.poll()).phase, 0);
    drop(waiting);
    // The votes behind the threshold come without waiting for more.
    for node in [4, 3, 2] {
        let next = assert_ready!(spawn(votes.recv(at_least(5, phase))).poll());
        assert_eq!((next.phase, next.node), (phase, node));
    }
    let mut waiting = spawn(votes.recv(at_least(2, phase)));
    assert_pending!(waiting.poll());
    send(senders.pop().unwrap());
    assert!(!waiting.is_woken());
    drop(waiting);
    assert_eq!(votes.try_recv().unwrap().node, 1);
}

/// Otherwise its lease would wait for the node until the node timeout.
#[test]
fn a_dropped_sender_sends_a_failure_at_once() {
    let names = ["a", "b"].map(Arc::from).to_vec().into();
    let mut votes = VoteReceiver::new(&names);
    let phase = votes.next_phase();
    let [answered, dropped] = [votes.sender(0), votes.sender(1)];
    let mut waiting = spawn(votes.recv(at_least(2, phase)));
    assert_pending!(waiting.poll());
    answered.send(Ok(Reply::Released));
    assert!(!waiting.is_woken());
    drop(dropped);
    assert!(waiting.is_woken());
    assert_eq!(assert_ready!(waiting.poll()).node, 0);
    drop(waiting);
    let Vote { node, outcome, .. } = votes.try_recv().unwrap();
    assert_eq!(node, 1);
    let failure = outcome.unwrap_err();
    let is_of_node = matches!(&failure, NodeFailure::Disconnected { node, .. } if &**node == "b");
    assert!(is_of_node, "{failure:?}");
    assert!(votes.try_recv().is_none());
}

#[cfg(feature = "redis")]
#[test]
fn a_sender_is_closed_by_the_next_phase_and_by_dropping_the_receiver() {
    let names = vec![Arc::from("n"); 5].into();
    let votes = VoteReceiver::new(&names);
    let first = votes.sender(0);
    assert!(first.is_open());
    votes.next_phase();
    assert!(!first.is_open());
    let second = votes.sender(0);
    let channel = Arc::clone(&votes.channel);
    drop(votes);
    assert!(!second.is_open());
    drop(first);
    drop(second);
    assert!(channel.queue.lock().votes.is_empty());
}

#[tokio::test(start_paused = true)]
async fn recv_until_waits_a_tick_more_where_the_process_stood_still() {
    let due_in = Duration::from_millis(10);
    for (late, answers) in [(LATE, false), (LATE + TICK, true), (LATE + TICK, false)] {
        let mut votes = VoteReceiver::new(&vec![Arc::from("n")].into());
        let sender = votes.sender(0);
        let mut waiting = spawn(votes.recv_until(Instant::now() + due_in));
        assert_pending!(waiting.poll());
        advance(due_in + late).await;
        if late > LATE {
            assert_pending!(waiting.poll());
            match answers {
                true => sender.send(Ok(Reply::Released)),
                false => advance(2 * TICK).await,
            }
        }
        assert_eq!(assert_ready!(waiting.poll()).is_some(), answers);
    }
}
