//! Exposes the record of a response to fuzz targets.

use bytes::Bytes;
use http::HeaderMap;
use http::response::Parts;

use crate::idempotency::codec::Codec;
use crate::idempotency::stored;
use crate::middleware::WholeBody;
use crate::protocol::{ExecutionId, Fingerprint, LockKey, Record};

/// Creates the record of a response, with its cookies.
#[must_use]
pub fn record(
    resource: &LockKey,
    ids: (ExecutionId, Fingerprint),
    head: &Parts,
    (body, trailers): (&[u8], Option<&HeaderMap>),
    codec: &Codec,
) -> Record {
    let body = WholeBody::whole(Bytes::copy_from_slice(body), trailers.cloned());
    stored::record(resource, ids, None, Some((head, &body)), codec)
}
