//! Tests that cannot run here, for `tests/run.sh` to say so at its end.

use std::fs::OpenOptions;
use std::io::{self, Write as _};

/// Says that something is not tested here, and why.
///
/// A line goes to standard error, past the capture of the test harness, and to the file that
/// `TOWER_REDLOCK_NOT_RUN` names. `tests/run.sh` sets the variable and prints the file.
pub fn not_run(what: &str) {
    let line = format!("NOT RUN: {what}\n");
    // One write a line: tests run at the same time.
    let written = io::stderr().write_all(line.as_bytes());
    written.expect("standard error is open");
    let Some(file) = std::env::var_os("TOWER_REDLOCK_NOT_RUN") else {
        return;
    };
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(file)
        .expect("TOWER_REDLOCK_NOT_RUN names a file that can be written");
    let written = file.write_all(line.as_bytes());
    written.expect("the file takes another line");
}
