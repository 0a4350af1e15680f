//! Chaos on five real servers: whatever befalls two of them, a key has one holder and tokens rise.
//!
//! Clients contend for overlapping sets of four keys and write to a storage with their tokens,
//! while servers are killed, stopped, flushed, partitioned, cut off and slowed, at most two at a
//! time. One that lost its memory counts until the restart guard has admitted it again. It takes a
//! minute and prints what happened. For longer:
//!
//! ```sh
//! CHAOS_SECONDS=3600 cargo test --all-features --test proofs chaos
//! ```
//!
//! `CHAOS_SEED`, which is printed first, repeats the faults: which, in which order, on which server
//! and for how long, but not what the clients are doing at that instant.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write as _};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::deadpool_redis::Config;
use tower_redlock::{
    ExtendError, LockError, LockGuard, LockHandle, LostReason, NodeState, Redlock, RedlockBuilder,
    ReleaseError, RestartGuard, Retry,
};

use crate::support::{Cluster, Proxy, Random, RedisServer};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn faults_of_a_minority_break_neither_mutual_exclusion_nor_tokens() {
    let seconds = setting("CHAOS_SECONDS").unwrap_or(60);
    let seed = setting("CHAOS_SEED").unwrap_or_else(|| RandomState::new().build_hasher().finish());
    say(&format!("chaos: {seconds} s with CHAOS_SEED={seed}"));
    let mut history = World::start().await.suffer(seconds, seed).await;
    let found = [check(&history.records), check_storage(&history.storage)];
    history.violations.extend(found.into_iter().flatten());
    say(&history.to_string());

    let violations = &history.violations;
    let first: Vec<_> = violations.iter().take(10).collect();
    assert!(
        violations.is_empty(),
        "CHAOS_SEED={seed}: {} violations, such as {first:#?}",
        violations.len()
    );
    let acquired = u64::try_from(history.records.len()).unwrap();
    assert!(acquired > 20, "it came to a stand");
    assert!(history.counted("refused", "contended") > 0, "too tame");
    if seconds >= 60 {
        for kind in KINDS {
            assert!(history.counted("faults", kind.name()) > 0, "no {kind:?}");
        }
        assert!(history.all_counted("lost") > 0, "too tame");
        assert!(history.counted("writes", "refused, too late") > 0);
    }
}

/// Prints at once: what a passed test prints by `println!` is not shown.
fn say(text: &str) {
    let written = io::stderr().write_all(format!("{text}\n").as_bytes());
    written.expect("the standard error output is open");
}

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = u64::from_str(&text);
    Some(number.unwrap_or_else(|_| panic!("{name} is {text:?}, but must be a number")))
}

/// The nodes, those who ask them, and what is known of both.
struct World {
    nodes: Vec<tokio::sync::Mutex<Node>>,
    /// Separate lock services, as in separate processes: they meet on the nodes only.
    instances: Vec<Redlock>,
    history: Mutex<History>,
    is_over: AtomicBool,
}

struct Node {
    server: RedisServer,
    wire: Proxy,
}

impl World {
    /// Starts it and waits until all nodes may vote.
    async fn start() -> Arc<Self> {
        let cluster = Cluster::start(NODES);
        let mut nodes = Vec::new();
        for server in cluster.servers {
            let wire = Proxy::start(server.addr()).await;
            nodes.push(Node { server, wire });
        }
        let instances = (0..INSTANCES).map(|number| {
            let urls = nodes.iter().map(|node| node.wire.url());
            // Half of them over redis-rs's connections, half over their own.
            let by_pool = |builder: RedlockBuilder, url: String| {
                builder.pool(
                    Config::from_url(url)
                        .create_pool(None)
                        .expect("a URL is enough"),
                )
            };
            let builder = match number % 4 {
                0 | 1 => Redlock::builder().urls(urls),
                _ => urls.fold(Redlock::builder(), by_pool),
            };
            builder
                .ttl(TTL)
                .node_timeout(Duration::from_millis(100))
                .restart_guard(RestartGuard::For(WINDOW))
                // Soon there when a key seems to be free, as it is on a node that forgot it.
                .retry(Retry::new(
                    Duration::from_millis(5),
                    Duration::from_millis(50),
                ))
                // Some holders outstay their locks, and then only the storage stops them.
                .renew(number % 2 == 0)
                .build()
                .expect("the settings are valid")
        });
        let world = Self {
            instances: instances.collect(),
            nodes: nodes.into_iter().map(tokio::sync::Mutex::new).collect(),
            history: Mutex::default(),
            is_over: AtomicBool::new(false),
        };
        for node in 0..NODES {
            world.wait_until_admitted(node).await;
        }
        Arc::new(world)
    }

    /// Lets clients and faults loose for a while, and returns what happened.
    async fn suffer(self: Arc<Self>, seconds: u64, seed: u64) -> History {
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let client = Client::new(&self, seed, number);
            clients.spawn(client.run());
        }
        let until = Instant::now() + Duration::from_secs(seconds);
        let plan = Arc::new(Mutex::new(Plan::new(seed)));
        let mut breakers = JoinSet::new();
        for _ in 0..MINORITY {
            let (world, plan) = (Arc::clone(&self), Arc::clone(&plan));
            breakers.spawn(world.break_nodes(plan, until));
        }
        while let Some(ended) = breakers.join_next().await {
            ended.expect("every node is mended and admitted again");
        }
        self.is_over.store(true, Ordering::Relaxed);
        while let Some(ended) = clients.join_next().await {
            ended.expect("no client meets an error that is not its lot");
        }
        self.wait_until_free(Instant::now()).await;
        for node in 0..NODES {
            self.wait_until_admitted(node).await;
        }
        let all = self.instances[0].lock_all(KEYS).await;
        assert!(all.is_ok(), "after all faults: {all:?}");
        std::mem::take(&mut unpoisoned(&self.history))
    }

    /// Waits until no node holds a lock, for as long as what was left behind may live.
    async fn wait_until_free(&self, all_ended: Instant) {
        loop {
            let mut left = Vec::new();
            for node in &self.nodes {
                left.extend(node.lock().await.server.keys(LOCKS));
            }
            let took = all_ended.elapsed();
            if left.is_empty() {
                say(&format!(
                    "chaos: all keys free {took:?} after the last holder"
                ));
                return;
            }
            assert!(took < TTL + NOISE, "still locked after {took:?}: {left:?}");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Breaks one node after the other as planned, and mends each.
    async fn break_nodes(self: Arc<Self>, plan: Arc<Mutex<Plan>>, until: Instant) {
        while Instant::now() < until {
            let fault = unpoisoned(&plan).next();
            let mut node = self.nodes[fault.node].lock().await;
            fault.inflict(&mut node, &self).await;
            self.count("faults", fault.kind.name());
            if Instant::now() < until {
                self.wait_until_admitted(fault.node).await;
                drop(node);
                sleep(fault.pause).await;
            }
        }
    }

    /// Waits until every instance lets a node vote.
    async fn wait_until_admitted(&self, node: usize) {
        let admitted = async {
            for redlock in &self.instances {
                while redlock.health().await.nodes[node].state != NodeState::Up {
                    sleep(Duration::from_millis(50)).await;
                }
            }
        };
        let in_time = timeout(Duration::from_secs(30), admitted).await;
        in_time.expect("a node that works again is admitted again");
    }

    /// Waits a moment until a lock lives on no more nodes than it needs, this one among them: that
    /// is when forgetting it does the most harm.
    async fn wait_for_bare_majority(&self, server: &RedisServer) {
        for _ in 0..100 {
            let is_bare = block_in_place(|| {
                let here = server.keys(LOCKS);
                // Those that are broken now are in the hands of those who broke them.
                let others = self.nodes.iter().filter_map(|node| node.try_lock().ok());
                let there: Vec<_> = others.flat_map(|node| node.server.keys(LOCKS)).collect();
                let copies = |key| 1 + there.iter().filter(|other| *other == key).count();
                here.iter().any(|key| copies(key) == NODES / 2 + 1)
            });
            if is_bare {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    fn count(&self, what: &'static str, which: &'static str) {
        unpoisoned(&self.history).count(what, which);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Killed,
    Stopped,
    Flushed,
    Partitioned,
    Cut,
    Slowed,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed and restarted empty",
            Self::Stopped => "stopped beyond the ttl",
            Self::Flushed => "flushed",
            Self::Partitioned => "partitioned",
            Self::Cut => "connections cut",
            Self::Slowed => "slowed",
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Fault {
    kind: Kind,
    node: usize,
    lasts: Duration,
    pause: Duration,
}

impl Fault {
    /// Breaks a node and mends it; its memory may be lost.
    async fn inflict(self, Node { server, wire }: &mut Node, world: &World) {
        match self.kind {
            Kind::Killed => {
                world.wait_for_bare_majority(server).await;
                block_in_place(|| server.kill());
                sleep(self.lasts / 4).await;
                block_in_place(|| server.restart());
            }
            Kind::Stopped => {
                block_in_place(|| server.stop());
                sleep(TTL + self.lasts).await;
                server.cont();
            }
            Kind::Flushed => {
                world.wait_for_bare_majority(server).await;
                block_in_place(|| server.command(&["FLUSHALL"]));
                // An instance that has not asked for a lock since does not know of it.
                sleep(WINDOW).await;
            }
            Kind::Partitioned => {
                wire.black_hole();
                sleep(2 * self.lasts).await;
                wire.pass();
            }
            Kind::Cut => {
                wire.cut();
                sleep(self.lasts / 2).await;
                wire.pass();
            }
            Kind::Slowed => {
                wire.delay(self.lasts / 5);
                sleep(2 * self.lasts).await;
                wire.pass();
            }
        }
    }
}

/// The faults in their order, which follows from the seed.
struct Plan {
    random: Random,
    /// Dealt like cards, so that no kind is long in coming.
    kinds: Vec<Kind>,
}

impl Plan {
    fn new(seed: u64) -> Self {
        Self {
            random: Random(seed),
            kinds: Vec::new(),
        }
    }

    fn next(&mut self) -> Fault {
        if self.kinds.is_empty() {
            self.kinds.extend(KINDS);
        }
        let card = self.random.index(self.kinds.len());
        Fault {
            kind: self.kinds.swap_remove(card),
            node: self.random.index(NODES),
            lasts: self.random.up_to(Duration::from_secs(1)),
            pause: self.random.up_to(Duration::from_millis(200)),
        }
    }
}

/// Takes locks, writes while it holds them, and lets go of them in all ways there are.
struct Client {
    world: Arc<World>,
    redlock: Redlock,
    random: Random,
}

/// A lock as its client sees it.
struct Held {
    guard: LockGuard,
    handle: LockHandle,
    record: Record,
}

impl Client {
    fn new(world: &Arc<World>, seed: u64, number: u64) -> Self {
        let mut random = Random(seed ^ (number + 1));
        random.next();
        let instance = usize::try_from(number).expect("a few") % INSTANCES;
        Self {
            world: Arc::clone(world),
            redlock: world.instances[instance].clone(),
            random,
        }
    }

    async fn run(mut self) {
        while !self.world.is_over.load(Ordering::Relaxed) {
            match self.acquire().await {
                Some(held) => self.hold(held).await,
                None => sleep(self.random.up_to(Duration::from_millis(20))).await,
            }
        }
    }

    async fn acquire(&mut self) -> Option<Held> {
        let keys = self.random.one_of(&SETS);
        let wait = self.random.one_of(&[0, 0, 300, 2_000]);
        let ttl = self.random.one_of(&[TTL, TTL, TTL / 3]);
        let begun = Instant::now();
        let mut request = self.redlock.lock_all(keys.iter().copied());
        request = request.wait(Duration::from_millis(wait)).ttl(ttl);
        if self.random.is_one_in(20) {
            request = request.max_hold(TTL / 2);
        }
        let outcome = if self.random.is_one_in(5) {
            let patience = self.random.up_to(Duration::from_millis(30));
            let Ok(outcome) = timeout(patience, request).await else {
                self.world.count("refused", "none: given up by the caller");
                return None;
            };
            outcome
        } else {
            request.await
        };
        let granted = Instant::now();
        match outcome {
            Ok(guard) => {
                let record = Record {
                    keys,
                    token: guard.fencing_token().expect("fencing is on").as_u64(),
                    begun,
                    granted,
                    known_valid: None,
                };
                let handle = guard.handle();
                unpoisoned(&self.world.history).on_grant(&record, &handle);
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
                    other => panic!("{other:?}"),
                };
                self.world.count("refused", why);
                None
            }
        }
    }

    async fn hold(&mut self, mut held: Held) {
        let length = match self.random.index(40) {
            // Over several renewals and more than one fault.
            0 => 5_000,
            1..4 => 1_500,
            4..10 => 300,
            10..20 => 50,
            _ => 5,
        };
        let until = Instant::now() + self.random.up_to(Duration::from_millis(length));
        // Goes on without its lock, as a process does that was paused and has not noticed.
        let stubborn = self.random.is_one_in(2);
        let mut extensions = self.random.one_of(&[0, 0, 1, 3]);
        let mut was_lost = false;
        loop {
            self.write(&mut held);
            if !was_lost && !held.handle.is_valid() {
                was_lost = self.count_loss(&held).await;
            }
            let left = until.saturating_duration_since(Instant::now());
            let is_over = self.world.is_over.load(Ordering::Relaxed);
            if left.is_zero() || is_over || (was_lost && !stubborn) {
                break;
            }
            if extensions > 0 && self.random.is_one_in(20) {
                extensions -= 1;
                self.extend(&held).await;
            }
            sleep(left.min(self.random.up_to(Duration::from_millis(10)))).await;
        }
        self.write(&mut held);
        let Held { guard, record, .. } = held;
        // Before it is let go, so that whoever gets it next finds what is known of it.
        unpoisoned(&self.world.history).records.push(record);
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
        self.world.count("released", how);
    }

    async fn extend(&mut self, held: &Held) {
        let ttl = self.random.one_of(&[TTL, TTL / 3]);
        let how = match held.guard.extend(ttl).await {
            Ok(()) => "done",
            Err(ExtendError::Lost(_)) => "lost before",
            Err(ExtendError::Unavailable { .. }) => "unavailable",
            Err(other) => panic!("{other:?}"),
        };
        self.world.count("extensions", how);
    }

    /// Counts why a lock is not valid any more; returns false if it is again.
    async fn count_loss(&self, held: &Held) -> bool {
        let Ok(why) = timeout(NOISE, held.guard.lost()).await else {
            // Looked at before its renewal was noted, and compared with the clock after.
            assert!(held.handle.is_valid(), "nobody was told that it is lost");
            return false;
        };
        let why = match why {
            LostReason::Gone => "a majority says that it is gone",
            LostReason::Expired => "expired",
            LostReason::MaxHold => "max_hold",
            other => panic!("{other:?}"),
        };
        self.world.count("lost", why);
        true
    }

    /// Writes to all keys of a lock, and notes whether it was valid.
    fn write(&self, held: &mut Held) {
        // Whoever is valid after an instant was valid at that instant.
        let before = Instant::now();
        let was_valid = held.handle.is_valid();
        let mut history = unpoisoned(&self.world.history);
        let accepted = history.storage.write(&held.record);
        let after = Instant::now();
        let is_valid = held.handle.is_valid();
        if is_valid {
            held.record.known_valid = Some(after);
        } else if was_valid {
            held.record.known_valid = Some(before);
        }
        let how = match (accepted, is_valid) {
            (true, true) => "accepted",
            (true, false) => "accepted, late but nobody came after",
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

/// What happened, and what should not have.
#[derive(Default)]
struct History {
    records: Vec<Record>,
    storage: Storage,
    /// Granted locks that were valid when last looked at.
    live: Vec<(Record, LockHandle)>,
    /// Per key, the lock with the highest token that was valid when its client got it.
    highest: BTreeMap<&'static str, Record>,
    violations: Vec<String>,
    counts: BTreeMap<&'static str, BTreeMap<&'static str, u64>>,
}

impl History {
    /// Compares a new lock with all that are held, and with those that were.
    fn on_grant(&mut self, new: &Record, handle: &LockHandle) {
        self.live.retain(|(_, handle)| handle.is_valid());
        // After the others: granted before them and valid now, it was valid when they were.
        if !handle.is_valid() {
            return;
        }
        for (held, _) in self.live.iter().filter(|(held, _)| held.meets(new)) {
            self.violations
                .push(format!("two are valid at once: {held:?} and {new:?}"));
        }
        for key in new.keys {
            match self.highest.get(key) {
                Some(before) if before.token >= new.token => self.violations.push(format!(
                    "a token does not rise on {key}: {before:?}, then {new:?}"
                )),
                _ => drop(self.highest.insert(key, new.clone())),
            }
        }
        self.live.push((new.clone(), handle.clone()));
    }

    fn count(&mut self, what: &'static str, which: &'static str) {
        *self
            .counts
            .entry(what)
            .or_default()
            .entry(which)
            .or_default() += 1;
    }

    fn counted(&self, what: &str, which: &str) -> u64 {
        let counts = self.counts.get(what);
        counts
            .and_then(|counts| counts.get(which).copied())
            .unwrap_or_default()
    }

    fn all_counted(&self, what: &str) -> u64 {
        let counts = self.counts.get(what).into_iter();
        counts.flat_map(BTreeMap::values).sum()
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sets = self.records.iter().filter(|record| record.keys.len() > 1);
        writeln!(
            f,
            "chaos: {} acquisitions ({} of several keys), {} violations",
            self.records.len(),
            sets.count(),
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
struct Record {
    keys: &'static [&'static str],
    token: u64,
    /// Before it was asked for.
    begun: Instant,
    /// After its client had it.
    granted: Instant,
    /// The last instant at which it was valid for certain.
    known_valid: Option<Instant>,
}

impl Record {
    fn meets(&self, other: &Self) -> bool {
        self.keys.iter().any(|key| other.keys.contains(key))
    }
}

/// The accepted writes by key, in their order, without repetitions by one writer.
#[derive(Debug, Default)]
struct Storage(BTreeMap<&'static str, Vec<Write>>);

/// A write to one key, with when its writer asked for the lock and when it was granted.
#[derive(Debug, Clone, Copy)]
struct Write {
    token: u64,
    begun: Instant,
    granted: Instant,
}

impl Storage {
    /// Writes to all keys of a lock or to none: not where a higher token has been.
    fn write(&mut self, record: &Record) -> bool {
        let write = Write {
            token: record.token,
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

/// Returns what contradicts the promises in a history as a whole, whoever noticed it at the time.
fn check(records: &[Record]) -> Vec<String> {
    let mut violations = Vec::new();
    for key in KEYS {
        let of_key = || records.iter().filter(|record| record.keys.contains(&key));
        let mut by_token: Vec<_> = of_key().collect();
        by_token.sort_by_key(|record| record.token);
        for pair in by_token.windows(2) {
            if pair[0].token == pair[1].token {
                violations.push(format!("one token twice on {key}: {pair:?}"));
            }
        }
        violations.extend(falls(key, &by_token));

        let mut by_grant: Vec<_> = of_key()
            .filter(|record| record.known_valid.is_some())
            .collect();
        by_grant.sort_by_key(|record| record.granted);
        let mut longest: Option<&Record> = None;
        for record in by_grant {
            let until = longest.and_then(|longest| longest.known_valid);
            if let Some(longest) = longest
                && until > Some(record.granted)
                && record.known_valid > Some(record.granted)
            {
                violations.push(format!(
                    "two were valid at once on {key}: {longest:?} and {record:?}"
                ));
            }
            if record.known_valid > until {
                longest = Some(record);
            }
        }
    }
    violations
}

/// Returns the locks on a key that were asked for when a higher token had been granted.
fn falls(key: &str, by_token: &[&Record]) -> Vec<String> {
    let mut falls = Vec::new();
    // The earliest grant among the higher tokens.
    let mut above: Option<&Record> = None;
    for record in by_token.iter().rev() {
        if let Some(above) = above
            && above.granted < record.begun
        {
            falls.push(format!("a token fell on {key}: {above:?}, then {record:?}"));
        }
        if above.is_none_or(|above| record.granted < above.granted) {
            above = Some(record);
        }
    }
    falls
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
fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lock on some keys, with times in ms after `epoch`.
fn record(
    epoch: Instant,
    keys: &'static [&'static str],
    token: u64,
    [begun, granted, valid]: [u64; 3],
) -> Record {
    let at = |ms| epoch + Duration::from_millis(ms);
    Record {
        keys,
        token,
        begun: at(begun),
        granted: at(granted),
        known_valid: Some(at(valid)),
    }
}

#[test]
fn checker_finds_each_broken_promise_and_none_in_a_good_history() {
    let epoch = Instant::now();
    let of = |keys, token, times| record(epoch, keys, token, times);
    let first = of(&["a", "b"], 5, [0, 10, 20]);
    let found = |second: Record| check(&[second, first.clone()]);
    // Later, with a higher token; also when it was asked for while the first held.
    assert!(found(of(&["b"], 6, [15, 30, 40])).is_empty());
    // No key in common.
    assert!(found(of(&["c", "d"], 5, [0, 10, 20])).is_empty());
    // Asked for before the first was granted, so the order is free.
    assert!(found(of(&["b", "c"], 4, [5, 30, 40])).is_empty());
    for (second, expected) in [
        (of(&["b", "c"], 4, [11, 30, 40]), "a token fell on b"),
        (of(&["a"], 4, [11, 30, 40]), "a token fell on a"),
        (of(&["b"], 5, [5, 30, 40]), "one token twice on b"),
        (of(&["b"], 6, [5, 19, 40]), "two were valid at once on b"),
        (of(&["b"], 6, [0, 9, 11]), "two were valid at once on b"),
    ] {
        let found = found(second);
        assert!(
            matches!(found.as_slice(), [one] if one.starts_with(expected)),
            "{expected}: {found:#?}"
        );
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

const NODES: usize = 5;
const INSTANCES: usize = 8;
const CLIENTS: u64 = 32;

/// How many nodes are broken at once.
const MINORITY: usize = 2;

const KEYS: [&str; 4] = ["a", "b", "c", "d"];
const LOCKS: &str = "redlock:{?}";
const SETS: [&[&str]; 10] = [
    &["a"],
    &["b"],
    &["c"],
    &["d"],
    &["a", "b"],
    &["b", "c"],
    &["c", "d"],
    &["d", "a"],
    &["b", "d"],
    &["a", "b", "c", "d"],
];

const KINDS: [Kind; 6] = [
    Kind::Killed,
    Kind::Stopped,
    Kind::Flushed,
    Kind::Partitioned,
    Kind::Cut,
    Kind::Slowed,
];

/// Short, so that locks expire and are renewed, and nodes are admitted again, often.
const TTL: Duration = Duration::from_secs(1);
const WINDOW: Duration = Duration::from_secs(2);

/// What a busy machine may add.
const NOISE: Duration = Duration::from_secs(1);
