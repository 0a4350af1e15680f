//! `Idempotency-Key` headers, bare or as structured-field strings, and keys from other headers. Each line is a header.
//!
//! A quoted `Idempotency-Key` is read if and only if it is a structured-field string without parameters, as another
//! implementation reads it. A bare value is its own key. A key and its quoted form are one key, and several headers are none.
//! Any other header is taken byte for byte.

#![no_main]

use http::{HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;
use sfv::{BareItem, Item, Parser};
use tower_redlock::fuzzing::idempotency_key;
use tower_redlock::{KeyError, KeyExtractor, LockKey, key};
use tower_redlock_fuzz::{header_values, request};

const NAME: HeaderName = HeaderName::from_static("idempotency-key");

fuzz_target!(|data: &[u8]| {
    let values = header_values(data);
    let ours = read(&values);
    let bare = key::header(NAME).extract(&request("idempotency-key", &values));
    let value = match values.as_slice() {
        [] => {
            assert_eq!(ours, Ok(None));
            return;
        }
        [value] => value,
        _ => {
            assert!(ours.is_err() && bare.is_err());
            return;
        }
    };
    let text = std::str::from_utf8(value.as_bytes()).ok();
    match text {
        None => assert!(bare.is_err()),
        Some("") => assert_eq!(bare, Ok(None)),
        Some(text) => assert_eq!(bare, Ok(Some(LockKey::from(text).into()))),
    }
    let expected = match text {
        Some(text) if text.starts_with('"') => string(text),
        _ => text.map(str::to_owned),
    };
    let is_bare = !value.as_bytes().starts_with(b"\"");
    let expected = expected.filter(|key| {
        (1..=255).contains(&key.len())
            && key.bytes().all(|byte| byte.is_ascii_graphic())
            && !(is_bare && key.contains(','))
    });
    assert_eq!(ours.clone().ok().flatten(), expected, "{value:?}");
    if let Some(key) = expected {
        let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
        let quoted = HeaderValue::try_from(quoted).expect("it is visible ASCII");
        assert_eq!(read(&[quoted]), ours);
    }
});

fn read(values: &[HeaderValue]) -> Result<Option<String>, KeyError> {
    let key = idempotency_key(&request("idempotency-key", values), &NAME)?;
    Ok(key.map(|key| key.to_string()))
}

/// Reads a structured-field string without parameters.
fn string(text: &str) -> Option<String> {
    let item: Item = Parser::new(text).parse().ok()?;
    match item.bare_item {
        BareItem::String(string) if item.params.is_empty() => Some(string.as_str().to_owned()),
        _ => None,
    }
}
