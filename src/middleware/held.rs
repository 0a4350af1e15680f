//! The locks of one request, so that its layers and extractors share them instead of colliding.

use std::future::IntoFuture;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Extensions;

use crate::lock::{LockFuture, LockGuard, LockHandle, LockRequest, Redlock};
use crate::middleware::layer::OnLost;
use crate::protocol::{LockKey, LockKeys};

/// Handles of all locks that were taken for a request, outermost first: by the layers of a stack
/// and by [`Locked`](crate::Locked) extractors. Some may have been released since.
///
/// They are in the extensions of the request, and what is made from a clone of these is the same
/// request: it shares its locks. A handler that makes requests of its own from those extensions, to
/// run at once, and wants them to exclude each other takes `LockHandles` out of them first.
#[derive(Debug, Clone, Default)]
pub struct LockHandles(Arc<Mutex<Vec<Known>>>);

/// A lock that was taken for the request.
#[derive(Debug, Clone)]
struct Known {
    handle: LockHandle,
    on_lost: OnLost,
}

/// A share of a lock that a request holds, for what goes on without the request's future.
#[cfg(feature = "idempotency")]
pub(crate) struct HeldLock {
    pub(crate) guard: LockGuard,
    pub(crate) on_lost: OnLost,
}

impl LockHandles {
    /// Returns the handles.
    #[must_use]
    pub fn to_vec(&self) -> Vec<LockHandle> {
        self.known()
            .iter()
            .map(|known| known.handle.clone())
            .collect()
    }

    /// Returns the locks of a request, none at first. Clones of the extensions have the same.
    pub(crate) fn of(extensions: &mut Extensions) -> Self {
        extensions.get_or_insert_default::<Self>().clone()
    }

    /// Notes a lock that was taken for the request, and what is to happen to the handler when it is lost.
    pub(crate) fn add(&self, handle: &LockHandle, on_lost: OnLost) {
        let mut known = self.known();
        if !known.iter().any(|known| known.handle.is_same(handle)) {
            // What is beside it is here already, by itself.
            let handle = handle.alone();
            known.push(Known { handle, on_lost });
        }
    }

    /// Takes a share of every lock that the request still holds.
    #[cfg(feature = "idempotency")]
    pub(crate) fn share(&self) -> Vec<HeldLock> {
        let known = self.known();
        let held = known.iter().filter_map(|known| {
            let guard = known.handle.upgrade().ok()?;
            let on_lost = known.on_lost;
            Some(HeldLock { guard, on_lost })
        });
        held.collect()
    }

    /// Asks for what of `keys` the request does not hold yet, and shares the rest.
    ///
    /// A request that holds a lock waits for another only if all that it asks for sorts after all
    /// that it holds, in the same service, and tries once otherwise; so requests cannot wait for each
    /// other in a circle. A lock that has been released, or is about to be, does not count: a layer outside
    /// that calls again, such as `tower::retry`, holds it no longer.
    pub(crate) fn lock(
        &self,
        redlock: &Redlock,
        keys: LockKeys,
        ask: impl FnOnce(LockRequest) -> LockRequest,
    ) -> LockFuture {
        let handles = self.to_vec();
        // A share of a lock that is lost would let a handler begin without one.
        let valid = handles.iter().filter(|handle| handle.is_valid());
        // With a share of each, none of them can be released from here on.
        let shares = valid.filter_map(|handle| Some((handle, handle.upgrade().ok()?)));
        let (ours, others): (Vec<_>, Vec<_>) =
            shares.partition(|(handle, _)| redlock.owns(&handle));
        if ours.is_empty() && others.is_empty() {
            return ask(redlock.lock_keys(keys)).into_future();
        }
        let held: Vec<LockGuard> = ours.into_iter().map(|(_, guard)| guard).collect();
        let is_held = |key: &&LockKey| held.iter().any(|guard| guard.keys().contains(*key));
        let missing: LockKeys = keys.as_slice().iter().filter(|key| !is_held(key)).collect();
        let last_held = held.iter().flat_map(LockGuard::keys).max();
        // Of different services there is no order.
        let in_order = others.is_empty() && last_held < missing.as_slice().first();
        let wanted =
            |guard: &LockGuard| keys.as_slice().iter().any(|key| guard.keys().contains(key));
        let mut shared: Vec<LockGuard> = held.into_iter().filter(wanted).collect();
        if missing.as_slice().is_empty() && !shared.is_empty() {
            let first = shared.remove(0);
            return LockFuture::ready(first.with_others(shared));
        }
        let mut request = ask(redlock.lock_keys(missing));
        if !in_order {
            request = request.wait(Duration::ZERO);
        }
        request.into_future().with_others(shared)
    }

    fn known(&self) -> MutexGuard<'_, Vec<Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
