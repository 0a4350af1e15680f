//! The queue for a key within one process: its callers, first come, first served, beside other processes.

mod cap;
mod local;
mod place;
mod remote;
mod subscription;

pub(crate) use cap::{Waited, WaiterCap, WaiterSlots};
pub(crate) use local::{LocalQueue, Permit, Places};
pub(crate) use place::{CountedWaiter, HeldLease, Occupancy, permits};
pub(crate) use subscription::Watching;
