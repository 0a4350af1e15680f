//! Threads that publish releases while others watch for them.

use shuttle::future::block_on;
use shuttle::thread::spawn;

use super::*;
use crate::node::sync::tests::{in_many_orders, join};

fn publishing(node: &Subscriber) -> shuttle::thread::JoinHandle<()> {
    let node = node.clone();
    spawn(move || node.notify(2))
}

/// Invariant: each watch fires once a majority has published, also if it begins to wait meanwhile, and takes no message
/// of another watch.
#[test]
fn each_watch_hears_of_a_release_that_a_majority_publishes() {
    in_many_orders(|| {
        let (subscription, nodes) = subscription(3);
        let watching = [(); 2].map(|()| {
            let mut watch = ReleaseWatch::new(&subscription);
            spawn(move || assert_eq!(block_on(watch.released()), 2))
        });
        let publishing = [0, 2].map(|node| publishing(&nodes[node]));
        join(watching);
        join(publishing);
    });
}

/// Invariant: a waiter that discards what it heard, because it is about to ask the nodes, hears of the next release.
#[test]
fn a_watch_that_is_reset_hears_of_the_next_release() {
    in_many_orders(|| {
        let (subscription, nodes) = subscription(3);
        let mut watch = ReleaseWatch::new(&subscription);
        nodes[0].notify(2);
        nodes[1].notify(2);
        let resetting = spawn(move || {
            watch.reset();
            watch
        });
        let mut watch = resetting.join().unwrap();
        let publishing = [0, 1].map(|node| publishing(&nodes[node]));
        assert_eq!(block_on(watch.released()), 2);
        join(publishing);
    });
}

/// Invariant: a waiter that sleeps hears that a majority is subscribed, or no longer is: it may have missed a release.
#[test]
fn a_watch_hears_that_a_majority_is_subscribed() {
    in_many_orders(|| {
        let (subscription, nodes) = subscription(3);
        let mut watch = ReleaseWatch::new(&subscription);
        let subscribing = [0, 1].map(|node| {
            let node = nodes[node].clone();
            spawn(move || node.set_subscribed(true))
        });
        block_on(watch.released());
        assert!(watch.is_subscribed());
        join(subscribing);
    });
}
