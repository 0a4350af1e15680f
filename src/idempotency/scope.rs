//! The caller that an idempotency key belongs to.

use crate::middleware::KeyExtractor;
use crate::middleware::key::literal;

/// Returns the scope of a service without tenants: every client that sends a key gets the response that was
/// recorded for it.
///
/// For services whose keys cannot be guessed, or whose responses are not secret. All other services identify
/// the caller by the result of authentication: `key::extension::<UserId>(..)`. Do not use an address, or a
/// credential: a refreshed credential would count as another caller and execute again.
#[must_use]
pub fn public() -> impl KeyExtractor + Clone {
    literal(("scope", "public"))
}
