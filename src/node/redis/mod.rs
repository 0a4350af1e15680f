//! The Redis node: one server behind one connection.
//!
//! A job travels from the handle ([`node`]) through the [`inbox`] to the [`lane`], the one task that talks to the
//! server. The lane sends it, perhaps with others in one [`call`], over its [`link`]: a [`socket`] of the lane's own if
//! the server is named by a TCP URL without TLS, else a redis-rs connection from the pool. [`connect`] opens links, and asks the restart [`guard`] whether the
//! server may vote. Two things have connections of their own: the [`listener`], which subscribes to releases while
//! waiters need them, and the [`reader`], which reads big records.

mod call;
mod connect;
mod decode;
mod describe;
mod encode;
mod endpoint;
mod guard;
mod inbox;
mod lane;
mod link;
mod listener;
mod node;
mod reachability;
mod reader;
mod reply;
mod scripts;
mod shared;
mod socket;

pub(crate) use endpoint::{Endpoint, pool_for};
pub(crate) use guard::Guard;
pub(crate) use node::RedisNode;
pub(crate) use shared::Timeouts;
