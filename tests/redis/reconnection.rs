//! Connections that servers close, silence or keep busy: when they are replaced, and how often.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use futures_util::future::join_all;
use support::{
    Connection, Deadline, Proxy, RedisServer, Reply, ms, secs, until_all_up, wait_until,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};

use crate::patient::until_locked;
use crate::wire::{BOTH, By, LONG_TTL, PATIENCE, builder};

/// Answers `OK` to each command with which a connection introduces itself, and closes it after the last one.
async fn serve_introduction(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut read, mut answered) = (Vec::new(), 0);
    let mut piece = [0; 4096];
    // The connection is taken to be a good one when the last command is answered.
    while let Ok(length) = timeout(ms(10), stream.read(&mut piece)).await {
        let length = length?;
        if length == 0 {
            return Ok(());
        }
        read.extend_from_slice(&piece[..length]);
        let commands = |name: &[u8]| read.windows(name.len()).filter(|at| *at == name).count();
        let asked = commands(b"\r\n$6\r\nCLIENT\r\n") + commands(b"\r\n$6\r\nSCRIPT\r\n");
        let answers = b"+OK\r\n".repeat(asked - answered);
        stream.write_all(&answers).await?;
        answered = asked;
    }
    Ok(())
}

/// Until the server accepts it: the lock would be there until its ttl.
// Rules: lock.release_kept
#[tokio::test]
async fn release_refused_by_a_busy_server_is_sent_again() {
    for by in BOTH {
        let server = RedisServer::start();
        let redlock = builder(by, &[server.url()]).ttl(LONG_TTL).build();
        let redlock = redlock.expect("the settings are valid");
        until_all_up(&redlock, PATIENCE).await;

        let guard = redlock.lock("no replicas").await.expect("it is free");
        server.command(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
        let refused = guard.release().await.expect_err("the server refuses");
        assert!(refused.to_string().contains("NOREPLICAS"), "{refused}");
        // More than one, and again and again.
        let refused = redlock.try_lock("refused").await.unwrap_err();
        assert!(refused.to_string().contains("NOREPLICAS"), "{refused}");
        sleep(ms(400)).await;
        assert!(server.exists("redlock:{no replicas}"), "{by:?}");
        server.command(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        wait_until_free(&server).await;

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
        wait_until_free(&server).await;
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

async fn wait_until_free(server: &RedisServer) {
    let is_free = || {
        !server
            .keys("redlock:*")
            .iter()
            .any(|key| key.ends_with('}'))
    };
    wait_until("given back", secs(10), is_free).await;
}

#[tokio::test]
async fn server_that_closes_every_connection_is_reconnected_with_a_pause() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let server = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            drop(serve_introduction(stream).await);
        }
    });
    let redlock = builder(By::Url, &[url]).build().unwrap();
    for number in 1..=3 {
        let (before, began) = (calls.load(Ordering::Relaxed), Instant::now());
        assert!(redlock.try_lock("k").await.is_err());
        sleep(secs(1)).await;
        let calls = calls.load(Ordering::Relaxed) - before;
        println!("request {number}: {calls} calls");
        // The release of what was asked for goes out again on each.
        let most = 2 + 2 * began.elapsed().as_millis() / 100;
        assert!((1..=most).contains(&(calls as u128)), "{calls} calls");
    }
    server.abort();
}

#[tokio::test]
async fn idle_connection_closed_by_the_server_is_reopened_on_demand() {
    let server = RedisServer::start();
    let redlock = builder(By::Url, &[server.url()]).build().unwrap();
    // Each connection loads all scripts.
    let scripts = || {
        let memory = server.command(&["INFO", "memory"]);
        let lines = memory.as_str().unwrap().lines();
        let mut fields = lines.filter_map(|line| line.split_once(':'));
        let count = fields.find(|(name, _)| *name == "number_of_cached_scripts");
        count.unwrap().1.parse::<u64>().unwrap()
    };
    let introductions = || {
        let calls = server.call_counts().into_iter();
        let loads = calls.filter(|(name, _)| name == "script|load");
        loads.map(|(_, count)| count).sum::<u64>() / scripts()
    };
    for number in 1..=3 {
        let guard = redlock.try_lock("k").await.unwrap();
        guard.release().await.unwrap();
        let before = introductions();
        for _ in 0..5 {
            sleep(ms(200)).await;
            server.command(&["CLIENT", "KILL", "TYPE", "normal"]);
        }
        let more = introductions() - before;
        println!("idle time {number}: {more} connections");
        // At once for the first time, in case it is needed soon.
        assert!(more <= 2, "{more} connections");
    }
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
    for by in BOTH {
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
    }
}
