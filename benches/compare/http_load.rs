//! A load generator: keep-alive connections that send one request after the other.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::child::parse;
use crate::figures::{micros, percentile};

/// Prints requests per second, the median and the 99th percentile of the latency, and the errors.
pub(crate) async fn run(args: &[&str]) {
    let [server, concurrency, millis] = args else {
        panic!("a load has a server, a concurrency and a time, not {args:?}");
    };
    let (server, concurrency): (_, usize) = (parse(server), parse(concurrency));
    let time = Duration::from_millis(parse(millis));
    let began = Instant::now() + time / 8;
    let connections = (0..concurrency).map(|_| send_until(server, began, began + time));
    let connections = join_all(connections).await;
    let took = began.elapsed();
    let errors: usize = connections.iter().map(|(_, errors)| errors).sum();
    let mut times: Vec<_> = connections
        .into_iter()
        .flat_map(|(times, _)| times)
        .collect();
    let rate = times.len() as f64 / took.as_secs_f64();
    let p50 = micros(percentile(&mut times, 50));
    let p99 = micros(percentile(&mut times, 99));
    println!("{rate} {p50} {p99} {errors}");
}

/// Returns the latencies of all requests that were sent between two instants.
async fn send_until(server: SocketAddr, began: Instant, end: Instant) -> (Vec<Duration>, usize) {
    let stream = TcpStream::connect(server).await;
    let mut stream = stream.expect("the server listens");
    stream.set_nodelay(true).expect("TCP supports it");
    let (mut times, mut errors) = (Vec::new(), 0);
    let mut buffer = Vec::new();
    let mut asked = Instant::now();
    while asked < end {
        asked = Instant::now();
        let request = format!(
            "POST /{} HTTP/1.1\r\nhost: bench\r\ncontent-length: 0\r\n\r\n",
            fastrand::u64(..)
        );
        let sent = stream.write_all(request.as_bytes()).await;
        sent.expect("the server keeps the connection");
        if !read_response(&mut stream, &mut buffer).await {
            errors += 1;
        } else if asked >= began {
            times.push(asked.elapsed());
        }
    }
    (times, errors)
}

/// Reads a response with a known length; false if it is not 200.
async fn read_response(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> bool {
    buffer.clear();
    loop {
        let read = stream.read_buf(buffer).await.expect("the server answers");
        assert!(read > 0, "the server ended the connection");
        let text = std::str::from_utf8(buffer).expect("the answers are ASCII");
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let mut lines = head.lines();
        let is_ok = lines.next().is_some_and(|status| status.contains(" 200 "));
        let length = lines.find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = parse(length.expect("the answers have a length"));
        if body.len() >= length {
            return is_ok;
        }
    }
}
