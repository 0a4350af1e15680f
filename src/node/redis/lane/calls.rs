//! The grouping of jobs into calls.

use crate::node::job::Job;
use crate::node::redis::call::{CallKind, key_hash, part};
use crate::node::redis::encode::GenerationCheck;
use crate::node::redis::lane::in_flight::InFlight;

/// Groups the jobs of a batch into calls.
///
/// # Design
///
/// A batch consists of runs of jobs, in the order of submission, in which no two jobs are on one key. Within a run, the
/// order does not matter, so jobs of one kind share a call. A run ends before a job whose key it has already: so a
/// release stays behind its acquisition. A job on several keys is a run of its own.
#[derive(Default)]
pub(super) struct Calls {
    /// The calls of the current run; those from `open` on are empty, and keep their buffers.
    run: Vec<OpenCall>,
    open: usize,
    /// The hashes of the keys in the run. Equal hashes of two keys only end a run early.
    keys: Vec<u64>,
}

#[derive(Default)]
struct OpenCall {
    /// `None` for a job that shares no call.
    kind: Option<CallKind>,
    jobs: Vec<Job>,
    bytes: usize,
}

/// The most jobs in one call. The server does nothing else meanwhile; a call of this size takes it about a third of a
/// millisecond.
const MAX_JOBS: usize = 64;
/// The most bytes of keys and owners in one call.
const MAX_BYTES: usize = 32 << 10;

impl Calls {
    /// Adds a job. It is marked as sent at once: its release may be in the same batch, and must not be called off.
    ///
    /// Jobs share no calls without `check`, the check of a connection that supports them.
    pub(super) fn add(
        &mut self,
        mut job: Job,
        check: Option<&GenerationCheck>,
        output: &mut InFlight,
    ) {
        job.mark_sent();
        let Some(check) = check else {
            return output.push_call([job].into_iter());
        };
        let Some(hash) = key_hash(&job.request) else {
            self.end_run(output);
            return output.push_call([job].into_iter());
        };
        if self.keys.contains(&hash) {
            self.end_run(output);
        }
        self.keys.push(hash);
        let kind = CallKind::of(&job.request, check);
        let part = kind.and_then(|_| part(&job.request));
        let bytes = part.map_or(0, |part| part.bytes.len());
        let fits = |call: &&mut OpenCall| {
            let has_room = call.jobs.len() < MAX_JOBS && call.bytes + bytes <= MAX_BYTES;
            kind.is_some() && call.kind == kind && has_room
        };
        let call = match self.run[..self.open].iter_mut().find(fits) {
            Some(call) => call,
            None => self.open_call(kind),
        };
        call.bytes += bytes;
        call.jobs.push(job);
    }

    /// Ends the run and moves its calls to the next batch.
    pub(super) fn end_run(&mut self, output: &mut InFlight) {
        self.keys.clear();
        for call in &mut self.run[..std::mem::take(&mut self.open)] {
            call.bytes = 0;
            output.push_call(call.jobs.drain(..));
        }
    }

    fn open_call(&mut self, kind: Option<CallKind>) -> &mut OpenCall {
        if self.open == self.run.len() {
            self.run.push(OpenCall::default());
        }
        let call = &mut self.run[self.open];
        self.open += 1;
        call.kind = kind;
        call
    }
}

#[cfg(test)]
mod tests;
