//! The limits of records. A setting out of its range is replaced by the nearest value in it.

use std::fmt::Debug;
use std::time::Duration;

/// The default retention of a record, and the retention of an intent.
pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The largest body of a record. Larger ones keep nodes from answering other locks within the node timeout.
pub(super) const MAX_BODY: usize = 1024 * 1024;

const MIN_RETENTION: Duration = Duration::from_millis(1);

const MAX_RETENTION: Duration = DAY.saturating_mul(100 * 365);

/// Returns the retention within its range, with a warning if it was not. A node accepts no record without a ttl, or
/// with a ttl that overflows its clock.
pub(crate) fn bound_retention(owner: &str, retention: Duration) -> Duration {
    let used = retention.clamp(MIN_RETENTION, MAX_RETENTION);
    warn_of_range(owner, "retention", &retention, &used);
    used
}

/// Returns the largest size of a body within its range, with a warning if it was not.
pub(crate) fn bound_body(owner: &str, setting: &str, bytes: usize) -> usize {
    let used = bytes.min(MAX_BODY);
    warn_of_range(owner, setting, &bytes, &used);
    used
}

fn warn_of_range<T: PartialEq + Debug>(owner: &str, setting: &str, requested: &T, used: &T) {
    if requested != used {
        tracing::warn!(
            setting,
            ?requested,
            ?used,
            "a setting of {owner} is out of range; the nearest value is used"
        );
    }
}
