//! Real `redis-server` processes that tests start, stop, kill, flush and slow down.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]
#![allow(clippy::print_stdout, reason = "the figures are part of the result")]

mod addresses;
mod batches;
mod beside;
mod cluster_mode;
mod credentials;
mod fencing_off;
mod groups;
mod home;
mod judge;
mod leaders;
mod list;
mod locks;
mod lookups;
mod metrics_endpoint;
mod node_faults;
mod node_messages;
mod node_spans;
mod operating;
mod operators;
mod other_clients;
mod patient;
mod queries;
mod reconnection;
mod refused_releases;
mod release_signals;
mod restart_guard;
mod scrape;
mod server_limits;
mod sigterm;
mod slots;
mod transports;
mod wire;
mod wire_order;
