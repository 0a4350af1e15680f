//! The ways to a server: TCP, TLS, Unix sockets, and what fails on each.

use std::time::Duration;

use axum::Router;
use axum::routing::post;
use futures_util::future::join_all;
use support::{
    RedisServer, ms, not_run, once, secs, use_every_connection, wait_until, why_unreachable,
};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::RedlockBuilder;
use tower_redlock::deadpool_redis::{Config, ConnectionAddr, ConnectionInfo, PoolConfig};

use crate::patient::{self, pay};

fn builder() -> RedlockBuilder {
    patient::builder([])
}

#[tokio::test]
async fn unix_socket_carries_locks_subscriptions_and_records() {
    let mut server = RedisServer::start();
    let url = server.unix_url();
    use_every_connection(&server.url(), || builder().url(&url)).await;
    server.kill();
    let why = why_unreachable(builder().url(&url)).await;
    assert!(why.contains("redis.sock is unreachable"), "{why}");
}

#[tokio::test]
async fn database_and_user_of_a_url_are_used() {
    let server = RedisServer::start();
    if server.is_in_cluster_mode() {
        return not_run("another database: there is only one in cluster mode");
    }
    let user = "ACL SETUSER app on >PASSWORD ~* &* +@all";
    server.command(&user.split(' ').collect::<Vec<_>>());
    server.command(&["ACL", "SETUSER", "default", "off"]);
    let url = server.url().replace("://", "://app:PASSWORD@") + "/3";
    let redlock = builder().url(&url).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    let config = Config::from_url(&url);
    let other = builder().pool_config(config).build().unwrap();
    assert!(other.try_lock("k").await.is_err(), "the same database");
    guard.release().await.unwrap();

    let missing = url.replace("/3", "/99");
    let why = why_unreachable(builder().url(&missing)).await;
    assert!(why.contains("DB index is out of range"), "{why}");
}

#[tokio::test]
async fn pool_config_carries_locks_subscriptions_and_records() {
    let server = RedisServer::start();
    let mut by_url = Config::from_url(server.url());
    by_url.pool = Some(PoolConfig::new(1));
    use_every_connection(&server.url(), || builder().pool_config(by_url.clone())).await;

    let by_connection = Config::from_connection_info(ConnectionInfo {
        addr: ConnectionAddr::Tcp("127.0.0.1".into(), server.port()),
        ..ConnectionInfo::default()
    });
    let redlock = builder().pool_config(by_connection).build().unwrap();
    drop(redlock.try_lock("k").await.unwrap());
    let why = format!("{redlock:?}");
    assert!(why.contains(&server.addr().to_string()), "{why}");
}

#[test]
fn pool_config_is_checked_when_it_is_built() {
    let config = || Config::from_url("redis://app:hunter2@10.0.0.1");
    let (mut both, mut neither, mut empty) = (config(), config(), config());
    both.connection = Some(ConnectionInfo::default());
    neither.url = None;
    empty.pool = Some(PoolConfig::new(0));
    for (config, why) in [
        (both, "both url and connection"),
        (neither, "names no server"),
        (empty, "max_size is 0"),
        (Config::from_url("ftp://app:hunter2@host"), "ftp://***@host"),
    ] {
        let refused = builder().pool_config(config).build().unwrap_err();
        let refused = refused.to_string();
        let is_told = refused.contains("pool_config") && refused.contains(why);
        assert!(is_told && !refused.contains("hunter2"), "{refused}");
    }
    let twice = builder().url("redis://10.0.0.1").pool_config(config());
    assert!(!format!("{twice:?}").contains("hunter2"));
    let refused = twice.build().unwrap_err().to_string();
    assert!(refused.contains("listed twice"), "{refused}");
}

#[test]
fn certificates_cannot_be_left_unverified() {
    let refused = builder().url("rediss://10.0.0.1/#insecure").build();
    let (refused, why) = (
        refused.unwrap_err().to_string(),
        "certificates are always verified",
    );
    assert!(refused.contains(why), "{refused}");
}

#[tokio::test]
async fn server_that_closes_during_the_handshake_is_unreachable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // All that is sent is read, or the connection would be reset.
            tokio::spawn(async move {
                drop(timeout(SOON, stream.read_to_end(&mut Vec::new())).await);
            });
        }
    });
    let closed = "the server closed the connection";
    for (scheme, expected) in [
        ("redis://", closed),
        ("redis://:PASSWORD@", closed),
        ("rediss://", "TLS handshake failed: tls handshake eof"),
    ] {
        let url = format!("{scheme}{addr}");
        let why = why_unreachable(builder().url(&url)).await;
        assert!(why.contains(expected), "{url}: {why}");
    }
}

#[tokio::test]
async fn server_that_accepts_and_says_nothing_is_given_up_after_the_connect_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    for scheme in ["redis://", "redis://:PASSWORD@", "rediss://"] {
        let builder = builder().url(format!("{scheme}{addr}"));
        let began = Instant::now();
        let why = why_unreachable(builder.connect_timeout(SOON)).await;
        let (took, expected) = (began.elapsed(), format!("no connection within {SOON:?}"));
        assert!(why.contains(&expected), "{why}");
        assert!(took < PATIENCE, "{scheme}: {took:?}");
    }
}

/// Connections that read records are kept for a while, and as many as the pool may have.
#[tokio::test]
async fn connections_that_read_records_are_counted_and_closed_when_idle() {
    let server = RedisServer::start();
    let mut config = Config::from_url(server.url());
    config.pool = Some(PoolConfig::new(2));
    let redlock = builder().pool_config(config).build().unwrap();
    let app = Router::new().route("/", post(async || "x".repeat(20_000)));
    let app = app.route_layer(once(&redlock));
    for is_replay in [false, true] {
        let app = &app;
        let pay = async |key: usize| pay(app, &format!("key-{key}")).await;
        for answer in join_all((0..8).map(pay)).await {
            assert_eq!(answer.is_replayed(), is_replay);
        }
    }
    let readers = || {
        let clients = server.command(&["CLIENT", "LIST"]);
        let clients = clients.as_str().unwrap().lines();
        let readers = clients.filter(|client| client.contains(" cmd=get "));
        readers.count()
    };
    assert_eq!(readers(), 2);
    sleep(secs(1)).await;
    assert_eq!(readers(), 2);
    wait_until("closed", PATIENCE, || readers() == 0).await;
}

const SOON: Duration = ms(200);
const PATIENCE: Duration = secs(20);
