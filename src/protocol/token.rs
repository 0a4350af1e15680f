//! Tokens: what identifies an owner to the nodes, its grant to a storage, and the memory of a node.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::protocol::holder::{self, Holder};
use crate::protocol::names::hex_digits;
use crate::protocol::record::Fingerprint;

/// 128 fresh random bits that identify one acquisition attempt on all nodes.
///
/// It is never reused: an answer to an older attempt, or a late request of one, must not be mistaken for
/// one of this attempt. Its knowledge suffices to release the lock, so it is never printed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerToken {
    random: [u8; 16],
    /// What it shows; most tokens show nothing.
    shown: Option<Arc<Shown>>,
}

/// What an owner token shows to other clients, behind its random half.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shown {
    /// The fingerprint of what is executed under the lock.
    pub fingerprint: Option<Fingerprint>,
    /// Who holds the lock.
    pub holder: Option<Holder>,
}

impl OwnerToken {
    /// Creates an owner token from 16 random bytes, which must come from a secure source.
    pub fn from_random(random: [u8; 16]) -> Self {
        Self {
            random,
            shown: None,
        }
    }

    /// Creates an owner token that also shows this, if there is anything to show.
    pub fn showing(random: [u8; 16], shown: Option<Shown>) -> Self {
        Self {
            random,
            shown: shown.map(Arc::new),
        }
    }

    /// Returns what it shows, if anything; never the random half.
    pub fn shown(&self) -> Option<&Arc<Shown>> {
        self.shown.as_ref()
    }

    /// Returns the token as the nodes store it: 32 lower-case hexadecimal digits, and 32 more if it
    /// has a fingerprint; then a space and the holder, if it has one.
    ///
    /// Two values are compared as a whole, so no client can match one whose random half it does not know.
    pub fn to_value(&self) -> String {
        let digits = self.digits();
        let digits = digits.as_flattened().iter().copied().map(char::from);
        digits.chain(self.shown_value().chars()).collect()
    }

    /// Returns the digits of its random half.
    pub(crate) fn digits(&self) -> [[u8; 2]; 16] {
        hex_digits(self.random)
    }

    /// Returns what follows them in its value: nothing, for most tokens.
    pub(crate) fn shown_value(&self) -> String {
        let Some(shown) = &self.shown else {
            return String::new();
        };
        let fingerprint = shown.fingerprint.map(Fingerprint::to_hex);
        let holder = shown
            .holder
            .iter()
            .map(|holder| " ".to_owned() + &holder.to_value());
        fingerprint.into_iter().chain(holder).collect()
    }
}

impl Shown {
    /// Returns `None` if there is nothing to show.
    pub fn new(fingerprint: Option<Fingerprint>, holder: Option<Holder>) -> Option<Self> {
        let shows = fingerprint.is_some() || holder.is_some();
        shows.then_some(Self {
            fingerprint,
            holder,
        })
    }

    /// Reads what follows the random half in the value of a lock, which any client may have written.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let space = bytes.iter().position(|c| *c == b' ');
        let (digits, holder) = bytes.split_at(space.unwrap_or(bytes.len()));
        let fingerprint = Fingerprint::from_hex(digits);
        let is_ours = digits.is_empty() || fingerprint.is_some();
        let holder = holder.strip_prefix(b" ").filter(|_| is_ours);
        Self::new(fingerprint, holder.and_then(holder::parse))
    }
}

opaque_debug! { OwnerToken }

/// A number that grows with every acquisition of a key, for the storage behind the lock to check.
///
/// A lock alone cannot stop a client that was paused past its ttl from writing; a storage that
/// refuses every token lower than the highest it has seen can (Martin Kleppmann, "How to do
/// distributed locking", 2016). Accept if `token >= highest`, atomically with the write: one
/// holder may write several times.
///
/// Tokens are below 2^53, so that every JSON reader and every Lua script can hold them, and about
/// the size of the microseconds since 1970. They are unique and increase in real-time order as
/// long as the nodes remember the fences. Once a node has forgotten one, by losing its memory or
/// after `fence_retention`, the order relies on the wall clocks of the clients.
///
/// ```
/// use tower_redlock::FencingToken;
///
/// let token: FencingToken = "1763659999000000".parse()?;
/// assert_eq!(token.as_u64(), 1_763_659_999_000_000);
/// # Ok::<(), tower_redlock::ParseFencingTokenError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct FencingToken(u64);

impl FencingToken {
    /// The largest token that a node grants, a little below 2^53.
    pub const MAX: Self = Self(9_007_199_254_740_000);

    /// Returns the token as a number.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

impl TryFrom<u64> for FencingToken {
    type Error = ParseFencingTokenError;

    fn try_from(number: u64) -> Result<Self, Self::Error> {
        if number <= Self::MAX.0 {
            Ok(Self(number))
        } else {
            Err(ParseFencingTokenError(()))
        }
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.0
    }
}

/// For SQL `BIGINT` columns; lossless, because tokens are below 2^53.
impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> Self {
        token.0.cast_signed()
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for FencingToken {
    type Err = ParseFencingTokenError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number: u64 = text.parse().map_err(|_| ParseFencingTokenError(()))?;
        Self::try_from(number)
    }
}

/// The text or number is not a fencing token: a whole number up to [`FencingToken::MAX`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseFencingTokenError(());

impl fmt::Display for ParseFencingTokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "not a fencing token: expected a whole number up to {}",
            FencingToken::MAX
        )
    }
}

impl std::error::Error for ParseFencingTokenError {}

/// Identifies the memory of a node: it stays the same as long as the node forgets nothing.
///
/// Random bits, the seconds and microseconds of its beginning by the node's own clock, and the run
/// id of the process, separated by colons. A node stores it under a key of its own.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Generation(Arc<str>);

impl Generation {
    /// Begins a generation.
    pub fn new(random: &OwnerToken, began: Duration, run_id: &str) -> Self {
        let (random, seconds, micros) = (random.to_value(), began.as_secs(), began.subsec_micros());
        Self(format!("{random}:{seconds}:{micros}:{run_id}").into())
    }

    /// Reads the value that a node has stored; returns `None` if it is no generation.
    pub fn parse(text: &str) -> Option<Self> {
        let generation = Self(text.into());
        generation.began()?;
        Some(generation)
    }

    /// Returns the generation as nodes store it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether it belongs to the process with this run id. After a restart, the promotion of a
    /// replica or the restore of a backup it does not.
    pub fn is_of_process(&self, run_id: &str) -> bool {
        self.0.rsplit(':').next() == Some(run_id)
    }

    /// Returns its age at `now`, both by the node's own clock.
    pub fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.began().unwrap_or(now))
    }

    fn began(&self) -> Option<Duration> {
        let mut fields = self.0.split(':').skip(1);
        let seconds = Duration::from_secs(fields.next()?.parse().ok()?);
        seconds.checked_add(Duration::from_micros(fields.next()?.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn fencing_token_round_trips_through_text_and_sql() {
        let token = FencingToken::MAX;
        assert_eq!(token.to_string().parse(), Ok(token));
        assert_eq!(i64::from(token), 9_007_199_254_740_000);
    }

    #[test]
    fn fencing_token_refuses_numbers_above_the_range_of_json() {
        assert!(FencingToken::try_from(1 << 53).is_err());
        assert!("-1".parse::<FencingToken>().is_err());
        assert!("".parse::<FencingToken>().is_err());
    }

    #[test]
    fn generation_age_is_measured_by_the_nodes_clock() {
        let generation = Generation::parse("r:100:999999:run").unwrap();
        let now = secs(101) + Duration::from_micros(1);
        assert_eq!(generation.age(now), Duration::from_micros(2));
        assert_eq!(generation.age(secs(5)), Duration::ZERO);
        assert!(generation.is_of_process("run") && !generation.is_of_process("other"));
        assert_eq!(Generation::parse(generation.as_str()), Some(generation));
        for text in [
            "",
            "x",
            "r:1",
            "r:x:1:run",
            "r:18446744073709551615:999999999:run",
        ] {
            assert_eq!(Generation::parse(text), None, "{text}");
        }
    }
}
