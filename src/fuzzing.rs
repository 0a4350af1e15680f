//! Exposes private functions to the fuzz targets, with `--cfg fuzzing`, which cargo-fuzz sets. They may change in any
//! release.

#[cfg(all(
    feature = "idempotency",
    feature = "compression",
    feature = "encryption"
))]
pub use crate::idempotency::fuzzing::{
    ResponseCodec, fingerprint_bytes, idempotency_key, resource_path,
};
pub use crate::lock::fuzzing::config_from_vars;
pub use crate::middleware::fuzzing::{clear_token_header, declared_length};
#[cfg(feature = "redis")]
pub use crate::node::redis::fuzzing::{
    AdmissionGuard, ReplyStream, RequestCheck, deal, decode, node_name, read_release,
};
pub use crate::once::fuzzing::{decode_result, encode_result};
