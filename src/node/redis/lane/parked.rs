//! Parked jobs, which wait for a connection.

use std::collections::VecDeque;

use crate::node::job::Job;
use crate::node::redis::inbox::Load;

/// Parked jobs, in order. Their load is kept up to date, because it is read much more often than a job is added, and
/// a server that hangs may have very many.
#[derive(Debug, Default)]
pub(super) struct Parked {
    jobs: VecDeque<Job>,
    bytes: usize,
}

impl Parked {
    pub(super) fn load(&self) -> Load {
        Load {
            jobs: self.jobs.len(),
            bytes: self.bytes,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(super) fn push_back(&mut self, job: Job) {
        self.bytes += job.bytes();
        self.jobs.push_back(job);
    }

    pub(super) fn push_front(&mut self, job: Job) {
        self.bytes += job.bytes();
        self.jobs.push_front(job);
    }

    pub(super) fn pop_front(&mut self) -> Option<Job> {
        let job = self.jobs.pop_front()?;
        self.bytes -= job.bytes();
        Some(job)
    }

    pub(super) fn extend(&mut self, jobs: impl IntoIterator<Item = Job>) {
        jobs.into_iter().for_each(|job| self.push_back(job));
    }

    /// Removes all of them.
    pub(super) fn take(&mut self) -> VecDeque<Job> {
        std::mem::take(self).jobs
    }

    pub(super) fn retain(&mut self, is_kept: impl FnMut(&Job) -> bool) {
        self.jobs.retain(is_kept);
        self.bytes = self.jobs.iter().map(Job::bytes).sum();
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter()
    }
}
