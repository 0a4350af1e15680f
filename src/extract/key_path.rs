//! Lock keys as paths of a URL: `account/7` is the key of the tuple `("account", 7)`.

use std::mem;

use http::Uri;
use percent_encoding::{percent_decode_str, percent_encode};

use crate::middleware::key::RESERVED;
use crate::protocol::{LockKey, split_part};

/// Returns the key that a request names behind `/locks/`. A captured path is decoded, and a slash within a part would be one
/// between two.
pub(super) fn key_of_uri(uri: &Uri) -> LockKey {
    let path = uri.path().split_once("/locks/");
    key_of_path(path.map_or("", |(_, path)| path))
}

/// Returns the key that a path names: one segment is a plain key, several are the parts of a tuple.
fn key_of_path(path: &str) -> LockKey {
    match &mut *parts_of_path(path) {
        [plain] => LockKey::from(mem::take(plain)),
        parts => LockKey::from_parts(parts),
    }
}

/// Returns the prefix of keys that the beginning of a path names. Before a slash at its end, the last part is whole.
pub(super) fn prefix_of_path(path: &str) -> LockKey {
    match path.strip_suffix('/') {
        Some(parts) => LockKey::from_parts(parts_of_path(parts)),
        None => key_of_path(path),
    }
}

fn parts_of_path(path: &str) -> Vec<Vec<u8>> {
    let segments = path.split('/');
    segments
        .map(|segment| percent_decode_str(segment).collect())
        .collect()
}

/// Returns the path that names a key, percent-encoded.
pub(super) fn path_of_key(key: &LockKey) -> String {
    let encode = |part| percent_encode(part, RESERVED).to_string();
    let (mut parts, mut rest) = (Vec::new(), key.as_bytes());
    while let Some((part, others)) = split_part(rest) {
        parts.push(part);
        rest = others;
    }
    // Clients and proxies remove such segments. A plain key may look like a tuple that has another encoding.
    let is_kept = !parts.iter().any(|part| matches!(*part, b"" | b"." | b".."));
    if parts.len() > 1 && is_kept && LockKey::from_parts(&parts) == *key {
        return parts.into_iter().map(encode).collect::<Vec<_>>().join("/");
    }
    encode(key.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_the_key_that_it_was_made_from() {
        for (key, path) in [
            (LockKey::from("report"), "report"),
            (("account", 7).into(), "account/7"),
            (("a/b", "%2F", "ü").into(), "a%2Fb/%252F/%C3%BC"),
            (("a", ("b", "c")).into(), "a/1%3Ab%2C1%3Ac%2C"),
            // One segment cannot be told from a plain key.
            (("account",).into(), "7%3Aaccount%2C"),
            // Clients would remove such segments.
            (("a", "..").into(), "1%3Aa%2C2%3A..%2C"),
            (("a", "").into(), "1%3Aa%2C0%3A%2C"),
            (b"\xff\x00".into(), "%FF%00"),
            // Not quite the key of a tuple.
            (LockKey::from("1:a,99:b,"), "1%3Aa%2C99%3Ab%2C"),
            (LockKey::from("1:a,+1:b,"), "1%3Aa%2C%2B1%3Ab%2C"),
            (LockKey::from("1:a,01:b,"), "1%3Aa%2C01%3Ab%2C"),
            (LockKey::from("1:a,1:b"), "1%3Aa%2C1%3Ab"),
        ] {
            assert_eq!(path_of_key(&key), path);
            assert_eq!(key_of_path(path), key, "{path}");
        }
    }

    #[test]
    fn a_slash_at_the_end_makes_the_parts_of_a_prefix_whole() {
        for (path, prefix) in [
            ("", LockKey::from("")),
            ("jo", "jo".into()),
            ("job/", ("job",).into()),
            ("job/eu", ("job", "eu").into()),
            ("a%2Fb/c/", ("a/b", "c").into()),
        ] {
            assert_eq!(prefix_of_path(path), prefix, "{path}");
        }
    }
}
