//! Who is measured, behind one face.

use std::time::Duration;

use rslock::LockManager;
use tower_redlock::{LockGuard, Redlock, RestartGuard};

use crate::by_hand::{ByHand, Claim};

/// The contestants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Who {
    Ours,
    OursFenced,
    ByHand,
    ByHandFenced,
    Rslock,
}

impl Who {
    pub(crate) const ALL: [Self; 5] = [
        Self::Ours,
        Self::OursFenced,
        Self::ByHand,
        Self::ByHandFenced,
        Self::Rslock,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "tower-redlock, fencing off",
            Self::OursFenced => "tower-redlock, fencing on",
            Self::ByHand => "by hand",
            Self::ByHandFenced => "by hand, same scripts",
            Self::Rslock => "rslock",
        }
    }

    pub(crate) fn is_fenced(self) -> bool {
        matches!(self, Self::OursFenced | Self::ByHandFenced)
    }

    /// Makes the contestant, with the connections and the settings that it has by default.
    pub(crate) async fn connect(self, urls: &[String]) -> Participant {
        match self {
            Self::Ours | Self::OursFenced => {
                let builder = Redlock::builder().urls(urls).fencing(self.is_fenced());
                // Fresh servers would refuse locks for their first 20 seconds.
                let built = builder.restart_guard(RestartGuard::Off).build();
                Participant::Ours(built.expect("the settings make sense"))
            }
            Self::ByHand | Self::ByHandFenced => {
                Participant::ByHand(ByHand::connect(urls, self.is_fenced()).await)
            }
            Self::Rslock => Participant::Rslock(LockManager::new(urls.to_vec())),
        }
    }
}

/// A contestant with its connections.
#[derive(Clone)]
pub(crate) enum Participant {
    Ours(Redlock),
    ByHand(ByHand),
    Rslock(LockManager),
}

impl Participant {
    /// Asks once; `None` if that failed for whatever reason.
    pub(crate) async fn acquire(&self, key: &str) -> Option<Held> {
        match self {
            Self::Ours(redlock) => redlock.try_lock(key).await.ok().map(Held::Ours),
            Self::ByHand(by_hand) => by_hand.acquire(key).await.map(Held::ByHand),
            Self::Rslock(manager) => {
                let lock = manager.lock(key.as_bytes(), TTL).await;
                lock.ok().map(Held::Rslock)
            }
        }
    }

    /// Gives back, as thoroughly as it does by itself; false if it says that this failed.
    pub(crate) async fn release(&self, held: Held) -> bool {
        match (self, held) {
            (_, Held::Ours(guard)) => guard.release().await.is_ok(),
            (Self::ByHand(by_hand), Held::ByHand(claim)) => by_hand.release(&claim).await,
            (Self::Rslock(manager), Held::Rslock(lock)) => {
                manager.unlock(&lock).await;
                true
            }
            _ => false,
        }
    }
}

/// A lock of one of them.
pub(crate) enum Held {
    Ours(LockGuard),
    ByHand(Claim),
    Rslock(rslock::Lock),
}

/// What `Redlock::builder` has by default.
pub(crate) const TTL: Duration = Duration::from_secs(10);
