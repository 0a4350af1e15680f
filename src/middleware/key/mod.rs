//! Lock keys from requests: the trait, what implements it, and the keys that need only `http`.

mod extension;
mod extractor;
mod header;
mod query;

pub use extension::{Extension, extension};
pub use extractor::{IntoKeys, KeyExtractor, from_fn};
pub use header::{Header, header};
pub use query::{Query, query};
