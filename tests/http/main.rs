//! `RedlockLayer`, `BufferBodyLayer`, `Locked` and the key extractors, over nodes in this process.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

mod crowds;
mod custom_rejections;
mod dropped_requests;
mod early_release;
mod extractors;
mod groups;
mod hostile_requests;
mod key_extractors;
mod key_service;
mod keys;
mod kinds_of_locks;
mod log_texts;
mod on_lost;
mod openapi;
mod operators;
mod rejections;
mod request_bodies;
mod request_options;
mod response_bodies;
mod retry_after;
mod run_to_completion;
mod scripted_bodies;
mod service_contract;
mod shared_locks;
mod shop;
mod sockets;
mod stalled_threads;
mod tower_http_layers;
