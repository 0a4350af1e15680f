//! Endpoints: make the connections to one server, from a URL, the configuration of a pool, or a pool.

use std::io;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use deadpool::managed::{
    Manager, Metrics, Pool, PoolConfig, PoolError, RecycleError, RecycleResult,
};
use deadpool_redis::redis::{
    ConnectionAddr, IntoConnectionInfo, Pipeline, ProtocolVersion, RedisConnectionInfo,
};
use deadpool_redis::{Config, Connection, Runtime};
use futures_util::FutureExt;
use futures_util::future::select_ok;
use tokio::net::{TcpStream, lookup_host};

use crate::node::redis::credentials::Login;
use crate::node::redis::describe::{
    describe, describe_auth, describe_panic, describe_refusal, describe_url, is_wrong_login,
};
use crate::node::redis::link::Link;

/// One server: its connections, and the name to show.
pub(crate) struct Endpoint {
    pub(crate) name: Arc<str>,
    pub(super) pool: Pool<Connector>,
}

/// Makes the connections to one server, and checks them before they are used again. Connecting takes any time; its callers
/// have limits of their own.
pub(super) enum Connector {
    Address(Address),
    /// Takes connections out of the user's pool.
    Pool(deadpool_redis::Pool),
}

impl Endpoint {
    /// Creates the endpoint of a pool's configuration, without connecting.
    ///
    /// # Errors
    ///
    /// Returns the reason if the configuration names no server or several, if its URL is malformed, or if its pool cannot be
    /// built.
    pub(crate) fn from_config(config: &Config, login: Option<Login>) -> Result<Self, String> {
        let pool = config.pool.unwrap_or_else(|| PoolConfig::new(MAX_READS));
        if pool.max_size == 0 {
            return Err("its max_size is 0; use at least 1".into());
        }
        let info = match (&config.url, &config.connection) {
            (Some(url), None) => url.as_str().into_connection_info(),
            (None, Some(connection)) => connection.clone().into_connection_info(),
            (Some(_), Some(_)) => {
                return Err("it has both url and connection; leave one out".into());
            }
            (None, None) => return Err("it names no server; set url or connection".into()),
        };
        let info = info.map_err(|error| describe_url(&error))?;
        let name: Arc<str> = name_of(info.addr())?.into();
        let address = Address {
            name: Arc::clone(&name),
            server: info.addr().clone(),
            // Requests are sent in RESP2.
            settings: info
                .redis_settings()
                .clone()
                .set_protocol(ProtocolVersion::RESP2),
            login,
        };
        Self::new(name, Connector::Address(address), pool)
    }

    /// Creates the endpoint of a user's pool.
    ///
    /// # Errors
    ///
    /// Returns the reason if deadpool refuses the pool of the connections that are taken out of it.
    pub(crate) fn from_pool(name: &str, pool: deadpool_redis::Pool) -> Result<Self, String> {
        let connector = Connector::Pool(pool);
        Self::new(name.into(), connector, PoolConfig::new(MAX_READS))
    }

    /// Returns what tells the node from others: each database of a server is a node of its own.
    pub(crate) fn identity(&self) -> String {
        let address = self.pool.manager().address();
        let database = address.map_or(0, |address| address.settings.db());
        format!("{}/{database}", self.name)
    }

    fn new(name: Arc<str>, connector: Connector, config: PoolConfig) -> Result<Self, String> {
        let builder = Pool::builder(connector).config(config);
        let pool = builder.runtime(Runtime::Tokio1).build();
        let pool = pool.map_err(|error| error.to_string())?;
        Ok(Self { name, pool })
    }
}

impl Connector {
    /// Returns the address of the server, if it is known.
    pub(super) fn address(&self) -> Option<&Address> {
        match self {
            Self::Address(address) => Some(address),
            Self::Pool(_) => None,
        }
    }

    /// Returns for how long a connection may wait for its credentials.
    pub(super) fn login_limit(&self) -> Duration {
        let login = self.address().and_then(|address| address.login.as_ref());
        login.map_or(Duration::ZERO, |(_, limit)| *limit)
    }
}

impl Manager for Connector {
    type Type = Link;
    type Error = Arc<str>;

    async fn create(&self) -> Result<Link, Arc<str>> {
        let opening = async {
            match self {
                Self::Address(address) => address.open().await,
                Self::Pool(pool) => {
                    let pooled = pool.get().await;
                    let pooled = pooled.map_err(|error| match error {
                        PoolError::Backend(error) => describe(&error),
                        other => other.to_string(),
                    })?;
                    // For good: its other users may change the state of a connection, and returning it would cost a
                    // round trip at every checkout.
                    let mut connection = Connection::take(pooled);
                    connection.set_response_timeout(NO_RESPONSE_TIMEOUT);
                    Ok(Link::from_pool(connection))
                }
            }
        };
        // Opening a connection runs foreign code that may panic: rustls without a crypto provider, the hooks of a pool.
        // The calling task must survive to report the error. Nothing is observed half-changed: the pool gets back its
        // permit.
        let opened = AssertUnwindSafe(opening).catch_unwind().await;
        opened.unwrap_or_else(|panic| Err(describe_panic(&*panic).into()))
    }

    /// Takes no round trip: a connection that turns out to be dead is replaced when it is used.
    async fn recycle(&self, link: &mut Link, _: &Metrics) -> RecycleResult<Arc<str>> {
        let unusable = RecycleError::message("it is closed, or a request on it was abandoned");
        link.is_idle().then_some(()).ok_or(unusable)
    }
}

/// The address of a server and the credentials for it.
#[derive(Debug)]
pub(super) struct Address {
    name: Arc<str>,
    server: ConnectionAddr,
    settings: RedisConnectionInfo,
    /// Who is asked for the credentials of each connection, if they are not those of the settings.
    login: Option<Login>,
}

impl Address {
    /// Connects to the server, and logs in. If the server refuses the credentials of a provider, it does so once more: they
    /// may have been replaced since the provider returned them.
    async fn open(&self) -> Result<Link, Arc<str>> {
        let mut may_repeat = self.login.is_some();
        loop {
            let connected = self.connect().await;
            let mut link = connected.map_err(|error| error.to_string())?;
            // Once the server is connected, because a token for a server that is down would be of no use.
            let mut settings = self.settings.clone();
            if let Some((provider, limit)) = &self.login {
                settings = provider.add_to(settings, &self.name, *limit).await?;
            }
            let mut greeting = Pipeline::new();
            if let Some(password) = settings.password() {
                greeting.cmd("AUTH").arg(settings.username()).arg(password);
            }
            if settings.db() != 0 {
                greeting.cmd("SELECT").arg(settings.db());
            }
            let (replies, answered) = link.exchange(&greeting).await;
            let has_auth = settings.password().is_some();
            let (auth, others) = replies.split_at(usize::from(has_auth).min(replies.len()));
            if std::mem::take(&mut may_repeat) && auth.iter().any(is_wrong_login) {
                continue;
            }
            let refused = auth.iter().find_map(describe_auth);
            return match refused.or_else(|| others.iter().find_map(describe_refusal)) {
                Some(why) => Err(why),
                None => answered.map(|()| link),
            };
        }
    }

    /// Connects to the server.
    async fn connect(&self) -> io::Result<Link> {
        Ok(match &self.server {
            ConnectionAddr::Tcp(host, port) => Link::new(connect_tcp(host, *port).await?),
            #[cfg(feature = "tls-rustls")]
            ConnectionAddr::TcpTls { host, port, .. } => {
                let stream = connect_tcp(host, *port).await?;
                Link::new(crate::node::redis::tls::encrypt(stream, host).await?)
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => Link::new(tokio::net::UnixStream::connect(path).await?),
            // They have no name.
            _ => return Err(io::ErrorKind::Unsupported.into()),
        })
    }
}

/// Returns the name to show for a server, by which one that is listed twice is recognised.
///
/// # Errors
///
/// Returns the reason and the remedy if it cannot be connected to.
fn name_of(server: &ConnectionAddr) -> Result<String, String> {
    match server {
        ConnectionAddr::TcpTls { insecure: true, .. } => {
            Err("certificates are always verified; remove `#insecure`, and set SSL_CERT_FILE to trust a private authority".into())
        }
        ConnectionAddr::Tcp(host, port) => Ok(format!("{}:{port}", normalised(host))),
        #[cfg(feature = "tls-rustls")]
        ConnectionAddr::TcpTls { host, port, .. } => Ok(format!("{}:{port}", normalised(host))),
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => {
            let path: std::path::PathBuf = path.components().collect();
            Ok(path.display().to_string())
        }
        _ => Err("TLS needs the feature `tls-rustls`, and Unix sockets a Unix".into()),
    }
}

/// Returns the same text for all spellings of a host: names are case-insensitive, and IPv6 has many forms.
fn normalised(host: &str) -> String {
    let ip = host.parse::<IpAddr>();
    ip.map_or_else(|_| host.to_lowercase(), |ip| ip.to_string())
}

/// Looks a host up, connects to all its addresses at once and returns the first connection: others may be unreachable.
async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let found = lookup_host((host, port)).await?;
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

/// The number of records that are read from one server at once, unless the configuration of a pool says otherwise.
/// It limits the replies that the server buffers.
const MAX_READS: usize = 4;
/// Longer than any lock lives: the lane detects silence, because it can distinguish a hung server from a slow
/// reply and has to read replies that arrive late.
const NO_RESPONSE_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
