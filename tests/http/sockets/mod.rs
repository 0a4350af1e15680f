//! Clients on real sockets: when the lock of a request is released, however its connection ends.
//!
//! The nodes are scripted ones in this process, so the tests show how hyper and axum drive the layer on
//! the wire. Unless a test names another bound, a lock must be free within [`server::SOON`].

mod disconnect;
mod foreign_clients;
mod http1;
mod http2_client;
mod sequence;
pub(crate) mod server;
mod streams;
mod upgrades;
