//! Who leads, for those who do not.

use std::sync::Arc;

use tokio::time::timeout;

use crate::lock::{DrainStage, Group, LockError, Redlock};
use crate::node::ReleaseWatch;
use crate::once::inspect::{inspect, names};
use crate::protocol::message::KeyState;
use crate::protocol::{FencingToken, Holder, LockKey};

/// The caller that holds a key, as a majority of the nodes tells.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leader {
    /// Who it is, if it says so; see [`RedlockBuilder::holder`](crate::RedlockBuilder::holder).
    pub holder: Option<Holder>,
    /// The fencing token of its term; `None` if fencing is off.
    pub fencing_token: Option<FencingToken>,
}

/// Watch of who holds a key; see [`Redlock::leader`].
#[must_use = "a watch asks nothing until `changed` is called"]
pub struct LeaderWatch {
    core: Redlock,
    group: Arc<Group>,
    key: LockKey,
    /// What was returned last, if something was.
    known: Option<Leader>,
    is_known: bool,
    /// The releases of the key, once subscribed.
    released: Option<ReleaseWatch>,
}

impl Redlock {
    /// Watches who [leads](Self::lead), or holds a key in another way.
    ///
    /// It tells what a majority of the nodes knows at a moment: do not decide by it whether to do some work. A process
    /// learns of a release by the message that wakes waiting callers, and otherwise asks the nodes every
    /// [`poll_interval`](crate::Retry::poll_interval), 500 ms. A term that is shorter may be missed. For callers that
    /// release the key, a process that watches counts as one that waits.
    ///
    /// A key that [moves](crate::RedlockBuilder::moving_to) is watched in its old group.
    ///
    /// ```
    /// use tower_redlock::Redlock;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let redlock = Redlock::builder().embedded(3).holder("server-a").build()?;
    /// let mut watch = redlock.leader("dispatcher");
    /// assert_eq!(watch.changed().await?, None);
    /// let leading = tokio::spawn(redlock.lead("dispatcher", async |_guard| std::future::pending().await));
    /// let leader = watch.changed().await?.expect("a process leads");
    /// assert_eq!(leader.holder.expect("it has a label").label(), Some("server-a"));
    /// leading.abort();
    /// assert_eq!(watch.changed().await?, None);
    /// # Ok(())
    /// # }
    /// ```
    pub fn leader(&self, key: impl Into<LockKey>) -> LeaderWatch {
        let key = key.into();
        LeaderWatch {
            core: self.clone(),
            group: Arc::clone(self.core().layout.group_of(&key)),
            key,
            known: None,
            is_known: false,
            released: None,
        }
    }
}

impl LeaderWatch {
    /// Waits until another caller leads than the last call has returned, or none does, and returns it; `None` if none
    /// leads. The first call returns as soon as a majority of the nodes has answered.
    ///
    /// While no majority answers, or callers compete for the key, it waits.
    ///
    /// # Errors
    ///
    /// Returns [`LockError::Key`] if the key is invalid, and [`LockError::Closed`] once the service is
    /// [drained](Redlock::drain).
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime with a timer.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point: no change is lost.
    pub async fn changed(&mut self) -> Result<Option<Leader>, LockError> {
        let core = self.core.clone();
        tokio::select! {
            biased;
            () = core.core().registry.reached(DrainStage::Draining) => Err(LockError::Closed),
            changed = self.next() => changed,
        }
    }

    async fn next(&mut self) -> Result<Option<Leader>, LockError> {
        let cluster = Arc::clone(&self.group.cluster);
        let channel = Arc::clone(names(&cluster, &self.key)?[0].channel());
        let watch = || ReleaseWatch::new(&cluster.subscribe(&channel));
        let released = self.released.get_or_insert_with(watch);
        loop {
            // Before the look, so that no release behind it is missed.
            released.reset();
            let inspection = inspect(&self.group, &self.key).await;
            // A change that no majority shows is none yet.
            let now = match (inspection.state(), inspection.token_of_holder()) {
                (Some(KeyState::Free), _) => Some(None),
                (Some(_), Ok(fencing_token)) => Some(Some(Leader {
                    holder: inspection.holders().into_iter().next(),
                    fencing_token,
                })),
                (None, _) | (_, Err(())) => None,
            };
            if let Some(now) = now
                && (!self.is_known || now != self.known)
            {
                (self.known, self.is_known) = (now.clone(), true);
                return Ok(now);
            }
            drop(timeout(cluster.settings.retry.poll_interval, released.released()).await);
        }
    }
}

opaque_debug! { LeaderWatch [key = key, known = known] }
