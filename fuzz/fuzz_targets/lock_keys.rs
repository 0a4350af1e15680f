//! Composite keys of two lists of parts, each part with its length in front.
//!
//! The parts of a key can be read back from its bytes, so two different lists never give one key. A tuple gives the
//! key of its parts. The keys of one lock are sorted, and each of them is there once.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_redlock::{LockKey, LockKeys};
use tower_redlock_fuzz::parts_of;

fuzz_target!(|data: &[u8]| {
    let parts = parts_of(data);
    let (one, other) = parts.split_at(parts.len() / 2);
    let keys = [one, other, &parts].map(LockKey::from_parts);
    for (key, parts) in keys.iter().zip([one, other, &parts]) {
        assert_eq!(decoded(key.as_bytes()).as_deref(), Some(parts));
        let tuple = match *parts {
            [a] => LockKey::from((a,)),
            [a, b] => LockKey::from((a, b)),
            [a, b, c] => LockKey::from((a, b, c)),
            [a, b, c, d] => LockKey::from((a, b, c, d)),
            [a, b, c, d, e] => LockKey::from((a, b, c, d, e)),
            [a, b, c, d, e, f] => LockKey::from((a, b, c, d, e, f)),
            [a, b, c, d, e, f, g] => LockKey::from((a, b, c, d, e, f, g)),
            [a, b, c, d, e, f, g, h] => LockKey::from((a, b, c, d, e, f, g, h)),
            _ => continue,
        };
        assert_eq!(tuple, *key);
    }
    assert_eq!(keys[0] == keys[1], one == other);
    // A tuple within a tuple is one part.
    let nested = LockKey::from((keys[0].clone(), keys[1].clone()));
    let [first, second] = [keys[0].as_bytes(), keys[1].as_bytes()];
    assert_eq!(decoded(nested.as_bytes()), Some(vec![first, second]));

    let plain: Vec<LockKey> = parts.iter().map(|part| LockKey::from(*part)).collect();
    let set: LockKeys = plain.iter().collect();
    assert!(set.as_slice().is_sorted_by(|one, next| one < next));
    assert!(plain.iter().all(|key| set.as_slice().contains(key)));
});

/// Reads netstrings.
fn decoded(mut bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let colon = bytes.iter().position(|byte| *byte == b':')?;
        let digits = std::str::from_utf8(&bytes[..colon]).ok()?;
        let length: usize = digits.parse().ok()?;
        if length.to_string() != digits {
            return None;
        }
        let (part, rest) = bytes[colon + 1..].split_at_checked(length)?;
        bytes = rest.strip_prefix(b",")?;
        parts.push(part);
    }
    Some(parts)
}
