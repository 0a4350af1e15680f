//! The reader: reads whole records on a separate connection, so that no lock waits behind a body.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, sleep, timeout_at};

use crate::node::failure::NodeFailure;
use crate::node::job::Job;
use crate::node::redis::connect::open_to_read;
use crate::node::redis::decode::decode;
use crate::node::redis::describe::describe;
use crate::node::redis::encode::{GenerationCheck, to_redis_command};
use crate::node::redis::shared::Shared;
use crate::node::telemetry::NodeCalls;
use crate::protocol::message::Reply;

/// Reads whole records from one server.
///
/// # Design
///
/// A record is read by one `GET`. For a mebibyte, that blocks the server for a tenth of a millisecond, where a script
/// takes two; the server sends it in pieces and serves other clients in between. Several `GETRANGE`s would take as
/// many round trips and might read parts of different records.
///
/// The connection does not return to the pool: checking it out again would take a round trip and more permissions,
/// and the lane might check out a dead one just when it needs a live one.
#[derive(Debug)]
pub(super) struct Reader {
    /// Limits the records that are read at once, and so the replies that the server buffers.
    permits: Semaphore,
    /// The connection. A task of its own keeps it alive until it has been idle for a while.
    connection: Mutex<Weak<ReadConnection>>,
}

struct ReadConnection {
    redis: MultiplexedConnection,
    /// Whether it was used since the last check of the task that keeps it.
    is_used: AtomicBool,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self {
            permits: Semaphore::new(MAX_READS),
            connection: Mutex::default(),
        }
    }

    /// Executes one job.
    pub(super) async fn run(&self, shared: &Shared, job: Job) {
        let began = Instant::now();
        let mut connection = None;
        let reading = self.read(shared, &job, &mut connection);
        let outcome = timeout_at(job.useful_until, reading).await;
        let is_late = outcome.is_err();
        let late = || NodeFailure::TimedOut {
            node: Arc::clone(&shared.name),
            after: began.elapsed(),
        };
        job.sender.send(outcome.unwrap_or_else(|_| Err(late())));
        if is_late && let Some(connection) = &connection {
            self.forget(connection).await;
        }
    }

    async fn read(
        &self,
        shared: &Shared,
        job: &Job,
        connection: &mut Option<Arc<ReadConnection>>,
    ) -> Result<Reply, NodeFailure> {
        let node = || Arc::clone(&shared.name);
        let over = |why: &str| NodeFailure::Unreachable {
            node: node(),
            why: why.into(),
        };
        // The semaphore is never closed.
        let permit = self.permits.acquire().await;
        let _permit = permit.map_err(|_| over("the reader is closed"))?;
        if !job.sender.is_open() {
            return Err(over("the caller gave up before the request was sent"));
        }
        loop {
            let (current, is_new) = self.connection(shared).await?;
            let current = connection.insert(current);
            let sent = Instant::now();
            let mut redis = current.redis.clone();
            let command = to_redis_command(&job.request, &GenerationCheck::default());
            match redis.req_packed_command(command.as_cmd()).await {
                Ok(value) => {
                    NodeCalls::new(&shared.name).record(job.request.name(), sent.elapsed());
                    return decode(&job.request, &value, &shared.name);
                }
                Err(error) if is_new => {
                    let why = describe(&error).into();
                    self.forget(current).await;
                    return Err(NodeFailure::Disconnected { node: node(), why });
                }
                // The server may have closed an idle connection, which is no outage.
                Err(_) => self.forget(current).await,
            }
        }
    }

    /// Returns the connection, and whether it is a new one.
    async fn connection(
        &self,
        shared: &Shared,
    ) -> Result<(Arc<ReadConnection>, bool), NodeFailure> {
        let mut kept = self.connection.lock().await;
        if let Some(connection) = kept.upgrade() {
            connection.is_used.store(true, Ordering::Relaxed);
            return Ok((connection, false));
        }
        let redis = open_to_read(shared).await;
        let redis = redis.map_err(|why| NodeFailure::Unreachable {
            node: Arc::clone(&shared.name),
            why,
        })?;
        let connection = Arc::new(ReadConnection {
            redis,
            is_used: AtomicBool::new(true),
        });
        *kept = Arc::downgrade(&connection);
        tokio::spawn(keep(Arc::clone(&connection)));
        Ok((connection, true))
    }

    /// Forgets the connection, so that the next read opens another one.
    async fn forget(&self, connection: &Arc<ReadConnection>) {
        let mut kept = self.connection.lock().await;
        if kept.ptr_eq(&Arc::downgrade(connection)) {
            *kept = Weak::new();
        }
        connection.is_used.store(false, Ordering::Relaxed);
    }
}

/// Keeps a connection until it has been idle for a while.
async fn keep(connection: Arc<ReadConnection>) {
    while connection.is_used.swap(false, Ordering::Relaxed) {
        sleep(MIN_IDLE).await;
    }
}

/// The number of records that are read from one server at once.
const MAX_READS: usize = 4;

/// How long an idle connection is kept at least; twice as long at most.
const MIN_IDLE: Duration = Duration::from_secs(10);
