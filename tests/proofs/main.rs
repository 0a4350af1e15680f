//! Rounds and Lua scripts against independent oracles, and the guarantees of a lock under faults.

#[path = "../support/mod.rs"]
mod support;

mod chaos;
mod kleppmann;
mod node_contract;
mod record_contract;
mod record_rounds;
mod rounds;
