//! Randomness, digests and the wall clock, which the protocol floor takes as arguments; sums of instants.

use std::cell::RefCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::time::Instant;

#[cfg(feature = "unstable-protocol")]
use crate::node::sim_env::SimEnv;

/// The highest number this process has proposed for any key.
static LAST_PROPOSAL: AtomicU64 = AtomicU64::new(0);

/// Returns unpredictable random bytes.
///
/// # Panics
///
/// Panics if the operating system provides no random numbers: with predictable owner tokens, any client could
/// release any lock.
pub(crate) fn unguessable<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    #[cfg(feature = "unstable-protocol")]
    if let Some(random) = SimEnv::random() {
        bytes[..8].copy_from_slice(&random.to_le_bytes());
        return bytes;
    }
    SPARE.with_borrow_mut(|spare| {
        if spare.len() < bytes.len() {
            // One system call serves many tokens: it costs more than the rest of a token.
            spare.resize(SPARE_BYTES, 0);
            getrandom::fill(spare).expect("the operating system provides random numbers");
        }
        // Removed from the buffer, so that no bytes are returned twice or kept.
        let rest = spare.len() - bytes.len();
        bytes.copy_from_slice(&spare[rest..]);
        spare[rest..].fill(0);
        spare.truncate(rest);
    });
    bytes
}

const SPARE_BYTES: usize = 1024;

thread_local! {
    /// Random bytes that have not been returned yet. A process that forks without `exec` would return them twice,
    /// but no tokio runtime survives such a fork.
    static SPARE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Returns a uniformly distributed random number, for delays.
pub(crate) fn random_u64() -> u64 {
    u64::from_le_bytes(unguessable())
}

/// The longest time that is counted, 30 years: no sum with an instant overflows.
pub(crate) const NEVER: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

/// Adds a duration to an instant; cuts it to [`NEVER`].
pub(crate) fn after(instant: Instant, duration: Duration) -> Instant {
    instant + duration.min(NEVER)
}

/// A clock that begins at its first use: its owner may be built before the runtime whose time it follows.
#[derive(Debug, Default)]
pub(crate) struct Epoch(OnceLock<Instant>);

impl Epoch {
    /// Returns the time at this instant.
    pub(crate) fn at(&self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.0.get_or_init(|| now))
    }
}

/// Returns the SHA-256 digest of these bytes.
pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Returns the fencing token to propose for the next acquisition: the wall clock in microseconds, but always
/// more than the last proposal.
///
/// The wall clock is needed because later proposals of every process must exceed the fences that a restarted node
/// has lost.
pub(crate) fn next_proposal() -> u64 {
    #[cfg(feature = "unstable-protocol")]
    if let Some(proposal) = SimEnv::next_proposal() {
        return proposal;
    }
    let now = micros(wall_clock());
    let before = LAST_PROPOSAL
        // One variable: its modification order alone makes the proposals grow.
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| {
            Some(now.max(last + 1))
        })
        .unwrap_or_default();
    now.max(before + 1)
}

/// Returns the time since 1970 by the wall clock, which may jump and differs between computers: for fencing proposals, for
/// since when a lock is held, and for a `Retry-After` that is a date.
#[allow(
    clippy::disallowed_types,
    reason = "the only place that may read the wall clock"
)]
pub(crate) fn wall_clock() -> Duration {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default()
}

fn micros(since_1970: Duration) -> u64 {
    // It fits until the year 586,000.
    u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of each thread, and no two threads propose the same number.
    // Rules: lock.proposal
    #[test]
    fn proposals_always_grow() {
        // Ahead of the clock, so that each proposal depends on the last one.
        LAST_PROPOSAL.fetch_max(micros(wall_clock()) + 1_000_000, Ordering::Relaxed);
        let start = std::sync::Barrier::new(4);
        let mut all: Vec<u64> = std::thread::scope(|threads| {
            let proposing = [(); 4].map(|()| {
                threads.spawn(|| {
                    start.wait();
                    let proposals: Vec<_> = (0..50_000).map(|_| next_proposal()).collect();
                    assert!(proposals.is_sorted_by(|a, b| a < b));
                    proposals
                })
            });
            let proposed = proposing.into_iter().map(|thread| thread.join().unwrap());
            proposed.flatten().collect()
        });
        all.sort_unstable();
        assert!(all.is_sorted_by(|a, b| a < b));
    }
}
