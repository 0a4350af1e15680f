//! The locks of one request, so that its layers and extractors share them instead of colliding.

use std::future::IntoFuture;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Extensions;

use crate::lock::{LockFuture, LockGuard, LockHandle, LockRequest, Redlock};
use crate::protocol::{LockKey, LockKeys};

/// Handles of all locks that were taken for a request, outermost first: by the layers of a stack
/// and by [`Locked`](crate::Locked) extractors. Some may have been released since.
///
/// They are in the extensions of the request, and what is made from a clone of these is the same
/// request: it shares its locks. A handler that makes requests of its own from those extensions, to
/// run at once, and wants them to exclude each other takes `LockHandles` out of them first.
#[derive(Debug, Clone, Default)]
pub struct LockHandles(Arc<Mutex<Vec<LockHandle>>>);

impl LockHandles {
    /// Returns the handles.
    #[must_use]
    pub fn to_vec(&self) -> Vec<LockHandle> {
        self.handles().clone()
    }

    /// Returns the locks of a request, none at first. Clones of the extensions have the same.
    pub(crate) fn of(extensions: &mut Extensions) -> Self {
        extensions.get_or_insert_default::<Self>().clone()
    }

    /// Notes a lock that was taken for the request.
    pub(crate) fn add(&self, handle: &LockHandle) {
        let mut handles = self.handles();
        if !handles.iter().any(|known| known.is_same(handle)) {
            // What is beside it is here already, by itself.
            handles.push(handle.alone());
        }
    }

    /// Whether a lock of this service on `key` was taken for the request.
    #[cfg(feature = "idempotency")]
    pub(crate) fn have(&self, redlock: &Redlock, key: &LockKey) -> bool {
        self.handles()
            .iter()
            .any(|handle| handle.is_of(redlock) && handle.keys().contains(key))
    }

    /// Asks for what of `keys` the request does not hold yet, and shares the rest.
    ///
    /// A request that holds a lock waits for another only if all that it asks for sorts after all
    /// that it holds, in the same service, and tries once otherwise; so requests cannot wait for each
    /// other in a circle. What an idempotent request is executed under does not count: only duplicates
    /// of that wait for it, and they hold nothing that it could want.
    pub(crate) fn lock(
        &self,
        redlock: &Redlock,
        keys: LockKeys,
        ask: impl FnOnce(LockRequest) -> LockRequest,
    ) -> LockFuture {
        let mut handles = self.handles().clone();
        // A share of a lock that is lost would let a handler begin without one.
        handles.retain(LockHandle::is_valid);
        if handles.is_empty() {
            return ask(redlock.lock_keys(keys)).into_future();
        }
        let (ours, others): (Vec<_>, Vec<_>) =
            handles.iter().partition(|handle| handle.is_of(redlock));
        let held = ours.iter().filter_map(|handle| handle.detach().ok());
        let held: Vec<LockGuard> = held.collect();
        let is_held = |key: &&LockKey| held.iter().any(|guard| guard.keys().contains(*key));
        let missing: LockKeys = keys.as_slice().iter().filter(|key| !is_held(key)).collect();
        let in_the_way = |handle: &&LockHandle| !handle.is_of_execution();
        let ordered = ours.iter().copied().filter(in_the_way);
        let last_held = ordered.flat_map(LockHandle::keys).max();
        // Of different services there is no order.
        let in_order = !others.iter().any(in_the_way) && last_held < missing.as_slice().first();
        let wanted =
            |guard: &LockGuard| keys.as_slice().iter().any(|key| guard.keys().contains(key));
        let mut shared: Vec<LockGuard> = held.into_iter().filter(wanted).collect();
        if missing.as_slice().is_empty() && !shared.is_empty() {
            let first = shared.remove(0);
            return LockFuture::ready(first.beside(shared));
        }
        let mut request = ask(redlock.lock_keys(missing));
        if !in_order {
            request = request.wait(Duration::ZERO);
        }
        request.into_future().beside(shared)
    }

    fn handles(&self) -> MutexGuard<'_, Vec<LockHandle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
