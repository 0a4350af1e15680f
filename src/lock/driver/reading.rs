//! Reads that a lease asks for.

use std::future::{Future, pending};
use std::pin::Pin;

use crate::protocol::lease::{Input, Stored};

/// Reads what a lease asks for, and returns the input with it.
pub(crate) type Reader = dyn Fn(Stored) -> Read + Send + Sync;

/// A read under way.
pub(crate) type Read = Pin<Box<dyn Future<Output = Input> + Send + Sync>>;

/// Who reads for a lease, and what is being read.
pub(super) struct Reading {
    pub(super) reader: Box<Reader>,
    pub(super) read: Option<Read>,
}

/// Waits for the end of a read.
pub(super) async fn read(reading: &mut Option<Box<Reading>>) -> Input {
    let read = reading.as_mut().and_then(|reading| reading.read.as_mut());
    match read {
        Some(read) => read.await,
        None => pending().await,
    }
}
