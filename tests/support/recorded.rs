//! What a test counts and measures, with a recorder of its own.

use std::collections::BTreeMap;
use std::future::Future;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::runtime::{Builder, Runtime};

/// Runs a test on a paused clock with a recorder of its own, and returns what was recorded: numbers
/// by name and labels, of histograms how many values there are.
pub fn recorded(test: impl Future<Output = ()>) -> BTreeMap<String, u64> {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let runtime = paused_runtime();
    metrics::with_local_recorder(&recorder, || runtime.block_on(test));
    numbers(&snapshotter)
}

/// Returns a runtime on a paused clock.
pub fn paused_runtime() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().unwrap()
}

/// Returns a runtime of one thread, on real time.
pub fn real_runtime() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

/// Returns what was recorded so far, as [`recorded`] does.
pub fn numbers(snapshotter: &Snapshotter) -> BTreeMap<String, u64> {
    let snapshot = snapshotter.snapshot().into_vec().into_iter();
    let numbers = snapshot.map(|(key, _, _, value)| {
        let key = key.key();
        let labels = key.labels().map(|label| label.value().to_owned());
        let labels = labels.collect::<Vec<_>>().join(",");
        let number = match value {
            DebugValue::Counter(count) => count,
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "counts in a gauge are small and whole"
            )]
            DebugValue::Gauge(number) => number.into_inner() as u64,
            DebugValue::Histogram(values) => values.len() as u64,
        };
        (format!("{}{{{labels}}}", key.name()), number)
    });
    numbers.collect()
}

/// Runs a test on a paused clock, which may look at the numbers at any time.
pub fn recording<F: Future<Output = ()>>(test: impl FnOnce(Snapshotter) -> F) {
    let recorder = DebuggingRecorder::new();
    let test = test(recorder.snapshotter());
    metrics::with_local_recorder(&recorder, || paused_runtime().block_on(test));
}
