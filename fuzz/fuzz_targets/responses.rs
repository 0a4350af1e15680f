//! Responses as they are recorded. The first line chooses the codec and a byte, and the status, the headers, the
//! trailers and the body follow.
//!
//! The response that is replayed is the one that was recorded, without the headers of its connection and without
//! cookies. An encrypted record is not read after any change of one byte, nor for another request.

#![no_main]

use http::header::{CONNECTION, HeaderMap, HeaderName};
use http::{Response, StatusCode};
use libfuzzer_sys::fuzz_target;
use tower_redlock::LockKey;
use tower_redlock::fuzzing::{self, ResponseCodec};
use tower_redlock::idempotency::RecordKeys;
use tower_redlock::protocol::{ExecutionId, Fingerprint, Record};
use tower_redlock_fuzz::{expanded, first_line, header_map, read_body, sha256};

/// Most bytes of fields that are kept, with four for each field.
const MAX_FIELDS: usize = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let (line, rest) = first_line(data);
    let (status, rest) = first_line(rest);
    let (headers, rest) = header_map(rest);
    let (trailers, body) = header_map(rest);
    let body = expanded(body);
    let Ok(status) = StatusCode::from_bytes(status) else {
        return;
    };
    let (choice, place) = line.split_first().unwrap_or((&0, b""));
    let is_encrypted = choice & 1 == 1;
    let keys = is_encrypted.then(|| RecordKeys::new(1, &[1; 32]));
    let compress_above = (choice & 2 == 2).then_some(16);
    let codec = ResponseCodec {
        compress_above,
        keys,
    };
    let replay = |record: &Record, key: &LockKey| fuzzing::replay::<String>(record, key, &codec);
    let trailers = (choice & 4 == 4).then_some(trailers);

    let mut response = Response::new(());
    *response.status_mut() = status;
    *response.headers_mut() = headers.clone();
    let (head, ()) = response.into_parts();
    let resource = LockKey::from("key");
    let execution = ExecutionId::from_random([1; 16]);
    let ids = (execution, Fingerprint::from_digest([2; 32]));
    let record = fuzzing::record(&resource, ids, &head, (&body, trailers.as_ref()), &codec);

    let replayed = replay(&record, &resource).expect("it was recorded so");
    let expected = kept(headers);
    let fields = size(&expected) + 1 + trailers.as_ref().map_or(0, size);
    assert_eq!(replayed.is_some(), fields <= MAX_FIELDS, "{fields}");
    if let Some(replayed) = replayed {
        assert_eq!(replayed.status(), status);
        assert_eq!(*replayed.headers(), expected);
        assert_eq!(read_body(replayed), (body, trailers));
    }
    if is_encrypted {
        assert!(replay(&record, &LockKey::from("other")).is_err());
        let mut changed = record.as_bytes().to_vec();
        let place = place.iter().fold(1_usize, |sum, byte| {
            sum.wrapping_mul(251).wrapping_add(usize::from(*byte))
        });
        let at = place % changed.len();
        changed[at] ^= (place / changed.len() % 255) as u8 + 1;
        let Some(changed) = Record::from_bytes(changed.into()) else {
            return;
        };
        // A record is compared with its digest before.
        if sha256(changed.rest()) == changed.digest() {
            assert!(replay(&changed, &resource).is_err(), "byte {at}");
        }
    }
});

/// Removes the headers that belong to a connection, the date, and cookies.
fn kept(mut headers: HeaderMap) -> HeaderMap {
    let options: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    for option in options {
        headers.remove(option);
    }
    for name in [
        "connection",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ] {
        headers.remove(name);
    }
    headers
}

/// Returns the bytes of fields in a record: their number, and each with a flag and two lengths.
fn size(fields: &HeaderMap) -> usize {
    let sizes = fields
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 5);
    2 + sizes.sum::<usize>()
}
