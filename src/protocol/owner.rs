//! Owner tokens: the value that says whose lock a key is.

use std::fmt;
use std::sync::Arc;

use crate::protocol::names::hex;
use crate::protocol::record::Fingerprint;

/// 128 fresh random bits that name one acquisition attempt on all nodes.
///
/// Never reused: an answer to, or a late request of, an older attempt must not be mistaken for
/// one of this attempt. Whoever knows it can release the lock, so it is never printed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerToken(Arc<str>);

impl OwnerToken {
    /// Makes an owner token from 16 random bytes, which must come from a secure source.
    #[must_use]
    pub fn from_random(bytes: [u8; 16]) -> Self {
        Self(hex(&bytes).into())
    }

    /// Makes an owner token that also tells what is asked for, to others who ask for the same key.
    #[must_use]
    pub fn with_fingerprint(bytes: [u8; 16], fingerprint: Fingerprint) -> Self {
        Self((hex(&bytes) + &fingerprint.to_hex()).into())
    }

    /// Returns what it tells of what is asked for: never the random half.
    #[must_use]
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        Fingerprint::from_hex(self.0.get(RANDOM_DIGITS..)?.as_bytes())
    }

    /// Returns the token as the nodes store it: 32 lower-case hexadecimal digits, and 32 more if it
    /// tells what is asked for.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for OwnerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnerToken(..)")
    }
}

/// Of the half that nobody can guess.
const RANDOM_DIGITS: usize = 32;
