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
use crate::node::redis::connector::Connector;
use crate::node::redis::decode::decode;
use crate::node::redis::encode::GenerationCheck;
use crate::node::redis::shared::Shared;
use crate::node::telemetry::NodeCalls;
use crate::protocol::message::Reply;

/// Executes one job, which reads a record.
pub(super) async fn read(shared: &Shared, job: Job) {
    let began = Instant::now();
    let outcome = timeout_at(job.useful_until, try_read(shared, &job)).await;
    let late = || NodeFailure::TimedOut {
        node: Arc::clone(&shared.name),
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

async fn try_read(shared: &Shared, job: &Job) -> Result<Reply, NodeFailure> {
    let node = || Arc::clone(&shared.name);
    loop {
        let pooled = shared.pool.get().await;
        let mut link = pooled.map_err(|error| NodeFailure::Unreachable {
            node: node(),
            why: match error {
                PoolError::Backend(why) => why,
                other => other.to_string().into(),
            },
        })?;
        if !job.sender.is_open() {
            return Err(NodeFailure::Unreachable {
                node: node(),
                why: "the caller gave up before the request was sent".into(),
            });
        }
        let sent = Instant::now();
        let request = [&job.request].into_iter();
        link.send([request].into_iter(), &GenerationCheck::default());
        match link.replies().await {
            Ok(replies) => {
                NodeCalls::new(&shared.name, shared.reachability.group())
                    .record(job.request.operation().name, sent.elapsed());
                let [reply] = &*replies else {
                    unreachable!("a single request has a single reply")
                };
                return decode(&job.request, reply, &shared.name);
            }
            Err(why) if Object::metrics(&link).recycle_count == 0 => {
                return Err(NodeFailure::Disconnected { node: node(), why });
            }
            // The server may have closed an idle connection, which is no outage. The pool drops it.
            Err(_) => {}
        }
    }
}

/// How long an idle connection is kept.
const MAX_IDLE: Duration = Duration::from_secs(10);
