//! The queue of one process for a key: its own callers first come, first served, and other processes.

mod cap;
mod local;
mod remote;

pub(crate) use cap::{Waited, WaiterCap, WaiterSlots};
pub(crate) use local::{Busy, HeldLease, LocalQueue, Memo, Permit};
pub(crate) use remote::RemoteWaiters;
