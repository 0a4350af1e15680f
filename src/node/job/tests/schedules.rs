//! Threads that send votes while a lease takes them.

use std::task::Wake;

use shuttle::future::block_on;
use shuttle::thread::spawn;

use super::*;
use crate::node::sync::atomic::AtomicUsize;
use crate::node::sync::tests::{in_many_orders, join};

fn channel(nodes: usize) -> VoteReceiver {
    VoteReceiver::new(&vec![Arc::from("n"); nodes].into())
}

fn send(sender: VoteSender) {
    sender.send(Ok(Reply::Released));
}

/// Invariant: every sender delivers one vote, also one that is dropped or belongs to an earlier phase, and the receiver
/// does not sleep while as many as it asked for are there.
#[test]
fn each_sender_delivers_its_vote_and_the_receiver_hears_of_it() {
    in_many_orders(|| {
        let mut votes = channel(4);
        let (earlier, sent) = (votes.sender(0), Arc::new(AtomicUsize::new(0)));
        spawn(move || send(earlier));
        let phase = votes.next_phase();
        for node in 1..4 {
            let (sender, sent) = (votes.sender(node), Arc::clone(&sent));
            spawn(move || {
                sent.fetch_add(1, Ordering::SeqCst);
                if node == 3 {
                    drop(sender);
                } else {
                    send(sender);
                }
            });
        }
        let first = block_on(votes.recv(at_least(2, phase)));
        assert!(sent.load(Ordering::SeqCst) >= 2, "before its threshold");
        let mut nodes = vec![first.node];
        nodes.extend((0..3).map(|_| block_on(votes.recv(Awaited::default())).node));
        nodes.sort_unstable();
        assert_eq!(nodes, [0, 1, 2, 3]);
        assert!(votes.try_recv().is_none());
    });
}

/// Counts how often it wakes another waker.
struct Counted {
    wakes: Arc<AtomicUsize>,
    waker: Waker,
}

impl Wake for Counted {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::SeqCst);
        self.waker.wake_by_ref();
    }
}

/// Invariant: only the vote that completes the threshold wakes the receiver.
#[test]
fn the_receiver_is_woken_once_for_a_threshold() {
    in_many_orders(|| {
        let mut votes = channel(3);
        let phase = votes.next_phase();
        let sending = [0, 1, 2].map(|node| {
            let sender = votes.sender(node);
            spawn(move || send(sender))
        });
        let wakes = Arc::new(AtomicUsize::new(0));
        block_on(poll_fn(|context| {
            let (wakes, waker) = (Arc::clone(&wakes), context.waker().clone());
            let waker = Waker::from(Arc::new(Counted { wakes, waker }));
            votes.poll_recv(&Context::from_waker(&waker), at_least(3, phase))
        }));
        join(sending);
        let wakes = wakes.load(Ordering::SeqCst);
        assert!(wakes <= 1, "{wakes} times");
    });
}

/// Invariant: a receiver that gives up waiting, and then asks for less, is woken for what it asks now.
#[test]
fn the_receiver_is_woken_for_the_threshold_that_it_asked_for_last() {
    in_many_orders(|| {
        let mut votes = channel(2);
        let phase = votes.next_phase();
        let (sender, _silent) = (votes.sender(0), votes.sender(1));
        let sending = spawn(move || send(sender));
        block_on(async {
            let all = at_least(2, phase);
            let gave_up = poll_fn(|context| Poll::Ready(votes.poll_recv(context, all))).await;
            assert!(gave_up.is_pending());
            assert_eq!(votes.recv(at_least(1, phase)).await.node, 0);
        });
        sending.join().unwrap();
    });
}

/// Invariant: no vote stays in a channel that has no receiver.
#[test]
fn votes_for_a_receiver_that_is_dropped_meanwhile_are_discarded() {
    in_many_orders(|| {
        let votes = channel(2);
        let channel = Arc::clone(&votes.channel);
        let sending = [0, 1].map(|node| {
            let sender = votes.sender(node);
            spawn(move || send(sender))
        });
        drop(votes);
        join(sending);
        assert!(channel.queue.lock().votes.is_empty());
    });
}
