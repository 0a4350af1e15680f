//! The settings of a lock service: each with its documentation, its type, its default, and the checks.

use std::sync::Arc;
use std::time::Duration;

use crate::lock::error::{BuildError, LONGEST_TTL, LockError};
#[cfg(feature = "test-util")]
use crate::lock::traces::Traces;
#[cfg(feature = "redis")]
use crate::node::redis::Guard;
use crate::protocol::validity::whole_millis;
use crate::protocol::{Namespace, Retry, is_shown, validity};

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

/// Calls a macro with the table of all settings that are data: the documentation, the name, the type, and the default. The
/// builder has a setter for each, the environment a variable, and a configuration file a field.
macro_rules! settings {
    ($macro:ident) => {
        $macro! {
            /// Sets how long a lock lives on the nodes without renewal. Default: 10 s.
            ///
            /// After a crash of the holder, other callers wait this long. A holder that is paused for longer loses its
            /// lock.
            ttl: Duration = Duration::from_secs(10);

            /// Sets the longest ttl that any client of the namespace may request. Default: `ttl`.
            max_ttl: Duration as Option<Duration> = None;

            /// Sets how long to wait for the answer of one node. Default: 50 ms.
            ///
            /// A slower node has no vote. Choose a time well above the round trip and well below the ttl.
            node_timeout: Duration = Duration::from_millis(50);

            /// Sets how long opening a connection may take. Default: 1 s.
            connect_timeout: Duration = Duration::from_secs(1);

            /// Sets how long [`Redlock::lock`] waits while another caller holds the lock. Default: 5 s.
            ///
            /// A release is published with `PUBLISH`, and a process that waits subscribes to it with `SUBSCRIBE`. It subscribes
            /// only while it waits, on a further connection to each server, which it opens for the first wait and closes
            /// after 10 s without one. A [`pool`](Self::pool) has no address for a further connection; use
            /// [`pool_config`](Self::pool_config). Without the [rights](crate::guide::operating_the_nodes) to subscribe, or
            /// without a majority of the nodes, the [`retry`](Self::retry) delays apply.
            wait: Duration = Duration::from_secs(5);

            /// Sets for how long a lock is renewed, so that a holder that hangs does not keep it for ever. Default: no
            /// bound for [`Redlock::lock`], 60 s for `RedlockLayer` and `Locked`. [`Duration::MAX`] is no bound for all of them.
            ///
            /// Layers and [`LockOptions`](crate::LockOptions) may override it.
            max_hold: Duration as Option<Duration> = None;

            /// Sets whether locks are renewed while they are held. Default: true.
            ///
            /// Executions ([`Redlock::once`], `IdempotencyLayer`) always renew theirs, because a second execution must not begin
            /// beside the first.
            renew: bool = true;

            /// Sets whether locks come with a fencing token. Default: true.
            ///
            /// Without fencing an acquisition writes no fence, which is cheaper for the servers; with
            /// [`RestartGuard::Off`] it is the plain `SET key value NX PX ttl` of the Redlock description. Only if that is
            /// refused, a script asks what holds the key.
            /// All clients of a namespace must agree on it.
            fencing: bool = true;

            /// Sets how long a node remembers the fence of a key after its last lock. Default: 1 h, or the least that is
            /// allowed, `max(2 * max_ttl, max_hold + max_ttl)`, if that is longer.
            fence_retention: Duration as Option<Duration> = None;

            /// Sets how long a Redis node that lost its memory is quarantined. Default:
            /// [`RestartGuard::Auto`]; with the default ttl that is 20 s.
            ///
            /// Each client notices a restart, with or without data, a `FLUSHALL`, and the promotion of a replica: it reads
            /// the age of the server's memory on each connection, and every request for a vote names that memory. A fresh
            /// cluster therefore refuses locks for that long after the first contact. A server that restores older data
            /// without a restart is not noticed. The guard needs the right to `INFO` and `TIME`. Embedded nodes are exempt.
            restart_guard: RestartGuard = RestartGuard::Auto;

            /// Sets how many calls may wait for locks at once. Default: no limit.
            ///
            /// One more call is refused with [`LockError::Overloaded`](crate::LockError::Overloaded). A candidate of
            /// [`lead`](crate::Redlock::lead) does not count.
            max_waiters: usize as Option<usize> = None;

            /// Sets whether the spans of locks show their keys, in the field `key`. Default: false.
            ///
            /// Keys come from clients, and may contain e-mail addresses or session ids, which do not belong into a log.
            log_keys: bool = false;
        }
    };
}

pub(super) use settings;

macro_rules! define {
    ($($(#[$doc:meta])+ $name:ident: $type:ty $(as $optional:ty)? = $default:expr;)+) => {
        /// The settings, as the builder's caller gave them; complete once they are [checked](Self::checked).
        #[derive(Debug, Clone)]
        pub(crate) struct Settings {
            pub(crate) namespace: Namespace,
            /// The label of this process, for those who ask who holds a lock.
            pub(crate) holder: Option<Arc<str>>,
            pub(crate) retry: Retry,
            #[cfg(feature = "test-util")]
            pub(crate) traces: Option<Traces>,
            $(pub(crate) $name: define!(@field $type $(as $optional)?),)+
        }

        impl Default for Settings {
            fn default() -> Self {
                Self {
                    namespace: Namespace::default(),
                    holder: None,
                    retry: Retry::default(),
                    #[cfg(feature = "test-util")]
                    traces: None,
                    $($name: $default,)+
                }
            }
        }
    };
    (@field $type:ty) => { $type };
    (@field $type:ty as $optional:ty) => { $optional };
}

settings!(define);

impl Settings {
    /// Returns the longest ttl that a client of the namespace may request.
    pub(crate) fn max_ttl(&self) -> Duration {
        self.max_ttl.unwrap_or(self.ttl)
    }

    /// Returns how long a node remembers a fence.
    pub(crate) fn fence_retention(&self) -> Duration {
        let default = || Duration::from_secs(60 * 60).max(self.least_retention());
        self.fence_retention.unwrap_or_else(default)
    }

    fn least_retention(&self) -> Duration {
        let max_ttl = self.max_ttl();
        // A longer time is no bound.
        let is_bound = |held: &Duration| held.saturating_add(max_ttl) <= LONGEST_RETENTION;
        let held = self.max_hold.filter(is_bound).unwrap_or_default();
        (2 * max_ttl).max(held.saturating_add(max_ttl))
    }

    /// Checks the settings together, and completes them.
    pub(super) fn checked(self) -> Result<Self, BuildError> {
        let (ttl, max_ttl) = (self.ttl, self.max_ttl());
        BuildError::check_ttl("ttl", ttl)?;
        BuildError::check_ttl("max_ttl", max_ttl)?;
        let (least, retention) = (self.least_retention(), self.fence_retention());
        let (asking, opening) = (self.node_timeout, self.connect_timeout);
        let refuse_if = |is_wrong: bool, setting, value, remedy: &str| match is_wrong {
            true => Err(BuildError::new(setting, format_args!("{value:?}"), remedy)),
            false => Ok(()),
        };
        let remedy = format!("it is below ttl = {ttl:?}; raise it or lower ttl");
        refuse_if(max_ttl < ttl, "max_ttl", max_ttl, &remedy)?;
        let remedy = "zero leaves no time; raise it";
        refuse_if(asking.is_zero(), "node_timeout", asking, remedy)?;
        refuse_if(opening.is_zero(), "connect_timeout", opening, remedy)?;
        let held = self.max_hold.unwrap_or(Duration::MAX);
        refuse_if(held.is_zero(), "max_hold", held, remedy)?;
        let is_long = opening > LONGEST_TTL;
        let remedy = format!("it is too long; use at most {LONGEST_TTL:?}");
        refuse_if(is_long, "connect_timeout", opening, &remedy)?;
        let remedy = format!(
            "a lock would expire before its nodes have answered; use a time well below ttl = {ttl:?}"
        );
        refuse_if(asking >= ttl, "node_timeout", asking, &remedy)?;
        let remedy = format!(
            "a fence could expire before its lock; use at least max(2 * max_ttl, max_hold + max_ttl) = {least:?}"
        );
        refuse_if(retention < least, "fence_retention", retention, &remedy)?;
        let is_long = retention > LONGEST_RETENTION;
        let remedy = format!("it is too long; use at most {LONGEST_RETENTION:?}");
        refuse_if(is_long, "fence_retention", retention, &remedy)?;
        if let Some(holder) = &self.holder
            && (holder.is_empty() || !is_shown(holder))
        {
            let remedy = "use 1 to 64 bytes of text without control characters";
            return Err(BuildError::new("holder", &**holder, remedy));
        }
        Ok(Self {
            ttl: whole_millis(ttl),
            max_ttl: Some(max_ttl),
            fence_retention: Some(whole_millis(retention)),
            ..self
        })
    }

    /// Creates the guard that quarantines nodes which lost their memory.
    #[cfg(feature = "redis")]
    pub(super) fn guard(&self) -> Result<Arc<Guard>, BuildError> {
        let max_ttl = self.max_ttl();
        let window = match self.restart_guard {
            RestartGuard::Off => return Ok(Guard::new(Duration::ZERO, None)),
            RestartGuard::Auto => (2 * max_ttl).max(max_ttl + Duration::from_secs(5)),
            RestartGuard::For(window) if window > max_ttl && window <= LONGEST_RETENTION => window,
            RestartGuard::For(window) => {
                let remedy = format!(
                    "a restarted node must not vote while a lock that it forgot may live; use more than max_ttl = {max_ttl:?} and at most {LONGEST_RETENTION:?}"
                );
                return Err(BuildError::new(
                    "restart_guard",
                    format_args!("{window:?}"),
                    remedy,
                ));
            }
        };
        Ok(Guard::new(window, Some(self.namespace.generation())))
    }

    /// Checks the ttl of a lock, and returns it in whole milliseconds, the unit of the nodes.
    pub(crate) fn ttl(&self, asked: Option<Duration>) -> Result<Duration, LockError> {
        let (Some(asked), max) = (asked, self.max_ttl()) else {
            // Checked when the service was built.
            return Ok(self.ttl);
        };
        if asked > max {
            return Err(LockError::TtlTooLong { asked, max });
        }
        let ttl = whole_millis(asked);
        if validity::lifetime(ttl).is_none() {
            return Err(LockError::TtlTooShort { asked });
        }
        Ok(ttl)
    }
}
