//! Paths and query strings, as parts of the key and of the fingerprint of a request. Each of two lines is a target.
//!
//! Another spelling of a target has its fingerprint and its path. Requests of one fingerprint have one path, and two
//! paths are one only if they are equal when they are decoded.

#![no_main]

use http::request::Parts;
use http::{Request, Uri};
use libfuzzer_sys::fuzz_target;
use percent_encoding::percent_decode_str;
use tower_redlock::fuzzing::{fingerprint_bytes, resource_paths};
use tower_redlock_fuzz::first_line;

fuzz_target!(|data: &[u8]| {
    let (one, rest) = first_line(data);
    let (other, choices) = first_line(rest);
    let (Some(one), Some(other)) = (parts(one), parts(other)) else {
        return;
    };
    if fingerprint_bytes(&one, b"") == fingerprint_bytes(&other, b"") {
        assert_eq!(resource_paths(&one), resource_paths(&other));
    }
    let is_same = decoded(&one) == decoded(&other);
    assert_eq!(is_same, resource_paths(&one) == resource_paths(&other));

    let target = one.uri.path_and_query().expect("it has a path").as_str();
    if let Some(spelled) = parts(respelled(target, choices).as_bytes()) {
        assert_eq!(
            fingerprint_bytes(&one, b"x"),
            fingerprint_bytes(&spelled, b"x")
        );
        assert_eq!(resource_paths(&one), resource_paths(&spelled));
    }
    // Unlike `*`, the target of some requests with the method OPTIONS.
    if target.starts_with('/') {
        let again = parts(resource_paths(&one).concat().as_bytes()).expect("a path remains one");
        assert_eq!(resource_paths(&again), resource_paths(&one));
    }
});

fn parts(target: &[u8]) -> Option<Parts> {
    let uri = Uri::try_from(target).ok()?;
    uri.path_and_query()?;
    let mut parts = Request::new(()).into_parts().0;
    parts.uri = uri;
    Some(parts)
}

fn decoded(parts: &Parts) -> Vec<u8> {
    percent_decode_str(parts.uri.path()).collect()
}

/// Encodes some of the characters that mean the same encoded, and writes the digits of encodings in the other case.
fn respelled(target: &str, choices: &[u8]) -> String {
    let mut choices = choices.iter().cycle();
    let mut spelled = String::new();
    let mut digits = 0;
    for (at, character) in target.char_indices() {
        let is_chosen = choices.next().is_some_and(|choice| choice & 1 == 1);
        let is_unreserved = character.is_ascii_alphanumeric() || "-._~".contains(character);
        if character == '%' {
            let behind = target.as_bytes().get(at + 1..at + 3);
            let is_encoding = behind.is_some_and(|two| two.iter().all(u8::is_ascii_hexdigit));
            digits = if is_encoding { 2 } else { 0 };
            spelled.push(character);
        } else if digits > 0 {
            digits -= 1;
            spelled.push(match character {
                lower if lower.is_ascii_lowercase() && is_chosen => lower.to_ascii_uppercase(),
                upper if is_chosen => upper.to_ascii_lowercase(),
                same => same,
            });
        } else if is_unreserved && is_chosen && !follows_percent(target, at) {
            spelled.push_str(&format!("%{:02x}", u32::from(character)));
        } else {
            spelled.push(character);
        }
    }
    spelled
}

/// Returns whether a character stands behind a percent sign that begins no encoding, and would become a part of one.
fn follows_percent(target: &str, at: usize) -> bool {
    target.as_bytes()[at.saturating_sub(2)..at].contains(&b'%')
}
