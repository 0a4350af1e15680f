//! The builder, which checks the nodes and the settings together and makes the lock service.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::lock::cluster::Settings;
use crate::lock::error::{BuildError, LONGEST_TTL, Variables};
use crate::lock::node_group::{NodeGroup, NodeSettings, layout, moved_to, named};
use crate::lock::queue::WaiterCap;
use crate::lock::redlock::Redlock;
use crate::lock::time::whole_millis;
#[cfg(feature = "test-util")]
use crate::lock::traces::Traces;
use crate::node::Home;
#[cfg(feature = "redis")]
use crate::node::redis::{Guard, Timeouts};
use crate::protocol::{Namespace, NodeSet, Retry};

/// The longest retention of a fence, and the longest restart guard: ten years.
const LONGEST_RETENTION: Duration = Duration::from_secs(3_650 * 24 * 60 * 60);

/// How long a node that lost its memory is quarantined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RestartGuard {
    /// Long enough for every lock that the node may have forgotten: `max(2 * max_ttl, max_ttl + 5 s)`.
    #[default]
    Auto,
    /// For this long after the node came up; must be more than `max_ttl`.
    For(Duration),
    /// Never. A node that restarts empty votes at once, which breaks mutual exclusion. Two addresses of one server
    /// still get no vote, if its user may run `INFO`; otherwise the crate logs one warning.
    Off,
}

/// Builds a [`Redlock`]; [`build`](Self::build) checks all settings at once.
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
    /// The nodes outside of named groups, which are a group if there is no other.
    nodes: NodeGroup,
    groups: Vec<NodeGroup>,
    moving_to: Option<Vec<NodeGroup>>,
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
    #[cfg(feature = "test-util")]
    traces: Option<Traces>,
    runtime: Option<Handle>,
    pub(super) variables: Variables,
}

impl Redlock {
    /// Returns a builder for the nodes and the settings of a lock service.
    pub fn builder() -> RedlockBuilder {
        RedlockBuilder::default()
    }

    /// Creates a lock service over embedded nodes, for development, tests and single processes.
    ///
    /// The same as `builder().embedded(nodes).build()`. The locks exist in this process only, and end with it.
    ///
    /// # Panics
    ///
    /// Panics if `nodes` is zero or more than 64.
    #[must_use]
    pub fn in_memory(nodes: usize) -> Self {
        assert!(nodes > 0, "Redlock::in_memory needs at least one node");
        assert!(
            nodes <= NodeSet::MAX,
            "Redlock::in_memory makes at most 64 nodes"
        );
        let built = Self::builder().embedded(nodes).build();
        built.expect("defaults with as many nodes are valid")
    }
}

impl Default for RedlockBuilder {
    fn default() -> Self {
        Self {
            nodes: NodeGroup::new(),
            groups: Vec::new(),
            moving_to: None,
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
            #[cfg(feature = "test-util")]
            traces: None,
            runtime: None,
            variables: Variables::default(),
        }
    }
}

/// Defines setters of the builder, each with the documentation in front of its name. A setter sets the field of its name.
macro_rules! setters {
    ($($(#[$doc:meta])+ $field:ident: $type:ty;)+) => {$(
        $(#[$doc])+
        pub fn $field(mut self, $field: $type) -> Self {
            self.$field = $field.into();
            self
        }
    )+};
}

impl RedlockBuilder {
    /// Adds a Redis server by its URL: `redis://[user:password@]host[:port][/db]`, `rediss://` for
    /// TLS (feature `tls-rustls`), `unix://path`.
    ///
    /// The server must be an independent master, reached directly: not a replica, a cluster node or a proxy that
    /// fails over. Its version must be 6.2 or later. All clients must name the same servers. See [operating the
    /// nodes](crate::guide::operating_the_nodes) for rights, certificates and more.
    #[cfg(feature = "redis")]
    pub fn url(mut self, url: impl AsRef<str>) -> Self {
        self.nodes = self.nodes.url(url);
        self
    }

    /// Adds several Redis servers; see [`url`](Self::url).
    #[cfg(feature = "redis")]
    pub fn urls(self, urls: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        urls.into_iter().fold(self, Self::url)
    }

    /// Adds a Redis server by the configuration of a pool, which names the server by a URL or a connection.
    ///
    /// The node makes its connections as for a [`url`](Self::url). The size and the timeouts of the configuration
    /// apply to the connections that read large results.
    ///
    /// ```
    /// use tower_redlock::Redlock;
    /// use tower_redlock::deadpool_redis::{Config, PoolConfig};
    ///
    /// let mut config = Config::from_url("redis://10.0.0.1");
    /// config.pool = Some(PoolConfig::new(8));
    /// let redlock = Redlock::builder().pool_config(config).build()?;
    /// # Ok::<(), tower_redlock::BuildError>(())
    /// ```
    #[cfg(feature = "redis")]
    pub fn pool_config(mut self, config: deadpool_redis::Config) -> Self {
        self.nodes = self.nodes.pool_config(config);
        self
    }

    /// Adds a Redis server by a pool of connections to it, for settings that no URL can express, such as a client
    /// certificate.
    ///
    /// The node takes connections out of the pool for good: one for locks, and up to four to read large results.
    /// The pool's own timeouts apply when a connection opens, the node timeout to every request on it.
    ///
    /// A [`url`](Self::url) or a [`pool_config`](Self::pool_config) is faster, because redis-rs drives each
    /// connection of the pool in a separate task. It also [wakes](Self::wake_ups) the waiters of this process, for
    /// which the address of the server must be known.
    #[cfg(feature = "redis")]
    pub fn pool(mut self, pool: deadpool_redis::Pool) -> Self {
        self.nodes = self.nodes.pool(pool);
        self
    }

    /// Adds `count` nodes in the memory of this process.
    pub fn embedded(mut self, count: usize) -> Self {
        self.nodes = self.nodes.embedded(count);
        self
    }

    /// Adds nodes whose answers a test controls.
    #[cfg(feature = "test-util")]
    pub fn scripted(mut self, nodes: &crate::node::scripted::ScriptedNodes) -> Self {
        self.nodes = self.nodes.scripted(nodes);
        self
    }

    /// Adds `count` nodes behind a network that a simulation implements.
    #[cfg(feature = "test-util")]
    pub fn simulated(
        mut self,
        count: usize,
        network: Arc<dyn crate::node::sim::SimNetwork>,
    ) -> Self {
        self.nodes = self.nodes.simulated(0..count, network);
        self
    }

    /// Remembers what happens to the last 1,000 leases. Default: off.
    #[cfg(feature = "test-util")]
    pub fn traces(mut self, traces: &Traces) -> Self {
        self.traces = Some(traces.clone());
        self
    }

    /// Adds a group of Redis servers by their URLs; see [scaling out](crate::guide::scaling_out).
    ///
    /// Each group is a quorum of its own, and each key belongs to one of them, by its name and those of the groups:
    /// [rendezvous hashing](crate::protocol::Placement). All clients must have the same groups with the same names. The name
    /// of this one is its position: `0` for the first. [`named_group`](Self::named_group) gives it another, which it keeps
    /// when a group before it is removed.
    ///
    /// With groups, all nodes belong to one; without, all nodes are one group. To change the groups of a service that runs,
    /// see [`moving_to`](Self::moving_to).
    ///
    /// ```
    /// use tower_redlock::Redlock;
    ///
    /// let redlock = Redlock::builder()
    ///     .group(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"])
    ///     .group(["redis://10.0.1.1", "redis://10.0.1.2", "redis://10.0.1.3"])
    ///     .build()?;
    /// # Ok::<(), tower_redlock::BuildError>(())
    /// ```
    #[cfg(feature = "redis")]
    pub fn group(self, urls: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        self.node_group(NodeGroup::new().urls(urls))
    }

    /// Adds a group of Redis servers with a name; see [`group`](Self::group).
    ///
    /// The name decides on the keys of the group, so it stays, also if its servers are replaced.
    #[cfg(feature = "redis")]
    pub fn named_group(
        self,
        name: impl Into<String>,
        urls: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Self {
        self.node_group(NodeGroup::new().name(name).urls(urls))
    }

    /// Adds a group of any nodes; see [`group`](Self::group).
    pub fn node_group(mut self, group: NodeGroup) -> Self {
        self.groups.push(group);
        self
    }

    /// Sets the groups that this service moves to, while processes that know only the present groups may run, and
    /// processes that know only these.
    ///
    /// A key whose group changes is locked in both groups, first in the present one and then in the other: its locks
    /// exclude those of all other processes. Keys whose group stays the same are locked as before. A group that stays has
    /// the same name and the same nodes in both: host, port and database, or the path of the socket and the database. (The
    /// nodes of a [`pool`](Self::pool) cannot be compared: of a group with pools, only their number is checked.)
    ///
    /// 1. At first, all processes have the present groups.
    /// 2. Restart all of them with `moving_to`, in any order.
    /// 3. When the last process without it has ended, wait for the longest of the times below. Then restart all processes
    ///    with only the new groups, in any order.
    ///
    /// | so that | wait for |
    /// |---|---|
    /// | a key has one holder | `max_ttl`, or the longest [`hold_at_least`](crate::LockRequest::hold_at_least) if that is longer; `max_hold` + `max_ttl` if an old process goes on with another `Redlock` |
    /// | tokens rise, whatever the clocks of clients show | [`fence_retention`](Self::fence_retention) |
    /// | outcomes of [executions](Redlock::once) are found | their retention, 24 h by default |
    ///
    /// [Scaling out](crate::guide::scaling_out#changing-the-groups) has what each step guarantees, the reasons for these
    /// times, and the way back.
    ///
    /// ```
    /// use tower_redlock::Redlock;
    ///
    /// let present = ["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"];
    /// let added = ["redis://10.0.1.1", "redis://10.0.1.2", "redis://10.0.1.3"];
    /// let redlock = Redlock::builder().urls(present).moving_to([present, added]).build()?;
    /// # Ok::<(), tower_redlock::BuildError>(())
    /// ```
    pub fn moving_to(mut self, groups: impl IntoIterator<Item = impl Into<NodeGroup>>) -> Self {
        self.moving_to = Some(groups.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the prefix of all keys on the nodes. Default: `redlock`.
    ///
    /// Clients exclude each other if they have the same namespace. In the empty namespace, a lock has exactly the
    /// name of its key, as with other Redlock clients.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    setters! {
        /// Sets how long a lock lives on the nodes without renewal. Default: 10 s.
        ///
        /// After a crash of the holder, other callers wait this long. A holder that is paused for longer loses its
        /// lock.
        ttl: Duration;

        /// Sets the longest ttl that any client of the namespace may request. Default: `ttl`.
        max_ttl: Duration;

        /// Sets how long to wait for the answer of one node. Default: 50 ms.
        ///
        /// A slower node has no vote. Choose a time well above the round trip and well below the ttl.
        node_timeout: Duration;

        /// Sets how long opening a connection may take. Default: 1 s.
        connect_timeout: Duration;

        /// Sets how long [`Redlock::lock`] waits while another caller holds the lock. Default: 5 s.
        wait: Duration;

        /// Sets whether a release wakes the processes that wait for the lock. Default: true.
        ///
        /// A release is published with `PUBLISH`, and a process that waits subscribes to it with `SUBSCRIBE`.
        ///
        /// A process subscribes only while it waits, on a further connection to each server, which it opens for
        /// the first wait and closes after 10 s without one. A [`pool`](Self::pool) has no address for a further
        /// connection; use [`pool_config`](Self::pool_config). Without the [rights](crate::guide::operating_the_nodes) to
        /// subscribe, or without a majority of the nodes, the [`retry`](Self::retry) delays apply. All clients of a
        /// namespace should agree on this setting: a release that is not published is found only by the next poll,
        /// after up to [`poll_interval`](Self::poll_interval).
        ///
        /// Without wake-ups, a process whose callers acquire a lock one after the other pauses now and then, for
        /// about a twentieth of the time, so that other processes can acquire it too.
        wake_ups: bool;

        /// Sets the longest pause between attempts while a majority of the nodes would publish the release. Default:
        /// 500 ms.
        ///
        /// A process that waits polls all the same, because a message can be lost and a lock that expires sends none.
        poll_interval: Duration;

        /// Sets the delays between attempts while another process holds the lock and no majority of the nodes
        /// would publish its release. Default: random, growing from 10 ms to 250 ms.
        retry: Retry;

        /// Sets for how long a lock is renewed, so that a holder that hangs does not keep it for ever. Default: no
        /// bound for [`Redlock::lock`], 60 s for `RedlockLayer` and `Locked`. [`Duration::MAX`] is no bound for all of them.
        ///
        /// Layers and [`LockOptions`](crate::LockOptions) may override it.
        max_hold: Duration;

        /// Sets whether locks are renewed while they are held. Default: true.
        ///
        /// Executions ([`Redlock::once`], `IdempotencyLayer`) always renew theirs, because a second execution must not begin
        /// beside the first.
        renew: bool;

        /// Sets whether locks come with a fencing token. Default: true.
        ///
        /// Without fencing an acquisition writes no fence, which is cheaper for the servers; with
        /// [`RestartGuard::Off`] it is the plain `SET key value NX PX ttl` of the Redlock description. Only if that is
        /// refused, a script asks what holds the key.
        /// All clients of a namespace must agree on it.
        fencing: bool;

        /// Sets how long a node remembers the fence of a key after its last lock. Default: 1 h, or the least that is
        /// allowed, `max(2 * max_ttl, max_hold + max_ttl)`, if that is longer.
        fence_retention: Duration;

        /// Sets how long a Redis node that lost its memory is quarantined. Default:
        /// [`RestartGuard::Auto`]; with the default ttl that is 20 s.
        ///
        /// Each client notices a restart, with or without data, a `FLUSHALL`, and the promotion of a replica: it reads
        /// the age of the server's memory on each connection, and every request for a vote names that memory. A fresh
        /// cluster therefore refuses locks for that long after the first contact. A server that restores older data
        /// without a restart is not noticed. The guard needs the right to `INFO` and `TIME`. Embedded nodes are exempt.
        restart_guard: RestartGuard;

        /// Sets how many calls may wait for locks at once. Default: no limit.
        ///
        /// One more call is refused with [`LockError::Overloaded`](crate::LockError::Overloaded). A candidate of
        /// [`lead`](crate::Redlock::lead) does not count.
        max_waiters: usize;

        /// Sets whether the spans of locks show their keys, in the field `key`. Default: false.
        ///
        /// Keys come from clients, and may contain e-mail addresses or session ids, which do not belong into a log.
        log_keys: bool;

        /// Sets the tokio runtime in which the connections and the leases live. Default: the runtime in which
        /// [`build`](Self::build) is called, or else that of the first lock.
        ///
        /// It needs tokio's I/O and time ([`enable_all`](tokio::runtime::Builder::enable_all)). Callers may use any
        /// runtime, but a lock is acquired, renewed and released only while this one runs. A
        /// current-thread runtime runs only within `block_on`; while it rests, callers elsewhere get
        /// [`LockError::Unavailable`](crate::LockError::Unavailable), whose failures name this setting. A runtime on a
        /// thread of its own renews locks also while a handler blocks the program's own threads; see [blocking and
        /// synchronous programs](crate::guide::waiting_and_losing#blocking-and-synchronous-programs).
        ///
        /// When the runtime has ended, the next use makes its own runtime the new home of both. Locks that were held until
        /// then are lost.
        ///
        /// ```
        /// use tower_redlock::Redlock;
        ///
        /// let background = tokio::runtime::Builder::new_multi_thread()
        ///     .worker_threads(1)
        ///     .enable_all()
        ///     .build()?;
        /// let redlock = Redlock::builder().embedded(3).runtime(background.handle().clone()).build()?;
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        runtime: Handle;
    }

    /// Checks the settings and creates the lock service.
    ///
    /// Does not connect, so a server that is down is no error.
    ///
    /// # Errors
    ///
    /// Returns a [`BuildError`], which names the setting, its value and the remedy, if there is no node, or more than
    /// 64 in a group, if a URL is malformed or listed twice, or if settings exclude each other. If the value was read from an environment variable,
    /// the error names that.
    pub fn build(self) -> Result<Redlock, BuildError> {
        let built = self.settings().and_then(|settings| {
            let (nodes, settings) = (self.node_settings(&settings)?, Arc::new(settings));
            let groups = named(&self.nodes, &self.groups)?;
            let next = self.moving_to.as_deref().map(moved_to).transpose()?;
            let layout = layout(&groups, next.as_deref(), &nodes, &settings)?;
            Ok(Redlock::new(settings, layout))
        });
        built.map_err(|error| error.name_variable(&self.variables))
    }

    fn settings(&self) -> Result<Settings, BuildError> {
        let namespace = Namespace::new(&self.namespace).ok_or_else(|| {
            let remedy = "braces would make key names ambiguous; leave them out";
            BuildError::new("namespace", &self.namespace, remedy)
        })?;
        let max_ttl = self.max_ttl.unwrap_or(self.ttl);
        BuildError::check_ttl("ttl", self.ttl)?;
        BuildError::check_ttl("max_ttl", max_ttl)?;
        if max_ttl < self.ttl {
            let remedy = format!("it is below ttl = {:?}; raise it or lower ttl", self.ttl);
            return Err(BuildError::from_duration("max_ttl", max_ttl, remedy));
        }
        for (setting, value) in [
            ("node_timeout", self.node_timeout),
            ("connect_timeout", self.connect_timeout),
            ("max_hold", self.max_hold.unwrap_or(Duration::MAX)),
        ] {
            if value.is_zero() {
                return Err(BuildError::from_duration(
                    setting,
                    value,
                    "zero leaves no time; raise it",
                ));
            }
        }
        if self.connect_timeout > LONGEST_TTL {
            let remedy = format!("it is too long; use at most {LONGEST_TTL:?}");
            let value = self.connect_timeout;
            return Err(BuildError::from_duration("connect_timeout", value, remedy));
        }
        if self.node_timeout >= self.ttl {
            let remedy = format!(
                "a lock would expire before its nodes have answered; use a time well below ttl = {:?}",
                self.ttl
            );
            return Err(BuildError::from_duration(
                "node_timeout",
                self.node_timeout,
                remedy,
            ));
        }
        // A longer time is no bound.
        let is_bound = |held: &Duration| held.saturating_add(max_ttl) <= LONGEST_RETENTION;
        let held = self.max_hold.filter(is_bound).unwrap_or_default();
        let least = (2 * max_ttl).max(held.saturating_add(max_ttl));
        let default = Duration::from_secs(60 * 60).max(least);
        let fence_retention = self.fence_retention.unwrap_or(default);
        if fence_retention < least {
            let remedy = format!(
                "a fence could expire before its lock; use at least max(2 * max_ttl, max_hold + max_ttl) = {least:?}"
            );
            return Err(BuildError::from_duration(
                "fence_retention",
                fence_retention,
                remedy,
            ));
        }
        if fence_retention > LONGEST_RETENTION {
            let remedy = format!("it is too long; use at most {LONGEST_RETENTION:?}");
            return Err(BuildError::from_duration(
                "fence_retention",
                fence_retention,
                remedy,
            ));
        }
        Ok(Settings {
            namespace,
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
            max_waiters: self.max_waiters.map(WaiterCap::new),
            log_keys: self.log_keys,
            #[cfg(feature = "test-util")]
            traces: self.traces.clone(),
        })
    }

    /// Returns what the nodes of all groups need.
    #[cfg_attr(
        not(feature = "redis"),
        expect(unused_variables, reason = "other nodes have no settings")
    )]
    fn node_settings(&self, settings: &Settings) -> Result<NodeSettings, BuildError> {
        Ok(NodeSettings {
            home: Arc::new(Home::new(self.runtime.clone())),
            #[cfg(feature = "redis")]
            timeouts: Timeouts {
                node: settings.node_timeout,
                connect: self.connect_timeout,
            },
            #[cfg(feature = "redis")]
            guard: self.guard(settings)?,
        })
    }

    #[cfg(feature = "redis")]
    fn guard(&self, settings: &Settings) -> Result<Option<Arc<Guard>>, BuildError> {
        let max_ttl = settings.max_ttl;
        let groups = self.groups.iter().chain(self.moving_to.iter().flatten());
        let sources: usize = groups.chain([&self.nodes]).map(NodeGroup::sources).sum();
        let window = match self.restart_guard {
            RestartGuard::Off if sources < 2 => return Ok(None),
            RestartGuard::Off => return Ok(Some(Guard::off())),
            RestartGuard::Auto => (2 * max_ttl).max(max_ttl + Duration::from_secs(5)),
            RestartGuard::For(window) if window > max_ttl && window <= LONGEST_RETENTION => window,
            RestartGuard::For(window) => {
                let remedy = format!(
                    "a restarted node must not vote while a lock that it forgot may live; use more than max_ttl = {max_ttl:?} and at most {LONGEST_RETENTION:?}"
                );
                return Err(BuildError::from_duration("restart_guard", window, remedy));
            }
        };
        let generation_key = settings.namespace.generation();
        Ok(Some(Guard::new(window, generation_key)))
    }
}
