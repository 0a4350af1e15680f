//! Exposes private functions to the fuzz targets, with `--cfg fuzzing`, which cargo-fuzz sets. They may change in any
//! release.

#[cfg(all(
    feature = "idempotency",
    feature = "compression",
    feature = "encryption"
))]
pub use crate::idempotency::{
    fingerprint::{of_request as fingerprint_bytes, resource_paths},
    fuzzing::ResponseCodec,
    header::read_key as idempotency_key,
};
pub use crate::lock::fuzzing::config_from_vars;
pub use crate::middleware::{body::declared_length, token_header::clear as clear_token_header};
#[cfg(feature = "redis")]
pub use crate::node::redis::fuzzing::{
    AdmissionGuard, ReplyStream, deal, decode, encode, read_release,
};
pub use crate::once::fuzzing::{decode_result, encode_result};
