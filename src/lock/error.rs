//! Errors, one type per operation.

use std::fmt;
use std::time::Duration;

use crate::lock::lost::LostReason;
use crate::lock::time::whole_millis;
use crate::node::NodeFailure;
use crate::protocol::{KeyError, validity};

/// The longest ttl that is not taken for a mistake in units: ten days.
pub(crate) const LONGEST_TTL: Duration = Duration::from_secs(10 * 24 * 60 * 60);

/// Why a lock was not acquired. Keys that nodes had granted are released.
///
/// A lock that is held, nodes that cannot be reached, and answers that come too late are three different
/// things; only the first says anything about the resource.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockError {
    /// The lock is held by another caller, and, with a wait, still was when the wait ended.
    Contended {
        /// After what time the lock expires unless its holder renews it, if that is known.
        retry_after: Option<Duration>,
    },
    /// No majority of the nodes answered; no holder of the lock is known.
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
    /// Too many calls wait for locks in this process.
    Overloaded {
        /// The number of calls that may wait.
        max: usize,
    },
    /// A longer ttl was asked for than `max_ttl`, which all clients of a namespace share.
    TtlTooLong {
        /// The ttl that was asked for.
        asked: Duration,
        /// The longest that is allowed.
        max: Duration,
    },
    /// The ttl is used up by clock drift.
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
    /// Returns the name of the error in spans and metrics.
    pub(crate) fn outcome(&self) -> &'static str {
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
                f.write_str("the lock is held by another caller")?;
                match retry_after {
                    Some(left) => write!(f, "; it expires in {left:?} unless it is renewed"),
                    None => Ok(()),
                }
            }
            Self::Unavailable {
                reached,
                needed,
                nodes,
            } => write_no_quorum(f, *reached, "voted on the lock", *needed, "", nodes),
            Self::Expired { ttl, elapsed } => write!(
                f,
                "the nodes granted the lock after {elapsed:?}, too late for a ttl of {ttl:?}; use a longer ttl"
            ),
            Self::Overloaded { max } => write!(
                f,
                "{max} calls already wait for locks in this process; raise max_waiters or shorten wait"
            ),
            Self::TtlTooLong { asked, max } => write_too_long(f, *asked, *max),
            Self::TtlTooShort { asked } => write!(
                f,
                "a ttl of {asked:?} is used up by clock drift (ttl / 100 + 2 ms); use a longer ttl"
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

/// Why a lock was not extended. A valid lock stays as valid as before.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExtendError {
    /// The lock is not held any more.
    Lost(LostReason),
    /// No majority of the nodes confirmed the extension. The end of the lock is unchanged.
    Unavailable {
        /// Nodes that answered.
        reached: usize,
        /// Nodes that make a majority.
        needed: usize,
        /// Why the others did not answer.
        nodes: Vec<NodeFailure>,
    },
    /// The ttl is over `max_ttl`.
    TtlTooLong {
        /// The ttl to extend by.
        asked: Duration,
        /// The builder's `max_ttl`.
        max: Duration,
    },
    /// The ttl is not longer than `node_timeout`, or used up by clock drift: the lock could expire before the
    /// extension is confirmed.
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
                let then = "; the lock ends when it would have";
                write_no_quorum(f, *reached, "confirmed the extension", *needed, then, nodes)
            }
            Self::TtlTooLong { asked, max } => write_too_long(f, *asked, *max),
            Self::TtlTooShort { asked } => write!(
                f,
                "a ttl of {asked:?} is not longer than node_timeout and clock drift; use a longer ttl"
            ),
        }
    }
}

impl std::error::Error for ExtendError {}

/// Why a release was not confirmed. The key expires by its ttl at the latest.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseError {
    /// The lock was lost before its release: its holder may have overlapped with another.
    Lost(LostReason),
    /// No majority of the nodes confirmed the release in time. It goes on in the background.
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
                let then = "; it goes on in the background, and the key expires by its ttl";
                write_no_quorum(f, *reached, "confirmed the release", *needed, then, nodes)
            }
        }
    }
}

impl std::error::Error for ReleaseError {}

fn write_no_quorum(
    f: &mut fmt::Formatter<'_>,
    reached: usize,
    step: &str,
    needed: usize,
    then: &str,
    nodes: &[NodeFailure],
) -> fmt::Result {
    write!(
        f,
        "no quorum: {reached} nodes {step}, {needed} are needed{then}"
    )?;
    nodes.iter().try_for_each(|node| write!(f, "; {node}"))
}

fn write_too_long(f: &mut fmt::Formatter<'_>, asked: Duration, max: Duration) -> fmt::Result {
    write!(
        f,
        "a ttl of {asked:?} is over max_ttl = {max:?}; raise max_ttl in every client of the namespace"
    )
}

/// A setting that a [`Redlock`](crate::Redlock) or a layer cannot be made with: its name, value and remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildError {
    setting: &'static str,
    value: String,
    remedy: String,
}

impl BuildError {
    pub(crate) fn new(setting: &'static str, value: impl fmt::Display, remedy: &str) -> Self {
        Self {
            setting,
            value: value.to_string(),
            remedy: remedy.to_owned(),
        }
    }

    pub(crate) fn from_duration(
        setting: &'static str,
        value: Duration,
        remedy: impl Into<String>,
    ) -> Self {
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

    /// Checks a ttl by itself.
    pub(crate) fn check_ttl(setting: &'static str, ttl: Duration) -> Result<(), Self> {
        if validity::lifetime(whole_millis(ttl)).is_none() {
            let remedy = "it is used up by clock drift (ttl / 100 + 2 ms); use seconds";
            return Err(Self::from_duration(setting, ttl, remedy));
        }
        if ttl > LONGEST_TTL {
            let remedy =
                format!("a crash would lock others out for that long; at most {LONGEST_TTL:?}");
            return Err(Self::from_duration(setting, ttl, remedy));
        }
        Ok(())
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
