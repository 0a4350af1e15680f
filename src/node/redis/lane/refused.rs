//! Refused releases, which the server may accept later.

use std::collections::VecDeque;

use tokio::time::Instant;

use crate::node::job::Job;
use crate::node::redis::inbox::Load;
use crate::node::redis::lane::parked::Parked;

/// Refused releases, in order, and when to try the next one.
///
/// # Design
///
/// A server that is busy with a script, or must not write, refuses all releases alike. The lane therefore sends one of
/// them after each pause, and the others once that is accepted: sent together, the releases of many seconds would
/// load a server that is slow already.
#[derive(Debug, Default)]
pub(super) struct Refused {
    jobs: Parked,
    due: Option<Instant>,
}

impl Refused {
    /// Adds a release. The next attempt is `due` then, unless one is due sooner.
    pub(super) fn push(&mut self, job: Job, due: Instant) {
        self.jobs.push_back(job);
        self.due.get_or_insert(due);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(super) fn load(&self) -> Load {
        self.jobs.load()
    }

    /// Returns when to try the next one.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Removes the next one if it is due; the one behind it is due `then`.
    pub(super) fn next(&mut self, now: Instant, then: Instant) -> Option<Job> {
        self.due.take_if(|due| *due <= now)?;
        let job = self.jobs.pop_front();
        self.due = (!self.jobs.is_empty()).then_some(then);
        job
    }

    /// Removes all of them.
    pub(super) fn take(&mut self) -> VecDeque<Job> {
        std::mem::take(self).jobs.take()
    }

    pub(super) fn retain(&mut self, is_kept: impl FnMut(&Job) -> bool) {
        if !self.is_empty() {
            self.jobs.retain(is_kept);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter()
    }
}
