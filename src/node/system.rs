//! Randomness, digests and the wall clock: what the protocol floor is given instead of using.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

#[cfg(feature = "test-util")]
use crate::node::sim_env::SimEnv;

/// The highest number this process has proposed for any key.
static LAST_PROPOSAL: AtomicU64 = AtomicU64::new(0);

/// Returns random bytes that nobody can guess.
///
/// # Panics
///
/// Panics if the operating system has no random numbers to give: without them anybody could release
/// anybody's lock.
pub(crate) fn unguessable() -> [u8; 16] {
    let mut bytes = [0; 16];
    #[cfg(feature = "test-util")]
    if let Some(random) = SimEnv::random() {
        bytes[..8].copy_from_slice(&random.to_le_bytes());
        return bytes;
    }
    SPARE.with_borrow_mut(|spare| {
        if spare.len() < bytes.len() {
            // One system call for many: it costs more than all else of a token.
            spare.resize(SPARE_BYTES, 0);
            getrandom::fill(spare).expect("the operating system provides random numbers");
        }
        // Taken out, so that what was given once is nowhere else and never given again.
        let rest = spare.len() - bytes.len();
        bytes.copy_from_slice(&spare[rest..]);
        spare[rest..].fill(0);
        spare.truncate(rest);
    });
    bytes
}

const SPARE_BYTES: usize = 1024;

thread_local! {
    /// Random bytes that nobody was given yet. A process that forks without `exec` would give them twice,
    /// which no tokio runtime survives.
    static SPARE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Returns a uniform random number, for delays.
pub(crate) fn random_u64() -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = unguessable();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Returns the SHA-256 of some bytes.
pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Returns the number to propose for the next acquisition: the wall clock in microseconds, and
/// always more than the last one.
///
/// Wall clock, because a node that lost its memory must be left behind by the numbers of all who
/// come later, whatever process they run in; nothing else in the crate reads it.
pub(crate) fn next_proposal() -> u64 {
    #[cfg(feature = "test-util")]
    if let Some(proposal) = SimEnv::next_proposal() {
        return proposal;
    }
    let now = wall_clock_micros();
    let before = LAST_PROPOSAL
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| {
            Some(now.max(last + 1))
        })
        .unwrap_or_default();
    now.max(before + 1)
}

#[allow(
    clippy::disallowed_types,
    reason = "the one place that may read the wall clock"
)]
fn wall_clock_micros() -> u64 {
    let since_1970 = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    // In the year 586,000 it would no longer fit.
    u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proposals_always_grow() {
        let proposals: Vec<_> = (0..10_000).map(|_| next_proposal()).collect();
        assert!(proposals.is_sorted_by(|a, b| a < b));
    }
}
