//! Counts what must never happen, and the outcomes of all requests.
//!
//! All servers live in this process, so that the checker sees every holder at the same time, as no client of a real
//! lock service can.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use tower_redlock::{FencingToken, LockHandle};

use crate::events::{Feed, lock};
use crate::storage::Storage;
use crate::{CALLERS, SERVERS};

/// The holders of one instance, the callers' requests, and the counters.
#[derive(Debug)]
pub(crate) struct Checker {
    feed: Feed,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    holds: BTreeMap<u64, Active>,
    next_hold: u64,
    /// The page shows tokens by their difference to it.
    first_token: Option<FencingToken>,
    last_token: Option<FencingToken>,
    counters: Counters,
    callers: [Row; CALLERS.len()],
    /// How long the latest acquisitions took.
    latencies: VecDeque<Duration>,
}

/// A handler that runs under its lock.
#[derive(Debug)]
struct Active {
    caller: usize,
    server: usize,
    lock: LockHandle,
    from: u128,
    /// When its validity ends, as of the last look.
    valid_until: Instant,
    /// Whether the page knows that its validity is over.
    is_over: bool,
}

/// The latest request of one caller.
#[derive(Debug, Default)]
struct Row {
    asked: Option<Instant>,
    last: Option<Value>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) acquired: u64,
    pub(crate) contended: u64,
    pub(crate) unavailable: u64,
    pub(crate) quarantined: u64,
    pub(crate) expired: u64,
    pub(crate) lost: u64,
    pub(crate) replayed: u64,
    pub(crate) two_holders: u64,
    pub(crate) token_regressions: u64,
}

impl Counters {
    /// Returns how many requests were refused or stopped for want of a quorum.
    pub(crate) fn without_quorum(self) -> u64 {
        self.unavailable + self.quarantined + self.expired + self.lost
    }
}

/// A handler's stay in the critical section, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    checker: Arc<Checker>,
    id: u64,
}

impl Checker {
    pub(crate) fn new(feed: Feed) -> Arc<Self> {
        Arc::new(Self {
            feed,
            state: Mutex::default(),
        })
    }

    /// Checks a new holder against all others.
    pub(crate) fn enter(
        self: &Arc<Self>,
        server: usize,
        caller: usize,
        handle: LockHandle,
    ) -> Hold {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let others = state.holds.values().filter(|other| other.lock.is_valid());
        state.counters.two_holders += u64::from(others.count() > 0 && handle.is_valid());
        let token = handle.fencing_token();
        // A server that was paused since it was granted the lock enters late, and knows it.
        let is_late = !handle.is_valid();
        let is_regression = !is_late && token.is_some() && token <= state.last_token;
        state.counters.token_regressions += u64::from(is_regression);
        state.first_token = state.first_token.or(token);
        state.last_token = state.last_token.max(token);
        state.counters.acquired += 1;
        if let Some(asked) = state.callers[caller].asked {
            if state.latencies.len() == MAX_LATENCIES {
                state.latencies.pop_front();
            }
            state.latencies.push_back(asked.elapsed());
        }
        let (id, from) = (state.next_hold, self.feed.now());
        state.next_hold += 1;
        let active = Active {
            caller,
            server,
            valid_until: Instant::now() + handle.valid_for(),
            lock: handle,
            from,
            is_over: false,
        };
        self.show(id, &active, None);
        state.holds.insert(id, active);
        Hold {
            checker: Arc::clone(self),
            id,
        }
    }

    /// Shows the holds whose validity ended while their handlers go on.
    pub(crate) fn tick(&self) {
        let mut state = lock(&self.state);
        for (id, active) in &mut state.holds {
            if active.lock.is_valid() {
                active.valid_until = Instant::now() + active.lock.valid_for();
            } else if !active.is_over {
                active.is_over = true;
                self.show(*id, active, Some(active.end()));
            }
        }
    }

    /// Notes that a caller sends a request.
    pub(crate) fn ask(&self, caller: usize) {
        lock(&self.state).callers[caller].asked = Some(Instant::now());
    }

    /// Notes that a caller has gone away without an answer.
    pub(crate) fn give_up(&self, caller: usize) {
        lock(&self.state).callers[caller].asked = None;
    }

    /// Counts the answer to a caller.
    pub(crate) fn answered(&self, caller: usize, status: u16, code: &str, holder: &Value) {
        let mut state = lock(&self.state);
        let row = &mut state.callers[caller];
        row.asked = None;
        row.last = Some(json!({"status": status, "code": code, "holder": holder}));
        let counters = &mut state.counters;
        match code {
            "lock-contended" => counters.contended += 1,
            "lock-unavailable" => counters.unavailable += 1,
            "lock-quarantined" => counters.quarantined += 1,
            "lock-expired" => counters.expired += 1,
            "lock-lost" => counters.lost += 1,
            "replayed" => counters.replayed += 1,
            _ => {}
        }
    }

    pub(crate) fn refused(&self, caller: usize, server: usize, status: u16, code: &str) {
        let refusal = json!({
            "caller": CALLERS[caller], "server": SERVERS[server], "status": status, "code": code,
        });
        self.feed.send("refusal", refusal);
    }

    pub(crate) fn counters(&self) -> Counters {
        lock(&self.state).counters
    }

    pub(crate) fn first_token(&self) -> Option<FencingToken> {
        lock(&self.state).first_token
    }

    /// Returns whether a caller waits for an answer.
    pub(crate) fn is_asking(&self, caller: usize) -> bool {
        lock(&self.state).callers[caller].asked.is_some()
    }

    /// Returns whether a caller's handler runs under its lock.
    pub(crate) fn is_holding(&self, caller: usize) -> bool {
        let state = lock(&self.state);
        state.holds.values().any(|active| active.caller == caller)
    }

    pub(crate) fn view_callers(&self, count: usize, paused: [bool; SERVERS.len()]) -> Value {
        let state = lock(&self.state);
        let rows = state.callers.iter().enumerate().take(count);
        rows.map(|(caller, row)| {
            let server = caller % SERVERS.len();
            let hold = state.holds.values().find(|active| active.caller == caller);
            let is_busy = hold.is_some() || row.asked.is_some();
            let condition = match hold {
                _ if is_busy && paused[server] => "paused",
                Some(_) => "holding",
                None if row.asked.is_some() => "waiting",
                None => "idle",
            };
            json!({
                "name": CALLERS[caller],
                "server": SERVERS[server],
                "state": condition,
                "token": hold.and_then(|active| active.lock.fencing_token()).map(|token| token.to_string()),
                "valid_ms": hold.map(|active| active.lock.valid_for().as_millis()),
                "last": row.last,
            })
        })
        .collect()
    }

    pub(crate) fn view_counters(&self, storage: &Storage) -> Value {
        let state = lock(&self.state);
        let mut latencies: Vec<_> = state.latencies.iter().copied().collect();
        latencies.sort_unstable();
        let at = |percent: usize| {
            let latency = latencies.get(latencies.len().saturating_sub(1) * percent / 100)?;
            Some(in_millis(*latency))
        };
        let counters = state.counters;
        json!({
            "acquired": counters.acquired,
            "contended": counters.contended,
            "unavailable": counters.unavailable,
            "quarantined": counters.quarantined,
            "expired": counters.expired,
            "lost": counters.lost,
            "replayed": counters.replayed,
            "two_holders": counters.two_holders,
            "token_regressions": counters.token_regressions,
            "lost_updates": storage.lost_updates(),
            "refused_writes": storage.refused_writes(),
            "p50_ms": at(50),
            "p99_ms": at(99),
        })
    }

    fn leave(&self, id: u64) {
        let active = lock(&self.state).holds.remove(&id);
        if let Some(active) = active.filter(|active| !active.is_over) {
            let end = active.end();
            self.show(id, &active, Some(end));
        }
    }

    fn show(&self, id: u64, active: &Active, end: Option<&str>) {
        let hold = json!({
            "id": id,
            "caller": CALLERS[active.caller],
            "server": SERVERS[active.server],
            "token": active.lock.fencing_token().map(|token| token.to_string()),
            "from": active.from,
            "to": end.map(|_| self.feed.now()),
            "end": end,
        });
        self.feed.send_and_keep("hold", hold);
    }
}

impl Active {
    /// Returns how it ends now: released, expired, or lost before its validity was over.
    fn end(&self) -> &'static str {
        if self.lock.is_valid() {
            "released"
        } else if Instant::now() < self.valid_until {
            "lost"
        } else {
            "expired"
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.checker.leave(self.id);
    }
}

/// Returns a duration in milliseconds with three decimals.
fn in_millis(duration: Duration) -> f64 {
    // A thousand times as long, so that its seconds are the milliseconds of the original.
    let micros = duration.as_micros().try_into().unwrap_or(u64::MAX);
    Duration::from_millis(micros).as_secs_f64()
}

/// How many acquisitions the percentiles are of.
const MAX_LATENCIES: usize = 500;
