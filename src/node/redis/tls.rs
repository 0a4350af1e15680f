//! TLS: connections to servers with `rediss://` URLs.

use std::io::{Error, ErrorKind, Result};
use std::sync::Arc;

use rustls_native_certs::load_native_certs;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Encrypts a connection, once the server has shown a certificate for its host.
///
/// # Panics
///
/// Panics if the program has not chosen a crypto provider of rustls.
pub(super) async fn encrypt(stream: TcpStream, host: &str) -> Result<TlsStream<TcpStream>> {
    let host = ServerName::try_from(host.to_owned());
    let host = host.map_err(|error| Error::new(ErrorKind::InvalidInput, error))?;
    let connector = TlsConnector::from(Arc::new(config()?));
    let encrypted = connector.connect(host, stream).await;
    encrypted.map_err(|error| Error::new(error.kind(), format!("TLS handshake failed: {error}")))
}

/// Returns a configuration that trusts the authorities of the system, read again each time because they change.
fn config() -> Result<ClientConfig> {
    let found = load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map(ToString::to_string);
        let why = why.unwrap_or_else(|| "set SSL_CERT_FILE".into());
        let why = format!("the system has no root certificates ({why})");
        return Err(Error::new(ErrorKind::NotFound, why));
    }
    let builder = ClientConfig::builder().with_root_certificates(roots);
    Ok(builder.with_no_client_auth())
}
