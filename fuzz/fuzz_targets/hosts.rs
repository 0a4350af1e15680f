//! Keys from the host of a request. The first line is the target, and each further one a header.
//!
//! The key is a name in lower case, without a port and user information. It depends neither on the case nor on a
//! final dot, and two hosts give no key.

#![no_main]

use http::{HeaderValue, Uri};
use libfuzzer_sys::fuzz_target;
use tower_redlock::{KeyError, KeyExtractor, LockKeys, key};
use tower_redlock_fuzz::{first_line, header_values, request};

type Extracted = Result<Option<LockKeys>, KeyError>;

fuzz_target!(|data: &[u8]| {
    let (target, headers) = first_line(data);
    let Ok(target) = Uri::try_from(target) else {
        return;
    };
    let headers = if headers.is_empty() {
        Vec::new()
    } else {
        header_values(headers)
    };
    let extracted = extract(&target, &headers);
    assert!(headers.len() < 2 || extracted.is_err());
    let Ok(Some(keys)) = &extracted else {
        return;
    };
    let host = std::str::from_utf8(keys.as_slice()[0].as_bytes()).expect("a host is text");
    assert!(!host.is_empty() && !host.ends_with('.'), "{host}");
    assert!(!host.contains(['@', ',', '/', ' ']), "{host}");
    assert_eq!(host, host.to_ascii_lowercase());
    let port = host.rsplit_once(':').filter(|_| !host.ends_with(']'));
    assert_eq!(port, None, "{host}");

    let shouted: Vec<HeaderValue> = headers
        .iter()
        .filter_map(|value| HeaderValue::from_bytes(&value.as_bytes().to_ascii_uppercase()).ok())
        .collect();
    assert_eq!(extract(&target, &shouted), extracted);
    for spelled in [
        host.to_owned(),
        format!("{host}:80"),
        format!("{host}.:8080"),
    ] {
        let Ok(value) = HeaderValue::try_from(&spelled) else {
            continue;
        };
        // The name behind brackets has no final dot.
        if !(host.ends_with(']') && spelled.contains("].")) {
            assert_eq!(
                extract(&Uri::from_static("/"), &[value]),
                extracted,
                "{spelled}"
            );
        }
    }
});

fn extract(target: &Uri, headers: &[HeaderValue]) -> Extracted {
    let mut parts = request("host", headers);
    parts.uri = target.clone();
    key::host().extract(&parts)
}
