//! Child processes that tell on stdout where they listen.

use std::io::{BufRead, BufReader, ErrorKind};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::Instant;

const START: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(5);

/// A child process that is ended when it is dropped.
#[derive(Debug)]
pub(crate) struct Process(Child);

impl Process {
    /// Starts a program, and returns it with the first line of its stdout that contains `part`; `None` if the
    /// program is missing.
    pub(crate) fn start(command: &mut Command, part: &'static str) -> Option<(Self, String)> {
        let spawned = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut child = match spawned {
            Ok(child) => child,
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => panic!("{command:?} does not start: {error}"),
        };
        let stdout = child.stdout.take().expect("stdout is piped");
        let process = Self(child);
        let (sender, receiver) = mpsc::channel();
        // Reads to the end, so that the program never waits for space in the pipe.
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if line.contains(part) {
                    sender.send(line).ok();
                }
            }
        });
        let line = receiver.recv_timeout(START);
        let line = line.unwrap_or_else(|_| panic!("{command:?} did not say {part:?}"));
        Some((process, line))
    }

    /// Asks the process to end, and waits until it has.
    pub(crate) fn end(&mut self) {
        if self.0.try_wait().is_ok_and(|status| status.is_some()) {
            return;
        }
        let pid = i32::try_from(self.0.id()).expect("process ids are small");
        kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
        let deadline = Instant::now() + END;
        while self.0.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
            thread::park_timeout(Duration::from_millis(20));
        }
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}
