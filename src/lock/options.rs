//! The options of a lock, which requests, layers and resources set.

use std::sync::Arc;
use std::time::Duration;

use crate::lock::queue::WaiterCap;
use crate::protocol::lease::Access;

/// Options of a lock; see [`LockResource::options`](crate::LockResource::options) and
/// [`RedlockLayer::options`](crate::RedlockLayer::options).
///
/// ```
/// use std::time::Duration;
/// use tower_redlock::LockOptions;
///
/// let patient = LockOptions::default().wait(Duration::from_secs(2));
/// # let _ = patient;
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct LockOptions {
    pub(crate) ttl: Option<Duration>,
    pub(crate) wait: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) label: Option<&'static str>,
    pub(crate) note: Option<Arc<str>>,
    pub(crate) access: Option<Access>,
    pub(crate) hold_at_least: Option<Duration>,
    /// A cap on waiting calls, in addition to that of the lock service.
    pub(crate) cap: Option<Arc<WaiterCap>>,
}

/// Implements the setters of a type with [`LockOptions`] in this field, or of the options themselves.
macro_rules! option_setters {
    ($type:ident $(.$options:ident)?, ttl: $ttl:literal, wait: $wait:literal, max_hold: $max_hold:literal) => {
        impl $type { setters! {
            /// Sets how long the lock lives on the nodes without renewal.
            #[doc = $ttl]
            ttl(ttl: Duration) => $($options.)?ttl = Some(ttl);

            /// Sets how long to wait while another caller holds the lock.
            #[doc = $wait]
            wait(wait: Duration) => $($options.)?wait = Some(wait);

            /// Sets for how long the lock is renewed.
            #[doc = $max_hold]
            max_hold(max_hold: Duration) => $($options.)?max_hold = Some(max_hold);

            /// Sets the name of the kind of resource in spans and metrics. Do not make it of a key: keys come from
            /// clients, and each label is a time series of its own. Default: the word that the key begins
            /// with, as in `("account", id)`; see [`LockKey`](crate::LockKey#the-kind-of-resource). Otherwise `unnamed`,
            /// and always so in a [`LockResource`](crate::LockResource).
            label(label: &'static str) => $($options.)?label = Some(label);

            /// Sets a note that callers see who are refused because of this lock, such as a route or a trace id; see
            /// [`Holder`](crate::Holder). Default: none.
            ///
            /// It is stored on the nodes, in the value of the lock. At most 64 bytes are kept, and control characters
            /// become spaces.
            note(note: impl AsRef<str>) => $($options.)?note = Some($crate::protocol::shown(note.as_ref()));
        }}
    };
}

pub(crate) use option_setters;

/// Implements the setters of the kind of lock, for a type with [`LockOptions`] as above.
macro_rules! kind_setters {
    ($type:ident $(.$options:ident)?) => {
        impl $type { setters! {
            /// Shares the lock with other callers that do the same: any number of readers hold a key together, or one
            /// caller alone. Default: one caller alone.
            ///
            /// A reader is sure that no caller who locks the key alone is granted it while the reader's lock is valid. It
            /// gets no fencing token, because a reader writes nothing that a token could protect. A caller that waits to
            /// hold the key alone keeps new readers out, so that readers who come and go do not starve it.
            ///
            /// A reader cannot become the only holder, nor the reverse: release the lock, and lock again. Of `shared`
            /// and [`slots`](Self::slots), the last one that is called applies.
            ///
            /// ```
            /// use tower_redlock::Redlock;
            ///
            /// # #[tokio::main(flavor = "current_thread")]
            /// # async fn main() -> Result<(), tower_redlock::LockError> {
            /// let redlock = Redlock::in_memory(3);
            /// let one = redlock.try_lock("catalogue").shared().await?;
            /// let other = redlock.try_lock("catalogue").shared().await?;
            /// assert!(redlock.try_lock("catalogue").await.is_err());
            /// # drop((one, other));
            /// # Ok(())
            /// # }
            /// ```
            shared() => $($options.)?access = Some(Access::Shared);

            /// Lets up to `n` callers hold the key at a time, each with a slot of its own. `n` is between 1 and 64.
            /// Default: one caller, without slots.
            ///
            /// Slot `i`, counted from zero, is the lock of the key `(key, "slot", i)`; [`LockGuard::slot`] says which
            /// one it is. At most one caller holds a slot and there are `n` of them, so at most `n` callers hold a slot, as
            /// surely as a lock has one holder. All callers must use the same `n`: the highest applies. A slot and the
            /// lock of the key itself do not exclude each other.
            ///
            /// The nodes that refuse a slot name the free ones, so a caller asks them twice at most when a slot is free and
            /// no other caller takes it first. A fencing token orders the holders of one slot, not those of different
            /// ones.
            ///
            /// ```
            /// use tower_redlock::{LockError, Redlock};
            ///
            /// # #[tokio::main(flavor = "current_thread")]
            /// # async fn main() -> Result<(), LockError> {
            /// let redlock = Redlock::in_memory(3);
            /// let one = redlock.try_lock("converter").slots(2).await?;
            /// let other = redlock.try_lock("converter").slots(2).await?;
            /// assert_ne!(one.slot(), other.slot());
            /// let third = redlock.try_lock("converter").slots(2).await;
            /// assert!(matches!(third, Err(LockError::Contended { .. })));
            /// # Ok(())
            /// # }
            /// ```
            ///
            /// [`LockGuard::slot`]: crate::LockGuard::slot
            slots(n: usize) => $($options.)?access = Some(Access::Slot(n));

            /// Keeps the key taken for at least this long from the grant on, even if the lock is released earlier.
            /// Default: a released key is free at once.
            ///
            /// For jobs that the clocks of several processes start: without it, a process whose clock is late would run a
            /// short job a second time. The release shortens the time that the key stays taken on the nodes, instead
            /// of deleting it. Choose a time that is longer than the clocks differ and shorter than the period, and do
            /// not wait for the lock.
            ///
            /// [`Released::Freed`](crate::Released::Freed) and [`Drained::is_clean`](crate::Drained::is_clean) then mean that
            /// the nodes confirmed the release; the key is free when the time is over. A caller that is dropped before
            /// it gets its guard frees the key at once.
            ///
            /// If the process dies, or the lock is lost, the key is free after its ttl, so that another process does
            /// the job. A node that restarts without its data forgets the rest of the time. It has no effect on a
            /// [`shared`](Self::shared) lock.
            ///
            /// ```
            /// use std::time::Duration;
            /// use tower_redlock::{LockError, Redlock};
            ///
            /// /// Runs in every process, each minute.
            /// async fn every_minute(redlock: &Redlock) -> Result<(), LockError> {
            ///     let lock = redlock.try_lock(("job", "report"));
            ///     match lock.hold_at_least(Duration::from_secs(30)).await {
            ///         Ok(_guard) => println!("writing the report"),
            ///         Err(LockError::Contended { .. }) => println!("another process has written it"),
            ///         Err(error) => return Err(error),
            ///     }
            ///     Ok(())
            /// }
            /// # #[tokio::main(flavor = "current_thread")]
            /// # async fn main() -> Result<(), LockError> {
            /// # let redlock = Redlock::in_memory(3);
            /// # every_minute(&redlock).await?;
            /// # assert!(redlock.try_lock(("job", "report")).await.is_err());
            /// # Ok(())
            /// # }
            /// ```
            hold_at_least(least: Duration) => $($options.)?hold_at_least = Some(least);
        }}
    };
}

pub(super) use kind_setters;

option_setters!(
    LockOptions,
    ttl: "Default: the builder's ttl.",
    wait: "Default: zero.",
    max_hold: "Default: the builder's, or else 60 s."
);

kind_setters!(LockOptions);

impl LockOptions {
    /// Takes the options that are not set from others.
    pub(crate) fn or(self, others: Self) -> Self {
        Self {
            ttl: self.ttl.or(others.ttl),
            wait: self.wait.or(others.wait),
            max_hold: self.max_hold.or(others.max_hold),
            label: self.label.or(others.label),
            note: self.note.or(others.note),
            access: self.access.or(others.access),
            hold_at_least: self.hold_at_least.or(others.hold_at_least),
            cap: self.cap.or(others.cap),
        }
    }

    /// Returns whether a request takes one slot of several.
    pub(crate) fn is_slot(&self) -> bool {
        matches!(self.access, Some(Access::Slot(_)))
    }
}
