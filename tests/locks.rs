//! Locks over real Redis nodes: the paths every user takes first.

mod support;

use std::time::Duration;

use support::Cluster;
use tower_redlock::{LockError, Redlock, Released, RestartGuard};

fn redlock(cluster: &Cluster) -> tower_redlock::RedlockBuilder {
    Redlock::builder()
        .urls(cluster.urls())
        .restart_guard(RestartGuard::Off)
}

#[tokio::test]
async fn a_lock_excludes_others_until_it_is_released() {
    let cluster = Cluster::start(3);
    for fencing in [true, false] {
        let ours = redlock(&cluster).fencing(fencing).build().unwrap();
        let theirs = redlock(&cluster).fencing(fencing).build().unwrap();
        for keys in [vec!["a"], vec!["a", "b"]] {
            let guard = ours.lock_all(keys.clone()).await.unwrap();
            assert_eq!(guard.fencing_token().is_some(), fencing);
            let refused = theirs.try_lock("a").await.unwrap_err();
            assert!(
                matches!(refused, LockError::Contended { .. }),
                "{refused:?}"
            );
            guard.extend(Duration::from_secs(9)).await.unwrap();
            assert_eq!(guard.release().await, Ok(Released::Freed));
            theirs.try_lock("a").await.unwrap().release().await.unwrap();
        }
    }
    cluster.wait_until_free(Duration::from_secs(1)).await;
}
