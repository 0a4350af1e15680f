//! The loss of a lock.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

/// The reason for which a lock is no longer held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// A majority of the nodes reported that the key no longer belongs to this holder: it expired early, was
    /// deleted, or was acquired by another client.
    Gone,
    /// The validity ended: a majority of the nodes could not be reached to renew the lock, or renewal
    /// is off.
    Expired,
    /// The lock was renewed for as long as `max_hold` allows.
    MaxHold,
    /// The lock was released. Only a handle or a [`Lost`] future that outlives the guards resolves to this.
    Released,
    /// The lock was revoked by [`Redlock::revoke`](crate::Redlock::revoke) in this process. A revocation in another
    /// process is reported as [`Gone`](Self::Gone).
    Revoked,
    /// The lease task is gone: the runtime shut down, or the task panicked. The key expires by its ttl.
    Abandoned,
}

impl LostReason {
    /// Returns the name of the reason in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Expired => "expired",
            Self::MaxHold => "max_hold",
            Self::Released => "released",
            Self::Revoked => "revoked",
            Self::Abandoned => "abandoned",
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => "a majority of the nodes reported that the lock is not held any more",
            Self::Expired => "its validity ended before a majority of the nodes renewed it",
            Self::MaxHold => "it was held for as long as max_hold allows",
            Self::Released => "it was released",
            Self::Revoked => "it was revoked",
            Self::Abandoned => "the task that renewed it is gone",
        })
    }
}

/// Future that resolves to the reason when a lock is lost.
///
/// It borrows nothing and holds no share of the lock.
///
/// # Cancel safety
///
/// May be dropped at any point: a loss is not forgotten, so a new future resolves to it as well.
#[must_use = "futures do nothing unless awaited"]
pub struct Lost(Pin<Box<dyn Future<Output = LostReason> + Send + Sync>>);

impl Lost {
    pub(crate) fn new(lost: impl Future<Output = LostReason> + Send + Sync + 'static) -> Self {
        Self(Box::pin(lost))
    }

    /// Returns a future that resolves when the first of two locks is lost.
    pub(crate) fn or(self, other: Self) -> Self {
        let (mut first, mut second) = (self, other);
        Self(Box::pin(poll_fn(move |context| {
            match Pin::new(&mut first).poll(context) {
                Poll::Ready(reason) => Poll::Ready(reason),
                Poll::Pending => Pin::new(&mut second).poll(context),
            }
        })))
    }
}

impl Future for Lost {
    type Output = LostReason;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<LostReason> {
        self.0.as_mut().poll(context)
    }
}

impl fmt::Debug for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lost").finish_non_exhaustive()
    }
}
