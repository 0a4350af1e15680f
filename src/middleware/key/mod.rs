//! Lock keys from requests: the extractor trait, its combinators, and the keys that need only `http`.

mod extractor;
mod form;
mod header;
#[cfg(test)]
mod tests;

pub(crate) use extractor::{Described, named, present};
pub use extractor::{KeyExtractor, each, from_fn, literal};
pub(crate) use form::RESERVED;
#[cfg(feature = "json")]
pub use form::json_pointer;
pub use form::{form_field, query};
pub(crate) use header::header_text;
#[cfg(all(test, feature = "idempotency"))]
pub(crate) use header::tests::parts_with;
pub use header::{cookie, extension, header, host, method};
