//! Releases that a server refused for now.

use std::collections::VecDeque;

use tokio::time::Instant;

use crate::node::job::Job;
use crate::node::redis::inbox::Load;
use crate::node::redis::lane::parked::Parked;

/// The releases, in order, and when to try the next of them.
///
/// # Design
///
/// A server that is busy with a script, or must not write, refuses all of them alike. So one is sent after
/// each pause, and the others when that was accepted: sent together, those of many seconds would keep a
/// server busy that is behind already.
#[derive(Debug, Default)]
pub(super) struct Refused {
    jobs: Parked,
    due: Option<Instant>,
}

impl Refused {
    /// Keeps a release, to be tried when `due` if none is tried sooner.
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

    /// Returns when the next is to be tried.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Takes the next, if it is time; the one behind it is due `then`.
    pub(super) fn next(&mut self, now: Instant, then: Instant) -> Option<Job> {
        self.due.take_if(|due| *due <= now)?;
        let job = self.jobs.pop_front();
        self.due = (!self.jobs.is_empty()).then_some(then);
        job
    }

    /// Takes all of them.
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
