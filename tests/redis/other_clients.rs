//! A Redlock client of another language, and ours in the empty namespace, exclude each other, as do that client and
//! our readers.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use support::{Cluster, Connection, lock_and_release, ms, not_run, secs};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{sleep, timeout};
use tower_redlock::{LockError, LockGuard, RedlockBuilder, Retry};

use crate::patient::builder;

const TTL: Duration = secs(10);
/// The other client does not give back what it got in a split vote, and waits for its ttl then.
const PATIENCE: Duration = secs(120);

/// The other client, a process that is told by lines what to do; killed when dropped.
struct Other {
    _process: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Other {
    /// Starts the client; returns `None`, having said why, if its runtime or packages are missing.
    fn start(cluster: &Cluster) -> Option<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("other_clients");
        let packages = folder.join("node_modules");
        if !packages.join("redlock").is_dir() || !packages.join("ioredis").is_dir() {
            not_run("a Redlock client in JavaScript: its npm packages are missing");
            return None;
        }
        let process = Command::new("node")
            .arg(folder.join("redlock.js"))
            .args(cluster.urls())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn();
        let mut process = match process {
            Ok(process) => process,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                not_run("a Redlock client in JavaScript: node is missing");
                return None;
            }
            Err(error) => panic!("node does not start: {error}"),
        };
        let orders = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap()).lines();
        Some(Self {
            _process: process,
            orders,
            answers,
        })
    }

    async fn order(&mut self, line: &str) -> String {
        let line = format!("{line}\n");
        self.orders.write_all(line.as_bytes()).await.unwrap();
        let answer = timeout(PATIENCE, self.answers.next_line()).await;
        let answer = answer.expect("the other client answers in time").unwrap();
        answer.expect("the other client goes on")
    }

    async fn acquire(&mut self, keys: &str) -> String {
        self.order(&format!("acquire {keys} {}", TTL.as_millis()))
            .await
    }
}

fn ours(cluster: &Cluster) -> RedlockBuilder {
    // Under other tests' load, a late answer would look like a node that is away.
    builder(cluster.urls()).namespace("").ttl(TTL)
}

#[track_caller]
fn assert_contended(outcome: &Result<LockGuard, LockError>, what: &str) {
    let Err(LockError::Contended { retry_after, .. }) = outcome else {
        panic!("{what}: {outcome:?}");
    };
    assert!(retry_after.is_none_or(|left| left <= TTL), "{what}");
}

#[tokio::test]
async fn node_redlock_and_ours_take_turns() {
    let cluster = Cluster::start(5);
    let Some(mut other) = Other::start(&cluster) else {
        return;
    };
    for fencing in [true, false] {
        let ours = ours(&cluster).fencing(fencing).build().unwrap();
        let mut last = None;
        for turn in 0..50 {
            let what = format!("turn {turn}, fencing {fencing}");
            let guard = ours.try_lock("shared").await.unwrap();
            assert_eq!(other.acquire("shared").await, "contended", "{what}");
            assert!(guard.fencing_token() > last || !fencing, "{what}");
            last = guard.fencing_token();
            // A majority has released; the other client may meet the rest, but not be refused by it.
            guard.release().await.unwrap();
            assert_eq!(other.acquire("shared").await, "acquired", "{what}");
            assert_contended(&ours.try_lock("shared").await, &what);
            assert_eq!(other.order("release").await, "released", "{what}");
        }
    }
    cluster.wait_until_free(secs(1)).await;
}

#[tokio::test]
async fn lock_all_and_node_redlock_exclude_each_key_of_a_set() {
    let cluster = Cluster::start(5);
    let Some(mut other) = Other::start(&cluster) else {
        return;
    };
    let ours = ours(&cluster).build().unwrap();
    for _ in 0..10 {
        let guard = ours
            .lock_all(["a", "b"])
            .wait(Duration::ZERO)
            .await
            .unwrap();
        for keys in ["a", "b", "b c"] {
            assert_eq!(other.acquire(keys).await, "contended", "{keys}");
        }
        guard.release().await.unwrap();
        assert_eq!(other.acquire("b c").await, "acquired");
        assert_contended(&ours.try_lock("b").await, "b");
        let both = ours.lock_all(["a", "b"]).wait(Duration::ZERO).await;
        assert_contended(&both, "a, b");
        lock_and_release(&ours, "a").await;
        assert_eq!(other.order("release").await, "released");
    }
}

#[tokio::test]
async fn node_redlock_and_readers_exclude_each_other() {
    const IN_TIME: Duration = secs(1);
    let cluster = Cluster::start(5);
    let Some(mut other) = Other::start(&cluster) else {
        return;
    };
    let [one, two] = [(), ()].map(|()| ours(&cluster).build().unwrap());
    for turn in 0..20 {
        let what = format!("turn {turn}");
        let first = one.try_lock("shared").shared().await.unwrap();
        assert_eq!(other.acquire("shared").await, "contended", "{what}");
        let second = two.try_lock("shared").shared().await.unwrap();
        first.release().await.unwrap();
        // The other reader is left, and excludes the client also from a set with the key.
        for keys in ["shared", "shared free"] {
            assert_eq!(other.acquire(keys).await, "contended", "{what}");
        }
        second.release().await.unwrap();
        cluster.wait_until_free(IN_TIME).await;
        assert_eq!(other.acquire("shared").await, "acquired", "{what}");
        for ours in [&one, &two] {
            assert_contended(&ours.try_lock("shared").shared().await, &what);
            let both = ours.lock_all(["free", "shared"]).shared();
            assert_contended(&both.wait(Duration::ZERO).await, &what);
        }
        assert_eq!(other.order("release").await, "released", "{what}");
        cluster.wait_until_free(IN_TIME).await;
    }
}

#[tokio::test]
async fn readers_see_no_write_of_node_redlock_while_they_hold() {
    const WRITES: i64 = 25;
    let cluster = Cluster::start(5);
    let Some(mut other) = Other::start(&cluster) else {
        return;
    };
    let addr = cluster.servers[0].addr();
    let mut counter = Connection::open(addr).unwrap();
    counter.call(&["SET", "counter", "0"]).unwrap();
    let readers = [(), ()].map(|()| {
        let ours = ours(&cluster).build().unwrap();
        let mut counter = Connection::open(addr).unwrap();
        async move {
            let mut last = Some(0);
            while last < Some(WRITES) {
                let guard = ours.lock("shared").shared().wait(PATIENCE).await.unwrap();
                let before = counter.call(&["GET", "counter"]).unwrap().as_int();
                sleep(ms(3)).await;
                last = counter.call(&["GET", "counter"]).unwrap().as_int();
                assert!(guard.is_valid());
                assert_eq!(before, last);
                guard.release().await.unwrap();
                // The other client does not keep new readers out while it waits, so it needs times without any.
                sleep(ms(60)).await;
            }
        }
    });
    let [one, two] = readers;
    let order = format!("count shared 1000 {WRITES}");
    let (answer, (), ()) = tokio::join!(other.order(&order), one, two);
    assert_eq!(answer, "counted");
}

#[tokio::test]
async fn node_redlock_and_ours_contend_for_a_counter_without_lost_updates() {
    const EACH: i64 = 25;
    let cluster = Cluster::start(5);
    let Some(mut other) = Other::start(&cluster) else {
        return;
    };
    let retry = Retry::new(ms(1), ms(10));
    let ours = ours(&cluster).retry(retry).build().unwrap();
    let mut counter = Connection::open(cluster.servers[0].addr()).unwrap();
    counter.call(&["SET", "counter", "0"]).unwrap();

    let order = format!("count shared 1000 {EACH}");
    let theirs = other.order(&order);
    let own = async {
        for _ in 0..EACH {
            let guard = ours.lock("shared").wait(PATIENCE).await.unwrap();
            let before = counter.call(&["GET", "counter"]).unwrap().as_int().unwrap();
            sleep(ms(1)).await;
            let after = (before + 1).to_string();
            counter.call(&["SET", "counter", &after]).unwrap();
            guard.release().await.unwrap();
        }
    };
    let (answer, ()) = tokio::join!(theirs, own);
    assert_eq!(answer, "counted");
    let counted = cluster.servers[0].command(&["GET", "counter"]);
    assert_eq!(counted.as_int(), Some(2 * EACH));
}
