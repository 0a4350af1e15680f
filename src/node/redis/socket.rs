//! Sockets: connections that one task writes and reads itself.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use deadpool_redis::redis::Value;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::node::redis::reply::{ReplyEnd, parse_reply};

/// A stream of bytes to a server and back: TCP, TLS or a Unix socket.
pub(super) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

/// A connection to a server that one task alone uses.
///
/// # Design
///
/// A connection of redis-rs passes every command through a queue to a task that drives the stream, copies it into
/// a pipeline and the pipeline into a buffer, and passes the replies back in the same way. A lane is such a task
/// already, and a lock on five nodes would pass through two tasks ten times. Replies are parsed by redis-rs.
pub(super) struct Socket {
    stream: Box<dyn ByteStream>,
    /// The bytes to write, from `written` on.
    output: Vec<u8>,
    written: usize,
    /// The bytes that were read and not parsed yet, from `parsed` to `filled`.
    input: Vec<u8>,
    parsed: usize,
    filled: usize,
    /// The end of the reply that is being read.
    end: ReplyEnd,
    /// The number of replies to each group of requests, oldest first.
    expected: VecDeque<usize>,
}

impl Socket {
    /// Takes over a stream on which nothing is in transit.
    pub(super) fn new(stream: Box<dyn ByteStream>) -> Self {
        Self {
            stream,
            output: Vec::new(),
            written: 0,
            input: vec![0; ROOM],
            parsed: 0,
            filled: 0,
            end: ReplyEnd::default(),
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
            if self.expected.is_empty() && self.parsed < self.filled {
                return Poll::Ready(Err("the server sent a reply without a request".into()));
            }
            match self.parse()? {
                Some(reply) => replies.push(reply),
                None => ready!(self.poll_fill(context)).map_err(|error| error.to_string())?,
            }
        }
        self.expected.pop_front();
        Poll::Ready(Ok(()))
    }

    /// Appends commands to the output, on a connection whose replies are read one by one.
    pub(super) fn write_unanswered(&mut self, commands: &[u8]) {
        self.output.extend(commands);
    }

    /// Returns the next reply, or what the server sends unasked.
    ///
    /// # Errors
    ///
    /// The connection is lost.
    pub(super) fn poll_reply(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Value, Arc<str>>> {
        self.write(context).map_err(|error| error.to_string())?;
        loop {
            if let Some(reply) = self.parse()? {
                return Poll::Ready(Ok(reply));
            }
            ready!(self.poll_fill(context)).map_err(|error| error.to_string())?;
        }
    }

    /// Takes the next reply out of the input, if it is complete.
    fn parse(&mut self) -> Result<Option<Value>, Arc<str>> {
        let unparsed = &self.input[self.parsed..self.filled];
        let Some(length) = self.end.find(unparsed)? else {
            return Ok(None);
        };
        let reply = parse_reply(&unparsed[..length])?;
        self.parsed += length;
        Ok(Some(reply))
    }

    /// Reads more bytes from the stream.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.make_room();
        let mut room = ReadBuf::new(&mut self.input[self.filled..]);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut room))?;
        let count = room.filled().len();
        self.filled += count;
        let lost = |kind, why| Poll::Ready(Err(io::Error::new(kind, why)));
        if count == 0 {
            return lost(ErrorKind::UnexpectedEof, "the server closed the connection");
        }
        if self.filled > MAX_REPLY {
            return lost(ErrorKind::InvalidData, "the reply is too long");
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

/// The maximum length of a reply.
const MAX_REPLY: usize = 65 << 20;

/// The usual room for replies, enough for more than a thousand.
const ROOM: usize = 16 << 10;

/// Buffers larger than this are freed when the next request or reply does not need them.
const MAX_KEPT: usize = 64 << 10;

#[cfg(test)]
pub(super) mod tests;
