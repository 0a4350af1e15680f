//! The handle of a Redis node, and its reads of whole records on separate connections, so that no lock waits behind a body.
//!
//! # Design
//!
//! A record is read by one `GET`. For a mebibyte, that blocks the server for a tenth of a millisecond, where a script
//! takes two; the server sends it in pieces and serves other clients in between. Several `GETRANGE`s would take as
//! many round trips and might read parts of different records.
//!
//! Each read has a connection of the pool to itself, whose size limits the reads at once. Idle connections are closed
//! after a while.

use std::sync::Arc;
use std::time::Duration;

use deadpool::managed::{Object, PoolError};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::field::Empty;
use tracing::level_filters::LevelFilter;
use tracing::trace_span;

use crate::node::failure::NodeFailure;
use crate::node::job::Job;
use crate::node::redis::decode::decode;
use crate::node::redis::lane;
use crate::node::redis::listener;
use crate::node::redis::server::RedisServer;
use crate::node::redis::table::{GenerationCheck, encode_call_into};
use crate::node::release_signal::{Subscriber, Subscription};
use crate::node::telemetry::NodeCalls;
use crate::node::traits::{Node, NodeState};
use crate::protocol::message::Reply;

/// A Redis server. Connects at first use: a server that is down at start-up is no error.
pub(crate) struct RedisNode {
    server: Arc<RedisServer>,
}

impl RedisNode {
    pub(crate) fn new(server: RedisServer) -> Self {
        Self {
            server: Arc::new(server),
        }
    }

    /// Opens the span of a request, within that of its lock, unless it is disabled. Its fields have the names of OpenTelemetry.
    fn open_span(&self, job: &mut Job) {
        // With its feature `log`, which axum enables, tracing computes the fields also without a subscriber.
        if LevelFilter::current() < LevelFilter::TRACE {
            return;
        }
        let host_and_port = || {
            let (host, port) = self.server.name.rsplit_once(':')?;
            Some((host, port.parse::<u16>().ok()?))
        };
        let span = trace_span!(
            "redlock.node",
            otel.kind = "client",
            otel.status_code = Empty,
            db.system.name = "redis",
            db.operation.name = job.operation().name,
            server.address = host_and_port().map_or(&*self.server.name, |(host, _)| host),
            server.port = host_and_port().map(|(_, port)| port),
        );
        if !span.is_disabled() {
            job.sender.set_span(span);
        }
    }
}

opaque_debug! { RedisNode [name = server.name] }

/// Ends the listener, and the lane once it has sent what it must.
impl Drop for RedisNode {
    fn drop(&mut self) {
        *self.server.listener.lock() = mpsc::unbounded_channel().0;
        self.server.inbox.close();
    }
}

impl Node for RedisNode {
    fn name(&self) -> &Arc<str> {
        &self.server.name
    }

    fn submit(&self, mut job: Job) {
        self.open_span(&mut job);
        // A request to a node that is down does not even wake the lane. A release does: its acquisition may have
        // reached the server.
        let job = match self.server.failure() {
            Some(failure) => match job.despite(&failure) {
                Ok(job) => job,
                Err(job) => return job.sender.send(Err(failure)),
            },
            None => job,
        };
        match self.server.inbox.post(job) {
            Ok(false) => {}
            Ok(true) => lane::spawn(&self.server),
            Err(job) => job.sender.send(Err(self.server.unreachable(
                "too many requests are queued for it; it is slower than the requests",
            ))),
        }
    }

    fn fetch(&self, mut job: Job) {
        self.open_span(&mut job);
        if let Some(failure @ NodeFailure::Unreachable { .. }) = self.server.failure() {
            return job.sender.send(Err(failure));
        }
        let server = Arc::clone(&self.server);
        self.server.home.spawn(async move {
            let began = Instant::now();
            let outcome = timeout_at(job.useful_until, read(&server, &job)).await;
            let late = |_| {
                let (node, after) = (Arc::clone(&server.name), began.elapsed());
                Err(NodeFailure::TimedOut { node, after })
            };
            job.sender.send(outcome.unwrap_or_else(late));
            let pool = server.pool.weak();
            drop(server);
            // Closes the connections that are not used meanwhile.
            sleep(MAX_IDLE).await;
            if let Some(pool) = pool.upgrade() {
                pool.retain(|_, metrics| metrics.last_used() < MAX_IDLE);
            }
        });
    }

    fn subscribe(&self, lock: &Arc<[u8]>, subscriber: Subscriber) -> Option<Subscription> {
        // Only to a server whose address is known.
        self.server.pool.manager().address()?;
        Some(listener::subscribe(&self.server, lock, subscriber))
    }

    fn extra_patience(&self) -> Duration {
        match self.server.is_known() {
            false => self.server.timeouts.connect,
            true => Duration::ZERO,
        }
    }

    fn state(&self) -> NodeState {
        self.server.state()
    }
}

/// Executes one job, which reads a record.
async fn read(server: &RedisServer, job: &Job) -> Result<Reply, NodeFailure> {
    loop {
        let pooled = server.pool.get().await;
        let mut link = pooled.map_err(|error| match error {
            PoolError::Backend(why) => server.unreachable(why),
            other => server.unreachable(other.to_string()),
        })?;
        if !job.sender.is_open() {
            return Err(server.given_up());
        }
        let sent = Instant::now();
        let check = GenerationCheck::default();
        let commands = [job.encoded(&check)].into_iter();
        link.send(1, |output| encode_call_into(commands, &check, output));
        match link.reply().await {
            Ok(reply) => {
                let now = Instant::now();
                NodeCalls::new(&server.name, server.group()).record(
                    job.operation().name,
                    now - sent,
                    now,
                );
                return decode(&job.packet.command, &reply, &server.name);
            }
            Err(why) if Object::metrics(&link).recycle_count == 0 => {
                return Err(server.disconnected(&why));
            }
            // The server may have closed an idle connection, which is no outage. The pool drops it.
            Err(_) => {}
        }
    }
}

/// How long an idle connection is kept.
const MAX_IDLE: Duration = Duration::from_secs(10);
