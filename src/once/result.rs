//! The encoding of results in records.

use std::any::type_name;

use bytes::BufMut;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::node::{sha256, unguessable};
use crate::protocol::{ExecutionId, Fingerprint, Record};

/// First byte of a record's body, which is JSON then. The records of the HTTP layer begin with other bytes.
const JSON: u8 = b'J';
/// The body of a record without a result.
const NOT_KEPT: u8 = b'N';

/// Makes the record of a result. A result that is over `max` bytes of JSON, or cannot be encoded, is recorded as
/// not kept.
pub(super) fn encode<T: Serialize>(result: &T, fingerprint: Fingerprint, max: usize) -> Record {
    // No more of the result is encoded than is kept.
    let mut json = vec![JSON].limit(max).writer();
    let body = match serde_json::to_writer(&mut json, result) {
        Ok(()) => json.into_inner().into_inner(),
        Err(error) => {
            tracing::warn!(%error, max_result = max, "the result of an execution is not kept");
            vec![NOT_KEPT]
        }
    };
    let id = ExecutionId::from_random(unguessable());
    Record::new(id, fingerprint, sha256(&body), &body)
}

/// Reads the result from a whole record; `None` if it was not kept, or is not of this type.
pub(super) fn decode<T: DeserializeOwned>(record: &Record) -> Option<T> {
    let json = record.rest().strip_prefix(&[JSON])?;
    let result = serde_json::from_slice(json).inspect_err(|error| {
        // Without the error's message, which quotes the result.
        tracing::error!(
            expected = type_name::<T>(),
            column = error.column(),
            "a recorded result is not JSON of the expected type"
        );
    });
    result.ok()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use serde::Serializer;

    use super::*;

    fn fingerprint() -> Fingerprint {
        Fingerprint::from_digest([1; 32])
    }

    #[test]
    fn decode_returns_what_encode_was_given() {
        let record = encode(&vec![1, 2, 3], fingerprint(), 7);
        assert_eq!(decode(&record), Some(vec![1, 2, 3]));
        assert_eq!(decode::<String>(&record), None);
    }

    #[test]
    fn encode_keeps_no_result_over_the_limit() {
        let record = encode(&vec![1, 2, 3], fingerprint(), 6);
        assert_eq!(decode::<Vec<u8>>(&record), None);
    }

    #[test]
    fn encode_stops_at_the_limit() {
        struct Endless(Cell<usize>);
        impl Serialize for Endless {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let elements = (0..1_000).inspect(|element| self.0.set(*element));
                serializer.collect_seq(elements)
            }
        }
        let endless = Endless(Cell::new(0));
        let record = encode(&endless, fingerprint(), 10);
        assert_eq!(decode::<Vec<u8>>(&record), None);
        // `[0,1,2,3,4` is 10 bytes long.
        assert_eq!(endless.0.get(), 5);
    }
}
