//! Exposes private functions to the fuzz targets, with `--cfg fuzzing`, which cargo-fuzz sets. They may change in any
//! release.

#[cfg(all(
    feature = "idempotency",
    feature = "compression",
    feature = "encryption"
))]
pub use crate::idempotency::{
    codec::Codec as ResponseCodec,
    fingerprint::{of_request as fingerprint_bytes, resource_paths},
    fuzzing::record,
    header::read_key as idempotency_key,
    stored::replay,
};
pub use crate::lock::config::config_from_vars;
pub use crate::middleware::{body::declared_length, token_header::clear as clear_token_header};
#[cfg(feature = "redis")]
pub use crate::node::redis::{
    decode::decode,
    fuzzing::{deal, encode},
    guard::Guard as AdmissionGuard,
    link::Link as ReplyStream,
    listener::read_release,
};
pub use crate::once::run::decode as decode_result;
