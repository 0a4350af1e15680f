//! The log of a test as text.

use std::io;
use std::sync::{Arc, Mutex};

use tracing::Level;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::format::FmtSpan;

use super::subscribe;

/// A log of a test's own; clones write to the same.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Returns a new log, to which this thread logs until the guard is dropped.
    pub fn subscribed() -> (Self, DefaultGuard) {
        let log = Self::default();
        let guard = log.subscribe();
        (log, guard)
    }

    /// Returns a new log, to which this thread logs from a level on, and spans when they end, until the guard is dropped.
    pub fn with_spans(level: Level) -> (Self, DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(level)
            .with_span_events(FmtSpan::CLOSE);
        let guard = subscribe(subscriber.with_writer(move || writer.clone()).finish());
        (log, guard)
    }

    /// Makes this thread log here, from `INFO` on, until the guard is dropped.
    pub fn subscribe(&self) -> DefaultGuard {
        let writer = self.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false);
        subscribe(subscriber.with_writer(move || writer.clone()).finish())
    }

    /// Returns all that was logged.
    pub fn text(&self) -> String {
        let bytes = self.0.lock().expect("no writer panics").clone();
        String::from_utf8(bytes).expect("logs are text")
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut log = self.0.lock().expect("no writer panics");
        log.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
