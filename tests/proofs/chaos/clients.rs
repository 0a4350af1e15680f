//! Clients that contend for sets of keys and write to a storage with their tokens.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use support::{Random, ms};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::{
    ExtendError, LockError, LockGuard, LockHandle, LostReason, Redlock, ReleaseError,
};

use crate::chaos::faults::{INSTANCES, NOISE, SETS, TTL, World};
use crate::chaos::history::{History, Record, unpoisoned};

/// Takes locks, writes while it holds them, and lets go of them in all ways there are.
pub(crate) struct Client {
    pub(crate) history: Arc<Mutex<History>>,
    pub(crate) is_over: Arc<AtomicBool>,
    pub(crate) redlock: Redlock,
    pub(crate) random: Random,
    /// Whether some of its locks are shared.
    pub(crate) reads: bool,
}

/// A lock as its client sees it.
pub(crate) struct Held {
    pub(crate) guard: LockGuard,
    pub(crate) handle: LockHandle,
    pub(crate) record: Record,
}

impl Client {
    pub(crate) fn new(world: &Arc<World>, seed: u64, number: u64, reads: bool) -> Self {
        let mut random = Random(seed ^ (number + 1));
        random.next_number();
        let instance = usize::try_from(number).expect("a few") % INSTANCES;
        Self {
            history: Arc::clone(&world.history),
            is_over: Arc::clone(&world.is_over),
            redlock: world.instances[instance].clone(),
            random,
            reads,
        }
    }

    pub(crate) async fn run(mut self) {
        while !self.is_over.load(Ordering::Relaxed) {
            match self.acquire().await {
                Some(held) => self.hold(held).await,
                None => sleep(self.random.up_to(ms(20))).await,
            }
        }
    }

    pub(crate) async fn acquire(&mut self) -> Option<Held> {
        let keys = self.random.one_of(&SETS);
        let wait = self.random.one_of(&[0, 0, 300, 2_000]);
        let ttl = self.random.one_of(&[TTL, TTL, TTL / 3]);
        let shares = self.reads && self.random.is_one_in(2);
        let begun = Instant::now();
        let mut request = self.redlock.lock_all(keys.iter().copied());
        if shares {
            request = request.shared();
        }
        request = request.wait(ms(wait)).ttl(ttl);
        if self.random.is_one_in(20) {
            request = request.max_hold(TTL / 2);
        }
        let outcome = if self.random.is_one_in(5) {
            let patience = self.random.up_to(ms(30));
            let Ok(outcome) = timeout(patience, request).await else {
                self.miss(keys, begun, false);
                self.count("refused", "none: given up by the caller");
                return None;
            };
            outcome
        } else {
            request.await
        };
        let granted = Instant::now();
        match outcome {
            Ok(guard) => {
                let token = guard.fencing_token().map(|token| token.as_u64());
                assert_eq!(token.is_none(), shares, "fencing is on");
                let record = Record {
                    keys,
                    token,
                    begun,
                    granted,
                    known_valid: None,
                };
                let handle = guard.handle();
                unpoisoned(&self.history).on_grant(&record, &handle);
                Some(Held {
                    guard,
                    handle,
                    record,
                })
            }
            Err(refused) => {
                let why = match refused {
                    LockError::Contended { .. } => "contended",
                    LockError::Unavailable { .. } => "unavailable",
                    LockError::Expired { .. } => "expired",
                    LockError::Closed => "closed",
                    other => panic!("{other:?}"),
                };
                self.miss(keys, begun, true);
                self.count("refused", why);
                None
            }
        }
    }

    fn miss(&self, keys: &'static [&'static str], begun: Instant, is_refused: bool) {
        let miss = (keys, [begun, Instant::now()], is_refused);
        unpoisoned(&self.history).misses.push(miss);
    }

    fn count(&self, what: &'static str, which: &'static str) {
        unpoisoned(&self.history).count(what, which);
    }

    pub(crate) async fn hold(&mut self, mut held: Held) {
        let length = match self.random.index(40) {
            // Over several renewals and more than one fault.
            0 => 5_000,
            1..4 => 1_500,
            4..10 => 300,
            10..20 => 50,
            _ => 5,
        };
        let until = Instant::now() + self.random.up_to(ms(length));
        // Goes on without its lock, as a process does that was paused and has not noticed.
        let stubborn = self.random.is_one_in(2);
        let mut extensions = self.random.one_of(&[0, 0, 1, 3]);
        let mut was_lost = false;
        loop {
            self.work(&mut held);
            if !was_lost && !held.handle.is_valid() {
                was_lost = self.count_loss(&held).await;
            }
            let left = until.saturating_duration_since(Instant::now());
            let is_over = self.is_over.load(Ordering::Relaxed);
            if left.is_zero() || is_over || (was_lost && !stubborn) {
                break;
            }
            if extensions > 0 && self.random.is_one_in(20) {
                extensions -= 1;
                self.extend(&held).await;
            }
            sleep(left.min(self.random.up_to(ms(10)))).await;
        }
        self.work(&mut held);
        let Held { guard, record, .. } = held;
        // Before the release, so that the next holder finds this entry.
        unpoisoned(&self.history).records.push(record);
        if self.random.is_one_in(2) {
            drop(guard);
            return;
        }
        let how = match guard.release().await {
            Ok(_) => "freed",
            Err(ReleaseError::Lost(_)) => "lost before",
            Err(ReleaseError::Unavailable { .. }) => "unconfirmed",
            Err(other) => panic!("{other:?}"),
        };
        self.count("released", how);
    }

    pub(crate) async fn extend(&mut self, held: &Held) {
        let ttl = self.random.one_of(&[TTL, TTL / 3]);
        let how = match held.guard.extend(ttl).await {
            Ok(()) => "done",
            Err(ExtendError::Lost(_)) => "lost before",
            Err(ExtendError::Unavailable { .. }) => "unavailable",
            Err(other) => panic!("{other:?}"),
        };
        self.count("extensions", how);
    }

    /// Counts why a lock is not valid any more; returns false if it is again.
    pub(crate) async fn count_loss(&self, held: &Held) -> bool {
        let Ok(why) = timeout(NOISE, held.guard.lost()).await else {
            // Looked at before its renewal was noted, and compared with the clock after.
            assert!(held.handle.is_valid(), "its loss was not reported");
            return false;
        };
        let why = match why {
            LostReason::Gone => "a majority says that it is gone",
            LostReason::Expired => "expired",
            LostReason::MaxHold => "max_hold",
            other => panic!("{other:?}"),
        };
        self.count("lost", why);
        true
    }

    /// Writes to all keys of a lock unless it is shared, and notes whether it was valid.
    pub(crate) fn work(&self, held: &mut Held) {
        // A lock that is valid after an instant was valid at that instant.
        let before = Instant::now();
        let was_valid = held.handle.is_valid();
        let mut history = unpoisoned(&self.history);
        let writes = held.record.token.is_some();
        let accepted = writes && history.storage.write(&held.record);
        let after = Instant::now();
        let is_valid = held.handle.is_valid();
        if is_valid {
            held.record.known_valid = Some(after);
        } else if was_valid {
            held.record.known_valid = Some(before);
        }
        if !writes {
            let how = if is_valid { "valid" } else { "late" };
            return history.count("reads", how);
        }
        let how = match (accepted, is_valid) {
            (true, true) => "accepted",
            (true, false) => "accepted, late but without a successor",
            (false, false) => "refused, too late",
            (false, true) => {
                let record = &held.record;
                let refused = format!("the write of a valid holder is refused: {record:?}");
                history.violations.push(refused);
                "refused, valid"
            }
        };
        history.count("writes", how);
    }
}
