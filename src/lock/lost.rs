//! How a holder learns that its lock is gone.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::watch;

use crate::lock::lease::Status;

/// Why a lock is not held any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// A majority of the nodes says that the key is not this holder's: it expired there early, was
    /// deleted, or somebody else has it by now.
    Gone,
    /// Its validity ended: a majority of the nodes could not be reached to renew it, or renewal
    /// is off.
    Expired,
    /// It was renewed as long as `max_hold` allows.
    MaxHold,
    /// It was released. Only a handle or a `lost()` future that outlives the guards sees this.
    Released,
    /// The task that looked after it is gone: the runtime shut down, or the task panicked. The
    /// key ends by its ttl.
    Abandoned,
}

impl LostReason {
    /// The name of the case in metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Expired => "expired",
            Self::MaxHold => "max_hold",
            Self::Released => "released",
            Self::Abandoned => "abandoned",
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => "a majority of the nodes says that it is not held any more",
            Self::Expired => "its validity ended before a majority of the nodes renewed it",
            Self::MaxHold => "it was held for as long as max_hold allows",
            Self::Released => "it was released",
            Self::Abandoned => "the task that renewed it is gone",
        })
    }
}

/// Future that resolves when a lock is not held any more, and says why.
///
/// It owns what it needs, holds no share of the lock, and may be dropped and made again at will.
#[must_use = "futures do nothing unless awaited"]
pub struct Lost(Pin<Box<dyn Future<Output = LostReason> + Send + Sync>>);

impl Lost {
    pub(super) fn new(mut status: watch::Receiver<Status>) -> Self {
        Self(Box::pin(async move {
            loop {
                if let Some(reason) = Status::over(&status) {
                    return reason;
                }
                // An error means that the lease task is gone, which `over` sees too.
                drop(status.changed().await);
            }
        }))
    }

    /// Resolves with whichever lock is lost first.
    pub(super) fn or(self, other: Self) -> Self {
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
