//! Links: the connections to a server, whoever made them.

use std::collections::VecDeque;
use std::future::{Future, poll_fn, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::{Cmd, Parser, Pipeline, RedisError, Value};

use crate::node::job::Request;
use crate::node::redis::describe::{describe, describe_refusal};
use crate::node::redis::encode::{GenerationCheck, encode_call_into};
use crate::node::redis::socket::Socket;

/// A connection to a server, which answers requests in the order in which they are sent.
pub(super) enum Link {
    /// A socket, to a server whose address is known.
    Own(Box<Socket>),
    /// A connection of redis-rs, from the user's pool.
    Pooled(PooledLink),
}

/// A connection of redis-rs, which drives it in a task of its own.
pub(super) struct PooledLink {
    connection: MultiplexedConnection,
    /// The replies to all unanswered requests, oldest first. Dropping one may keep redis-rs from sending its
    /// requests.
    replies: VecDeque<PooledReply>,
    /// Whether a request has failed.
    is_lost: bool,
}

type PooledReply = Pin<Box<dyn Future<Output = Result<Vec<Value>, RedisError>> + Send>>;

impl Link {
    pub(super) fn from_pool(connection: MultiplexedConnection) -> Self {
        Self::Pooled(PooledLink {
            connection,
            replies: VecDeque::new(),
            is_lost: false,
        })
    }

    /// Sends calls together, behind all earlier ones. Each has one reply.
    pub(super) fn send<'a, Requests>(
        &mut self,
        calls: impl ExactSizeIterator<Item = Requests>,
        check: &GenerationCheck,
    ) where
        Requests: ExactSizeIterator<Item = &'a Request> + Clone,
    {
        self.send_bytes(calls.len(), |output| {
            for requests in calls {
                let commands = requests.map(|request| request.encoded(check));
                encode_call_into(commands, check, output);
            }
        });
    }

    /// Sends this many commands together as they go over the wire, behind all earlier ones.
    fn send_bytes(&mut self, commands: usize, write: impl FnOnce(&mut Vec<u8>)) {
        match self {
            Self::Own(socket) => socket.send(commands, write),
            Self::Pooled(pooled) => {
                let mut bytes = Vec::new();
                write(&mut bytes);
                pooled.send(&bytes);
            }
        }
    }

    /// Sends a pipeline, behind all earlier requests.
    pub(super) fn send_pipeline(&mut self, pipeline: &Pipeline) {
        self.send_bytes(pipeline.len(), |output| {
            output.extend(pipeline.get_packed_pipeline());
        });
    }

    /// Appends the replies to the oldest unanswered requests that were sent together, as they arrive; ready when
    /// all of them have. Also writes requests that have not been written yet.
    ///
    /// # Errors
    ///
    /// The connection is lost. Without unanswered requests, only a socket reports that.
    pub(super) fn poll_replies(
        &mut self,
        context: &mut Context<'_>,
        replies: &mut Vec<Value>,
    ) -> Poll<Result<(), Arc<str>>> {
        match self {
            Self::Own(socket) => socket.poll_replies(context, replies),
            Self::Pooled(pooled) => pooled
                .poll_replies(context)
                .map_ok(|values| replies.extend(values))
                .map_err(|error| describe(&error).into()),
        }
    }

    /// Waits for the replies to the oldest unanswered requests that were sent together.
    ///
    /// # Errors
    ///
    /// The connection is lost.
    pub(super) async fn replies(&mut self) -> Result<Vec<Value>, Arc<str>> {
        let mut replies = Vec::new();
        poll_fn(|context| self.poll_replies(context, &mut replies)).await?;
        Ok(replies)
    }

    /// Sends commands, and waits for the replies.
    ///
    /// # Errors
    ///
    /// The connection is lost, or the server has refused a command. Usually it refuses all for the same reason, so
    /// the first error is enough.
    pub(super) async fn call_all(&mut self, commands: &Pipeline) -> Result<Vec<Value>, Arc<str>> {
        self.send_pipeline(commands);
        let replies = self.replies().await?;
        match replies.iter().find_map(describe_refusal) {
            Some(refusal) => Err(refusal),
            None => Ok(replies),
        }
    }

    /// Sends a command, and waits for the reply.
    ///
    /// # Errors
    ///
    /// The connection is lost, or the server has refused the command.
    pub(super) async fn call(&mut self, command: Cmd) -> Result<Value, Arc<str>> {
        let mut commands = Pipeline::new();
        commands.add_command(command);
        let reply = self.call_all(&commands).await?.pop();
        Ok(reply.unwrap_or(Value::Nil))
    }

    /// Returns whether the connection may be used: no requests are unanswered, and it is not known to be lost.
    pub(super) fn is_idle(&mut self) -> bool {
        let is_unusable = match self {
            Self::Own(socket) => socket.is_waiting(),
            Self::Pooled(pooled) => pooled.is_lost || !pooled.replies.is_empty(),
        };
        let mut context = Context::from_waker(Waker::noop());
        !is_unusable
            && self
                .poll_replies(&mut context, &mut Vec::new())
                .is_pending()
    }
}

impl PooledLink {
    /// Sends commands together, behind all earlier ones.
    fn send(&mut self, bytes: &[u8]) {
        let mut connection = self.connection.clone();
        let mut commands = read_commands(bytes);
        // By far the most common case, which needs no pipeline.
        if commands.len() == 1
            && let Some(command) = commands.pop()
        {
            return self.start(async move {
                let value = connection.req_packed_command(&command).await;
                value.map(|value| vec![value])
            });
        }
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            pipeline.add_command(command);
        }
        self.start(async move {
            let count = pipeline.len();
            connection.req_packed_commands(&pipeline, 0, count).await
        });
    }

    /// Starts a request behind all earlier ones.
    fn start(
        &mut self,
        values: impl Future<Output = Result<Vec<Value>, RedisError>> + Send + 'static,
    ) {
        let mut reply: PooledReply = Box::pin(values);
        // The first poll enqueues the request in redis-rs, so polling in order keeps the order. The oldest is
        // polled next anyway.
        let mut context = Context::from_waker(Waker::noop());
        if !self.replies.is_empty()
            && let Poll::Ready(values) = reply.as_mut().poll(&mut context)
        {
            reply = Box::pin(ready(values));
        }
        self.replies.push_back(reply);
    }

    fn poll_replies(&mut self, context: &mut Context<'_>) -> Poll<Result<Vec<Value>, RedisError>> {
        let Some(oldest) = self.replies.front_mut() else {
            return Poll::Pending;
        };
        let values = std::task::ready!(oldest.as_mut().poll(context));
        self.replies.pop_front();
        self.is_lost |= values.is_err();
        Poll::Ready(values)
    }
}

/// Reads commands back from the bytes that go over the wire, because connections of redis-rs take no bytes.
fn read_commands(mut bytes: &[u8]) -> Vec<Cmd> {
    let (mut parser, mut commands) = (Parser::new(), Vec::new());
    while let Ok(Value::Array(arguments)) = parser.parse_value(&mut bytes) {
        let mut command = Cmd::new();
        for argument in arguments {
            if let Value::BulkString(argument) = argument {
                command.arg(argument);
            }
        }
        commands.push(command);
    }
    commands
}

#[cfg(test)]
mod tests {
    use deadpool_redis::redis::{RedisConnectionInfo, cmd};
    use tokio::io::duplex;

    use super::*;

    /// Otherwise a pool would hand it out again and again.
    #[tokio::test]
    async fn pooled_connection_that_was_lost_is_not_idle() {
        let info = RedisConnectionInfo::default().set_skip_set_lib_name();
        let (ours, _theirs) = duplex(1 << 10);
        let opened = MultiplexedConnection::new(&info, ours).await;
        let (connection, driver) = opened.unwrap();
        let mut link = Link::from_pool(connection);
        assert!(link.is_idle());
        drop(driver);
        assert!(link.call(cmd("PING")).await.is_err());
        assert!(!link.is_idle());
    }
}
