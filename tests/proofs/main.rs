//! Rounds and Lua scripts against independent oracles, and the guarantees of a lock under faults.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]
#![allow(clippy::print_stdout, reason = "the figures are part of the result")]

#[path = "../support/mod.rs"]
mod support;

mod chaos;
mod kleppmann;
mod node_contract;
mod record_contract;
mod record_rounds;
mod rounds;
