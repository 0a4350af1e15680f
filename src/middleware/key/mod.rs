//! Lock keys from requests: the extractor trait, its combinators, and the keys that need only `http`.

mod combinators;
mod extension;
mod extractor;
mod form;
mod header;
mod literal;

pub use extension::{Extension, extension};
pub(crate) use extractor::present;
pub use extractor::{Each, Hashed, IntoKeys, KeyExtractor, Map, Or, When, each, from_fn};
pub use form::{FormField, Query, form_field, query};
#[cfg(feature = "json")]
pub use form::{JsonPointer, json_pointer};
#[cfg(all(test, feature = "idempotency"))]
pub(crate) use header::tests::parts_with;
pub use header::{Cookie, Header, Host, cookie, header, host};
pub use literal::{Literal, Method, literal, method};
