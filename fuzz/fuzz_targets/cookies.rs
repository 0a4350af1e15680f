//! Keys from cookies. Each line is a header.
//!
//! The key is the value that a `CookieJar` has for the cookie, so that no session has two keys, and no session is
//! without one. A request that is refused may have any cookies.

#![no_main]

use cookie::{Cookie, CookieJar};
use http::HeaderValue;
use libfuzzer_sys::fuzz_target;
use tower_redlock::{KeyExtractor, LockKey, key};
use tower_redlock_fuzz::{header_values, request};

fuzz_target!(|data: &[u8]| {
    let headers = header_values(data);
    let Ok(keys) = key::cookie("sid").extract(&request("cookie", &headers)) else {
        return;
    };
    let ours = keys.map(|keys| keys.as_slice()[0].clone());
    // axum-extra reads ASCII only, and tower-cookies all of UTF-8.
    let ascii = session(&headers, |header| header.to_str().ok());
    let utf8 = session(&headers, |header| {
        std::str::from_utf8(header.as_bytes()).ok()
    });
    for theirs in [ascii, utf8].into_iter().flatten() {
        assert_eq!(ours, Some(LockKey::from(theirs)), "{headers:?}");
    }
});

/// Returns the value of the cookie in a jar, if it has one.
fn session(headers: &[HeaderValue], read: impl Fn(&HeaderValue) -> Option<&str>) -> Option<String> {
    let mut jar = CookieJar::new();
    for pair in headers
        .iter()
        .filter_map(read)
        .flat_map(|header| header.split(';'))
    {
        if let Ok(cookie) = Cookie::parse_encoded(pair.to_owned()) {
            jar.add_original(cookie);
        }
    }
    let value = jar.get("sid")?.value_trimmed().to_owned();
    (!value.is_empty()).then_some(value)
}
