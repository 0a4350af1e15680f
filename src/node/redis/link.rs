//! Links: the connections to a server, whoever made them.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::{Cmd, Parser, Pipeline, RedisError, Value};
use tokio::task::unconstrained;

use crate::node::redis::describe::{describe, describe_refusal};
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
    /// The replies to all unanswered requests, oldest first, of those that were sent together in one. Dropping one may keep
    /// redis-rs from sending its requests.
    unanswered: VecDeque<PooledReplies>,
    /// The replies that have arrived and were not returned yet.
    arrived: VecDeque<Value>,
    /// Whether a request has failed.
    is_lost: bool,
}

type PooledReplies = Pin<Box<dyn Future<Output = Result<Vec<Value>, RedisError>> + Send>>;

impl Link {
    pub(super) fn from_pool(connection: MultiplexedConnection) -> Self {
        Self::Pooled(PooledLink {
            connection,
            unanswered: VecDeque::new(),
            arrived: VecDeque::new(),
            is_lost: false,
        })
    }

    /// Sends this many commands together as they go over the wire, behind all earlier ones. Each has one reply.
    pub(super) fn send(&mut self, commands: usize, write: impl FnOnce(&mut Vec<u8>)) {
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
        self.send(pipeline.len(), |output| {
            output.extend(pipeline.get_packed_pipeline());
        });
    }

    /// Returns the next reply. Also writes requests that have not been written yet.
    ///
    /// # Errors
    ///
    /// The connection is lost. Without unanswered requests, only a socket reports that.
    pub(super) fn poll_reply(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Value, Arc<str>>> {
        match self {
            Self::Own(socket) => socket.poll_reply(context),
            Self::Pooled(pooled) => pooled.poll_reply(context),
        }
    }

    /// Waits for the next reply.
    ///
    /// # Errors
    ///
    /// The connection is lost.
    pub(super) async fn reply(&mut self) -> Result<Value, Arc<str>> {
        poll_fn(|context| self.poll_reply(context)).await
    }

    /// Sends commands, and waits for the replies.
    ///
    /// # Errors
    ///
    /// The connection is lost.
    pub(super) async fn exchange(&mut self, commands: &Pipeline) -> Result<Vec<Value>, Arc<str>> {
        self.send_pipeline(commands);
        let mut replies = Vec::with_capacity(commands.len());
        while replies.len() < commands.len() {
            replies.push(self.reply().await?);
        }
        Ok(replies)
    }

    /// Sends commands, and waits for the replies.
    ///
    /// # Errors
    ///
    /// The connection is lost, or the server has refused a command. Usually it refuses all for the same reason, so
    /// the first error is enough.
    pub(super) async fn call_all(&mut self, commands: &Pipeline) -> Result<Vec<Value>, Arc<str>> {
        let replies = self.exchange(commands).await?;
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
            Self::Pooled(pooled) => {
                pooled.is_lost || !(pooled.unanswered.is_empty() && pooled.arrived.is_empty())
            }
        };
        let mut context = Context::from_waker(Waker::noop());
        !is_unusable && self.poll_reply(&mut context).is_pending()
    }
}

impl PooledLink {
    /// Sends commands together, behind all earlier ones.
    fn send(&mut self, bytes: &[u8]) {
        let mut connection = self.connection.clone();
        let pipeline = read_commands(bytes);
        // The first poll enqueues the commands in redis-rs, so polling in order keeps the order. It would enqueue nothing if
        // the budget of the task were used up.
        let mut replies: PooledReplies = Box::pin(unconstrained(async move {
            let count = pipeline.len();
            connection.req_packed_commands(&pipeline, 0, count).await
        }));
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(values) = replies.as_mut().poll(&mut context) {
            replies = Box::pin(std::future::ready(values));
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
            self.is_lost |= values.is_err();
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

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use deadpool_redis::redis::{RedisConnectionInfo, cmd};
    use tokio::io::{AsyncReadExt, DuplexStream, duplex};
    use tokio::task::coop::{consume_budget, has_budget_remaining};
    use tokio_test::task::spawn;

    use super::*;

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
}
