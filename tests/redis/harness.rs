//! Tests of the harness in `tests/support`: servers, proxies, child processes.

use std::io::ErrorKind;
use std::time::Duration;

use nix::sys::signal::Signal;
use support::{
    ChildProcess, Cluster, Deadline, MonitorLog, Proxy, RedisServer, Reply, assert_matches,
    free_port, http, ms, secs,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

#[test]
fn redis_server_loses_its_memory_on_restart() {
    let mut server = RedisServer::start();
    assert_eq!(server.command(&["SET", "k", "v"]).as_str(), Some("OK"));
    assert_eq!(
        server.command(&["GET", "k"]),
        Reply::Bulk(Some(b"v".to_vec()))
    );
    assert_eq!(server.command(&["INCR", "n"]).as_int(), Some(1));
    assert!(server.command(&["GET", "missing"]).is_nil());
    assert_matches!(server.command(&["NOPE"]), Reply::Error(_));
    assert_eq!(server.keys("*"), ["k", "n"]);
    assert_eq!(server.call_counts()["set"], 1);

    let port = server.port();
    server.kill();
    assert!(server.try_command(&["PING"]).is_err());
    server.restart();
    assert_eq!(server.port(), port);
    assert!(!server.exists("k"));
    assert!(!server.call_counts().contains_key("set"));
}

#[test]
fn stopped_redis_server_answers_after_continue() {
    let server = RedisServer::start();
    server.stop();
    assert!(!server.is_running());
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| server.command(&["PING"]));
        let deadline = Deadline::after(ms(100));
        while deadline.pause() {}
        assert!(!answer.is_finished());
        server.cont();
        assert_eq!(answer.join().unwrap().as_str(), Some("PONG"));
    });
}

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

#[test]
fn monitor_log_has_every_answered_command() {
    let server = RedisServer::start();
    let monitor = MonitorLog::start(&server);
    for n in 0..20 {
        server.command(&["SET", "k", &n.to_string()]);
        let lines = monitor.lines();
        assert_eq!(lines.len(), n + 1, "{lines:#?}");
        assert!(lines[n].ends_with(&format!(r#""SET" "k" "{n}""#)));
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

#[test]
fn child_process_returns_output_and_exit_status() {
    let script = r#"echo "hello $NAME"; echo oops >&2; echo last; exit 3"#;
    let mut child = ChildProcess::start("/bin/sh", &["-c", script], &[("NAME", "you")]);
    let patience = secs(5);
    assert_eq!(child.wait_for_line("hello", patience), "hello you");
    assert_eq!(child.wait(patience).code(), Some(3));
    assert_eq!(child.stdout(), "hello you\nlast");
    assert_eq!(child.stderr(), "oops");

    let mut child = ChildProcess::start("/bin/sh", &["-c", "exec sleep 60"], &[]);
    child.signal(Signal::SIGTERM);
    assert_eq!(child.wait(patience).code(), None);
}

#[tokio::test]
async fn http_client_shows_the_bytes_on_the_wire() {
    let listener = TcpListener::bind(("127.0.0.1", free_port())).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut seen = vec![0; 4096];
        let length = stream.read(&mut seen).await.unwrap();
        let response =
            b"HTTP/1.1 423 Locked\r\nRetry-After: 1\r\ncontent-length: 7\r\n\r\n{\"a\":1}";
        stream.write_all(response).await.unwrap();
        seen.truncate(length);
        String::from_utf8(seen).unwrap()
    });
    let response = http::request(addr, "POST", "/x", &[("x-user", "ann")], b"hi").await;
    assert_eq!(response.status, 423);
    assert_eq!(response.header("Retry-After"), Some("1"));
    assert_eq!(response.json()["a"], 1);
    let seen = server.await.unwrap();
    assert!(seen.starts_with("POST /x HTTP/1.1\r\n"), "{seen}");
    assert!(seen.contains("x-user: ann\r\n") && seen.ends_with("\r\n\r\nhi"));
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
