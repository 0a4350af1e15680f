//! Credentials: what connections log in with, and the provider that is asked for them.

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::redis::RedisConnectionInfo;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::time::timeout;
use tower::BoxError;

/// What a connection logs in with: a password, and the user if it is not the default one.
///
/// It is a [`CredentialsProvider`] that always gives itself. `Debug` does not show the password.
#[derive(Clone)]
pub struct Credentials {
    username: Option<String>,
    password: Password,
}

#[derive(Clone)]
enum Password {
    Text(String),
    File(PathBuf),
}

impl Credentials {
    /// Creates credentials with this password, or with a token that the server accepts as one.
    #[must_use]
    pub fn new(password: impl Into<String>) -> Self {
        Self::with(Password::Text(password.into()))
    }

    /// Creates credentials whose password is the content of a file, without the end of its last line.
    ///
    /// The file is read for each connection, so it may be rewritten, as Kubernetes does with a mounted secret.
    #[must_use]
    pub fn from_file(path: impl Into<PathBuf>) -> Self {
        Self::with(Password::File(path.into()))
    }

    /// Sets the user. Default: the user in the URL of the server, or else the server's default user.
    #[must_use]
    pub fn username(mut self, username: impl Into<String>) -> Self {
        self.username = Some(username.into());
        self
    }

    fn with(password: Password) -> Self {
        Self {
            username: None,
            password,
        }
    }

    /// Puts them into the settings of a connection.
    async fn add_to(
        self,
        mut settings: RedisConnectionInfo,
    ) -> Result<RedisConnectionInfo, BoxError> {
        let password = match self.password {
            Password::Text(password) => password,
            Password::File(path) => {
                let read = tokio::fs::read_to_string(&path).await;
                let content = read.map_err(|error| format!("{}: {error}", path.display()))?;
                content.trim_end_matches(['\r', '\n']).to_owned()
            }
        };
        if let Some(username) = self.username {
            settings = settings.set_username(username);
        }
        Ok(settings.set_password(password))
    }
}

// Without the password.
opaque_debug! { Credentials [username = username] }

/// Gives each new connection to a Redis server its credentials; see
/// [`RedlockBuilder::credentials`](crate::RedlockBuilder::credentials).
///
/// [`Credentials`] are a provider themselves. Write another one for passwords that come from a service, and for tokens. A server
/// checks a token when a connection logs in, and not later: a token of 15 minutes is enough for a connection of 12 hours, and
/// the next connection gets a new one.
///
/// ```
/// use tower::BoxError;
/// use tower_redlock::{Credentials, CredentialsProvider, Redlock};
///
/// /// Signs tokens that servers accept for 15 minutes.
/// struct Tokens {
///     signing_key: String,
/// }
///
/// impl CredentialsProvider for Tokens {
///     async fn credentials(&self, node: &str) -> Result<Credentials, BoxError> {
///         let token = sign(&self.signing_key, node, 15 * 60).await?;
///         Ok(Credentials::new(token).username("locker"))
///     }
/// }
/// # async fn sign(_: &str, node: &str, _: u64) -> Result<String, BoxError> { Ok(node.into()) }
///
/// let redlock = Redlock::builder()
///     .urls(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"])
///     .credentials(Tokens { signing_key: "…".into() })
///     .build()?;
/// # Ok::<(), tower_redlock::BuildError>(())
/// ```
pub trait CredentialsProvider: Send + Sync + 'static {
    /// Returns the credentials for a new connection to a node, by the name that errors have for it: `host:port`, or the path of
    /// a socket.
    ///
    /// It is asked once the server has accepted the connection, again at once if the server refuses the login (`WRONGPASS`,
    /// `NOAUTH`), and several times a second while the server goes on refusing. A provider that asks a service should therefore
    /// keep what it got for a while.
    ///
    /// # Errors
    ///
    /// The connection fails, and the node gives no votes until another attempt succeeds. The text is shown in errors, in the log
    /// and by `health`, so it must not have secrets.
    ///
    /// # Cancel safety
    ///
    /// It is dropped if it has not returned after [`connect_timeout`](crate::RedlockBuilder::connect_timeout), with which the
    /// connection fails, or if the connection is not needed any more.
    fn credentials(&self, node: &str)
    -> impl Future<Output = Result<Credentials, BoxError>> + Send;
}

impl CredentialsProvider for Credentials {
    async fn credentials(&self, _: &str) -> Result<Self, BoxError> {
        Ok(self.clone())
    }
}

/// Any provider.
#[derive(Clone)]
pub(crate) struct AnyProvider(
    Arc<dyn Fn(Arc<str>) -> BoxFuture<'static, Result<Credentials, BoxError>> + Send + Sync>,
);

impl AnyProvider {
    pub(crate) fn new(provider: impl CredentialsProvider) -> Self {
        let provider = Arc::new(provider);
        Self(Arc::new(move |node| {
            let provider = Arc::clone(&provider);
            async move { provider.credentials(&node).await }.boxed()
        }))
    }

    /// Asks for the credentials of a connection, and puts them into its settings.
    pub(super) async fn add_to(
        &self,
        settings: RedisConnectionInfo,
        node: &str,
        limit: Duration,
    ) -> Result<RedisConnectionInfo, Arc<str>> {
        let asked = async {
            let credentials = (self.0)(node.into()).await?;
            credentials.add_to(settings).await
        };
        // What it panics with may have secrets, so it goes to the panic hook only.
        let asked = AssertUnwindSafe(asked).catch_unwind();
        let late = || format!("no answer within {limit:?}, the connect_timeout");
        let asked = match timeout(limit, asked).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err("the provider panicked".into()),
            Err(_) => Err(late().into()),
        };
        asked.map_err(|why| {
            format!("asking for credentials failed ({why}); check the provider in RedlockBuilder::credentials").into()
        })
    }
}

// It may have secrets.
opaque_debug! { AnyProvider }

/// A provider, and for how long it is asked.
pub(crate) type Login = (AnyProvider, Duration);
