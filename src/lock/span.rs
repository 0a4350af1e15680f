//! The span and the metrics of one lock, from its request to its release.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;
use tracing::field::{self, Empty};
use tracing::level_filters::LevelFilter;
use tracing::{Span, debug, info_span};

use crate::lock::cluster::Cluster;
use crate::node::Mutex;
use crate::node::telemetry::{self, LockLabels};
use crate::protocol::{FencingToken, Holder, LockKey, LockKeys};

/// The span of a lock that is being acquired, and the event of its outcome. A span that is dropped unfinished reports
/// `abandoned`.
///
/// # Design
///
/// A label has few values, and never the data of users: each value is a time series. Layers and extractors get their
/// keys from requests and therefore set the label themselves. The type of another key does not tell a literal from a
/// `&str` that came with a request, so only a word can be a label, and a process takes at most [`MAX_KINDS`] labels from
/// keys. Of several plain keys, none names the others.
#[derive(Debug)]
pub(crate) struct LockSpan {
    pub(crate) span: Span,
    resource: &'static str,
    /// The group that was asked last, if there are several.
    group: Mutex<Option<Arc<str>>>,
    /// When the lock was requested.
    pub(crate) began: Instant,
    /// When the caller began to wait. Set by the queue when it does.
    waits_since: OnceLock<Arc<OnceLock<Instant>>>,
    /// What to report when it is dropped: the message, the outcome, and the token of a lock that was granted with one.
    end: (&'static str, &'static str, Option<FencingToken>),
    /// Who holds the lock that was refused, if that is known.
    holder: Option<Holder>,
}

impl LockSpan {
    /// Opens the span of a lock on these keys, which the nodes of this group are asked for first. They are fields of it only if
    /// `log_keys` is set.
    pub(crate) fn new(label: Option<&'static str>, cluster: &Cluster, keys: &LockKeys) -> Self {
        let (resource, log_keys) = (label_of(label, keys), cluster.settings.log_keys);
        // With its feature `log`, which axum enables, tracing computes the fields, and logs them, also without a subscriber.
        let span = (LevelFilter::current() >= LevelFilter::INFO).then(|| {
            info_span!(
                "redlock.lock",
                resource,
                group = Empty,
                key = log_keys.then(|| field::debug(keys)),
                outcome = Empty,
                quorum.granted = Empty,
                quorum.nodes = cluster.quorum.nodes(),
                wait_ms = Empty,
                hold_ms = Empty,
                fencing_token = Empty,
            )
        });
        Self {
            span: span.unwrap_or_else(Span::none),
            resource,
            group: Mutex::default(),
            began: Instant::now(),
            waits_since: OnceLock::new(),
            end: ("lock abandoned", "abandoned", None),
            holder: None,
        }
    }

    /// Returns where to note when the caller begins to wait, if it may before this time.
    pub(crate) fn waits_since(&self, deadline: Instant) -> Option<Arc<OnceLock<Instant>>> {
        (deadline > self.began).then(|| Arc::clone(self.waits_since.get_or_init(Arc::default)))
    }

    /// Notes that a group is asked, if there are several, and returns the labels of the lease there. The outcome counts
    /// for the group that was asked last.
    pub(crate) fn in_group(&self, group: Option<Arc<str>>) -> LockLabels {
        if let Some(group) = &group {
            self.span.record("group", &**group);
            *self.group.lock() = Some(Arc::clone(group));
        }
        let resource = self.resource;
        LockLabels { resource, group }
    }

    /// Finishes with an outcome: that of a granted lock has a token, unless fencing is off.
    pub(crate) fn finish(
        &mut self,
        message: &'static str,
        outcome: &'static str,
        token: Option<FencingToken>,
    ) {
        self.end = (message, outcome, token);
    }

    /// Finishes with the outcome of a refusal, and who holds the lock, if that is known.
    pub(crate) fn refuse(&mut self, outcome: &'static str, holder: Option<&Holder>) {
        self.holder = holder.cloned();
        self.finish("lock refused", outcome, None);
    }
}

impl Drop for LockSpan {
    fn drop(&mut self) {
        let (message, outcome, token) = self.end;
        let waits_since = self.waits_since.get().and_then(|since| since.get());
        let waited = waits_since.map(Instant::elapsed);
        let (resource, group) = (self.resource, self.group.get_mut().take());
        let labels = LockLabels { resource, group };
        let wait_ms = millis(waited.unwrap_or_default());
        let token = token.map(field::display);
        let event = || {
            debug!(
                resource = labels.resource,
                group = labels.group.as_deref(),
                outcome,
                fencing_token = token,
                holder = self.holder.as_ref().map(field::display),
                wait_ms,
                "{message}"
            );
        };
        if self.span.is_disabled() {
            event();
        } else {
            // Before the span has these fields, so that a line of text does not show them twice.
            self.span.in_scope(event);
            self.span.record("outcome", outcome);
            self.span.record("wait_ms", wait_ms);
            if let Some(token) = token {
                self.span.record("fencing_token", token);
            }
        }
        telemetry::acquired(&labels, outcome, self.began, waited);
    }
}

/// Returns the label of a lock on these keys.
pub(crate) fn label_of(label: Option<&'static str>, keys: &LockKeys) -> &'static str {
    let of_keys = || {
        let keys = keys.as_slice();
        let names_all = |key: &&LockKey| keys.len() == 1 || !key.is_plain_kind();
        label_of_kind(
            &KINDS,
            keys.iter().filter(names_all).find_map(LockKey::kind)?,
        )
    };
    label.or_else(of_keys).unwrap_or(telemetry::UNNAMED)
}

/// Returns the label for a kind of resource, unless too many others came first.
fn label_of_kind(labels: &[OnceLock<&'static str>], kind: &[u8]) -> Option<&'static str> {
    let mut labels = labels.iter().map(|slot| {
        *slot.get_or_init(|| {
            // A kind is a word in ASCII.
            let label = String::from_utf8_lossy(kind).into_owned().leak();
            telemetry::register(label, false);
            label
        })
    });
    labels.find(|label| label.as_bytes() == kind)
}

/// The labels that the keys of this process have given.
static KINDS: [OnceLock<&'static str>; MAX_KINDS] = [const { OnceLock::new() }; MAX_KINDS];

/// How many labels keys may give in one process.
const MAX_KINDS: usize = 32;

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_labels_until_there_are_too_many() {
        let kinds = [const { OnceLock::new() }; 2];
        for _ in 0..2 {
            assert_eq!(label_of_kind(&kinds, b"account"), Some("account"));
            assert_eq!(label_of_kind(&kinds, b"order"), Some("order"));
            assert_eq!(label_of_kind(&kinds, b"alice"), None);
        }
    }
}
