//! Threads that publish releases while others watch for them.

use shuttle::future::block_on;
use shuttle::thread::spawn;

use super::*;
use crate::node::sync::tests::{in_many_orders, join};

fn publishing(subscription: &ReleaseSubscription, node: usize) -> shuttle::thread::JoinHandle<()> {
    let signal = Arc::clone(&subscription.signal);
    spawn(move || signal.notify(node, 2))
}

/// Invariant: each watch fires once a majority has published, also if it begins to wait meanwhile, and takes no message
/// of another watch.
#[test]
fn each_watch_hears_of_a_release_that_a_majority_publishes() {
    in_many_orders(|| {
        let subscription = subscription(3);
        let watching = [(); 2].map(|()| {
            let mut watch = ReleaseWatch::new(&subscription);
            spawn(move || assert_eq!(block_on(watch.released()), 2))
        });
        let nodes = [0, 2].map(|node| publishing(&subscription, node));
        join(watching);
        join(nodes);
    });
}

/// Invariant: a waiter that discards what it heard, because it is about to ask the nodes, hears of the next release.
#[test]
fn a_watch_that_is_reset_hears_of_the_next_release() {
    in_many_orders(|| {
        let subscription = subscription(3);
        let mut watch = ReleaseWatch::new(&subscription);
        subscription.signal.notify(0, 2);
        subscription.signal.notify(1, 2);
        let resetting = spawn(move || {
            watch.reset();
            watch
        });
        let mut watch = resetting.join().unwrap();
        let nodes = [0, 1].map(|node| publishing(&subscription, node));
        assert_eq!(block_on(watch.released()), 2);
        join(nodes);
    });
}

/// Invariant: a waiter that sleeps hears that a majority is subscribed, or no longer is: it may have missed a release.
#[test]
fn a_watch_hears_that_a_majority_is_subscribed() {
    in_many_orders(|| {
        let subscription = subscription(3);
        let mut watch = ReleaseWatch::new(&subscription);
        let nodes = [0, 1].map(|node| {
            let signal = Arc::clone(&subscription.signal);
            spawn(move || signal.set_subscribed(node, true))
        });
        block_on(watch.released());
        assert!(watch.is_subscribed());
        join(nodes);
    });
}
