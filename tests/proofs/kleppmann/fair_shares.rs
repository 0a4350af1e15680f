//! Two processes that share a key, in turn and side by side: shares and tokens.

use std::collections::BTreeMap;

use support::{Cluster, secs};

use crate::kleppmann::client::Client;
#[cfg(target_os = "linux")]
use crate::kleppmann::clock::{Clock, SKEW};
use crate::kleppmann::scene::{A, LONG_TTL, unguarded};
use crate::kleppmann::storage::Storage;

/// Lets two clients share the key, in turn and side by side, and checks order and shares.
async fn share_a_key(two_envs: &[(&str, &str)]) {
    let (cluster, storage) = (Cluster::start(3), Storage::start());
    let (wire, urls) = cluster.behind_proxy(A).await;
    let setup = unguarded(LONG_TTL);
    let one = Client::start("one", &urls, setup, &storage, &[]);
    let two = Client::start("two", &cluster.urls(), setup, &storage, two_envs);
    one.wait_until_up(3);
    two.wait_until_up(3);

    let mut highest = 0;
    take_turns([&one, &two], &mut highest);
    let turns = [&one, &two].map(|client| client.take_turns(secs(2)));
    one.done(turns[0]);
    two.done(turns[1]);
    let content = storage.content();
    let shares = count_in_order(&content.notes, &mut highest);
    println!("shares {shares:?}");
    let all: usize = shares.values().sum();
    assert_eq!(shares.len(), 2);
    for (name, share) in &shares {
        assert!(10 * share >= all, "{name} got {share} of {all}");
    }

    // A is out of the first one's reach, and knows lower fences than the others.
    cluster.wait_until_free_blocking(secs(5));
    wire.cut();
    take_turns([&one, &two], &mut highest);
    wire.pass();
    cluster.wait_until_free_blocking(secs(5));
}

/// Lets two clients take the lock in turn, and checks the order of their tokens.
fn take_turns(clients: [&Client; 2], highest: &mut u64) {
    for _ in 0..20 {
        for client in clients {
            let token = client.lock().token;
            assert!(token > *highest, "{token} after {highest}");
            *highest = token;
            client.release();
        }
    }
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

#[tokio::test]
async fn two_processes_share_a_key_fairly_with_ordered_tokens() {
    share_a_key(&[]).await;
}

/// The one that is behind proposes less than the nodes know: they answer one more than that, and
/// where they know different numbers it takes the second phase to make the answers equal.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn two_processes_with_clocks_seconds_apart_share_a_key_fairly_with_ordered_tokens() {
    let of_two = Clock::behind(SKEW);
    share_a_key(&of_two.envs()).await;
}
