//! Queues of jobs that know their load: those in the inbox, and those that a lane has parked.

use std::collections::VecDeque;
use std::ops::{AddAssign, SubAssign};

use crate::node::job::Job;

/// Jobs in order. Their load is kept up to date, because it is read much more often than a job is added, and a server
/// that hangs may have very many.
#[derive(Debug, Default)]
pub(super) struct JobQueue {
    jobs: VecDeque<Job>,
    /// The size of the records in these jobs.
    bytes: usize,
}

/// A number of jobs and the size of their records.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    pub(super) jobs: usize,
    pub(super) bytes: usize,
}

impl JobQueue {
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

    /// Moves up to `most` of them to `jobs`, which is empty, and returns their load.
    pub(super) fn move_to(&mut self, jobs: &mut VecDeque<Job>, most: usize) -> Load {
        let bytes = if self.jobs.len() <= most {
            // Swapped, so that the buffer of the jobs moved before serves the next ones.
            std::mem::swap(&mut self.jobs, jobs);
            self.bytes
        } else {
            jobs.extend(self.jobs.drain(..most));
            jobs.iter().map(Job::bytes).sum()
        };
        self.bytes -= bytes;
        let jobs = jobs.len();
        Load { jobs, bytes }
    }

    pub(super) fn retain(&mut self, is_kept: impl FnMut(&Job) -> bool) {
        self.jobs.retain(is_kept);
        self.bytes = self.jobs.iter().map(Job::bytes).sum();
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter()
    }
}

impl AddAssign for Load {
    fn add_assign(&mut self, more: Self) {
        self.jobs += more.jobs;
        self.bytes += more.bytes;
    }
}

impl SubAssign for Load {
    fn sub_assign(&mut self, less: Self) {
        self.jobs -= less.jobs;
        self.bytes -= less.bytes;
    }
}
