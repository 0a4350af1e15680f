//! Nodes that restart, are flushed or were replicas, with the restart guard and without.

use support::{Cluster, Deadline, Proxy, ms, secs};

use crate::kleppmann::client::{Client, Setup};
#[cfg(target_os = "linux")]
use crate::kleppmann::clock::{Clock, SKEW};
use crate::kleppmann::scene::{
    B, C, LONG_TTL, ON_TIME, PATIENCE, TOO_LATE, assert_lost_update, become_a_replica_and_a_master,
    clock_of, guarded, unguarded, wait_for_the_end_of_a_second, write_beside_each_other,
};
use crate::kleppmann::storage::Storage;

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
        let (wire, urls) = cluster.behind_proxy(C).await;
        wire.black_hole();
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

/// Checks that the restart guard refuses the lock that B forgot until its holder releases it.
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
        "{fault:?}: held for {} ms more, granted again {} ms after that",
        promised.saturating_sub(forgotten) / 1_000,
        second.at.saturating_sub(promised) / 1_000,
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
    write_beside_each_other(&scene.one, &scene.two);
    assert_lost_update(&scene.storage, first, second);
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
