//! `RedlockLayer`, `BufferBodyLayer`, `Locked` and the key extractors, over nodes in this process.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

#[path = "../support/mod.rs"]
mod support;

mod extractors;
mod grpc;
mod hostile_requests;
mod keys;
mod many_requests;
mod on_lost;
mod request_bodies;
mod response_bodies;
mod run_to_completion;
mod service_contract;
mod sockets;
mod stalled_processes;
mod tower_http_layers;
