//! What errors, the log and refusals say of nodes that do not vote: which, why, and what to do.

use axum::Router;
use axum::extract::{Path, Request};
use axum::routing::post;
use serde::Deserialize;
use support::{
    Answer, Cluster, Deadline, Log, RedisServer, lock_and_release, ms, once, request_with, secs,
    until,
};
use tower_redlock::{LockKey, LockKeys, LockResource, Locked, NodeState, Redlock, RedlockLayer};

use crate::patient::{LONGEST, builder, guarded};

async fn until_up(redlock: &Redlock, count: usize) {
    until(&format!("{count} nodes up"), secs(10), || async {
        redlock.health().await.up() == count
    })
    .await;
}

/// How often the log warns of an event of a node.
fn warnings(log: &Log, event: &str, node: &str) -> usize {
    let (text, parts) = (log.text(), ["WARN", event, node]);
    let lines = text.lines();
    let told = lines.filter(|line| parts.iter().all(|part| line.contains(part)));
    told.count()
}

#[derive(Deserialize)]
struct OrderId(u64);

impl LockResource for OrderId {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("order", self.0.to_string())).into()
    }
}

/// Routes that lock in all the ways of this crate.
fn routes(redlock: &Redlock) -> Router {
    let locked = async |_: Locked<Path<OrderId>>| "served";
    let layer = RedlockLayer::new(redlock.clone(), "resource");
    Router::new()
        .route("/layer", post(async || "served").layer(layer))
        .route("/once", post(async || "served").layer(once(redlock)))
        .route("/locked/{id}", post(locked))
        .with_state(redlock.clone())
}

fn request(target: &str, content_type: &str) -> Request {
    let headers = [
        ("idempotency-key", "8e03978e"),
        ("content-type", content_type),
    ];
    request_with("POST", target, &headers)
}

// Rules: lock-quarantined
#[tokio::test]
async fn fresh_cluster_is_lock_quarantined_for_layers_extractors_and_grpc() {
    let cluster = Cluster::start(3);
    let redlock = Redlock::builder().urls(cluster.urls()).build().unwrap();
    let app = routes(&redlock);
    for target in ["/layer", "/once", "/locked/7"] {
        let refused = Answer::to(&app, request(target, "text/plain")).await;
        assert_eq!(refused.told(), (503, "lock-quarantined"), "{target}");
        let retry_after = refused.headers["retry-after"].to_str().unwrap();
        let seconds: u64 = retry_after.parse().unwrap();
        assert!((15..=21).contains(&seconds), "{seconds}");
        let problem = refused.json();
        assert_eq!(problem["title"], "Lock service started recently");
        let detail = "the lock service started recently and grants no locks for another";
        assert_eq!(problem["detail"], format!("{detail} {seconds} s"));
        let refused = Answer::to(&app, request(target, "application/grpc")).await;
        assert_eq!(refused.headers["grpc-status"], "14", "{target}");
        assert_eq!(refused.headers["grpc-message"], "lock-quarantined");
    }
    let refused = redlock.try_lock("k").await.unwrap_err();
    assert!(refused.quarantined() > Some(secs(10)), "{refused:?}");
    // Every node is named, although two of them decide, perhaps before the third has answered.
    let refused = refused.to_string();
    let told = cluster.urls().into_iter().map(|url| {
        let node = url.trim_start_matches("redis://").to_owned();
        let quarantined = format!("{node} was started or flushed recently; quarantined for");
        let silent = format!("{node} was not waited for, because the other nodes decided");
        let is_quarantined = refused.contains(&quarantined);
        assert!(is_quarantined || refused.contains(&silent), "{refused}");
        is_quarantined
    });
    assert!(told.filter(|told| *told).count() >= 2, "{refused}");
}

#[tokio::test]
async fn node_that_goes_down_is_logged_with_its_effect_on_locks() {
    let mut cluster = Cluster::start(3);
    let redlock = builder(cluster.urls()).build().unwrap();
    until_up(&redlock, 3).await;
    let (log, _guard) = Log::subscribed();
    for (server, effect) in [
        "redlock node is down; locks proceed on the other nodes (2 of 3 vote)",
        "redlock node is down; no locks are granted, because 1 of 3 nodes vote and 2 must",
    ]
    .into_iter()
    .enumerate()
    {
        cluster.servers[server].kill();
        until_up(&redlock, 2 - server).await;
        let node = format!("node=\"{}\"", cluster.servers[server].addr());
        // The broken connection is noticed before the attempt to open another one fails.
        let deadline = Deadline::after(secs(10));
        while warnings(&log, effect, &node) == 0 {
            assert!(!deadline.is_over(), "{}", log.text());
            tokio::time::sleep(ms(10)).await;
        }
    }
    let refused = redlock.try_lock("k").await.unwrap_err().to_string();
    let [first, second, third] = [0, 1, 2].map(|server: usize| cluster.servers[server].addr());
    let voted = format!("no quorum: 1 node voted on the lock ({third}), 2 are needed; ");
    let silent = format!("{third} was not waited for, because the other nodes decided");
    let is_told = refused.starts_with(&voted) || refused.contains(&silent);
    assert!(is_told, "{refused}");
    for node in [first, second] {
        let why = format!("{node} is unreachable (");
        assert!(refused.contains(&why), "{refused}");
    }
    cluster.servers[0].restart();
    until_up(&redlock, 2).await;
    lock_and_release(&redlock, "k").await;
    let node = format!("node=\"{first}\"");
    assert!(
        warnings(&log, "redlock node is up again", &node) > 0,
        "{}",
        log.text()
    );
}

#[tokio::test]
async fn quarantine_and_a_fall_are_logged_at_their_beginning_and_their_end() {
    let mut server = RedisServer::start();
    let redlock = guarded([server.url()]).build().unwrap();
    let quarantine = "redlock node was started or flushed recently and is quarantined";
    let events = [
        quarantine,
        "redlock node votes again",
        "redlock node is down",
        "redlock node is up again",
    ];
    let [begins, ends, down, up] = events;
    // Brand new, flushed, and one that comes back without its memory.
    for (fault, expected) in [
        ("new", vec![begins, ends]),
        ("flushed", vec![begins, ends]),
        ("killed", vec![down, up, begins, ends]),
    ] {
        let (log, _guard) = Log::subscribed();
        match fault {
            "flushed" => drop(server.command(&["FLUSHALL"])),
            "killed" => {
                server.kill();
                until_up(&redlock, 0).await;
                server.restart();
            }
            _ => {}
        }
        drop(redlock.try_lock("k").await);
        until_up(&redlock, 1).await;
        let text = log.text();
        let warnings = text.lines().filter(|line| line.contains("WARN"));
        let told = warnings.filter_map(|line| events.into_iter().find(|it| line.contains(it)));
        assert_eq!(told.collect::<Vec<_>>(), expected, "{fault}: {text}");
        assert!(!text.contains("restarted"), "{text}");
    }
}

#[tokio::test]
async fn silence_is_explained_by_the_setting_that_it_exceeds() {
    let server = RedisServer::start();
    let redlock = builder([server.url()]).build().unwrap();
    until_up(&redlock, 1).await;
    server.stop();
    let refused = redlock.try_lock("k").await.unwrap_err().to_string();
    assert!(refused.contains("did not answer within 4"), "{refused}");
    until("told", LONGEST, || async {
        let refused = redlock.try_lock("k").await.unwrap_err().to_string();
        refused.contains("(no answer for 800ms, which is twice node_timeout)")
    })
    .await;
}

#[tokio::test]
async fn wrong_and_missing_passwords_have_their_own_remedy_in_errors_the_log_and_health() {
    let server = RedisServer::start();
    let (addr, rights) = (server.addr(), ["on", ">right", "~*", "&*", "+@all"]);
    let user = [&["ACL", "SETUSER", "locker"], &rights[..]].concat();
    server.command(&user);
    // The user of those who do not log in.
    server.command(&["ACL", "SETUSER", "default", "resetpass", ">right"]);
    for (url, why) in [
        (
            format!("redis://locker:wrong@{addr}"),
            "AUTH was refused (WRONGPASS invalid username-password pair or user is disabled); check the \
             user and the password in its URL, or what its CredentialsProvider returns",
        ),
        (
            format!("redis://{addr}"),
            "the server requires a login (NOAUTH Authentication required); add it to the URL: \
             redis://user:password@host",
        ),
    ] {
        let (log, _guard) = Log::subscribed();
        let redlock = builder([url]).build().unwrap();
        let refused = redlock.try_lock("k").await.unwrap_err().to_string();
        let told = format!(
            "no quorum: 0 nodes voted on the lock, 1 is needed; {addr} gives no votes: {why}"
        );
        assert_eq!(refused, told);
        let health = redlock.health().await;
        let NodeState::Unreachable { why: found, .. } = &health.nodes[0].state else {
            panic!("{health:?}");
        };
        assert_eq!(&**found, why);
        let text = log.text();
        assert!(text.contains(why), "{text}");
        assert!(!text.contains("wrong@"), "{text}");
    }
}
