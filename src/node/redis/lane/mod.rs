//! The lane: the one task that talks to one server.
//!
//! # Implementation details
//!
//! All jobs for a server pass through its lane in the order of submission and leave it on one connection, so a
//! release reaches the server behind its acquisition without waiting for a reply. The lane sends the queued jobs
//! together as one *batch* and has many batches in flight. A batch consists of *calls*, each with one reply: all
//! acquisitions of a batch are one call, for example. The lane detects a server that falls silent, fails requests to it
//! at once from then on, and probes it until it answers.
//!
//! The parts:
//!
//! * [`calls`]: the grouping of jobs into calls, and those that were sent and not answered. It knows no connection.
//! * [`state`]: the connection and the transitions between its states; the jobs, and how these are sent, kept and given up.
//! * [`task`]: the loop, which moves jobs from the inbox to the connection, and replies to the votes.
//!
//! Invariants:
//!
//! * *Order.* If a connection breaks, unconfirmed releases and records are parked before the jobs that were never
//!   sent, and go out first on the next connection.
//! * *Calls.* No two jobs on one key share a call, and their order is kept.
//! * *Sent again.* A job that the server has refused without executing it is sent again only if no release of its
//!   attempt has come.
//! * *Called off.* A job is marked as sent when it joins a batch, and not when the batch is sent: the release of an
//!   acquisition in the same batch must not be called off.
//! * *Releases.* A release is kept until the server has confirmed it or its lock has certainly expired. A lane whose
//!   node was dropped ends when it has none left. If its runtime ends first, another lane takes over its jobs.
//! * *Replies.* Replies arrive in the order of the requests, so the oldest call owns the next one. Replies that
//!   have arrived are read before the timer is checked: they are not late, however late the task runs.

mod calls;
mod state;
mod task;

pub(super) use task::spawn;
