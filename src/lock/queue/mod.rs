//! The queue for a key within one process: its callers, first come, first served, beside other processes.

mod local;
mod place;

pub(crate) use local::{LocalQueue, Permit, Wait, WaiterCap};
pub(crate) use place::{Occupancy, Place, permits};
