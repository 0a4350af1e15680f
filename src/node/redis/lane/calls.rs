//! The grouping of jobs into calls.

use crate::node::job::Job;
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
    jobs: Vec<Job>,
    /// The length of their own parts.
    bytes: usize,
    /// Whether more jobs may join it.
    is_shareable: bool,
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
        let encoded = job.request.encoded(check);
        let Some(hash) = encoded.key_hash else {
            self.end_run(output);
            return output.push_call([job].into_iter());
        };
        if self.keys.contains(&hash) {
            self.end_run(output);
        }
        self.keys.push(hash);
        let (bytes, is_shareable) = (encoded.own_bytes(), encoded.is_shareable(check));
        let fits = |call: &&mut OpenCall| {
            let has_room = call.jobs.len() < MAX_JOBS && call.bytes + bytes <= MAX_BYTES;
            let is_like = |other: &Job| other.request.encoded(check).is_like(encoded);
            call.is_shareable && has_room && call.jobs.first().is_some_and(is_like)
        };
        let open = self.run[..self.open].iter_mut();
        let call = match open.filter(|_| is_shareable).find(fits) {
            Some(call) => call,
            None => self.open_call(is_shareable),
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

    fn open_call(&mut self, is_shareable: bool) -> &mut OpenCall {
        if self.open == self.run.len() {
            self.run.push(OpenCall::default());
        }
        let call = &mut self.run[self.open];
        self.open += 1;
        call.is_shareable = is_shareable;
        call
    }
}

#[cfg(test)]
mod tests;
