//! Owner tokens: the value that says whose lock a key is.

use std::fmt;

use crate::protocol::names::hex;

/// 128 fresh random bits that name one acquisition attempt on all nodes.
///
/// Never reused: an answer to, or a late request of, an older attempt must not be mistaken for
/// one of this attempt. Whoever knows it can release the lock, so it is never printed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerToken(Box<str>);

impl OwnerToken {
    /// Makes an owner token from 16 random bytes, which must come from a secure source.
    #[must_use]
    pub fn from_random(bytes: [u8; 16]) -> Self {
        Self(hex(&bytes).into())
    }

    /// Returns the token as the nodes store it: 32 lower-case hexadecimal digits.
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
