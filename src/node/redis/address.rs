//! Addresses: where a server is, and who connects to it.

use std::io::{Error, ErrorKind, Result};
use std::net::IpAddr;
use std::sync::Arc;

use deadpool_redis::redis::{
    ConnectionAddr, ConnectionInfo, Pipeline, ProtocolVersion, RedisConnectionInfo,
};
use futures_util::future::select_ok;
use tokio::net::{TcpStream, lookup_host};

use crate::node::redis::credentials::Login;
use crate::node::redis::link::ByteStream;

/// The address of a server and the credentials for it.
#[derive(Debug)]
pub(super) struct Address {
    target: Target,
    pub(super) settings: RedisConnectionInfo,
    /// Who is asked for the credentials of each connection, if they are not those of the settings.
    pub(super) login: Option<Login>,
}

#[derive(Debug)]
enum Target {
    Tcp(String, u16),
    #[cfg(feature = "tls-rustls")]
    Tls(String, u16),
    #[cfg(unix)]
    Unix(std::path::PathBuf),
}

impl Address {
    /// Checks that the address can be connected to.
    ///
    /// # Errors
    ///
    /// Returns the reason and the remedy.
    pub(super) fn new(
        info: &ConnectionInfo,
        login: Option<&Login>,
    ) -> std::result::Result<Self, String> {
        let target = match info.addr() {
            ConnectionAddr::Tcp(host, port) => Target::Tcp(host.clone(), *port),
            ConnectionAddr::TcpTls { insecure: true, .. } => {
                return Err("certificates are always verified; remove `#insecure`, and set SSL_CERT_FILE to trust \
                    a private authority"
                    .into());
            }
            #[cfg(feature = "tls-rustls")]
            ConnectionAddr::TcpTls { host, port, .. } => Target::Tls(host.clone(), *port),
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => Target::Unix(path.components().collect()),
            _ => return Err("TLS needs the feature `tls-rustls`, and Unix sockets a Unix".into()),
        };
        // Requests are sent in RESP2.
        let settings = info.redis_settings().clone();
        let settings = settings.set_protocol(ProtocolVersion::RESP2);
        Ok(Self {
            target,
            settings,
            login: login.cloned(),
        })
    }

    /// Returns the name to show, by which a server that is listed twice is recognised.
    pub(super) fn name(&self) -> String {
        match &self.target {
            Target::Tcp(host, port) => format!("{}:{port}", normalised(host)),
            #[cfg(feature = "tls-rustls")]
            Target::Tls(host, port) => format!("{}:{port}", normalised(host)),
            #[cfg(unix)]
            Target::Unix(path) => path.display().to_string(),
        }
    }

    /// Returns the commands with which a connection begins, and whether the first one is `AUTH`.
    pub(super) async fn greeting(&self) -> std::result::Result<(Pipeline, bool), Arc<str>> {
        let mut settings = self.settings.clone();
        if let Some(login) = &self.login {
            settings = login.add_to(settings, &self.name()).await?;
        }
        let mut greeting = Pipeline::new();
        if let Some(password) = settings.password() {
            greeting.cmd("AUTH");
            if let Some(user) = settings.username() {
                greeting.arg(user);
            }
            greeting.arg(password);
        }
        if settings.db() != 0 {
            greeting.cmd("SELECT").arg(settings.db());
        }
        Ok((greeting, settings.password().is_some()))
    }

    /// Opens a stream to the server.
    pub(super) async fn connect(&self) -> Result<Box<dyn ByteStream>> {
        match &self.target {
            Target::Tcp(host, port) => Ok(Box::new(connect_tcp(host, *port).await?)),
            #[cfg(feature = "tls-rustls")]
            Target::Tls(host, port) => {
                let stream = connect_tcp(host, *port).await?;
                let encrypted = crate::node::redis::tls::encrypt(stream, host).await?;
                Ok(Box::new(encrypted))
            }
            #[cfg(unix)]
            Target::Unix(path) => Ok(Box::new(tokio::net::UnixStream::connect(path).await?)),
        }
    }
}

/// Returns the same text for all spellings of a host: names are case-insensitive, and IPv6 has many forms.
fn normalised(host: &str) -> String {
    let ip = host.parse::<IpAddr>();
    ip.map_or_else(|_| host.to_lowercase(), |ip| ip.to_string())
}

/// Looks a host up, connects to all its addresses at once and returns the first connection: others may be unreachable.
async fn connect_tcp(host: &str, port: u16) -> Result<TcpStream> {
    let found = lookup_host((host, port)).await?;
    let attempts: Vec<_> = found
        .map(|address| Box::pin(TcpStream::connect(address)))
        .collect();
    if attempts.is_empty() {
        let why = "the host name has no address";
        return Err(Error::new(ErrorKind::NotFound, why));
    }
    let (stream, _) = select_ok(attempts).await?;
    // Otherwise a release right behind its lock would wait for the acknowledgment of that.
    stream.set_nodelay(true)?;
    Ok(stream)
}
