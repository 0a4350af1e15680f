//! What clients held and wrote, and the checks of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use histories::{Hold, Miss};
use support::ms;
use tokio::time::Instant;
use tower_redlock::LockHandle;
use tower_redlock::test_util::Traces;

use crate::chaos::faults::KEYS;

/// What happened, and what should not have.
#[derive(Default)]
pub(crate) struct History {
    pub(crate) records: Vec<Record>,
    /// The keys that were asked for and not got, from when to when, and whether that was a refusal.
    pub(crate) misses: Vec<(&'static [&'static str], [Instant; 2], bool)>,
    pub(crate) storage: Storage,
    /// Granted locks that were valid when last looked at.
    pub(crate) live: Vec<(Record, LockHandle)>,
    /// Per key, the lock with the highest token that was valid when its client got it.
    pub(crate) highest: BTreeMap<&'static str, Record>,
    pub(crate) violations: Vec<String>,
    pub(crate) counts: BTreeMap<&'static str, BTreeMap<&'static str, u64>>,
    /// What happened to the leases of each instance.
    pub(crate) traces: Vec<Traces>,
}

impl History {
    /// Returns the traces of the keys that a violation names; of all, if it names none.
    pub(crate) fn traces_of(&self, violation: &str) -> String {
        let named: Vec<_> = KEYS
            .iter()
            .filter(|key| violation.contains(**key))
            .collect();
        let keys = if named.is_empty() {
            KEYS.iter().collect()
        } else {
            named
        };
        let mut text = String::new();
        for key in keys {
            for trace in self
                .traces
                .iter()
                .flat_map(|traces| traces.of(&(*key).into()))
            {
                text += &format!("{key}: {trace}\n");
            }
        }
        text
    }

    /// Compares a new lock with all that are held, and with those that were.
    pub(crate) fn on_grant(&mut self, new: &Record, handle: &LockHandle) {
        self.live.retain(|(_, handle)| handle.is_valid());
        // After the others: granted before them and valid now, it was valid when they were.
        if !handle.is_valid() {
            return;
        }
        for (held, _) in self.live.iter().filter(|(held, _)| held.excludes(new)) {
            self.violations
                .push(format!("two are valid at once: {held:?} and {new:?}"));
        }
        let others = self.live.iter().filter(|(held, _)| held.meets(new));
        if new.token.is_none() && others.count() > 0 {
            self.count("readers", "beside another");
        }
        for key in new.keys.iter().filter(|_| new.token.is_some()) {
            match self.highest.get(key) {
                Some(before) if before.token >= new.token => self.violations.push(format!(
                    "a token does not rise on {key}: {before:?}, then {new:?}"
                )),
                _ => drop(self.highest.insert(key, new.clone())),
            }
        }
        self.live.push((new.clone(), handle.clone()));
    }

    /// Adds what the records and the storage contradict, the records in the eyes of a checker that is not ours.
    pub(crate) fn check(&mut self, name: &str) {
        self.violations.extend(check_storage(&self.storage));
        let lives: Vec<_> = self.traces.iter().flat_map(Traces::all).collect();
        let unlike = |(_, trace): &(_, _)| histories::not_of_the_model(trace).0;
        self.violations.extend(lives.iter().filter_map(unlike));
        let (holds, misses) = self.operations();
        histories::write(name, &holds, &misses, true);
        for key in histories::not_linearizable(&holds, true) {
            self.violations
                .push(format!("the history of {key} is not linearizable"));
        }
    }

    /// Returns each key of each lock, and of each request for one that came to nothing, for the checker of linearizability.
    fn operations(&self) -> (Vec<Hold>, Vec<Miss>) {
        let begun = self.records.iter().map(|record| record.begun);
        let asked = self.misses.iter().map(|(_, [asked, _], _)| *asked);
        let began = begun.chain(asked).min();
        let since = |at: Instant| began.map_or(Duration::ZERO, |began| at - began);
        let holds = self.records.iter().flat_map(|record| {
            record.keys.iter().map(move |key| Hold {
                key: (*key).to_owned(),
                token: record.token,
                asked: since(record.begun),
                granted: since(record.granted),
                valid_until: record.known_valid.map(since),
            })
        });
        let misses = self.misses.iter();
        let misses = misses.flat_map(|(keys, [asked, answered], is_refused)| {
            keys.iter().map(move |key| Miss {
                key: (*key).to_owned(),
                asked: since(*asked),
                answered: since(*answered),
                is_refused: *is_refused,
            })
        });
        (holds.collect(), misses.collect())
    }

    pub(crate) fn count(&mut self, what: &'static str, which: &'static str) {
        *self
            .counts
            .entry(what)
            .or_default()
            .entry(which)
            .or_default() += 1;
    }

    pub(crate) fn counted(&self, what: &str, which: &str) -> u64 {
        let counts = self.counts.get(what);
        counts
            .and_then(|counts| counts.get(which).copied())
            .unwrap_or_default()
    }

    pub(crate) fn all_counted(&self, what: &str) -> u64 {
        let counts = self.counts.get(what).into_iter();
        counts.flat_map(BTreeMap::values).sum()
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sets = self.records.iter().filter(|record| record.keys.len() > 1);
        let readers = self.records.iter().filter(|record| record.token.is_none());
        writeln!(
            f,
            "chaos: {} acquisitions ({} of several keys, {} shared), {} violations",
            self.records.len(),
            sets.count(),
            readers.count(),
            self.violations.len()
        )?;
        for (what, counts) in &self.counts {
            write!(f, "  {what}: {}", self.all_counted(what))?;
            for (index, (which, count)) in counts.iter().enumerate() {
                let separator = if index == 0 { " = " } else { " + " };
                write!(f, "{separator}{count} {which}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// A lock that was granted.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) keys: &'static [&'static str],
    /// Readers have none.
    pub(crate) token: Option<u64>,
    /// Before it was asked for.
    pub(crate) begun: Instant,
    /// After its client had it.
    pub(crate) granted: Instant,
    /// The last instant at which it was valid for certain.
    pub(crate) known_valid: Option<Instant>,
}

impl Record {
    pub(crate) fn meets(&self, other: &Self) -> bool {
        self.keys.iter().any(|key| other.keys.contains(key))
    }

    /// Whether the two must not be valid at once.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let both_read = self.token.is_none() && other.token.is_none();
        self.meets(other) && !both_read
    }
}

/// The accepted writes by key, in their order, without repetitions by one writer.
#[derive(Debug, Default)]
pub(crate) struct Storage(pub(crate) BTreeMap<&'static str, Vec<Write>>);

/// A write to one key, with when its writer asked for the lock and when it was granted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Write {
    pub(crate) token: u64,
    pub(crate) begun: Instant,
    pub(crate) granted: Instant,
}

impl Storage {
    /// Writes to all keys of a lock or to none: not where a higher token has been.
    pub(crate) fn write(&mut self, record: &Record) -> bool {
        let write = Write {
            token: record.token.expect("readers do not write"),
            begun: record.begun,
            granted: record.granted,
        };
        let is_old = |key: &&str| {
            let written = self.0.get(key).and_then(|writes| writes.last());
            written.is_some_and(|last| last.token > write.token)
        };
        let accepted = !record.keys.iter().any(is_old);
        if accepted {
            for key in record.keys {
                let writes = self.0.entry(key).or_default();
                let again = writes
                    .last()
                    .is_some_and(|last| last.token == write.token && last.granted == write.granted);
                if !again {
                    writes.push(write);
                }
            }
        }
        accepted
    }
}

/// Returns the keys on which an older holder wrote after a newer one.
///
/// Which holder is older follows from the times of their locks. The storage compares tokens, so it lets
/// this happen if tokens do not follow the times.
fn check_storage(storage: &Storage) -> Vec<String> {
    let mut violations = Vec::new();
    for (key, writes) in &storage.0 {
        // Of the writes so far, the one whose lock was asked for last.
        let mut newest: Option<&Write> = None;
        for write in writes {
            if let Some(newest) = newest
                && write.granted < newest.begun
            {
                violations.push(format!(
                    "an older holder wrote to {key} after a newer one: {newest:?}, then {write:?}"
                ));
            }
            if newest.is_none_or(|newest| newest.begun < write.begun) {
                newest = Some(write);
            }
        }
    }
    violations
}

/// Locks also what a panicking task left behind: the test fails by its panic then.
pub(crate) fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lock on some keys, with times in ms after `epoch`.
pub(crate) fn record(
    epoch: Instant,
    keys: &'static [&'static str],
    token: u64,
    [begun, granted, valid]: [u64; 3],
) -> Record {
    let at = |millis| epoch + ms(millis);
    Record {
        keys,
        token: Some(token),
        begun: at(begun),
        granted: at(granted),
        known_valid: Some(at(valid)),
    }
}

#[test]
fn storage_refuses_a_token_below_a_seen_one_of_any_key() {
    let epoch = Instant::now();
    let mut storage = Storage::default();
    let mut write = |keys, token| storage.write(&record(epoch, keys, token, [0, 0, 0]));
    assert!(write(&["a"], 5) && write(&["a"], 5) && write(&["a", "b"], 6));
    assert!(!write(&["b", "c"], 5) && write(&["c"], 5));
    assert!(check_storage(&storage).is_empty());
}

#[test]
fn check_storage_finds_an_older_holder_that_writes_after_a_newer_one() {
    let epoch = Instant::now();
    let found = |[older, newer]: [u64; 2], asked_for| {
        let older = record(epoch, &["a"], older, [0, 10, 20]);
        let newer = record(epoch, &["a", "b"], newer, [asked_for, 30, 40]);
        let mut storage = Storage::default();
        for writer in [&older, &newer, &older, &newer] {
            storage.write(writer);
        }
        check_storage(&storage)
    };
    // The storage refuses the second write of the older.
    assert_eq!(found([5, 6], 11), Vec::<String>::new());
    // Both asked at the same time, so the order is free.
    assert_eq!(found([6, 5], 5), Vec::<String>::new());
    assert_eq!(found([5, 5], 5), Vec::<String>::new());
    // Tokens that do not rise.
    let violations = found([5, 5], 11);
    assert_eq!(violations.len(), 1, "{violations:#?}");
    let expected = "an older holder wrote to a after a newer one";
    assert!(violations[0].starts_with(expected), "{violations:#?}");
    let falling = {
        let mut storage = Storage::default();
        storage.write(&record(epoch, &["a"], 5, [11, 30, 40]));
        storage.write(&record(epoch, &["a"], 6, [0, 10, 20]));
        check_storage(&storage)
    };
    assert_eq!(falling.len(), 1, "{falling:#?}");
}
