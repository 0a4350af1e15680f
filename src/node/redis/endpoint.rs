//! Endpoints: the connections to one server, from a URL, the configuration of a pool, or a pool.

use std::sync::Arc;
use std::time::Duration;

use deadpool::managed::{Pool, PoolConfig};
use deadpool_redis::redis::{ConnectionInfo, IntoConnectionInfo, RedisError};
use deadpool_redis::{Config, Runtime};

use crate::node::redis::address::Address;
use crate::node::redis::connector::{Connector, Origin};
use crate::node::redis::describe::describe_url;

/// One server: its connections, and the name to show.
pub(crate) struct Endpoint {
    pub(crate) name: Arc<str>,
    pub(super) pool: Pool<Connector>,
    /// For subscriptions, if the address is known.
    pub(super) address: Option<Arc<Address>>,
}

impl Endpoint {
    /// Creates the endpoint of a URL, without connecting.
    ///
    /// # Errors
    ///
    /// Returns the reason if the URL is malformed.
    pub(crate) fn from_url(url: &str, connect_timeout: Duration) -> Result<Self, String> {
        Self::from_info(url, PoolConfig::new(MAX_READS), connect_timeout)
    }

    /// Creates the endpoint of a pool's configuration, without connecting.
    ///
    /// # Errors
    ///
    /// Returns the reason if the configuration names no server or several, or if its pool cannot be built.
    pub(crate) fn from_config(config: &Config, connect_timeout: Duration) -> Result<Self, String> {
        let pool = config.pool.unwrap_or_else(|| PoolConfig::new(MAX_READS));
        if pool.max_size == 0 {
            return Err("its max_size is 0; use at least 1".into());
        }
        match (&config.url, &config.connection) {
            (Some(url), None) => Self::from_info(url.as_str(), pool, connect_timeout),
            (None, Some(connection)) => Self::from_info(connection.clone(), pool, connect_timeout),
            (Some(_), Some(_)) => Err("it has both url and connection; leave one out".into()),
            (None, None) => Err("it names no server; set url or connection".into()),
        }
    }

    /// Creates the endpoint of a user's pool.
    ///
    /// # Errors
    ///
    /// Returns the reason if deadpool refuses the pool of the connections that are taken out of it.
    pub(crate) fn from_pool(
        name: &Arc<str>,
        pool: deadpool_redis::Pool,
        connect_timeout: Duration,
    ) -> Result<Self, String> {
        let config = PoolConfig::new(MAX_READS);
        let pool = build_pool(Origin::Pool(pool), config, connect_timeout)?;
        Ok(Self {
            name: Arc::clone(name),
            pool,
            address: None,
        })
    }

    /// Returns what tells the node from others: each database of a server is a node of its own.
    pub(crate) fn identity(&self) -> String {
        let address = self.address.as_ref();
        let database = address.map_or(0, |address| address.settings().db());
        format!("{}/{database}", self.name)
    }

    fn from_info(
        info: impl IntoConnectionInfo,
        config: PoolConfig,
        connect_timeout: Duration,
    ) -> Result<Self, String> {
        let info: Result<ConnectionInfo, RedisError> = info.into_connection_info();
        let address = Arc::new(Address::new(&info.map_err(|error| describe_url(&error))?)?);
        let origin = Origin::Address(Arc::clone(&address));
        Ok(Self {
            name: address.name().into(),
            pool: build_pool(origin, config, connect_timeout)?,
            address: Some(address),
        })
    }
}

fn build_pool(
    origin: Origin,
    config: PoolConfig,
    limit: Duration,
) -> Result<Pool<Connector>, String> {
    let builder = Pool::builder(Connector { origin, limit }).config(config);
    let built = builder.runtime(Runtime::Tokio1).build();
    built.map_err(|error| error.to_string())
}

/// The number of records that are read from one server at once, unless the configuration of a pool says otherwise.
/// It limits the replies that the server buffers.
const MAX_READS: usize = 4;
