//! Records: the stored outcomes of executions.

use std::fmt;
use std::sync::Arc;

use crate::protocol::names::hex;

/// The outcome of one execution, as the nodes store it.
///
/// The protocol reads only its head, which is in clear: the id of the execution, the fingerprint of its
/// request, and the digest of the rest. A node may return the head alone when the rest is
/// big; see [`Record::is_whole`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Record(Arc<[u8]>);

/// The id of one execution: 128 fresh random bits. Records are equal if and only if their
/// executions are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExecutionId(pub(crate) [u8; 16]);

/// The fingerprint of a request, which prevents the use of one key for two different requests: the first
/// half of a SHA-256.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub(crate) [u8; 16]);

impl Record {
    /// The number of bytes of the head.
    pub const HEAD: usize = 1 + 16 + 16 + 32;

    /// The size, in bytes, of the largest record that a node returns whole in the reply to `ACQUIRE`, because
    /// all locks share the connection.
    pub const MAX_INLINE: usize = 16 * 1024;

    /// Creates a record. `digest` is the SHA-256 of `rest`, which must not be empty.
    pub fn new(
        execution: ExecutionId,
        fingerprint: Fingerprint,
        digest: [u8; 32],
        rest: &[u8],
    ) -> Self {
        let head: [&[u8]; 4] = [&[VERSION], &execution.0, &fingerprint.0, &digest];
        Self([&head.concat(), rest].concat().into())
    }

    /// Reads the value that a node stores; returns `None` if it is no record of this version.
    pub fn from_bytes(bytes: Arc<[u8]>) -> Option<Self> {
        let is_ours = bytes.len() >= Self::HEAD && bytes[0] == VERSION;
        is_ours.then_some(Self(bytes))
    }

    /// Returns the value that the nodes store.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the value that the nodes store, without a copy.
    #[cfg(feature = "idempotency")]
    pub(crate) fn shared(&self) -> Arc<[u8]> {
        Arc::clone(&self.0)
    }

    /// Returns the id of the execution.
    pub fn execution(&self) -> ExecutionId {
        ExecutionId(self.part(1))
    }

    /// Returns the fingerprint of the request.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint(self.part(17))
    }

    /// Returns the SHA-256 of the rest.
    pub fn digest(&self) -> [u8; 32] {
        self.part(33)
    }

    /// Returns the bytes behind the head; empty if the node omitted them.
    pub fn rest(&self) -> &[u8] {
        &self.0[Self::HEAD..]
    }

    /// Returns whether it has more than the head.
    pub fn is_whole(&self) -> bool {
        self.0.len() > Self::HEAD
    }

    /// Returns whether this is the whole record of `head`: the heads are equal, and the rest is present.
    pub fn completes(&self, head: &Self) -> bool {
        self.is_whole() && self.0[..Self::HEAD] == head.0[..Self::HEAD]
    }

    /// Returns the part that a node returns in the reply to `ACQUIRE`.
    pub(super) fn answered(&self) -> Self {
        if self.0.len() <= Self::MAX_INLINE {
            self.clone()
        } else {
            self.head()
        }
    }

    /// Returns the part that a node returns to a client that has the record.
    pub(super) fn head(&self) -> Self {
        Self(self.0[..Self::HEAD].into())
    }

    fn part<const N: usize>(&self, at: usize) -> [u8; N] {
        let part = self.0[at..].first_chunk();
        *part.expect("every constructor checks for the head")
    }
}

impl ExecutionId {
    /// Creates an id from random bytes.
    pub fn from_random(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl Fingerprint {
    /// Creates a fingerprint from a SHA-256.
    pub fn from_digest(digest: [u8; 32]) -> Self {
        Self(digest.as_chunks().0[0])
    }

    /// Returns it as nodes store it beside an owner: 32 lower-case hexadecimal digits.
    pub(super) fn to_hex(self) -> String {
        hex(&self.0)
    }

    /// Reads the digits of a reply.
    pub fn from_hex(digits: &[u8]) -> Option<Self> {
        // The standard library also reads a sign, and fewer digits.
        if digits.len() != 32 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let digits = std::str::from_utf8(digits).ok()?;
        let number = u128::from_str_radix(digits, 16).ok()?;
        Some(Self(number.to_be_bytes()))
    }
}

/// Hides the response of the execution.
impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Record({:?}, {} bytes)", self.execution(), self.0.len())
    }
}

impl fmt::Debug for ExecutionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExecutionId({})", hex(&self.0))
    }
}

// A reader of the digest could confirm a guess of the payload.
opaque_debug! { Fingerprint }

/// The first byte of the head.
const VERSION: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rest: &[u8]) -> Record {
        let execution = ExecutionId::from_random([7; 16]);
        Record::new(execution, Fingerprint::from_digest([2; 32]), [3; 32], rest)
    }

    #[test]
    fn record_round_trips_through_bytes() {
        let record = record(b"rest");
        assert_eq!(record.execution(), ExecutionId::from_random([7; 16]));
        assert_eq!(record.fingerprint(), Fingerprint::from_digest([2; 32]));
        assert_eq!((record.digest(), record.rest()), ([3; 32], &b"rest"[..]));
        let read = Record::from_bytes(record.as_bytes().into());
        assert_eq!(read, Some(record));
    }

    #[test]
    fn record_from_bytes_refuses_other_data() {
        let bytes = record(b"rest").as_bytes().to_vec();
        for broken in [&bytes[..Record::HEAD - 1], &bytes[1..], b""] {
            assert_eq!(Record::from_bytes(broken.into()), None);
        }
    }

    #[test]
    fn big_record_is_returned_by_its_head() {
        let small = record(&vec![0; Record::MAX_INLINE - Record::HEAD]);
        assert_eq!(small.answered(), small);
        let big = record(&vec![0; Record::MAX_INLINE - Record::HEAD + 1]);
        let answered = big.answered();
        assert!(!answered.is_whole());
        assert_eq!(answered.execution(), big.execution());
        assert_eq!(answered.digest(), big.digest());
    }

    #[test]
    fn completes_accepts_only_the_record_of_the_head() {
        let big = record(&vec![0; Record::MAX_INLINE]);
        assert!(big.completes(&big.answered()));
        assert!(!big.answered().completes(&big.answered()));
        let execution = big.execution();
        let others = [
            Record::new(execution, big.fingerprint(), [4; 32], b"rest"),
            Record::new(
                execution,
                Fingerprint::from_digest([4; 32]),
                [3; 32],
                b"rest",
            ),
        ];
        for other in others {
            assert!(!other.completes(&big.answered()));
        }
    }

    #[test]
    fn fingerprint_round_trips_through_hex() {
        let fingerprint = Fingerprint::from_digest([0xa7; 32]);
        let digits = fingerprint.to_hex();
        assert_eq!(Fingerprint::from_hex(digits.as_bytes()), Some(fingerprint));
        let signed = b"0a0a0a0a0a0a0a0a0a0a0a0a+a0a0a0a";
        for broken in [&digits.as_bytes()[1..], b"zz", b"", signed] {
            assert_eq!(Fingerprint::from_hex(broken), None);
        }
    }
}
