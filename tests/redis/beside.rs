//! What goes on at a server beside a test, on a thread and a connection of its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use support::{Connection, Deadline};

/// Something that is repeated every few milliseconds until it is finished, dropped, or has gone on for too long.
pub(crate) struct Beside<T> {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<T>>,
}

impl<T: Default + Send + 'static> Beside<T> {
    /// Repeats a step, which may note what it sees.
    pub(crate) fn start(
        addr: SocketAddr,
        longest: Duration,
        mut step: impl FnMut(&mut Connection, &mut T) + Send + 'static,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut connection = Connection::open(addr).expect("the server runs");
            let (mut seen, deadline) = (T::default(), Deadline::after(longest));
            while !stopped.load(Ordering::Relaxed) && deadline.pause() {
                step(&mut connection, &mut seen);
            }
            seen
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    /// Stops, and returns what was seen.
    pub(crate) fn finish(mut self) -> T {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("it is finished once");
        thread.join().expect("no step panics")
    }
}

impl<T> Drop for Beside<T> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
