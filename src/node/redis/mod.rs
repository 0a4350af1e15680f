//! The Redis node: one server behind one connection.
//!
//! A job travels from the handle ([`node`]) through the inbox of the [`server`] to the [`lane`], the one task that talks to
//! the server. What a request is as a command stands in the [`table`]. The lane sends it, perhaps with others in one call,
//! over its [`link`]: a socket over TCP, TLS or a Unix socket if the server's address is known, else a redis-rs connection
//! from the user's pool. An [`endpoint`] makes links, with [`credentials`]. A lane prepares its own, and asks the restart
//! [`guard`] whether the server may vote. Two parts have connections of their own: the [`listener`], which subscribes to
//! releases while waiters need them, and reads of big records, on links from a pool.

mod credentials;
pub(crate) mod decode;
mod describe;
mod endpoint;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
pub(crate) mod guard;
mod lane;
pub(crate) mod link;
pub(crate) mod listener;
mod node;
mod server;
mod table;
#[cfg(feature = "tls-rustls")]
mod tls;

pub(crate) use credentials::{AnyProvider, Login};
pub use credentials::{Credentials, CredentialsProvider};
pub(crate) use endpoint::Endpoint;
pub(crate) use guard::Guard;
pub(crate) use node::RedisNode;
pub(crate) use server::{RedisServer, Timeouts};
pub(super) use table::{EncodedCommand, GenerationCheck, Operation};
