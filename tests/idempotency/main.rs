//! `IdempotencyLayer`: one execution per key, its record, and what duplicates are answered.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]
#![allow(clippy::print_stdout, reason = "the figures are part of the result")]

mod at_most_once;
mod bank;
mod big_records;
mod conflicting_outcomes;
mod crashes;
mod damaged_records;
mod disconnects;
mod duplicates;
mod execute_once;
mod execute_once_faults;
mod executions;
mod late_executions;
mod layer;
mod nested_layers;
mod panics;
mod payments;
mod real_servers;
mod recording;
mod redispatch;
mod request_identity;
mod response_shapes;
mod retries;
mod stacks;
mod waiting_duplicates;
