//! Serialises tests that load the machine or measure time.

use tokio::sync::{Mutex, MutexGuard};

/// Waits until no other test that called this function runs in the program.
///
/// The tests of a program run in parallel threads. Tests that keep every core busy, or whose nodes must
/// answer within a node timeout, would disturb each other. The mutex belongs to no runtime, so tests with
/// runtimes of their own can share it.
pub async fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().await
}

static ALONE: Mutex<()> = Mutex::const_new(());
