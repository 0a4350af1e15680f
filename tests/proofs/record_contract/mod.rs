//! The Redis node keeps records as the reference node does: the same requests, sent as scripts to a real
//! server and applied to `protocol::Store`, get the same answers.

mod faults;
pub(crate) mod requests;
mod rules;
