//! Sockets: connections that one task writes and reads itself.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

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
    /// The bytes that were read and not parsed yet, from `parsed` to `filled`.
    input: Box<[u8]>,
    parsed: usize,
    filled: usize,
    /// Has a buffer of its own, for incomplete replies and for replies behind the last one.
    parser: Parser,
    /// Whether the parser may have another reply without more bytes.
    is_parsing: bool,
    /// The number of bytes that were read since the last reply.
    read: usize,
    /// Whether a long reply has grown the parser's buffer.
    is_grown: bool,
    /// The number of replies to each group of requests, oldest first.
    expected: VecDeque<usize>,
}

/// The bytes that were read and not parsed yet.
struct Unparsed<'a> {
    bytes: &'a [u8],
    /// Whether the parser needs more.
    is_short: bool,
}

impl Socket {
    /// Takes over a stream on which nothing is in transit.
    pub(super) fn new(stream: Box<dyn ByteStream>) -> Self {
        Self {
            stream,
            output: Vec::new(),
            written: 0,
            input: vec![0; ROOM].into(),
            parsed: 0,
            filled: 0,
            parser: Parser::new(),
            is_parsing: false,
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
            match self.parse() {
                Ok(Some(_)) if self.expected.is_empty() => {
                    return Poll::Ready(Err("the server sent a reply without a request".into()));
                }
                Ok(Some(reply)) => replies.push(reply),
                Ok(None) => {
                    let filled = ready!(self.poll_fill(context));
                    if let Err(error) = filled {
                        return Poll::Ready(Err(error.to_string().into()));
                    }
                }
                Err(error) => return Poll::Ready(Err(describe_invalid(&error).into())),
            }
        }
        self.expected.pop_front();
        // Nothing is left in the parser then.
        if self.is_grown && self.expected.is_empty() {
            self.is_grown = false;
            self.parser = Parser::new();
        }
        Poll::Ready(Ok(()))
    }

    /// Parses the next reply, if all of it was read.
    fn parse(&mut self) -> Result<Option<Value>, RedisError> {
        // The parser starts over nowhere, but it takes time to find out that there are no bytes.
        if !self.is_parsing {
            return Ok(None);
        }
        let mut unparsed = Unparsed {
            bytes: &self.input[self.parsed..self.filled],
            is_short: false,
        };
        let reply = self.parser.parse_value(&mut unparsed);
        self.parsed = self.filled - unparsed.bytes.len();
        match reply {
            Err(_) if unparsed.is_short => {
                self.is_parsing = false;
                Ok(None)
            }
            reply => {
                self.is_grown |= self.read > MAX_KEPT;
                self.read = 0;
                reply.map(Some)
            }
        }
    }

    /// Reads more bytes from the stream, once all that were read are parsed.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut room = ReadBuf::new(&mut self.input);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut room))?;
        (self.parsed, self.filled) = (0, room.filled().len());
        self.is_parsing = true;
        self.read += self.filled;
        let lost = |kind, why| Poll::Ready(Err(io::Error::new(kind, why)));
        if self.filled == 0 {
            return lost(ErrorKind::UnexpectedEof, "the server closed the connection");
        }
        if self.read > MAX_REPLY {
            return lost(ErrorKind::InvalidData, "the reply is too long");
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

impl Read for Unparsed<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.is_short = self.bytes.is_empty();
        match self.is_short {
            true => Err(ErrorKind::WouldBlock.into()),
            false => self.bytes.read(room),
        }
    }
}

/// Describes why bytes are no reply.
fn describe_invalid(error: &RedisError) -> String {
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

/// The usual room for replies, enough for more than a thousand.
const ROOM: usize = 16 << 10;

/// Buffers larger than this are freed once they are not needed.
const MAX_KEPT: usize = 64 << 10;

#[cfg(test)]
pub(super) mod tests;
