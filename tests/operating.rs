//! What the chapter on operating the nodes says, on real servers: rights, TLS, one node, memory.

mod support;

use std::time::Duration;

use support::RedisServer;
use tower_redlock::deadpool_redis::{Hook, Manager, Pool};
use tower_redlock::{Redlock, RedlockBuilder, RestartGuard};

fn unguarded() -> RedlockBuilder {
    Redlock::builder().restart_guard(RestartGuard::Off)
}

/// As rustls does when no crypto provider is installed.
#[tokio::test]
async fn a_panic_while_connecting_is_an_error_of_the_node_and_says_why() {
    let server = RedisServer::start();
    let manager = Manager::new(server.url()).unwrap();
    let panics = Hook::sync_fn(|_, _| panic!("\nno provider;\ninstall one"));
    let pool = Pool::builder(manager).post_create(panics).build().unwrap();
    let redlock = unguarded().pool(pool).build().unwrap();
    for _ in 0..2 {
        let refused = redlock.try_lock("k").await.unwrap_err().to_string();
        assert!(refused.contains("pool-0 is unreachable"), "{refused}");
        assert!(refused.contains("no provider; install one"), "{refused}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
