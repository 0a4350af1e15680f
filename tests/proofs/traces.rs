//! The lives of ten thousand locks on real servers, as the traces of their leases have them.

use std::time::Duration;

use support::{Cluster, Random, ms, secs};
use tokio::time::timeout;
use tower_redlock::test_util::Traces;
use tower_redlock::{LockError, Redlock, RestartGuard};

use crate::chaos::faults::say;

/// One after the other, because each remembers the lives of its last 1,000 leases.
const SERVICES: u64 = 15;
const CLIENTS: u64 = 8;
/// How often each client asks for a lock.
const REQUESTS: u64 = 110;
const KEYS: usize = 40;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lives_of_ten_thousand_locks_on_servers_have_only_steps_of_the_models() {
    let cluster = Cluster::start(3);
    let (mut locks, mut leases, mut unlike) = (0, 0, Vec::new());
    for service in 0..SERVICES {
        let traces = Traces::default();
        let redlock = Redlock::builder()
            .urls(cluster.urls())
            .restart_guard(RestartGuard::Off)
            .node_timeout(secs(5))
            .traces(&traces)
            .build()
            .unwrap();
        let clients = (0..CLIENTS)
            .map(|client| tokio::spawn(work(redlock.clone(), Random(service * CLIENTS + client))));
        for client in clients.collect::<Vec<_>>() {
            client.await.unwrap();
        }
        let drained = redlock.drain(secs(10)).await;
        assert!(drained.held.is_empty(), "{drained:?}");
        for (_, trace) in traces.all() {
            leases += 1;
            let (found, is_granted) = histories::not_of_the_model(&trace);
            locks += usize::from(is_granted);
            unlike.extend(found);
        }
    }
    say(&format!(
        "traces: {locks} locks among {leases} leases, {} unlike the models",
        unlike.len()
    ));
    assert_eq!(unlike.first(), None);
    assert!(locks >= 10_000, "{locks}");
}

/// Asks for locks of one or two keys, some of them shared; extends some, and leaves some while it waits for them.
async fn work(redlock: Redlock, mut random: Random) {
    for _ in 0..REQUESTS {
        let first = random.index(KEYS);
        let keys = [first, first + random.index(2)];
        let mut request = redlock.lock_all(keys).wait(secs(20));
        if random.is_one_in(4) {
            request = request.shared();
        }
        let is_in_a_hurry = random.is_one_in(10);
        let patience = random.up_to(ms(2));
        let patience = if is_in_a_hurry { patience } else { secs(30) };
        let Ok(locked) = timeout(patience, request).await else {
            continue;
        };
        let guard = match locked {
            Ok(guard) => guard,
            Err(LockError::Contended { .. }) => continue,
            Err(error) => panic!("{error}"),
        };
        if random.is_one_in(5) {
            guard.extend(Duration::from_secs(7)).await.unwrap();
        }
        if random.is_one_in(2) {
            guard.release().await.unwrap();
        }
    }
}
