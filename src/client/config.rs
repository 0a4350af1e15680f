//! The settings of the layer that sends again.

use std::sync::Arc;
use std::time::Duration;

use crate::client::attempt::Attempt;
use crate::protocol::Retry;

/// The settings of a layer and its services.
#[derive(Clone)]
pub(super) struct Config {
    pub(super) attempts: u32,
    pub(super) deadline: Duration,
    pub(super) backoff: Retry,
    pub(super) max_body: u64,
    pub(super) on_attempt: Arc<dyn Fn(&Attempt) + Send + Sync>,
}
