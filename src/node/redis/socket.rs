//! Sockets: connections that a lane writes and reads itself.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use deadpool_redis::redis::Value;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::node::redis::reply::read_reply;

/// A connection to a server that the lane alone uses.
///
/// # Design
///
/// A connection of redis-rs passes every command through a queue to a task that drives the socket, copies it into
/// a pipeline and the pipeline into a buffer, and passes the replies back in the same way. A lane is such a task
/// already, and a lock on five nodes would pass through two tasks ten times.
pub(super) struct Socket {
    stream: TcpStream,
    /// The bytes to write, from `written` on.
    output: Vec<u8>,
    written: usize,
    /// The bytes that were read and not parsed yet, from `parsed` to `filled`.
    input: Vec<u8>,
    parsed: usize,
    filled: usize,
    /// The number of replies to each group of requests, oldest first.
    expected: VecDeque<usize>,
}

impl Socket {
    /// Takes over a connection on which nothing is in transit.
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            output: Vec::new(),
            written: 0,
            input: vec![0; ROOM],
            parsed: 0,
            filled: 0,
            expected: VecDeque::new(),
        }
    }

    /// Appends requests with this many replies to the output, which polling for the replies writes.
    pub(super) fn send(&mut self, replies: usize, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.output);
        self.expected.push_back(replies);
    }

    /// Appends the replies to the oldest unanswered group of requests, as they arrive; ready when all of them have.
    ///
    /// # Errors
    ///
    /// The connection is lost. That is also reported if no reply is expected.
    pub(super) fn poll_replies(
        &mut self,
        context: &mut Context<'_>,
        replies: &mut Vec<Value>,
    ) -> Poll<Result<()>> {
        self.write(context)?;
        loop {
            if let Some(count) = self.expected.front().copied() {
                self.parse(count, replies)?;
                if replies.len() == count {
                    self.expected.pop_front();
                    return Poll::Ready(Ok(()));
                }
            } else if self.parsed < self.filled {
                return Poll::Ready(Err(invalid("the server sent a reply without a request")));
            }
            ready!(self.poll_fill(context))?;
        }
    }

    /// Writes as much as the socket accepts.
    fn write(&mut self, context: &mut Context<'_>) -> Result<()> {
        while self.written < self.output.len() {
            let stream = Pin::new(&mut self.stream);
            match stream.poll_write(context, &self.output[self.written..]) {
                Poll::Ready(written) => self.written += written?,
                Poll::Pending => {
                    // Frees what was written also under a load that never empties the buffer. Never moves more
                    // bytes than were written.
                    if self.written >= MAX_KEPT && 2 * self.written >= self.output.len() {
                        self.output.drain(..self.written);
                        self.written = 0;
                    }
                    return Ok(());
                }
            }
        }
        self.written = 0;
        self.output.clear();
        // A big record may have grown it.
        self.output.shrink_to(MAX_KEPT);
        Ok(())
    }

    /// Parses replies that were read, until there are `count`.
    fn parse(&mut self, count: usize, replies: &mut Vec<Value>) -> Result<()> {
        while replies.len() < count {
            let read = read_reply(&self.input[self.parsed..self.filled]);
            let Some((reply, length)) = read.map_err(invalid)? else {
                break;
            };
            self.parsed += length;
            replies.push(reply);
        }
        Ok(())
    }

    /// Reads more bytes from the stream.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.make_room();
        let mut room = ReadBuf::new(&mut self.input[self.filled..]);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut room))?;
        let count = room.filled().len();
        self.filled += count;
        if count == 0 {
            let why = "the server closed the connection";
            return Poll::Ready(Err(Error::new(ErrorKind::UnexpectedEof, why)));
        }
        Poll::Ready(Ok(()))
    }

    /// Makes room for more input: the usual room, or for a long reply twice the previous one.
    fn make_room(&mut self) {
        if self.parsed > 0 {
            self.input.copy_within(self.parsed..self.filled, 0);
            self.filled -= self.parsed;
            self.parsed = 0;
        }
        if self.filled == self.input.len() {
            self.input.resize(2 * self.filled, 0);
        } else if self.filled == 0 && self.input.len() > MAX_KEPT {
            self.input = vec![0; ROOM];
        }
    }
}

fn invalid(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

/// The usual room for replies, enough for more than a thousand.
const ROOM: usize = 16 << 10;

/// Buffers larger than this are freed once they are not needed.
const MAX_KEPT: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn connected() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, server) = tokio::join!(client, listener.accept());
        (Socket::new(client.unwrap()), server.unwrap().0)
    }

    async fn replies(socket: &mut Socket) -> Result<Vec<Value>> {
        let mut replies = Vec::new();
        poll_fn(|context| socket.poll_replies(context, &mut replies)).await?;
        Ok(replies)
    }

    #[tokio::test]
    async fn poll_replies_returns_the_replies_of_one_group_together() {
        let (mut socket, mut server) = connected().await;
        socket.send(2, |output| output.extend(b"ab"));
        socket.send(1, |output| output.extend(b"c"));
        let serve = async {
            let mut asked = [0; 3];
            server.read_exact(&mut asked).await.unwrap();
            assert_eq!(&asked, b"abc");
            for piece in [&b":1\r"[..], b"\n:2", b"\r\n:3\r\n"] {
                server.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
        };
        let (first, ()) = tokio::join!(replies(&mut socket), serve);
        assert_eq!(first.unwrap(), [Value::Int(1), Value::Int(2)]);
        assert_eq!(replies(&mut socket).await.unwrap(), [Value::Int(3)]);
    }

    #[tokio::test]
    async fn buffers_shrink_after_a_big_request_and_a_big_reply() {
        let (mut socket, mut server) = connected().await;
        let size = 40 * MAX_KEPT;
        socket.send(1, |output| output.resize(size, b'x'));
        let serve = async {
            let mut asked = vec![0; size];
            server.read_exact(&mut asked).await.unwrap();
            let head = format!("${size}\r\n");
            server.write_all(head.as_bytes()).await.unwrap();
            server.write_all(&asked).await.unwrap();
            server.write_all(b"\r\n").await.unwrap();
        };
        let (reply, ()) = tokio::join!(replies(&mut socket), serve);
        assert_eq!(reply.unwrap(), [Value::BulkString(vec![b'x'; size])]);
        socket.send(1, |output| output.push(b'y'));
        server.write_all(b"+OK\r\n").await.unwrap();
        assert_eq!(replies(&mut socket).await.unwrap(), [Value::Okay]);
        assert_eq!(socket.input.len(), ROOM);
        assert!(socket.output.capacity() <= MAX_KEPT);
    }

    #[tokio::test]
    async fn written_output_is_freed_while_the_buffer_never_empties() {
        const PIECE: usize = 1 << 20;
        let (mut socket, mut server) = connected().await;
        let (mut replies, mut read) = (Vec::new(), vec![0; PIECE]);
        let mut context = Context::from_waker(std::task::Waker::noop());
        // More than the kernel takes, so that there is always something left to write.
        for _ in 0..16 {
            socket.send(1, |output| output.resize(output.len() + PIECE, b'x'));
        }
        for _ in 0..100 {
            let mut come = 0;
            while come < PIECE {
                assert!(socket.poll_replies(&mut context, &mut replies).is_pending());
                come += server.read(&mut read[..PIECE - come]).await.unwrap();
            }
            server.write_all(b":1\r\n").await.unwrap();
            poll_fn(|context| socket.poll_replies(context, &mut replies))
                .await
                .unwrap();
            replies.clear();
            socket.send(1, |output| output.resize(output.len() + PIECE, b'x'));
            assert!(socket.output.len() <= 40 * PIECE);
        }
    }

    #[tokio::test]
    async fn poll_replies_fails_at_the_end_of_the_stream_with_and_without_requests() {
        for is_asked in [false, true] {
            let (mut socket, mut server) = connected().await;
            if is_asked {
                socket.send(1, |output| output.push(b'x'));
                server.write_all(b"$5\r\nhal").await.unwrap();
            }
            drop(server);
            assert!(replies(&mut socket).await.is_err(), "{is_asked}");
        }
    }

    #[tokio::test]
    async fn poll_replies_fails_on_a_reply_without_a_request() {
        let (mut socket, mut server) = connected().await;
        server.write_all(b"+OK\r\n").await.unwrap();
        let error = replies(&mut socket).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }
}
