//! The encoding of responses in records: plain, compressed, encrypted.

use std::borrow::Cow;
#[cfg(feature = "encryption")]
use std::collections::BTreeMap;
use std::fmt;

#[cfg(feature = "encryption")]
use chacha20poly1305::aead::{Aead, KeyInit, Payload};
#[cfg(feature = "encryption")]
use chacha20poly1305::{XChaCha20Poly1305, XNonce};

#[cfg(feature = "encryption")]
use crate::node::unguessable;
use crate::protocol::{ExecutionId, Fingerprint, LockKey};

/// Flags in the first byte after the head of a record.
const COMPRESSED: u8 = 1;
const ENCRYPTED: u8 = 2;

/// Writes and reads the bytes after the head of a record.
#[derive(Debug, Clone, Default)]
pub(super) struct Codec {
    pub(super) keep_cookies: bool,
    #[cfg(feature = "compression")]
    pub(super) compress_above: Option<usize>,
    #[cfg(feature = "encryption")]
    pub(super) keys: Option<RecordKeys>,
}

/// Identifies a record; an encrypted response is bound to it, and cannot be moved to another record.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(feature = "encryption"),
    expect(dead_code, reason = "only encryption reads it")
)]
pub(super) struct RecordContext<'a> {
    pub(super) resource: &'a LockKey,
    pub(super) execution: ExecutionId,
    pub(super) fingerprint: Fingerprint,
}

/// Why a record cannot be read. The request counts as executed all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// It is damaged, or another version of the crate wrote it.
    Malformed,
    #[cfg_attr(
        feature = "compression",
        expect(dead_code, reason = "with the feature, such records are read")
    )]
    NeedsCompression,
    /// Its key is not configured.
    UnknownKey,
    /// It is not encrypted, although keys are configured.
    #[cfg_attr(not(feature = "encryption"), expect(dead_code, reason = "needs keys"))]
    Plain,
    /// It was not encrypted with its key for this request.
    #[cfg_attr(not(feature = "encryption"), expect(dead_code, reason = "needs keys"))]
    Forged,
}

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
#[cfg(feature = "encryption")]
#[derive(Clone)]
#[must_use = "keys do nothing until a layer is given them"]
pub struct RecordKeys {
    writing: u32,
    ciphers: BTreeMap<u32, XChaCha20Poly1305>,
    reads_plain: bool,
}

#[cfg(feature = "encryption")]
impl RecordKeys {
    /// Creates keys from one key that writes and reads records.
    pub fn new(id: u32, key: &[u8; 32]) -> Self {
        let ciphers = BTreeMap::new();
        let keys = Self {
            writing: id,
            ciphers,
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

    fn seal(&self, context: RecordContext<'_>, flags: u8, bytes: &[u8]) -> Vec<u8> {
        let (id, nonce) = (self.writing.to_be_bytes(), nonce());
        let aad = aad(context, flags, id);
        let payload = Payload {
            msg: bytes,
            aad: aad.as_bytes(),
        };
        let sealed = self.ciphers[&self.writing].encrypt(&XNonce::from(nonce), payload);
        // Fails beyond 256 GiB; a response has at most 1 MiB.
        let sealed = sealed.expect("a record is short enough to be encrypted");
        [&[flags][..], &id, &nonce, &sealed].concat()
    }

    fn open<'a>(
        &self,
        context: RecordContext<'_>,
        flags: u8,
        bytes: &'a [u8],
    ) -> Result<Cow<'a, [u8]>, Unreadable> {
        if flags & ENCRYPTED == 0 {
            return self
                .reads_plain
                .then_some(bytes.into())
                .ok_or(Unreadable::Plain);
        }
        let (id, bytes) = bytes.split_first_chunk().ok_or(Unreadable::Malformed)?;
        let nonce = bytes.split_first_chunk::<NONCE>();
        let (nonce, sealed) = nonce.ok_or(Unreadable::Malformed)?;
        let cipher = self.ciphers.get(&u32::from_be_bytes(*id));
        let aad = aad(context, flags, *id);
        let payload = Payload {
            msg: sealed,
            aad: aad.as_bytes(),
        };
        let opened = cipher
            .ok_or(Unreadable::UnknownKey)?
            .decrypt(<&XNonce>::from(nonce), payload);
        opened.map(Cow::Owned).map_err(|_| Unreadable::Forged)
    }
}

/// Returns what an encrypted record is bound to.
#[cfg(feature = "encryption")]
fn aad(context: RecordContext<'_>, flags: u8, key: [u8; 4]) -> LockKey {
    LockKey::from_parts([
        &b"tower-redlock record 1"[..],
        &[flags],
        &key,
        context.execution.as_bytes(),
        context.fingerprint.as_bytes(),
        context.resource.as_bytes(),
    ])
}

/// By hand: keys are never shown.
#[cfg(feature = "encryption")]
impl fmt::Debug for RecordKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<u32> = self.ciphers.keys().copied().collect();
        f.debug_struct("RecordKeys")
            .field("writing", &self.writing)
            .field("ids", &ids)
            .finish_non_exhaustive()
    }
}

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
    pub(super) fn write(&self, context: RecordContext<'_>, plain: Vec<u8>) -> Vec<u8> {
        let (flags, bytes) = self.compress(plain);
        #[cfg(feature = "encryption")]
        if let Some(keys) = &self.keys {
            return keys.seal(context, flags | ENCRYPTED, &bytes);
        }
        [&[flags], &*bytes].concat()
    }

    /// Decodes the bytes after the head; copies them only if they are compressed or encrypted.
    pub(super) fn read<'a>(
        &self,
        context: RecordContext<'_>,
        rest: &'a [u8],
    ) -> Result<Cow<'a, [u8]>, Unreadable> {
        let (&flags, bytes) = rest.split_first().ok_or(Unreadable::Malformed)?;
        if flags & !(COMPRESSED | ENCRYPTED) != 0 {
            return Err(Unreadable::Malformed);
        }
        let bytes = self.decrypt(context, flags, bytes)?;
        if flags & COMPRESSED == 0 {
            return Ok(bytes);
        }
        decompress(&bytes).map(Cow::Owned)
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

    fn decrypt<'a>(
        &self,
        context: RecordContext<'_>,
        flags: u8,
        bytes: &'a [u8],
    ) -> Result<Cow<'a, [u8]>, Unreadable> {
        #[cfg(feature = "encryption")]
        if let Some(keys) = &self.keys {
            return keys.open(context, flags, bytes);
        }
        match flags & ENCRYPTED {
            0 => Ok(bytes.into()),
            _ => Err(Unreadable::UnknownKey),
        }
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Malformed => "it is damaged, or another version of this crate wrote it",
            Self::NeedsCompression => "it is compressed; enable the feature `compression`",
            Self::UnknownKey => {
                "it is encrypted with an unknown key; add that key to `IdempotencyLayer::encrypt`"
            }
            Self::Plain => "it is not encrypted; use `RecordKeys::reading_plain` to accept that",
            Self::Forged => "it was not encrypted for this request with its key",
        })
    }
}

#[cfg(feature = "compression")]
fn decompress(bytes: &[u8]) -> Result<Vec<u8>, Unreadable> {
    let (size, _) = lz4_flex::block::uncompressed_size(bytes).map_err(|_| Unreadable::Malformed)?;
    // A client with write access to the nodes may have forged it.
    if size > MAX_DECODED {
        return Err(Unreadable::Malformed);
    }
    let plain = lz4_flex::decompress_size_prepended(bytes);
    let plain = plain.map_err(|_| Unreadable::Malformed)?;
    (plain.len() == size)
        .then_some(plain)
        .ok_or(Unreadable::Malformed)
}

#[cfg(not(feature = "compression"))]
fn decompress(_: &[u8]) -> Result<Vec<u8>, Unreadable> {
    Err(Unreadable::NeedsCompression)
}

/// Returns a random nonce; with 192 bits, it needs no counter.
#[cfg(feature = "encryption")]
fn nonce() -> [u8; NONCE] {
    let mut nonce = [0; NONCE];
    nonce[..16].copy_from_slice(&unguessable());
    nonce[16..].copy_from_slice(&unguessable()[..8]);
    nonce
}

#[cfg(feature = "encryption")]
const NONCE: usize = 24;

/// Largest decoded size: that of the largest response, with its headers.
#[cfg(feature = "compression")]
const MAX_DECODED: usize = 4 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &[u8] = b"a response, a response, a response, a response, a response";

    fn of(resource: &LockKey) -> RecordContext<'_> {
        let execution = ExecutionId::from_random([1; 16]);
        RecordContext {
            resource,
            execution,
            fingerprint: Fingerprint::from_digest([2; 32]),
        }
    }

    #[test]
    fn a_written_record_is_read() {
        let resource = LockKey::from("key");
        let written = Codec::default().write(of(&resource), PLAIN.to_vec());
        let read = Codec::default().read(of(&resource), &written);
        assert_eq!(read, Ok(PLAIN.into()));
    }

    #[test]
    fn a_record_with_unknown_flags_is_malformed() {
        let resource = LockKey::from("key");
        for rest in [&b""[..], &[4, 1, 2], &[255]] {
            let read = Codec::default().read(of(&resource), rest);
            assert_eq!(read, Err(Unreadable::Malformed));
        }
        let encrypted = Codec::default().read(of(&resource), &[ENCRYPTED; 64]);
        assert_eq!(encrypted, Err(Unreadable::UnknownKey));
    }

    #[cfg(feature = "compression")]
    #[test]
    fn compress_above_compresses_a_record_that_gets_smaller() {
        let resource = LockKey::from("key");
        let codec = Codec {
            compress_above: Some(8),
            ..Codec::default()
        };
        let written = codec.write(of(&resource), PLAIN.to_vec());
        assert!(written.len() < PLAIN.len());
        // A codec that does not compress can read it.
        let read = Codec::default().read(of(&resource), &written);
        assert_eq!(read, Ok(PLAIN.into()));
        let short = codec.write(of(&resource), PLAIN[..8].to_vec());
        assert_eq!(short[1..], PLAIN[..8]);
        let bomb = [&[COMPRESSED][..], &u32::MAX.to_le_bytes(), &[0; 8]].concat();
        let read = codec.read(of(&resource), &bomb);
        assert_eq!(read, Err(Unreadable::Malformed));
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
        let written = ours.write(of(&resource), PLAIN.to_vec());
        assert!(!written.windows(8).any(|part| PLAIN.starts_with(part)));
        assert_eq!(ours.read(of(&resource), &written), Ok(PLAIN.into()));
        assert_ne!(ours.write(of(&resource), PLAIN.to_vec()), written);

        let rotated = codec(RecordKeys::new(2, &[2; 32]).reading(1, &[1; 32]));
        assert_eq!(rotated.read(of(&resource), &written), Ok(PLAIN.into()));
        let newer = rotated.write(of(&resource), PLAIN.to_vec());
        assert_eq!(
            ours.read(of(&resource), &newer),
            Err(Unreadable::UnknownKey)
        );
        let none = Codec::default().read(of(&resource), &written);
        assert_eq!(none, Err(Unreadable::UnknownKey));
        let wrong = codec(RecordKeys::new(1, &[3; 32])).read(of(&resource), &written);
        assert_eq!(wrong, Err(Unreadable::Forged));

        let other = LockKey::from("other");
        assert_eq!(ours.read(of(&other), &written), Err(Unreadable::Forged));
        let another = RecordContext {
            execution: ExecutionId::from_random([2; 16]),
            ..of(&resource)
        };
        assert_eq!(ours.read(another, &written), Err(Unreadable::Forged));
        let reworded = RecordContext {
            fingerprint: Fingerprint::from_digest([3; 32]),
            ..of(&resource)
        };
        assert_eq!(ours.read(reworded, &written), Err(Unreadable::Forged));
        for at in [0, 5, 20, 30, written.len() - 1] {
            let mut changed = written.clone();
            changed[at] ^= 1;
            assert_eq!(ours.read(of(&resource), &changed), Err(Unreadable::Forged));
        }
        let mut other_key = written.clone();
        other_key[4] ^= 1;
        let read = ours.read(of(&resource), &other_key);
        assert_eq!(read, Err(Unreadable::UnknownKey));
        for length in 29..written.len() {
            let cut = ours.read(of(&resource), &written[..length]);
            assert_eq!(cut, Err(Unreadable::Forged), "{length}");
        }
        for length in 1..29 {
            let cut = ours.read(of(&resource), &written[..length]);
            assert_eq!(cut, Err(Unreadable::Malformed), "{length}");
        }
    }

    #[cfg(feature = "encryption")]
    #[test]
    fn an_unencrypted_record_is_read_only_with_reading_plain() {
        let resource = LockKey::from("key");
        let plain = Codec::default().write(of(&resource), PLAIN.to_vec());
        let read = |keys| {
            let codec = Codec {
                keys: Some(keys),
                ..Codec::default()
            };
            codec.read(of(&resource), &plain)
        };
        let keys = RecordKeys::new(1, &[1; 32]);
        assert_eq!(read(keys.clone()), Err(Unreadable::Plain));
        assert_eq!(read(keys.reading_plain()), Ok(PLAIN.into()));
    }
}
