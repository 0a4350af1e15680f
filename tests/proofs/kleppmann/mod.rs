//! What Martin Kleppmann holds against Redlock ("How to do distributed locking", 2016), made to happen
//! with client processes, real servers and a storage: what breaks, and what keeps it from breaking.

mod client;
#[cfg(target_os = "linux")]
mod clock;
mod storage;

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use tower_redlock::{LockError, Redlock, RestartGuard};

use crate::kleppmann::client::{Acquired, Client, KEY, Setup, Written};
#[cfg(target_os = "linux")]
use crate::kleppmann::clock::Clock;
use crate::kleppmann::storage::Storage;
use crate::support::{Cluster, Connection, Deadline, MonitorLog, Proxy, RedisServer, ms, secs};

#[test]
#[ignore = "it is the client process of the other tests, which they start"]
fn client_process() {
    client::run_worker();
}

#[test]
fn client_paused_beyond_its_ttl_is_refused_by_the_storage_and_not_valid() {
    let (cluster, storage) = (Cluster::start(3), Storage::start());
    let setup = unguarded(secs(1));
    let (one, two) = (
        Client::start("one", &cluster.urls(), setup, &storage, &[]),
        Client::start("two", &cluster.urls(), setup, &storage, &[]),
    );
    one.wait_until_up(3);
    two.wait_until_up(3);
    let first = one.lock();
    one.read();
    let promised = one.valid_until().expect("it was acquired just now");
    one.pause();
    let second = two.lock();
    assert!(second.at >= promised, "two held it");
    two.read();
    assert!(two.write().fenced);
    // It asks nothing and nobody between waking up and writing: what it knew was right once.
    let late = one.begin_write();
    one.go_on();
    assert_eq!(one.written(late), TOO_LATE);
    assert_lost_update(&storage, first, second);
    one.release();
    two.release();
    cluster.wait_until_free_blocking(secs(5));
}

/// Five nodes A to E. The first client cannot reach D and E, the second cannot reach A and B.
struct FiveNodes {
    cluster: Cluster,
    storage: Storage,
    one: Client,
    two: Client,
    _broken_wires: Vec<Proxy>,
}

impl FiveNodes {
    /// Starts servers, of which C has its environment, and clients, of which the second has.
    async fn start(c_envs: &[(&str, &str)], two_envs: &[(&str, &str)]) -> Self {
        let mut servers: Vec<_> = (0..5)
            .map(|node| RedisServer::launch_with(if node == C { c_envs } else { &[] }))
            .collect();
        for server in &mut servers {
            server.wait_until_ready();
        }
        let (cluster, storage) = (Cluster { servers }, Storage::start());
        let (mut wires, mut urls) = (Vec::new(), [cluster.urls(), cluster.urls()]);
        for (client, node) in [(0, 3), (0, 4), (1, 0), (1, 1)] {
            let wire = Proxy::start(cluster.servers[node].addr()).await;
            wire.black_hole();
            urls[client][node] = wire.url();
            wires.push(wire);
        }
        // No renewal comes into it: that would find C's key missing, but find no majority against it.
        let setup = unguarded(LONG_TTL);
        let one = Client::start("one", &urls[0], setup, &storage, &[]);
        let two = Client::start("two", &urls[1], setup, &storage, two_envs);
        one.wait_until_up(3);
        two.wait_until_up(3);
        Self {
            cluster,
            storage,
            one,
            two,
            _broken_wires: wires,
        }
    }

    /// Checks that both get the lock once C has let go of it, and that only one of them writes.
    fn both_hold_it_when_c_lets_go(&self, let_go: impl FnOnce(&RedisServer)) -> (u64, u64) {
        let Self { one, two, .. } = self;
        let first = one.lock();
        one.read();
        assert!(two.try_lock().is_none(), "C has granted it to the first");
        let_go(&self.cluster.servers[C]);
        let second = two.lock();
        assert!(one.valid_until().is_some() && two.valid_until().is_some());
        two.read();
        assert_eq!(two.write(), ON_TIME);
        assert_eq!(one.write(), BESIDE_ANOTHER);
        assert_lost_update(&self.storage, first, second);
        (first.token, second.token)
    }
}

#[tokio::test]
async fn early_expiry_on_one_node_gives_two_holders_and_the_storage_obeys_the_later() {
    let scene = FiveNodes::start(&[], &[]).await;
    scene.both_hold_it_when_c_lets_go(|c| {
        let expired = c.command(&["PEXPIREAT", &format!("redlock:{{{KEY}}}"), "1"]);
        assert_eq!(expired.as_int(), Some(1));
    });
}

/// The later client's clock is behind, so that the order cannot come from the clocks.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn clock_jump_on_one_node_gives_two_holders_and_the_storage_obeys_the_later() {
    let (of_c, of_two) = (Clock::new(), Clock::behind(SKEW));
    let scene = FiveNodes::start(&of_c.envs(), &of_two.envs()).await;
    let (first, second) = scene.both_hold_it_when_c_lets_go(|c| {
        let before = clock_of(c);
        of_c.jump_ahead(LONG_TTL + secs(1));
        let jumped = clock_of(c) - before;
        assert!(jumped >= micros(LONG_TTL), "{jumped}");
    });
    assert_eq!(second, first + 1, "the fence of C, and not a wall clock");
}

/// What makes a node forget the locks it has granted. `tests/redis/restart_guard.rs` shows what the guard
/// does about it; here is what comes of it at a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Restart,
    Flush,
    /// It becomes the replica of an empty server and is made a master again.
    Replication,
}

/// Three nodes, of which the first client cannot reach C; so it holds its locks on A and B.
struct ThreeNodes {
    cluster: Cluster,
    storage: Storage,
    one: Client,
    two: Client,
    _broken_wire: Proxy,
}

impl ThreeNodes {
    async fn start(setup: Setup, two_envs: &[(&str, &str)]) -> Self {
        let (cluster, storage) = (Cluster::start(3), Storage::start());
        let wire = Proxy::start(cluster.servers[C].addr()).await;
        wire.black_hole();
        let mut urls = cluster.urls();
        urls[C] = wire.url();
        let one = Client::start("one", &urls, setup, &storage, &[]);
        let two = Client::start("two", &cluster.urls(), setup, &storage, two_envs);
        one.wait_until_up(2);
        two.wait_until_up(3);
        Self {
            cluster,
            storage,
            one,
            two,
            _broken_wire: wire,
        }
    }

    /// Makes B forget everything.
    fn b_forgets(&mut self, fault: Fault) {
        match fault {
            Fault::Restart => {
                wait_for_the_end_of_a_second(&self.cluster.servers[C]);
                self.cluster.servers[B].restart();
            }
            Fault::Flush => {
                self.cluster.servers[B].command(&["FLUSHALL"]);
            }
            Fault::Replication => become_a_replica_and_a_master(&self.cluster.servers[B]),
        }
    }
}

/// Checks that with the guard nobody gets the lock that B forgot before its holder gives it up.
async fn is_granted_once(fault: Fault, setup: Setup) {
    for attempt in 1..=3 {
        if is_granted_once_to_a_holder_in_time(fault, setup).await {
            return;
        }
        println!("warning: {fault:?}: attempt {attempt} is void: the lock was over too soon");
    }
    panic!("the machine is too slow");
}

/// Returns false if the lock was over before B had forgotten it, which shows nothing.
async fn is_granted_once_to_a_holder_in_time(fault: Fault, setup: Setup) -> bool {
    let mut scene = ThreeNodes::start(setup, &[]).await;
    let first = scene.one.lock();
    let mut promised = scene.one.valid_until().unwrap_or_default();
    scene.one.read();
    let trying = scene.two.keep_trying(PATIENCE);
    scene.b_forgets(fault);
    let forgotten = clock_of(&scene.cluster.servers[C]);
    let ThreeNodes {
        one, two, storage, ..
    } = scene;
    let deadline = Deadline::after(PATIENCE);
    while let Some(until) = one.valid_until() {
        promised = promised.max(until);
        assert!(deadline.pause(), "it can be renewed on A alone");
    }
    let second = two.acquired(trying).expect("B comes back in the end");
    println!(
        "{fault:?}: held for {} ms more, granted again {} ms after that, after {} + {} refusals",
        promised.saturating_sub(forgotten) / 1_000,
        second.at.saturating_sub(promised) / 1_000,
        second.contended,
        second.unavailable
    );
    assert!(second.at >= promised, "two held it");
    two.read();
    assert!(two.write().fenced);
    assert_eq!(one.write(), TOO_LATE);
    assert_lost_update(&storage, first, second);
    promised > forgotten
}

/// Checks that without the guard the lock that B forgot is granted twice.
async fn is_granted_twice(fault: Fault) {
    let mut scene = ThreeNodes::start(unguarded(LONG_TTL), &[]).await;
    let first = scene.one.lock();
    scene.one.read();
    assert!(scene.two.try_lock().is_none());
    scene.b_forgets(fault);
    let second = scene.two.lock();
    let ThreeNodes {
        one, two, storage, ..
    } = &scene;
    assert!(one.valid_until().is_some() && two.valid_until().is_some());
    two.read();
    assert_eq!(two.write(), ON_TIME);
    assert_eq!(one.write(), BESIDE_ANOTHER);
    assert_lost_update(storage, first, second);
}

/// The restarted server says after some milliseconds that it has been up for a second.
#[tokio::test]
async fn restart_guard_keeps_a_node_restarted_late_in_a_second_from_granting_a_held_lock() {
    is_granted_once(Fault::Restart, guarded(ms(300), ms(400))).await;
}

#[tokio::test]
async fn restart_guard_keeps_a_flushed_node_from_granting_a_held_lock() {
    is_granted_once(Fault::Flush, guarded(secs(1), ms(1_500))).await;
}

#[tokio::test]
async fn restart_guard_keeps_a_former_replica_from_granting_a_held_lock() {
    is_granted_once(Fault::Replication, guarded(secs(2), ms(2_500))).await;
}

#[tokio::test]
async fn restart_guard_off_forgetful_node_gives_two_holders_with_ordered_tokens() {
    for fault in [Fault::Restart, Fault::Flush, Fault::Replication] {
        is_granted_twice(fault).await;
    }
}

/// The fence that would have corrected the second client's clock is what B has forgotten.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn restart_guard_off_with_skewed_clocks_gives_unordered_tokens() {
    let of_two = Clock::behind(SKEW);
    let mut scene = ThreeNodes::start(unguarded(LONG_TTL), &of_two.envs()).await;
    let first = scene.one.lock();
    scene.one.read();
    scene.b_forgets(Fault::Restart);
    let second = scene.two.lock();
    assert!(second.token < first.token, "{second:?} {first:?}");
    scene.two.read();
    assert_eq!(scene.two.write(), ON_TIME);
    // The storage takes the earlier holder for the later one.
    assert_eq!(scene.one.write(), ON_TIME);
    assert_eq!(scene.storage.content().fenced, "one ", "an update is lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_after_the_ttl_grant_no_lock() {
    const DELAY: Duration = Duration::from_millis(1_500);
    let (ttl, cluster) = (ms(300), Cluster::start(3));
    let mut wires = Vec::new();
    for server in &cluster.servers {
        wires.push(Proxy::start(server.addr()).await);
    }
    let late = unguarded_redlock(wires.iter().map(Proxy::url).collect(), secs(5)).await;
    let other = unguarded_redlock(cluster.urls(), ms(500)).await;
    // A client that counts grants and does not look at the time.
    let mut naive: Vec<_> = wires
        .iter()
        .map(|wire| Connection::open(wire.addr()).unwrap())
        .collect();
    for wire in &wires {
        wire.delay(DELAY);
    }
    let naive = naive.drain(..).map(|mut node| {
        thread::spawn(move || node.call(&["SET", "redlock:{naive}", "v", "NX", "PX", "300"]))
    });
    let naive: Vec<_> = naive.collect();
    let asked = tokio::spawn(late.try_lock(KEY).ttl(ttl).into_future());
    for server in &cluster.servers {
        // Ahead of the other client's: locks go by the ttl, but counts and fences stay.
        let deadline = Deadline::after(PATIENCE);
        let arrived = || {
            let sets = server.call_counts().get("set").copied();
            sets >= Some(3) && server.exists("redlock:{account}:fence")
        };
        while !arrived() {
            assert!(deadline.pause(), "{:?}", server.call_counts());
            tokio::task::yield_now().await;
        }
    }
    let held = other.lock(KEY).wait(secs(5)).await.unwrap();
    let held_beside_naive = other.lock("naive").wait(secs(5)).await.unwrap();

    let refused = asked.await.unwrap();
    let Err(LockError::Expired { ttl: of, elapsed }) = refused else {
        panic!("{refused:?}");
    };
    assert!(of == ttl && elapsed >= DELAY, "{of:?} {elapsed:?}");
    let granted = naive.into_iter().map(|node| node.join().unwrap().unwrap());
    let granted = granted.filter(|reply| reply.as_str() == Some("OK")).count();
    assert!(granted >= 2, "{granted}");
    assert!(
        held_beside_naive.is_valid(),
        "two hold it, if grants are all that counts"
    );

    assert!(held.is_valid());
    for guard in [held, held_beside_naive] {
        guard.release().await.unwrap();
    }
    cluster.wait_until_free(secs(5)).await;
}

/// A majority that restarts at once has forgotten all that was granted.
struct Restarted {
    storage: Storage,
    one: Client,
    two: Client,
    first: Acquired,
    /// What the second client got, which tried all the time.
    second: Acquired,
    /// Until when the first could rely on its lock, as far as it was seen.
    promised: u64,
    /// When the nodes were started again.
    restarted: u64,
}

impl Restarted {
    fn run(setup: Setup) -> Self {
        let (mut cluster, storage) = (Cluster::start(3), Storage::start());
        let start = |name| Client::start(name, &cluster.urls(), setup, &storage, &[]);
        let (one, two) = (start("one"), start("two"));
        one.wait_until_up(3);
        two.wait_until_up(3);
        let first = one.lock();
        one.read();
        let trying = two.keep_trying(PATIENCE);
        for server in &mut cluster.servers[..2] {
            server.kill();
        }
        let restarted = clock_of(&cluster.servers[2]);
        for server in &mut cluster.servers[..2] {
            server.restart();
        }
        // Without the guard it is valid for long; with it, this sees nearly all of the validity.
        let (mut promised, deadline) = (0, Deadline::after(setup.ttl.min(secs(2))));
        while let Some(until) = one.valid_until() {
            promised = promised.max(until);
            if !deadline.pause() {
                break;
            }
        }
        let second = two.acquired(trying).expect("a majority is back in the end");
        Self {
            storage,
            one,
            two,
            first,
            second,
            promised,
            restarted,
        }
    }
}

#[test]
fn restart_guard_makes_a_restarted_majority_unavailable_and_then_grants_once() {
    let window = ms(1_500);
    let Restarted {
        storage,
        one,
        two,
        first,
        second,
        promised,
        restarted,
    } = Restarted::run(guarded(secs(1), window));
    let after = second.at.saturating_sub(restarted);
    println!(
        "a majority restarted: granted again after {} ms and {} refusals for want of a majority",
        after / 1_000,
        second.unavailable
    );
    assert!(second.unavailable > 0, "{second:?}");
    assert!(after >= micros(window), "{after} < {window:?}");
    assert!(second.at >= promised, "two held it");
    two.read();
    assert!(two.write().fenced);
    assert_eq!(one.write(), TOO_LATE);
    assert_lost_update(&storage, first, second);
}

#[test]
fn restart_guard_off_restarted_majority_gives_two_holders() {
    let Restarted {
        storage,
        one,
        two,
        first,
        second,
        ..
    } = Restarted::run(unguarded(LONG_TTL));
    assert!(one.valid_until().is_some() && two.valid_until().is_some());
    two.read();
    assert_eq!(two.write(), ON_TIME);
    assert_eq!(one.write(), BESIDE_ANOTHER);
    assert_lost_update(&storage, first, second);
}

#[tokio::test]
async fn holder_cut_off_from_the_majority_is_lost_before_the_next_grant() {
    // The holder's own timer may be late on a machine that stands still; its clock is not.
    for attempt in 1..=3 {
        if cut_off_holder_is_told_first().await {
            return;
        }
        println!("warning: attempt {attempt} is void: the machine stood still");
    }
    panic!("the machine is too slow");
}

/// Returns false if the holder was told late, by its own measure.
async fn cut_off_holder_is_told_first() -> bool {
    let (cluster, storage) = (Cluster::start(3), Storage::start());
    let (mut wires, mut urls) = (Vec::new(), cluster.urls());
    for (server, url) in cluster.servers.iter().zip(&mut urls).take(2) {
        let wire = Proxy::start(server.addr()).await;
        *url = wire.url();
        wires.push(wire);
    }
    let setup = unguarded(secs(2));
    let one = Client::start("one", &urls, setup, &storage, &[]);
    let two = Client::start("two", &cluster.urls(), setup, &storage, &[]);
    one.wait_until_up(3);
    two.wait_until_up(3);
    let first = one.lock();
    one.read();
    let (watching, trying) = (one.watch(), two.keep_trying(PATIENCE));
    for wire in &wires {
        wire.black_hole();
    }
    let lost = one.lost(watching);
    let second = two.acquired(trying).expect("the ttl ends on two nodes");
    println!(
        "cut off: told {} us before the end of its validity, another had it {} us after that",
        lost.promised.saturating_sub(lost.told),
        second.at.saturating_sub(lost.promised)
    );
    assert!(second.at >= lost.promised, "two held it");
    if lost.told > lost.promised + micros(ms(5)) {
        return false;
    }
    assert!(second.at > lost.told, "{second:?} {lost:?}");
    // The storage is on this side of the cut, and the holder does not care.
    two.read();
    assert!(two.write().fenced);
    assert_eq!(one.write(), TOO_LATE);
    assert_lost_update(&storage, first, second);
    true
}

/// What two clients that share the key cost the servers, over all three of them.
#[derive(Debug)]
struct Cost {
    acquisitions: usize,
    acquires: usize,
    confirms: usize,
}

impl Cost {
    fn print(&self, what: &str) {
        // In hundredths, because the lints know no floats.
        let per = |count: usize| {
            let hundredths = count * 100 / self.acquisitions.max(1);
            format!("{}.{:02}", hundredths / 100, hundredths % 100)
        };
        println!(
            "{what}: {} acquisitions, {} ACQUIRE and {} CONFIRM commands per acquisition",
            self.acquisitions,
            per(self.acquires),
            per(self.confirms)
        );
    }
}

/// Lets two clients share the key, in turn and side by side, and checks order and shares; returns
/// what it costs that a node is out of the first one's reach and knows lower fences than the others.
async fn share_a_key(clocks: &str, two_envs: &[(&str, &str)]) -> Cost {
    let (cluster, storage) = (Cluster::start(3), Storage::start());
    let wire = Proxy::start(cluster.servers[A].addr()).await;
    let mut urls = cluster.urls();
    urls[A] = wire.url();
    let setup = unguarded(LONG_TTL);
    let one = Client::start("one", &urls, setup, &storage, &[]);
    let two = Client::start("two", &cluster.urls(), setup, &storage, two_envs);
    one.wait_until_up(3);
    two.wait_until_up(3);

    let mut highest = 0;
    let in_turn = cost_in_turn(&cluster, [&one, &two], &mut highest);
    in_turn.print(&format!("{clocks}, in turn"));

    let servers = Observed::start(&cluster);
    let turns = [&one, &two].map(|client| client.take_turns(secs(2)));
    one.done(turns[0]);
    two.done(turns[1]);
    let content = storage.content();
    let shares = count_in_order(&content.notes, &mut highest);
    let all = shares.values().sum();
    servers
        .cost(all)
        .print(&format!("{clocks}, side by side, shares {shares:?}"));
    assert_eq!(shares.len(), 2);
    for (name, share) in &shares {
        assert!(10 * share >= all, "{name} got {share} of {all}");
    }

    // Or a release would be cut off with it.
    cluster.wait_until_free_blocking(secs(5));
    wire.cut();
    let apart = cost_in_turn(&cluster, [&one, &two], &mut highest);
    apart.print(&format!(
        "{clocks}, in turn, A out of the first one's reach"
    ));
    wire.pass();
    cluster.wait_until_free_blocking(secs(5));
    apart
}

/// Lets two clients take the lock in turn, and checks the order of their tokens.
fn cost_in_turn(cluster: &Cluster, clients: [&Client; 2], highest: &mut u64) -> Cost {
    const TURNS: usize = 20;
    let servers = Observed::start(cluster);
    for _ in 0..TURNS {
        for client in clients {
            let token = client.lock().token;
            assert!(token > *highest, "{token} after {highest}");
            *highest = token;
            client.release();
        }
    }
    servers.cost(2 * TURNS)
}

/// Counts the locks of each client, each of whose tokens must be higher than those of all locks
/// that were had before it was asked for.
fn count_in_order<'a>(notes: &'a [String], highest: &mut u64) -> BTreeMap<&'a str, usize> {
    let (mut shares, mut at_request) = (BTreeMap::new(), BTreeMap::new());
    for note in notes {
        match *note.split(' ').collect::<Vec<_>>() {
            ["asks", name] => {
                at_request.insert(name, *highest);
            }
            ["has", name, token] => {
                let token: u64 = token.parse().expect("a token is a number");
                assert!(token > at_request[name], "{token} after {highest}: {name}");
                *highest = token.max(*highest);
                *shares.entry(name).or_default() += 1;
            }
            _ => panic!("{note}"),
        }
    }
    shares
}

/// Servers whose commands are counted.
struct Observed {
    logs: Vec<MonitorLog>,
    acquire: String,
    confirm: String,
}

impl Observed {
    fn start(cluster: &Cluster) -> Self {
        let hash = |script: &str| {
            let loaded = cluster.servers[0].command(&["SCRIPT", "LOAD", script]);
            let hash = loaded.as_str().map(str::to_owned);
            hash.expect("a script that the crate uses can be loaded")
        };
        Self {
            acquire: hash(include_str!("../../../src/node/redis/scripts/acquire.lua")),
            confirm: hash(include_str!("../../../src/node/redis/scripts/confirm.lua")),
            logs: cluster.servers.iter().map(MonitorLog::start).collect(),
        }
    }

    fn cost(&self, acquisitions: usize) -> Cost {
        let lines: Vec<_> = self.logs.iter().flat_map(MonitorLog::lines).collect();
        let count = |hash: &str| lines.iter().filter(|line| line.contains(hash)).count();
        Cost {
            acquisitions,
            acquires: count(&self.acquire),
            confirms: count(&self.confirm),
        }
    }
}

#[tokio::test]
async fn two_processes_share_a_key_fairly_with_ordered_tokens() {
    let cost = share_a_key("equal clocks", &[]).await;
    assert_eq!(cost.confirms, 0, "whoever asks later proposes more");
}

/// The one that is behind proposes less than the nodes know: they answer one more than that, and
/// where they know different numbers it takes the second phase to make the answers equal.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn two_processes_with_clocks_seconds_apart_share_a_key_fairly_with_ordered_tokens() {
    let of_two = Clock::behind(SKEW);
    let cost = share_a_key("clocks 5 s apart", &of_two.envs()).await;
    assert!(cost.confirms > 0, "{cost:?}");
}

const fn unguarded(ttl: Duration) -> Setup {
    Setup { ttl, guard: None }
}

const fn guarded(ttl: Duration, window: Duration) -> Setup {
    Setup {
        ttl,
        guard: Some(window),
    }
}

/// Returns a lock service of this process that is connected to all its nodes.
async fn unguarded_redlock(urls: Vec<String>, node_timeout: Duration) -> Redlock {
    let nodes = urls.len();
    let builder = Redlock::builder().urls(urls).node_timeout(node_timeout);
    let redlock = builder.restart_guard(RestartGuard::Off).build();
    let redlock = redlock.expect("the settings are valid");
    let up = async {
        while redlock.health().await.up() < nodes {
            tokio::time::sleep(ms(10)).await;
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, up).await;
    in_time.expect("all nodes are reached");
    redlock
}

/// Checks that the second client's update is in the register that checks tokens, and lost in the
/// other one.
#[track_caller]
fn assert_lost_update(storage: &Storage, first: Acquired, second: Acquired) {
    assert!(second.token > first.token, "{first:?} {second:?}");
    let content = storage.content();
    assert_eq!(content.fenced, "two ");
    assert_eq!(content.plain, "one ", "the update of two is lost");
}

/// Makes a server the replica of an empty one and, once it has forgotten its own data, a master.
fn become_a_replica_and_a_master(server: &RedisServer) {
    let empty = RedisServer::start();
    empty.command(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    server.command(&["REPLICAOF", "127.0.0.1", &empty.port().to_string()]);
    let deadline = Deadline::after(PATIENCE);
    let synced = || {
        let info = server.command(&["INFO", "replication"]);
        let info = info.as_str().unwrap_or_default();
        info.contains("master_link_status:up")
    };
    while !synced() {
        assert!(deadline.pause(), "the replica does not sync");
    }
    server.command(&["REPLICAOF", "NO", "ONE"]);
}

/// Waits until the wall clock is about to begin a new second, at which uptimes grow: a server that
/// is restarted now begins in this second and is connected to again in the next.
fn wait_for_the_end_of_a_second(server: &RedisServer) {
    let deadline = Deadline::after(secs(2));
    while clock_of(server) % 1_000_000 < 885_000 && deadline.pause() {}
}

/// Returns a server's wall clock in microseconds.
#[track_caller]
fn clock_of(server: &RedisServer) -> u64 {
    let time = server.command(&["TIME"]);
    let parts = time.as_array().expect("seconds and microseconds");
    let number = |index: usize| {
        let part = parts.get(index).and_then(|part| part.as_int());
        u64::try_from(part.expect("a number")).expect("it is after 1970")
    };
    number(0) * 1_000_000 + number(1)
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("a test is short")
}

/// Of nodes, where they have names.
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

/// By how much the clocks of two clients differ.
#[cfg(target_os = "linux")]
const SKEW: Duration = secs(5);

/// Longer than any test; nothing is renewed and the ttl frees nothing.
const LONG_TTL: Duration = secs(120);

const PATIENCE: Duration = secs(30);

const ON_TIME: Written = Written {
    was_valid: true,
    fenced: true,
};

/// By a client that has no way to know that somebody else holds its lock.
const BESIDE_ANOTHER: Written = Written {
    was_valid: true,
    fenced: false,
};

/// By a client that could have known.
const TOO_LATE: Written = Written {
    was_valid: false,
    fenced: false,
};
