//! Whose an idempotency key is.

use http::request::Parts;

use crate::middleware::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Says that there are no tenants: whoever sends a key gets the response that was recorded for it.
///
/// For services whose keys nobody can guess, or whose responses are no secret. Everybody else names
/// the caller, by what authentication has found: `key::extension::<UserId>(..)`. Neither a credential
/// (a refreshed one would be another caller, and execute again) nor an address will do.
#[must_use]
pub fn public() -> Public {
    Public
}

/// Extractor of [`public`].
#[derive(Debug, Clone, Copy)]
pub struct Public;

impl KeyExtractor for Public {
    fn extract(&self, _: &Parts) -> Result<Option<LockKeys>, KeyError> {
        Ok(Some(LockKey::from(("scope", "public")).into()))
    }

    fn is_constant(&self) -> bool {
        true
    }
}
