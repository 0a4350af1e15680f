//! Tests of the state of a lock.

use std::mem::ManuallyDrop;

use super::*;
use crate::lock::guard::LockGuard;
use crate::lock::redlock::Redlock;
use crate::node::telemetry::LockLabels;
use crate::protocol::{LockKey, LockKeys};

#[cfg(shuttle)]
mod schedules;

/// A lock that is held, and its guard.
pub(crate) fn granted(key: &str) -> (Arc<LockState>, LockGuard) {
    let redlock = Redlock::builder().embedded(1).build().unwrap();
    let core = redlock.core();
    let cluster = &core.layout.groups[0].cluster;
    let (keys, ttl) = (LockKeys::from(LockKey::from(key)), Duration::from_secs(1));
    let labels = LockLabels {
        resource: "test",
        group: None,
    };
    let spec = LockSpec::new(cluster, &core.registry, &keys, [].into(), ttl, labels);
    let now = Instant::now();
    let state = LockState::new(&Arc::new(spec), now);
    state.grant(None, now + ttl);
    let guard = LockGuard::new(&state);
    (state, guard)
}

/// Otherwise nothing would give its permit back before something is due.
#[test]
fn task_of_a_lock_that_was_revoked_meanwhile_does_not_rest() {
    let rest = || Rest::new(async {});
    let (held, _guard) = granted("k");
    assert!(held.set_rest(rest()).is_none());
    assert!(held.take_rest().is_some());
    held.revoke();
    assert!(held.set_rest(rest()).is_some());
}

/// The last share of one lease may go while another task asks for more.
#[tokio::test]
async fn handle_of_several_leases_keeps_no_share_if_one_of_them_is_gone() {
    let ((kept, first), (gone, second)) = (granted("a"), granted("b"));
    let guard = first.join(vec![second]);
    gone.leave();
    assert!(guard.handle().upgrade().is_err());
    // Its share of the second one is gone.
    let _forgotten = ManuallyDrop::new(guard);
    kept.leave();
    assert!(!kept.is_shared());
}
