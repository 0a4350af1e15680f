//! The reader: whole records, read on a connection of their own, so that no lock waits behind a body.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, sleep, timeout_at};

use crate::node::job::Job;
use crate::node::redis::Shared;
use crate::node::redis::connection::{describe, open_to_read};
use crate::node::redis::decode::answer;
use crate::node::redis::encode::{Passport, wire};
use crate::node::{NodeFailure, telemetry};
use crate::protocol::message::Reply;

/// Reads whole records from one server.
///
/// # Design
///
/// A record is read by one `GET`. For a mebibyte that keeps the server from others for a tenth of a
/// millisecond, where a script that answers it takes two; it is sent in pieces, between which others are
/// served. In several `GETRANGE`s it would be as many round trips, and not surely all of one record.
///
/// The connection does not go back to the pool: checking it out again would take a round trip and further
/// rights, and if it is a dead one by then, the lane might be given it at the time when it looks for a live
/// one.
#[derive(Debug)]
pub(super) struct Reader {
    /// How many are read at once: so many bodies the server has waiting for us at most.
    places: Semaphore,
    /// There until it has not been used for a while; its keeper has it.
    link: Mutex<Weak<Link>>,
}

struct Link {
    connection: MultiplexedConnection,
    /// Since its keeper looked last.
    used: AtomicBool,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self {
            places: Semaphore::new(PLACES),
            link: Mutex::default(),
        }
    }

    /// Carries out one job.
    pub(super) async fn run(&self, shared: &Shared, job: Job) {
        let began = Instant::now();
        let mut link = None;
        let reading = self.read(shared, &job, &mut link);
        let outcome = timeout_at(job.useful_until, reading).await;
        let is_late = outcome.is_err();
        let late = || NodeFailure::TimedOut {
            node: Arc::clone(&shared.name),
            after: began.elapsed(),
        };
        job.sender.send(outcome.unwrap_or_else(|_| Err(late())));
        if is_late && let Some(link) = &link {
            self.forget(link).await;
        }
    }

    async fn read(
        &self,
        shared: &Shared,
        job: &Job,
        link: &mut Option<Arc<Link>>,
    ) -> Result<Reply, NodeFailure> {
        let node = || Arc::clone(&shared.name);
        let over = |why: &str| NodeFailure::Unreachable {
            node: node(),
            why: why.into(),
        };
        // It is never closed; nobody waits for what could not be read then.
        let place = self.places.acquire().await;
        let _place = place.map_err(|_| over("the reader is closed"))?;
        if !job.sender.is_open() {
            return Err(over("the request was over before it could be sent"));
        }
        loop {
            let (current, is_new) = self.link(shared).await?;
            let current = link.insert(current);
            let sent = Instant::now();
            let mut connection = current.connection.clone();
            let command = wire(&job.request, &Passport::default());
            match connection.req_packed_command(command.as_cmd()).await {
                Ok(value) => {
                    telemetry::NodeCalls::of(&shared.name).took(job.request.name(), sent.elapsed());
                    return answer(&job.request, &value, &shared.name);
                }
                Err(error) if is_new => {
                    let why = describe(&error).into();
                    self.forget(current).await;
                    return Err(NodeFailure::Disconnected { node: node(), why });
                }
                // That the server closed an idle connection is no outage.
                Err(_) => self.forget(current).await,
            }
        }
    }

    /// Returns the connection, and whether it was opened for this.
    async fn link(&self, shared: &Shared) -> Result<(Arc<Link>, bool), NodeFailure> {
        let mut kept = self.link.lock().await;
        if let Some(link) = kept.upgrade() {
            link.used.store(true, Ordering::Relaxed);
            return Ok((link, false));
        }
        let connection = open_to_read(shared).await;
        let connection = connection.map_err(|why| NodeFailure::Unreachable {
            node: Arc::clone(&shared.name),
            why,
        })?;
        let link = Arc::new(Link {
            connection,
            used: AtomicBool::new(true),
        });
        *kept = Arc::downgrade(&link);
        tokio::spawn(keep(Arc::clone(&link)));
        Ok((link, true))
    }

    /// Opens another connection next time.
    async fn forget(&self, link: &Arc<Link>) {
        let mut kept = self.link.lock().await;
        if kept.ptr_eq(&Arc::downgrade(link)) {
            *kept = Weak::new();
        }
        link.used.store(false, Ordering::Relaxed);
    }
}

/// Keeps a connection until it has not been used for a while.
async fn keep(link: Arc<Link>) {
    while link.used.swap(false, Ordering::Relaxed) {
        sleep(KEPT).await;
    }
}

/// How many bodies are read from one server at once.
const PLACES: usize = 4;

/// How long a connection is kept that nobody uses, and up to twice that.
const KEPT: Duration = Duration::from_secs(10);
