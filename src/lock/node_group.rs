//! Groups of nodes as a program describes them, and the layout that is made of them.

use std::collections::BTreeSet;
use std::fmt;
#[cfg(feature = "unstable-protocol")]
use std::ops::Range;
use std::sync::Arc;

use crate::lock::cluster::Cluster;
use crate::lock::error::BuildError;
#[cfg(feature = "redis")]
use crate::lock::error::without_credentials;
use crate::lock::layout::{Group, Layout};
use crate::lock::settings::Settings;
#[cfg(feature = "redis")]
use crate::node::redis::{AnyProvider, Endpoint, Guard, Login, RedisNode, RedisServer, Timeouts};
use crate::node::{EmbeddedNode, Home, Mutex, Node, Peers};
use crate::protocol::Quorum;

/// A group of nodes, which are a quorum of their own; see
/// [`RedlockBuilder::node_group`](crate::RedlockBuilder::node_group) and
/// [`RedlockBuilder::moving_to`](crate::RedlockBuilder::moving_to).
///
/// A list of URLs can be converted into a group.
///
/// ```
/// use tower_redlock::{NodeGroup, Redlock};
///
/// let redlock = Redlock::builder()
///     .node_group(NodeGroup::new().name("north").embedded(3))
///     .node_group(NodeGroup::new().name("south").embedded(3))
///     .build()?;
/// # Ok::<(), tower_redlock::BuildError>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "a group does nothing until it is added to a builder"]
pub struct NodeGroup {
    pub(super) name: Option<String>,
    pub(super) sources: Vec<Source>,
}

/// How a node is made.
#[derive(Clone)]
pub(super) enum Source {
    Embedded,
    /// A Redis server, and the setting that names it.
    #[cfg(feature = "redis")]
    Server(&'static str, Box<deadpool_redis::Config>),
    #[cfg(feature = "redis")]
    Pool(deadpool_redis::Pool),
    #[cfg(feature = "test-util")]
    Scripted(Arc<crate::node::scripted::ScriptedNode>),
    /// The node with this number.
    #[cfg(feature = "unstable-protocol")]
    Simulated(usize, Arc<dyn crate::node::sim::SimNetwork>),
}

/// What all nodes of a lock service have in common.
pub(super) struct NodeSettings {
    pub(super) settings: Arc<Settings>,
    pub(super) home: Arc<Home>,
    /// Who is asked for the credentials of connections.
    #[cfg(feature = "redis")]
    pub(super) credentials: Option<AnyProvider>,
    #[cfg(feature = "redis")]
    pub(super) guard: Arc<Guard>,
}

/// Implements the setters that add nodes, for a type with sources in this field.
macro_rules! node_setters {
    ($type:ty, $($sources:ident).+) => {
        impl $type {
            /// Adds a Redis server by its URL: `redis://[user:password@]host[:port][/db]`, `rediss://` for
            /// TLS (feature `tls-rustls`), `unix://path`.
            ///
            /// The server must be an independent master, reached directly: not a replica or a proxy that fails over. In
            /// cluster mode, it must have all hash slots. Its version must be 6.2 or later. All clients must name the same
            /// servers. See [operating the nodes](crate::guide::operating_the_nodes) for rights, certificates and more.
            #[cfg(feature = "redis")]
            pub fn url(self, url: impl AsRef<str>) -> Self {
                let config = deadpool_redis::Config::from_url(url.as_ref());
                self.with_sources([Source::Server("url", Box::new(config))])
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
            pub fn pool_config(self, config: deadpool_redis::Config) -> Self {
                self.with_sources([Source::Server("pool_config", Box::new(config))])
            }

            /// Adds a Redis server by a pool of connections to it, for settings that no URL can express, such as a client
            /// certificate.
            ///
            /// The node takes connections out of the pool for good: one for locks, and up to four to read large results.
            /// The pool's own timeouts apply when a connection opens, the node timeout to every request on it.
            ///
            /// A [`url`](Self::url) or a [`pool_config`](Self::pool_config) is faster, because redis-rs drives each
            /// connection of the pool in a separate task. It also wakes the waiters of this process when other processes release
            /// their locks, for which the address of the server must be known.
            #[cfg(feature = "redis")]
            pub fn pool(self, pool: deadpool_redis::Pool) -> Self {
                self.with_sources([Source::Pool(pool)])
            }

            /// Adds `count` nodes in the memory of this process.
            pub fn embedded(self, count: usize) -> Self {
                // One too many is refused when they are made, and more as well.
                let count = count.min($crate::protocol::NodeSet::MAX + 1);
                self.with_sources(vec![Source::Embedded; count])
            }

            /// Adds nodes whose answers a test controls.
            #[cfg(feature = "test-util")]
            pub fn scripted(self, nodes: &crate::node::scripted::ScriptedNodes) -> Self {
                self.with_sources(nodes.nodes.iter().cloned().map(Source::Scripted))
            }

            fn with_sources(mut self, sources: impl IntoIterator<Item = Source>) -> Self {
                self.$($sources).+.extend(sources);
                self
            }
        }
    };
}

pub(super) use node_setters;

node_setters!(NodeGroup, sources);

impl NodeGroup {
    /// Creates a group without nodes.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets the name, which decides on the keys of the group. Default: the position of the group, counted from zero.
        name(name: impl Into<String>) => name = Some(name.into());
    }

    /// Adds the nodes with these numbers behind a network that a simulation implements.
    #[cfg(feature = "unstable-protocol")]
    pub fn simulated(
        self,
        nodes: Range<usize>,
        network: Arc<dyn crate::node::sim::SimNetwork>,
    ) -> Self {
        let simulated = move |number| Source::Simulated(number, Arc::clone(&network));
        self.with_sources(nodes.map(simulated))
    }

    /// Returns the URLs that it was given.
    #[cfg(feature = "redis")]
    pub(super) fn listed_urls(&self) -> impl Iterator<Item = &str> {
        self.sources.iter().filter_map(|source| match source {
            Source::Server(_, config) => config.url.as_deref(),
            _ => None,
        })
    }

    /// Returns what tells its nodes from those of other groups, in any order.
    fn identity(&self) -> Vec<String> {
        let mut nodes: Vec<String> = self.sources.iter().map(Source::identity).collect();
        // A majority does not depend on which node comes first.
        nodes.sort_unstable();
        nodes
    }
}

/// A group of the Redis servers with these URLs.
#[cfg(feature = "redis")]
impl<U: AsRef<str>, I: IntoIterator<Item = U>> From<I> for NodeGroup {
    fn from(urls: I) -> Self {
        Self::new().urls(urls)
    }
}

/// Returns the names that groups have in their layout.
fn names(groups: &[NodeGroup]) -> impl Iterator<Item = String> {
    let groups = groups.iter().enumerate();
    groups.map(|(position, group)| group.name.clone().unwrap_or_else(|| position.to_string()))
}

/// Makes the nodes of all groups, and their layout. Nodes outside of all groups are a group if there is no other.
pub(super) fn layout(
    outside: &NodeGroup,
    groups: &[NodeGroup],
    moving_to: Option<&[NodeGroup]>,
    nodes: &NodeSettings,
) -> Result<Layout, BuildError> {
    let (present, setting) = match groups {
        [] => (std::slice::from_ref(outside), "nodes"),
        groups if outside.sources.is_empty() => (groups, "group"),
        _ => {
            let remedy = "each node belongs to one group; add these nodes as a `group` too";
            return Err(BuildError::new("group", "nodes outside of it", remedy));
        }
    };
    if moving_to.is_some_and(<[_]>::is_empty) {
        let remedy = "there is no group to move to; name the new groups, or leave it out";
        return Err(BuildError::new("moving_to", 0, remedy));
    }
    let all = names(present).chain(moving_to.into_iter().flat_map(names));
    let is_told = all.collect::<BTreeSet<_>>().len() > 1;
    // Each group once, beside what it was made of; and the names of their nodes.
    let (mut made, mut nodes_so_far) = (Vec::<(Arc<Group>, &NodeGroup)>::new(), Vec::new());
    let mut place = |groups, setting| {
        let mut placed: Vec<Arc<Group>> = Vec::new();
        for (name, group) in names(groups).zip(groups) {
            if placed.iter().any(|other| *other.name == *name) {
                let remedy = "two groups have this name; a key belongs to one of them by the name, so give each its own";
                return Err(BuildError::new(setting, name, remedy));
            }
            // A group of both layouts is made once. Otherwise its keys would count as such that move, and their callers would
            // meet their own locks on the same nodes.
            let known = made.iter().find(|(known, _)| *known.name == *name);
            placed.push(match known {
                Some((known, same)) if same.identity() == group.identity() => Arc::clone(known),
                Some(_) => {
                    let remedy = "its nodes are not those that the group of this name has now, by host, port and database; give a group of other servers another name";
                    let value = format!("group {name}");
                    return Err(BuildError::new(setting, value, remedy));
                }
                None => {
                    let new = nodes.group(name, group, setting, is_told, &mut nodes_so_far)?;
                    made.push((Arc::clone(&new), group));
                    new
                }
            });
        }
        Ok(placed)
    };
    let current = place(present, setting)?.len();
    let next = moving_to.map(|next| place(next, "moving_to")).transpose()?;
    let made = made.into_iter().map(|(group, _)| group);
    Ok(Layout::new(made.collect(), current, next))
}

impl NodeSettings {
    /// Makes a group that a setting names, and adds the names of its nodes to those of all groups. Its own name is a label if
    /// it is told.
    fn group(
        &self,
        name: String,
        group: &NodeGroup,
        setting: &'static str,
        is_told: bool,
        names: &mut Vec<Arc<str>>,
    ) -> Result<Arc<Group>, BuildError> {
        let count = group.sources.len();
        let quorum = Quorum::new(count).ok_or_else(|| {
            let value = match setting {
                "nodes" => count.to_string(),
                _ => format!("group {name}"),
            };
            let remedy = match count {
                0 => "there is no node; add `url`, `urls`, `pool_config`, `pool` or `embedded`",
                _ => "there are more than 64 nodes, the most that a lock can ask; use an odd number from 3 to 7",
            };
            BuildError::new(setting, value, remedy)
        })?;
        let name: Arc<str> = name.into();
        let label = is_told.then(|| Arc::clone(&name));
        let peers = Arc::new(Peers::new(quorum, label.as_ref()));
        let mut made = Vec::with_capacity(count);
        for source in &group.sources {
            let node = self.node(source, &peers, names);
            let node = node.map_err(|error| match setting {
                "moving_to" => error.of_setting(setting),
                _ => error,
            })?;
            names.push(Arc::clone(node.name()));
            made.push(node);
        }
        Ok(Arc::new(Group {
            name,
            label,
            cluster: Cluster::new(made, quorum, &self.settings, &self.home),
            queue: Arc::default(),
            reads: Mutex::default(),
        }))
    }

    /// Makes a node behind those with these names.
    #[cfg_attr(
        not(feature = "redis"),
        expect(unused_variables, reason = "other nodes have no settings")
    )]
    fn node(
        &self,
        source: &Source,
        peers: &Arc<Peers>,
        names: &[Arc<str>],
    ) -> Result<Arc<dyn Node>, BuildError> {
        Ok(match source {
            Source::Embedded => Arc::new(EmbeddedNode::new(names.len(), Arc::clone(&self.home))),
            #[cfg(feature = "test-util")]
            Source::Scripted(node) => Arc::new(crate::node::scripted::ScriptedLane::to(node)),
            #[cfg(feature = "unstable-protocol")]
            Source::Simulated(number, network) => {
                Arc::new(crate::node::sim::SimNode::new(*number, Arc::clone(network)))
            }
            #[cfg(feature = "redis")]
            Source::Server(setting, config) => {
                let limit = self.settings.connect_timeout;
                let login = self.credentials.clone().map(|provider| (provider, limit));
                let endpoint = endpoint(setting, config, login)?;
                if names.contains(&endpoint.name) {
                    let remedy = "it is listed twice; list it once, because a majority must be of independent servers, \
                                  and a group that stays keeps its name";
                    return Err(BuildError::new(setting, &endpoint.name, remedy));
                }
                self.redis_node(endpoint, peers)
            }
            // It has no address, and is numbered.
            #[cfg(feature = "redis")]
            Source::Pool(pool) => {
                let name = format!("pool-{}", names.len());
                let endpoint = Endpoint::from_pool(&name, pool.clone());
                let endpoint = endpoint.map_err(|why| BuildError::new("pool", name, why))?;
                self.redis_node(endpoint, peers)
            }
        })
    }

    #[cfg(feature = "redis")]
    fn redis_node(&self, endpoint: Endpoint, peers: &Arc<Peers>) -> Arc<dyn Node> {
        let timeouts = Timeouts {
            node: self.settings.node_timeout,
            connect: self.settings.connect_timeout,
        };
        let (guard, home) = (Arc::clone(&self.guard), &self.home);
        let server = RedisServer::new(endpoint, timeouts, guard, home, peers);
        Arc::new(RedisNode::new(server))
    }
}

/// Returns how to reach the server that a setting names. The error shows no credentials.
#[cfg(feature = "redis")]
fn endpoint(
    setting: &'static str,
    config: &deadpool_redis::Config,
    login: Option<Login>,
) -> Result<Endpoint, BuildError> {
    Endpoint::from_config(config, login).map_err(|why| {
        let url = config.url.as_deref().map(without_credentials);
        let url = url.unwrap_or_else(|| "a configuration without a url".into());
        BuildError::new(setting, url, why)
    })
}

impl Source {
    /// Returns what is equal for the same node.
    fn identity(&self) -> String {
        match self {
            Self::Embedded => "embedded".into(),
            #[cfg(feature = "redis")]
            Self::Server(setting, config) => match endpoint(setting, config, None) {
                Ok(endpoint) => endpoint.identity(),
                // It is refused when its node is made.
                Err(error) => error.to_string(),
            },
            #[cfg(feature = "redis")]
            Self::Pool(_) => "pool".into(),
            #[cfg(feature = "test-util")]
            Self::Scripted(node) => format!("{:p}", Arc::as_ptr(node)),
            #[cfg(feature = "unstable-protocol")]
            Self::Simulated(number, _) => format!("sim-{number}"),
        }
    }
}

/// Shows no credentials, which URLs and pools have.
impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.identity())
    }
}
