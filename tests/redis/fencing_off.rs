//! Locks without fencing beside plain clients, foreign keys and lost answers.

use std::future::IntoFuture;
use std::time::Duration;

use support::{Cluster, Proxy, RedisServer, ms, secs, until_all_up};
use tokio::time::sleep;
use tower_redlock::LockError;

use crate::patient::{LONGEST, guarded, name_of};

#[tokio::test]
async fn fencing_off_respects_locks_of_plain_clients_and_foreign_keys() {
    let cluster = Cluster::start(3);
    let redlock = guarded(cluster.urls()).fencing(false).build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    let at_all = |command: &[&str]| {
        for server in &cluster.servers {
            server.command(command);
        }
    };
    let refused = |error: LockError| match error {
        LockError::Contended { retry_after, .. } => retry_after,
        other => panic!("{other:?}"),
    };
    let (plain, endless, list) = (name_of("plain"), name_of("endless"), name_of("list"));
    at_all(&["SET", &plain, "theirs", "PX", "5000"]);
    at_all(&["SET", &endless, "theirs"]);
    at_all(&["LPUSH", &list, "theirs"]);
    let left = refused(redlock.try_lock("plain").await.unwrap_err());
    assert!(
        left.is_some_and(|left| left > secs(3) && left <= secs(5)),
        "{left:?}"
    );
    assert_eq!(
        refused(redlock.try_lock("endless").await.unwrap_err()),
        None
    );
    let set = redlock
        .lock_all(["free", "plain"])
        .wait(Duration::ZERO)
        .await;
    let left = refused(set.unwrap_err());
    assert!(left.is_some_and(|left| left > secs(3)), "{left:?}");
    let foreign = redlock.try_lock("list").await.unwrap_err();
    assert!(matches!(&foreign, LockError::Unavailable { nodes, .. } if nodes.len() >= 2));
    for server in &cluster.servers {
        assert_eq!(server.command(&["GET", &plain]).as_str(), Some("theirs"));
        assert_eq!(server.command(&["LLEN", &list]).as_int(), Some(1));
        assert!(!server.exists(&name_of("free")));
    }
}

/// The same owner is never told that it holds what it asks for: the answer got lost with the connection.
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
        redlock.lock("k").await.unwrap().release().await.unwrap();
        assert!(!server.exists(&name_of("k")));
    }
}
