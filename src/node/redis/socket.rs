//! Sockets: connections that one task writes and reads itself.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use deadpool_redis::redis::{self, Parser, RedisError, Value};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::node::redis::describe::describe;

/// A stream of bytes to a server and back: TCP, TLS or a Unix socket.
pub(super) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

/// A connection to a server that one task alone uses.
///
/// # Design
///
/// A connection of redis-rs passes every command through a queue to a task that drives the stream, copies it into
/// a pipeline and the pipeline into a buffer, and passes the replies back in the same way. A lane is such a task
/// already, and a lock on five nodes would pass through two tasks ten times. Only the parser is that of redis-rs.
pub(super) struct Socket {
    stream: Box<dyn ByteStream>,
    /// The bytes to write, from `written` on.
    output: Vec<u8>,
    written: usize,
    /// Keeps incomplete replies, and replies behind the last one that was taken.
    parser: Parser,
    /// The number of bytes that were read since the last reply.
    read: usize,
    /// Whether a long reply has grown the parser's buffer.
    is_grown: bool,
    /// The number of replies to each group of requests, oldest first.
    expected: VecDeque<usize>,
}

/// The stream, as the parser reads it.
struct Input<'a, 'b> {
    stream: &'a mut dyn ByteStream,
    context: &'a mut Context<'b>,
    read: &'a mut usize,
    /// Whether there are no more bytes yet.
    is_pending: bool,
}

impl Socket {
    /// Takes over a stream on which nothing is in transit.
    pub(super) fn new(stream: Box<dyn ByteStream>) -> Self {
        Self {
            stream,
            output: Vec::new(),
            written: 0,
            parser: Parser::new(),
            read: 0,
            is_grown: false,
            expected: VecDeque::new(),
        }
    }

    /// Appends requests with this many replies to the output, which polling for the replies writes.
    pub(super) fn send(&mut self, replies: usize, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.output);
        self.expected.push_back(replies);
    }

    /// Returns whether requests are unanswered.
    pub(super) fn is_waiting(&self) -> bool {
        !self.expected.is_empty()
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
    ) -> Poll<Result<(), Arc<str>>> {
        if let Err(error) = self.write(context) {
            return Poll::Ready(Err(error.to_string().into()));
        }
        while self.expected.front() != Some(&replies.len()) {
            let mut input = Input {
                stream: &mut *self.stream,
                context,
                read: &mut self.read,
                is_pending: false,
            };
            match self.parser.parse_value(&mut input) {
                Ok(_) if self.expected.is_empty() => {
                    return Poll::Ready(Err("the server sent a reply without a request".into()));
                }
                Ok(reply) => replies.push(reply),
                // The parser continues where it stopped.
                Err(_) if input.is_pending => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(describe_lost(&error).into())),
            }
            self.is_grown |= self.read > MAX_KEPT;
            self.read = 0;
        }
        self.expected.pop_front();
        // Nothing is left in the parser then.
        if self.is_grown && self.expected.is_empty() {
            self.is_grown = false;
            self.parser = Parser::new();
        }
        Poll::Ready(Ok(()))
    }

    /// Writes as much as the stream accepts.
    fn write(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        while self.written < self.output.len() {
            let stream = Pin::new(&mut self.stream);
            match stream.poll_write(context, &self.output[self.written..]) {
                Poll::Ready(Ok(0)) => return Err(ErrorKind::WriteZero.into()),
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
        // TLS has a buffer of its own.
        match Pin::new(&mut self.stream).poll_flush(context) {
            Poll::Ready(flushed) => flushed,
            Poll::Pending => Ok(()),
        }
    }
}

impl Read for Input<'_, '_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let mut room = ReadBuf::new(room);
        match Pin::new(&mut *self.stream).poll_read(self.context, &mut room) {
            Poll::Ready(read) => read?,
            Poll::Pending => {
                self.is_pending = true;
                return Err(ErrorKind::WouldBlock.into());
            }
        }
        let count = room.filled().len();
        *self.read += count;
        if count == 0 {
            let why = "the server closed the connection";
            return Err(io::Error::new(ErrorKind::UnexpectedEof, why));
        }
        if *self.read > MAX_REPLY {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                "the reply is too long",
            ));
        }
        Ok(count)
    }
}

/// Describes why a connection is lost.
fn describe_lost(error: &RedisError) -> String {
    match error.kind() {
        redis::ErrorKind::Parse => {
            "the reply is not RESP2; check that the URL names a Redis server".into()
        }
        _ => describe(error),
    }
}

/// The length of a reply. The parser bounds the depth of arrays; nothing else in a reply takes more memory than a
/// multiple of its bytes.
const MAX_REPLY: usize = 65 << 20;

/// Buffers larger than this are freed once they are not needed.
const MAX_KEPT: usize = 64 << 10;

#[cfg(test)]
mod tests;
