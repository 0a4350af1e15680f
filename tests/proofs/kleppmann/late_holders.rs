//! Holders that are paused, and nodes whose keys expire early.

use support::{Cluster, Proxy, RedisServer, secs};

use crate::kleppmann::client::{Client, KEY};
#[cfg(target_os = "linux")]
use crate::kleppmann::clock::{Clock, SKEW};
use crate::kleppmann::scene::{
    C, LONG_TTL, TOO_LATE, assert_lost_update, unguarded, write_beside_each_other,
};
#[cfg(target_os = "linux")]
use crate::kleppmann::scene::{clock_of, micros};
use crate::kleppmann::storage::Storage;

// Rules: lock.storage
#[test]
fn client_paused_beyond_its_ttl_is_refused_by_the_storage_and_not_valid() {
    let (cluster, storage) = (Cluster::start(3), Storage::start());
    let setup = unguarded(secs(1));
    let [one, two] = Client::start_two(&cluster.urls(), setup, &storage);
    let first = one.lock();
    one.read();
    let promised = one.valid_until().expect("it was acquired just now");
    one.pause();
    let second = two.lock();
    assert!(second.at >= promised, "two held it");
    two.read();
    assert!(two.write().fenced);
    // It checks nothing between waking up and writing: what it knew was right once.
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
        write_beside_each_other(one, two);
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
