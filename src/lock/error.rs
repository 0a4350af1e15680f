//! The errors of the lock, one type per operation.

use std::borrow::Cow;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::select;
use thiserror::Error;

use crate::node::{NodeFailure, whole_seconds};
use crate::protocol::lease::Decided;
pub use crate::protocol::lease::LostReason;
use crate::protocol::validity::whole_millis;
use crate::protocol::{Holder, KeyError, validity};

/// The longest ttl that is not rejected as a mistake in units: ten days.
pub(crate) const LONGEST_TTL: Duration = Duration::from_secs(10 * 24 * 60 * 60);

/// Error of an acquisition. Keys that some nodes had granted are released.
///
/// Only [`Contended`](Self::Contended) says anything about the resource: another caller holds it. If nodes cannot
/// be reached, or answer too late, the resource may well be free.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another caller holds the lock, and held it until the end of the wait.
    #[error("{}", contended(*retry_after, holder.as_ref()))]
    #[non_exhaustive]
    Contended {
        /// The time until the lock expires unless its holder renews it, if known.
        retry_after: Option<Duration>,
        /// Who holds it, if the holder says so and this caller has heard it; of several holders, one at most. See
        /// [`Redlock::inspect`](crate::Redlock::inspect) for all.
        holder: Option<Holder>,
    },
    /// No majority of the nodes voted, and no holder of the lock is known.
    #[error("{}", unavailable(*reached, *needed, voted, nodes))]
    Unavailable {
        /// The number of nodes that voted.
        reached: usize,
        /// The number of nodes that make a majority.
        needed: usize,
        /// The names of the nodes that voted.
        voted: Vec<Arc<str>>,
        /// The failures of the other nodes.
        nodes: Vec<NodeFailure>,
    },
    /// A majority granted the lock, but so late that its validity was over.
    #[error(
        "the nodes granted the lock after {elapsed:?}, too late for a ttl of {ttl:?}; use a longer ttl"
    )]
    Expired {
        /// The ttl of the lock.
        ttl: Duration,
        /// The time that the nodes took.
        elapsed: Duration,
    },
    /// Too many calls wait for locks already; see [`max_waiters`](crate::RedlockBuilder::max_waiters).
    #[error(
        "{max} calls already wait for locks in this process; raise max_waiters or shorten wait"
    )]
    Overloaded {
        /// The number of calls that may wait.
        max: usize,
    },
    /// The ttl is over [`max_ttl`](crate::RedlockBuilder::max_ttl), which all clients of a namespace share.
    #[error("{}", too_long(*asked, *max))]
    TtlTooLong {
        /// The requested ttl.
        asked: Duration,
        /// The builder's `max_ttl`.
        max: Duration,
    },
    /// The allowance for clock drift uses up the ttl.
    #[error("a ttl of {asked:?} is used up by clock drift (ttl / 100 + 2 ms); use a longer ttl")]
    TtlTooShort {
        /// The requested ttl.
        asked: Duration,
    },
    /// The number of slots is zero or too high; see [`slots`](crate::LockRequest::slots).
    #[error("a key cannot have {asked} slots; choose between 1 and {max}")]
    InvalidSlots {
        /// The requested number.
        asked: usize,
        /// The highest number.
        max: usize,
    },
    /// The same HTTP request holds the lock as a reader already, and asks to hold it alone. A reader cannot become the
    /// only holder, so it would wait for itself.
    #[error(
        "the request holds the lock as a reader and cannot become its only holder; lock it alone from the \
         beginning, or share it everywhere in the request"
    )]
    HeldShared,
    /// The key, or the set of keys, is invalid.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// [`Redlock::drain`](crate::Redlock::drain) was called, or the runtime is shutting down.
    #[error("the lock service of this process is shutting down")]
    Closed,
}

impl LockError {
    /// Returns who holds the lock, if that is known.
    pub(crate) fn holder(&self) -> Option<&Holder> {
        match self {
            Self::Contended { holder, .. } => holder.as_ref(),
            _ => None,
        }
    }

    /// Creates the error of a request that too few nodes granted, of which `nodes` tells why the others did not.
    pub(crate) fn without_quorum(
        needed: usize,
        voted: Vec<Arc<str>>,
        nodes: Vec<NodeFailure>,
    ) -> Self {
        Self::Unavailable {
            reached: voted.len(),
            needed,
            voted,
            nodes,
        }
    }

    /// Creates the error of a caller that another one keeps from the lock, with what is known of that one.
    pub(crate) fn contended(retry_after: Option<Duration>, holder: Option<Holder>) -> Self {
        Self::Contended {
            retry_after,
            holder,
        }
    }

    /// Returns the error of a lock in several groups, of which one could not be given the token of another.
    /// These are the nodes of that group.
    pub(crate) fn from_raise(
        error: ExtendError,
        names: &[Arc<str>],
        ttl: Duration,
        elapsed: Duration,
    ) -> Self {
        match error {
            ExtendError::Unavailable { needed, nodes, .. } => {
                let failed = |name: &str| nodes.iter().any(|node| node.node() == name);
                let voted = names.iter().filter(|name| !failed(name));
                Self::without_quorum(needed, voted.map(Arc::clone).collect(), nodes)
            }
            // Its lease ended while the others were acquired.
            _ => Self::Expired { ttl, elapsed },
        }
    }

    /// Returns when enough nodes may vote again, if the quarantine of restarted nodes is all that keeps a majority
    /// from voting; see [`restart_guard`](crate::RedlockBuilder::restart_guard).
    ///
    /// The time counts from the refusal. `None` for every other error, and if too few nodes answer at all.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_redlock::{LockError, NodeFailure};
    ///
    /// let quarantined = |node: &str, seconds| NodeFailure::Quarantined {
    ///     node: node.into(),
    ///     left: Duration::from_secs(seconds),
    /// };
    /// let refused = LockError::Unavailable {
    ///     reached: 1,
    ///     needed: 2,
    ///     voted: vec!["redis-a:6379".into()],
    ///     nodes: vec![quarantined("redis-b:6379", 12), quarantined("redis-c:6379", 15)],
    /// };
    /// assert_eq!(refused.quarantined(), Some(Duration::from_secs(12)));
    /// ```
    #[must_use]
    pub fn quarantined(&self) -> Option<Duration> {
        match self {
            Self::Unavailable {
                reached,
                needed,
                nodes,
                ..
            } => quarantined(*reached, *needed, nodes),
            _ => None,
        }
    }

    /// Returns the name of the error in spans and metrics.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Contended { .. } => "contended",
            Self::Unavailable { .. } if self.quarantined().is_some() => "quarantined",
            Self::Unavailable { .. } => "unavailable",
            Self::Expired { .. } => "expired",
            Self::Overloaded { .. } => "overloaded",
            Self::TtlTooLong { .. }
            | Self::TtlTooShort { .. }
            | Self::InvalidSlots { .. }
            | Self::HeldShared
            | Self::Key(_) => "invalid",
            Self::Closed => "closed",
        }
    }
}

/// The reason for which a caller does not get a lock, or does not execute under it.
#[derive(Debug, Clone)]
pub(crate) enum Denied {
    /// The lock was not acquired.
    Lock(LockError),
    /// The lock was lost before the execution began.
    #[cfg_attr(
        not(feature = "idempotency"),
        expect(dead_code, reason = "only the HTTP layer reports the reason")
    )]
    Lost(LostReason),
    /// Another execution decides, or one of another request.
    Decided(Decided),
}

impl From<LockError> for Denied {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

/// For the caller of a plain lock, for whom nothing else decides.
impl From<Denied> for LockError {
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::Lock(error) => error,
            Denied::Lost(_) | Denied::Decided(_) => Self::Closed,
        }
    }
}

/// Error of an extension. A lock that is not lost stays exactly as valid as before.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ExtendError {
    /// The lock is lost.
    #[error("the lock cannot be extended: {0}")]
    Lost(LostReason),
    /// No majority of the nodes confirmed the extension. The end of the validity is unchanged.
    #[error(
        "no quorum: {} answered, {needed} must confirm the extension; the end of the lock is unchanged{}",
        counted(*reached), listed(nodes)
    )]
    Unavailable {
        /// The number of nodes that answered.
        reached: usize,
        /// The number of nodes that make a majority.
        needed: usize,
        /// The failures of the other nodes.
        nodes: Vec<NodeFailure>,
    },
    /// The ttl is over [`max_ttl`](crate::RedlockBuilder::max_ttl).
    #[error("{}", too_long(*asked, *max))]
    TtlTooLong {
        /// The requested ttl.
        asked: Duration,
        /// The builder's `max_ttl`.
        max: Duration,
    },
    /// The ttl is not longer than `node_timeout`, so that the lock could expire before the extension is confirmed,
    /// or the allowance for clock drift uses it up.
    #[error("a ttl of {asked:?} is not longer than node_timeout and clock drift; use a longer ttl")]
    TtlTooShort {
        /// The requested ttl.
        asked: Duration,
    },
}

/// Error of a release. The key expires by its ttl at the latest.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ReleaseError {
    /// The lock was lost before its release. Another caller may have held it at the same time.
    #[error("the lock was lost before its release: {0}")]
    Lost(LostReason),
    /// No majority of the nodes confirmed the release in time. It goes on in the background.
    #[error(
        "no quorum: {} confirmed the release, {needed} are needed; it goes on in the background, and the key expires by \
         its ttl{}",
        counted(*reached), listed(nodes)
    )]
    Unavailable {
        /// The number of nodes that confirmed the release.
        reached: usize,
        /// The number of nodes that make a majority.
        needed: usize,
        /// The failures of the other nodes.
        nodes: Vec<NodeFailure>,
    },
}

/// Returns when enough quarantined nodes may vote, if their votes are all that lacks.
fn quarantined(reached: usize, needed: usize, nodes: &[NodeFailure]) -> Option<Duration> {
    let is_unanswered = |node: &&NodeFailure| matches!(node, NodeFailure::Unanswered { .. });
    let left = nodes.iter().filter_map(|node| match node {
        NodeFailure::Quarantined { left, .. } => Some(*left),
        _ => None,
    });
    let mut left: Vec<Duration> = left.collect();
    left.sort_unstable();
    // A node that is known to be down fails at once, so one that has not answered yet counts as up.
    let up = reached + nodes.iter().filter(is_unanswered).count();
    let missing = needed.saturating_sub(up).max(1);
    left.get(missing - 1).copied()
}

fn contended(retry_after: Option<Duration>, holder: Option<&Holder>) -> String {
    let holder = holder.map_or_else(|| "another caller".into(), Holder::to_string);
    let left = retry_after.map(|left| format!("; it expires in {left:?} unless it is renewed"));
    format!("the lock is held by {holder}{}", left.unwrap_or_default())
}

fn unavailable(reached: usize, needed: usize, voted: &[Arc<str>], nodes: &[NodeFailure]) -> String {
    let mut text = format!("no quorum: {} voted on the lock", counted(reached));
    if !voted.is_empty() {
        text += &format!(" ({})", voted.join(", "));
    }
    text += &format!(
        ", {needed} {} needed",
        if needed == 1 { "is" } else { "are" }
    );
    if let Some(left) = quarantined(reached, needed, nodes) {
        let seconds = whole_seconds(left);
        text += &format!("; enough may vote in {seconds} s, after their quarantine");
    }
    text + &listed(nodes)
}

fn too_long(asked: Duration, max: Duration) -> String {
    format!(
        "a ttl of {asked:?} is over max_ttl = {max:?}; raise max_ttl in every client of the namespace"
    )
}

fn counted(nodes: usize) -> String {
    format!("{nodes} {}", if nodes == 1 { "node" } else { "nodes" })
}

fn listed(failures: &[NodeFailure]) -> String {
    let failures = failures.iter().map(|failure| format!("; {failure}"));
    failures.collect()
}

/// Error of a setting of a [`Redlock`](crate::Redlock) or a layer: its name, its value and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{setting}` is {value}: {remedy}")]
pub struct BuildError {
    setting: Cow<'static, str>,
    value: String,
    remedy: String,
}

impl BuildError {
    pub(crate) fn new(
        setting: &'static str,
        value: impl fmt::Display,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            setting: setting.into(),
            value: value.to_string(),
            remedy: remedy.into(),
        }
    }

    /// Returns the name of the setting: that of its setter, or of the environment variable that it was read from.
    #[must_use]
    pub fn setting(&self) -> &str {
        &self.setting
    }

    /// Names the environment variable instead of the setting, if the setting is one of those that were read from one.
    pub(crate) fn name_variable(mut self, variables: &[&str]) -> Self {
        if variables.contains(&&*self.setting) {
            if self.setting == "nodes" {
                self.value = "not set".into();
            }
            self.setting = match &*self.setting {
                "nodes" | "url" | "group" => "REDLOCK_URLS".into(),
                setting => format!("REDLOCK_{}", setting.to_ascii_uppercase()).into(),
            };
        }
        self
    }

    /// Names another setting, which the one of this error is a part of.
    pub(crate) fn of_setting(mut self, setting: &'static str) -> Self {
        self.setting = setting.into();
        self
    }

    /// Checks a ttl without regard to other settings.
    pub(crate) fn check_ttl(setting: &'static str, ttl: Duration) -> Result<(), Self> {
        if validity::lifetime(whole_millis(ttl)).is_none() {
            let remedy = "it is used up by clock drift (ttl / 100 + 2 ms); use seconds";
            return Err(Self::new(setting, format_args!("{ttl:?}"), remedy));
        }
        if ttl > LONGEST_TTL {
            let remedy = format!(
                "a crashed holder would block others for that long; use at most {LONGEST_TTL:?}"
            );
            return Err(Self::new(setting, format_args!("{ttl:?}"), remedy));
        }
        Ok(())
    }
}

/// Removes credentials from a URL that could not be parsed.
#[cfg(feature = "redis")]
pub(super) fn without_credentials(url: &str) -> String {
    let scheme = url.find("://").map_or("", |end| &url[..end + 3]);
    let rest = &url[scheme.len()..];
    match (rest.rfind('@'), rest.find('?')) {
        // Each of the two characters may be part of a password.
        (Some(at), Some(query)) if query < at => format!("{scheme}***"),
        (Some(at), query) => format!("{scheme}***{}", &rest[at..query.unwrap_or(rest.len())]),
        (None, query) => format!("{scheme}{}", &rest[..query.unwrap_or(rest.len())]),
    }
}

impl LostReason {
    /// Returns the name of the reason in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Expired => "expired",
            Self::MaxHold => "max_hold",
            Self::Released => "released",
            Self::Revoked => "revoked",
            Self::Abandoned => "abandoned",
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => "a majority of the nodes reported that the lock is not held any more",
            Self::Expired => "its validity ended before a majority of the nodes renewed it",
            Self::MaxHold => "it was held for as long as max_hold allows",
            Self::Released => "it was released",
            Self::Revoked => "it was revoked",
            Self::Abandoned => "the task that renewed it is gone",
        })
    }
}

/// Future that resolves to the reason when a lock is lost.
///
/// It borrows nothing and holds no share of the lock.
///
/// # Cancel safety
///
/// May be dropped at any point: a loss is not forgotten, so a new future resolves to it as well.
#[must_use = "futures do nothing unless awaited"]
pub struct Lost(Pin<Box<dyn Future<Output = LostReason> + Send + Sync>>);

impl Lost {
    pub(crate) fn new(lost: impl Future<Output = LostReason> + Send + Sync + 'static) -> Self {
        Self(Box::pin(lost))
    }

    /// Returns a future that resolves when the first of two locks is lost.
    pub(crate) fn or(self, other: Self) -> Self {
        Self::new(async { select(self, other).await.factor_first().0 })
    }
}

impl Future for Lost {
    type Output = LostReason;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<LostReason> {
        self.0.as_mut().poll(context)
    }
}

opaque_debug! { Lost }

#[cfg(test)]
mod tests {
    use super::*;

    fn unavailable(reached: usize, nodes: Vec<NodeFailure>) -> LockError {
        let names = ["redis-a:6379", "redis-b:6379", "redis-c:6379"];
        LockError::Unavailable {
            reached,
            needed: 2,
            voted: names.into_iter().take(reached).map(Into::into).collect(),
            nodes,
        }
    }

    fn down(node: &str) -> NodeFailure {
        NodeFailure::Unreachable {
            node: node.into(),
            why: "Connection refused".into(),
        }
    }

    fn quarantined(node: &str, millis: u64) -> NodeFailure {
        NodeFailure::Quarantined {
            node: node.into(),
            left: Duration::from_millis(millis),
        }
    }

    #[test]
    fn unavailable_names_the_part_of_every_node() {
        let is_down = |node| {
            format!(
                "{node} is unreachable (Connection refused); check that it runs and that its URL is right"
            )
        };
        let (b, c) = (is_down("redis-b:6379"), is_down("redis-c:6379"));
        let both = || vec![down("redis-b:6379"), down("redis-c:6379")];
        assert_eq!(
            unavailable(1, both()).to_string(),
            format!("no quorum: 1 node voted on the lock (redis-a:6379), 2 are needed; {b}; {c}")
        );
        let mut nodes = both();
        let node = "redis-a:6379".into();
        nodes.insert(0, NodeFailure::Unanswered { node });
        assert_eq!(
            unavailable(0, nodes).to_string(),
            format!(
                "no quorum: 0 nodes voted on the lock, 2 are needed; redis-a:6379 was not waited for, because the other \
                 nodes decided; {b}; {c}"
            )
        );
    }

    #[test]
    fn quarantined_is_when_a_majority_may_vote() {
        let unanswered = || NodeFailure::Unanswered { node: "a".into() };
        let left = |reached, nodes| {
            let error = unavailable(reached, nodes);
            let left = error.quarantined();
            let expected = if left.is_some() {
                "quarantined"
            } else {
                "unavailable"
            };
            assert_eq!(error.outcome(), expected);
            left.map(|left| left.as_millis())
        };
        let (a, b, c) = (
            || quarantined("a", 30_000),
            || quarantined("b", 7_000),
            || quarantined("c", 5_000),
        );
        assert_eq!(left(0, vec![a(), b(), c()]), Some(7_000));
        assert_eq!(left(0, vec![down("a"), b(), c()]), Some(7_000));
        assert_eq!(left(1, vec![b(), c()]), Some(5_000));
        assert_eq!(left(1, vec![down("b"), c()]), Some(5_000));
        // A node that is up, but was slower than the failures of the others.
        assert_eq!(left(0, vec![unanswered(), down("b"), c()]), Some(5_000));
        assert_eq!(left(0, vec![down("a"), down("b"), c()]), None);
        assert_eq!(left(1, vec![down("a"), down("b")]), None);
        assert_eq!(LockError::Closed.quarantined(), None);
    }

    #[test]
    fn unavailable_says_when_a_quarantine_ends() {
        let nodes = vec![quarantined("b", 11_001), quarantined("c", 15_000)];
        assert_eq!(
            unavailable(1, nodes).to_string(),
            "no quorum: 1 node voted on the lock (redis-a:6379), 2 are needed; enough may vote in 12 s, after \
             their quarantine; b was started or flushed recently; quarantined for another 12 s (see restart_guard); c was \
             started or flushed recently; quarantined for another 15 s (see restart_guard)"
        );
    }
}
