//! Exposes the encoder of results to fuzz targets.

use serde_json::Value;

use crate::once::run;
use crate::protocol::{Fingerprint, Record};

/// Makes the record of a result.
#[must_use]
pub fn encode_result(value: &Value, fingerprint: Fingerprint, max: usize) -> Record {
    run::encode(value, fingerprint, max)
}

/// Reads the result from a whole record.
#[must_use]
pub fn decode_result(record: &Record) -> Option<Value> {
    run::decode(record)
}
