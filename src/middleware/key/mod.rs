//! Lock keys from requests: the extractor trait, its combinators, and the keys that need only `http`.

mod combinators;
mod extension;
mod extractor;
mod form;
mod header;
mod literal;

pub use extension::{Extension, extension};
pub use extractor::{
    Each, Hashed, IntoKeys, KeyExtractor, Map, Or, RequestPart, When, each, from_fn,
};
pub(crate) use extractor::{named, present};
#[cfg(feature = "json")]
pub use form::json_pointer;
pub use form::{form_field, query};
#[cfg(feature = "idempotency")]
pub(crate) use header::header_key;
#[cfg(all(test, feature = "idempotency"))]
pub(crate) use header::tests::parts_with;
pub use header::{cookie, header, host};
pub use literal::{Literal, literal, method};
