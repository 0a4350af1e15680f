//! The handle of a Redis node.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tracing::field::Empty;
use tracing::trace_span;

use crate::node::failure::NodeFailure;
use crate::node::home::Home;
use crate::node::job::Job;
use crate::node::peers::Peers;
use crate::node::redis::endpoint::Endpoint;
use crate::node::redis::guard::Guard;
use crate::node::redis::lane;
use crate::node::redis::listener::Listener;
use crate::node::redis::reader;
use crate::node::redis::server::{RedisServer, Timeouts};
use crate::node::release_signal::{ReleaseSignal, Subscription};
use crate::node::traits::{Node, NodeState};

/// A Redis server. Connects at first use: a server that is down at start-up is no error.
pub(crate) struct RedisNode {
    server: Arc<RedisServer>,
    /// Subscribes to releases, if the server's address is known.
    listener: Option<Arc<Listener>>,
}

impl RedisNode {
    pub(crate) fn new(
        endpoint: Endpoint,
        timeouts: Timeouts,
        guard: Arc<Guard>,
        home: &Arc<Home>,
    ) -> Self {
        let is_known = endpoint.address().is_some();
        let server = Arc::new(RedisServer::new(endpoint, timeouts, guard, home));
        Self {
            listener: is_known.then(|| Listener::new(&server)),
            server,
        }
    }

    /// Opens the span of a request, within that of its lock, unless it is disabled. Its fields have the names of OpenTelemetry.
    fn open_span(&self, job: &mut Job) {
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

/// Not derived, because most of its state is of no use to a reader of logs.
impl fmt::Debug for RedisNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisNode")
            .field("name", &self.server.name)
            .finish_non_exhaustive()
    }
}

/// Ends the lane once it has sent what it must.
impl Drop for RedisNode {
    fn drop(&mut self) {
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
            job.sender.send(Err(failure));
            return;
        }
        let server = Arc::clone(&self.server);
        self.server.home.spawn(async move {
            reader::read(&server, job).await;
            let pool = server.pool.weak();
            drop(server);
            reader::close_idle(pool).await;
        });
    }

    fn subscribe(
        &self,
        lock: &Arc<[u8]>,
        signal: &Arc<ReleaseSignal>,
        node: usize,
    ) -> Option<Subscription> {
        let listener = self.listener.as_ref()?;
        Some(listener.subscribe(lock, signal, node))
    }

    fn extra_patience(&self) -> Duration {
        match self.server.is_known() {
            false => self.server.timeouts.connect,
            true => Duration::ZERO,
        }
    }

    fn join(&self, peers: &Arc<Peers>) {
        self.server.peers.get_or_init(|| Arc::clone(peers));
    }

    fn state(&self) -> NodeState {
        self.server.state()
    }
}
