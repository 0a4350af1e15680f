//! The idempotency key, as servers read it and clients send it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::protocol::KeyError;

/// The idempotency key of a request, as the client sent it.
///
/// On a server, it is an extractor, and an extension of every request that an `IdempotencyLayer` passes on with a key. It does not
/// contain the scope: if the transaction of the effect stores it with its caller under a unique index, the effect happens
/// once, even if locks or records are lost.
///
/// On a client, put it into the extensions of a request that a `client::IdempotentLayer` sends.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdempotencyKey(Arc<str>);

impl IdempotencyKey {
    /// Returns the key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Parses a key without the quotes of a structured-field string.
impl FromStr for IdempotencyKey {
    type Err = KeyError;

    fn from_str(key: &str) -> Result<Self, Self::Err> {
        let visible = key.bytes().all(|byte| byte.is_ascii_graphic());
        match key.len() {
            1..=MAX_CHARS if visible => Ok(Self(key.into())),
            _ => Err(KeyError::malformed(format!(
                "the idempotency key is not 1 to {MAX_CHARS} characters of visible ASCII"
            ))),
        }
    }
}

impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Longest key, in characters.
const MAX_CHARS: usize = 255;
