//! `IdempotencyLayer`: one execution per key, its record, and what duplicates are answered.

#[path = "../support/mod.rs"]
mod support;

mod at_most_once;
mod big_records;
mod conflicting_outcomes;
mod crashes;
mod damaged_records;
mod executions;
mod layer;
mod real_servers;
mod record_copies;
mod stacks;
