//! Owner tokens: the value of a locked key, which identifies its owner.

use std::fmt;
use std::sync::Arc;

use crate::protocol::names::{hex, write_hex};
use crate::protocol::record::Fingerprint;

/// 128 fresh random bits that identify one acquisition attempt on all nodes.
///
/// It is never reused: an answer to an older attempt, or a late request of one, must not be mistaken for
/// one of this attempt. Its knowledge suffices to release the lock, so it is never printed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerToken(Arc<str>);

impl OwnerToken {
    /// Creates an owner token from 16 random bytes, which must come from a secure source.
    #[must_use]
    pub fn from_random(bytes: [u8; 16]) -> Self {
        let mut digits = [b'0'; RANDOM_DIGITS];
        write_hex(&bytes, &mut digits);
        // Hexadecimal digits are valid UTF-8.
        Self(std::str::from_utf8(&digits).unwrap_or_default().into())
    }

    /// Creates an owner token that also shows other requests for the key the fingerprint of its request.
    #[must_use]
    pub fn with_fingerprint(bytes: [u8; 16], fingerprint: Fingerprint) -> Self {
        Self((hex(&bytes) + &fingerprint.to_hex()).into())
    }

    /// Returns the fingerprint, if it has one; never the random half.
    #[must_use]
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        Fingerprint::from_hex(self.0.get(RANDOM_DIGITS..)?.as_bytes())
    }

    /// Returns the token as the nodes store it: 32 lower-case hexadecimal digits, and 32 more if it
    /// has a fingerprint.
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

/// The number of digits of the random half.
const RANDOM_DIGITS: usize = 32;
