//! Builders by address and by pool for tests of what reaches a server.

use std::time::Duration;

use support::{ms, secs};
use tower_redlock::deadpool_redis::Config;
use tower_redlock::{Redlock, RedlockBuilder, RestartGuard};

/// How long the nodes of a test may take to be up.
pub(crate) const PATIENCE: Duration = secs(10);

pub(crate) const NODE_TIMEOUT: Duration = ms(50);

/// Longer than any test that uses it; the ttl must free nothing there.
pub(crate) const LONG_TTL: Duration = secs(60);

/// For the tests in which the ttl may have to free a lock.
pub(crate) const SHORT_TTL: Duration = secs(1);

/// How the nodes are named, and with it what drives their connections.
#[derive(Debug, Clone, Copy)]
pub(crate) enum By {
    Url,
    Pool,
}

pub(crate) const BOTH: [By; 2] = [By::Url, By::Pool];

impl By {
    pub(crate) fn name(self, builder: RedlockBuilder, url: &String) -> RedlockBuilder {
        match self {
            Self::Url => builder.url(url),
            Self::Pool => builder.pool(Config::from_url(url).create_pool(None).unwrap()),
        }
    }
}

pub(crate) fn builder(by: By, urls: &[String]) -> RedlockBuilder {
    urls.iter()
        .fold(Redlock::builder(), |builder, url| by.name(builder, url))
        .node_timeout(NODE_TIMEOUT)
        .restart_guard(RestartGuard::Off)
}
