//! The builder: nodes and settings in, checked once, a lock service out.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::redlock::Redlock;
use crate::lock::settings::{Settings, whole_millis};
use crate::lock::waiters::Waiters;
use crate::node::{EmbeddedNode, Node};
use crate::protocol::{Namespace, Quorum, Retry, validity};

/// Longest ttl that is not taken for a mistake in units: ten days.
const LONGEST_TTL: Duration = Duration::from_secs(10 * 24 * 60 * 60);

/// Longest memory of a fence: ten years.
const LONGEST_RETENTION: Duration = Duration::from_secs(3_650 * 24 * 60 * 60);

/// How to keep nodes from voting that have just lost their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RestartGuard {
    /// Long enough for every lock that the node may have forgotten: `max(2 * max_ttl, max_ttl + 5 s)`.
    #[default]
    Auto,
    /// For this long after the node came up.
    For(Duration),
    /// Not at all: a node that restarts empty votes at once, which voids mutual exclusion.
    Off,
}

/// Builds a [`Redlock`]; everything is checked once, in [`build`](Self::build).
///
/// ```
/// use std::time::Duration;
/// use tower_redlock::Redlock;
///
/// let redlock = Redlock::builder()
///     .embedded(3)
///     .ttl(Duration::from_secs(10))
///     .build()?;
/// # Ok::<(), tower_redlock::BuildError>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing itself; call `.build()`"]
pub struct RedlockBuilder {
    sources: Vec<Source>,
    namespace: String,
    ttl: Duration,
    max_ttl: Option<Duration>,
    node_timeout: Duration,
    connect_timeout: Duration,
    wait: Duration,
    retry: Retry,
    wake_ups: bool,
    poll_interval: Duration,
    max_hold: Option<Duration>,
    renew: bool,
    fencing: bool,
    fence_retention: Option<Duration>,
    restart_guard: RestartGuard,
    max_waiters: Option<usize>,
    log_keys: bool,
}

/// Where nodes come from.
#[derive(Clone)]
enum Source {
    Embedded(usize),
    #[cfg(feature = "redis")]
    Url(String),
    #[cfg(feature = "redis")]
    Pool(deadpool_redis::Pool),
    #[cfg(feature = "test-util")]
    Scripted(crate::node::scripted::ScriptedNodes),
    #[cfg(feature = "test-util")]
    Simulated(usize, Arc<dyn crate::node::sim::SimNetwork>),
}

impl RedlockBuilder {
    pub(super) fn new() -> Self {
        Self {
            sources: Vec::new(),
            namespace: Namespace::default().as_str().to_owned(),
            ttl: Duration::from_secs(10),
            max_ttl: None,
            node_timeout: Duration::from_millis(50),
            connect_timeout: Duration::from_secs(1),
            wait: Duration::from_secs(5),
            retry: Retry::default(),
            wake_ups: true,
            poll_interval: Duration::from_millis(500),
            max_hold: None,
            renew: true,
            fencing: true,
            fence_retention: None,
            restart_guard: RestartGuard::default(),
            max_waiters: None,
            log_keys: false,
        }
    }

    /// Adds a Redis server by its URL: `redis://[user:password@]host[:port][/db]`, `rediss://` for
    /// TLS (feature `tls-rustls`), `unix://path`.
    ///
    /// It must be an independent master, spoken to directly: not a replica, a cluster node or a
    /// proxy that fails over. Every client must name the same servers. Smallest version: 6.2. Rights,
    /// certificates and more: [operating the nodes](crate::guide::operating_the_nodes).
    #[cfg(feature = "redis")]
    pub fn url(mut self, url: impl AsRef<str>) -> Self {
        self.sources.push(Source::Url(url.as_ref().to_owned()));
        self
    }

    /// Adds several Redis servers; see [`url`](Self::url).
    #[cfg(feature = "redis")]
    pub fn urls(self, urls: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        urls.into_iter().fold(self, Self::url)
    }

    /// Adds a Redis server by a pool of connections to it.
    ///
    /// One connection is taken out of the pool and kept; the pool's own time limits hold for
    /// opening it, the node timeout for all that is asked on it. Another one is taken while recorded
    /// responses of more than 16 KiB are read, so that the pool's size is best two or more.
    ///
    /// A server that is named by a TCP [`url`](Self::url) without TLS is asked for locks on a socket of
    /// their own instead, which no task of redis-rs has to drive.
    #[cfg(feature = "redis")]
    pub fn pool(mut self, pool: deadpool_redis::Pool) -> Self {
        self.sources.push(Source::Pool(pool));
        self
    }

    /// Adds `count` nodes that live in this process and are forgotten with it.
    pub fn embedded(mut self, count: usize) -> Self {
        self.sources.push(Source::Embedded(count));
        self
    }

    /// Adds nodes whose answers a test controls.
    #[cfg(feature = "test-util")]
    pub fn scripted(mut self, nodes: &crate::node::scripted::ScriptedNodes) -> Self {
        self.sources.push(Source::Scripted(nodes.clone()));
        self
    }

    /// Adds `count` nodes at the end of a wire that a simulation carries requests over.
    #[cfg(feature = "test-util")]
    pub fn simulated(mut self, count: usize, wire: Arc<dyn crate::node::sim::SimNetwork>) -> Self {
        self.sources.push(Source::Simulated(count, wire));
        self
    }

    /// Sets the prefix of all keys on the nodes. Default: `redlock`.
    ///
    /// Clients exclude each other if they have the same namespace. With the empty one a lock is
    /// named exactly like its key, as other Redlock clients name theirs.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Sets how long a lock lives on the nodes when nothing renews it. Default: 10 s.
    ///
    /// What others wait for after a crash; also how long a pause of this process the lock survives.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets the longest ttl that may be asked for, by any client of the namespace. Default: `ttl`.
    pub fn max_ttl(mut self, max_ttl: Duration) -> Self {
        self.max_ttl = Some(max_ttl);
        self
    }

    /// Sets how long to wait for the answer of one node. Default: 50 ms.
    ///
    /// A slower node has no vote. Well above the round trip, well below the ttl.
    pub fn node_timeout(mut self, node_timeout: Duration) -> Self {
        self.node_timeout = node_timeout;
        self
    }

    /// Sets how long opening a connection may take. Default: 1 s.
    pub fn connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// Sets how long [`Redlock::lock`] waits while others hold the lock. Default: 5 s.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sets whether those who wait in other processes are told when a lock is released, and listen for
    /// that themselves, by `PUBLISH` and `SUBSCRIBE`. Default: true.
    ///
    /// A process listens only while it waits, on one more connection to each server, which it opens for
    /// the first wait and closes after 10 s without one; a node given as a [`pool`](Self::pool) has no
    /// address to open one to. Without the [rights](crate::guide::operating_the_nodes) for it, or with
    /// a majority of the nodes not telling, the [`retry`](Self::retry) delays hold. All clients of a
    /// namespace should agree on it: who is not told asks only every
    /// [`poll_interval`](Self::poll_interval).
    ///
    /// Without them, a process whose calls hand a lock on to each other waits now and then like one that
    /// was refused, for about a twentieth of the time, so that others can have it too.
    pub fn wake_ups(mut self, wake_ups: bool) -> Self {
        self.wake_ups = wake_ups;
        self
    }

    /// Sets how long to wait at most before asking again while a majority of the nodes would tell of a
    /// release: a message can be lost, and a lock that expires sends none. Default: 500 ms.
    pub fn poll_interval(mut self, poll_interval: Duration) -> Self {
        self.poll_interval = poll_interval;
        self
    }

    /// Sets the delays between attempts while another process holds the lock and too few nodes would
    /// tell of its release. Default: random, growing from 10 ms to 250 ms.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Sets after what time a lock is not renewed any more, so that a holder that never ends does
    /// not hold it for ever; layers and [`LockOptions`](crate::LockOptions) may say otherwise. Default: never for
    /// [`Redlock::lock`], 60 s for `RedlockLayer` and `Locked`.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// Sets whether locks are renewed while they are held. Default: true.
    pub fn renew(mut self, renew: bool) -> Self {
        self.renew = renew;
        self
    }

    /// Sets whether locks come with a fencing token. Default: true.
    ///
    /// Off, an acquisition writes no fence, which costs the servers less; with
    /// [`RestartGuard::Off`] it is the plain `SET key value NX PX ttl` of the Redlock description.
    /// All clients of a namespace must agree on it.
    pub fn fencing(mut self, fencing: bool) -> Self {
        self.fencing = fencing;
        self
    }

    /// Sets how long a node remembers a fence after the last lock. Default: 1 h, or what
    /// `max(2 * max_ttl, max_hold + max_ttl)` asks for, if that is more.
    pub fn fence_retention(mut self, fence_retention: Duration) -> Self {
        self.fence_retention = Some(fence_retention);
        self
    }

    /// Sets how long a Redis node that lost its memory is kept from voting. Default:
    /// [`RestartGuard::Auto`]; with the default ttl that is 20 s.
    ///
    /// A restart, with data or without, `FLUSHALL`, and the promotion of a replica are noticed, by
    /// every client, from what the server says of itself; so a fresh cluster refuses locks for that
    /// long after its first contact. Not noticed: a server that gets older data of its own back
    /// within one process; and with `fencing(false)`, what happens under a connection that stands.
    /// Needs the right to `INFO` and `TIME`. Embedded nodes are exempt.
    pub fn restart_guard(mut self, restart_guard: RestartGuard) -> Self {
        self.restart_guard = restart_guard;
        self
    }

    /// Sets how many calls may wait for locks at once. Default: no limit.
    ///
    /// One more is refused with [`LockError::Overloaded`](crate::LockError::Overloaded).
    pub fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.max_waiters = Some(max_waiters);
        self
    }

    /// Sets whether the spans of locks show their keys, as the field `key`. Default: false.
    ///
    /// Keys are made of what clients send; an e-mail address or a session should not be in a log.
    pub fn log_keys(mut self, log_keys: bool) -> Self {
        self.log_keys = log_keys;
        self
    }

    /// Checks the settings and makes the lock service. Connects to nothing: a server that is down
    /// is no error.
    ///
    /// # Errors
    ///
    /// [`BuildError`] for no nodes, a malformed URL, the same server twice, or settings that make
    /// no sense together; it names the setting, its value and the remedy.
    pub fn build(self) -> Result<Redlock, BuildError> {
        let settings = self.settings()?;
        let nodes = self.nodes(&settings)?;
        Ok(Redlock::new(nodes, settings))
    }

    fn settings(&self) -> Result<Settings, BuildError> {
        let count = self.sources.iter().map(Source::count).sum();
        let quorum = Quorum::new(count).ok_or_else(|| {
            BuildError::new(
                "nodes",
                0,
                "there is no node; add `url`, `urls`, `pool` or `embedded`",
            )
        })?;
        let namespace = Namespace::new(&self.namespace).ok_or_else(|| {
            let remedy = "braces would make key names ambiguous; leave them out";
            BuildError::new("namespace", &self.namespace, remedy)
        })?;
        let max_ttl = self.max_ttl.unwrap_or(self.ttl);
        check_ttl("ttl", self.ttl)?;
        check_ttl("max_ttl", max_ttl)?;
        if max_ttl < self.ttl {
            let remedy = format!("it is below ttl = {:?}; raise it or lower ttl", self.ttl);
            return Err(BuildError::of("max_ttl", max_ttl, remedy));
        }
        for (setting, value) in [
            ("node_timeout", self.node_timeout),
            ("connect_timeout", self.connect_timeout),
            ("max_hold", self.max_hold.unwrap_or(Duration::MAX)),
        ] {
            if value.is_zero() {
                return Err(BuildError::of(
                    setting,
                    value,
                    "zero leaves no time; raise it",
                ));
            }
        }
        if self.connect_timeout > LONGEST_TTL {
            let remedy = format!("nobody waits that long; at most {LONGEST_TTL:?}");
            let value = self.connect_timeout;
            return Err(BuildError::of("connect_timeout", value, remedy));
        }
        if self.node_timeout >= self.ttl {
            let remedy = format!(
                "a lock would be over before its nodes have answered; keep it well below ttl = {:?}",
                self.ttl
            );
            return Err(BuildError::of("node_timeout", self.node_timeout, remedy));
        }
        let held = self.max_hold.unwrap_or_default();
        let least = (2 * max_ttl).max(held.saturating_add(max_ttl));
        let default = Duration::from_secs(60 * 60).max(least);
        let fence_retention = self.fence_retention.unwrap_or(default);
        if fence_retention < least {
            let remedy = format!(
                "a fence could lapse under a lock; at least max(2 * max_ttl, max_hold + max_ttl) = {least:?}"
            );
            return Err(BuildError::of("fence_retention", fence_retention, remedy));
        }
        if fence_retention > LONGEST_RETENTION {
            let remedy = format!("at most {LONGEST_RETENTION:?}");
            return Err(BuildError::of("fence_retention", fence_retention, remedy));
        }
        Ok(Settings {
            namespace,
            quorum,
            ttl: whole_millis(self.ttl),
            max_ttl,
            node_timeout: self.node_timeout,
            wait: self.wait,
            retry: self.retry,
            wake_ups: self.wake_ups,
            poll_interval: self.poll_interval,
            max_hold: self.max_hold,
            renew: self.renew,
            fencing: self.fencing,
            fence_retention: whole_millis(fence_retention),
            waiters: self.max_waiters.map(Waiters::new),
            log_keys: self.log_keys,
        })
    }

    #[cfg_attr(
        not(feature = "redis"),
        expect(unused_variables, reason = "embedded nodes need no guard")
    )]
    fn nodes(&self, settings: &Settings) -> Result<Vec<Arc<dyn Node>>, BuildError> {
        let mut nodes: Vec<Arc<dyn Node>> = Vec::new();
        #[cfg(feature = "redis")]
        let guard = self.guard(settings)?;
        for source in &self.sources {
            match source {
                Source::Embedded(count) => {
                    let first = nodes.len();
                    nodes.extend(
                        (first..first + count)
                            .map(|i| -> Arc<dyn Node> { Arc::new(EmbeddedNode::new(i)) }),
                    );
                }
                #[cfg(feature = "redis")]
                Source::Url(url) => {
                    let endpoint = crate::node::redis::pool_for(url, self.connect_timeout)
                        .map_err(|why| {
                            let remedy =
                                format!("{why}; expected redis://[user:password@]host[:port][/db]");
                            BuildError::new("url", without_credentials(url), &remedy)
                        })?;
                    if nodes.iter().any(|node| *node.name() == endpoint.name) {
                        let remedy = "this server is listed twice; a majority must be of independent servers";
                        return Err(BuildError::new("url", &endpoint.name, remedy));
                    }
                    nodes.push(self.redis_node(endpoint, guard.as_ref()));
                }
                #[cfg(feature = "redis")]
                Source::Pool(pool) => {
                    let name = format!("pool-{}", nodes.len()).into();
                    let pool = pool.clone();
                    let endpoint = crate::node::redis::Endpoint {
                        name,
                        pool,
                        client: None,
                    };
                    nodes.push(self.redis_node(endpoint, guard.as_ref()));
                }
                #[cfg(feature = "test-util")]
                Source::Scripted(scripted) => {
                    nodes.extend(scripted.nodes.iter().map(|node| -> Arc<dyn Node> {
                        Arc::new(crate::node::scripted::ScriptedLane::to(node))
                    }));
                }
                #[cfg(feature = "test-util")]
                Source::Simulated(count, wire) => {
                    nodes.extend((0..*count).map(|index| -> Arc<dyn Node> {
                        let wire = Arc::clone(wire);
                        Arc::new(crate::node::sim::SimNode::new(index, wire))
                    }));
                }
            }
        }
        Ok(nodes)
    }

    #[cfg(feature = "redis")]
    fn guard(
        &self,
        settings: &Settings,
    ) -> Result<Option<Arc<crate::node::redis::Guard>>, BuildError> {
        let max_ttl = settings.max_ttl;
        let window = match self.restart_guard {
            RestartGuard::Off => return Ok(None),
            RestartGuard::Auto => (2 * max_ttl).max(max_ttl + Duration::from_secs(5)),
            RestartGuard::For(window) if window > max_ttl && window <= LONGEST_RETENTION => window,
            RestartGuard::For(window) => {
                let remedy = format!(
                    "a restarted node must stay out for longer than any lock lives: more than max_ttl = {max_ttl:?}, at most {LONGEST_RETENTION:?}"
                );
                return Err(BuildError::of("restart_guard", window, remedy));
            }
        };
        let generation_key = settings.namespace.generation();
        Ok(Some(crate::node::redis::Guard::new(window, generation_key)))
    }

    #[cfg(feature = "redis")]
    fn redis_node(
        &self,
        endpoint: crate::node::redis::Endpoint,
        guard: Option<&Arc<crate::node::redis::Guard>>,
    ) -> Arc<dyn Node> {
        let timeouts = crate::node::redis::Timeouts {
            node: self.node_timeout,
            connect: self.connect_timeout,
        };
        Arc::new(crate::node::redis::RedisNode::new(
            endpoint,
            timeouts,
            guard.cloned(),
        ))
    }
}

impl Source {
    fn count(&self) -> usize {
        match self {
            Self::Embedded(count) => *count,
            #[cfg(feature = "redis")]
            Self::Url(_) | Self::Pool(_) => 1,
            #[cfg(feature = "test-util")]
            Self::Scripted(nodes) => nodes.nodes.len(),
            #[cfg(feature = "test-util")]
            Self::Simulated(count, _) => *count,
        }
    }
}

/// Shows no URL and no pool: both carry credentials.
impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded(count) => write!(f, "Embedded({count})"),
            #[cfg(feature = "redis")]
            Self::Url(url) => write!(f, "Url({})", without_credentials(url)),
            #[cfg(feature = "redis")]
            Self::Pool(_) => f.write_str("Pool(..)"),
            #[cfg(feature = "test-util")]
            Self::Scripted(nodes) => write!(f, "Scripted({})", nodes.nodes.len()),
            #[cfg(feature = "test-util")]
            Self::Simulated(count, _) => write!(f, "Simulated({count})"),
        }
    }
}

/// Settings that a [`Redlock`] cannot be made of: which, what they were, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildError {
    setting: &'static str,
    value: String,
    remedy: String,
}

impl BuildError {
    fn new(setting: &'static str, value: impl fmt::Display, remedy: &str) -> Self {
        Self {
            setting,
            value: value.to_string(),
            remedy: remedy.to_owned(),
        }
    }

    pub(crate) fn of(setting: &'static str, value: Duration, remedy: impl Into<String>) -> Self {
        Self {
            setting,
            value: format!("{value:?}"),
            remedy: remedy.into(),
        }
    }

    /// Returns the name of the setting, as its setter is called.
    #[must_use]
    pub fn setting(&self) -> &str {
        self.setting
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            setting,
            value,
            remedy,
        } = self;
        write!(f, "`{setting}` is {value}: {remedy}")
    }
}

impl std::error::Error for BuildError {}

/// Checks a ttl by itself.
pub(crate) fn check_ttl(setting: &'static str, ttl: Duration) -> Result<(), BuildError> {
    if validity::lifetime(whole_millis(ttl)).is_none() {
        let remedy = "clock drift (ttl / 100 + 2 ms) leaves nothing of it; use seconds";
        return Err(BuildError::of(setting, ttl, remedy));
    }
    if ttl > LONGEST_TTL {
        let remedy = format!("a crash would lock others out that long; at most {LONGEST_TTL:?}");
        return Err(BuildError::of(setting, ttl, remedy));
    }
    Ok(())
}

/// Cuts what may be a password out of a URL that could not be parsed.
#[cfg(feature = "redis")]
fn without_credentials(url: &str) -> String {
    let scheme = url.find("://").map_or("", |end| &url[..end + 3]);
    let rest = &url[scheme.len()..];
    match (rest.rfind('@'), rest.find('?')) {
        // Either of them may be part of a password; nobody can tell which.
        (Some(at), Some(query)) if query < at => format!("{scheme}***"),
        (Some(at), query) => format!("{scheme}***{}", &rest[at..query.unwrap_or(rest.len())]),
        (None, query) => format!("{scheme}{}", &rest[..query.unwrap_or(rest.len())]),
    }
}
