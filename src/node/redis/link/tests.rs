//! Tests of links and sockets.

use std::sync::LazyLock;
use std::task::Waker;
use std::time::Duration;

use bytes::BufMut;
use deadpool_redis::redis::{RedisConnectionInfo, cmd};
use tokio::io::{AsyncWriteExt, DuplexStream, ReadBuf, duplex};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::coop::{consume_budget, has_budget_remaining};
use tokio::time::timeout;
use tokio_test::task::spawn;

use super::*;

async fn connected() -> (Link, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, server) = tokio::join!(client, listener.accept());
    (Link::new(client.unwrap()), server.unwrap().0)
}

async fn reply(link: &mut Link) -> Result<Value, Arc<str>> {
    let reply = timeout(Duration::from_secs(10), link.reply()).await;
    reply.expect("the reply arrives")
}

#[tokio::test]
async fn poll_reply_returns_the_replies_in_order() {
    let (mut link, mut server) = connected().await;
    link.send(2, |output| output.put_slice(b"ab"));
    link.send(1, |output| output.put_slice(b"c"));
    let serve = async {
        let mut asked = [0; 3];
        server.read_exact(&mut asked).await.unwrap();
        assert_eq!(&asked, b"abc");
        for piece in [&b":1\r"[..], b"\n:2", b"\r\n:3\r\n"] {
            server.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
    };
    let (first, ()) = tokio::join!(reply(&mut link), serve);
    assert_eq!(first.unwrap(), Value::Int(1));
    assert_eq!(reply(&mut link).await.unwrap(), Value::Int(2));
    assert!(!link.is_idle());
    assert_eq!(reply(&mut link).await.unwrap(), Value::Int(3));
    assert!(link.is_idle());
}

#[tokio::test]
async fn buffers_shrink_after_a_big_request_and_a_big_reply() {
    let (mut link, mut server) = connected().await;
    // More than the kernel takes at once.
    let size = 256 * MAX_KEPT;
    let big: Vec<u8> = (0..=250).cycle().take(size).collect();
    link.send(1, |output| output.extend_from_slice(&big));
    let serve = async {
        let mut asked = vec![0; size];
        server.read_exact(&mut asked).await.unwrap();
        let head = format!("${size}\r\n");
        server.write_all(head.as_bytes()).await.unwrap();
        server.write_all(&asked).await.unwrap();
        server.write_all(b"\r\n").await.unwrap();
    };
    let exchange = async { tokio::join!(reply(&mut link), serve).0 };
    let reply = timeout(Duration::from_secs(20), exchange).await.unwrap();
    assert!(reply.unwrap() == Value::BulkString(big));
    link.send(1, |output| output.put_u8(b'y'));
    server.write_all(b"+OK\r\n").await.unwrap();
    assert_eq!(self::reply(&mut link).await.unwrap(), Value::Okay);
    let Transport::Own(socket) = &link.transport else {
        panic!("it is a socket")
    };
    assert!(socket.input.capacity() <= MAX_KEPT);
    assert!(link.output.capacity() <= MAX_KEPT);
}

#[tokio::test]
async fn written_output_is_freed_while_the_buffer_never_empties() {
    const PIECE: usize = 1 << 20;
    let (mut link, mut server) = connected().await;
    let mut read = vec![0; PIECE];
    let mut context = Context::from_waker(Waker::noop());
    // More than the kernel takes, so that there is always something left to write.
    for _ in 0..16 {
        link.send(1, |output| output.resize(output.len() + PIECE, b'x'));
    }
    for _ in 0..100 {
        let mut come = 0;
        while come < PIECE {
            assert!(link.poll_reply(&mut context).is_pending());
            come += server.read(&mut read[..PIECE - come]).await.unwrap();
        }
        server.write_all(b":1\r\n").await.unwrap();
        reply(&mut link).await.unwrap();
        link.send(1, |output| output.resize(output.len() + PIECE, b'x'));
        assert!(link.output.len() <= 40 * PIECE);
    }
}

#[tokio::test]
async fn poll_reply_fails_at_the_end_of_the_stream_with_and_without_requests() {
    for is_asked in [false, true] {
        let (mut link, mut server) = connected().await;
        if is_asked {
            link.send(1, |output| output.put_u8(b'x'));
            server.write_all(b"$5\r\nhal").await.unwrap();
        }
        drop(server);
        assert!(reply(&mut link).await.is_err(), "{is_asked}");
    }
}

/// A stream that yields its pieces one by one, and then nothing for ever.
#[derive(Default)]
struct Pieces {
    pieces: VecDeque<Vec<u8>>,
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(piece) = self.pieces.front_mut() else {
            return Poll::Pending;
        };
        let length = piece.len().min(room.remaining());
        room.put_slice(&piece[..length]);
        piece.drain(..length);
        if piece.is_empty() {
            self.pieces.pop_front();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pieces {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Parses replies that stand one behind the other.
pub(in super::super) fn parse_all(mut bytes: &[u8]) -> Vec<Value> {
    let mut parser = Parser::new();
    // It keeps what it has read, and fails at the end.
    std::iter::from_fn(|| parser.parse_value(&mut bytes).ok()).collect()
}

/// Reads as many replies as there are, one piece after the other.
fn read_all<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<Value>, Arc<str>> {
    let pieces = pieces.into_iter().filter(|piece| !piece.is_empty());
    let pieces = pieces.map(<[u8]>::to_vec).collect();
    let mut link = Link::new(Pieces { pieces });
    let (mut replies, mut context) = (Vec::new(), Context::from_waker(Waker::noop()));
    while let Poll::Ready(reply) = link.poll_reply(&mut context) {
        replies.push(reply?);
    }
    Ok(replies)
}

/// All kinds of replies that a server may send, one behind the other.
const STREAM: [&str; 13] = [
    ":1\r\n",
    ":-9007199254740993\r\n",
    "+OK\r\n",
    "+PONG\r\n",
    "$-1\r\n",
    "*-1\r\n",
    "$0\r\n\r\n",
    "$4\r\na\r\nb\r\n",
    "*3\r\n:4\r\n$2\r\nxy\r\n:100\r\n",
    "*0\r\n",
    "-NOSCRIPT No matching script.\r\n",
    "-ERR\r\n",
    "*2\r\n*1\r\n:5\r\n*2\r\n:0\r\n:6\r\n",
];

#[test]
fn poll_reply_continues_an_incomplete_reply_wherever_it_was_cut() {
    let whole = STREAM.concat();
    let values = read_all([whole.as_bytes()]).unwrap();
    assert_eq!(values.len(), STREAM.len());
    assert_eq!(values[1], Value::Int(-9_007_199_254_740_993));
    assert_eq!(values[7], Value::BulkString(b"a\r\nb".into()));
    for cut in 0..whole.len() {
        let (before, behind) = whole.as_bytes().split_at(cut);
        assert_eq!(read_all([before, behind]).unwrap(), values, "cut at {cut}");
        let lengths = STREAM.iter().scan(0, |end, reply| {
            *end += reply.len();
            Some(*end)
        });
        let complete = lengths.filter(|end| *end <= cut).count();
        assert_eq!(read_all([before]).unwrap(), values[..complete], "{cut}");
    }
    let bytes = whole.as_bytes().chunks(1);
    assert_eq!(read_all(bytes).unwrap(), values);
}

#[test]
fn poll_reply_refuses_what_is_no_reply() {
    for bytes in [
        &b"\r\n"[..],
        b":\r\n",
        b":one\r\n",
        b":99999999999999999999\r\n",
        b"$1\r\nabc",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        // A TLS alert.
        b"\x15\x03\x03\x00\x02\x02\x0a",
        b"*2\r\n:1\r\nx\r\n",
        &b"*1\r\n".repeat(101),
        // The fuzzer found that the end of this one depended on who looked for it.
        b"*2\r\n+b\n*2\r\n:2\r\n+4\r\n",
        b"+OK\n",
        &b"%1\r\n:1\r\n".repeat(100_000),
    ] {
        let why = read_all([bytes]).unwrap_err();
        assert!(
            why.contains("check that the URL names a Redis server"),
            "{why}"
        );
    }
    // Lengths beyond what follows take no memory.
    for incomplete in ["*9223372036854775807\r\n", "$9223372036854775807\r\n"] {
        assert_eq!(read_all([incomplete.as_bytes()]), Ok(Vec::new()));
    }
}

#[test]
fn poll_reply_refuses_a_line_over_64_kibibytes_wherever_it_is_cut() {
    let line = |length: usize| format!("+{}\r\n", "a".repeat(length - 3));
    let (longest, longer) = (line(64 << 10), line((64 << 10) + 1));
    for size in [1024, 16 << 10, 64 << 10, longer.len()] {
        assert_eq!(
            read_all(longest.as_bytes().chunks(size)).map(|read| read.len()),
            Ok(1)
        );
        assert!(read_all(longer.as_bytes().chunks(size)).is_err(), "{size}");
    }
}

#[test]
fn poll_reply_reads_the_replies_of_a_batch_as_one_array() {
    let parts = 4096;
    let reply = format!("*{parts}\r\n") + &"*2\r\n:0\r\n:100\r\n".repeat(parts);
    for size in [1, 1400, reply.len()] {
        let replies = read_all(reply.as_bytes().chunks(size)).unwrap();
        let [Value::Array(read)] = &*replies else {
            panic!("{replies:?}")
        };
        assert_eq!(read.len(), parts);
    }
}

/// A reply that is parsed from its start after each read takes minutes.
#[test]
fn poll_reply_reads_64_mebibytes_and_refuses_more() {
    let size = 64 << 20;
    let reply = format!("${size}\r\n{}\r\n", "x".repeat(size));
    let replies = read_all(reply.as_bytes().chunks(1 << 16)).unwrap();
    assert!(matches!(&*replies, [Value::BulkString(bulk)] if bulk.len() == size));
    let reply = format!("${}\r\n{}", 2 * size, "x".repeat(MAX_REPLY));
    let why = read_all(reply.as_bytes().chunks(1 << 16)).unwrap_err();
    assert_eq!(&*why, "the reply is too long");
}

#[test]
fn poll_reply_never_panics() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..2_000 {
        let bytes: Vec<u8> = (0..random.u8(0..64))
            .map(|_| match random.u8(0..4) {
                0 => random.u8(b'0'..=b'9'),
                1 => random.u8(..),
                _ => *random.choice(b"\r\n*$:%|>=!-").unwrap(),
            })
            .collect();
        drop(read_all(bytes.chunks(random.usize(1..64))));
    }
}

/// A stream that writes nothing before it is flushed, as TLS may do.
struct Lazy {
    unwritten: Vec<u8>,
    stream: TcpStream,
}

impl AsyncRead for Lazy {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, room)
    }
}

impl AsyncWrite for Lazy {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.unwritten.extend(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let unwritten = std::mem::take(&mut self.unwritten);
        if unwritten.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let written = Pin::new(&mut self.stream).poll_write(context, &unwritten);
        written.map_ok(|written| assert_eq!(written, unwritten.len()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn poll_reply_flushes_the_requests() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, server) = tokio::join!(client, listener.accept());
    let (stream, mut server) = (client.unwrap(), server.unwrap().0);
    let mut link = Link::new(Lazy {
        unwritten: Vec::new(),
        stream,
    });
    link.send(1, |output| output.put_slice(b"PING"));
    let serve = async {
        server.read_exact(&mut [0; 4]).await.unwrap();
        server.write_all(b"+PONG\r\n").await.unwrap();
    };
    let (reply, ()) = tokio::join!(reply(&mut link), serve);
    assert_eq!(reply.unwrap(), Value::SimpleString("PONG".into()));
}

/// A link over a connection of redis-rs, what drives that, and the server's side.
async fn pooled() -> (Link, impl Future<Output = ()>, DuplexStream) {
    // What drives the connection borrows it.
    static INFO: LazyLock<RedisConnectionInfo> =
        LazyLock::new(|| RedisConnectionInfo::default().set_skip_set_lib_name());
    let (ours, theirs) = duplex(1 << 10);
    let opened = MultiplexedConnection::new(&INFO, ours).await;
    let (connection, driver) = opened.unwrap();
    (Link::from_pool(connection), driver, theirs)
}

/// Otherwise a pool would hand it out again and again.
#[tokio::test]
async fn pooled_connection_that_was_lost_is_not_idle() {
    let (mut link, driver, _theirs) = pooled().await;
    assert!(link.is_idle());
    drop(driver);
    assert!(link.call(cmd("PING")).await.is_err());
    assert!(!link.is_idle());
}

/// The second may depend on the first: a script that a server has forgotten is loaded before it is called.
#[tokio::test]
async fn pooled_connection_sends_in_order_without_a_poll_in_between() {
    for is_budget_spent in [false, true] {
        let (mut link, driver, mut theirs) = pooled().await;
        tokio::spawn(driver);
        while is_budget_spent && has_budget_remaining() {
            let _ready = spawn(consume_budget()).poll();
        }
        for word in ["ONE", "TWO"] {
            link.send_pipeline(Pipeline::new().cmd(word));
        }
        let mut next = spawn(link.reply());
        assert!(next.poll().is_pending());
        let expected = b"*1\r\n$3\r\nONE\r\n*1\r\n$3\r\nTWO\r\n";
        let mut sent = vec![0; expected.len()];
        theirs.read_exact(&mut sent).await.unwrap();
        assert_eq!(sent, expected, "{:?}", String::from_utf8_lossy(&sent));
    }
}
