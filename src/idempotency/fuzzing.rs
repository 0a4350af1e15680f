//! Exposes the codec and the readers of the idempotency layer to fuzz targets.

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Response, response};
use http_body_util::Full;

use crate::idempotency::codec::Codec;
use crate::idempotency::header::read_key;
use crate::idempotency::stored;
use crate::idempotency::{RecordKeys, fingerprint};
use crate::middleware::LockBody;
use crate::middleware::WholeBody;
use crate::middleware::idempotency_key::IdempotencyKey;
use crate::protocol::{ExecutionId, Fingerprint, KeyError, LockKey, Record};

/// Writes and reads recorded responses.
#[derive(Debug)]
pub struct ResponseCodec(Codec);

impl ResponseCodec {
    /// Creates a codec.
    #[must_use]
    pub fn new(compress_above: Option<usize>, keys: Option<RecordKeys>) -> Self {
        Self(Codec {
            compress_above,
            keys,
        })
    }

    /// Creates the record of a response, with its cookies.
    #[must_use]
    pub fn record(
        &self,
        (resource, execution, fingerprint): (&LockKey, ExecutionId, Fingerprint),
        head: &response::Parts,
        body: &[u8],
        trailers: Option<&HeaderMap>,
    ) -> Record {
        let body = WholeBody::whole(Bytes::copy_from_slice(body), trailers.cloned());
        stored::record(
            resource,
            (execution, fingerprint),
            None,
            Some((head, &body)),
            &self.0,
        )
    }

    /// Reads a whole record; `None` if its response was not kept.
    ///
    /// # Errors
    ///
    /// The reason for which it cannot be read.
    pub fn replay(
        &self,
        record: &Record,
        resource: &LockKey,
    ) -> Result<Option<Response<LockBody<Full<Bytes>>>>, String> {
        stored::replay(record, resource, &self.0).map_err(str::to_owned)
    }
}

/// Reads the idempotency key of a request.
///
/// # Errors
///
/// The header is malformed.
pub fn idempotency_key(
    parts: &Parts,
    name: &HeaderName,
) -> Result<Option<IdempotencyKey>, KeyError> {
    read_key(parts, name)
}

/// Returns the bytes of the default fingerprint.
#[must_use]
pub fn fingerprint_bytes(parts: &Parts, body: &[u8]) -> Vec<u8> {
    fingerprint::of_request(parts, body)
}

/// Returns the paths as parts of the key, one after the other.
#[must_use]
pub fn resource_path(parts: &Parts) -> String {
    fingerprint::resource_paths(parts).concat()
}
