//! Helpers of the integration tests: real servers, proxies before them, child processes, HTTP, waiting.
//!
//! Everything here runs on real time and on threads of its own, so that a test may pause tokio's
//! clock or block its thread without stopping a server or a proxy. Whatever a helper starts, it
//! ends when it is dropped, also when the test panics; so keep helpers in locals, never in statics.

#![allow(
    missing_docs,
    missing_debug_implementations,
    unnameable_types,
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    reason = "only tests use it"
)]
#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

pub mod http;

mod alone;
mod answer;
mod assert_matches;
mod child;
mod cluster;
mod deadline;
mod durations;
mod executed;
mod idempotent;
mod log;
mod monitor;
mod not_run;
mod poll_times;
mod ports;
mod proxy;
mod random;
mod recorded;
mod redis_server;
mod resp;
mod script_node;
mod scripted;
mod slow_readiness;
mod subscribe;
mod uses;
mod waiting;

pub use alone::alone;
pub use answer::{Answer, request, request_with, send, spawn_send};
pub use child::{ChildProcess, example_path};
pub use cluster::{Cluster, quorum};
pub use deadline::Deadline;
pub use durations::{ms, secs};
pub use executed::Executed;
pub use idempotent::{keyed_request, once, users};
pub use log::Log;
pub use monitor::MonitorLog;
pub use not_run::not_run;
pub use poll_times::poll_times;
pub use ports::free_port;
pub use proxy::Proxy;
pub use random::Random;
pub use recorded::{numbers, paused_runtime, real_runtime, recorded, recording};
pub use redis_server::RedisServer;
pub use resp::{Connection, Reply};
pub use script_node::ScriptNode;
pub use scripted::{redlock, set_all, three_nodes, three_nodes_with};
pub use slow_readiness::SlowReadiness;
pub use subscribe::subscribe;
pub use uses::{
    TTL, list_all, lock_and_release, polls_rarely, use_all, use_every_connection, why_unreachable,
};
pub use waiting::{until, until_all_up, wait_until};
