//! Connectors: make the connections to one server.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use deadpool::managed::{Manager, Metrics, RecycleError, RecycleResult};
use deadpool_redis::{Connection, Pool};
use futures_util::FutureExt;
use tokio::time::timeout;

use crate::node::redis::address::Address;
use crate::node::redis::describe::{
    describe_auth, describe_panic, describe_pool, describe_refusal,
};
use crate::node::redis::link::Link;
use crate::node::redis::socket::Socket;

/// Makes the connections to one server, and checks them before they are used again.
pub(super) struct Connector {
    pub(super) origin: Origin,
    /// The time limit for connecting.
    pub(super) limit: Duration,
}

/// Where connections come from.
pub(super) enum Origin {
    Address(Arc<Address>),
    /// The user's pool.
    Pool(Pool),
}

impl Manager for Connector {
    type Type = Link;
    type Error = Arc<str>;

    async fn create(&self) -> Result<Link, Arc<str>> {
        within(self.limit, async {
            match &self.origin {
                Origin::Address(address) => greet(address).await,
                Origin::Pool(pool) => take_from(pool).await,
            }
        })
        .await
    }

    /// Takes no round trip: a connection that turns out to be dead is replaced when it is used.
    async fn recycle(&self, link: &mut Link, _: &Metrics) -> RecycleResult<Arc<str>> {
        match link.is_idle() {
            true => Ok(()),
            false => Err(RecycleError::message(
                "it is closed, or a request on it was abandoned",
            )),
        }
    }
}

/// Connects to a server, and logs in.
async fn greet(address: &Address) -> Result<Link, Arc<str>> {
    let stream = address.connect().await;
    let socket = Socket::new(stream.map_err(|error| error.to_string())?);
    let mut link = Link::Own(Box::new(socket));
    let replies = link.exchange(&address.greeting()).await?;
    let has_password = address.settings().password().is_some();
    let (auth, others) = replies.split_at(usize::from(has_password).min(replies.len()));
    let refused = auth.iter().find_map(describe_auth);
    match refused.or_else(|| others.iter().find_map(describe_refusal)) {
        Some(why) => Err(why),
        None => Ok(link),
    }
}

/// Takes a connection out of the user's pool for good: its other users may change the state of a connection, and
/// returning it would cost a round trip at every checkout.
async fn take_from(pool: &Pool) -> Result<Link, Arc<str>> {
    let pooled = pool.get().await;
    let pooled = pooled.map_err(|error| describe_pool(&error))?;
    let mut connection = Connection::take(pooled);
    connection.set_response_timeout(NO_RESPONSE_TIMEOUT);
    Ok(Link::from_pool(connection))
}

/// Bounds the time for opening a connection, and turns its panic into an error.
async fn within<T>(
    limit: Duration,
    opening: impl Future<Output = Result<T, Arc<str>>>,
) -> Result<T, Arc<str>> {
    // Opening a connection runs foreign code that may panic: rustls without a crypto provider, the hooks of a pool.
    // The calling task must survive to report the error. Nothing is observed half-changed: the pool gets back its
    // permit.
    match AssertUnwindSafe(timeout(limit, opening))
        .catch_unwind()
        .await
    {
        Ok(opened) => {
            opened.unwrap_or_else(|_| Err(format!("no connection within {limit:?}").into()))
        }
        Err(panic) => Err(describe_panic(&*panic).into()),
    }
}

/// Longer than any lock lives: the lane detects silence, because it can distinguish a hung server from a slow
/// reply and has to read replies that arrive late.
const NO_RESPONSE_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
