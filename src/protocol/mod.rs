//! The lock protocol as pure data: no clock, no I/O, no async, no random source.
//!
//! # The algorithm
//!
//! The lock is the one of the [Redlock description]: a key with a random owner value and a ttl on
//! each of `n` independent nodes, held by whoever has it on a majority of them within the time that
//! the ttl, less the time it took and the drift of clocks, leaves ([`validity`]). What is added is
//! a *fencing token*, in three steps:
//!
//! 1. The client sends `ACQUIRE` with a proposed number (its wall clock in microseconds) to all
//!    nodes. A node whose key is free grants it and raises its fence, a number it never lowers, to
//!    the proposal or by one, whichever is more, and answers the fence.
//! 2. As soon as a majority answered *exactly the same* number, that is the token: one round trip.
//! 3. Otherwise, once a majority granted, the client takes the highest number it was told and sends
//!    `CONFIRM` with it to the nodes that did not answer exactly that. A node that still holds the
//!    key for this owner raises its fence and answers the fence after the write.
//!
//! # Why tokens are unique and ordered
//!
//! Say that `A` and `B` were both acknowledged by node `x`, first `A`. In between, `B` was granted
//! the key at `x` while it was free, which raised `x`'s fence above all it had answered; so `B`'s
//! number is higher. Any two majorities share such a node, so the tokens of two acquisitions
//! differ, and the one that was acknowledged later is higher. No clock is needed for this as long
//! as nodes keep their memory.
//!
//! # Map
//!
//! [`LockKey`] and [`Namespace`] say what is locked and how it is called on the nodes,
//! [`message`] what is asked and answered, [`Store`] what a node does, [`admission`] whether it may,
//! [`round`] what a client concludes, [`Retry`] when it tries again.
//!
//! This module is public so that the protocol can be checked by the code that runs it. It follows
//! the protocol and may change with it in a minor release.
//!
//! [Redlock description]: https://redis.io/docs/latest/develop/use/patterns/distributed-locks/

pub mod admission;
mod fence;
mod key;
pub mod message;
mod names;
mod owner;
mod quorum;
mod retry;
pub mod round;
mod store;
pub mod validity;

pub use fence::{FencingToken, ParseFencingTokenError};
pub use key::{KeyError, LockKey, LockKeys};
pub use names::{KeyNames, MAX_CLEAR_KEY, Namespace};
pub use owner::OwnerToken;
pub use quorum::Quorum;
pub use retry::Retry;
pub use store::Store;
