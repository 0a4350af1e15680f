//! Fencing tokens: the number by which a storage refuses a holder whose lock has ended.

use std::fmt;
use std::str::FromStr;

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
