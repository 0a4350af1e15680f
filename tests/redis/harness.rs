//! Tests of what no other test of the harness in `tests/support` would show: dropped servers, clusters, proxies.

use std::io::ErrorKind;
use std::time::Duration;

use support::{Cluster, Deadline, Proxy, RedisServer, ms, secs};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

#[test]
fn dropped_redis_server_leaves_no_process() {
    for stopped in [false, true] {
        let server = RedisServer::start();
        let pid = i32::try_from(server.pid()).unwrap();
        if stopped {
            server.stop();
        }
        drop(server);
        let gone = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None);
        assert_eq!(gone, Err(nix::errno::Errno::ESRCH));
    }
}

#[tokio::test]
async fn cluster_lists_locks_without_fences() {
    let mut cluster = Cluster::start(3);
    cluster.servers[0].command(&["SET", "redlock:{a}:fence", "1"]);
    cluster.servers[1].command(&["SET", "redlock:fence:a", "1"]);
    cluster.wait_until_free(Duration::ZERO).await;
    cluster.servers[2].command(&["SET", "redlock:{a}", "v", "PX", "100"]);
    assert_eq!(cluster.lock_keys(), ["redlock:{a}"]);
    cluster.wait_until_free(secs(1)).await;
    cluster.servers[2].kill();
    cluster.servers[1].stop();
    assert_eq!(cluster.lock_keys(), [""; 0]);
    assert_eq!(cluster.urls().len(), 3);
}

#[tokio::test]
async fn proxy_delays_and_passes_again() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr()).await;
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    let delay = ms(300);
    assert!(ping(&mut client).await.unwrap() < delay);
    proxy.delay(delay);
    let took = ping(&mut client).await.unwrap();
    assert!((delay..2 * delay).contains(&took), "{took:?}");

    // Requests are not delayed, and answers wait side by side.
    let begin = Instant::now();
    for _ in 0..3 {
        client.write_all(b"PING\r\n").await.unwrap();
        tokio::time::sleep(ms(20)).await;
    }
    while server.call_counts()["ping"] < 5 {
        assert!(begin.elapsed() < delay, "{:?}", server.call_counts());
    }
    let mut answers = [0; 3 * PONG.len()];
    client.read_exact(&mut answers).await.unwrap();
    let took = begin.elapsed();
    assert!((delay..2 * delay).contains(&took), "{took:?}");

    proxy.pass();
    assert!(ping(&mut client).await.unwrap() < delay);
    assert_eq!(proxy.connections(), 1);
}

#[tokio::test]
async fn proxy_black_hole_silences_its_connections_for_good() {
    let mut server = RedisServer::start();
    let proxy = Proxy::start(server.addr()).await;
    let mut robbed = TcpStream::connect(proxy.addr()).await.unwrap();
    let mut idle = TcpStream::connect(proxy.addr()).await.unwrap();
    ping(&mut robbed).await.unwrap();
    ping(&mut idle).await.unwrap();

    proxy.black_hole();
    let mut during = TcpStream::connect(proxy.addr()).await.unwrap();
    for client in [&mut robbed, &mut during] {
        let silence = timeout(ms(100), ping(client)).await;
        assert!(silence.is_err(), "{silence:?}");
    }

    proxy.pass();
    ping(&mut idle).await.unwrap();
    ping(&mut TcpStream::connect(proxy.addr()).await.unwrap())
        .await
        .unwrap();
    for client in [&mut robbed, &mut during] {
        let silence = timeout(ms(100), ping(client)).await;
        assert!(silence.is_err(), "{silence:?}");
    }
    assert_eq!(server.call_counts()["ping"], 4);

    // Not even the end of the stream comes through.
    server.kill();
    assert_eq!(
        ping(&mut idle).await.unwrap_err().kind(),
        ErrorKind::UnexpectedEof
    );
    let silence = timeout(ms(50), robbed.read_u8()).await;
    assert!(silence.is_err(), "{silence:?}");
}

#[tokio::test]
async fn proxy_cut_closes_connections_until_pass() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr()).await;
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    ping(&mut client).await.unwrap();

    // Too short to be seen as a mode, and still no connection outlives it.
    proxy.cut();
    proxy.pass();
    assert!(ping(&mut client).await.is_err());

    proxy.cut();
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    assert!(ping(&mut client).await.is_err());
    proxy.pass();
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    ping(&mut client).await.unwrap();

    drop(proxy);
    assert!(ping(&mut client).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn proxy_ignores_a_paused_clock() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr()).await;
    proxy.delay(ms(50));
    let begin = Deadline::after(ms(50));
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    ping(&mut client).await.unwrap();
    assert!(begin.is_over());
}

/// Sends a PING, expects a PONG and returns how long that took.
async fn ping(client: &mut TcpStream) -> std::io::Result<Duration> {
    let begin = Instant::now();
    client.write_all(b"PING\r\n").await?;
    let mut answer = [0; PONG.len()];
    client.read_exact(&mut answer).await?;
    assert_eq!(answer, *PONG);
    Ok(begin.elapsed())
}

const PONG: &[u8; 7] = b"+PONG\r\n";
