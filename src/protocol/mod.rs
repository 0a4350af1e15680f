//! The lock protocol as pure data: no clock, no I/O, no async, no random source.
//!
//! It is public for the proofs of this crate only, with the feature `unstable-protocol`, and may change in any version.
//!
//! # The algorithm
//!
//! The lock is the one of the [Redlock description]: a key with a random owner value and a ttl on
//! each of `n` independent nodes. The holder is the client that has the key on a majority of them, until the
//! ttl, less the time of the acquisition and the drift of clocks, is over ([`validity`]). This crate adds
//! a *fencing token*, in three steps:
//!
//! 1. The client sends `ACQUIRE` with a proposed number (its wall clock in microseconds) to all
//!    nodes. A node whose key is free grants it and raises its fence, a number it never lowers, to
//!    the proposal or by one, whichever is more, and answers with the fence.
//! 2. As soon as a majority answered *exactly the same* number, it is the token: one round trip.
//! 3. Otherwise, once a majority granted, the client takes the highest number in the answers and sends
//!    `CONFIRM` with it to the nodes that answered another number. A node that still holds the
//!    key for this owner raises its fence and answers with the fence after the write.
//!
//! # Why tokens are unique and ordered
//!
//! Let node `x` acknowledge `A` first and `B` later. In between, `x` granted `B` the key while it was
//! free, which raised `x`'s fence above all its earlier answers; so `B`'s number is higher. Any two
//! majorities share such a node. Therefore the tokens of two acquisitions differ, and the one that was
//! acknowledged later is higher. This needs no clock as long as nodes keep their memory.
//!
//! # Model checking
//!
//! The argument above concerns the protocol. `tests/model` searches the code for a counterexample: it
//! drives [`Store`] and the [`lease`] through every order in which requests run, repeat and
//! get lost, answers are read, locks vanish, nodes lose their memory and time passes. No run found a
//! violation, and each run reached the events that it is about. A *whole life* is renewed, revoked, lost late,
//! given up at any moment and released; others leave out what is not their matter.
//!
//! A run of *all* states is exhaustive for its few acquisitions and nodes. A *bounded* run searched
//! breadth first and stopped: it shows that no sequence of fewer than `depth - 1` steps violates a property,
//! and nothing about longer ones. A hash of 64 bits identifies a state. Runs have three nodes unless they
//! name another number; `1..2` are the numbers that an acquisition may propose.
//!
//! These runs belong to every change, by `cargo test --release -p model --test model`:
//!
//! | without time: tokens | | states | depth |
//! |---|---|---|---|
//! | 2 acquisitions of 1..2, storage | all | 87,353 | 26 |
//! | 2 acquisitions of 1..3 | all | 125,175 | 25 |
//! | 2 acquisitions of 1..2, a repeated `ACQUIRE` | all | 787,872 | 29 |
//! | 2 acquisitions of 1..2, an extension | all | 375,489 | 28 |
//! | sets {x,y} and {x} of 1..2, storage | all | 458,139 | 29 |
//! | sets {x,y} and {x}, equal proposals, a repeated `ACQUIRE` | all | 2,206,111 | 32 |
//! | sets {x,y} and {x}, equal proposals, an extension | all | 814,967 | 31 |
//! | sets {x,y}, {x} and {y}, equal proposals | bounded | 885,017 | 17 |
//! | 3 acquisitions, equal proposals | bounded | 1,558,204 | 19 |
//! | 5 nodes, 2 acquisitions, equal proposals | bounded | 903,730 | 20 |
//!
//! | with time: 2 acquisitions, validity and tokens | | states | depth |
//! |---|---|---|---|
//! | no faults | all | 136,842 | 22 |
//! | a shorter extension | all | 901,812 | 24 |
//! | two extensions, longer and longer | all | 8,195,418 | 27 |
//! | a delayed restart | all | 732,801 | 23 |
//! | restart guard, one node flushed | all | 3,117,066 | 29 |
//! | restart guard, one node restarted empty | all | 760,632 | 27 |
//! | restart guard, one node restarted with data from before all locks | all | 3,338,964 | 29 |
//! | restart guard, one node made a copy of another | bounded | 1,667,701 | 16 |
//! | longer guard, one node flushed, one node's clock ahead | bounded | 2,159,453 | 17 |
//!
//! | with time: readers, who share a lock, and writers | | states | depth |
//! |---|---|---|---|
//! | 1 writer, 2 readers | all | 4,094,269 | 28 |
//! | 2 writers, 1 reader | all | 1,715,200 | 28 |
//! | 1 writer, readers with a ttl of 3 and of 1 | all | 767,189 | 27 |
//! | 1 writer, 1 reader, a repeated `ACQUIRE` | all | 493,381 | 22 |
//! | 1 writer, 1 reader, extended by 3 and by 1 | all | 1,490,136 | 28 |
//! | 1 writer, 1 reader, extended by 3, a repeated `ACQUIRE` | all | 373,143 | 24 |
//! | 1 writer, 2 readers, one extended by 3 | all | 2,429,312 | 29 |
//! | restart guard, 1 writer, 1 reader, one node wiped | all | 443,552 | 22 |
//! | restart guard, 1 writer, 1 reader, extended by 3, one node wiped | all | 907,772 | 24 |
//! | whole life of a writer that renews, until it is settled | all | 26,955 | 25 |
//! | whole life of a reader that renews, until it is settled | all | 40,047 | 25 |
//! | whole lives of a writer that renews, and another | all | 1,136,082 | 31 |
//! | whole lives of a reader that renews, and a writer | all | 2,392,414 | 31 |
//!
//! | with time: a key that moves to another group; clients of the old layout, of both, of the new one | | states | depth |
//! |---|---|---|---|
//! | 1 and 1 nodes: 1 old, 2 both, higher fences in the new group | all | 290,009 | 28 |
//! | 1 and 1 nodes: 2 both, 1 new | all | 509,816 | 29 |
//! | 1 and 3 nodes: 1 old, 1 both | all | 203,455 | 23 |
//! | 3 and 1 nodes: 1 both, 1 new | all | 211,512 | 26 |
//! | 1 and 1 nodes: 1 both, 1 new, an extension | all | 143,183 | 22 |
//! | 1 and 1 nodes: 1 both, 1 new, a repeated `ACQUIRE` | all | 160,169 | 23 |
//! | 1 and 1 nodes: 1 old, 1 new after a wait of the ttl | all | 4,982 | 15 |
//! | 1 and 1 nodes: 1 old, 1 both, 1 new after a wait | all | 253,598 | 26 |
//! | 1 and 1 nodes: 1 old, 1 both, 1 new after a wait of the ttl; order through both only | all | 257,378 | 25 |
//! | 1 and 1 nodes: 1 old, 1 both that locks the new group first | all | 37,357 | 21 |
//! | 1 and 1 nodes: 1 both, 1 both that locks the new group first | all | 70,801 | 25 |
//!
//! | records: requests for one key | | states | depth |
//! |---|---|---|---|
//! | 2 requests of 1..2, `TOPUP` | all | 1,599,473 | 41 |
//! | 2 requests, all have the record, one node forgets | all | 1,045,224 | 41 |
//! | 2 requests, nodes given up | bounded | 238,740 | 16 |
//! | 2 requests, one that executed acquires again to repair | bounded | 491,753 | 27 |
//! | 2 requests, a `RECORD` sent again | bounded | 483,103 | 17 |
//! | 2 requests, healthy nodes, a `RECORD` sent again | all | 158,406 | 27 |
//! | 2 requests, which wait between the grant and the execution | all | 777,932 | 43 |
//! | 2 requests, which wait for longer than a node may take | bounded | 521,799 | 19 |
//! | 2 requests, which go at any time | bounded | 430,195 | 27 |
//! | 2 requests, large records | bounded | 106,567 | 19 |
//! | 2 requests, a repeated `ACQUIRE` | bounded | 524,274 | 19 |
//! | 3 requests | bounded | 851,146 | 16 |
//! | 5 nodes, 2 requests, `TOPUP` | bounded | 250,263 | 17 |
//! | at most once, 2 requests of 1..2, `TOPUP` | all | 16,882 | 20 |
//! | at most once, 2 requests, nodes given up, a repair after executing | all | 927,865 | 29 |
//! | at most once, 2 requests, a repeated `ACQUIRE` | all | 41,740 | 31 |
//! | at most once, 2 requests, which go at any time | all | 17,460 | 21 |
//! | at most once, 3 requests | all | 410,487 | 35 |
//!
//! If all nodes had a record and one forgot it, requests that began after all nodes had it are safe. A
//! request that a node granted the key before the last copy arrived there may still execute.
//!
//! These run on demand, with `far_more -- --ignored` behind it, in less than an hour and with 8 GiB on two busy cores:
//!
//! | | | states | depth | seconds |
//! |---|---|---|---|---|
//! | 3 acquisitions, equal proposals | bounded | 12,940,887 | 25 | 194 |
//! | 3 acquisitions of 1..2 | bounded | 15,156,435 | 20 | 288 |
//! | 2 acquisitions of 1..3, 2 repeated `ACQUIRE`s, storage | bounded | 14,233,129 | 21 | 159 |
//! | sets {x,y}, {x} and {y}, equal proposals | bounded | 10,900,083 | 23 | 120 |
//! | 5 nodes, 2 acquisitions of 1..2 | bounded | 11,857,565 | 22 | 164 |
//! | restart guard, one node made a copy of another | all | 10,546,883 | 29 | 189 |
//! | longer guard, one node flushed, one node's clock ahead | all | 10,129,164 | 31 | 235 |
//! | restart guard, two of flush and both restarts | bounded | 20,494,177 | 16 | 180 |
//! | 1 writer, 2 readers, a tick longer | bounded | 14,761,251 | 19 | 371 |
//! | 1 writer, 2 readers, a repeated `ACQUIRE` | bounded | 12,753,620 | 18 | 194 |
//! | 1 writer, 2 readers, one extended by 3, a tick longer | bounded | 12,614,841 | 23 | 441 |
//! | restart guard, 1 writer, 2 readers, one node wiped | bounded | 13,528,192 | 18 | 200 |
//! | 1 and 1 nodes: 1 old, 2 both, a tick longer | all | 578,513 | 27 | 25 |
//! | 1 and 1 nodes: 2 both, 1 new, a tick longer | all | 958,301 | 30 | 23 |
//! | 1 and 1 nodes: 1 both, 2 new, a tick longer | all | 574,843 | 26 | 4 |
//! | 1 and 1 nodes: 3 both, a tick longer | all | 693,399 | 33 | 5 |
//! | 1 and 1 nodes: 1 old, 1 both, 1 both that locks the new group first | all | 1,458,859 | 30 | 17 |
//! | 1 and 1 nodes: 1 old, 1 both, 1 new after a wait, an extension; order through both only | all | 1,624,928 | 29 | 22 |
//! | 3 and 1 nodes: 1 old, 1 both | all | 4,648,358 | 29 | 494 |
//! | 1 and 3 nodes: 1 both, 1 new | all | 5,122,847 | 32 | 103 |
//! | 3 and 1 nodes: 2 both | all | 8,412,590 | 32 | 331 |
//! | 1 and 3 nodes: 2 both | all | 1,876,629 | 30 | 20 |
//! | 3 and 3 nodes: 1 old, 1 both | bounded | 17,518,684 | 19 | 202 |
//! | 3 requests, `TOPUP` | bounded | 14,752,204 | 21 | 545 |
//! | 2 requests of 1..2, `TOPUP`, a repair after executing | bounded | 12,767,941 | 41 | 594 |
//! | at most once, 3 requests, nodes given up | bounded | 10,371,055 | 19 | 909 |
//!
//! Two kinds of tests show that the checker finds violations: variants of the protocol without one of
//! its rules, in the same tests, and `tests/mutations.sh`, which changes this code. The checker does not
//! cover clients' clocks that disagree, the code that speaks to servers, or more acquisitions or nodes
//! than these.
//!
//! # Map
//!
//! [`LockKey`] and [`Namespace`] name the resource and its Redis keys, [`Placement`] the group of nodes that it is on. [`message`] has the requests and
//! replies, [`Store`] the behaviour of a node, [`admission`] the conditions for a vote, [`acquire`] and
//! [`round`] the conclusions of a client, [`retry`] its delays.
//!
//! This module is public so that tests can check the code that runs in production. It may change with the
//! protocol in a minor release.
//!
//! [Redlock description]: https://redis.io/docs/latest/develop/use/patterns/distributed-locks/

#![allow(
    clippy::must_use_candidate,
    clippy::return_self_not_must_use,
    reason = "most of it is public for the proofs only"
)]

pub mod acquire;
pub mod admission;
pub mod holder;
mod key;
pub mod lease;
pub mod message;
mod names;
mod placement;
mod quorum;
mod record;
pub mod retry;
pub mod round;
mod store;
mod token;
pub mod validity;

pub use holder::Holder;
pub(crate) use holder::{is_shown, shown};
pub(crate) use key::Few;
#[cfg(feature = "axum")]
pub(crate) use key::split_part;
pub use key::{KeyError, LockKey, LockKeys};
pub(crate) use names::hex;
pub use names::{IntentName, KeyNames, MAX_CLEAR_KEY, Namespace, SharedNames, SlotNames};
pub(crate) use placement::MAX_SLOTS;
pub use placement::Placement;
pub use quorum::{NodeSet, Quorum};
pub use record::{ExecutionId, Fingerprint, Record};
pub use retry::Retry;
pub use store::Store;
pub use token::{FencingToken, OwnerToken, ParseFencingTokenError, Shown};
