//! Lock keys, the encoding of composite keys, and the errors of keys.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::io::Write;
use std::iter::successors;
use std::num::NonZeroU8;
use std::ops::Deref;
use std::slice;
use std::sync::Arc;

/// The name of one lockable resource: any non-empty byte string.
///
/// # Encoding
///
/// A plain key is its own bytes. A composite key, made from a tuple, is the concatenation of its
/// parts as [netstrings]: the decimal length of the part in bytes, `:`, the part, `,`. Any
/// language can produce it, and `("a", "b:c")` never equals `("a:b", "c")`.
///
/// ```
/// use tower_redlock::LockKey;
///
/// assert_eq!(LockKey::from(("account", "7")).as_bytes(), b"7:account,1:7,");
/// assert_ne!(LockKey::from(("a", "b:c")), LockKey::from(("a:b", "c")));
/// ```
///
/// An integer is its decimal text, so `("account", 7)` equals `("account", "7")`, whatever the type of the integer. Write
/// those of rare types as text: `id.to_string()`.
#[cfg_attr(
    feature = "uuid",
    doc = "A [`Uuid`](uuid::Uuid) is its hyphenated text in lower case."
)]
///
/// Two composite keys are equal only if their parts are. A *plain* key may be any bytes, so it can equal
/// the encoding of a composite key. If clients choose a key, add a literal part
/// (`("upload", client_chosen)`), which also keeps it distinct from all other kinds of resources.
///
/// # The kind of resource
///
/// Spans and metrics never show a key, but they show what kind of resource is locked. A lock without a
/// [`label`](crate::LockRequest::label) takes it from a `&str` that its key was made from: from the first part of a
/// tuple, `("account", id)`, or from the only key, `"nightly-report"`. This `&str` should be a literal: convert data of a
/// client to a `String`, which names no kind, or set a label. Only a word of letters, `-`, `_` and `.` names a kind, with at
/// most 32 bytes, and at most 32 different words in one process; otherwise the kind is `unnamed`. All other keys are
/// `unnamed`, too, and so are those that a layer or [`Locked`](crate::Locked) gets.
///
/// The conversion never fails. An empty key, or one that the namespace cannot hold, is refused with
/// a [`KeyError`] when the lock is requested.
///
/// [netstrings]: https://cr.yp.to/proto/netstrings.txt
#[derive(Clone)]
pub struct LockKey {
    encoded: Arc<[u8]>,
    /// The length of the first part, or of a plain key, if it may name the kind of resource.
    kind: Option<NonZeroU8>,
}

impl LockKey {
    /// Creates a composite key from its parts; equal to the key of their tuple.
    ///
    /// ```
    /// use tower_redlock::LockKey;
    ///
    /// assert_eq!(LockKey::from_parts(["account", "7"]), LockKey::from(("account", "7")));
    /// ```
    pub fn from_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut encoded = Vec::new();
        for part in parts {
            let part = part.as_ref();
            // Writing to a vector cannot fail.
            drop(write!(encoded, "{}:", part.len()));
            encoded.extend_from_slice(part);
            encoded.push(b',');
        }
        Self::from_encoded(encoded.into())
    }

    fn from_encoded(encoded: Arc<[u8]>) -> Self {
        Self {
            encoded,
            kind: None,
        }
    }

    /// Creates the key of a tuple, whose first part may name the kind of resource.
    fn from_tuple<const N: usize>(parts: [Self; N]) -> Self {
        let kind = match parts.as_slice() {
            // A single part is the whole key, and the kind of a part that is a tuple is not all of it.
            [first, _, ..] if first.is_plain_kind() => first.kind,
            _ => None,
        };
        Self {
            kind,
            ..Self::from_parts(parts)
        }
    }

    /// Returns the `&str` that the key was made from, or the first part of its tuple, if it is a word that may name the
    /// kind of resource.
    pub(crate) fn kind(&self) -> Option<&[u8]> {
        let len = usize::from(self.kind?.get());
        let begin = match self.is_plain_kind() {
            true => 0,
            false => self.encoded.iter().position(|byte| *byte == b':')? + 1,
        };
        self.encoded.get(begin..begin + len)
    }

    /// Returns whether all of the key names the kind of resource.
    pub(crate) fn is_plain_kind(&self) -> bool {
        let kind = self.kind.map(|len| usize::from(len.get()));
        kind == Some(self.encoded.len())
    }

    /// Returns whether the key begins with these bytes, or the first part of its tuple does, or the first part of that.
    pub(crate) fn begins_with(&self, bytes: &[u8]) -> bool {
        let mut keys = successors(Some(self.as_bytes()), |key| Some(split_part(key)?.0));
        keys.any(|key| key.starts_with(bytes))
    }

    /// Returns the encoded bytes of the key.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.encoded
    }

    /// Returns whether the key has no bytes, and so names no resource.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.encoded.is_empty()
    }
}

impl AsRef<[u8]> for LockKey {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

/// Compares the bytes only: a plain key equals a composite one if their bytes are equal.
impl PartialEq for LockKey {
    fn eq(&self, other: &Self) -> bool {
        self.encoded == other.encoded
    }
}

impl Eq for LockKey {}

impl PartialOrd for LockKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for LockKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.encoded.cmp(&other.encoded)
    }
}

impl Hash for LockKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Without its length, which would cost as much again. Keys that begin alike differ in their hashes all the same.
        state.write(&self.encoded);
    }
}

/// Shows the bytes as escaped text. Keys may be personal data: print them with care.
impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockKey(\"{}\")", self.encoded.escape_ascii())
    }
}

macro_rules! from_bytes {
    ($($source:ty => |$value:ident| $bytes:expr;)*) => {$(
        impl From<$source> for LockKey {
            fn from($value: $source) -> Self {
                Self::from_encoded($bytes)
            }
        }
    )*};
}

from_bytes! {
    &String => |key| key.as_bytes().into();
    String => |key| key.into_bytes().into();
    &[u8] => |key| key.into();
    Vec<u8> => |key| key.into();
}

/// A literal, in most programs.
impl From<&str> for LockKey {
    fn from(key: &str) -> Self {
        Self {
            kind: kind_len(key.as_bytes()),
            encoded: key.as_bytes().into(),
        }
    }
}

macro_rules! from_integer {
    ($($integer:ident)+) => {$(
        /// The decimal text of the number.
        impl From<$integer> for LockKey {
            fn from(key: $integer) -> Self {
                key.to_string().into()
            }
        }
    )+};
}

from_integer! { u16 u32 u64 usize i32 i64 }

impl From<&Self> for LockKey {
    fn from(key: &Self) -> Self {
        key.clone()
    }
}

impl<const N: usize> From<&[u8; N]> for LockKey {
    fn from(key: &[u8; N]) -> Self {
        Self::from_encoded(key.as_slice().into())
    }
}

macro_rules! from_tuple {
    ($($part:ident)+) => {
        impl<$($part: Into<LockKey>),+> From<($($part,)+)> for LockKey {
            #[allow(non_snake_case, reason = "the type parameters name the values too")]
            fn from(($($part,)+): ($($part,)+)) -> Self {
                Self::from_tuple([$($part.into()),+])
            }
        }
    };
}

for_tuples!(from_tuple);

/// The longest name of a kind of resource, in bytes.
const LONGEST_KIND: u8 = 32;

/// One or more keys that are locked together, sorted and without duplicates.
///
/// ```
/// use tower_redlock::{LockKey, LockKeys};
///
/// let both: LockKeys = ["bob", "alice", "bob"].into_iter().map(LockKey::from).collect();
/// assert_eq!(both.as_slice(), [LockKey::from("alice"), LockKey::from("bob")]);
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct LockKeys(Few<LockKey>);

/// One value, which needs no list, or a shared list of none or several.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Few<T> {
    One(T),
    Many(Arc<[T]>),
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::One(value) => slice::from_ref(value),
            Self::Many(values) => values,
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut values = values.into_iter();
        match (values.next(), values.next()) {
            (Some(only), None) => Self::One(only),
            (first, second) => {
                let begin = first.into_iter().chain(second);
                Self::Many(begin.chain(values).collect())
            }
        }
    }
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self::Many(Arc::default())
    }
}

impl LockKeys {
    /// The largest number of keys of one lock.
    pub const MAX: usize = 32;

    /// Returns the keys in ascending order.
    #[must_use]
    pub fn as_slice(&self) -> &[LockKey] {
        &self.0
    }

    /// Checks the rules that do not depend on a namespace.
    pub(crate) fn check(&self) -> Result<(), KeyError> {
        match self.as_slice() {
            [] => Err(KeyError::None),
            keys if keys.len() > Self::MAX => Err(KeyError::TooMany {
                count: keys.len(),
                max: Self::MAX,
            }),
            keys if keys.iter().any(LockKey::is_empty) => Err(KeyError::Empty),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for LockKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

impl<K: Into<LockKey>> From<K> for LockKeys {
    fn from(key: K) -> Self {
        Self(Few::One(key.into()))
    }
}

impl<K: Into<LockKey>> FromIterator<K> for LockKeys {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        let mut keys: Vec<LockKey> = keys.into_iter().map(Into::into).collect();
        // All clients use one order, so that requests for several keys cannot wait in a circle.
        keys.sort_unstable();
        keys.dedup();
        Self(keys.into_iter().collect())
    }
}

/// The error of a key, or of its source.
///
/// No variant repeats the key: keys come from clients and may be personal data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyError {
    /// The key has no bytes. An empty key would be one lock for all callers.
    Empty,
    /// A lock was requested without a key.
    None,
    /// The key is longer than its namespace can hold; only the empty namespace has a limit.
    TooLong {
        /// The bytes of the key.
        len: usize,
        /// The largest number of bytes.
        max: usize,
    },
    /// More keys than [`LockKeys::MAX`] were requested in one lock.
    TooMany {
        /// The number of different keys.
        count: usize,
        /// The largest number of keys.
        max: usize,
    },
    /// In the empty namespace, the key equals a name that the nodes use for other data than locks.
    Reserved,
    /// A request contains a key that does not have the form that its source requires.
    Malformed(Cow<'static, str>),
    /// The configuration of the program can never yield the key; no client can correct this.
    Misconfigured(Cow<'static, str>),
}

impl KeyError {
    /// Creates the error for a key in a request with a wrong form: a client error, status 400.
    pub fn malformed(why: impl Into<Cow<'static, str>>) -> Self {
        Self::Malformed(why.into())
    }

    /// Creates the error for a configuration that can never yield the key: a server error, status 500.
    pub fn misconfigured(why: impl Into<Cow<'static, str>>) -> Self {
        Self::Misconfigured(why.into())
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the lock key is empty; name the resource"),
            Self::None => f.write_str("no lock key was given; lock_all needs at least one"),
            Self::TooLong { len, max } => write!(
                f,
                "the lock key has {len} bytes and the empty namespace allows {max}; set a namespace, which hashes long keys"
            ),
            Self::TooMany { count, max } => write!(
                f,
                "{count} keys were requested in one lock and at most {max} are allowed; lock a coarser resource"
            ),
            Self::Reserved => {
                f.write_str("in the empty namespace a lock key may not begin with ")?;
                for word in BESIDE {
                    write!(f, "`redlock:{word}:`, ")?;
                }
                f.write_str("or be `redlock:generation`; set a namespace")
            }
            Self::Malformed(why) => write!(f, "the key is malformed: {why}"),
            Self::Misconfigured(why) => write!(f, "the lock key is misconfigured: {why}"),
        }
    }
}

impl std::error::Error for KeyError {}

/// The words of the keys beside a lock, as in `redlock:{a}:fence`.
pub(super) const BESIDE: [&str; 6] = ["fence", "done", "intent", "readers", "writer", "slots"];

/// Returns the length of a part that may name the kind of resource: a word of few characters, as programs
/// have them, and not an id, an address or other data of users.
fn kind_len(part: &[u8]) -> Option<NonZeroU8> {
    let is_word = |byte: &u8| byte.is_ascii_alphabetic() || b"-_.".contains(byte);
    let len = NonZeroU8::new(u8::try_from(part.len()).ok()?)?;
    (len.get() <= LONGEST_KIND && part.iter().all(is_word)).then_some(len)
}

/// Returns the first part of the encoding of a tuple, and the others.
pub(crate) fn split_part(encoded: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = encoded.iter().position(|byte| *byte == b':')?;
    let (part, rest) = encoded[colon + 1..].split_at_checked(number(&encoded[..colon])?)?;
    Some((part, rest.strip_prefix(b",")?))
}

/// Returns the number that is written in this way: in decimal digits, without leading zeros.
pub(super) fn number(digits: &[u8]) -> Option<usize> {
    let is_canonical = digits.iter().all(u8::is_ascii_digit)
        && (digits.len() == 1 || digits.first() != Some(&b'0'));
    let text = str::from_utf8(digits).ok().filter(|_| is_canonical)?;
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn composite_keys_with_different_parts_differ() {
        assert_ne!(LockKey::from(("a", "b:c")), LockKey::from(("a:b", "c")));
        assert_ne!(LockKey::from(("a", "")), LockKey::from(("", "a")));
        assert_ne!(
            LockKey::from(("a", "b", "c")),
            LockKey::from((("a", "b"), "c"))
        );
        assert_eq!(LockKey::from(("a", "b")), LockKey::from_parts(["a", "b"]));
    }

    /// Other languages produce the same bytes, and clients of two versions must exclude each other.
    #[test]
    fn composite_keys_are_encoded_as_netstrings_with_lengths_in_bytes() {
        let encoded = |parts: &[&str]| LockKey::from_parts(parts).as_bytes().to_vec();
        assert_eq!(
            LockKey::from(("account", "7")).as_bytes(),
            b"7:account,1:7,"
        );
        assert_eq!(encoded(&["account", "7"]), b"7:account,1:7,");
        assert_eq!(encoded(&["a"]), b"1:a,");
        assert_eq!(encoded(&["", ""]), b"0:,0:,");
        assert_eq!(encoded(&["0123456789"]), b"10:0123456789,");
        assert_eq!(encoded(&["\u{e9}"]), b"2:\xc3\xa9,");
        assert_eq!(LockKey::from_parts([[0, 255]]).as_bytes(), b"2:\x00\xff,");
        assert_eq!(
            LockKey::from((("a", "b"), "c")).as_bytes(),
            b"8:1:a,1:b,,1:c,"
        );
    }

    #[test]
    fn kind_of_a_tuple_is_its_first_part_if_that_is_a_word() {
        let kind = |key: LockKey| key.kind().map(<[u8]>::to_vec);
        let named = |first: &str| kind(LockKey::from((first, "7")));
        for word in ["account", "nightly-report", "a_b.c", &"x".repeat(32)] {
            assert_eq!(named(word).as_deref(), Some(word.as_bytes()));
        }
        for data in [
            "",
            "7",
            "a7",
            "a b",
            "alice@example.com",
            "\u{e9}",
            &"x".repeat(33),
        ] {
            assert_eq!(named(data), None, "{data}");
        }
        // Also in a copy.
        let key = LockKey::from(("account", String::from("7")));
        assert_eq!(kind(LockKey::from(&key)).as_deref(), Some(&b"account"[..]));
        assert_eq!(kind(LockKey::from(("7", "account"))), None);
        assert_eq!(kind(LockKey::from((("a", "b"), "c"))), None);
    }

    #[test]
    fn kind_of_other_keys_is_that_of_a_literal() {
        assert_eq!(LockKey::from("account").kind(), Some(&b"account"[..]));
        for key in [
            LockKey::from(String::from("account")),
            LockKey::from((String::from("account"), "7")),
            LockKey::from(b"account"),
            LockKey::from("7:account,1:7,"),
            LockKey::from(("account",)),
            LockKey::from_parts(["account", "7"]),
        ] {
            assert_eq!(key.kind(), None, "{key:?}");
        }
        let (plain, tuple) = (LockKey::from("1:a,1:b,"), LockKey::from(("a", "b")));
        assert_eq!(plain, tuple);
        assert_eq!(LockKeys::from_iter([plain, tuple]).as_slice().len(), 1);
    }

    #[test]
    fn composite_keys_with_separators_in_their_parts_differ() {
        for (one, other) in [
            (["a,:b", "c"], ["a", "b,:c"]),
            (["a,1:b", "c"], ["a", "b,1:c"]),
            (["a,", "b"], ["a", ",b"]),
            ([":", ""], ["", ":"]),
        ] {
            let (one, other) = (LockKey::from_parts(one), LockKey::from_parts(other));
            assert_ne!(one, other);
        }
    }

    #[test]
    fn plain_key_is_encoded_as_its_own_bytes() {
        assert_eq!(
            LockKey::from("nightly-report").as_bytes(),
            b"nightly-report"
        );
        assert_eq!(LockKey::from(vec![0, 255]).as_bytes(), [0, 255]);
    }

    #[test]
    fn integer_is_encoded_as_its_decimal_text() {
        assert_eq!(LockKey::from(("order", 17)), LockKey::from(("order", "17")));
        for (key, text) in [
            (LockKey::from(u16::MAX), "65535"),
            (LockKey::from(u32::MAX), "4294967295"),
            (LockKey::from(u64::MAX), "18446744073709551615"),
            (LockKey::from(7_usize), "7"),
            (LockKey::from(i32::MIN), "-2147483648"),
            (LockKey::from(i64::MIN), "-9223372036854775808"),
            // Zero is a key like any other, not an empty one.
            (LockKey::from(0), "0"),
        ] {
            assert_eq!(key.as_bytes(), text.as_bytes());
        }
        // An id is no kind of resource, in any position.
        assert_eq!(LockKey::from((17, "order")).kind(), None);
        assert_eq!(LockKey::from(("order", 17)).kind(), Some(&b"order"[..]));
    }

    #[test]
    fn lock_keys_check_refuses_empty_keys_and_too_many() {
        let many = |n: usize| (0..n).map(|i| i.to_string()).collect::<LockKeys>();
        assert_eq!(many(0).check(), Err(KeyError::None));
        assert_eq!(many(32).check(), Ok(()));
        assert_eq!(
            many(33).check(),
            Err(KeyError::TooMany { count: 33, max: 32 })
        );
        assert_eq!(
            LockKeys::from(LockKey::from("")).check(),
            Err(KeyError::Empty)
        );
    }
    #[test]
    fn key_begins_with_its_bytes_and_those_of_its_first_part() {
        let begins = |key: &LockKey, prefix: &str| key.begins_with(prefix.as_bytes());
        let job = LockKey::from(("job", 7));
        for key in [&job, &(&job, "slot", 0).into()] {
            for prefix in ["", "job", "3:j", "3:job,", "3:job,1:7,"] {
                assert!(begins(key, prefix), "{key:?} {prefix}");
            }
            for other in ["jobs", "7", "ob", "4:jobs,"] {
                assert!(!begins(key, other), "{key:?} {other}");
            }
        }
        // Keys that are no tuples.
        for key in "3:job 3:job; 9:job, :job, 3job, 18446744073709551616:job,".split(' ') {
            assert!(!begins(&key.into(), "job"), "{key}");
        }
    }
}
