//! The locks of one request, which its layers and extractors share.
//!
//! # Implementation details
//!
//! All layers and extractors of a request add the locks that they take to one list in its extensions. Before one
//! of them asks for keys, it takes a share of every lock on the list that has one of them, so that none of these can
//! be released meanwhile. Keys that the request holds already are not asked for again; the new guard keeps the shares.
//!
//! Requests must not wait for each other in a circle. A request that holds locks waits for further keys only if
//! these come after all keys that it holds in the order of the service, and if all its locks are of one service; otherwise it tries once.

use std::future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::future::Either;
use http::Extensions;
use smallvec::SmallVec;

use crate::lock::{
    LockError, LockFuture, LockGuard, LockHandle, LockOptions, Lost, LostReason, Redlock,
    ReleaseError, Releasing, RequestShare, first_slots,
};
use crate::middleware::config::OnLost;
use crate::node::Mutex;
use crate::protocol::lease::Access;
use crate::protocol::{LockKey, LockKeys};

/// Handles of all locks that were taken for a request, outermost first: by the layers of a stack
/// and by [`Locked`](crate::Locked) extractors. Some may have been released since.
///
/// They are an extension of the request. A request that is made with a clone of these extensions counts as the
/// same request and shares its locks. A handler that makes such requests and wants them to exclude each other
/// removes `LockHandles` from the extensions first.
// Most requests take one lock.
#[derive(Debug, Clone)]
pub struct LockHandles(Arc<Mutex<SmallVec<[(LockHandle, OnLost); 1]>>>);

/// A share of a lock that a request holds, with the effect of its loss.
///
/// The handler may give the share up by [`LockHandle::release`]. From then on the lock cannot be lost any more.
pub(crate) struct HeldShare {
    share: Arc<RequestShare>,
    /// By which the handler may give up the share.
    pub(super) handle: LockHandle,
    pub(crate) on_lost: OnLost,
    /// Whether the end of the response waits for the release. Otherwise the lock is released in the background.
    awaits_release: bool,
    /// Once a task waits for the loss.
    lost: Option<Lost>,
    /// Once the share is given up.
    release: Option<Either<Releasing, Waiting>>,
}

/// The wait for the release of a lock that others hold too, or that does not rest.
type Waiting = Pin<Box<dyn Future<Output = Result<(), ReleaseError>> + Send + Sync>>;

impl LockHandles {
    /// Returns the handles.
    #[must_use]
    pub fn to_vec(&self) -> Vec<LockHandle> {
        let held = self.0.lock();
        held.iter().map(|(handle, _)| handle.clone()).collect()
    }

    /// Returns the handles of a request, none at first. Clones of the extensions share them.
    pub(crate) fn from_extensions(extensions: &mut Extensions) -> Self {
        extensions
            .get_or_insert_with(|| Self(Arc::default()))
            .clone()
    }

    /// Adds a lock that was taken for the request, with the effect of its loss on the handler.
    pub(crate) fn add(&self, handle: &LockHandle, on_lost: OnLost) {
        let mut held = self.0.lock();
        match held.iter_mut().find(|(known, _)| known.is_same(handle)) {
            // Of several layers with one lock, each stops what is inside of it.
            Some((_, known)) if on_lost == OnLost::Abort => *known = OnLost::Abort,
            Some(_) => {}
            // Each lock beside it has an entry of its own.
            None => held.push((handle.alone(), on_lost)),
        }
    }

    /// Takes a share of every lock that the request still holds.
    pub(crate) fn share(&self) -> Vec<HeldShare> {
        let held = self.0.lock();
        let shares = held.iter().filter_map(|(handle, on_lost)| {
            let guard = handle.upgrade().ok()?;
            Some(HeldShare::new(guard, *on_lost, false))
        });
        shares.collect()
    }

    /// Asks for those `keys` that a request with these handles does not hold yet, and shares the others.
    ///
    /// A lock that is released or about to be does not count as held: a layer outside that calls again, such as
    /// `tower::retry`, does not hold it any more.
    ///
    /// # Errors
    ///
    /// Resolves to [`LockError::HeldShared`] if the request holds a key as a reader, and asks for it alone.
    pub(crate) fn lock(
        handles: Option<&Self>,
        redlock: &Redlock,
        keys: LockKeys,
        options: LockOptions,
    ) -> LockFuture {
        let options = redlock.request_options(options);
        let request = |missing: LockKeys, may_wait: bool| {
            let wait = options.wait.filter(|_| may_wait).or(Some(Duration::ZERO));
            let request = redlock.request(missing, LockOptions { wait, ..options });
            request.into_future()
        };
        let handles = handles.map(Self::to_vec).unwrap_or_default();
        if handles.is_empty() {
            return request(keys, true);
        }
        // With a share of a lost lock, a handler would start without a lock.
        let valid = handles.iter().filter(|handle| handle.is_valid());
        let shares = valid.filter_map(|handle| Some((handle, handle.upgrade().ok()?)));
        let (ours, others): (Vec<_>, Vec<_>) = shares.partition(|(handle, _)| redlock.owns(handle));
        let held: Vec<LockGuard> = ours.into_iter().map(|(_, guard)| guard).collect();
        let comes_after = |wanted: &LockKeys| {
            let held = held.iter().flat_map(LockGuard::keys);
            // Locks of different services have no order.
            others.is_empty() && redlock.core().layout.comes_after(wanted, held)
        };
        let access = options.access.unwrap_or_default();
        if let Access::Slot(count) = access {
            // The keys of a slot are others than these.
            let may_wait = comes_after(&first_slots(&keys));
            let mut held = held.into_iter();
            return match held.find(|held| held.is_slot_of(&keys, count)) {
                Some(slot) => LockFuture(Box::pin(future::ready(Ok(slot)))),
                None => request(keys, may_wait),
            };
        }
        let is_wanted =
            |guard: &LockGuard| keys.as_slice().iter().any(|key| guard.keys().contains(key));
        let is_of_reader = |guard: &&LockGuard| guard.lease().spec.lease.access == Access::Shared;
        if access == Access::Exclusive && held.iter().filter(is_of_reader).any(is_wanted) {
            return LockFuture(Box::pin(future::ready(Err(LockError::HeldShared))));
        }
        let is_held = |key: &&LockKey| held.iter().any(|guard| guard.keys().contains(*key));
        let missing: LockKeys = keys.as_slice().iter().filter(|key| !is_held(key)).collect();
        let may_wait = comes_after(&missing);
        let mut shared: Vec<LockGuard> = held.into_iter().filter(is_wanted).collect();
        if shared.is_empty() {
            // With no keys at all, it resolves to an error.
            return request(missing, may_wait);
        }
        let is_complete = missing.as_slice().is_empty();
        let missing = (!is_complete).then(|| request(missing, may_wait));
        LockFuture(Box::pin(async move {
            let first = match missing {
                Some(missing) => missing.await?,
                None => shared.remove(0),
            };
            Ok(first.with_others(shared))
        }))
    }
}

impl HeldShare {
    pub(crate) fn new(guard: LockGuard, on_lost: OnLost, awaits_release: bool) -> Self {
        let (share, handle) = RequestShare::new(guard);
        Self {
            share,
            handle,
            on_lost,
            awaits_release,
            lost: None,
            release: None,
        }
    }

    /// Returns why the lock was lost, by the report of its lease or by the clock.
    pub(crate) fn lost_reason(&self) -> Option<LostReason> {
        self.share.lost_reason()
    }

    /// Does the same, and registers the task to be woken when the lease reports the loss.
    pub(crate) fn check_lost(&mut self, context: &mut Context<'_>) -> Option<LostReason> {
        let lost = self.lost.get_or_insert_with(|| self.handle.lost());
        if Pin::new(lost).poll(context).is_ready() {
            self.lost = None;
        }
        self.lost_reason()
    }

    /// Returns whether the release has begun.
    pub(super) fn is_releasing(&self) -> bool {
        self.release.is_some()
    }

    /// Releases this share, and waits until a majority has confirmed the release, if the response waits for it.
    pub(super) fn poll_release(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.awaits_release {
            return Poll::Ready(());
        }
        let release = self.release.get_or_insert_with(|| {
            let ended = self.share.end().map(LockGuard::end);
            // Unless the handler has given up the share.
            match ended.unwrap_or_else(|| Err(self.handle.clone())) {
                Ok(releasing) => Either::Left(releasing),
                Err(handle) => {
                    Either::Right(Box::pin(async move { handle.released().await.map(drop) }))
                }
            }
        });
        // The lock ends by its ttl at the latest.
        if let Err(error) = ready!(Pin::new(release).poll(context)) {
            tracing::debug!(%error, "redlock lock released without confirmation");
        }
        Poll::Ready(())
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Both checks of a lock that its handler gives up after a time.
    async fn checked_after(held_for: Duration) -> [Option<LostReason>; 2] {
        let redlock = Redlock::builder().embedded(3).renew(false);
        let redlock = redlock.ttl(Duration::from_secs(1)).build().unwrap();
        let guard = redlock.lock("report").await.unwrap();
        let mut held = HeldShare::new(guard, OnLost::Abort, true);
        let mut context = Context::from_waker(Waker::noop());
        assert_eq!(held.check_lost(&mut context), None);
        tokio::time::advance(held_for).await;
        let released = held.handle.release().await;
        assert_eq!(released.is_ok(), held_for < Duration::from_secs(1));
        // The lock would have expired by now.
        tokio::time::advance(Duration::from_secs(1)).await;
        [held.check_lost(&mut context), held.lost_reason()]
    }

    #[tokio::test(start_paused = true)]
    async fn lock_that_was_given_up_is_lost_only_if_it_was_so_before() {
        assert_eq!(checked_after(Duration::from_millis(500)).await, [None; 2]);
        let expired = Some(LostReason::Expired);
        assert_eq!(checked_after(Duration::from_secs(2)).await, [expired; 2]);
    }
}
