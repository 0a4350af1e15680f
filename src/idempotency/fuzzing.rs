//! Exposes the codec of the idempotency layer to fuzz targets.

use bytes::Bytes;
use http::{HeaderMap, Response, response};
use http_body_util::Full;

use crate::idempotency::RecordKeys;
use crate::idempotency::codec::Codec;
use crate::idempotency::stored;
use crate::middleware::{LockBody, WholeBody};
use crate::protocol::{ExecutionId, Fingerprint, LockKey, Record};

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
