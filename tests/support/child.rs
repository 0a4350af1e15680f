//! Examples and other programs as child processes.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};

use crate::deadline::Deadline;
use crate::ports::free_port;
use crate::redis_server::as_pid;

/// A child process whose output is collected; killed when dropped.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    status: Option<ExitStatus>,
    stdout: Output,
    stderr: Output,
}

impl ChildProcess {
    /// Starts a program with arguments and environment variables.
    ///
    /// It inherits the environment of the test, but for `LISTEN` and all `REDLOCK_*`.
    #[track_caller]
    pub fn start(program: impl AsRef<Path>, args: &[&str], envs: &[(&str, &str)]) -> Self {
        Self::spawn(program.as_ref(), args, envs, Stdio::null())
    }

    /// Starts an example on a free port, and waits for a line that it prints.
    #[track_caller]
    pub fn serve(example: &str, envs: &[(&str, &str)], line: &str) -> (Self, SocketAddr) {
        let addr = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let listen = addr.to_string();
        let envs = [envs, &[("LISTEN", listen.as_str())]].concat();
        let server = Self::start(example_path(example), &[], &envs);
        server.wait_for_line(line, Duration::from_secs(30));
        (server, addr)
    }

    /// Starts a program like [`ChildProcess::start`], to be talked to on its stdin.
    ///
    /// Its stdin ends with the test, so that it does not outlive a test that was killed.
    #[track_caller]
    pub fn start_to_talk(
        program: impl AsRef<Path>,
        args: &[&str],
        envs: &[(&str, &str)],
    ) -> (Self, ChildStdin) {
        let mut process = Self::spawn(program.as_ref(), args, envs, Stdio::piped());
        let stdin = process.child.stdin.take().expect("stdin is piped");
        (process, stdin)
    }

    #[track_caller]
    fn spawn(program: &Path, args: &[&str], envs: &[(&str, &str)], stdin: Stdio) -> Self {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name == "LISTEN" || name.to_string_lossy().starts_with("REDLOCK_") {
                command.env_remove(name);
            }
        }
        let child = command
            .args(args)
            .envs(envs.iter().copied())
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => panic!("{} does not start: {error}", program.display()),
        };
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        Self {
            child,
            status: None,
            stdout: Output::collect(stdout),
            stderr: Output::collect(stderr),
        }
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line of stdout that contains `part`, and returns the first such line.
    #[track_caller]
    pub fn wait_for_line(&self, part: &str, timeout: Duration) -> String {
        let line = self.stdout.wait_for_line(part, Deadline::after(timeout));
        line.unwrap_or_else(|| {
            panic!(
                "no line with {part:?} within {timeout:?}, but\n{}",
                self.said()
            )
        })
    }

    /// Returns the whole lines of stdout so far; after [`ChildProcess::wait`], all of them.
    pub fn stdout(&self) -> String {
        self.stdout.text()
    }

    /// Returns the whole lines of stderr so far; after [`ChildProcess::wait`], all of them.
    pub fn stderr(&self) -> String {
        self.stderr.text()
    }

    /// Sends a signal to a process that was not waited for yet.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        // Once waited for, the id may belong to another process.
        assert!(self.status.is_none(), "the process has ended");
        kill(as_pid(self.id()), signal).expect("a child that was not waited for takes signals");
    }

    /// Waits until the process ends and all its output is collected.
    #[track_caller]
    pub fn wait(&mut self, timeout: Duration) -> ExitStatus {
        let deadline = Deadline::after(timeout);
        let status = loop {
            if let Some(status) = self.poll() {
                break status;
            }
            assert!(
                deadline.pause(),
                "still running after {timeout:?}, having said\n{}",
                self.said()
            );
        };
        // Bounded: a grandchild may keep the pipes open.
        let rest = Deadline::after(Duration::from_secs(1));
        self.stdout.wait_for_end(rest);
        self.stderr.wait_for_end(rest);
        status
    }

    fn poll(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("a child can be waited for");
        }
        self.status
    }

    fn said(&self) -> String {
        format!(
            "--- stdout\n{}\n--- stderr\n{}",
            self.stdout(),
            self.stderr()
        )
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if self.status.is_none() {
            // An error means that it ended by itself.
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }
}

/// Returns the path of an example that cargo built next to the running program.
#[track_caller]
pub fn example_path(name: &str) -> PathBuf {
    let program = std::env::current_exe().expect("a program knows its own path");
    // A test is target/<profile>/deps/<test>, and another program target/<profile>/<program>.
    let folders = program.ancestors();
    let mut places = folders.map(|folder| folder.join("examples").join(name));
    let example = places.find(|place| place.is_file());
    let example = example.unwrap_or_else(|| {
        panic!("{name} is missing: `cargo build --workspace --examples` builds it")
    });
    // With `--test`, cargo builds the tests of a package and no examples. Beside each one it lists its sources.
    let modified = |file: &Path| fs::metadata(file).and_then(|data| data.modified()).ok();
    let sources = fs::read_to_string(example.with_extension("d")).expect("cargo wrote it");
    let (_, sources) = sources.split_once(": ").expect("it lists sources");
    let newer = sources.replace("\\ ", "\0");
    let newer = newer
        .split_whitespace()
        .map(|source| source.replace('\0', " "))
        .find(|source| modified(Path::new(source)) > modified(&example));
    assert!(
        newer.is_none(),
        "{} is older than {newer:?}: `cargo build --workspace --examples --all-features` builds it anew",
        example.display()
    );
    example
}

/// The lines of one pipe, collected by a thread that ends with the pipe.
#[derive(Debug, Clone)]
struct Output(Arc<(Mutex<Lines>, Condvar)>);

#[derive(Debug, Default)]
struct Lines {
    lines: Vec<String>,
    ended: bool,
}

impl Output {
    fn collect(pipe: impl Read + Send + 'static) -> Self {
        let output = Self(Arc::default());
        let sink = output.clone();
        thread::spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                let text = String::from_utf8_lossy(&line);
                let text = text.trim_end_matches(['\r', '\n']).to_owned();
                sink.update(|lines| lines.lines.push(text));
                line.clear();
            }
            sink.update(|lines| lines.ended = true);
        });
        output
    }

    /// Returns the first line that contains `part`, or `None` at the deadline or the pipe's end.
    fn wait_for_line(&self, part: &str, deadline: Deadline) -> Option<String> {
        let found = |lines: &Lines| lines.lines.iter().find(|line| line.contains(part)).cloned();
        self.wait(deadline, |lines| lines.ended || found(lines).is_some());
        self.read(found)
    }

    fn wait_for_end(&self, deadline: Deadline) {
        self.wait(deadline, |lines| lines.ended);
    }

    fn text(&self) -> String {
        self.read(|lines| lines.lines.join("\n"))
    }

    fn wait(&self, deadline: Deadline, done: impl Fn(&Lines) -> bool) {
        let (lines, changed) = &*self.0;
        let lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        drop(changed.wait_timeout_while(lines, deadline.left(), |lines| !done(lines)));
    }

    fn read<T>(&self, look: impl FnOnce(&Lines) -> T) -> T {
        look(&self.0.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn update(&self, change: impl FnOnce(&mut Lines)) {
        let (lines, changed) = &*self.0;
        change(&mut lines.lock().unwrap_or_else(PoisonError::into_inner));
        changed.notify_all();
    }
}
