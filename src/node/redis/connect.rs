//! Opening connections: everything that a connection goes through before the server's votes on it count.

use std::future::Future;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::Connection;
use deadpool_redis::redis::AsyncConnectionConfig;
use deadpool_redis::redis::aio::MultiplexedConnection;
use futures_util::FutureExt;
use tokio::io::{copy_bidirectional, duplex};
use tokio::time::timeout;

use crate::node::redis::describe::{describe, describe_panic, describe_pool};
use crate::node::redis::endpoint::Address;
use crate::node::redis::guard::Admission;
use crate::node::redis::link::Link;
use crate::node::redis::scripts;
use crate::node::redis::shared::Shared;
use crate::node::redis::socket::Socket;

/// A connection that is ready for lock commands.
pub(super) struct Opened {
    pub(super) link: Link,
    /// Whether and when its server may vote, if the restart guard is on.
    pub(super) admission: Option<Admission>,
}

/// Opens a connection and prepares it for lock commands, on the very connection that is kept.
pub(super) async fn open(shared: &Shared) -> Result<Opened, Arc<str>> {
    within(shared.timeouts.connect, async {
        match &shared.address {
            Some(address) => open_socket(shared, address).await,
            None => {
                let mut connection = take_from_pool(shared).await?;
                let admission = prepare(shared, &mut connection).await?;
                Ok(Opened {
                    link: Link::from_pool(connection),
                    admission,
                })
            }
        }
    })
    .await
}

/// Opens a connection for reading records.
pub(super) async fn open_to_read(shared: &Shared) -> Result<MultiplexedConnection, Arc<str>> {
    within(shared.timeouts.connect, take_from_pool(shared)).await
}

/// Opens a socket: redis-rs performs the handshake, then the lane alone uses it.
async fn open_socket(shared: &Shared, address: &Address) -> Result<Opened, Arc<str>> {
    let failed = |error: io::Error| Arc::<str>::from(error.to_string());
    let mut stream = address.connect().await.map_err(failed)?;
    let (mut near, far) = duplex(HANDSHAKE_BYTES);
    let handshake = async {
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let opened = MultiplexedConnection::new_with_config(&address.settings, far, config).await;
        let (mut connection, driver) = opened.map_err(|error| Arc::from(describe(&error)))?;
        tokio::select! {
            admission = prepare(shared, &mut connection) => admission,
            () = driver => Err("the server closed the connection".into()),
        }
    };
    // The handshake ends with the reply to its last request, so no bytes are left in between.
    let admission = tokio::select! {
        admission = handshake => admission?,
        copied = copy_bidirectional(&mut stream, &mut near) => {
            copied.map_err(failed)?;
            return Err("the server closed the connection".into());
        }
    };
    Ok(Opened {
        link: Link::Own(Socket::new(stream)),
        admission,
    })
}

/// Loads the scripts and asks for the admission of the server.
async fn prepare(
    shared: &Shared,
    connection: &mut MultiplexedConnection,
) -> Result<Option<Admission>, Arc<str>> {
    scripts::load(connection)
        .await
        .map_err(|error| Arc::<str>::from(describe(&error)))?;
    match &shared.guard {
        Some(guard) => {
            let attempt = shared.timeouts.connect + shared.timeouts.node;
            let admission = guard.admit(&shared.name, connection, attempt);
            admission.await.map(Some)
        }
        None => Ok(None),
    }
}

/// Takes a connection out of the pool for good: its other users may change the state of a connection, and
/// returning it would cost a round trip at every checkout.
async fn take_from_pool(shared: &Shared) -> Result<MultiplexedConnection, Arc<str>> {
    let pooled = shared.pool.get().await;
    let pooled = pooled.map_err(|error| Arc::<str>::from(describe_pool(&error)))?;
    let mut connection = Connection::take(pooled);
    // Connections of our own pools have no response timeout, which saves a timer for every request.
    if shared.is_foreign {
        connection.set_response_timeout(NO_RESPONSE_TIMEOUT);
    }
    Ok(connection)
}

/// Bounds the time for opening a connection, and turns its panic into an error.
pub(super) async fn within<T>(
    limit: Duration,
    opening: impl Future<Output = Result<T, Arc<str>>>,
) -> Result<T, Arc<str>> {
    // Opening a connection runs foreign code that may panic: a TLS library without a crypto provider, the hooks of
    // a pool. The calling task must survive to report the error. Nothing is observed half-changed: the pool gets
    // back its permit, and the guard's mutex ignores poisoning.
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

/// The buffer between redis-rs and the socket during the handshake.
const HANDSHAKE_BYTES: usize = 16 << 10;
