//! The builder, which checks the nodes and the settings together and makes the lock service.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::lock::error::BuildError;
use crate::lock::node_group::{NodeGroup, NodeSettings, Source, layout, node_setters};
use crate::lock::redlock::Redlock;
use crate::lock::settings::{RestartGuard, Settings, settings};
#[cfg(feature = "test-util")]
use crate::lock::traces::Traces;
use crate::node::Home;
#[cfg(feature = "redis")]
use crate::node::redis::{AnyProvider, CredentialsProvider};
use crate::protocol::{Namespace, Retry};

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
#[derive(Debug, Clone, Default)]
#[must_use = "a builder does nothing itself; call `.build()`"]
pub struct RedlockBuilder {
    /// The nodes outside of named groups, which are a group if there is no other.
    pub(super) nodes: NodeGroup,
    pub(super) groups: Vec<NodeGroup>,
    pub(super) moving_to: Option<Vec<NodeGroup>>,
    /// That of the settings, unless it is set; checked in the end.
    pub(super) namespace: Option<String>,
    pub(super) settings: Settings,
    runtime: Option<Handle>,
    #[cfg(feature = "redis")]
    credentials: Option<AnyProvider>,
    /// The settings that were read from environment variables, and not set again.
    pub(super) variables: Vec<&'static str>,
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
        let built = Self::builder().embedded(nodes).build();
        built.expect("Redlock::in_memory makes 1 to 64 nodes, for which the defaults are valid")
    }
}

/// Defines setters, each with its documentation: name, argument, the field that it sets, and the value.
macro_rules! builder_setters {
    ($($(#[$attribute:meta])+ $setter:ident($argument:ident: $type:ty) => $($field:ident).+ = $value:expr;)+) => {
        impl RedlockBuilder {$(
            $(#[$attribute])+
            pub fn $setter(mut self, $argument: $type) -> Self {
                self.$($field).+ = $value;
                // The program chose it, whatever the environment said.
                self.variables.retain(|variable| *variable != stringify!($setter));
                self
            }
        )+}
    };
}

/// Defines the setter of each setting that is data.
macro_rules! data_setters {
    ($($(#[$doc:meta])+ $name:ident: $type:ty $(as $optional:ty)? = $default:expr;)+) => {
        builder_setters! { $($(#[$doc])+ $name($name: $type) => settings.$name = $name.into();)+ }
    };
}

settings!(data_setters);

builder_setters! {
    /// Remembers what happens to the last 1,000 leases. Default: off.
    #[cfg(feature = "test-util")]
    traces(traces: &Traces) => settings.traces = Some(traces.clone());

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
    moving_to(groups: impl IntoIterator<Item = impl Into<NodeGroup>>) =>
        moving_to = Some(groups.into_iter().map(Into::into).collect());

    /// Sets the prefix of all keys on the nodes. Default: `redlock`.
    ///
    /// Clients exclude each other if they have the same namespace. In the empty namespace, a lock has exactly the
    /// name of its key, as with other Redlock clients.
    namespace(namespace: impl Into<String>) => namespace = Some(namespace.into());

    /// Sets the label by which refused callers and operators know this process, such as `host/pid`; see
    /// [`Holder`](crate::Holder). Default: none.
    ///
    /// It is stored on the nodes, in the value of each lock, and costs no further command. It has 64 bytes at most, and no
    /// control characters. Responses do not show it unless a layer is told to
    /// [`expose_holder`](crate::RedlockLayer::expose_holder).
    holder(holder: impl Into<String>) => settings.holder = Some(holder.into().into());

    /// Sets the delays between attempts while another process holds the lock and no majority of the nodes
    /// would publish its release. Default: random, growing from 10 ms to 250 ms.
    retry(retry: Retry) => settings.retry = retry;

    /// Sets the provider that is asked for the credentials of each new connection, for passwords that change while the service
    /// runs, and for tokens. Default: the credentials in the URLs.
    ///
    /// It replaces the passwords in all URLs, and their users if it names one. A connection that is open stays open, whatever
    /// happens to the password that it logged in with. To change a password without a pause, add the new one to the
    /// servers, then let the provider return it, and remove the old one at last; see [operating the
    /// nodes](crate::guide::operating_the_nodes#changing-passwords). A [`pool`](Self::pool) logs in itself.
    ///
    /// Each connection waits for its credentials for at most [`connect_timeout`](Self::connect_timeout), in addition to the time
    /// that the server takes.
    ///
    /// ```
    /// use tower_redlock::{Credentials, Redlock};
    ///
    /// let redlock = Redlock::builder()
    ///     .urls(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"])
    ///     .credentials(Credentials::from_file("/run/secrets/redis/password").username("locker"))
    ///     .build()?;
    /// # Ok::<(), tower_redlock::BuildError>(())
    /// ```
    #[cfg(feature = "redis")]
    credentials(provider: impl CredentialsProvider) => credentials = Some(AnyProvider::new(provider));

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
    runtime(runtime: Handle) => runtime = Some(runtime);
}

node_setters!(RedlockBuilder, nodes.sources);

impl RedlockBuilder {
    /// Adds `count` nodes behind a network that a simulation implements.
    #[cfg(feature = "unstable-protocol")]
    pub fn simulated(
        mut self,
        count: usize,
        network: Arc<dyn crate::node::sim::SimNetwork>,
    ) -> Self {
        self.nodes = self.nodes.simulated(0..count, network);
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
        let built = self.build_unnamed();
        built.map_err(|error| error.name_variable(&self.variables))
    }

    /// Builds it, with errors that name settings and no variables.
    fn build_unnamed(&self) -> Result<Redlock, BuildError> {
        let mut settings = self.settings.clone();
        if let Some(namespace) = &self.namespace {
            settings.namespace = Namespace::new(namespace).ok_or_else(|| {
                let remedy = "braces would make key names ambiguous; leave them out";
                BuildError::new("namespace", namespace, remedy)
            })?;
        }
        let settings = Arc::new(settings.checked()?);
        let nodes = NodeSettings {
            settings: Arc::clone(&settings),
            home: Arc::new(Home::new(self.runtime.clone())),
            #[cfg(feature = "redis")]
            credentials: self.credentials.clone(),
            #[cfg(feature = "redis")]
            guard: settings.guard()?,
        };
        let next = self.moving_to.as_deref();
        let layout = layout(&self.nodes, &self.groups, next, &nodes)?;
        Ok(Redlock::new(settings, layout))
    }
}
