//! Two processes that share a key in turn: shares, tokens and the commands that a lock costs.

use std::collections::BTreeMap;

use support::{Cluster, MonitorLog, secs};

use crate::kleppmann::client::Client;
#[cfg(target_os = "linux")]
use crate::kleppmann::clock::{Clock, SKEW};
use crate::kleppmann::scene::{A, LONG_TTL, unguarded};
use crate::kleppmann::storage::Storage;

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
    let (wire, urls) = cluster.behind_proxy(A).await;
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
    assert_eq!(cost.confirms, 0, "the later request proposes more");
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
