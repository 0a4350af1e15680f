//! Endpoints: where a server is, and how to connect to it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::redis::io::tcp::TcpSettings;
use deadpool_redis::redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, IntoConnectionInfo, ProtocolVersion,
    RedisConnectionInfo,
};
use deadpool_redis::{Manager, Pool, Runtime};
use futures_util::future::select_ok;
use tokio::net::{TcpStream, lookup_host};

use crate::node::redis::describe::describe;

/// One server: its pool, and the name to show.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(crate) name: Arc<str>,
    pub(crate) pool: Pool,
    /// For connections outside the pool, if the address is known.
    pub(crate) client: Option<Client>,
}

/// Creates the pool of a URL, without connecting.
pub(crate) fn pool_for(url: &str, connect_timeout: Duration) -> Result<Endpoint, String> {
    let info = url
        .into_connection_info()
        .map_err(|error| describe(&error))?
        // Otherwise a release right behind its lock would wait for the acknowledgment of that.
        .set_tcp_settings(TcpSettings::default().set_nodelay(true));
    // Host names are case-insensitive, and a server that is listed twice must be recognised.
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
        .max_size(MAX_CONNECTIONS)
        .runtime(Runtime::Tokio1)
        .build()
        .map_err(|error| error.to_string())?;
    Ok(Endpoint {
        name: name.into(),
        pool,
        client: Some(client),
    })
}

/// The address of a server that is reached by plain TCP, and the credentials for it.
pub(super) struct Address {
    host: String,
    port: u16,
    pub(super) settings: RedisConnectionInfo,
}

impl Address {
    /// Returns the address of a client's server, if it is reached by plain TCP.
    pub(super) fn from_client(client: &Client) -> Option<Self> {
        let info = client.get_connection_info();
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return None;
        };
        let settings = info.redis_settings().clone();
        Some(Self {
            host: host.clone(),
            port: *port,
            // The protocol that the lane's own socket reads.
            settings: settings.set_protocol(ProtocolVersion::RESP2),
        })
    }

    /// Connects to all addresses of the host at once and returns the first connection: others may be unreachable.
    pub(super) async fn connect(&self) -> io::Result<TcpStream> {
        let found = lookup_host((&*self.host, self.port)).await?;
        let attempts: Vec<_> = found
            .map(|address| Box::pin(TcpStream::connect(address)))
            .collect();
        if attempts.is_empty() {
            let why = "the host name has no address";
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        let (stream, _) = select_ok(attempts).await?;
        // Otherwise a release right behind its lock would wait for the acknowledgment of that.
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// The connections of a pool that may be opened at once: one for reading records, and one for a lane without a
/// socket of its own, which must never wait for the other.
const MAX_CONNECTIONS: usize = 2;
