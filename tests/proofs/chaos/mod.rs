//! Chaos on five real servers: under any faults of two of them, a key has one writer or readers, and tokens rise.
//!
//! Clients contend for overlapping sets of four keys and write to a storage with their tokens,
//! while servers are killed, stopped, flushed, partitioned, cut off and slowed, at most two at a
//! time. One that lost its memory counts until the restart guard has admitted it again. It takes a
//! minute and prints what happened. In a shorter run, half of the locks are shared by readers, whom no
//! writer may meet. For longer:
//!
//! ```sh
//! CHAOS_SECONDS=3600 cargo test -p tests --test proofs chaos
//! ```
//!
//! `CHAOS_SEED`, which is printed first, repeats the faults: which, in which order, on which server
//! and for how long, but not what the clients are doing at that instant.

pub(crate) mod clients;
pub(crate) mod faults;
pub(crate) mod history;
