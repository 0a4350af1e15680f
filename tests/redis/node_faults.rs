//! Requests while nodes are killed, hung or black-holed.
//!
//! Faults of a minority do not affect requests, faults of a majority cause 503 and nothing else, and neither
//! effect outlasts the fault.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::middleware::map_response;
use axum::routing::post;
use support::http::{Client, serve};
use support::{Answer, Cluster, Proxy, RedisServer, alone, ms, secs, until_all_up};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower_redlock::{Redlock, RedlockLayer, Rejection, key};

use crate::beside::Beside;
use crate::patient::builder;

/// The node timeouts to try, the next only if the machine stood still: then healthy nodes are late,
/// too, and a lock that is not given is right.
const NODE_TIMEOUTS: [Duration; 4] = [ms(50), ms(100), ms(200), ms(400)];

/// What a busy machine may add to any answer. Less would test the machine.
const NOISE: Duration = ms(100);

/// How many requests tell what is normal, and how many meet a fault one right after the other.
const REQUESTS: usize = 100;

/// The pause between those that only show that a fault stays without effect for as long as it lasts.
const PAUSE: Duration = ms(2);

/// How long requests go on after a fault: the lanes try and fail to connect several times.
const FAULT: Duration = ms(1500);

const WHY: &str = "x-why";

/// Longer than any test; the ttl must free nothing here.
const TTL: Duration = secs(60);

#[derive(Debug, Clone, Copy)]
enum Fault {
    Killed,
    Hung,
    BlackHoled,
}

/// A service whose requests lock an account, and the nodes that it asks.
struct Service {
    fault: Fault,
    redlock: Redlock,
    addr: SocketAddr,
    serving: JoinHandle<()>,
    proxies: Vec<Proxy>,
    cluster: Cluster,
}

impl Service {
    /// Starts it and waits until it is connected to all nodes.
    async fn start(case: Case) -> Self {
        let cluster = Cluster::start(case.nodes);
        let mut proxies = Vec::new();
        let urls = match case.fault {
            Fault::Killed | Fault::Hung => cluster.urls(),
            Fault::BlackHoled => {
                proxies = cluster.proxies().await;
                proxies.iter().map(Proxy::url).collect()
            }
        };
        let redlock = builder(urls).ttl(TTL).node_timeout(case.node_timeout);
        let redlock = redlock.build().unwrap();
        let layer = RedlockLayer::new(redlock.clone(), ("account", key::path("id")));
        let app = Router::new()
            .route("/accounts/{id}/withdraw", post(async || "withdrawn"))
            .route_layer(layer)
            .layer(map_response(tell_why));
        let (addr, serving, _) = serve(app).await;
        let service = Self {
            fault: case.fault,
            redlock,
            addr,
            serving,
            proxies,
            cluster,
        };
        until_all_up(&service.redlock, secs(10)).await;
        service
    }

    /// Breaks the first `count` nodes.
    fn break_nodes(&mut self, count: usize) {
        for (index, server) in self.cluster.servers.iter_mut().take(count).enumerate() {
            match self.fault {
                Fault::Killed => server.kill(),
                Fault::Hung => server.stop(),
                Fault::BlackHoled => self.proxies[index].black_hole(),
            }
        }
    }

    /// Mends the first `count` nodes, which answer when this returns.
    fn mend_nodes(&mut self, count: usize) {
        for (index, server) in self.cluster.servers.iter_mut().take(count).enumerate() {
            match self.fault {
                Fault::Killed => server.restart(),
                Fault::Hung => server.cont(),
                Fault::BlackHoled => self.proxies[index].pass(),
            }
        }
    }

    /// Checks that each working node got at most two commands for a request, `ACQUIRE` and `RELEASE`,
    /// and that a majority got them.
    fn assert_two_commands_a_request(&self, broken: usize, requests: usize) {
        let nodes = self.cluster.servers.len();
        let requests = u64::try_from(requests).expect("a few");
        let commands = |server: &RedisServer| {
            let counts = server.call_counts();
            let count = |name| counts.get(name).copied().unwrap_or(0);
            count("evalsha") + count("eval")
        };
        let asked = &self.cluster.servers[broken..];
        let commands: Vec<u64> = asked.iter().map(commands).collect();
        let asked_twice = commands.iter().all(|count| *count <= 2 * requests);
        assert!(asked_twice, "{requests} requests: {commands:?}");
        // The broken ones voted until they broke.
        let votes = u64::try_from(nodes / 2 + 1 - broken).expect("a few");
        let all: u64 = commands.iter().sum();
        let by_majority = all >= 2 * votes * requests;
        assert!(by_majority, "{requests} requests: {commands:?}");
    }

    /// Sends requests, each after the answer to the one before, at least [`REQUESTS`] and for `least`.
    async fn withdraw_for(addr: SocketAddr, least: Duration) -> Latencies {
        let mut client = Client::connect(addr).await;
        let began = Instant::now();
        let mut latencies = Vec::new();
        while latencies.len() < REQUESTS || began.elapsed() < least {
            let (response, took) = withdraw(&mut client).await;
            let (number, after) = (latencies.len(), began.elapsed());
            let what = format!("request {number}, after {after:?}");
            assert_eq!(response.status, 200, "{what}: {:?}", response.header(WHY));
            latencies.push(took);
            if latencies.len() > REQUESTS {
                sleep(PAUSE).await;
            }
        }
        latencies.sort_unstable();
        Latencies(latencies)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Puts into a header why the nodes did not vote, for the messages of this test.
async fn tell_why(mut response: axum::response::Response) -> axum::response::Response {
    if let Some(Rejection::Failed(error)) = response.extensions().get() {
        let why = error.to_string().try_into().expect("errors are plain text");
        response.headers_mut().insert(WHY, why);
    }
    response
}

/// Sends one request and returns the answer and how long it took to its last byte.
async fn withdraw(client: &mut Client) -> (Answer, Duration) {
    let sent = Instant::now();
    let response = client
        .request("POST", "/accounts/7/withdraw", &[], b"")
        .await;
    (response, sent.elapsed())
}

/// Of successful requests, the fastest first.
struct Latencies(Vec<Duration>);

impl Latencies {
    fn percentile(&self, percent: usize) -> Duration {
        self.0[(self.0.len() * percent / 100).min(self.0.len() - 1)]
    }

    fn max(&self) -> Duration {
        self.percentile(100)
    }
}

/// What breaks, and how.
#[derive(Debug, Clone, Copy)]
struct Case {
    nodes: usize,
    broken: usize,
    fault: Fault,
    node_timeout: Duration,
}

impl Case {
    fn label(self) -> String {
        format!("{} of {} nodes {:?}", self.broken, self.nodes, self.fault)
    }
}

/// Runs a check, and again with a longer node timeout if it failed while the machine stood still.
async fn check<F>(nodes: usize, broken: usize, fault: Fault, holds: impl Fn(Case) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let _alone = alone().await;
    for node_timeout in NODE_TIMEOUTS {
        // Measures how long the machine stalls, by a server that no other test asks.
        let server = RedisServer::start();
        let mut began = Instant::now();
        let stalls = Beside::start(server.addr(), secs(60), move |connection, longest| {
            connection.call(&["PING"]).expect("the server runs");
            *longest = began.elapsed().max(*longest);
            began = Instant::now();
        });
        let case = Case {
            nodes,
            broken,
            fault,
            node_timeout,
        };
        let checked = tokio::spawn(holds(case)).await;
        let pause: Duration = stalls.finish();
        match checked {
            Ok(()) => return,
            Err(failed) if pause < node_timeout / 2 => panic!("{case:?}: {failed}"),
            Err(_) => println!("warning: {case:?} is void: the machine stood still for {pause:?}"),
        }
    }
    panic!("{broken} of {nodes} nodes {fault:?}: the machine is too slow for every node timeout");
}

/// Checks that requests go on as if nothing had happened while `broken` of `nodes` nodes break.
async fn minority_is_not_noticed(case: Case) {
    let (broken, node_timeout) = (case.broken, case.node_timeout);
    let mut service = Service::start(case).await;
    // The first ones of a process are slower.
    Service::withdraw_for(service.addr, Duration::ZERO).await;
    let healthy = Service::withdraw_for(service.addr, Duration::ZERO).await;
    // What is counted below begins with these requests.
    service.cluster.wait_until_free(secs(1)).await;
    service.cluster.command(&["CONFIG", "RESETSTAT"]);
    let requests = tokio::spawn(Service::withdraw_for(service.addr, FAULT));
    // In the middle of requests, not between them.
    sleep(ms(20)).await;
    service.break_nodes(broken);
    let faulty = requests.await.expect("every request succeeds");
    service.assert_two_commands_a_request(broken, faulty.0.len());

    let (median, p99, max) = (healthy.percentile(50), faulty.percentile(99), faulty.max());
    let label = case.label();
    println!(
        "{label}: healthy median {median:?} p99 {:?} max {:?}; faulty median {:?} p99 {p99:?} max {max:?} ({} requests)",
        healthy.percentile(99),
        healthy.max(),
        faulty.percentile(50),
        faulty.0.len(),
    );
    // A request that waits for a broken node takes a node timeout. One may have waited for an answer
    // when the node broke; the others are decided by the nodes that work.
    let waited = faulty.0.iter().filter(|took| **took >= node_timeout);
    let (waited, all) = (waited.count(), faulty.0.len());
    assert!(
        waited * 100 <= all,
        "{label}: {waited} of {all} requests waited for a broken node"
    );
    let limit = 3 * median + ms(5) + node_timeout;
    assert!(max <= limit + NOISE, "{label}: {max:?} > {limit:?}");

    service.mend_nodes(broken);
    until_all_up(&service.redlock, secs(10)).await;
    Service::withdraw_for(service.addr, Duration::ZERO).await;
    service.cluster.wait_until_free(secs(1)).await;
}

/// Checks that requests get 503 in time while `broken` of `nodes` nodes are broken, and 200 soon
/// after they are mended.
async fn majority_is_a_503_until_it_is_back(case: Case) {
    let (broken, node_timeout) = (case.broken, case.node_timeout);
    let mut service = Service::start(case).await;
    let label = case.label();
    Service::withdraw_for(service.addr, Duration::ZERO).await;
    let mut client = Client::connect(service.addr).await;

    service.break_nodes(broken);
    let (began, mut slowest, mut refused) = (Instant::now(), Duration::ZERO, 0);
    // Connections are found silent, given up, and opened again in vain.
    while began.elapsed() < FAULT {
        let (response, took) = withdraw(&mut client).await;
        assert_unavailable(&response);
        let limit = 2 * node_timeout + NOISE;
        assert!(took <= limit, "{label}: 503 after {took:?}");
        (slowest, refused) = (slowest.max(took), refused + 1);
        sleep(ms(10)).await;
    }

    service.mend_nodes(broken);
    let mended = Instant::now();
    let recovered = loop {
        let (response, _) = withdraw(&mut client).await;
        if response.status == 200 {
            break mended.elapsed();
        }
        assert_unavailable(&response);
        let why = response.header(WHY);
        assert!(mended.elapsed() <= secs(2), "{label}: still {why:?}");
        sleep(ms(20)).await;
    };
    println!("{label}: {refused} x 503, slowest {slowest:?}; recovered after {recovered:?}");
    assert!(refused > 1, "{label}: too tame");
    assert!(recovered <= secs(2), "{recovered:?}");
    // Once recovered, for good.
    Service::withdraw_for(service.addr, Duration::ZERO).await;
    service.cluster.wait_until_free(secs(1)).await;
}

#[track_caller]
fn assert_unavailable(response: &Answer) {
    let text = response.text();
    assert_eq!(response.status, 503, "{text}");
    let content_type = response.header("content-type");
    assert_eq!(content_type, Some("application/problem+json"));
    assert_eq!(response.json()["code"], "lock-unavailable", "{text}");
    let retry_after: u64 = response.header("retry-after").unwrap().parse().unwrap();
    assert!(retry_after >= 1, "{retry_after}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_a_minority_do_not_affect_requests() {
    check(3, 1, Fault::Killed, minority_is_not_noticed).await;
    check(5, 2, Fault::Hung, minority_is_not_noticed).await;
    check(3, 1, Fault::BlackHoled, minority_is_not_noticed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_a_majority_are_503_until_it_recovers() {
    check(3, 2, Fault::Killed, majority_is_a_503_until_it_is_back).await;
    check(5, 3, Fault::Hung, majority_is_a_503_until_it_is_back).await;
    check(3, 2, Fault::BlackHoled, majority_is_a_503_until_it_is_back).await;
}
