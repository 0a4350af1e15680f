//! Records of clients that can write to the nodes but have no key. The first byte chooses the form.
//!
//! No record makes the reading panic or take much more memory than the largest response. With encryption, no record
//! is read that was not written with the key.

#![no_main]

use std::cell::LazyCell;

use libfuzzer_sys::fuzz_target;
use lz4_flex::compress_prepend_size;
use serde_json::Value;
use tower_redlock::LockKey;
use tower_redlock::fuzzing::{ResponseCodec, decode_result, replay};
use tower_redlock::idempotency::RecordKeys;
use tower_redlock::protocol::{ExecutionId, Fingerprint, Record};
use tower_redlock_fuzz::{expanded, growth, read_body, sha256};

const COMPRESSED: u8 = 1;
const LARGEST: usize = 4 << 20;

fuzz_target!(|data: &[u8]| {
    let Some((form, bytes)) = data.split_first() else {
        return;
    };
    let bytes = expanded(bytes);
    let record = match form % 4 {
        0 => match Record::from_bytes(bytes.as_slice().into()) {
            Some(record) => record,
            None => return,
        },
        // With the right digest.
        1 => with_rest(&bytes),
        2 => with_rest(&[&[0], bytes.as_slice()].concat()),
        _ => with_rest(&[&[COMPRESSED][..], &compress_prepend_size(&bytes)].concat()),
    };
    let resource = LockKey::from("key");
    let keys = LazyCell::new(|| RecordKeys::new(1, &[1; 32]));
    let codec = |compress_above, keys| ResponseCodec {
        compress_above,
        keys,
    };
    let codecs = [
        codec(None, None),
        codec(Some(8), Some(keys.clone().reading_plain())),
    ];
    for codec in codecs {
        let (replayed, grown) = growth(|| replay::<String>(&record, &resource, &codec));
        assert!(
            grown <= 4 * LARGEST + 2 * record.as_bytes().len(),
            "a record of {} bytes took {grown} bytes",
            record.as_bytes().len()
        );
        if let Ok(Some(response)) = replayed {
            let (body, _) = read_body(response);
            assert!(body.len() <= LARGEST.max(record.as_bytes().len()));
        }
    }
    let encrypting = codec(None, Some(keys.clone()));
    assert!(replay::<String>(&record, &resource, &encrypting).is_err());

    let (_, grown) = growth(|| decode_result::<Value>(&record));
    assert!(
        grown <= 128 * record.as_bytes().len() + 4096,
        "a result of {} bytes took {grown} bytes",
        record.as_bytes().len()
    );
});

fn with_rest(rest: &[u8]) -> Record {
    let execution = ExecutionId::from_random([1; 16]);
    Record::new(
        execution,
        Fingerprint::from_digest([2; 32]),
        sha256(rest),
        rest,
    )
}
