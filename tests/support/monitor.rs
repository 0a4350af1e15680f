//! The output of `MONITOR`: every command that a server ran, in order.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::deadline::Deadline;
use crate::redis_server::RedisServer;
use crate::resp::{Closer, Connection};

/// Collects the commands that a server runs from now on, until dropped.
#[derive(Debug)]
pub struct MonitorLog {
    addr: SocketAddr,
    lines: Arc<Mutex<Vec<String>>>,
    closer: Closer,
    reader: Option<JoinHandle<()>>,
}

impl MonitorLog {
    /// Starts to collect; every command sent after this returns is seen.
    #[track_caller]
    pub fn start(server: &RedisServer) -> Self {
        Self::open(server.addr()).expect("a running server can be monitored")
    }

    /// Returns the lines so far, as `1700000000.123456 [0 127.0.0.1:4000] "set" "k" "v"`.
    ///
    /// Everything that a client got an answer to before this call is among them. Commands of
    /// scripts have `[0 lua]`.
    pub fn lines(&self) -> Vec<String> {
        self.catch_up();
        let lines = self.collected();
        lines
            .iter()
            .filter(|line| !line.contains(MARK))
            .cloned()
            .collect()
    }

    fn open(addr: SocketAddr) -> io::Result<Self> {
        let mut connection = Connection::open(addr)?;
        connection.call(&["MONITOR"])?;
        connection.read_without_timeout()?;
        let closer = connection.closer()?;
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let reader = thread::spawn(move || {
            while let Ok(reply) = connection.read_reply() {
                if let Some(line) = reply.as_str() {
                    lock(&sink).push(line.to_owned());
                }
            }
        });
        Ok(Self {
            addr,
            lines,
            closer,
            reader: Some(reader),
        })
    }

    /// Waits until the reader has seen a command that is sent now, if the server still runs.
    fn catch_up(&self) {
        let mark = format!("{MARK}{}", self.collected().len());
        let sent = Connection::open(self.addr).and_then(|mut server| server.call(&["ECHO", &mark]));
        if sent.is_err() {
            return;
        }
        let deadline = Deadline::after(Duration::from_secs(1));
        while !self.collected().iter().any(|line| line.contains(&mark)) && deadline.pause() {}
    }

    fn collected(&self) -> MutexGuard<'_, Vec<String>> {
        lock(&self.lines)
    }
}

impl Drop for MonitorLog {
    fn drop(&mut self) {
        self.closer.close();
        if let Some(reader) = self.reader.take() {
            reader.join().ok();
        }
    }
}

/// Locks also what a panicking thread left behind: lines are pushed whole.
fn lock(lines: &Mutex<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins the commands with which a log catches up; lines with it are not shown.
const MARK: &str = "tower-redlock-monitor-mark-";
