//! Fencing tokens, fingerprints and generations, as texts of clients and servers.
//!
//! A text that is read is, apart from leading zeros, a plus sign and the case of digits, the one that is written for
//! its value, and a token is never larger than the largest one.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tower_redlock::FencingToken;
use tower_redlock::protocol::admission::Generation;
use tower_redlock::protocol::holder::MAX_LEN;
use tower_redlock::protocol::{OwnerToken, Shown};

fuzz_target!(|data: &[u8]| {
    if let Some(shown) = Shown::parse(data) {
        let owner = OwnerToken::showing([1; 16], Some(shown.clone()));
        let written = owner.to_value().split_off(32);
        assert_eq!(Shown::parse(written.as_bytes()), Some(shown));
        assert!(written.len() <= 32 + 1 + 11 + 1 + 2 * MAX_LEN + 1);
    }
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(token) = text.parse::<FencingToken>() {
        assert!(token <= FencingToken::MAX);
        let digits = text.trim_start_matches('+').trim_start_matches('0');
        let digits = if digits.is_empty() { "0" } else { digits };
        assert_eq!(token.to_string(), digits);
        assert_eq!(token.to_string().parse(), Ok(token));
    }
    if let Some(generation) = Generation::parse(text) {
        assert_eq!(generation.as_str(), text);
        let begin = generation.age(Duration::MAX);
        assert!(begin <= Duration::MAX && generation.age(Duration::ZERO).is_zero());
        let run_id = text.rsplit(':').next().unwrap_or_default();
        assert!(generation.is_of_process(run_id));
    }
});
