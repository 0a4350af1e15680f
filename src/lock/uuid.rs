//! Keys from UUIDs.
//!
//! Not part of the protocol floor, which knows the standard library only.

use uuid::Uuid;

use crate::protocol::LockKey;

/// The hyphenated text in lower case, as [`Uuid`] is displayed.
///
/// A path or a header may have the same UUID in upper case, or without hyphens. Parse it, as with
/// [`key::typed_path`](crate::key::typed_path), before it becomes a key.
impl From<Uuid> for LockKey {
    fn from(key: Uuid) -> Self {
        let mut text = Uuid::encode_buffer();
        Self::from(&*key.hyphenated().encode_lower(&mut text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_is_encoded_as_its_hyphenated_text_in_lower_case() {
        let text = "67e55044-10b1-426f-9247-bb680e5fe0c8";
        let key = Uuid::from_u128(0x67e5_5044_10b1_426f_9247_bb68_0e5f_e0c8);
        assert_eq!(LockKey::from(key).as_bytes(), text.as_bytes());
        assert_eq!(
            LockKey::from(("order", key)),
            LockKey::from(("order", text))
        );
        for other in [text.to_uppercase(), text.replace('-', "")] {
            let parsed: Uuid = other.parse().unwrap();
            assert_eq!(LockKey::from(parsed), LockKey::from(text));
        }
    }
}
