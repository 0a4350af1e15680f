//! The queue for a key within one process: its callers, first come, first served, beside other processes.

mod cap;
mod local;
mod remote;
mod subscription;

pub(crate) use cap::{Waited, WaiterCap, WaiterSlots};
pub(crate) use local::{
    CountedWaiter, HeldLease, LocalQueue, Memo, Permit, Places, State, permits,
};
pub(crate) use subscription::Watching;
