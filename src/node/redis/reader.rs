//! The reader: reads whole records on separate connections, so that no lock waits behind a body.
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

use deadpool::managed::{Object, PoolError, WeakPool};
use tokio::time::{Instant, sleep, timeout_at};

use crate::node::failure::NodeFailure;
use crate::node::job::Job;
use crate::node::redis::decode::decode;
use crate::node::redis::endpoint::Connector;
use crate::node::redis::server::RedisServer;
use crate::node::redis::table::{GenerationCheck, encode_call_into};
use crate::node::telemetry::NodeCalls;
use crate::protocol::message::Reply;

/// Executes one job, which reads a record.
pub(super) async fn read(server: &RedisServer, job: Job) {
    let began = Instant::now();
    let outcome = timeout_at(job.useful_until, try_read(server, &job)).await;
    let late = || NodeFailure::TimedOut {
        node: Arc::clone(&server.name),
        after: began.elapsed(),
    };
    job.sender.send(outcome.unwrap_or_else(|_| Err(late())));
}

/// Waits for a while, and closes the connections that were not used meanwhile.
pub(super) async fn close_idle(pool: WeakPool<Connector>) {
    sleep(MAX_IDLE).await;
    if let Some(pool) = pool.upgrade() {
        pool.retain(|_, metrics| metrics.last_used() < MAX_IDLE);
    }
}

async fn try_read(server: &RedisServer, job: &Job) -> Result<Reply, NodeFailure> {
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
                NodeCalls::new(&server.name, server.group())
                    .record(job.operation().name, sent.elapsed());
                return decode(job, &reply, &server.name);
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
