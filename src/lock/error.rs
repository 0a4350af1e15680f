//! What can go wrong with a lock, one type per operation.

use std::fmt;
use std::time::Duration;

use crate::lock::lost::LostReason;
use crate::node::NodeFailure;
use crate::protocol::KeyError;

/// Why a lock was not acquired. Whatever the nodes granted has been released.
///
/// That somebody else holds the lock, that the nodes cannot be reached, and that they answered too
/// late are three different things; only the first says anything about the resource.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockError {
    /// Somebody else holds it, and, with a wait, still held it when the wait ended.
    Contended {
        /// When the lock expires unless its holder renews it, if that is known.
        retry_after: Option<Duration>,
    },
    /// No majority of the nodes answered: nobody is known to hold the lock.
    Unavailable {
        /// Nodes that voted.
        reached: usize,
        /// Nodes that make a majority.
        needed: usize,
        /// Why the others did not vote.
        nodes: Vec<NodeFailure>,
    },
    /// A majority granted the lock, but so late that nothing of the ttl was left.
    Expired {
        /// The ttl that was asked for.
        ttl: Duration,
        /// How long the nodes took.
        elapsed: Duration,
    },
    /// More calls wait in this process than allowed.
    Overloaded {
        /// How many may wait.
        max: usize,
    },
    /// A longer ttl was asked for than `max_ttl`, which all clients of a namespace share.
    TtlTooLong {
        /// The ttl that was asked for.
        asked: Duration,
        /// The longest that is allowed.
        max: Duration,
    },
    /// The ttl is so short that clock drift leaves nothing of it.
    TtlTooShort {
        /// The ttl that was asked for.
        asked: Duration,
    },
    /// The key names nothing that can be locked.
    Key(KeyError),
    /// [`Redlock::drain`](crate::Redlock::drain) was called, or the runtime is shutting down.
    Closed,
}

impl LockError {
    /// The name of the case in spans and metrics.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::Contended { .. } => "contended",
            Self::Unavailable { .. } => "unavailable",
            Self::Expired { .. } => "expired",
            Self::Overloaded { .. } => "overloaded",
            Self::TtlTooLong { .. } | Self::TtlTooShort { .. } | Self::Key(_) => "invalid",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Contended { retry_after } => {
                f.write_str("somebody else holds the lock")?;
                match retry_after {
                    Some(left) => write!(f, "; it expires in {left:?} unless it is renewed"),
                    None => Ok(()),
                }
            }
            Self::Unavailable {
                reached,
                needed,
                nodes,
            } => {
                write!(
                    f,
                    "{reached} nodes voted on the lock and {needed} are needed"
                )?;
                write_nodes(f, nodes)
            }
            Self::Expired { ttl, elapsed } => write!(
                f,
                "a majority granted the lock after {elapsed:?}, too late for a ttl of {ttl:?}; use a longer ttl"
            ),
            Self::Overloaded { max } => write!(
                f,
                "{max} calls already wait for locks in this process; raise max_waiters or wait shorter"
            ),
            Self::TtlTooLong { asked, max } => write_too_long(f, *asked, *max),
            Self::TtlTooShort { asked } => write!(
                f,
                "a ttl of {asked:?} is used up by clock drift (ttl / 100 + 2 ms); ask for more"
            ),
            Self::Key(error) => error.fmt(f),
            Self::Closed => f.write_str("the lock service of this process is shutting down"),
        }
    }
}

impl std::error::Error for LockError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Key(error) => Some(error),
            Self::Unavailable { nodes, .. } => nodes.first().map(|node| node as _),
            _ => None,
        }
    }
}

impl From<KeyError> for LockError {
    fn from(error: KeyError) -> Self {
        Self::Key(error)
    }
}

/// Why a lock was not extended. A lock that was valid before is as valid as before.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExtendError {
    /// The lock is not held any more; nothing can be extended.
    Lost(LostReason),
    /// No majority of the nodes confirmed it. The lock runs on to the end it had.
    Unavailable {
        /// Nodes that answered.
        reached: usize,
        /// Nodes that make a majority.
        needed: usize,
        /// Why the others did not answer.
        nodes: Vec<NodeFailure>,
    },
    /// A longer ttl was asked for than `max_ttl`, which all clients of a namespace share.
    TtlTooLong {
        /// The ttl that was asked for.
        asked: Duration,
        /// The longest that is allowed.
        max: Duration,
    },
    /// The ttl is not longer than `node_timeout`, or clock drift leaves nothing of it: it could be
    /// over before the extension is confirmed.
    TtlTooShort {
        /// The ttl that was asked for.
        asked: Duration,
    },
}

impl fmt::Display for ExtendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(reason) => write!(f, "the lock cannot be extended: {reason}"),
            Self::Unavailable {
                reached,
                needed,
                nodes,
            } => {
                write!(
                    f,
                    "{reached} nodes answered the extension and {needed} are needed; the lock keeps the end it had"
                )?;
                write_nodes(f, nodes)
            }
            Self::TtlTooLong { asked, max } => write_too_long(f, *asked, *max),
            Self::TtlTooShort { asked } => write!(
                f,
                "a ttl of {asked:?} is not longer than node_timeout and clock drift; ask for more"
            ),
        }
    }
}

impl std::error::Error for ExtendError {}

/// Why a release was not confirmed. The key ends by its ttl at the latest.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseError {
    /// The lock had been lost before: what was done under it may have overlapped with others.
    Lost(LostReason),
    /// No majority of the nodes confirmed it in time. It goes on in the background.
    Unavailable {
        /// Nodes that confirmed.
        reached: usize,
        /// Nodes that make a majority.
        needed: usize,
        /// Why the others did not.
        nodes: Vec<NodeFailure>,
    },
}

impl fmt::Display for ReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(reason) => write!(f, "the lock was lost before its release: {reason}"),
            Self::Unavailable {
                reached,
                needed,
                nodes,
            } => {
                write!(
                    f,
                    "{reached} nodes confirmed the release and {needed} are needed; it goes on in the background and ends by the ttl"
                )?;
                write_nodes(f, nodes)
            }
        }
    }
}

impl std::error::Error for ReleaseError {}

fn write_nodes(f: &mut fmt::Formatter<'_>, nodes: &[NodeFailure]) -> fmt::Result {
    nodes.iter().try_for_each(|node| write!(f, "; {node}"))
}

fn write_too_long(f: &mut fmt::Formatter<'_>, asked: Duration, max: Duration) -> fmt::Result {
    write!(
        f,
        "a ttl of {asked:?} was asked for and max_ttl is {max:?}; raise max_ttl in every client of the namespace"
    )
}
