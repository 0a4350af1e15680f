//! The encoding of responses in records: plain, compressed, encrypted.

use bytes::{Buf, Bytes};

#[cfg(feature = "encryption")]
pub use self::encryption::RecordKeys;

/// Flags in the first byte after the head of a record.
const COMPRESSED: u8 = 1;
const ENCRYPTED: u8 = 2;

/// Writes and reads the bytes after the head of a record.
#[derive(Debug, Clone, Default)]
#[allow(unreachable_pub, reason = "a fuzz target makes it")]
pub struct Codec {
    /// Above how many bytes responses are compressed.
    #[cfg(feature = "compression")]
    pub compress_above: Option<usize>,
    /// With which keys responses are encrypted.
    #[cfg(feature = "encryption")]
    pub keys: Option<RecordKeys>,
}

/// What identifies a record: its execution, its fingerprint and its key. An encrypted response is bound to it, and cannot be
/// moved to another record.
pub(super) type BoundTo<'a> = [&'a [u8]; 3];

/// Why a record cannot be read. The request counts as executed all the same.
pub(super) type Unreadable = &'static str;

pub(super) const MALFORMED: Unreadable = "it is damaged, or another version of this crate wrote it";
const UNKNOWN_KEY: Unreadable =
    "it is encrypted with an unknown key; add that key to `IdempotencyLayer::encrypt`";

#[cfg_attr(
    not(all(feature = "compression", feature = "encryption")),
    allow(
        clippy::unused_self,
        unused_variables,
        reason = "the features use the settings"
    )
)]
impl Codec {
    /// Encodes the bytes after the head. Called once per execution, because all copies of a record are equal.
    pub(super) fn write(&self, bound_to: BoundTo<'_>, plain: Vec<u8>) -> Vec<u8> {
        let (flags, bytes) = self.compress(plain);
        #[cfg(feature = "encryption")]
        if let Some(keys) = &self.keys {
            return keys.seal(bound_to, flags | ENCRYPTED, &bytes);
        }
        [&[flags], &*bytes].concat()
    }

    /// Decodes the bytes after the head; copies them only if they are compressed or encrypted.
    pub(super) fn read(&self, bound_to: BoundTo<'_>, mut rest: Bytes) -> Result<Bytes, Unreadable> {
        let flags = rest.try_get_u8().map_err(|_| MALFORMED)?;
        if flags & !(COMPRESSED | ENCRYPTED) != 0 {
            return Err(MALFORMED);
        }
        let bytes = self.decrypt(bound_to, flags, rest)?;
        match flags & COMPRESSED {
            0 => Ok(bytes),
            _ => decompress(&bytes).map(Bytes::from),
        }
    }

    fn compress(&self, plain: Vec<u8>) -> (u8, Vec<u8>) {
        #[cfg(feature = "compression")]
        if plain.len() <= MAX_DECODED
            && self.compress_above.is_some_and(|above| plain.len() > above)
        {
            let compressed = lz4_flex::compress_prepend_size(&plain);
            if compressed.len() < plain.len() {
                return (COMPRESSED, compressed);
            }
        }
        (0, plain)
    }

    fn decrypt(&self, bound_to: BoundTo<'_>, flags: u8, bytes: Bytes) -> Result<Bytes, Unreadable> {
        #[cfg(feature = "encryption")]
        if let Some(keys) = &self.keys {
            return keys.open(bound_to, flags, bytes);
        }
        match flags & ENCRYPTED {
            0 => Ok(bytes),
            _ => Err(UNKNOWN_KEY),
        }
    }
}

#[cfg(feature = "compression")]
fn decompress(bytes: &[u8]) -> Result<Vec<u8>, Unreadable> {
    let size = lz4_flex::block::uncompressed_size(bytes).map(|(size, _)| size);
    // A client with write access to the nodes may have forged it.
    let size = size.ok().filter(|size| *size <= MAX_DECODED);
    let plain = size.and_then(|_| lz4_flex::decompress_size_prepended(bytes).ok());
    plain
        .filter(|plain| Some(plain.len()) == size)
        .ok_or(MALFORMED)
}

#[cfg(not(feature = "compression"))]
fn decompress(_: &[u8]) -> Result<Vec<u8>, Unreadable> {
    Err("it is compressed; enable the feature `compression`")
}

/// Largest decoded size: that of the largest response, with its headers.
#[cfg(feature = "compression")]
const MAX_DECODED: usize = 4 * 1024 * 1024;

/// The keys of encrypted records, and what they do.
#[cfg(feature = "encryption")]
mod encryption {
    use std::collections::BTreeMap;

    use bytes::Bytes;
    use chacha20poly1305::aead::{Aead, KeyInit, Payload};
    use chacha20poly1305::{XChaCha20Poly1305, XNonce};

    use super::{BoundTo, ENCRYPTED, MALFORMED, UNKNOWN_KEY, Unreadable};
    use crate::node::unguessable;
    use crate::protocol::LockKey;

    const NONCE: usize = 24;
    pub(super) const PLAIN: Unreadable =
        "it is not encrypted; use `RecordKeys::reading_plain` to accept that";
    pub(super) const FORGED: Unreadable = "it was not encrypted for this request with its key";

    /// Keys that encrypt recorded responses (XChaCha20-Poly1305), with their ids.
    ///
    /// The execution's id, the fingerprint and the expiry stay in clear, because nodes and other servers read them.
    /// The ciphertext is bound to the id and the fingerprint, and to the idempotency key, scope, method and path, so
    /// that one record cannot replace another. Encryption protects the content of responses, not their existence.
    ///
    /// Use different keys for each namespace. To rotate the key, first let all servers read with the new key,
    /// then let them write with it, and keep the old key for `retention`:
    ///
    /// ```
    /// use tower_redlock::idempotency::RecordKeys;
    ///
    /// # let (old, new) = ([1; 32], [2; 32]);
    /// let first = RecordKeys::new(1, &old).reading(2, &new);
    /// let then = RecordKeys::new(2, &new).reading(1, &old);
    /// # let _ = (first, then);
    /// ```
    ///
    /// If the key of a record is not configured, its request gets 500 and is never executed again. That includes
    /// retries that reach a server without keys while keys are being introduced.
    #[derive(Debug, Clone)]
    #[must_use = "keys do nothing until a layer is given them"]
    pub struct RecordKeys {
        writing: u32,
        ciphers: BTreeMap<u32, XChaCha20Poly1305>,
        reads_plain: bool,
    }

    impl RecordKeys {
        /// Creates keys from one key that writes and reads records.
        pub fn new(id: u32, key: &[u8; 32]) -> Self {
            let keys = Self {
                writing: id,
                ciphers: BTreeMap::new(),
                reads_plain: false,
            };
            keys.reading(id, key)
        }

        /// Adds a key that only reads records.
        ///
        /// # Panics
        ///
        /// If a key with this id exists.
        pub fn reading(mut self, id: u32, key: &[u8; 32]) -> Self {
            let cipher = XChaCha20Poly1305::new(key.into());
            let before = self.ciphers.insert(id, cipher);
            assert!(
                before.is_none(),
                "two keys for records have the id {id}; use different ids"
            );
            self
        }

        /// Reads unencrypted records too. Default: they are an error.
        ///
        /// Use it for `retention` after encryption was enabled. Meanwhile, a client with write access to the nodes
        /// can forge responses.
        pub fn reading_plain(mut self) -> Self {
            self.reads_plain = true;
            self
        }

        pub(super) fn seal(&self, bound_to: BoundTo<'_>, flags: u8, bytes: &[u8]) -> Vec<u8> {
            // With 192 random bits, a nonce needs no counter.
            let (id, nonce) = (self.writing.to_be_bytes(), unguessable::<NONCE>());
            let aad = aad(bound_to, flags, id);
            let payload = Payload {
                msg: bytes,
                aad: aad.as_bytes(),
            };
            let sealed = self.ciphers[&self.writing].encrypt(&XNonce::from(nonce), payload);
            // Fails beyond 256 GiB; a response has at most 1 MiB.
            let sealed = sealed.expect("a record is short enough to be encrypted");
            [&[flags][..], &id, &nonce, &sealed].concat()
        }

        pub(super) fn open(
            &self,
            bound_to: BoundTo<'_>,
            flags: u8,
            bytes: Bytes,
        ) -> Result<Bytes, Unreadable> {
            if flags & ENCRYPTED == 0 {
                return self.reads_plain.then_some(bytes).ok_or(PLAIN);
            }
            let (id, bytes) = bytes.split_first_chunk().ok_or(MALFORMED)?;
            let (nonce, sealed) = bytes.split_first_chunk::<NONCE>().ok_or(MALFORMED)?;
            let cipher = self.ciphers.get(&u32::from_be_bytes(*id));
            let aad = aad(bound_to, flags, *id);
            let payload = Payload {
                msg: sealed,
                aad: aad.as_bytes(),
            };
            let opened = cipher
                .ok_or(UNKNOWN_KEY)?
                .decrypt(<&XNonce>::from(nonce), payload);
            opened.map(Bytes::from).map_err(|_| FORGED)
        }
    }

    /// Returns what an encrypted record is bound to.
    fn aad([execution, fingerprint, resource]: BoundTo<'_>, flags: u8, key: [u8; 4]) -> LockKey {
        LockKey::from_parts([
            &b"tower-redlock record 1"[..],
            &[flags],
            &key,
            execution,
            fingerprint,
            resource,
        ])
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "encryption")]
    use super::encryption::{FORGED, PLAIN};
    use super::*;
    use crate::protocol::LockKey;

    const RESPONSE: &[u8] = b"a response, a response, a response, a response, a response";

    fn of(resource: &LockKey) -> BoundTo<'_> {
        [&[1; 16], &[2; 16], resource.as_bytes()]
    }

    fn read_by(codec: &Codec, bound_to: BoundTo<'_>, rest: &[u8]) -> Result<Bytes, Unreadable> {
        codec.read(bound_to, Bytes::copy_from_slice(rest))
    }

    #[test]
    fn a_written_record_is_read() {
        let resource = LockKey::from("key");
        let written = Codec::default().write(of(&resource), RESPONSE.to_vec());
        let read = read_by(&Codec::default(), of(&resource), &written);
        assert_eq!(read, Ok(RESPONSE.into()));
    }

    #[test]
    fn a_record_with_unknown_flags_is_malformed() {
        let resource = LockKey::from("key");
        for rest in [&b""[..], &[4, 1, 2], &[255]] {
            let read = read_by(&Codec::default(), of(&resource), rest);
            assert_eq!(read, Err(MALFORMED));
        }
        let encrypted = read_by(&Codec::default(), of(&resource), &[ENCRYPTED; 64]);
        assert_eq!(encrypted, Err(UNKNOWN_KEY));
    }

    #[cfg(feature = "encryption")]
    #[test]
    fn an_encrypted_record_is_bound_to_its_execution_fingerprint_and_key() {
        let codec = Codec {
            keys: Some(RecordKeys::new(1, &[1; 32])),
            ..Codec::default()
        };
        let written: BoundTo<'_> = [&[1; 16], &[2; 16], b"key"];
        let rest = codec.write(written, RESPONSE.to_vec());
        assert_eq!(read_by(&codec, written, &rest), Ok(RESPONSE.into()));
        for moved in [
            [&[1; 16], &[2; 16], &b"other"[..]],
            [&[2; 16], &[2; 16], b"key"],
            [&[1; 16], &[1; 16], b"key"],
            [&[2; 16], &[1; 16], b"key"],
        ] {
            assert_eq!(read_by(&codec, moved, &rest), Err(FORGED));
        }
    }

    #[cfg(feature = "compression")]
    #[test]
    fn compress_above_compresses_a_record_that_gets_smaller() {
        let resource = LockKey::from("key");
        let codec = Codec {
            compress_above: Some(8),
            ..Codec::default()
        };
        let written = codec.write(of(&resource), RESPONSE.to_vec());
        assert!(written.len() < RESPONSE.len());
        // A codec that does not compress can read it.
        let read = read_by(&Codec::default(), of(&resource), &written);
        assert_eq!(read, Ok(RESPONSE.into()));
        let short = codec.write(of(&resource), RESPONSE[..8].to_vec());
        assert_eq!(short[1..], RESPONSE[..8]);
        let bomb = [&[COMPRESSED][..], &u32::MAX.to_le_bytes(), &[0; 8]].concat();
        let read = read_by(&codec, of(&resource), &bomb);
        assert_eq!(read, Err(MALFORMED));
    }

    #[cfg(feature = "encryption")]
    #[test]
    fn an_encrypted_record_is_read_only_with_its_key_for_its_request() {
        let codec = |keys| Codec {
            keys: Some(keys),
            ..Codec::default()
        };
        let resource = LockKey::from("key");
        let ours = codec(RecordKeys::new(1, &[1; 32]));
        let written = ours.write(of(&resource), RESPONSE.to_vec());
        assert!(!written.windows(8).any(|part| RESPONSE.starts_with(part)));
        assert_eq!(read_by(&ours, of(&resource), &written), Ok(RESPONSE.into()));
        assert_ne!(ours.write(of(&resource), RESPONSE.to_vec()), written);

        let rotated = codec(RecordKeys::new(2, &[2; 32]).reading(1, &[1; 32]));
        assert_eq!(
            read_by(&rotated, of(&resource), &written),
            Ok(RESPONSE.into())
        );
        let newer = rotated.write(of(&resource), RESPONSE.to_vec());
        assert_eq!(read_by(&ours, of(&resource), &newer), Err(UNKNOWN_KEY));
        let none = read_by(&Codec::default(), of(&resource), &written);
        assert_eq!(none, Err(UNKNOWN_KEY));
        let wrong = read_by(
            &codec(RecordKeys::new(1, &[3; 32])),
            of(&resource),
            &written,
        );
        assert_eq!(wrong, Err(FORGED));

        let other = LockKey::from("other");
        assert_eq!(read_by(&ours, of(&other), &written), Err(FORGED));
        let another = [&[2; 16], &[2; 16], resource.as_bytes()];
        assert_eq!(read_by(&ours, another, &written), Err(FORGED));
        let reworded = [&[1; 16], &[3; 16], resource.as_bytes()];
        assert_eq!(read_by(&ours, reworded, &written), Err(FORGED));
        for at in [0, 5, 20, 30, written.len() - 1] {
            let mut changed = written.clone();
            changed[at] ^= 1;
            assert_eq!(read_by(&ours, of(&resource), &changed), Err(FORGED));
        }
        let mut other_key = written.clone();
        other_key[4] ^= 1;
        let read = read_by(&ours, of(&resource), &other_key);
        assert_eq!(read, Err(UNKNOWN_KEY));
        for length in 29..written.len() {
            let cut = read_by(&ours, of(&resource), &written[..length]);
            assert_eq!(cut, Err(FORGED), "{length}");
        }
        for length in 1..29 {
            let cut = read_by(&ours, of(&resource), &written[..length]);
            assert_eq!(cut, Err(MALFORMED), "{length}");
        }
    }

    #[cfg(feature = "encryption")]
    #[test]
    fn debug_shows_the_ids_of_keys_and_no_key() {
        let keys = RecordKeys::new(7, &[171; 32]).reading(9, &[205; 32]);
        let shown = format!("{keys:?}");
        let cipher = "ChaChaPoly1305 { .. }";
        assert!(
            shown.contains(&format!("{{7: {cipher}, 9: {cipher}}}")),
            "{shown}"
        );
    }

    #[cfg(feature = "encryption")]
    #[test]
    fn an_unencrypted_record_is_read_only_with_reading_plain() {
        let resource = LockKey::from("key");
        let plain = Codec::default().write(of(&resource), RESPONSE.to_vec());
        let read = |keys| {
            let codec = Codec {
                keys: Some(keys),
                ..Codec::default()
            };
            read_by(&codec, of(&resource), &plain)
        };
        let keys = RecordKeys::new(1, &[1; 32]);
        assert_eq!(read(keys.clone()), Err(PLAIN));
        assert_eq!(read(keys.reading_plain()), Ok(RESPONSE.into()));
    }
}
