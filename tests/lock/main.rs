//! Locks over scripted and embedded nodes on a paused clock: no HTTP, no server.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

#[path = "../support/mod.rs"]
mod support;

mod auto_traits;
mod cancellation;
mod lease_time;
mod lock_all;
mod settings;
mod telemetry;
