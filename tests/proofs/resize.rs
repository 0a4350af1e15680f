//! One, two and three groups of real servers, one after the other, while clients contend for keys.
//!
//! Three lock services, each like a process of its own, change as `RedlockBuilder::moving_to` says: one after the other
//! to a layout that moves, and when the last service without it has ended and its locks certainly have, one after the
//! other to the new groups. The clients are those of the chaos test, and so is the history, which checks what they hold
//! and write. Without the step that locks keys in both groups, it finds two holders.
//!
//! For longer phases:
//!
//! ```sh
//! RESIZE_SECONDS=20 cargo test -p tests --test proofs resize
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use support::{Cluster, Random, ms, secs};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tower_redlock::{NodeGroup, Redlock, RedlockBuilder, RestartGuard};

use crate::chaos::clients::Client;
use crate::chaos::faults::{NOISE, TTL, say, setting};
use crate::chaos::history::{History, unpoisoned};

const SERVICES: u64 = 3;
const CLIENTS: u64 = 4;

/// By these names, of the four keys one moves twice, two move once, and one stays.
const NAMES: [&str; 3] = ["north", "south", "west"];

/// The numbers of groups, one after the other.
const SIZES: [usize; 4] = [1, 2, 3, 2];

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn groups_change_under_load_with_one_holder_and_rising_tokens() {
    let history = resize(true).await;
    say(&history.to_string());
    if let Some(first) = history.violations.first() {
        let count = history.violations.len();
        panic!("violated: {first} ({count} violations)");
    }
    assert!(history.records.len() > 100, "too tame");
    assert!(history.counted("refused", "contended") > 0, "too tame");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn groups_that_change_without_the_step_in_both_have_two_holders() {
    let history = resize(false).await;
    let count = history.violations.len();
    say(&format!(
        "resize: without the step in both groups: {count} violations"
    ));
    // The first of the checks at each grant, the second of the checker that is not ours.
    for expected in ["two are valid at once", "is not linearizable"] {
        let mut found = history.violations.iter();
        assert!(
            found.any(|violation| violation.contains(expected)),
            "none says {expected:?}"
        );
    }
}

/// A lock service with its clients.
struct Service {
    redlock: Redlock,
    is_over: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

/// Changes the groups under load, with the step that locks keys in both or without.
async fn resize(in_both: bool) -> History {
    let clusters: Vec<Cluster> = NAMES.iter().map(|_| Cluster::start(3)).collect();
    let groups: Vec<NodeGroup> = clusters.iter().zip(NAMES).map(group).collect();
    let history: Arc<Mutex<History>> = Arc::default();
    let phase = secs(setting("RESIZE_SECONDS").unwrap_or(1));
    let mut services: Vec<Service> = Vec::new();
    for number in 0..SERVICES {
        services.push(Service::start(of(&groups[..1]), number, &history));
    }
    for sizes in SIZES.windows(2) {
        let (old, new) = (&groups[..sizes[0]], &groups[..sizes[1]]);
        let moving = of(old).moving_to(new.iter().cloned());
        let steps = if in_both {
            vec![moving, of(new)]
        } else {
            vec![of(new)]
        };
        for builder in steps {
            for (number, service) in (0..SERVICES).zip(&mut services) {
                sleep(phase).await;
                service.end().await;
                *service = Service::start(builder.clone(), number, &history);
            }
            if in_both {
                // Locks that were not released in order end by their ttl.
                sleep(TTL).await;
            }
        }
    }
    for service in &mut services {
        service.end().await;
    }
    for cluster in &clusters {
        cluster.wait_until_free(TTL + NOISE).await;
    }
    let mut history = std::mem::take(&mut *unpoisoned(&history));
    history.check(if in_both {
        "resize.jsonl"
    } else {
        "resize_in_one_step.jsonl"
    });
    history
}

fn group((cluster, name): (&Cluster, &str)) -> NodeGroup {
    NodeGroup::new().name(name).urls(cluster.urls())
}

fn of(groups: &[NodeGroup]) -> RedlockBuilder {
    let builder = Redlock::builder()
        .ttl(TTL)
        // Shorter than the shortest ttl of the clients.
        .node_timeout(ms(300))
        .restart_guard(RestartGuard::Off);
    groups
        .iter()
        .cloned()
        .fold(builder, RedlockBuilder::node_group)
}

impl Service {
    fn start(builder: RedlockBuilder, number: u64, history: &Arc<Mutex<History>>) -> Self {
        let redlock = builder.build().expect("the settings are valid");
        let is_over = Arc::new(AtomicBool::new(false));
        let clients = (0..CLIENTS).map(|client| {
            let client = Client {
                history: Arc::clone(history),
                is_over: Arc::clone(&is_over),
                redlock: redlock.clone(),
                random: Random(number * CLIENTS + client),
                reads: false,
            };
            tokio::spawn(client.run())
        });
        Self {
            clients: clients.collect(),
            redlock,
            is_over,
        }
    }

    async fn end(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let drained = self.redlock.drain(secs(10)).await;
        // A release that a busy machine delays is no fault: the locks end by their ttl.
        assert!(drained.held.is_empty(), "{drained:?}");
        for client in self.clients.drain(..) {
            client
                .await
                .expect("no client meets an error that is not its lot");
        }
    }
}
