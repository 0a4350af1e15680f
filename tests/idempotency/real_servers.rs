//! Idempotency over real servers: crowds of duplicates, nodes that forget, hang or die, and servers that
//! are killed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::response::IntoResponse;
use axum::routing::post;
use axum::serve::ListenerExt;
use futures_util::future::join_all;
use nix::sys::signal::Signal;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower_redlock::{IdempotencyLayer, Redlock, RedlockLayer, RestartGuard, key, scope};

use crate::support::http::{Client, Response, request};
use crate::support::{
    ChildProcess, Cluster, Deadline, MonitorLog, Proxy, RedisServer, example_path, free_port,
    wait_until,
};

/// What happens once per key, counted over all servers of a test.
#[derive(Debug, Clone, Default)]
struct Bank(Arc<AtomicUsize>);

impl Bank {
    fn executed(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    fn routes(&self) -> Router {
        let bank = self.clone();
        let pay = async move |Query(form): Query<Form>| {
            let number = bank.0.fetch_add(1, Ordering::SeqCst) + 1;
            sleep(Duration::from_millis(form.ms)).await;
            // Not text: what is replayed must be the same bytes.
            let mut body: Vec<u8> = (0..=u8::MAX).collect();
            body.extend(format!("payment {number} {:016x}", fastrand::u64(..)).bytes());
            body.resize(body.len() + form.size, b'x');
            ([("x-payment", number.to_string())], body).into_response()
        };
        Router::new().route("/payments", post(pay))
    }
}

#[derive(Debug, serde::Deserialize)]
struct Form {
    #[serde(default)]
    ms: u64,
    #[serde(default)]
    size: usize,
}

/// One of the servers that share the nodes.
struct Server {
    redlock: Redlock,
    addr: SocketAddr,
    serving: JoinHandle<()>,
}

impl Server {
    async fn start(cluster: &Cluster, bank: &Bank) -> Self {
        Self::start_with(cluster, bank, NODE_TIMEOUT, |layer| layer).await
    }

    /// Starts it and waits until it is connected to all nodes that run.
    async fn start_with(
        cluster: &Cluster,
        bank: &Bank,
        node_timeout: Duration,
        set: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
    ) -> Self {
        let running = cluster.servers.iter().filter(|server| server.is_running());
        let redlock = redlock(cluster.urls(), running.count(), node_timeout).await;
        let layer = IdempotencyLayer::new(redlock.clone(), scope::public());
        Self::serve(redlock, bank.routes().route_layer(set(layer))).await
    }

    async fn serve(redlock: Redlock, app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("127.0.0.1 has a free port");
        let addr = listener.local_addr().expect("a bound listener has one");
        let listener = listener.tap_io(|stream| stream.set_nodelay(true).expect("TCP has it"));
        let serving = tokio::spawn(async move {
            let served = axum::serve(listener, app).await;
            served.expect("axum serves until it is aborted");
        });
        Self {
            redlock,
            addr,
            serving,
        }
    }

    async fn pay(&self, path: &str, key: &str) -> Response {
        pay(self.addr, path, key).await
    }

    /// Sends a duplicate that must be answered with what the first was.
    #[track_caller]
    fn replays(&self, path: &str, key: &str, first: &Response) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        async move {
            let again = self.pay(path, key).await;
            assert!(is_replayed(&again), "{caller}: {}", said(&again));
            assert_eq!(as_recorded(&again), as_recorded(first), "{caller}");
        }
    }

    /// Ends it when nothing is left to be told to the nodes.
    async fn drain(self) {
        let drained = self.redlock.drain(PATIENCE).await;
        assert_eq!(drained.held, [], "all of it has ended");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Makes a client and waits until it is connected to as many nodes as run.
async fn redlock(urls: Vec<String>, running: usize, node_timeout: Duration) -> Redlock {
    let redlock = Redlock::builder()
        .urls(urls)
        .node_timeout(node_timeout)
        .restart_guard(RestartGuard::Off)
        .build()
        .expect("the settings are valid");
    let deadline = Deadline::after(PATIENCE);
    while redlock.health().await.up() < running {
        assert!(!deadline.is_over(), "not all nodes are reached");
        sleep(POLL).await;
    }
    redlock
}

async fn pay(addr: SocketAddr, path: &str, key: &str) -> Response {
    request(addr, "POST", path, &[(KEY, key)], b"amount=5").await
}

/// An answer, for the messages of this test.
fn said(answer: &Response) -> String {
    let text = answer.text().escape_debug().to_string();
    format!("{} {text:.300}", answer.status)
}

fn is_replayed(answer: &Response) -> bool {
    answer.status == 200 && answer.header("idempotency-replayed") == Some("true")
}

/// Whether it was executed for this answer, and recorded.
fn is_executed(answer: &Response) -> bool {
    let marks = ["idempotency-replayed", "idempotency-recorded"];
    answer.status == 200 && marks.iter().all(|mark| answer.header(mark).is_none())
}

fn is_contended(answer: &Response) -> bool {
    answer.status == 409 && answer.json()["code"] == "lock-contended"
}

/// All of an answer that a replay has in common with the first.
fn as_recorded(answer: &Response) -> (u16, Vec<(String, String)>, &[u8]) {
    let own = ["date", "idempotency-replayed"];
    let mut headers = answer.headers.clone();
    headers.retain(|(name, _)| !own.contains(&name.as_str()));
    headers.sort();
    (answer.status, headers, &answer.body)
}

/// Returns the name of the only record of a server, if it has one.
#[track_caller]
fn record(server: &RedisServer) -> Option<String> {
    let mut records = server.keys("*:done");
    assert!(records.len() <= 1, "{records:?}");
    records.pop()
}

/// Waits until all nodes have the record: the last of them is written after the answer.
async fn wait_until_recorded(cluster: &Cluster) {
    wait_until("all nodes have the record", PATIENCE, || {
        let mut servers = cluster.servers.iter();
        servers.all(|server| record(server).is_some())
    })
    .await;
}

fn pttl(server: &RedisServer, key: &str) -> i64 {
    let pttl = server.command(&["PTTL", key]).as_int();
    pttl.expect("it is a number")
}

/// A hundred clients of two servers, which send the same at once.
struct Crowd {
    clients: Vec<Client>,
    /// Rounds of requests that nobody won.
    without_winner: usize,
    refused: usize,
    replayed: usize,
}

impl Crowd {
    async fn connect(servers: &[Server; 2]) -> Self {
        let addr = |client: usize| servers[client % servers.len()].addr;
        let clients = join_all((0..CROWD).map(|client| Client::connect(addr(client)))).await;
        Self {
            clients,
            without_winner: 0,
            refused: 0,
            replayed: 0,
        }
    }

    /// Sends duplicates until one is executed, and returns its answer.
    async fn pay(&mut self, path: &str, key: &str, bank: &Bank) -> Response {
        let before = bank.executed();
        for _ in 0..RETRIES {
            let headers = [(KEY, key)];
            let clients = self.clients.iter_mut();
            let asked = clients.map(|client| client.request("POST", path, &headers, b"amount=5"));
            let answers = join_all(asked).await;
            let executed = bank.executed() - before;
            let (winners, others): (Vec<_>, Vec<_>) = answers.into_iter().partition(is_executed);
            assert_eq!(winners.len(), executed, "{key}");
            assert!(executed <= 1, "{key} was executed {executed} times");
            let (replayed, refused): (Vec<_>, Vec<_>) = others.iter().partition(|o| is_replayed(o));
            for other in &refused {
                assert!(is_contended(other), "{}", said(other));
            }
            self.refused += refused.len();
            self.replayed += replayed.len();
            let Some(winner) = winners.into_iter().next() else {
                assert_eq!(replayed.len(), 0, "there is nothing to replay yet");
                self.without_winner += 1;
                continue;
            };
            for other in replayed {
                assert_eq!(as_recorded(other), as_recorded(&winner), "{key}");
            }
            return winner;
        }
        panic!("nobody won {key} in {RETRIES} rounds");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundred_duplicates_execute_once_and_are_refused_or_replayed() {
    let mut cluster = Cluster::start(3);
    let bank = Bank::default();
    let servers = [
        Server::start(&cluster, &bank).await,
        Server::start(&cluster, &bank).await,
    ];
    let mut crowd = Crowd::connect(&servers).await;
    let rounds = rounds();
    // Some end while others are still asking, some are still executed when all others have asked.
    let paths = ["/payments", "/payments?ms=3", "/payments?ms=30"];
    let mut first = Vec::new();
    for round in 0..rounds {
        let (path, key) = (paths[round % paths.len()], format!("round-{round}"));
        let winner = crowd.pay(path, &key, &bank).await;
        for server in &servers {
            server.replays(path, &key, &winner).await;
        }
        first.push((path, key, winner));
    }
    cluster.wait_until_free(PATIENCE).await;
    println!(
        "{rounds} rounds of {CROWD}: {} refused, {} replayed, {} without a winner",
        crowd.refused, crowd.replayed, crowd.without_winner
    );

    cluster.servers[0].kill();
    let late = Server::start(&cluster, &bank).await;
    for (path, key, winner) in &first {
        for server in [&servers[0], &servers[1], &late] {
            server.replays(path, key, winner).await;
        }
    }
    assert_eq!(bank.executed(), rounds);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_duplicates_all_get_the_recorded_response() {
    let cluster = Cluster::start(3);
    let bank = Bank::default();
    let start = || {
        let patient = |layer: IdempotencyLayer| layer.wait(Duration::from_secs(5));
        Server::start_with(&cluster, &bank, NODE_TIMEOUT, patient)
    };
    let servers = [start().await, start().await];
    let mut crowd = Crowd::connect(&servers).await;
    let rounds = rounds().div_ceil(2);
    for round in 0..rounds {
        let path = ["/payments", "/payments?ms=30"][round % 2];
        crowd.pay(path, &format!("round-{round}"), &bank).await;
    }
    assert_eq!(crowd.refused, 0);
    assert_eq!(crowd.without_winner, 0);
    assert_eq!(crowd.replayed, rounds * (CROWD - 1));
    assert_eq!(bank.executed(), rounds);
    cluster.wait_until_free(PATIENCE).await;
}

#[tokio::test]
async fn record_survives_all_nodes_flushed_in_turn_with_replays_between() {
    let cluster = Cluster::start(3);
    let bank = Bank::default();
    let server = Server::start(&cluster, &bank).await;
    let first = server.pay("/payments", "a").await;
    assert!(is_executed(&first), "{}", said(&first));
    wait_until_recorded(&cluster).await;
    for wiped in [0, 1, 2, 0, 1, 2] {
        cluster.servers[wiped].command(&["FLUSHALL"]);
        server.replays("/payments", "a", &first).await;
        wait_until_recorded(&cluster).await;
    }
    // As far as it goes: two that forget between replays are a majority that knows of nothing. The
    // third would tell, if it was heard in time.
    for wiped in [0, 1] {
        cluster.servers[wiped].command(&["FLUSHALL"]);
    }
    cluster.servers[2].stop();
    let second = server.pay("/payments", "a").await;
    assert!(is_executed(&second), "{}", said(&second));
    assert_eq!(bank.executed(), 2);
    cluster.servers[2].cont();
}

#[tokio::test]
async fn record_at_one_node_is_not_replayed_before_a_majority_has_it() {
    for size in [0, 20_000] {
        let cluster = Cluster::start(3);
        let bank = Bank::default();
        let slow = Proxy::start(cluster.servers[2].addr()).await;
        let mut urls = cluster.urls();
        urls[2] = slow.url();
        let redlock = redlock(urls, 3, NODE_TIMEOUT).await;
        let layer = IdempotencyLayer::new(redlock.clone(), scope::public());
        let server = Server::serve(redlock, bank.routes().route_layer(layer)).await;
        let path = format!("/payments?size={size}");
        let first = server.pay(&path, "a").await;
        wait_until_recorded(&cluster).await;
        // As a server leaves it that dies after one node took its record.
        let record = record(&cluster.servers[0]).unwrap();
        let lock = record.strip_suffix(":done").unwrap();
        for other in &cluster.servers[1..] {
            other.command(&["DEL", &record]);
            other.command(&["SET", lock, "somebody", "PX", "60000"]);
        }
        let refused = server.pay(&path, "a").await;
        assert!(is_contended(&refused), "{}", said(&refused));
        // By hand, what the ttl would do.
        for other in &cluster.servers[1..] {
            assert!(!other.exists(&record));
            other.command(&["DEL", lock]);
        }
        // Were the two others a majority before the first is heard, it would be executed again: what a
        // minority has is not decided.
        slow.delay(Duration::from_millis(50));
        server.replays(&path, "a", &first).await;
        wait_until_recorded(&cluster).await;
        let copies = cluster.servers.iter();
        let mut copies: Vec<_> = copies.map(|node| node.command(&["GET", &record])).collect();
        copies.dedup();
        assert_eq!(copies.len(), 1, "{copies:?}");
        assert_eq!(bank.executed(), 1);
        cluster.wait_until_free(PATIENCE).await;
    }
}

#[tokio::test]
async fn repaired_copies_of_a_record_expire_with_the_record() {
    let cluster = Cluster::start(3);
    let bank = Bank::default();
    let retention = |time| move |layer: IdempotencyLayer| layer.retention(time);
    let hour = retention(Duration::from_secs(3600));
    let server = Server::start_with(&cluster, &bank, NODE_TIMEOUT, hour).await;
    let first = server.pay("/payments", "a").await;
    wait_until_recorded(&cluster).await;
    let record = record(&cluster.servers[0]).unwrap();
    for node in &cluster.servers {
        let left = pttl(node, &record);
        assert!((3_500_000..=3_600_000).contains(&left), "{left} ms");
        // By hand, what an hour would do.
        node.command(&["PEXPIRE", &record, "60000"]);
    }
    cluster.servers[0].command(&["FLUSHALL"]);
    server.replays("/payments", "a", &first).await;
    wait_until_recorded(&cluster).await;
    let left = pttl(&cluster.servers[0], &record);
    assert!((30_000..=60_000).contains(&left), "{left} ms");

    let soon = retention(Duration::from_millis(500));
    let forgetful = Server::start_with(&cluster, &bank, NODE_TIMEOUT, soon).await;
    for node in &cluster.servers {
        node.command(&["DEL", &record]);
    }
    assert!(is_executed(&forgetful.pay("/payments", "a").await));
    let gone = || cluster.servers.iter().all(|node| !node.exists(&record));
    wait_until("the records are gone", PATIENCE, gone).await;
    assert!(is_executed(&forgetful.pay("/payments", "a").await));
    assert_eq!(bank.executed(), 3);
}

#[tokio::test]
async fn execution_costs_the_commands_of_a_lock_and_a_replay_half() {
    let cluster = Cluster::start(3);
    let logs: Vec<_> = cluster.servers.iter().map(MonitorLog::start).collect();
    let bank = Bank::default();

    let alone = redlock(cluster.urls(), 3, NODE_TIMEOUT).await;
    let layer = RedlockLayer::new(alone.clone(), key::header("idempotency-key"));
    let alone = Server::serve(alone, bank.routes().route_layer(layer)).await;
    let told = told_while(&logs, alone, "/payments", "lock").await;
    for told in told {
        assert_eq!(told.scripts.len(), 2, "ACQUIRE and RELEASE");
        assert_eq!(told.others, [""; 0]);
    }
    // The last is just within 16 KiB: 65 bytes of head, and what is not the body.
    for (path, key) in [("/payments", "a"), ("/payments?size=15900", "b")] {
        let first = Server::start(&cluster, &bank).await;
        let first = told_while(&logs, first, path, key).await;
        let replay = Server::start(&cluster, &bank).await;
        let replay = told_while(&logs, replay, path, key).await;
        for ((first, replay), node) in first.iter().zip(&replay).zip(&cluster.servers) {
            assert_eq!(first.scripts.len(), 2, "ACQUIRE and RECORD");
            assert_ne!(first.scripts[0], first.scripts[1]);
            assert_eq!(replay.scripts, first.scripts[..1], "ACQUIRE");
            assert!(first.others.is_empty() && replay.others.is_empty());
            assert!(first.wrote);
            assert!(!replay.wrote, "a replay writes nothing");
            let size = node.keys("*:done").into_iter();
            let size = size.map(|record| node.command(&["STRLEN", &record]).as_int());
            println!("{path}: {:?} bytes", size.max().flatten());
        }
    }
    // Too big to come with every answer: the rest is fetched by itself.
    let path = "/payments?size=20000";
    let first = Server::start(&cluster, &bank).await;
    told_while(&logs, first, path, "c").await;
    let replay = Server::start(&cluster, &bank).await;
    let mut fetched = 0;
    for replay in told_while(&logs, replay, path, "c").await {
        assert_eq!(replay.scripts.len(), 1, "ACQUIRE");
        assert!(!replay.wrote);
        fetched += replay.others.iter().filter(|verb| *verb == "get").count();
    }
    assert_eq!(fetched, 1, "from one node");
    assert_eq!(bank.executed(), 4);
}

/// What a node was told by a server.
struct Told {
    /// The hashes, in order.
    scripts: Vec<String>,
    /// The commands that are no scripts.
    others: Vec<String>,
    /// Whether a script wrote.
    wrote: bool,
}

/// Pays, ends the server, and returns what each node was told from the request to the end.
async fn told_while(logs: &[MonitorLog], server: Server, path: &str, key: &str) -> Vec<Told> {
    let before: Vec<_> = logs.iter().map(|log| log.lines().len()).collect();
    let answer = server.pay(path, key).await;
    assert_eq!(answer.status, 200, "{}", said(&answer));
    server.drain().await;
    let logs = logs.iter().zip(before);
    logs.map(|(log, before)| told(&log.lines()[before..]))
        .collect()
}

fn told(lines: &[String]) -> Told {
    let (mut scripts, mut others, mut wrote) = (Vec::new(), Vec::new(), false);
    for line in lines {
        let (who, command) = line.split_once("] \"").expect("it is a line of MONITOR");
        let mut words = command.split('"').step_by(2);
        let verb = words.next().unwrap_or_default().to_ascii_lowercase();
        if who.ends_with("lua") {
            wrote |= ["set", "del", "pexpire"].contains(&verb.as_str());
        } else if verb == "evalsha" {
            scripts.extend(words.next().map(str::to_owned));
        } else {
            others.push(verb);
        }
    }
    Told {
        scripts,
        others,
        wrote,
    }
}

/// The wires swallow what is sent, or its answers, and then the connections break.
#[tokio::test]
async fn response_is_recorded_although_connections_break_while_recording() {
    for (lost, arrives) in [(3, false), (2, false), (3, true)] {
        let cluster = Cluster::start(3);
        let mut wires = Vec::new();
        for server in &cluster.servers {
            wires.push(Proxy::start(server.addr()).await);
        }
        let urls = wires.iter().map(Proxy::url).collect();
        let redlock = redlock(urls, 3, Duration::from_secs(2)).await;
        let layer = IdempotencyLayer::new(redlock.clone(), scope::public());
        let bank = Bank::default();
        let server = Server::serve(redlock, bank.routes().route_layer(layer)).await;
        let paying = pay(server.addr, "/payments?ms=300", "a");
        let breaking = async {
            let deadline = Deadline::after(PATIENCE);
            while bank.executed() == 0 {
                assert!(!deadline.is_over(), "it is not executed");
                sleep(POLL).await;
            }
            for wire in &wires[..lost] {
                match arrives {
                    true => wire.delay(PATIENCE),
                    false => wire.black_hole(),
                }
            }
            // It is sent 300 ms after the execution began, and given up two seconds later.
            sleep(Duration::from_millis(1_000)).await;
            wires.iter().for_each(Proxy::cut);
            wires.iter().for_each(Proxy::pass);
        };
        let (first, ()) = tokio::join!(paying, breaking);
        let what = format!("{lost} lost, arrives: {arrives}: {}", said(&first));
        assert!(is_executed(&first), "{what}");
        let again = pay(server.addr, "/payments?ms=300", "a").await;
        assert!(is_replayed(&again), "{what}, then {}", said(&again));
        assert_eq!(bank.executed(), 1);
        cluster.wait_until_free(PATIENCE).await;
    }
}

#[tokio::test]
async fn hung_node_delays_neither_executions_nor_replays() {
    const NODE_TIMEOUT: Duration = Duration::from_secs(2);
    let cluster = Cluster::start(3);
    let bank = Bank::default();
    let server = Server::start_with(&cluster, &bank, NODE_TIMEOUT, |layer| layer).await;
    let before = server.pay("/payments", "before").await;
    for hung in 0..3 {
        cluster.servers[hung].stop();
        let began = Instant::now();
        let key = format!("while-{hung}");
        let during = server.pay("/payments", &key).await;
        assert!(is_executed(&during), "{}", said(&during));
        for _ in 0..5 {
            server.replays("/payments", &key, &during).await;
            server.replays("/payments", "before", &before).await;
        }
        let took = began.elapsed();
        assert!(took < NODE_TIMEOUT, "1 execution and 10 replays: {took:?}");
        println!("node {hung} hung: 1 execution and 10 replays in {took:?}");
        cluster.servers[hung].cont();
        let deadline = Deadline::after(PATIENCE);
        while server.redlock.health().await.up() < 3 {
            assert!(!deadline.is_over(), "it is not reached again");
            sleep(POLL).await;
        }
    }
    assert_eq!(bank.executed(), 4);
}

/// A server that can be killed.
fn quickstart(cluster: &Cluster) -> (ChildProcess, SocketAddr) {
    let listen = format!("127.0.0.1:{}", free_port());
    let urls = cluster.urls().join(",");
    let envs = [
        ("LISTEN", listen.as_str()),
        ("REDLOCK_URLS", urls.as_str()),
        ("REDLOCK_RESTART_GUARD", "off"),
    ];
    let server = ChildProcess::start(example_path("quickstart"), &[], &envs);
    server.wait_for_line("istening on http://", PATIENCE);
    (server, listen.parse().expect("it is an address"))
}

/// Pays at a quickstart, again if the nodes were late: its node timeout is short.
async fn pay_there(addr: SocketAddr, key: &str, amount: u32) -> Response {
    let headers = [(KEY, key), ("content-type", "application/json")];
    let body = format!("{{\"account\":\"dave\",\"amount\":{amount}}}");
    let deadline = Deadline::after(PATIENCE);
    loop {
        let answer = request(addr, "POST", HELD, &headers, body.as_bytes()).await;
        if answer.status != 503 || deadline.is_over() {
            return answer;
        }
        sleep(POLL).await;
    }
}

#[tokio::test]
async fn key_of_a_killed_server_is_locked_until_its_ttl_and_then_executed() {
    let cluster = Cluster::start(3);
    let (mut killed, addr) = quickstart(&cluster);
    let (_other, other) = quickstart(&cluster);
    let dying = tokio::spawn(async move {
        let mut client = Client::connect(addr).await;
        let headers = [(KEY, "a"), ("content-type", "application/json")];
        let body = b"{\"account\":\"dave\",\"amount\":5}";
        client.try_request("POST", HELD, &headers, body).await
    });
    wait_until("it is executed", PATIENCE, || {
        cluster.lock_keys().len() == 3
    })
    .await;
    killed.signal(Signal::SIGKILL);
    killed.wait(PATIENCE);
    assert!(dying.await.unwrap().is_err(), "it died over it");

    let refused = pay_there(other, "a", 5).await;
    assert!(is_contended(&refused), "{}", said(&refused));
    assert!(refused.header("retry-after").is_some());
    let reused = pay_there(other, "a", 6).await;
    assert_eq!(reused.status, 422, "{}", said(&reused));
    // By hand, what the ttl does some seconds later.
    for node in &cluster.servers {
        for lock in cluster.lock_keys() {
            let left = pttl(node, &lock);
            assert!((-2..=10_000).contains(&left) && left != -1, "{left} ms");
            node.command(&["DEL", &lock]);
        }
    }
    let executed = pay_there(other, "a", 5).await;
    assert!(is_executed(&executed), "{}", said(&executed));
    let again = pay_there(other, "a", 5).await;
    assert!(is_replayed(&again), "{}", said(&again));
    assert_eq!(as_recorded(&again), as_recorded(&executed));
}

#[tokio::test]
async fn record_of_a_killed_server_is_replayed_by_another_server() {
    let cluster = Cluster::start(3);
    let (mut killed, addr) = quickstart(&cluster);
    let (_other, other) = quickstart(&cluster);
    let mut keys = (0..RETRIES).map(|key| key.to_string());
    let (key, first) = loop {
        let key = keys.next().expect("the nodes are in time once");
        let first = pay_there(addr, &key, 5).await;
        // Executed and recorded; a majority may have been late for either.
        if is_executed(&first) {
            break (key, first);
        }
    };
    killed.signal(Signal::SIGKILL);
    killed.wait(PATIENCE);
    let again = pay_there(other, &key, 5).await;
    assert!(is_replayed(&again), "{}", said(&again));
    assert_eq!(as_recorded(&again), as_recorded(&first));
}

/// `DUPLICATES_ROUNDS` asks for more.
fn rounds() -> usize {
    let rounds = std::env::var("DUPLICATES_ROUNDS").ok();
    rounds.map_or(12, |rounds| rounds.parse().expect("it is a number"))
}

/// A busy machine is no outage.
const NODE_TIMEOUT: Duration = Duration::from_millis(300);

/// How long anything may take that must happen.
const PATIENCE: Duration = Duration::from_secs(10);

const POLL: Duration = Duration::from_millis(5);

const CROWD: usize = 100;

/// How often a crowd of which nobody won comes back.
const RETRIES: usize = 20;

const KEY: &str = "idempotency-key";

/// Long enough to be killed meanwhile.
const HELD: &str = "/payments?hold_ms=1000";
