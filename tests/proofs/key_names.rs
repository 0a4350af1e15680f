//! The encoding of keys, and the names of locks and fences.

use proptest::collection::vec;
use proptest::prelude::*;
use tower_redlock::protocol::{KeyError, KeyNames, LockKey, LockKeys, Namespace};

use crate::round_cases::cases;

/// Bytes that the encodings themselves are made of, so that wrong ones collide soon.
fn tricky_bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        4 => proptest::sample::select(b"012:,{}a".to_vec()),
        1 => any::<u8>(),
    ];
    let pieces: [&[u8]; 7] = [
        b":fence",
        b"}",
        b"{",
        b"redlock:fence:",
        b"1:a,",
        b"}:fence",
        b"ns:{",
    ];
    let piece = prop_oneof![
        byte.prop_map(|byte| vec![byte]),
        proptest::sample::select(pieces.map(<[u8]>::to_vec).to_vec()),
    ];
    vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

/// Two keys, often such that one looks like a name of the other.
fn tricky_pair() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    (tricky_bytes(), tricky_bytes(), 0..6).prop_map(|(one, other, relation)| {
        let (before, after): (&[u8], &[u8]) = match relation {
            0 => (b"", b":fence"),
            1 => (b"", b"}:fence"),
            2 => (b"redlock:fence:{", b"}"),
            3 => (b"{", b"}"),
            4 => (b"", b""),
            _ => return (one, other),
        };
        let related = [before, &one, after].concat();
        (one, related)
    })
}

/// Not SHA-256, but different for different keys of one length and first bytes.
fn digest(key: &[u8]) -> [u8; 32] {
    let mut digest = [0xff; 32];
    digest[0] = u8::try_from(key.len() % 256).expect("is less");
    for (into, byte) in digest[1..].iter_mut().zip(key) {
        *into = *byte;
    }
    digest
}

fn names(namespace: &str, key: &[u8]) -> Result<KeyNames, KeyError> {
    let namespace = Namespace::new(namespace).expect("no braces");
    let names = namespace.names(&LockKeys::from(LockKey::from(key)), digest)?;
    Ok(names[0].clone())
}

/// The same namespace twice, or two.
fn namespaces() -> impl Strategy<Value = [String; 2]> {
    let same = proptest::sample::select(vec!["", "redlock", "ns", ":", "redlock:fence:"]);
    prop_oneof![
        same.prop_map(|name| [name; 2].map(String::from)),
        ["[a-z:]{1,8}", "[a-z:]{1,8}"],
    ]
}

proptest! {
    #![proptest_config(cases(1_000))]

    #[test]
    fn names_of_locks_and_fences_are_equal_only_if_namespace_and_key_are(
        spaces in namespaces(),
        (one, other) in tricky_pair(),
    ) {
        let (Ok(a), Ok(b)) = (names(&spaces[0], &one), names(&spaces[1], &other)) else {
            return Ok(());
        };
        let same = spaces[0] == spaces[1] && one == other;
        prop_assert_eq!([a.lock == b.lock, a.fence() == b.fence()], [same; 2]);
        prop_assert_ne!(&a.lock, &a.fence());
        prop_assert_ne!(&a.lock, &b.fence());
        prop_assert_ne!(&b.lock, &a.fence());
    }
}
