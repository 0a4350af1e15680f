//! Listing the locks on real servers: the names of keys, tables that grow and shrink, and a million of keys.

use std::collections::BTreeMap;

use support::{Cluster, Connection, RedisServer, list_all, ms, secs, until_all_up};
use tower_redlock::{ListCursor, LockKey, RedlockBuilder};

use crate::patient;
use crate::wire::PATIENCE;

fn builder(cluster: &Cluster) -> RedlockBuilder {
    // A server that fills its tables is slow.
    patient::builder(cluster.urls()).node_timeout(secs(2))
}

/// Keys whose names are easily taken for something else.
fn odd_keys() -> Vec<LockKey> {
    let longest: Vec<u8> = (0..=255).chain(0..=255).collect();
    let mut keys: Vec<LockKey> = vec![
        "*".into(),
        "a?b".into(),
        "a[b-c]".into(),
        "a\\*".into(),
        "{".into(),
        "}".into(),
        "a}:fence".into(),
        "a}{b".into(),
        "{a}".into(),
        ":fence".into(),
        vec![0, 0xff, 0xc3, b'\r', b'\n'].into(),
        ("", "").into(),
        ("", "*").into(),
        longest.into(),
    ];
    keys.sort();
    keys
}

#[tokio::test]
async fn list_names_keys_as_they_were_made_in_any_namespace() {
    let cluster = Cluster::start(3);
    let keys = odd_keys();
    for namespace in ["redlock", "a*b[c]?\\", "ab[c]", "*", ""] {
        for server in &cluster.servers {
            // What is on it for other namespaces looks like locks of the empty one.
            server.command(&["FLUSHALL"]);
            // Other data, which locks nothing.
            server.command(&["SET", "other", "x"]);
            server.command(&["HSET", "redlock:{hash}", "a", "b"]);
            server.command(&["ZADD", "zset", "1", "b"]);
        }
        let redlock = builder(&cluster).namespace(namespace).build().unwrap();
        until_all_up(&redlock, PATIENCE).await;
        let all = redlock.lock_all(&keys).await.unwrap();
        let reader = redlock.lock("reader").shared().await.unwrap();
        let work = |_| async { Ok::<_, std::convert::Infallible>(1) };
        redlock.once("recorded").run(work).await.unwrap();
        let mut expected = keys.clone();
        expected.push("reader".into());
        if namespace.is_empty() {
            // Any string may be a lock.
            expected.push("other".into());
        }
        expected.sort();
        assert_eq!(list_all(&redlock, "").await, expected, "{namespace}");
        for key in &expected {
            // No key has a first part that begins so.
            let begins = |other: &&LockKey| other.as_bytes().starts_with(key.as_bytes());
            let selected = expected.iter().filter(begins);
            let selected: Vec<LockKey> = selected.cloned().collect();
            assert_eq!(
                list_all(&redlock, key).await,
                selected,
                "{namespace} {key:?}"
            );
        }
        all.release().await.unwrap();
        reader.release().await.unwrap();
        let left = list_all(&redlock, "").await;
        assert_eq!(left.len(), usize::from(namespace.is_empty()), "{left:?}");
    }
}

#[tokio::test]
async fn list_names_a_key_of_more_than_512_bytes_by_its_digest() {
    let cluster = Cluster::start(1);
    let redlock = builder(&cluster).build().unwrap();
    let guard = redlock.lock("x".repeat(513)).await.unwrap();
    let listed = list_all(&redlock, "").await;
    let [key] = &*listed else {
        panic!("{listed:?}");
    };
    let is_digest = key.as_bytes().iter().all(u8::is_ascii_hexdigit);
    assert!(is_digest && key.as_bytes().len() == 64, "{key:?}");
    assert!(list_all(&redlock, "x").await.is_empty());
    // It serves for the other requests of an operator, too.
    let inspection = redlock.inspect(key).await;
    assert_eq!(inspection.fencing_token(), guard.fencing_token());
    assert!(redlock.revoke(key).await.unwrap().was_held());
}

/// While the table of a server shrinks, `SCAN` names keys twice.
#[tokio::test]
async fn list_has_each_lock_once_while_the_tables_of_the_servers_grow_and_shrink() {
    const OTHERS: usize = 5_000;
    let cluster = Cluster::start(3);
    let redlock = builder(&cluster).build().unwrap();
    until_all_up(&redlock, PATIENCE).await;
    let keys: Vec<LockKey> = (0..320).map(|key| ("stays", key).into()).collect();
    let mut guards = Vec::new();
    for keys in keys.chunks(32) {
        guards.push(redlock.lock_all(keys).await.unwrap());
    }
    for round in 0..3 {
        if round == 0 {
            let servers = cluster.servers.iter();
            servers.for_each(|server| fill(server, OTHERS));
        }
        let mut listed: BTreeMap<LockKey, usize> = BTreeMap::new();
        let (mut cursor, mut pages) = (Some(ListCursor::default()), 0);
        while let Some(from) = cursor {
            let page = redlock.list("", from).await.unwrap();
            for lock in page.locks {
                *listed.entry(lock.key).or_default() += 1;
            }
            (cursor, pages) = (page.next, pages + 1);
            if pages % 7 == 3 {
                for server in &cluster.servers {
                    let is_full = server.exists("redlock:{other:1}");
                    let act = if is_full { clear } else { fill };
                    act(server, OTHERS);
                }
                // A server looks ten times a second whether a table is too large.
                tokio::time::sleep(ms(300)).await;
            }
        }
        let twice: Vec<_> = listed.iter().filter(|(_, times)| **times > 1).collect();
        println!("{pages} pages, {} keys, twice: {twice:?}", listed.len());
        for key in &keys {
            assert_eq!(listed.get(key), Some(&1), "{key:?}");
        }
    }
    drop(guards);
}

/// Sets this many locks beside those of the test.
fn fill(server: &RedisServer, count: usize) {
    let set = "for i = ARGV[1], ARGV[2] do \
               redis.call('SET', 'redlock:{other:' .. string.format('%d', i) .. '}', 'x', 'PX', 3600000) end";
    run_over(server, set, count);
}

/// Deletes them.
fn clear(server: &RedisServer, count: usize) {
    let del = "for i = ARGV[1], ARGV[2] do redis.call('DEL', 'redlock:{other:' .. string.format('%d', i) .. '}') end";
    run_over(server, del, count);
}

fn run_over(server: &RedisServer, script: &str, count: usize) {
    let mut connection = Connection::open(server.addr()).unwrap();
    for begin in (1..=count).step_by(10_000) {
        let end = (begin + 9_999).min(count);
        let (begin, end) = (begin.to_string(), end.to_string());
        let done = connection.call(&["EVAL", script, "0", &begin, &end]);
        assert!(done.unwrap().is_nil());
    }
}
