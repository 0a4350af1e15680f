//! Threads that begin to wait at once, under the caps of a lock service and of a layer.

use shuttle::thread::spawn;

use super::super::*;
use crate::node::sync::tests::{in_many_orders, join};

/// Invariant: never more calls wait than a cap allows, of several at least one does, and each frees what it occupied, once.
#[test]
fn no_more_calls_wait_than_the_caps_allow() {
    in_many_orders(|| {
        let caps = [WaiterCap::new(2), WaiterCap::new(1)];
        let [inside, admitted] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let calls = [(); 3].map(|()| {
            let (caps, inside) = (caps.clone(), Arc::clone(&inside));
            let admitted = Arc::clone(&admitted);
            spawn(move || {
                let mut slots = Wait::new(Instant::now(), caps, &Arc::default());
                if slots.occupy().is_ok() {
                    admitted.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "one too many");
                    inside.fetch_sub(1, Ordering::SeqCst);
                }
            })
        });
        join(calls);
        assert!(admitted.load(Ordering::SeqCst) > 0, "all were refused");
        let occupied = caps.map(|cap| cap.waiting.load(Ordering::SeqCst));
        assert_eq!(occupied, [0, 0]);
    });
}
