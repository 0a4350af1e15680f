//! Lock keys from requests: the extractor trait, its combinators, and the keys that need only `http`.

mod body;
mod combinators;
mod cookie;
mod each;
mod extension;
mod extractor;
mod header;
mod host;
mod literal;
mod method;
mod query;

pub use body::{FormField, form_field};
#[cfg(feature = "json")]
pub use body::{JsonPointer, json_pointer};
pub use cookie::{Cookie, cookie};
pub use each::{Each, each};
pub use extension::{Extension, extension};
pub(crate) use extractor::present;
pub use extractor::{Hashed, IntoKeys, KeyExtractor, Map, Or, When, from_fn};
#[cfg(all(test, feature = "idempotency"))]
pub(crate) use header::tests::parts_with;
pub use header::{Header, header};
pub use host::{Host, host};
pub use literal::{Literal, literal};
pub use method::{Method, method};
pub use query::{Query, query};
