//! Connections: where a node is, and how a connection becomes one that may be voted on.

use std::any::Any;
use std::future::Future;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::io::tcp::TcpSettings;
use deadpool_redis::redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, IntoConnectionInfo, ProtocolVersion,
    RedisConnectionInfo, RedisError,
};
use deadpool_redis::{Connection, Manager, Pool, Runtime};
use futures_util::FutureExt;
use futures_util::future::select_ok;
use tokio::io::{copy_bidirectional, duplex};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use crate::node::redis::Shared;
use crate::node::redis::guard::Admission;
use crate::node::redis::link::Link;
use crate::node::redis::scripts;
use crate::node::redis::socket::Socket;

/// One server: its pool, and the name that may be shown.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(crate) name: Arc<str>,
    pub(crate) pool: Pool,
    /// For connections that are not the pool's, if the address is known.
    pub(crate) client: Option<Client>,
}

/// Longer than any lock lives: silence is judged by the lane, which can tell a hung node from a
/// slow answer, and which must still see an answer that comes late.
const NO_RESPONSE_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Makes a pool for a URL. Connects to nothing.
pub(crate) fn pool_for(url: &str, connect_timeout: Duration) -> Result<Endpoint, String> {
    let info = url
        .into_connection_info()
        .map_err(|error| describe(&error))?
        // A release that follows its lock at once would wait for the acknowledgment of that.
        .set_tcp_settings(TcpSettings::default().set_nodelay(true));
    // Host names have no case, and the same server twice must be seen to be that.
    let name = match info.addr() {
        ConnectionAddr::Unix(path) => path.display().to_string(),
        network => network.to_string().to_lowercase(),
    };
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(connect_timeout))
        .set_response_timeout(None);
    let client = Client::open(info.clone()).map_err(|error| describe(&error))?;
    let manager = Manager::new_with_config(info, config).map_err(|error| describe(&error))?;
    let pool = Pool::builder(manager)
        .max_size(CONNECTIONS)
        .runtime(Runtime::Tokio1)
        .build()
        .map_err(|error| error.to_string())?;
    Ok(Endpoint {
        name: name.into(),
        pool,
        client: Some(client),
    })
}

/// Where a server is, and as whom to speak to it.
pub(super) struct Address {
    host: String,
    port: u16,
    settings: RedisConnectionInfo,
}

impl Address {
    /// Finds the address of a server that is reached by TCP alone.
    pub(super) fn of(client: &Client) -> Option<Self> {
        let info = client.get_connection_info();
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return None;
        };
        let settings = info.redis_settings().clone();
        Some(Self {
            host: host.clone(),
            port: *port,
            // In which a lane reads replies.
            settings: settings.set_protocol(ProtocolVersion::RESP2),
        })
    }

    /// Connects to whichever of the host's addresses answers first: another may be out of reach.
    async fn connect(&self) -> io::Result<TcpStream> {
        let found = lookup_host((&*self.host, self.port)).await?;
        let attempts: Vec<_> = found
            .map(|address| Box::pin(TcpStream::connect(address)))
            .collect();
        if attempts.is_empty() {
            let why = "its name has no address";
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        let (stream, _) = select_ok(attempts).await?;
        // A release that follows its lock at once would wait for the acknowledgment of that.
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// A connection that is ready for lock commands.
pub(super) struct Opened {
    pub(super) link: Link,
    /// Whether and when its server may vote, if the restart guard is on.
    pub(super) admission: Option<Admission>,
}

/// Opens a connection and makes it ready for lock commands.
///
/// Everything that a connection must have gone through before it counts happens here, on the very
/// connection that is kept.
pub(super) async fn open(shared: &Shared) -> Result<Opened, Arc<str>> {
    within(shared.timeouts.connect, async {
        match &shared.address {
            Some(address) => open_own(shared, address).await,
            None => {
                let mut connection = take(shared).await?;
                let admission = introduce(shared, &mut connection).await?;
                Ok(Opened {
                    link: Link::pooled(connection),
                    admission,
                })
            }
        }
    })
    .await
}

/// Makes a connection ready.
async fn introduce(
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

/// Opens a connection that redis-rs introduces us on, and that is the lane's alone from then on.
async fn open_own(shared: &Shared, address: &Address) -> Result<Opened, Arc<str>> {
    let failed = |error: io::Error| Arc::<str>::from(error.to_string());
    let mut stream = address.connect().await.map_err(failed)?;
    let (mut near, far) = duplex(INTRODUCTION_BYTES);
    let introduced = async {
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let opened = MultiplexedConnection::new_with_config(&address.settings, far, config).await;
        let (mut connection, driver) = opened.map_err(|error| Arc::from(describe(&error)))?;
        tokio::select! {
            admission = introduce(shared, &mut connection) => admission,
            () = driver => Err("the server closed the connection".into()),
        }
    };
    // All that is asked is answered when it ends, so nothing is left on the way.
    let admission = tokio::select! {
        admission = introduced => admission?,
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

/// Opens a connection on which nothing is asked but what is there.
pub(super) async fn open_to_read(shared: &Shared) -> Result<MultiplexedConnection, Arc<str>> {
    within(shared.timeouts.connect, take(shared)).await
}

/// Takes a connection out of the pool for good: its other users may do to a connection what must not
/// happen to ours, and giving it back would cost a round trip at every check-out.
async fn take(shared: &Shared) -> Result<MultiplexedConnection, Arc<str>> {
    let pooled = shared.pool.get().await;
    let pooled = pooled.map_err(|error| Arc::<str>::from(describe_pool(&error)))?;
    let mut connection = Connection::take(pooled);
    // Our own have none, and so no timer for every request.
    if shared.is_foreign {
        connection.set_response_timeout(NO_RESPONSE_TIMEOUT);
    }
    Ok(connection)
}

/// Bounds the opening of a connection, and makes its panic an error.
pub(super) async fn within<T>(
    limit: Duration,
    opening: impl Future<Output = Result<T, Arc<str>>>,
) -> Result<T, Arc<str>> {
    // Connecting runs code of others: a TLS library without a crypto provider panics, and so may the
    // hooks of a pool. Whoever connects must live on, or those who wait for it would never learn why.
    // Nothing is seen half-changed: the pool takes back its permit, the guard's lock heals.
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

/// Describes an error of redis-rs in one line. Its text has no URL and no credentials.
pub(super) fn describe(error: &RedisError) -> String {
    with_remedy(error.to_string())
}

/// Adds to an error of the server what to do about it, if the node's user lacks a right or something
/// else is kept where something of ours belongs.
///
/// Of a command in a script, servers before 7.2 do not say which it was that they refused.
pub(super) fn with_remedy(why: String) -> String {
    let denied = DENIED.iter().any(|denied| why.contains(denied));
    if denied {
        format!("{why}; its user needs {RIGHTS}, on all keys of the namespace")
    } else if why.contains("WRONGTYPE") {
        format!("{why}; {FOREIGN}")
    } else {
        why
    }
}

fn describe_pool(error: &deadpool_redis::PoolError) -> String {
    match error {
        deadpool_redis::PoolError::Backend(error) => describe(error),
        other => other.to_string(),
    }
}

/// Describes a panic in one line; those of rustls have several.
fn describe_panic(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    let words: Vec<&str> = text.unwrap_or("no message").split_whitespace().collect();
    format!("connecting panicked: {}", words.join(" "))
}

/// How much of an introduction is between redis-rs and the socket at once.
const INTRODUCTION_BYTES: usize = 16 << 10;

/// How many may be opened at once: one to read, and for the lane, if it does not have its own, one that must
/// never wait for the other.
const CONNECTIONS: usize = 2;

/// How a server, or redis-rs for it, says that a user lacks a right; the last two from scripts.
const DENIED: [&str; 4] = [
    "NOPERM",
    "NoPerm",
    "The user executing the script can't",
    "ACL failure in script",
];

/// What helps where a key of ours is somebody else's.
const FOREIGN: &str = "something else is kept where this key has its lock (NAMESPACE:{KEY}), its fence \
    (:fence), its record (:done) or its intent (:intent): delete it there, or choose another namespace";

/// What telling those who wait of a release takes.
pub(super) const TELLING: &str = "+publish +pubsub|numsub +subscribe +unsubscribe, on all channels of the namespace (&NAMESPACE:*)";

/// What is sent to a server, by itself and in scripts.
const RIGHTS: &str = "+evalsha +script|load +info +ping +get +mget +set +del +strlen +getrange +pttl \
    +pexpire +time";
