//! The Redis names of two keys. The first line is the namespace, and the keys follow, separated by NUL.
//!
//! Two keys share no name, and neither has that of the generation, unless one key is the digest of the other. All names
//! of a key are in one slot of a Redis Cluster, unless the key begins with a closing brace.

#![no_main]

use std::sync::Arc;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tower_redlock::LockKey;
use tower_redlock::protocol::{MAX_CLEAR_KEY, Namespace};
use tower_redlock_fuzz::{expanded, first_line, sha256};

fuzz_target!(|data: &[u8]| {
    let (namespace, keys) = first_line(data);
    let prefix = String::from_utf8_lossy(namespace);
    let Some(namespace) = Namespace::new(&prefix) else {
        assert!(prefix.contains(['{', '}']));
        return;
    };
    let mut keys = keys.splitn(2, |byte| *byte == 0);
    let [one, other] = [(); 2].map(|()| {
        let mut key = expanded(keys.next().unwrap_or_default());
        key.truncate(2 * MAX_CLEAR_KEY);
        key
    });
    let (Some(names), Some(others)) = (names(&namespace, &one), names(&namespace, &other)) else {
        return;
    };
    for (at, name) in names.iter().enumerate() {
        assert!(!names[..at].contains(name), "{name:?} comes twice");
        assert_ne!(*name, namespace.generation());
    }
    if one != other && !is_digest(&one, &other) && !is_digest(&other, &one) {
        let shared = names.iter().find(|name| others.contains(name));
        assert_eq!(shared, None);
    }
    // In the empty namespace, the lock has the name that another client would use, whatever its braces mean there.
    let has_tag = match &*prefix {
        "" => !one.iter().any(|byte| b"{}".contains(byte)),
        _ => !one.starts_with(b"}"),
    };
    if has_tag {
        for name in &names {
            assert_eq!(hash_tag(name), hash_tag(&names[0]));
        }
    }
});

/// Returns the names of the lock, fence, record, intent, readers and waiting writer; nothing if the namespace refuses the
/// key.
fn names(namespace: &Namespace, key: &[u8]) -> Option<[Arc<[u8]>; 6]> {
    let key = LockKey::from(key);
    let retention = Some(Duration::from_secs(1));
    let names = namespace.names_with_record(&key, retention, sha256);
    let alone = namespace.names(&key.into(), sha256);
    assert_eq!(names.is_ok(), alone.is_ok());
    let (names, alone) = (names.ok()?, alone.ok()?.first().cloned()?);
    assert_eq!((&names.lock, names.fence()), (&alone.lock, alone.fence()));
    let names = namespace.with_shared(names);
    let (fence, shared) = (names.fence(), names.shared?);
    Some([
        names.lock,
        fence,
        names.record?,
        names.intent?.name,
        shared.readers,
        shared.writer,
    ])
}

fn is_digest(short: &[u8], long: &[u8]) -> bool {
    let digits: String = sha256(long)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    long.len() > MAX_CLEAR_KEY && short == digits.as_bytes()
}

/// Returns the part of a name that a Redis Cluster hashes.
fn hash_tag(name: &[u8]) -> &[u8] {
    let Some(open) = name.iter().position(|byte| *byte == b'{') else {
        return name;
    };
    let behind = &name[open + 1..];
    match behind.iter().position(|byte| *byte == b'}') {
        None | Some(0) => name,
        Some(close) => &behind[..close],
    }
}
