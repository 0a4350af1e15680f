//! The history of a simulation, and what must be true of it.

use std::cmp::Ordering;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use histories::{Hold, Miss};
use tower_redlock::protocol::LockKeys;
use tower_redlock::{
    ExtendError, FencingToken, LockError, LockGuard, LockHandle, LostReason, ReleaseError, Released,
};

use crate::plan::ms;
use crate::tally::Tally;

/// How long an attempt takes at most: two phases, and split votes before.
const ATTEMPT: Duration = ms(3 * 50 + 10);

/// What happened, as all who take part in it write it down.
#[derive(Debug, Clone, Default)]
pub(crate) struct History(Arc<Mutex<Book>>);

/// The number of a lease in its history.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LeaseId(usize);

#[derive(Debug, Default)]
struct Book {
    leases: Vec<Lease>,
    waits: Vec<Wait>,
    misses: Vec<Miss>,
    lines: Vec<String>,
    /// What was seen to be wrong while it happened.
    wrong: Vec<String>,
    counts: Tally,
}

#[derive(Debug)]
struct Lease {
    process: usize,
    keys: LockKeys,
    /// Readers have none.
    token: Option<FencingToken>,
    /// Before the first request of the attempt was sent.
    began: Duration,
    granted: Duration,
    /// The end of its validity as its holders last saw it.
    valid_until: Duration,
    /// When its holder gave it back, or was killed.
    ended: Option<Duration>,
    killed: bool,
    lost: Option<(Duration, LostReason)>,
    /// Until when nodes may keep it beyond its validity: for the last of its leases, or for an extension that failed.
    kept_until: Duration,
    handle: LockHandle,
}

/// A request for a lock and its answer.
#[derive(Debug)]
struct Wait {
    process: usize,
    asked: Duration,
    answered: Duration,
    /// How long it was willing to wait.
    wait: Duration,
}

impl History {
    pub(crate) fn granted(
        &self,
        process: usize,
        keys: &LockKeys,
        guard: &LockGuard,
        ttl: Duration,
        began: Duration,
        now: Duration,
    ) -> LeaseId {
        let mut book = self.book();
        let id = LeaseId(book.leases.len());
        let token = guard.fencing_token();
        book.counts.count("granted");
        let kind = token.map_or("shared".to_owned(), |token| format!("token {token}"));
        book.note(now, process, format_args!("lock {} {keys:?} {kind}", id.0));
        book.leases.push(Lease {
            process,
            keys: keys.clone(),
            token,
            began,
            granted: now,
            valid_until: now + guard.valid_for(),
            ended: None,
            killed: false,
            lost: None,
            kept_until: now + ttl,
            handle: guard.handle(),
        });
        id
    }

    /// Notes the answer to a request that was willing to wait for so long.
    pub(crate) fn waited(
        &self,
        process: usize,
        asked: Duration,
        wait: Duration,
        answered: Duration,
    ) {
        self.book().waits.push(Wait {
            process,
            asked,
            answered,
            wait,
        });
    }

    pub(crate) fn refused(
        &self,
        process: usize,
        keys: &LockKeys,
        asked: Duration,
        now: Duration,
        error: &LockError,
    ) {
        let mut book = self.book();
        book.missed(keys, asked, now, true);
        match error {
            LockError::Contended { .. } => book.counts.count("contended"),
            LockError::Unavailable { .. } => book.counts.count("unavailable"),
            _ => book.counts.count("otherwise refused"),
        }
        book.note(now, process, format_args!("refused: {error}"));
    }

    pub(crate) fn abandoned(
        &self,
        process: usize,
        keys: &LockKeys,
        asked: Duration,
        now: Duration,
    ) {
        let mut book = self.book();
        book.missed(keys, asked, now, false);
        book.counts.count("abandoned");
        book.note(now, process, format_args!("gave up waiting"));
    }

    pub(crate) fn extended(
        &self,
        LeaseId(lease): LeaseId,
        now: Duration,
        ttl: Duration,
        outcome: &Result<(), ExtendError>,
    ) {
        let mut book = self.book();
        book.counts.add("extended", usize::from(outcome.is_ok()));
        if outcome.is_err() {
            let lease = &mut book.leases[lease];
            lease.kept_until = lease.kept_until.max(now + ttl);
        }
        let process = book.leases[lease].process;
        book.note(
            now,
            process,
            format_args!("lock {lease} extended by {ttl:?}: {outcome:?}"),
        );
    }

    /// Notes that a holder is going to give its lock back.
    pub(crate) fn ended(&self, LeaseId(lease): LeaseId, now: Duration) {
        let mut book = self.book();
        book.look(lease, now);
        book.leases[lease].ended = Some(now);
        let process = book.leases[lease].process;
        book.note(now, process, format_args!("lock {lease} given back"));
    }

    pub(crate) fn released(
        &self,
        LeaseId(lease): LeaseId,
        now: Duration,
        outcome: &Result<Released, ReleaseError>,
    ) {
        let mut book = self.book();
        let process = book.leases[lease].process;
        book.note(
            now,
            process,
            format_args!("lock {lease} released: {outcome:?}"),
        );
    }

    pub(crate) fn lost(&self, LeaseId(lease): LeaseId, now: Duration, reason: LostReason) {
        let mut book = self.book();
        let process = book.leases[lease].process;
        match reason {
            LostReason::Expired => book.counts.count("expired"),
            LostReason::Gone => book.counts.count("gone"),
            _ => {}
        }
        book.leases[lease].lost = Some((now, reason));
        book.note(now, process, format_args!("lock {lease} lost: {reason}"));
    }

    /// Looks at the validity of a lock, and returns until when it is. To be called in the runtime of its process.
    pub(crate) fn valid_until(&self, LeaseId(lease): LeaseId, now: Duration) -> Duration {
        let mut book = self.book();
        book.look(lease, now);
        book.leases[lease].valid_until
    }

    /// Looks at the validity of a process's locks. To be called in its runtime.
    pub(crate) fn look(&self, process: usize, now: Duration) {
        let mut book = self.book();
        for lease in 0..book.leases.len() {
            if book.leases[lease].process == process {
                book.look(lease, now);
            }
        }
    }

    pub(crate) fn kill(&self, process: usize, now: Duration) {
        let mut book = self.book();
        for lease in &mut book.leases {
            if lease.process == process && lease.ended.is_none() {
                lease.ended = Some(now);
                lease.killed = true;
            }
        }
        book.note(now, process, format_args!("killed"));
    }

    pub(crate) fn say(&self, now: Duration, what: fmt::Arguments<'_>) {
        let line = format!("{now:>9?}      {what}");
        self.book().lines.push(line);
    }

    pub(crate) fn wrong(&self, what: String) {
        self.book().wrong.push(what);
    }

    pub(crate) fn counts(&self) -> Tally {
        self.book().counts.clone()
    }

    /// Returns all that happened, in the order in which it was written down.
    pub(crate) fn text(&self) -> String {
        self.book().lines.join("\n")
    }

    /// Returns what is wrong with it. `exclusive`: two holders must never both be valid.
    /// `pauses`: when which process stood still. `idle`: how long no lock may be held while
    /// a request waits, if that is bounded. `attempts`: of how many a lock consists, at most.
    pub(crate) fn violations(
        &self,
        exclusive: bool,
        pauses: &[(usize, Duration, Duration)],
        idle: Option<Duration>,
        attempts: u32,
    ) -> Vec<String> {
        let book = self.book();
        let mut found = book.wrong.clone();
        for wait in &book.waits {
            found.extend(wait.too_long(pauses, attempts));
            let idle = idle.filter(|idle| wait.is_vain(*idle, &book.leases));
            found.extend(idle.map(|idle| format!("no lock was held for {idle:?}: {wait:?}")));
        }
        for (index, lease) in book.leases.iter().enumerate() {
            found.extend(lease.told_late(index, pauses));
            for (other_index, other) in book.leases.iter().enumerate().skip(index + 1) {
                if !lease.intersects(other) || lease.token.or(other.token).is_none() {
                    continue;
                }
                let pair = format!("locks {index} and {other_index} of {:?}", lease.keys);
                if let (Some(token), Some(other_token)) = (lease.token, other.token) {
                    if token == other_token {
                        found.push(format!("{pair} have the same token {token}"));
                    }
                    for (first, second) in [(lease, other), (other, lease)] {
                        if first.granted < second.began && first.token > second.token {
                            let tokens = (token, other_token);
                            found.push(format!("{pair}: tokens in the wrong order: {tokens:?}"));
                        }
                    }
                }
                if let Some((from, until)) = lease.both_valid(other).filter(|_| exclusive) {
                    found.push(format!("{pair} are both valid from {from:?} to {until:?}"));
                }
            }
        }
        for key in histories::not_linearizable(&book.holds(), exclusive) {
            found.push(format!("the history of {key} is not linearizable"));
        }
        found
    }

    /// Returns each key of each lock, and of each request for one that came to nothing, for other checkers.
    pub(crate) fn operations(&self) -> (Vec<Hold>, Vec<Miss>) {
        let book = self.book();
        (book.holds(), book.misses.clone())
    }

    /// Returns how many locks were shared while another shared one of their keys.
    pub(crate) fn shared_at_once(&self) -> usize {
        let book = self.book();
        let readers: Vec<_> = book.leases.iter().filter(|it| it.token.is_none()).collect();
        let meets = |(index, lease): (usize, &&Lease)| {
            let mut others = readers[..index].iter();
            others.any(|other| lease.intersects(other) && lease.both_valid(other).is_some())
        };
        readers.iter().enumerate().filter(|it| meets(*it)).count()
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn missed(&mut self, keys: &LockKeys, asked: Duration, answered: Duration, is_refused: bool) {
        let misses = keys.as_slice().iter().map(|key| Miss {
            key: String::from_utf8_lossy(key.as_bytes()).into_owned(),
            asked,
            answered,
            is_refused,
        });
        self.misses.extend(misses);
    }

    fn note(&mut self, now: Duration, process: usize, what: fmt::Arguments<'_>) {
        self.lines.push(format!("{now:>9?} p{process}   {what}"));
    }

    fn look(&mut self, index: usize, now: Duration) {
        let lease = &mut self.leases[index];
        if lease.ended.is_some() {
            return;
        }
        let left = lease.handle.valid_for();
        if left.is_zero() {
            return;
        }
        let valid_until = now + left;
        match valid_until.cmp(&lease.valid_until) {
            Ordering::Less => self.wrong.push(format!(
                "lock {index}: its validity was cut from {:?} to {valid_until:?}",
                lease.valid_until
            )),
            Ordering::Equal => {}
            Ordering::Greater => {
                lease.valid_until = valid_until;
                let process = lease.process;
                self.note(
                    now,
                    process,
                    format_args!("lock {index} valid until {valid_until:?}"),
                );
            }
        }
    }
}

impl Book {
    fn holds(&self) -> Vec<Hold> {
        let holds = self.leases.iter().flat_map(|lease| {
            let keys = lease.keys.as_slice().iter();
            keys.map(|key| Hold {
                key: String::from_utf8_lossy(key.as_bytes()).into_owned(),
                token: lease.token.map(FencingToken::as_u64),
                asked: lease.began,
                granted: lease.granted,
                valid_until: (lease.granted < lease.end()).then(|| lease.end()),
            })
        });
        holds.collect()
    }
}

impl Wait {
    /// Returns what is wrong if it took longer than it may. An attempt under way at the end goes on.
    fn too_long(&self, pauses: &[(usize, Duration, Duration)], attempts: u32) -> Option<String> {
        let paused: Duration = pauses
            .iter()
            .filter(|(process, from, to)| {
                *process == self.process && *from <= self.answered && self.asked < *to
            })
            .map(|(_, from, to)| *to - *from)
            .sum();
        // Before, another caller of the process may ask without a decision.
        let due = self.asked + self.wait + (attempts + 1) * ATTEMPT + paused;
        (self.answered > due).then(|| format!("an answer was due at {due:?}: {self:?}"))
    }

    /// Whether it waited although no lock was held for this long before its answer. A lock that it was
    /// granted then does not count.
    fn is_vain(&self, idle: Duration, leases: &[Lease]) -> bool {
        let since = self.answered.saturating_sub(idle);
        let had = |lease: &Lease| {
            let is_granted = (lease.process, lease.granted) == (self.process, self.answered);
            lease.began <= self.answered && lease.held_until() >= since && !is_granted
        };
        since >= self.asked && !leases.iter().any(had)
    }
}

impl Lease {
    /// Returns until when a holder may have relied on it.
    fn end(&self) -> Duration {
        let ends = [self.ended, self.lost.map(|(at, _)| at)];
        let ends = ends.into_iter().flatten();
        ends.fold(self.valid_until, Duration::min)
    }

    /// Returns from when until when both are valid, if they are at once.
    fn both_valid(&self, other: &Self) -> Option<(Duration, Duration)> {
        let from = self.granted.max(other.granted);
        let until = self.end().min(other.end());
        (from < until).then_some((from, until))
    }

    /// Returns until when nodes may refuse others because of it.
    ///
    /// Of a lock over several groups, the first lease ends its validity, and the others may have been granted
    /// later. An extension that a node carries out renews the lock there also if its answer comes after the end
    /// of the validity. A lost lock stays on the nodes as long as its guard lives: it is not released under its
    /// holder.
    fn held_until(&self) -> Duration {
        let kept_until = self.ended.unwrap_or(Duration::MAX).min(self.kept_until);
        self.end().max(kept_until)
    }

    fn intersects(&self, other: &Self) -> bool {
        let (ours, theirs) = (self.keys.as_slice(), other.keys.as_slice());
        ours.iter().any(|key| theirs.contains(key))
    }

    /// Returns what is wrong if the end of the validity was told too late, or not at all.
    fn told_late(&self, index: usize, pauses: &[(usize, Duration, Duration)]) -> Option<String> {
        if self.killed || self.ended.is_some_and(|at| at <= self.valid_until) {
            return None;
        }
        let mut due = self.valid_until;
        // A process that stands still can tell nothing until it goes on.
        for (process, from, to) in pauses {
            if *process == self.process && *from <= due && due < *to {
                due = *to;
            }
        }
        match self.lost {
            Some((at, _)) if at <= due => None,
            told => Some(format!(
                "lock {index}: its loss was due at {due:?}, told: {told:?}"
            )),
        }
    }
}
