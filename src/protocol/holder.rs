//! Who holds a lock, in words for people: a label of the process, and a note on the lock.

#![allow(
    clippy::disallowed_types,
    reason = "a time that holders tell; no clock is read here"
)]

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Who holds a lock, as the holder says it: the [`holder`](crate::RedlockBuilder::holder) of its process, the
/// [`note`](crate::LockRequest::note) on this lock, and since when.
///
/// It is for people who ask what they wait for. A client that may write to the nodes can write any label, so
/// decide nothing by it.
///
/// ```
/// use tower_redlock::{LockError, Redlock};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let redlock = Redlock::builder().embedded(3).holder("server-a").build()?;
/// let _guard = redlock.lock(("report", "monthly")).note("nightly run").await?;
/// match redlock.try_lock(("report", "monthly")).await {
///     Err(LockError::Contended { holder: Some(holder), .. }) => {
///         assert_eq!(holder.to_string(), "server-a (nightly run)");
///     }
///     other => panic!("not contended: {other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder(
    // A thin pointer, because answers and errors have room for one.
    Arc<Words>,
);

/// The longest label, and the longest note, in bytes.
pub const MAX_LEN: usize = 64;

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Words {
    /// In seconds since 1970.
    since: u64,
    /// Empty if there is none, as the note.
    label: Box<str>,
    note: Box<str>,
}

impl Holder {
    /// Creates the holder of a lock since this time after the beginning of 1970.
    pub(crate) fn new(label: Option<&str>, note: Option<&str>, since: Duration) -> Self {
        Self(Arc::new(Words {
            since: since.as_secs(),
            label: label.unwrap_or_default().into(),
            note: note.unwrap_or_default().into(),
        }))
    }

    /// Returns the label of its process; `None` if the process has none.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        Some(&*self.0.label).filter(|label| !label.is_empty())
    }

    /// Returns the note on its lock; `None` if the lock has none.
    #[must_use]
    pub fn note(&self) -> Option<&str> {
        Some(&*self.0.note).filter(|note| !note.is_empty())
    }

    /// Returns when the attempt began that was granted the lock, to the second, by the wall clock of the holder.
    #[must_use]
    pub fn since(&self) -> SystemTime {
        // Eleven digits at most, which every clock can show.
        SystemTime::UNIX_EPOCH + Duration::from_secs(self.0.since)
    }

    /// Returns the text that stands behind the tokens in the value of a lock.
    pub(crate) fn to_value(&self) -> String {
        let Words { since, label, note } = &*self.0;
        format!("{since} {label}\t{note}")
    }
}

/// Reads what stands behind the tokens in the value of a lock: the seconds since 1970, a space, the label, a tab, and
/// the note. Returns `None` if that is no holder: clients that are not ours write what they like.
#[must_use]
pub fn parse(bytes: &[u8]) -> Option<Holder> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (since, words) = text.split_once(' ')?;
    let (label, note) = words.split_once('\t')?;
    let is_time = since.len() <= 11 && since.bytes().all(|c| c.is_ascii_digit());
    let since = since.parse().ok().filter(|_| is_time)?;
    let is_holder = is_shown(label) && is_shown(note);
    is_holder.then(|| Holder::new(Some(label), Some(note), Duration::from_secs(since)))
}

/// Shows the label and the note, and not the time.
impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.label(), self.note()) {
            (Some(label), None) => f.write_str(label),
            (label, note) => {
                let (label, note) = (label.unwrap_or("unnamed"), note.unwrap_or_default());
                write!(f, "{label} ({note})")
            }
        }
    }
}

/// Returns whether a label or a note is short enough, and has only characters that a line of text can show.
pub(crate) fn is_shown(text: &str) -> bool {
    text.len() <= MAX_LEN && !text.chars().any(char::is_control)
}

/// Returns the text as a note: control characters are spaces, and what is too long is cut off.
pub(crate) fn shown(text: &str) -> Arc<str> {
    let spaced = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let ends = spaced.scan(0, |end, c| {
        *end += c.len_utf8();
        Some((c, *end))
    });
    let short = ends.take_while(|(_, end)| *end <= MAX_LEN);
    short.map(|(c, _)| c).collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holder_is_read_as_it_was_written() {
        let since = Duration::from_secs(1_763_659_999);
        for (label, note) in [
            (Some("a/7"), Some("GET /x")),
            (Some("Ann on server A"), None),
            (None, Some("日本\u{202e}😀")),
            (None, None),
        ] {
            let holder = Holder::new(label, note, since);
            assert_eq!((holder.label(), holder.note()), (label, note));
            assert_eq!(holder.since(), SystemTime::UNIX_EPOCH + since);
            let read = parse(holder.to_value().as_bytes());
            assert_eq!(read, Some(holder));
        }
    }

    #[test]
    fn what_other_clients_write_is_no_holder() {
        let long = format!("1 {}\t", "x".repeat(65));
        for text in [
            "",
            "1",
            "1 a",
            " a\tb",
            "-1 a\tb",
            "123456789012 a\tb",
            "1 a\tb\tc",
            "1 a\nb\t",
            &long,
        ] {
            assert_eq!(parse(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(parse(b"1 \xff\t"), None);
    }

    #[test]
    fn notes_are_made_short_and_plain() {
        assert_eq!(&*shown("a\tb\nc"), "a b c");
        assert_eq!(shown(&"é".repeat(40)).len(), 64);
        assert_eq!(shown(&"€".repeat(40)).len(), 63);
        assert!(is_shown(&shown(&"\u{7}€".repeat(40))));
    }
}
