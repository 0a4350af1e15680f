//! Who is measured, behind one face.

use std::time::Duration;

use rslock::LockManager;
use tokio::time::Instant;
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

    /// Those whose waiters in several processes know what to do.
    pub(crate) const WITHOUT_HANDWORK: [Self; 3] = [Self::Ours, Self::OursFenced, Self::Rslock];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "tower-redlock, fencing off",
            Self::OursFenced => "tower-redlock, fencing on",
            Self::ByHand => "by hand",
            Self::ByHandFenced => "by hand, same scripts",
            Self::Rslock => "rslock",
        }
    }

    /// For lines that have little room.
    pub(crate) fn short(self) -> &'static str {
        match self {
            Self::Ours => "fencing off",
            Self::OursFenced => "fencing on",
            Self::ByHand | Self::ByHandFenced | Self::Rslock => self.name(),
        }
    }

    /// Finds who is called so; the reverse of [`Who::name`].
    pub(crate) fn named(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|who| who.name() == name);
        found.unwrap_or_else(|| panic!("nobody is called {name:?}"))
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

    /// Asks until it has the lock; `None` if that took longer than `patience`.
    pub(crate) async fn acquire_waiting(&self, key: &str, patience: Duration) -> Option<Held> {
        match self {
            Self::Ours(redlock) => {
                let guard = redlock.lock(key).wait(patience).await;
                guard.ok().map(Held::Ours)
            }
            Self::ByHand(by_hand) => {
                let claim = by_hand.acquire_in_turn(key, patience).await;
                claim.map(Held::ByHand)
            }
            Self::Rslock(_) => {
                // It gives up after three attempts of its own.
                let deadline = Instant::now() + patience;
                while Instant::now() < deadline {
                    if let Some(held) = self.acquire(key).await {
                        return Some(held);
                    }
                }
                None
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
