//! The Redis keys of a lock key.

use std::sync::Arc;
use std::time::Duration;

use crate::protocol::key::{BESIDE, KeyError, LockKey, LockKeys};

/// The longest key, in bytes, that a node sees in clear; the SHA-256 replaces a longer one.
pub const MAX_CLEAR_KEY: usize = 512;

/// The key of the generation in the empty namespace.
const BARE_GENERATION: &str = "redlock:generation";

/// The Redis keys of one lockable resource.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyNames {
    /// Holds the owner while locked, with the ttl as its expiry.
    pub lock: Arc<[u8]>,
    /// Whether the lock has the name of the key itself, without a namespace.
    pub(super) is_bare: bool,
    /// Of a key that keeps records, holds the [`Record`](crate::protocol::Record).
    pub record: Option<Arc<[u8]>>,
    /// Of one that keeps records, if intents are enabled.
    pub intent: Option<IntentName>,
    /// The further keys of a key that readers share.
    pub shared: Option<SharedNames>,
    /// The further keys of a lock that is one slot of several.
    pub slots: Option<Arc<SlotNames>>,
}

impl KeyNames {
    /// Returns the key that holds the highest fencing number granted and its grantee, which outlives the lock.
    pub fn fence(&self) -> Arc<[u8]> {
        joined(&self.parts_of_fence())
    }

    /// Returns its name in parts. It is written where it is needed, and most locks write it once.
    pub(crate) fn parts_of_fence(&self) -> [&[u8]; 5] {
        beside(self.is_bare, &self.lock, b"fence")
    }

    /// Returns the channel on which a node publishes that the lock is free.
    pub fn channel(&self) -> &Arc<[u8]> {
        self.slots
            .as_ref()
            .map_or(&self.lock, |slots| &slots.channel)
    }

    /// Returns how long the intent of an execution lives, if one is kept.
    pub fn intent_retention(&self) -> Option<Duration> {
        self.intent.as_ref().map(|intent| intent.retention)
    }
}

/// The Redis keys beside a lock that readers share.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SharedNames {
    /// Holds the readers, each with the end of its lock.
    pub readers: Arc<[u8]>,
    /// Holds the owner that waits to hold the lock alone, which keeps new readers out.
    pub writer: Arc<[u8]>,
}

/// The Redis keys of all slots of a key that several owners may hold, each with a slot of its own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotNames {
    /// The locks of the slots.
    pub locks: Vec<Arc<[u8]>>,
    /// The channel of all slots: a caller that waits can take any of them.
    pub channel: Arc<[u8]>,
}

/// The Redis key of an intent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IntentName {
    /// Holds the owner that may have executed and left no record.
    pub name: Arc<[u8]>,
    /// Its lifetime.
    pub retention: Duration,
}

/// The common prefix of the keys of clients that exclude each other.
///
/// The braces in the names are a Redis Cluster hash tag, so that a lock and its fence would share
/// a slot, unless the key begins with `}`. They also mark the end of the key, so that different keys have different
/// names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace(Arc<str>);

impl Namespace {
    /// Creates a namespace; returns `None` if it contains a brace, which would make names ambiguous.
    pub fn new(name: &str) -> Option<Self> {
        let ambiguous = name.contains(['{', '}']);
        (!ambiguous).then(|| Self(name.into()))
    }

    /// Returns the key of a node's generation; no lock or fence has this name.
    pub fn generation(&self) -> Arc<[u8]> {
        if self.0.is_empty() {
            BARE_GENERATION.as_bytes().into()
        } else {
            format!("{}:generation", self.0).into_bytes().into()
        }
    }

    /// Returns the names of all keys of a set, in the set's order.
    ///
    /// `digest` is SHA-256. It is an argument because this floor contains no cryptography.
    ///
    /// # Errors
    ///
    /// [`KeyError`] for an empty set or key, too many keys, and, in the empty namespace, for a key
    /// that is too long or has the prefix of a fence.
    pub fn names(
        &self,
        keys: &LockKeys,
        digest: impl Fn(&[u8]) -> [u8; 32],
    ) -> Result<Arc<[KeyNames]>, KeyError> {
        keys.check()?;
        match keys.as_slice() {
            // The usual case, without a list on the way.
            [key] => Ok(Arc::new([self.name(key, digest)?])),
            keys => keys.iter().map(|key| self.name(key, &digest)).collect(),
        }
    }

    /// Returns the names of one resource that keeps records, and also intents if `intents` is given.
    ///
    /// # Errors
    ///
    /// As [`Namespace::names`].
    pub fn names_with_record(
        &self,
        key: &LockKey,
        intents: Option<Duration>,
        digest: impl Fn(&[u8]) -> [u8; 32],
    ) -> Result<KeyNames, KeyError> {
        LockKeys::from(key.clone()).check()?;
        let mut names = self.name(key, digest)?;
        names.record = Some(self.beside(&names.lock, "done"));
        names.intent = intents.map(|retention| IntentName {
            name: self.beside(&names.lock, "intent"),
            retention,
        });
        Ok(names)
    }

    /// Returns the names with those that readers need.
    pub fn with_shared(&self, mut names: KeyNames) -> KeyNames {
        names.shared = Some(SharedNames {
            readers: self.beside(&names.lock, "readers"),
            writer: self.beside(&names.lock, "writer"),
        });
        names
    }

    /// Returns the names of each of `count` slots of a set of keys, in the set's order.
    ///
    /// Slot `i` of a key is the lock of the key `(key, "slot", i)`, counted from zero.
    ///
    /// # Errors
    ///
    /// As [`Namespace::names`].
    pub fn slot_names(
        &self,
        keys: &LockKeys,
        count: usize,
        digest: impl Fn(&[u8]) -> [u8; 32],
    ) -> Result<Vec<Arc<[KeyNames]>>, KeyError> {
        keys.check()?;
        let mut slots = vec![Vec::new(); count];
        for key in keys.as_slice() {
            // Not the name of a lock, which has a channel of its own.
            let channel = self.beside(&self.name(key, &digest)?.lock, "slots");
            let name = |slot: usize| self.name(&(key, "slot", slot).into(), &digest);
            let names = (0..count).map(name).collect::<Result<Vec<_>, _>>()?;
            let all = Arc::new(SlotNames {
                locks: names.iter().map(|name| Arc::clone(&name.lock)).collect(),
                channel,
            });
            for (slot, mut name) in slots.iter_mut().zip(names) {
                name.slots = Some(Arc::clone(&all));
                slot.push(name);
            }
        }
        Ok(slots.into_iter().map(Arc::from).collect())
    }

    /// Returns a glob pattern of the names of the locks whose keys contain these bytes. It also matches other names.
    pub(crate) fn pattern(&self, bytes: &[u8]) -> Arc<[u8]> {
        let (namespace, bytes) = (escaped(self.0.as_bytes()), escaped(bytes));
        if self.0.is_empty() {
            joined(&[b"*", &bytes, b"*"])
        } else {
            joined(&[&namespace, b":{*", &bytes, b"*}"])
        }
    }

    /// Returns the key whose lock has this name; `None` if no lock has it.
    pub(crate) fn key_of(&self, lock: &[u8]) -> Option<LockKey> {
        let key = if self.0.is_empty() {
            bare_name(lock).is_ok().then_some(lock)
        } else {
            let braced = lock.strip_prefix(self.0.as_bytes())?;
            braced.strip_prefix(b":{")?.strip_suffix(b"}")
        };
        key.filter(|key| !key.is_empty()).map(LockKey::from)
    }

    fn beside(&self, lock: &[u8], word: &str) -> Arc<[u8]> {
        joined(&beside(self.0.is_empty(), lock, word.as_bytes()))
    }

    fn name(&self, key: &LockKey, hash: impl Fn(&[u8]) -> [u8; 32]) -> Result<KeyNames, KeyError> {
        let bytes = key.as_bytes();
        let braced = |shown: &[u8]| joined(&[self.0.as_bytes(), b":{", shown, b"}"]);
        let lock = if self.0.is_empty() {
            bare_name(bytes)?
        } else if bytes.len() > MAX_CLEAR_KEY {
            braced(hex(&hash(bytes)).as_bytes())
        } else {
            braced(bytes)
        };
        Ok(KeyNames {
            lock,
            is_bare: self.0.is_empty(),
            ..KeyNames::default()
        })
    }
}

impl Default for Namespace {
    fn default() -> Self {
        Self("redlock".into())
    }
}

/// The lock has the name that another Redlock client would use, so a long key cannot be hashed.
fn bare_name(key: &[u8]) -> Result<Arc<[u8]>, KeyError> {
    if key.len() > MAX_CLEAR_KEY {
        return Err(KeyError::TooLong {
            len: key.len(),
            max: MAX_CLEAR_KEY,
        });
    }
    let is_ours = |word: &str| {
        let rest = key.strip_prefix(b"redlock:");
        let rest = rest.and_then(|rest| rest.strip_prefix(word.as_bytes()));
        rest.is_some_and(|rest| rest.starts_with(b":"))
    };
    if BESIDE.into_iter().any(is_ours) || key == BARE_GENERATION.as_bytes() {
        return Err(KeyError::Reserved);
    }
    Ok(key.into())
}

/// Returns the glob pattern that matches these bytes only.
fn escaped(bytes: &[u8]) -> Vec<u8> {
    let escape = |byte: &u8| b"*?[\\".contains(byte).then_some(b'\\');
    let pairs = bytes.iter().map(|byte| [escape(byte), Some(*byte)]);
    pairs.flatten().flatten().collect()
}

/// Returns the parts of the name of the key beside a lock that has this word, one of [`BESIDE`].
fn beside<'a>(is_bare: bool, lock: &'a [u8], word: &'a [u8]) -> [&'a [u8]; 5] {
    match is_bare {
        true => [b"redlock:", word, b":{", lock, b"}"],
        false => [lock, b":", word, b"", b""],
    }
}

/// Joins the parts of a name.
fn joined(parts: &[&[u8]]) -> Arc<[u8]> {
    // Most names are short, so the stack has room for them until they are shared.
    let (mut short, mut len) = ([0; 128], 0);
    for part in parts {
        let Some(room) = short.get_mut(len..len + part.len()) else {
            return parts.concat().into();
        };
        room.copy_from_slice(part);
        len += part.len();
    }
    short[..len].into()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| hex_digits([*byte])[0]);
    digits.map(char::from).collect()
}

/// Returns the two lower-case digits of each byte.
pub(super) fn hex_digits<const N: usize>(bytes: [u8; N]) -> [[u8; 2]; N] {
    // Without a table, so that all are computed at once.
    let digit = |nibble: u8| nibble + if nibble < 10 { b'0' } else { b'a' - 10 };
    bytes.map(|byte| [digit(byte >> 4), digit(byte & 15)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(_: &[u8]) -> [u8; 32] {
        [0xab; 32]
    }

    fn named(namespace: &str, key: impl Into<LockKey>) -> Result<(String, String), KeyError> {
        let namespace = Namespace::new(namespace).unwrap();
        let names = namespace.names(&LockKeys::from(key.into()), digest)?;
        let text = |name: &[u8]| String::from_utf8(name.to_vec()).unwrap();
        Ok((text(&names[0].lock), text(&names[0].fence())))
    }

    #[test]
    fn namespace_names_a_lock_and_its_fence() {
        assert_eq!(
            named("redlock", "a").unwrap(),
            ("redlock:{a}".into(), "redlock:{a}:fence".into())
        );
        assert_eq!(
            named("", "a").unwrap(),
            ("a".into(), "redlock:fence:{a}".into())
        );
    }

    #[test]
    fn namespace_names_a_record_and_its_intent() {
        let named = |namespace, intents: bool| {
            let namespace = Namespace::new(namespace).unwrap();
            let intents = intents.then_some(Duration::from_secs(1));
            let names = namespace.names_with_record(&"a".into(), intents, digest);
            let names = names.unwrap();
            let text = |name: &[u8]| String::from_utf8(name.to_vec()).unwrap();
            (
                text(&names.record.unwrap()),
                names.intent.map(|intent| text(&intent.name)),
            )
        };
        assert_eq!(named("redlock", false), ("redlock:{a}:done".into(), None));
        let intent = Some("redlock:{a}:intent".into());
        assert_eq!(named("redlock", true).1, intent);
        let bare = ("redlock:done:{a}".into(), Some("redlock:intent:{a}".into()));
        assert_eq!(named("", true), bare);
    }

    #[test]
    fn namespace_names_the_readers_and_the_waiting_writer() {
        let named = |namespace| {
            let namespace = Namespace::new(namespace).unwrap();
            let names = namespace.names(&LockKey::from("a").into(), digest).unwrap();
            let shared = namespace.with_shared(names[0].clone()).shared.unwrap();
            [shared.readers, shared.writer].map(|name| String::from_utf8(name.to_vec()).unwrap())
        };
        assert_eq!(
            named("redlock"),
            ["redlock:{a}:readers", "redlock:{a}:writer"]
        );
        assert_eq!(named(""), ["redlock:readers:{a}", "redlock:writer:{a}"]);
    }

    #[test]
    fn slot_is_the_lock_of_a_key_with_its_number() {
        let namespace = Namespace::default();
        let keys = [LockKey::from("a"), LockKey::from(("b", "c"))];
        let slots = namespace
            .slot_names(&keys.iter().collect(), 3, digest)
            .unwrap();
        assert_eq!(slots.len(), 3);
        for (number, slot) in slots.iter().enumerate() {
            for key in &keys {
                let own = LockKey::from((key, "slot", number));
                let own = &namespace.names(&own.into(), digest).unwrap()[0];
                let found = slot.iter().find(|name| name.lock == own.lock).unwrap();
                assert_eq!(found.fence(), own.fence());
                let all = found.slots.as_ref().unwrap();
                assert_eq!(all.locks[number], own.lock);
                let lock = &namespace.names(&key.clone().into(), digest).unwrap()[0].lock;
                assert_eq!(**found.channel(), [lock, &b":slots"[..]].concat());
            }
        }
    }

    #[test]
    fn namespace_hashes_long_keys_and_the_empty_one_refuses_them() {
        let long = "x".repeat(513);
        let (lock, _) = named("redlock", &long).unwrap();
        assert_eq!(lock, format!("redlock:{{{}}}", "ab".repeat(32)));
        assert_eq!(
            named("", &long),
            Err(KeyError::TooLong { len: 513, max: 512 })
        );
        assert!(named("", &long[..512]).is_ok());
    }

    #[test]
    fn empty_namespace_refuses_reserved_keys() {
        assert_eq!(named("", "redlock:fence:{a}"), Err(KeyError::Reserved));
        assert_eq!(named("", "redlock:generation"), Err(KeyError::Reserved));
        assert_eq!(named("", "redlock:done:{a}"), Err(KeyError::Reserved));
        assert_eq!(named("", "redlock:intent:{a}"), Err(KeyError::Reserved));
        assert_eq!(named("", "redlock:readers:{a}"), Err(KeyError::Reserved));
        assert_eq!(named("", "redlock:writer:{a}"), Err(KeyError::Reserved));
        assert_eq!(named("", "redlock:slots:{a}"), Err(KeyError::Reserved));
        assert!(named("redlock", "redlock:fence:{a}").is_ok());
    }

    #[test]
    fn namespace_with_braces_is_refused() {
        assert_eq!(Namespace::new("a{b"), None);
    }

    #[test]
    fn key_of_the_name_of_a_lock_is_its_key_and_no_other_name_has_one() {
        let keys: [&[u8]; 7] = [
            b"a",
            b"}",
            b"{",
            b"a}:fence",
            b":fence",
            b"\xff\0",
            &[b'x'; 512],
        ];
        for namespace in ["redlock", "a*[b", ""] {
            let namespace = Namespace::new(namespace).unwrap();
            for key in keys.map(LockKey::from) {
                let names = namespace.names_with_record(&key, Some(Duration::ZERO), digest);
                let names = namespace.with_shared(names.unwrap());
                assert_eq!(namespace.key_of(&names.lock), Some(key));
                let fence = names.fence();
                let (intent, shared) = (names.intent.unwrap().name, names.shared.unwrap());
                let beside = [fence, names.record.unwrap(), intent];
                for name in beside.iter().chain([&shared.readers, &shared.writer]) {
                    assert_eq!(namespace.key_of(name), None, "{}", name.escape_ascii());
                }
            }
            assert_eq!(namespace.key_of(&namespace.generation()), None);
        }
        let namespace = Namespace::default();
        for other in ["redlock:{}", "redlock:a", "a:{b}", "redlock:{", "{a}"] {
            assert_eq!(namespace.key_of(other.as_bytes()), None, "{other}");
        }
        assert_eq!(Namespace::new("").unwrap().key_of(b""), None);
    }

    #[test]
    fn pattern_of_a_namespace_and_some_bytes_has_no_wildcards_of_theirs() {
        let pattern = |namespace: &str, bytes: &[u8]| {
            let namespace = Namespace::new(namespace).unwrap();
            String::from_utf8(namespace.pattern(bytes).to_vec()).unwrap()
        };
        assert_eq!(pattern("redlock", b""), "redlock:{**}");
        assert_eq!(pattern("a*b", b"c?[d]\\-^"), "a\\*b:{*c\\?\\[d]\\\\-^*}");
        assert_eq!(pattern("", b"3:job,"), "*3:job,*");
    }
}
