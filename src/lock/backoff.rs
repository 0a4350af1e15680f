//! Back-off: the waits between the attempts of one caller.
//!
//! # Implementation details
//!
//! After a refused attempt, the caller waits and makes another one, until the deadline of the caller. The length of
//! the wait depends on the refusal and the subscription:
//!
//! * *Split vote.* Several attempts got some nodes each and none a majority. The next attempt follows soon, after a
//!   random delay that doubles, even for a caller that does not wait.
//! * *Subscribed.* A majority of the nodes would publish a release. The next attempt follows the release. In between,
//!   the caller polls slowly, because a message can be lost.
//! * *Not subscribed.* The caller polls, with growing random delays.
//!
//! A release wakes all waiting processes. With [`on_release`](retry::on_release), a few of them try soon and the others rest for
//! a moment. A caller that got its permit from a local one would always be first, because it needs no message.
//! It therefore lets remote waiters go first when it is their turn.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::lock::cluster::{Cluster, submit_in_drop};
use crate::lock::error::LockError;
use crate::lock::queue::{Permit, Wait};
use crate::lock::registry::DrainStage;
use crate::lock::state::LockSpec;
use crate::node::{Job, Node, Packet, ReleaseWatch, VoteReceiver, random_u64, unguessable};
use crate::protocol::acquire::Contention;
use crate::protocol::lease::{Access, TICK};
use crate::protocol::message::{Command, Op, SharedOp};
use crate::protocol::retry::{self, OnRelease};
use crate::protocol::{Holder, KeyNames, OwnerToken};

/// The waits between the attempts of one caller.
pub(crate) struct Backoff {
    /// When the first wait or attempt began.
    began: Instant,
    /// How long to wait before the next attempt.
    delay: Duration,
    /// How long the last attempt took.
    round_trip: Duration,
    /// The number of split votes in a row, and the end of the time in which the next attempt follows soon.
    splits: Option<(u32, Instant)>,
    /// The number of polls.
    polls: u32,
    /// The number of releases that were published.
    releases: u32,
    /// Who held the lock at the last attempt.
    holder: Option<Holder>,
    /// The watches for the releases of the keys, once subscribed.
    watching: Vec<ReleaseWatch>,
    /// Present while the caller waits for readers to leave. Dropped with this when the caller has the lock, so that
    /// readers may come again behind it.
    announcement: Option<Box<Announcement>>,
}

impl Backoff {
    pub(crate) fn new(began: Instant) -> Self {
        Self {
            began,
            delay: Duration::ZERO,
            round_trip: TICK,
            splits: None,
            polls: 0,
            releases: 0,
            holder: None,
            watching: Vec::new(),
            announcement: None,
        }
    }

    /// Lets the processes try first that wait for a release, so many of them: returns the back-off of a caller that does, which
    /// waits before its first attempt.
    pub(crate) fn for_remote(
        waiters: usize,
        spec: &LockSpec,
        permit: &Permit,
        wait: &Wait,
    ) -> Option<Self> {
        let mut backoff = Self::new(Instant::now());
        let left = wait.deadline.saturating_duration_since(backoff.began);
        if left.is_zero() {
            return None;
        }
        let delay = match retry::on_release(waiters, 0, TICK, random_u64()) {
            OnRelease::Try(delay) => delay,
            OnRelease::Rest(delay) => {
                backoff.watching = permit.subscribe(&spec.cluster, &spec.names);
                // No attempt was refused yet, so there is no release that it could have missed.
                backoff.forget_releases();
                delay
            }
        };
        backoff.delay = delay.min(left);
        Some(backoff)
    }

    /// Decides how long to wait after a refused attempt, which began at this time.
    ///
    /// # Errors
    ///
    /// Returns the error of a caller that makes no further attempt: at the deadline, or because too many callers wait.
    pub(crate) fn back_off(
        &mut self,
        spec: &LockSpec,
        permit: &Permit,
        wait: &mut Wait,
        attempt_began: Instant,
        contention: Contention,
    ) -> Result<(), LockError> {
        let (retry_after, holder) = (contention.expires_in, contention.holder);
        // At least a tick, the resolution of timers: shorter delays would all be equal, and zero on a paused
        // clock.
        let now = Instant::now();
        self.round_trip = (now - attempt_began).max(TICK);
        let soon = match contention.is_split {
            true => self.split_delay(spec, wait, attempt_began, now),
            false => {
                self.splits = None;
                None
            }
        };
        let delay = match soon {
            Some(delay) => delay,
            None if now >= wait.deadline => {
                return Err(LockError::contended(retry_after, holder));
            }
            None => {
                wait.occupy()?;
                let delay = self.poll_delay(spec, permit, retry_after);
                let delay = delay.min(wait.deadline - now);
                permit.set_refused(now + delay, retry_after, &holder);
                self.holder = holder;
                delay
            }
        };
        if contention.is_shared && now < wait.deadline {
            // Until shortly after the next attempt. Should this process end, readers wait for no longer.
            let patience = delay + spec.cluster.settings.node_timeout;
            let new = || Announcement::new(&spec.cluster, &spec.names);
            self.announcement
                .get_or_insert_with(|| Box::new(new()))
                .renew(patience.min(spec.lease.ttl));
        }
        self.delay = delay;
        Ok(())
    }

    /// Returns how long to wait after a split vote, if the next attempt is to follow soon.
    fn split_delay(
        &mut self,
        spec: &LockSpec,
        wait: &Wait,
        attempt_began: Instant,
        now: Instant,
    ) -> Option<Duration> {
        let node_timeout = spec.cluster.settings.node_timeout;
        // A caller that has waited gets as much time for split votes as a new one, but only a new one past its
        // deadline.
        let last = wait.deadline.max(self.began + node_timeout);
        let end = last.min(attempt_began + node_timeout);
        let (splits, end) = self.splits.get_or_insert((0, end));
        let left = end.checked_duration_since(now)?;
        if left.is_zero() {
            return None;
        }
        let delay = retry::split_delay(*splits, self.round_trip, random_u64());
        *splits += 1;
        // The delays double, so the last one could exceed all earlier ones together.
        Some(delay.min(left))
    }

    /// Returns how long to wait while other callers hold the lock.
    fn poll_delay(
        &mut self,
        spec: &LockSpec,
        permit: &Permit,
        retry_after: Option<Duration>,
    ) -> Duration {
        let settings = &spec.cluster.settings;
        if self.watching.is_empty() {
            self.watching = permit.subscribe(&spec.cluster, &spec.names);
        }
        if self.is_subscribed() {
            retry::poll_delay(&settings.retry, retry_after, random_u64())
        } else {
            self.polls += 1;
            let polls = self.polls - 1;
            retry::delay(&settings.retry, polls, retry_after, random_u64())
        }
    }

    /// Waits until the next attempt is due, or a release is published and this process may try; and for the permits that a
    /// set of keys gave back meanwhile.
    ///
    /// # Errors
    ///
    /// Returns what ends the wait: the caller is gone, the service is drained, or the deadline is over.
    pub(crate) async fn pause(
        &mut self,
        spec: &LockSpec,
        permit: &Permit,
        deadline: Instant,
        gone: impl Future<Output = ()>,
    ) -> Result<(), LockError> {
        let due = sleep(self.delay.max(TICK));
        let holder = self.holder.clone();
        let is_for_slot = matches!(spec.lease.access, Access::Slot(_));
        let waiting = async {
            tokio::select! {
                biased;
                // The release woke other processes too, so the next split vote is a first one.
                () = self.released(is_for_slot) => self.splits = None,
                () = due => {}
            }
            // A caller that has all of its permits goes on also at the deadline.
            timeout_at(deadline, permit.acquire_rest()).await
        };
        tokio::select! {
            biased;
            // Which no one gets.
            () = gone => Err(LockError::Closed),
            () = spec.registry.reached(DrainStage::Draining) => Err(LockError::Closed),
            waited = waiting => waited.map_err(|_| LockError::contended(None, holder)),
        }
    }

    /// Discards the signals of releases before an attempt.
    pub(crate) fn forget_releases(&mut self) {
        self.watching.iter_mut().for_each(ReleaseWatch::reset);
    }

    /// Returns whether this process is subscribed to the releases of all keys.
    fn is_subscribed(&self) -> bool {
        let mut watching = self.watching.iter();
        !self.watching.is_empty() && watching.all(ReleaseWatch::is_subscribed)
    }

    /// Waits until a release is published and this process may try.
    async fn released(&mut self, is_for_slot: bool) {
        let mut rest = Duration::MAX;
        loop {
            let Ok(subscribers) = timeout(rest, first_release(&mut self.watching)).await else {
                return;
            };
            self.releases = self.releases.saturating_add(1);
            // The other callers of this process that wait for the same slots: of them, a released one serves one. Beside the
            // watches, the place has the subscription while callers wait for the permit.
            let rivals = self.watching.iter().filter(|_| is_for_slot);
            let rivals = rivals.map(|watch| watch.sharers().saturating_sub(1)).max();
            let waiters = subscribers + rivals.unwrap_or_default();
            match retry::on_release(waiters, self.releases, self.round_trip, random_u64()) {
                OnRelease::Try(Duration::ZERO) => return,
                OnRelease::Try(delay) => return sleep(delay).await,
                OnRelease::Rest(delay) => rest = delay,
            }
        }
    }
}

/// Waits until the release of one of the keys is published, and returns the number of its subscribers.
async fn first_release(watching: &mut [ReleaseWatch]) -> usize {
    let watching = watching.iter_mut();
    let mut released: FuturesUnordered<_> = watching.map(ReleaseWatch::released).collect();
    match released.next().await {
        Some(subscribers) => subscribers,
        None => pending().await,
    }
}

/// The announcement of one waiting caller, at every node; taken back when it is dropped.
///
/// It serves fairness and not safety, so nothing depends on its answers.
#[derive(Debug)]
pub(crate) struct Announcement {
    cluster: Arc<Cluster>,
    names: Arc<[KeyNames]>,
    owner: OwnerToken,
    /// Receives the answers, which are not read. While it is there, the requests are sent.
    votes: VoteReceiver,
    /// When it has lapsed on every node for certain.
    gone_at: Instant,
}

impl Announcement {
    /// Creates an announcement that no node knows yet.
    pub(crate) fn new(cluster: &Arc<Cluster>, names: &[KeyNames]) -> Self {
        let with_shared = |name: &KeyNames| cluster.settings.namespace.with_shared(name.clone());
        Self {
            cluster: Arc::clone(cluster),
            names: names.iter().map(with_shared).collect(),
            owner: OwnerToken::from_random(unguessable()),
            votes: VoteReceiver::new(&cluster.names),
            gone_at: Instant::now(),
        }
    }

    /// Keeps new readers out for this long, at every node where readers hold the keys.
    pub(crate) fn renew(&mut self, patience: Duration) {
        // Requests of before that are not sent yet are not needed any more, nor are their answers.
        self.votes.next_phase();
        while self.votes.try_recv().is_some() {}
        // Twice, because a request may be on its way for as long.
        self.gone_at = Instant::now() + 2 * patience;
        let op = SharedOp::Announce { patience };
        self.send(op, |node, job| node.submit(job));
    }

    fn send(&self, op: SharedOp, submit: impl Fn(&dyn Node, Job)) {
        let command = Command {
            names: Arc::clone(&self.names),
            owner: self.owner.clone(),
            op: Op::Shared(op),
        };
        let packet = Arc::new(Packet::new(command, false, None));
        for (number, node) in self.cluster.nodes.iter().enumerate() {
            let packet = Arc::clone(&packet);
            let job = Job::new(packet, self.votes.sender(number), self.gone_at);
            submit(&**node, job);
        }
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        self.send(SharedOp::Withdraw, submit_in_drop);
    }
}
