//! Heads of requests and responses: the headers that could be taken for the token header, and the declared length.
//!
//! After the clearing, no header has the name of the token header in any spelling and no connection option names it.
//! All other headers are as before. A declared length is the number that its digits are.

#![no_main]

use http::HeaderName;
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderMap};
use libfuzzer_sys::fuzz_target;
use tower_redlock::fuzzing::{clear_token_header, declared_length};
use tower_redlock_fuzz::header_map;

const NAME: HeaderName = HeaderName::from_static("x-lock-token");

fuzz_target!(|data: &[u8]| {
    let (headers, _) = header_map(data);
    let mut cleared = headers.clone();
    clear_token_header(&mut cleared, &NAME);
    assert!(!cleared.keys().any(|name| is_ours(name.as_str().as_bytes())));
    for list in ["connection", "proxy-connection"] {
        let expected = other_options(&headers, list);
        assert_eq!(other_options(&cleared, list), expected);
        assert_eq!(options(&cleared, list).count(), expected.len());
    }
    for (name, value) in &headers {
        let is_list = *name == CONNECTION || *name == "proxy-connection";
        if !is_list && !is_ours(name.as_str().as_bytes()) {
            let values: Vec<_> = cleared.get_all(name).iter().collect();
            assert!(values.contains(&value), "{name}");
            assert_eq!(values.len(), headers.get_all(name).iter().count());
        }
    }
    let length = headers.get(CONTENT_LENGTH).map(|value| value.as_bytes());
    if let Some(length) = declared_length(&headers) {
        let digits = headers[CONTENT_LENGTH].as_bytes();
        assert!(
            digits.iter().all(u8::is_ascii_digit),
            "{}",
            digits.escape_ascii()
        );
        assert!(length.to_string().as_bytes() == digits || digits.starts_with(b"0"));
    } else if let Some(digits) = length {
        assert!(!(1..=19).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_digit));
    }
});

/// Returns whether a name is that of the token header, as CGI reads it.
fn is_ours(name: &[u8]) -> bool {
    let name: Vec<u8> = name
        .iter()
        .map(|byte| if *byte == b'_' { b'-' } else { *byte })
        .collect();
    name.eq_ignore_ascii_case(NAME.as_str().as_bytes())
}

fn options<'a>(headers: &'a HeaderMap, list: &'static str) -> impl Iterator<Item = Vec<u8>> + 'a {
    let values = headers.get_all(list).iter();
    let options = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    options
        .map(|option| option.trim_ascii().to_ascii_lowercase())
        .filter(|option| !option.is_empty())
}

fn other_options(headers: &HeaderMap, list: &'static str) -> Vec<Vec<u8>> {
    options(headers, list)
        .filter(|option| !is_ours(option))
        .collect()
}
