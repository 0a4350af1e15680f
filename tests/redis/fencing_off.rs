//! Locks without fencing beside plain clients, foreign keys and lost answers.

use std::future::IntoFuture;
use std::time::Duration;

use support::{Cluster, Proxy, RedisServer, lock_and_release, ms, secs, until_all_up, wait_until};
use tokio::time::sleep;
use tower_redlock::LockError;

use crate::patient::{LONGEST, builder, guarded, name_of};
use crate::server_limits::refusals;

/// Also by the plain `SET` without a restart guard, which itself does not say what is in its way.
#[tokio::test]
async fn fencing_off_respects_locks_of_plain_clients_and_foreign_keys() {
    let cluster = Cluster::start(3);
    let refused = |error: LockError| match error {
        LockError::Contended { retry_after, .. } => retry_after,
        other => panic!("{other:?}"),
    };
    let [plain, endless, list] = ["plain", "endless", "list"].map(name_of);
    for builder in [guarded(cluster.urls()), builder(cluster.urls())] {
        let redlock = builder.fencing(false).build().unwrap();
        until_all_up(&redlock, LONGEST).await;
        cluster.command(&["SET", &plain, "theirs", "PX", "5000"]);
        cluster.command(&["SET", &endless, "theirs"]);
        cluster.command(&["DEL", &list]);
        cluster.command(&["LPUSH", &list, "theirs"]);
        let in_time = |left: Duration| left > secs(3) && left <= secs(5);
        let left = refused(redlock.try_lock("plain").await.unwrap_err());
        assert!(left.is_some_and(in_time), "{left:?}");
        let set = redlock.lock_all(["free", "plain"]).wait(Duration::ZERO);
        let left = refused(set.await.unwrap_err());
        assert!(left.is_some_and(in_time), "{left:?}");
        let left = refused(redlock.try_lock("endless").await.unwrap_err());
        assert_eq!(left, None);
        let why = refusals(&redlock.try_lock("list").await.unwrap_err());
        let is_named =
            |why: &String| why.contains("(NAMESPACE:{KEY})") && why.contains("delete it");
        assert!(why.len() >= 2 && why.iter().all(is_named), "{why:?}");
        for server in &cluster.servers {
            assert_eq!(server.command(&["GET", &plain]).as_str(), Some("theirs"));
            assert_eq!(server.command(&["LLEN", &list]).as_int(), Some(1));
            assert!(!server.exists(&name_of("free")));
        }
    }
}

/// The same owner is never told that it holds what it asks for: the answer got lost with the connection.
// Rules: node.no_fencing
#[tokio::test]
async fn fencing_off_lost_answer_does_not_block_its_own_retry() {
    let server = RedisServer::start();
    let wire = Proxy::start(server.addr()).await;
    let redlock = guarded([wire.url()]).fencing(false).ttl(ms(950));
    let redlock = redlock.build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    for _ in 0..5 {
        wire.delay(ms(200));
        let asked = redlock.lock("k").wait(secs(3)).into_future();
        let cutting = async {
            sleep(ms(100)).await;
            wire.cut();
            sleep(ms(50)).await;
            wire.pass();
        };
        let (guard, ()) = tokio::join!(asked, cutting);
        if let Ok(guard) = guard {
            assert!(server.exists(&name_of("k")));
            guard.release().await.ok();
        }
        until_all_up(&redlock, LONGEST).await;
        lock_and_release(&redlock, "k").await;
        assert!(!server.exists(&name_of("k")));
    }
}

/// By its plain `SET`, a writer learns that readers hold its key, and it keeps new ones out.
#[tokio::test]
async fn fencing_off_without_restart_guard_announces_a_writer_to_readers() {
    let cluster = Cluster::start(3);
    let [ours, theirs] = [(); 2].map(|()| {
        let builder = builder(cluster.urls()).fencing(false).ttl(secs(8));
        builder.build().unwrap()
    });
    for redlock in [&ours, &theirs] {
        until_all_up(redlock, LONGEST).await;
    }
    let reader = ours.try_lock("k").shared().await.unwrap();
    let writing = tokio::spawn(theirs.lock("k").wait(secs(7)).into_future());
    let writer = format!("{}:writer", name_of("k"));
    let is_announced = || cluster.holders(&writer) >= 2;
    wait_until("announced", secs(5), is_announced).await;
    assert!(ours.try_lock("k").shared().await.is_err());
    reader.release().await.unwrap();
    writing.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn shared_locks_are_refused_by_foreign_data_under_the_key_of_a_writer() {
    let cluster = Cluster::start(3);
    let redlock = builder(cluster.urls()).build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    let writer = format!("{}:writer", name_of("k"));
    cluster.command(&["RPUSH", &writer, "theirs"]);
    for keys in [&["k"][..], &["j", "k"]] {
        let refused = redlock.lock_all(keys.iter().copied()).shared();
        let why = refusals(&refused.wait(Duration::ZERO).await.unwrap_err());
        let is_named = |why: &String| why.contains("(:writer)") && why.contains("delete it");
        assert!(why.len() >= 2 && why.iter().all(is_named), "{why:?}");
    }
    for server in &cluster.servers {
        assert_eq!(server.command(&["LLEN", &writer]).as_int(), Some(1));
        assert!(!server.exists(&name_of("j")));
    }
}
