//! Rounds and Lua scripts against independent oracles, and the guarantees of a lock under faults.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]
#![allow(clippy::print_stdout, reason = "the figures are part of the result")]

mod acquire_round;
mod all_inputs;
mod batch_contract;
mod chaos;
mod extend_and_release_rounds;
mod key_names;
mod kleppmann;
mod lease_allocations;
mod node_contract;
mod random_contract;
mod record_contract;
mod record_rounds;
mod resize;
mod round_cases;
mod second_phase;
mod shared_contract;
mod slot_contract;
mod traces;
mod wire;
