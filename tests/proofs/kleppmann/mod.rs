//! Martin Kleppmann's objections to Redlock ("How to do distributed locking", 2016), reproduced with
//! client processes, real servers and a storage: which faults break a lock, and which settings prevent it.

mod client;
#[cfg(target_os = "linux")]
mod clock;
mod forgetful_nodes;
mod late_holders;
mod scene;
mod storage;

#[test]
#[ignore = "it is the client process of the other tests, which they start"]
fn client_process() {
    client::run_worker();
}
