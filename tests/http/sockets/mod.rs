//! Clients on real sockets: when the lock of a request is free, whatever becomes of its connection, and
//! that nothing of it is left.
//!
//! The nodes are scripted ones in this process: what is shown is what hyper and axum do with the layer
//! on the wire. Where a test says no other bound, a lock must be free within [`server::SOON`].

mod disconnect;
mod http1;
mod http2;
mod http2_client;
mod sequence;
mod server;
mod shutdown;
mod streams;
mod timeouts;
mod upgrades;
mod uploads;
