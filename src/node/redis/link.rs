//! Links: the connections to a server, whoever made them, and the sockets that one task writes and reads itself.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::{Cmd, Parser, Pipeline, RedisResult, Value, parse_redis_value, pipe};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::task::unconstrained;

use crate::node::redis::describe::{describe, describe_refusal};

/// A connection to a server, which answers requests in the order in which they are sent.
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub struct Link {
    transport: Transport,
    /// The requests that have not been written yet.
    output: BytesMut,
    /// The number of requests without a reply.
    unanswered: usize,
}

enum Transport {
    /// A socket, to a server whose address is known.
    Own(Socket),
    /// A connection of redis-rs, from the user's pool.
    Pooled(PooledLink),
}

#[allow(unreachable_pub, reason = "a fuzz target calls it")]
impl Link {
    /// Takes over a stream on which nothing is in transit.
    pub fn new(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        Self::over(Transport::Own(Socket {
            stream: Box::new(stream),
            input: BytesMut::new(),
            open: Vec::new(),
            length: 0,
        }))
    }

    pub(super) fn from_pool(connection: MultiplexedConnection) -> Self {
        Self::over(Transport::Pooled(PooledLink {
            connection,
            unanswered: VecDeque::new(),
            arrived: VecDeque::new(),
        }))
    }

    fn over(transport: Transport) -> Self {
        Self {
            transport,
            output: BytesMut::new(),
            unanswered: 0,
        }
    }

    /// Appends this many commands as they go over the wire to those that polling for the replies writes. Each has one reply.
    pub(super) fn send(&mut self, commands: usize, write: impl FnOnce(&mut BytesMut)) {
        write(&mut self.output);
        self.unanswered += commands;
    }

    /// Sends a pipeline, behind all earlier requests.
    pub(super) fn send_pipeline(&mut self, pipeline: &Pipeline) {
        self.send(pipeline.len(), |output| {
            output.extend_from_slice(&pipeline.get_packed_pipeline());
        });
    }

    /// Returns the next reply, or what the server sends unasked. Also writes requests that have not been written yet.
    ///
    /// # Errors
    ///
    /// The connection is lost. Without unanswered requests, only a socket reports that.
    pub fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Result<Value, Arc<str>>> {
        let reply = ready!(match &mut self.transport {
            Transport::Own(socket) => {
                let written = socket.write(&mut self.output, context);
                written.map_err(|error| error.to_string())?;
                socket.poll_reply(context)
            }
            Transport::Pooled(pooled) => {
                pooled.write(&mut self.output);
                pooled.poll_reply(context)
            }
        })?;
        // A request that fails stays unanswered: a connection that was lost is not idle.
        self.unanswered = self.unanswered.saturating_sub(1);
        Poll::Ready(Ok(reply))
    }

    /// Waits for the next reply.
    ///
    /// # Errors
    ///
    /// The connection is lost.
    pub(super) async fn reply(&mut self) -> Result<Value, Arc<str>> {
        poll_fn(|context| self.poll_reply(context)).await
    }

    /// Sends commands, and returns the replies, and whether the connection was lost before the last one. A server with too many
    /// connections replies once to a new one, and closes it.
    pub(super) async fn exchange(
        &mut self,
        commands: &Pipeline,
    ) -> (Vec<Value>, Result<(), Arc<str>>) {
        self.send_pipeline(commands);
        let mut replies = Vec::with_capacity(commands.len());
        while replies.len() < commands.len() {
            match self.reply().await {
                Ok(reply) => replies.push(reply),
                Err(why) => return (replies, Err(why)),
            }
        }
        (replies, Ok(()))
    }

    /// Sends commands, and waits for the replies.
    ///
    /// # Errors
    ///
    /// The connection is lost, or the server has refused a command. Usually it refuses all for the same reason, so
    /// the first error is enough.
    pub(super) async fn call_all(&mut self, commands: &Pipeline) -> Result<Vec<Value>, Arc<str>> {
        let (replies, answered) = self.exchange(commands).await;
        match replies.iter().find_map(describe_refusal) {
            Some(refusal) => Err(refusal),
            None => answered.map(|()| replies),
        }
    }

    /// Sends a command, and waits for the reply.
    ///
    /// # Errors
    ///
    /// The connection is lost, or the server has refused the command.
    pub(super) async fn call(&mut self, command: Cmd) -> Result<Value, Arc<str>> {
        let reply = self.call_all(pipe().add_command(command)).await?.pop();
        Ok(reply.unwrap_or(Value::Nil))
    }

    /// Returns whether the connection may be used: no requests are unanswered, and it is not known to be lost.
    pub(super) fn is_idle(&mut self) -> bool {
        self.unanswered == 0 && self.reply().now_or_never().is_none()
    }
}

opaque_debug! { Link }

/// A stream of bytes to a server and back: TCP, TLS or a Unix socket.
trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

/// A connection to a server that one task alone uses.
///
/// # Design
///
/// A connection of redis-rs passes every command through a queue to a task that drives the stream, copies it into
/// a pipeline and the pipeline into a buffer, and passes the replies back in the same way. A lane is such a task
/// already, and a lock on five nodes would pass through two tasks ten times.
///
/// Values and arrays are read here, because the parser of redis-rs starts again with each reply, or owns the bytes if it
/// is to continue one; a number, which is what a request usually gets, then costs it two clearings of a buffer of eight
/// kibibytes and three allocations. It reads the other lines.
struct Socket {
    stream: Box<dyn ByteStream>,
    /// The bytes that were read and not parsed yet.
    input: BytesMut,
    /// The arrays of the reply that is being read, the outermost first, each with the number of its elements.
    open: Vec<(Vec<Value>, usize)>,
    /// The length of what has been parsed of that reply.
    length: usize,
}

impl Socket {
    fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Result<Value, Arc<str>>> {
        loop {
            if let Some(reply) = self.parse()? {
                return Poll::Ready(Ok(reply));
            }
            ready!(self.poll_fill(context))?;
        }
    }

    /// Takes the next reply out of the input, if it is complete. Each element is parsed once, however the reply arrives.
    fn parse(&mut self) -> Result<Option<Value>, Arc<str>> {
        while let Some((mut value, elements, length)) = parse_element(&self.input)? {
            self.input.advance(length);
            self.length += length;
            if elements > 0 {
                if self.open.len() == MAX_DEPTH {
                    return Err(INVALID.into());
                }
                self.open.push((Vec::new(), elements));
                continue;
            }
            // It may be the last element of several arrays.
            loop {
                let Some((parts, elements)) = self.open.last_mut() else {
                    self.length = 0;
                    return Ok(Some(value));
                };
                parts.push(value);
                if parts.len() < *elements {
                    break;
                }
                value = Value::Array(std::mem::take(parts));
                self.open.pop();
            }
        }
        Ok(None)
    }

    /// Reads more bytes from the stream.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Arc<str>>> {
        // Takes back the room of what was parsed, so that the capacity is that of the whole buffer.
        self.input.reserve(ROOM);
        if self.input.is_empty() && self.input.capacity() > MAX_KEPT {
            self.input = BytesMut::with_capacity(ROOM);
        }
        let read = ready!(pin!(self.stream.read_buf(&mut self.input)).poll(context));
        Poll::Ready(match read {
            Ok(0) => Err("the server closed the connection".into()),
            Ok(_) if self.length + self.input.len() > MAX_REPLY => {
                Err("the reply is too long".into())
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string().into()),
        })
    }

    /// Writes as much as the stream accepts. Not by `write_all_buf` of tokio, which clears a list of 64 slices for each piece.
    fn write(&mut self, output: &mut BytesMut, context: &mut Context<'_>) -> io::Result<()> {
        while !output.is_empty() {
            match Pin::new(&mut self.stream).poll_write(context, output)? {
                Poll::Ready(0) => return Err(ErrorKind::WriteZero.into()),
                Poll::Ready(written) if written < output.len() => output.advance(written),
                // Something big has grown it.
                Poll::Ready(_) if output.try_reclaim(MAX_KEPT) => *output = BytesMut::new(),
                // Unlike an advance, leaves the room of what was written.
                Poll::Ready(_) => output.clear(),
                Poll::Pending => return Ok(()),
            }
        }
        // TLS has a buffer of its own.
        match Pin::new(&mut self.stream).poll_flush(context) {
            Poll::Ready(flushed) => flushed,
            Poll::Pending => Ok(()),
        }
    }
}

/// Parses the element at the beginning of a reply: a value, or the head of an array of that many elements. Returns its
/// length too, or `None` until it is complete.
///
/// # Errors
///
/// The bytes are no reply.
fn parse_element(input: &[u8]) -> Result<Option<(Value, usize, usize)>, Arc<str>> {
    let Some(kind) = input.first() else {
        return Ok(None);
    };
    if !b":+-$*".contains(kind) {
        return Err(INVALID.into());
    }
    // A line that is too long is refused however many pieces it arrives in.
    let Some(line) = input.iter().take(MAX_LINE).position(|byte| *byte == b'\n') else {
        return match input.len() <= MAX_LINE {
            true => Ok(None),
            false => Err(INVALID.into()),
        };
    };
    let (line, rest) = input.split_at(line + 1);
    // redis-rs would take a lone line feed for a part of the line, and end the reply elsewhere.
    let content = line[1..].strip_suffix(b"\r\n").ok_or(INVALID)?;
    if matches!(kind, b'+' | b'-') {
        let value = match line {
            b"+OK\r\n" => Value::Okay,
            _ => parse_redis_value(line).map_err(|_| INVALID)?,
        };
        return Ok(Some((value, 0, line.len())));
    }
    let digits = str::from_utf8(content).map_err(|_| INVALID)?;
    let number: i64 = digits.parse().map_err(|_| INVALID)?;
    Ok(match (kind, usize::try_from(number)) {
        (b':', _) => Some((Value::Int(number), 0, line.len())),
        (_, Err(_)) if number < 0 => Some((Value::Nil, 0, line.len())),
        (_, Err(_)) => return Err(INVALID.into()),
        (b'*', Ok(count)) => Some((Value::Array(Vec::new()), count, line.len())),
        // Complete with its end of line.
        (_, Ok(count)) if rest.len() < count.saturating_add(2) => None,
        (_, Ok(count)) => {
            let (bulk, end) = rest.split_at(count);
            if !end.starts_with(b"\r\n") {
                return Err(INVALID.into());
            }
            let length = line.len() + count + 2;
            Some((Value::BulkString(bulk.into()), 0, length))
        }
    })
}

/// A connection of redis-rs, which drives it in a task of its own.
struct PooledLink {
    connection: MultiplexedConnection,
    /// The replies to all unanswered requests, oldest first, of those that were sent together in one. Dropping one may keep
    /// redis-rs from sending its requests.
    unanswered: VecDeque<BoxFuture<'static, RedisResult<Vec<Value>>>>,
    /// The replies that have arrived and were not returned yet.
    arrived: VecDeque<Value>,
}

impl PooledLink {
    /// Sends commands together, behind all earlier ones.
    fn write(&mut self, output: &mut BytesMut) {
        if output.is_empty() {
            return;
        }
        let mut connection = self.connection.clone();
        let pipeline = read_commands(&output.split());
        // The first poll enqueues the commands in redis-rs, so polling in order keeps the order. It would enqueue nothing if
        // the budget of the task were used up.
        let replies = unconstrained(async move {
            let count = pipeline.len();
            connection.req_packed_commands(&pipeline, 0, count).await
        });
        let mut replies = replies.boxed();
        if let Some(values) = (&mut replies).now_or_never() {
            replies = std::future::ready(values).boxed();
        }
        self.unanswered.push_back(replies);
    }

    fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Result<Value, Arc<str>>> {
        while self.arrived.is_empty() {
            let Some(oldest) = self.unanswered.front_mut() else {
                return Poll::Pending;
            };
            let values = ready!(oldest.as_mut().poll(context));
            self.unanswered.pop_front();
            self.arrived = values.map_err(|error| describe(&error))?.into();
        }
        Poll::Ready(Ok(self.arrived.pop_front().unwrap_or(Value::Nil)))
    }
}

/// Reads commands back from the bytes that go over the wire, because connections of redis-rs take no bytes.
fn read_commands(mut bytes: &[u8]) -> Pipeline {
    let (mut parser, mut commands) = (Parser::new(), Pipeline::new());
    while let Ok(Value::Array(arguments)) = parser.parse_value(&mut bytes) {
        let mut command = Cmd::new();
        for argument in arguments {
            if let Value::BulkString(argument) = argument {
                command.arg(argument);
            }
        }
        commands.add_command(command);
    }
    commands
}

const INVALID: &str = "the reply is not RESP2; check that the URL names a Redis server";

/// The maximum length of a line, with its end.
const MAX_LINE: usize = 64 << 10;

/// The depth of nested arrays; the scripts nest two.
const MAX_DEPTH: usize = 8;

/// The maximum length of a reply.
const MAX_REPLY: usize = 65 << 20;

/// The usual room for replies, enough for more than a thousand.
const ROOM: usize = 16 << 10;

/// Buffers of this size or more are freed when they are empty.
const MAX_KEPT: usize = 64 << 10;

#[cfg(test)]
pub(super) mod tests;
