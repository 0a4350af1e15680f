//! Links: the connections that a lane sends on.

use std::collections::VecDeque;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::{Pipeline, RedisError, Value};

use crate::node::job::Request;
use crate::node::redis::call::encode_call_into;
use crate::node::redis::describe::describe;
use crate::node::redis::encode::{GenerationCheck, to_redis_command};
use crate::node::redis::socket::Socket;

/// A connection to a server, which answers requests in the order in which they are sent.
pub(super) enum Link {
    /// A socket of the lane's own, to a server that is named by a TCP URL without TLS.
    Own(Socket),
    /// A connection of redis-rs, from the pool.
    Pooled(PooledLink),
}

/// A connection of redis-rs, which drives it in a task of its own.
pub(super) struct PooledLink {
    connection: MultiplexedConnection,
    /// The replies to all unanswered requests, oldest first. Dropping one may keep redis-rs from sending its
    /// requests.
    replies: VecDeque<PooledReply>,
}

type PooledReply = Pin<Box<dyn Future<Output = Result<Vec<Value>, RedisError>> + Send>>;

impl Link {
    pub(super) fn from_pool(connection: MultiplexedConnection) -> Self {
        Self::Pooled(PooledLink {
            connection,
            replies: VecDeque::new(),
        })
    }

    /// Returns whether several requests can share a call.
    pub(super) fn shares_calls(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// Sends calls together, behind all earlier ones. Each has one reply.
    pub(super) fn send<'a, Requests>(
        &mut self,
        calls: impl ExactSizeIterator<Item = Requests>,
        check: &GenerationCheck,
    ) where
        Requests: ExactSizeIterator<Item = &'a Request> + Clone,
    {
        match self {
            Self::Own(socket) => socket.send(calls.len(), |output| {
                calls.for_each(|requests| encode_call_into(requests, check, output));
            }),
            // No two requests share a call.
            Self::Pooled(pooled) => pooled.send(calls.flatten(), check),
        }
    }

    /// Sends a pipeline, behind all earlier requests.
    pub(super) fn send_pipeline(&mut self, pipeline: Pipeline) {
        match self {
            Self::Own(socket) => socket.send(pipeline.len(), |output| {
                output.extend(pipeline.get_packed_pipeline());
            }),
            Self::Pooled(pooled) => pooled.send_pipeline(pipeline),
        }
    }

    /// Appends the replies to the oldest unanswered requests that were sent together, as they arrive; ready when
    /// all of them have. Also writes requests that have not been written yet.
    ///
    /// # Errors
    ///
    /// The connection is lost. Without unanswered requests, only a socket of the lane's own reports that.
    pub(super) fn poll_replies(
        &mut self,
        context: &mut Context<'_>,
        replies: &mut Vec<Value>,
    ) -> Poll<Result<(), Arc<str>>> {
        match self {
            Self::Own(socket) => socket
                .poll_replies(context, replies)
                .map_err(|error| error.to_string().into()),
            Self::Pooled(pooled) => pooled
                .poll_replies(context)
                .map_ok(|values| replies.extend(values))
                .map_err(|error| describe(&error).into()),
        }
    }
}

impl PooledLink {
    fn send<'a>(&mut self, requests: impl Iterator<Item = &'a Request>, check: &GenerationCheck) {
        let mut commands: Vec<_> = requests
            .map(|request| to_redis_command(request, check))
            .collect();
        // By far the most common case, which needs no pipeline.
        if commands.len() == 1
            && let Some(command) = commands.pop()
        {
            let mut connection = self.connection.clone();
            return self.start(async move {
                let value = connection.req_packed_command(command.as_cmd()).await;
                value.map(|value| vec![value])
            });
        }
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            pipeline.add_command(command.into_cmd());
        }
        self.send_pipeline(pipeline);
    }

    fn send_pipeline(&mut self, pipeline: Pipeline) {
        let mut connection = self.connection.clone();
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
        Poll::Ready(values)
    }
}
