//! The measured implementations, behind one interface.

use std::sync::LazyLock;
use std::time::Duration;

use rslock::LockManager;
use tokio::runtime::{self, Runtime};
use tokio::time::Instant;
use tower_redlock::{LockGuard, Redlock, RestartGuard};

use crate::batched::{Batched, BatchedClaim};
use crate::by_hand::{ByHand, Claim};
use crate::same::TTL;

/// The runtime of its own that the guide recommends to programs that block.
static BACKGROUND: LazyLock<Runtime> = LazyLock::new(|| {
    let mut builder = runtime::Builder::new_multi_thread();
    let built = builder.worker_threads(1).enable_all().build();
    built.expect("a thread can be started")
});

/// The measured implementations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Who {
    Ours,
    /// Its connections and leases in a runtime on a thread of its own.
    OursElsewhere,
    OursFenced,
    ByHand,
    ByHandFenced,
    Batched,
    BatchedFenced,
    Rslock,
}

impl Who {
    pub(crate) const ALL: [Self; 8] = [
        Self::Ours,
        Self::OursElsewhere,
        Self::OursFenced,
        Self::ByHand,
        Self::ByHandFenced,
        Self::Batched,
        Self::BatchedFenced,
        Self::Rslock,
    ];

    /// The participants that wait for a key, and that survive the failure of a node.
    pub(crate) const WITHOUT_BATCHED: [Self; 5] = [
        Self::Ours,
        Self::OursFenced,
        Self::ByHand,
        Self::ByHandFenced,
        Self::Rslock,
    ];

    /// The participants that support waiters in several processes.
    pub(crate) const WITHOUT_HANDWORK: [Self; 3] = [Self::Ours, Self::OursFenced, Self::Rslock];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "tower-redlock, fencing off",
            Self::OursElsewhere => "tower-redlock, a runtime of its own",
            Self::OursFenced => "tower-redlock, fencing on",
            Self::ByHand => "by hand",
            Self::ByHandFenced => "by hand, same scripts",
            Self::Batched => "by hand, batched",
            Self::BatchedFenced => "by hand, batched, fenced",
            Self::Rslock => "rslock",
        }
    }

    /// Returns a short name, for narrow lines.
    pub(crate) fn short(self) -> &'static str {
        match self {
            Self::Ours => "fencing off",
            Self::OursElsewhere => "a runtime of its own",
            Self::OursFenced => "fencing on",
            Self::ByHand
            | Self::ByHandFenced
            | Self::Batched
            | Self::BatchedFenced
            | Self::Rslock => self.name(),
        }
    }

    /// Finds the participant of a name; the reverse of [`Who::name`].
    pub(crate) fn named(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|who| who.name() == name);
        found.unwrap_or_else(|| panic!("no participant is called {name:?}"))
    }

    pub(crate) fn is_fenced(self) -> bool {
        matches!(
            self,
            Self::OursFenced | Self::ByHandFenced | Self::BatchedFenced
        )
    }

    /// Connects the participant, with its default connections and settings.
    pub(crate) async fn connect(self, urls: &[String]) -> Participant {
        match self {
            Self::Ours | Self::OursElsewhere | Self::OursFenced => {
                let builder = Redlock::builder().urls(urls).fencing(self.is_fenced());
                let builder = match self {
                    Self::OursElsewhere => builder.runtime(BACKGROUND.handle().clone()),
                    _ => builder,
                };
                // Fresh servers refuse locks for their first 20 seconds.
                let built = builder.restart_guard(RestartGuard::Off).build();
                Participant::Ours(built.expect("the settings are valid"))
            }
            Self::ByHand | Self::ByHandFenced => {
                Participant::ByHand(ByHand::connect(urls, self.is_fenced()).await)
            }
            Self::Batched | Self::BatchedFenced => {
                Participant::Batched(Batched::connect(urls, self.is_fenced()).await)
            }
            Self::Rslock => Participant::Rslock(LockManager::new(urls.to_vec())),
        }
    }
}

/// A participant with its connections.
#[derive(Clone)]
pub(crate) enum Participant {
    Ours(Redlock),
    ByHand(ByHand),
    Batched(Batched),
    Rslock(LockManager),
}

impl Participant {
    /// Tries once; returns `None` on any failure.
    pub(crate) async fn acquire(&self, key: &str) -> Option<Held> {
        match self {
            Self::Ours(redlock) => redlock.try_lock(key).await.ok().map(Held::Ours),
            Self::ByHand(by_hand) => by_hand.acquire(key).await.map(Held::ByHand),
            Self::Batched(batched) => batched.acquire(key).await.map(Held::Batched),
            Self::Rslock(manager) => {
                let lock = manager.lock(key.as_bytes(), TTL).await;
                lock.ok().map(Held::Rslock)
            }
        }
    }

    /// Waits for the lock; returns `None` after `patience`.
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
            Self::Batched(_) | Self::Rslock(_) => {
                // rslock gives up after three attempts, a batched lock after one.
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

    /// Releases the lock and waits for the confirmation, if there is one; false if it failed.
    pub(crate) async fn release(&self, held: Held) -> bool {
        match (self, held) {
            (_, Held::Ours(guard)) => guard.release().await.is_ok(),
            (Self::ByHand(by_hand), Held::ByHand(claim)) => by_hand.release(&claim).await,
            (Self::Batched(batched), Held::Batched(claim)) => batched.release(&claim).await,
            (Self::Rslock(manager), Held::Rslock(lock)) => {
                manager.unlock(&lock).await;
                true
            }
            _ => false,
        }
    }
}

/// A lock of a participant.
pub(crate) enum Held {
    Ours(LockGuard),
    ByHand(Claim),
    Batched(BatchedClaim),
    Rslock(rslock::Lock),
}
