//! Connections that servers close, silence or keep busy: when they are replaced, and how often.

use std::thread;

use futures_util::future::join_all;
use support::{
    Connection, Deadline, Proxy, RedisServer, Reply, ms, secs, until_all_up, wait_until,
};
use tokio::time::sleep;

use crate::patient::until_locked;
use crate::wire::{BOTH, LONG_TTL, PATIENCE, builder};

/// Until the server accepts it: the lock would be there until its ttl.
// Rules: lock.release_kept
#[tokio::test]
async fn release_refused_by_a_busy_server_is_sent_again() {
    for by in BOTH {
        let server = RedisServer::start();
        let redlock = builder(by, &[server.url()]).ttl(LONG_TTL).build();
        let redlock = redlock.expect("the settings are valid");
        until_all_up(&redlock, PATIENCE).await;

        let guards = [redlock.lock("busy"), redlock.lock("too")].map(IntoFuture::into_future);
        let guards = join_all(guards).await;
        let script = keep_busy(&server);
        for guard in guards {
            let refused = guard.expect("it is free").release().await;
            let refused = refused.expect_err("the server is busy").to_string();
            assert!(refused.contains("BUSY"), "{refused}");
        }
        server.command(&["SCRIPT", "KILL"]);
        script.join().expect("the script ends");
        let is_free = || !server.exists("redlock:{busy}") && !server.exists("redlock:{too}");
        wait_until("given back", secs(10), is_free).await;
    }
}

/// Runs a script on a server until it is killed, and returns as soon as others are told so.
fn keep_busy(server: &RedisServer) -> thread::JoinHandle<()> {
    server.command(&["CONFIG", "SET", "busy-reply-threshold", "1"]);
    let mut connection = Connection::open(server.addr()).expect("the server answers");
    let script = thread::spawn(move || {
        drop(connection.call(&["EVAL", "while true do end", "0"]));
    });
    let is_busy = |reply| matches!(reply, Reply::Error(why) if why.starts_with("BUSY"));
    let deadline = Deadline::after(secs(5));
    while !is_busy(server.command(&["PING"])) {
        assert!(deadline.pause(), "the script does not run");
    }
    script
}

#[tokio::test]
async fn server_that_refuses_scripts_is_not_sent_them_repeatedly() {
    for by in BOTH {
        let server = RedisServer::start();
        let redlock = builder(by, &[server.url()]).ttl(LONG_TTL).build().unwrap();
        let guard = redlock.try_lock("k").await.unwrap();
        server.command(&["ACL", "SETUSER", "default", "-script|load"]);
        server.command(&["SCRIPT", "FLUSH"]);
        server.command(&["CONFIG", "RESETSTAT"]);
        drop(guard);
        sleep(secs(1)).await;
        let health = redlock.health().await;
        assert_eq!(health.up(), 0, "{by:?}: {health:?}");
        let calls = server.call_counts();
        let calls = calls.into_iter().find(|(name, _)| name == "evalsha");
        let calls = calls.map_or(0, |(_, calls)| calls);
        assert!((1..=20).contains(&calls), "{by:?}: {calls} calls");
        // The release was not lost over it.
        server.command(&["ACL", "SETUSER", "default", "+script|load"]);
        until_locked(&redlock, "k").await;
    }
}

/// No lock is requested meanwhile, so the next one must not have to detect the dead connection.
#[tokio::test]
async fn silent_idle_connection_is_replaced() {
    let replaced = BOTH.map(async |by| {
        let server = RedisServer::start();
        let wire = Proxy::start(server.addr()).await;
        let redlock = builder(by, &[wire.url()]).build();
        let redlock = redlock.expect("the settings are valid");
        until_all_up(&redlock, PATIENCE).await;
        let opened = wire.connections();
        wire.black_hole();
        let deadline = Deadline::after(secs(20));
        while wire.connections() == opened {
            assert!(!deadline.is_over(), "{by:?}: it is not checked");
            sleep(ms(50)).await;
        }
        wire.pass();
        until_all_up(&redlock, PATIENCE).await;
    });
    join_all(replaced).await;
}
