//! The socket: what a lane sends and reads itself.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use deadpool_redis::redis::Value;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::node::redis::reply::read_reply;

/// A connection to a server that nobody shares with the lane.
///
/// # Design
///
/// redis-rs's connection passes every command through a queue to a task that drives the socket, copies it
/// into a pipeline and the pipeline into a buffer, and passes the answers back in the same way. A lane is
/// such a task already, and a lock over five nodes would pass ten times through two of them.
pub(super) struct Socket {
    stream: TcpStream,
    /// What was not written yet, from `written` on.
    output: Vec<u8>,
    written: usize,
    /// What has come in and was not understood yet is from `understood` to `filled`.
    input: Vec<u8>,
    understood: usize,
    filled: usize,
    /// How many replies are expected together, oldest first.
    expected: VecDeque<usize>,
}

impl Socket {
    /// Takes over a connection on which nothing is on its way.
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            output: Vec::new(),
            written: 0,
            input: vec![0; ROOM],
            understood: 0,
            filled: 0,
            expected: VecDeque::new(),
        }
    }

    /// Sends what `write` writes, to which so many replies will come; it goes out when the replies are
    /// polled for.
    pub(super) fn send(&mut self, replies: usize, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.output);
        self.expected.push_back(replies);
    }

    /// Adds the replies to what was sent before all else that was not replied to, as they come; ready when
    /// all of them are there.
    ///
    /// # Errors
    ///
    /// The connection is lost, also if nothing is expected on it.
    pub(super) fn poll_replies(
        &mut self,
        context: &mut Context<'_>,
        replies: &mut Vec<Value>,
    ) -> Poll<Result<()>> {
        self.write(context)?;
        loop {
            if let Some(count) = self.expected.front().copied() {
                self.understand(count, replies)?;
                if replies.len() == count {
                    self.expected.pop_front();
                    return Poll::Ready(Ok(()));
                }
            } else if self.understood < self.filled {
                return Poll::Ready(Err(unreadable("it replied to what was not asked")));
            }
            ready!(self.poll_fill(context))?;
        }
    }

    /// Writes as much as goes.
    fn write(&mut self, context: &mut Context<'_>) -> Result<()> {
        while self.written < self.output.len() {
            let stream = Pin::new(&mut self.stream);
            match stream.poll_write(context, &self.output[self.written..]) {
                Poll::Ready(written) => self.written += written?,
                Poll::Pending => {
                    // Also under a load that never lets it get empty. No more is moved than was written.
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
        // A large record was in it.
        self.output.shrink_to(MAX_KEPT);
        Ok(())
    }

    /// Reads the replies that have come in, until there are `count`.
    fn understand(&mut self, count: usize, replies: &mut Vec<Value>) -> Result<()> {
        while replies.len() < count {
            let read = read_reply(&self.input[self.understood..self.filled]);
            let Some((reply, length)) = read.map_err(unreadable)? else {
                break;
            };
            self.understood += length;
            replies.push(reply);
        }
        Ok(())
    }

    /// Reads more from the stream.
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

    /// Makes room for more input: as much as there usually is, and for a long reply twice what there was.
    fn make_room(&mut self) {
        if self.understood > 0 {
            self.input.copy_within(self.understood..self.filled, 0);
            self.filled -= self.understood;
            self.understood = 0;
        }
        if self.filled == self.input.len() {
            self.input.resize(2 * self.filled, 0);
        } else if self.filled == 0 && self.input.len() > MAX_KEPT {
            self.input = vec![0; ROOM];
        }
    }
}

fn unreadable(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

/// Room for replies: of a thousand jobs and more, as they usually are.
const ROOM: usize = 16 << 10;

/// Beyond this, room is given back once it is not needed.
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
    async fn replies_come_together_with_those_that_were_asked_for_together() {
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
    async fn what_is_much_larger_than_usual_goes_both_ways_and_leaves_no_room_behind() {
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
    async fn what_was_written_is_given_back_while_more_and_more_is_sent() {
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
    async fn an_end_is_noticed_whether_or_not_a_reply_is_expected() {
        for asked in [false, true] {
            let (mut socket, mut server) = connected().await;
            if asked {
                socket.send(1, |output| output.push(b'x'));
                server.write_all(b"$5\r\nhal").await.unwrap();
            }
            drop(server);
            assert!(replies(&mut socket).await.is_err(), "{asked}");
        }
    }

    #[tokio::test]
    async fn what_was_not_asked_for_ends_the_connection() {
        let (mut socket, mut server) = connected().await;
        server.write_all(b"+OK\r\n").await.unwrap();
        let error = replies(&mut socket).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }
}
