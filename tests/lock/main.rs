//! Locks over scripted and embedded nodes on a paused clock: no HTTP, no server.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

mod auto_traits;
mod cancellation;
mod common;
mod crowds;
mod drain;
mod extend;
mod groups;
mod handles;
mod hold_at_least;
mod holders;
mod inspect;
mod lead;
mod list;
mod lock_all;
mod longest_waits;
mod moving;
mod renewal;
mod rest;
mod serve_until;
mod settings;
mod shared;
mod slots;
mod stages;
mod telemetry;
mod traces;
mod try_lock;
mod validity;
mod waiting;
