//! The settings of the layer.

use crate::middleware::response::Refusals;

/// Settings of a [`BufferBodyLayer`](crate::BufferBodyLayer), shared by all clones of its service.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub(super) limit: usize,
    pub(super) refusals: Refusals,
}
