//! Traces of leases, for tests.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::node::Mutex;
use crate::protocol::lease::Trace;
use crate::protocol::{LockKey, LockKeys};

/// The traces of the last leases of a lock service; see [`RedlockBuilder::traces`](crate::RedlockBuilder::traces).
///
/// ```
/// use tower_redlock::Redlock;
/// use tower_redlock::test_util::Traces;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let traces = Traces::default();
/// let redlock = Redlock::builder().embedded(3).traces(&traces).build()?;
/// redlock.lock("k").await?.release().await?;
/// for trace in traces.of(&"k".into()) {
///     println!("{trace}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Traces(Arc<Mutex<VecDeque<(LockKeys, LeaseTrace)>>>);

/// The trace of one lease, which grows.
pub(crate) type LeaseTrace = Arc<Mutex<Trace>>;

impl Traces {
    /// How many leases are remembered.
    const LEASES: usize = 1_000;

    /// Returns the traces of the leases of a key, from the oldest to the latest.
    #[must_use]
    pub fn of(&self, key: &LockKey) -> Vec<Trace> {
        let all = self.all().into_iter();
        let of_key = all.filter(|(keys, _)| keys.as_slice().contains(key));
        of_key.map(|(_, trace)| trace).collect()
    }

    /// Returns all traces with the keys of their leases, from the oldest to the latest.
    #[must_use]
    pub fn all(&self) -> Vec<(LockKeys, Trace)> {
        let traces = self.0.lock();
        let copy = |(keys, trace): &(LockKeys, LeaseTrace)| (keys.clone(), trace.lock().clone());
        traces.iter().map(copy).collect()
    }

    /// Remembers a lease from its beginning on.
    pub(crate) fn begin(&self, keys: &LockKeys, trace: Trace) -> LeaseTrace {
        let trace = Arc::new(Mutex::new(trace));
        let mut traces = self.0.lock();
        if traces.len() == Self::LEASES {
            traces.pop_front();
        }
        traces.push_back((keys.clone(), Arc::clone(&trace)));
        trace
    }
}
