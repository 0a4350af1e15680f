//! Wall clocks that a test sets, for servers and clients in processes of their own.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{self, Command};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use support::secs;

/// The wall clock of the processes that are started with its environment.
///
/// A library of our own that is preloaded into them, not libfaketime: Debian's redis-server, with
/// jemalloc, does not start under that.
#[derive(Debug)]
pub(crate) struct Clock {
    library: &'static str,
    offset_file: String,
}

impl Clock {
    /// Returns a clock that is right.
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let offset_file = text(&folder().join(format!("clock-{}-{count}", process::id())));
        fs::write(&offset_file, 0_i64.to_ne_bytes()).expect("the build's folder can be written");
        Self {
            library: library(),
            offset_file,
        }
    }

    /// Returns a clock that is behind.
    pub(crate) fn behind(by: Duration) -> Self {
        let clock = Self::new();
        clock.set(-micros(by));
        clock
    }

    /// Sets the clock ahead of the right time, also in processes that run.
    pub(crate) fn jump_ahead(&self, by: Duration) {
        self.set(micros(by));
    }

    /// Returns what a process must have in its environment to have this clock.
    pub(crate) fn envs(&self) -> [(&str, &str); 2] {
        [
            ("LD_PRELOAD", self.library),
            ("CLOCK_SHIM_FILE", &self.offset_file),
        ]
    }

    fn set(&self, offset: i64) {
        // In place: truncating the file first would kill the processes that map it.
        let file = OpenOptions::new().write(true).open(&self.offset_file);
        let written = file.and_then(|file| file.write_all_at(&offset.to_ne_bytes(), 0));
        written.expect("the file is there as long as the clock");
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        fs::remove_file(&self.offset_file).ok();
    }
}

/// Returns the library, which is built once per test process.
fn library() -> &'static str {
    static LIBRARY: OnceLock<String> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("support/clock_shim.c");
        let (new, library) = (
            folder().join(format!("clock_shim-{}.so", process::id())),
            folder().join("clock_shim.so"),
        );
        let built = Command::new("cc")
            .args(["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"])
            .arg("-o")
            .args([&new, &source])
            .output()
            .expect("Rust links with cc, so it is there");
        assert!(built.status.success(), "cc: {built:?}");
        // Processes that have loaded the old file keep it.
        fs::rename(&new, &library).expect("both are in one folder");
        text(&library)
    })
}

/// Cargo's folder for the files of tests.
fn folder() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

fn text(path: &Path) -> String {
    let text = path.to_str().map(str::to_owned);
    text.expect("a build's folder has a name that is text")
}

fn micros(duration: Duration) -> i64 {
    let micros = duration.as_micros().try_into();
    micros.expect("a test's clocks are off by seconds")
}

/// By how much the clocks of two clients differ.
pub(crate) const SKEW: Duration = secs(5);
