//! A server that is killed at each step of a payment.

use std::time::Duration;

use support::http::Client;
use support::{Answer, Cluster, Proxy, ms, secs, wait_until};
use tokio::task::JoinHandle;

use crate::crashes::server::{Effects, Setup, Survivor, Told, Victim};
use crate::crashes::{KEY, PATIENCE};

/// Three nodes, a server that is to be killed, and another.
struct Scene {
    cluster: Cluster,
    /// From the server that is to be killed to all but the first node.
    wires: [Proxy; 2],
    /// From the other server to the last node.
    slow: Proxy,
    effects: Effects,
    victim: Victim,
    other: Survivor,
    dying: JoinHandle<hyper::Result<Answer>>,
}

impl Scene {
    /// Begins a payment, which stops at `stop`.
    async fn stopped_at(stop: &'static str, at_most_once: bool) -> Self {
        let (cluster, effects) = (Cluster::start(3), Effects::new());
        let wires = [
            Proxy::start(cluster.servers[1].addr()).await,
            Proxy::start(cluster.servers[2].addr()).await,
        ];
        let slow = Proxy::start(cluster.servers[2].addr()).await;
        let mut setup = Setup::new(&cluster, &effects, at_most_once, TTL);
        setup.urls[2] = slow.url();
        let other = Survivor::start(&setup).await;
        setup.urls[1] = wires[0].url();
        setup.urls[2] = wires[1].url();
        let victim = Victim::start(&setup);
        let addr = victim.addr;
        let dying = tokio::spawn(async move {
            let mut client = Client::connect(addr).await;
            let path = format!("/payments?stop={stop}");
            client.try_request("POST", &path, &[(KEY, "a")], b"").await
        });
        victim.wait_until_at(stop);
        let all = || cluster.lock_keys().len() == 3;
        wait_until("all nodes have the lock", PATIENCE, all).await;
        Self {
            cluster,
            wires,
            slow,
            effects,
            victim,
            other,
            dying,
        }
    }

    fn executed(&self) -> usize {
        self.effects.lines().len()
    }

    /// Returns which nodes have the record.
    fn recorded(&self) -> [bool; 3] {
        [0, 1, 2].map(|node: usize| !self.cluster.servers[node].keys("*:done").is_empty())
    }

    fn kill_unanswered(&mut self) {
        assert!(!self.dying.is_finished(), "it is not answered yet");
        self.victim.kill();
    }

    /// Sends a duplicate to the other server.
    async fn pay(&self) -> Told {
        self.other.pay_in_time("a").await
    }

    /// Checks that no other server may execute while the lock of the killed server lives, and ends that by
    /// hand, as its ttl would.
    async fn outlive_the_lock(&self) {
        assert_eq!(self.pay().await, Told::Contended);
        for node in &self.cluster.servers {
            for lock in self.cluster.lock_keys() {
                let left = node.command(&["PTTL", &lock]).as_int();
                let ttl = i64::try_from(TTL.as_millis()).expect("it is short");
                let in_time = left.is_some_and(|left| left <= ttl && left != -1);
                assert!(in_time, "{left:?}");
                node.command(&["DEL", &lock]);
            }
        }
    }

    /// Checks that the payment is replayed by the other server, and that this gives all nodes a copy.
    async fn is_replayed(&self) -> String {
        let told = self.pay().await;
        assert!(!told.is_executed(), "{told:?}");
        let all = || self.recorded() == [true; 3];
        wait_until("all nodes have the record", PATIENCE, all).await;
        told.body().expect("it is replayed").to_owned()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payment_of_a_killed_server_without_a_record_is_executed_again_unless_at_most_once() {
    for (stop, executed) in [("before", 0), ("after", 1)] {
        for at_most_once in [false, true] {
            let mut scene = Scene::stopped_at(stop, at_most_once).await;
            scene.kill_unanswered();
            scene.outlive_the_lock().await;
            let told = scene.pay().await;
            if at_most_once {
                // What it was granted and did not do cannot be told from what it did.
                assert_eq!((told, scene.executed()), (Told::Unknown, executed));
            } else {
                assert!(told.is_executed(), "{told:?}");
                scene.is_replayed().await;
                assert_eq!(scene.executed(), executed + 1);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn record_of_a_killed_server_at_one_node_is_completed_or_outcome_unknown() {
    for at_most_once in [false, true] {
        let mut scene = Scene::stopped_at("after", at_most_once).await;
        // What is sent from now on is lost with its sender. Nodes that are merely stopped would read
        // what was sent to them when they go on, also from a server that is dead by then.
        for wire in &scene.wires {
            wire.black_hole();
        }
        scene.victim.go_on();
        wait_until("a node has the record", PATIENCE, || scene.recorded()[0]).await;
        scene.kill_unanswered();
        assert_eq!(scene.recorded(), [true, false, false]);
        // A minority is no outcome, and no server can complete it yet.
        scene.outlive_the_lock().await;
        if at_most_once {
            // Nor later: the other nodes keep to whom they granted it.
            assert_eq!(scene.pay().await, Told::Unknown);
            assert_eq!(scene.recorded(), [true, false, false]);
        } else {
            // Were the two others a majority before the first is heard, it would be done again: what a
            // minority has is not decided.
            scene.slow.delay(ms(50));
            scene.is_replayed().await;
        }
        assert_eq!(scene.executed(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn record_of_a_killed_server_at_a_majority_is_replayed_and_repaired() {
    for at_most_once in [false, true] {
        let mut scene = Scene::stopped_at("after", at_most_once).await;
        scene.wires[1].black_hole();
        scene.victim.go_on();
        let answer = (&mut scene.dying).await;
        let answer = answer.expect("the client does not panic");
        let answer = answer.expect("it is answered");
        scene.victim.kill();
        assert_eq!(scene.recorded(), [true, true, false]);
        assert_eq!(
            (answer.status.as_u16(), &*answer.text()),
            (200, &*scene.is_replayed().await)
        );
        // Any two have it now.
        scene.cluster.servers[0].command(&["FLUSHALL"]);
        assert_eq!(&*answer.text(), scene.is_replayed().await);
        assert_eq!(scene.executed(), 1);
    }
}

/// Longer than any of the tests takes: none is about renewals.
const TTL: Duration = secs(4);
