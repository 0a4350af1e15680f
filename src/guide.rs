//! Chapters on what no signature says: what the lock is for, how to run its nodes, how to pay once.

#[doc = include_str!("../docs/what_is_this_lock_for.md")]
pub mod what_is_this_lock_for {}

#[doc = include_str!("../docs/operating_the_nodes.md")]
pub mod operating_the_nodes {}

#[cfg(feature = "idempotency")]
#[doc = include_str!("../docs/idempotency.md")]
pub mod idempotency {}
