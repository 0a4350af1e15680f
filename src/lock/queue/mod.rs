//! The queue for a key within one process: its callers, first come, first served, beside other processes.

mod cap;
mod local;
mod remote;
mod subscription;

pub(crate) use cap::{Waited, WaiterCap, WaiterSlots};
pub(crate) use local::{Busy, HeldLease, LocalQueue, Memo, Permit, Places};
pub(crate) use subscription::Watching;
