//! The link: the connection that a lane sends on.

use std::collections::VecDeque;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::{Pipeline, RedisError, Value};

use crate::node::job::Request;
use crate::node::redis::connection::describe;
use crate::node::redis::encode::{Passport, pack, wire};
use crate::node::redis::socket::Socket;

/// A connection to a server on which requests are answered in the order in which they are sent.
pub(super) enum Link {
    /// The lane's own, to a server that is named by a TCP URL without TLS.
    Own(Socket),
    /// One of redis-rs, from the pool.
    Pooled(Pooled),
}

pub(super) struct Pooled {
    connection: MultiplexedConnection,
    /// Oldest first, which is the order of the answers. Dropping one may keep redis-rs from sending what
    /// was asked.
    answers: VecDeque<Answer>,
}

type Answer = Pin<Box<dyn Future<Output = Result<Vec<Value>, RedisError>> + Send>>;

impl Link {
    pub(super) fn pooled(connection: MultiplexedConnection) -> Self {
        Self::Pooled(Pooled {
            connection,
            answers: VecDeque::new(),
        })
    }

    /// Sends requests together, behind all that were sent before.
    pub(super) fn send<'a>(
        &mut self,
        requests: impl ExactSizeIterator<Item = &'a Request>,
        passport: &Passport,
    ) {
        match self {
            Self::Own(socket) => socket.send(requests.len(), |output| {
                requests.for_each(|request| pack(request, passport, output));
            }),
            Self::Pooled(pooled) => pooled.send(requests, passport),
        }
    }

    /// Sends a pipeline, behind all that was sent before.
    pub(super) fn send_pipeline(&mut self, pipeline: Pipeline) {
        match self {
            Self::Own(socket) => socket.send(pipeline.len(), |output| {
                output.extend(pipeline.get_packed_pipeline());
            }),
            Self::Pooled(pooled) => pooled.send_pipeline(pipeline),
        }
    }

    /// Adds the answers to what was sent first of what is not answered, as they come; ready when all of
    /// them are there. Also sends, if not all went out at once.
    ///
    /// # Errors
    ///
    /// The connection is lost, which an own one says also if nothing was asked on it.
    pub(super) fn poll_answers(
        &mut self,
        context: &mut Context<'_>,
        answers: &mut Vec<Value>,
    ) -> Poll<Result<(), Arc<str>>> {
        match self {
            Self::Own(socket) => socket
                .poll_replies(context, answers)
                .map_err(|error| error.to_string().into()),
            Self::Pooled(pooled) => pooled
                .poll_answers(context)
                .map_ok(|values| answers.extend(values))
                .map_err(|error| describe(&error).into()),
        }
    }
}

impl Pooled {
    fn send<'a>(
        &mut self,
        mut requests: impl ExactSizeIterator<Item = &'a Request>,
        passport: &Passport,
    ) {
        if requests.len() == 1 {
            // By far the most common case, which needs no pipeline.
            if let Some(request) = requests.next() {
                let command = wire(request, passport);
                let mut connection = self.connection.clone();
                self.put_out(async move {
                    let value = connection.req_packed_command(command.as_cmd()).await;
                    value.map(|value| vec![value])
                });
            }
            return;
        }
        let mut pipeline = Pipeline::with_capacity(requests.len());
        for request in requests {
            pipeline.add_command(wire(request, passport).into_cmd());
        }
        self.send_pipeline(pipeline);
    }

    fn send_pipeline(&mut self, pipeline: Pipeline) {
        let mut connection = self.connection.clone();
        self.put_out(async move {
            let count = pipeline.len();
            connection.req_packed_commands(&pipeline, 0, count).await
        });
    }

    fn put_out(
        &mut self,
        values: impl Future<Output = Result<Vec<Value>, RedisError>> + Send + 'static,
    ) {
        let mut answer: Answer = Box::pin(values);
        // The first poll takes the place in redis-rs's queue; polling in order keeps the order. The oldest
        // is polled next anyway.
        let mut context = Context::from_waker(Waker::noop());
        if !self.answers.is_empty()
            && let Poll::Ready(values) = answer.as_mut().poll(&mut context)
        {
            answer = Box::pin(ready(values));
        }
        self.answers.push_back(answer);
    }

    fn poll_answers(&mut self, context: &mut Context<'_>) -> Poll<Result<Vec<Value>, RedisError>> {
        let Some(oldest) = self.answers.front_mut() else {
            return Poll::Pending;
        };
        let values = std::task::ready!(oldest.as_mut().poll(context));
        self.answers.pop_front();
        Poll::Ready(values)
    }
}
