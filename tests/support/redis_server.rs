//! A real `redis-server` that a test may kill, stop and restart.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::deadline::Deadline;
use crate::ports::free_port;
use crate::resp::{Connection, Reply};

/// A `redis-server` child process with an empty memory and a directory of its own.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    dir: PathBuf,
    /// Added to the environment at every start.
    envs: Vec<(String, String)>,
    /// Added to the arguments at every start.
    args: Vec<String>,
    /// `None` while the server is killed.
    child: Option<Child>,
    stopped: AtomicBool,
}

impl RedisServer {
    /// Starts a server on a free port and waits until it answers.
    pub fn start() -> Self {
        let mut server = Self::launch();
        server.wait_until_ready();
        server
    }

    /// Starts a server that does not answer yet, so that several can start at the same time.
    pub fn launch() -> Self {
        Self::launch_with(&[])
    }

    /// Starts a server like [`RedisServer::launch`], with additional environment variables.
    pub fn launch_with(envs: &[(&str, &str)]) -> Self {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Self::launch_as(envs.iter().map(own).collect(), Vec::new())
    }

    /// Starts a server with further options of the command line.
    pub fn start_with_args(args: &[&str]) -> Self {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut server = Self::launch_as(Vec::new(), args);
        server.wait_until_ready();
        server
    }

    /// Starts a server in cluster mode, with these of the 16,384 hash slots.
    pub fn start_in_cluster_mode(slots: Range<u16>) -> Self {
        let mut server = Self::launch_as(Vec::new(), cluster_mode());
        server.wait_for_an_answer();
        if !slots.is_empty() {
            server.add_slots(slots);
        }
        server
    }

    fn launch_as(envs: Vec<(String, String)>, mut args: Vec<String>) -> Self {
        if std::env::var_os("REDIS_CLUSTER_MODE").is_some() && args.is_empty() {
            args = cluster_mode();
        }
        let mut server = Self {
            port: free_port(),
            dir: temp_dir(),
            envs,
            args,
            child: None,
            stopped: AtomicBool::new(false),
        };
        server.spawn();
        server
    }

    /// Waits until a launched server answers, and has all hash slots if it is in cluster mode; moves it if its port was
    /// taken in the meantime.
    pub fn wait_until_ready(&mut self) {
        self.wait_for_an_answer();
        if self.is_in_cluster_mode() {
            self.add_slots(ALL_SLOTS);
        }
    }

    /// Returns whether the server is in cluster mode, as all servers are with the environment variable
    /// `REDIS_CLUSTER_MODE`.
    pub fn is_in_cluster_mode(&self) -> bool {
        self.args.first().is_some_and(|arg| arg == CLUSTER_ENABLED)
    }

    fn wait_for_an_answer(&mut self) {
        for _ in 0..PORTS_TO_TRY {
            if self.answers_on_its_port() {
                return;
            }
            self.port = free_port();
            self.spawn();
        }
        panic!("redis-server found its port taken on {PORTS_TO_TRY} free ports");
    }

    /// Gives hash slots to a server that has none.
    #[track_caller]
    fn add_slots(&self, slots: Range<u16>) {
        let is_all = slots == ALL_SLOTS;
        let slots: Vec<_> = slots.map(|slot| slot.to_string()).collect();
        let command = ["CLUSTER", "ADDSLOTS"].into_iter();
        let command: Vec<_> = command.chain(slots.iter().map(String::as_str)).collect();
        let added = self.command(&command);
        assert_eq!(added.as_str(), Some("OK"), "{added:?}");
        if is_all {
            self.wait_for_its_cluster();
        }
    }

    /// Waits until a server that has all hash slots uses them, which it does two seconds after its start.
    #[track_caller]
    fn wait_for_its_cluster(&self) {
        let deadline = Deadline::after(START);
        while !text(&self.command(&["CLUSTER", "INFO"])).contains("cluster_state:ok") {
            assert!(deadline.pause(), "the cluster is not up after {START:?}");
        }
        self.command(&["CONFIG", "RESETSTAT"]);
    }

    /// Returns the server's port, which stays the same over a restart.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the server's URL without a path.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the URL of the server's Unix socket.
    pub fn unix_url(&self) -> String {
        format!("redis+unix://{}", self.dir.join("redis.sock").display())
    }

    /// Returns the server's address.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Returns the process id of the running server.
    #[track_caller]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the server is killed").id()
    }

    /// Returns whether the server is neither killed nor stopped.
    pub fn is_running(&self) -> bool {
        self.child.is_some() && !self.stopped.load(Ordering::Relaxed)
    }

    /// Kills the server, which loses its memory, and waits until it is gone.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // SIGKILL also ends a stopped process. An error means that it ended by itself.
            child.kill().ok();
            child.wait().ok();
        }
        self.stopped.store(false, Ordering::Relaxed);
    }

    /// Stops the server as a long pause would: connections stay open, nothing answers.
    #[track_caller]
    pub fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        self.stopped.store(true, Ordering::Relaxed);
        // The signal is only sent: on another core the server may still answer for a moment.
        let deadline = Deadline::after(Duration::from_secs(2));
        while !is_stopped(self.pid()) && deadline.pause() {}
    }

    /// Continues a stopped server.
    #[track_caller]
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
        self.stopped.store(false, Ordering::Relaxed);
    }

    /// Starts the server again, with an empty memory and on the same port; kills it first if needed.
    #[track_caller]
    pub fn restart(&mut self) {
        self.kill();
        let deadline = Deadline::after(START);
        loop {
            self.spawn();
            if self.answers_on_its_port() {
                break;
            }
            assert!(deadline.pause(), "port {} was taken", self.port);
        }
        if self.is_in_cluster_mode() {
            // It has kept its slots, in a file.
            self.wait_for_its_cluster();
        }
    }

    /// Runs one command on a connection of its own and returns the answer, errors included.
    #[track_caller]
    pub fn command(&self, command: &[&str]) -> Reply {
        match self.try_command(command) {
            Ok(reply) => reply,
            Err(error) => panic!("redis on port {}: {command:?}: {error}", self.port),
        }
    }

    /// Runs one command like [`RedisServer::command`], for servers that may not answer.
    pub fn try_command(&self, command: &[&str]) -> io::Result<Reply> {
        Connection::open(self.addr())?.call(command)
    }

    /// Returns the names of all keys that match a glob pattern, sorted.
    #[track_caller]
    pub fn keys(&self, pattern: &str) -> Vec<String> {
        let reply = self.command(&["KEYS", pattern]);
        let Reply::Array(Some(names)) = reply else {
            panic!("KEYS answered {reply:?}");
        };
        let mut names: Vec<_> = names.iter().map(text).collect();
        names.sort();
        names
    }

    /// Returns whether a key exists.
    #[track_caller]
    pub fn exists(&self, key: &str) -> bool {
        self.command(&["EXISTS", key]).as_int() == Some(1)
    }

    /// Returns how often each command ran since the start or `CONFIG RESETSTAT`.
    ///
    /// Names are in lower case, subcommands as `config|get`. Commands of scripts count too, and so
    /// do those of this harness; counts begin after the server was found ready.
    #[track_caller]
    pub fn call_counts(&self) -> BTreeMap<String, u64> {
        text(&self.command(&["INFO", "commandstats"]))
            .lines()
            .filter_map(|line| {
                let (name, numbers) = line.strip_prefix("cmdstat_")?.split_once(':')?;
                let calls = numbers.strip_prefix("calls=")?.split(',').next()?;
                Some((name.to_owned(), calls.parse().ok()?))
            })
            .collect()
    }

    /// Returns the CPU time it has used so far.
    pub fn cpu_seconds(&self) -> f64 {
        text(&self.command(&["INFO", "cpu"]))
            .lines()
            .filter_map(|line| line.split_once(':'))
            .filter(|(name, _)| matches!(*name, "used_cpu_sys" | "used_cpu_user"))
            .filter_map(|(_, seconds)| seconds.parse::<f64>().ok())
            .sum()
    }

    fn spawn(&mut self) {
        let program = std::env::var_os("REDIS_SERVER").unwrap_or_else(|| "redis-server".into());
        let log = File::create(self.log_file()).expect("the log file can be created");
        let child = Command::new(&program)
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
            .args([
                "--loglevel",
                "warning",
                "--unixsocket",
                "redis.sock",
                "--dir",
            ])
            .arg(&self.dir)
            .args(&self.args)
            .envs(self.envs.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file handle can be cloned"))
            .stderr(log)
            .spawn();
        self.child = match child {
            Ok(child) => Some(child),
            Err(error) if error.kind() == io::ErrorKind::NotFound => panic!(
                "{} was not found: run tests/run.sh, which installs it, or install redis-server",
                program.display()
            ),
            Err(error) => panic!("{} does not start: {error}", program.display()),
        };
    }

    /// Waits for the first answer; returns false if the port turned out to be taken.
    #[track_caller]
    fn answers_on_its_port(&mut self) -> bool {
        let deadline = Deadline::after(START);
        loop {
            if self.has_ended() {
                let log = self.log();
                if log.contains("Address already in use") {
                    return false;
                }
                panic!("redis-server ended at its start:\n{log}");
            }
            if self.is_ready() {
                return true;
            }
            assert!(
                deadline.pause(),
                "redis-server does not answer on port {} after {START:?}:\n{}",
                self.port,
                self.log()
            );
        }
    }

    fn is_ready(&self) -> bool {
        let Ok(mut connection) = Connection::open(self.addr()) else {
            return false;
        };
        let pong = connection.call(&["PING"]);
        if !pong.is_ok_and(|reply| reply.as_str() == Some("PONG")) {
            return false;
        }
        // Another server that took the port in the meantime answers too, from another directory.
        let ours = connection.call(&["CONFIG", "GET", "dir"]).is_ok_and(|dir| {
            dir.as_array()
                .and_then(|pair| pair.get(1)?.as_str())
                .is_some_and(|dir| Path::new(dir) == self.dir)
        });
        ours && connection.call(&["CONFIG", "RESETSTAT"]).is_ok()
    }

    fn has_ended(&mut self) -> bool {
        self.child
            .as_mut()
            .is_none_or(|child| child.try_wait().is_ok_and(|status| status.is_some()))
    }

    #[track_caller]
    fn signal(&self, signal: Signal) {
        kill(as_pid(self.pid()), signal).expect("a child that was not waited for takes signals");
    }

    fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    fn log_file(&self) -> PathBuf {
        self.dir.join("redis.log")
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
        fs::remove_dir_all(&self.dir).ok();
    }
}

/// Returns the process id in the form that nix wants.
pub(crate) fn as_pid(id: u32) -> Pid {
    Pid::from_raw(id.try_into().expect("process ids are small"))
}

fn text(reply: &Reply) -> String {
    match reply {
        Reply::Bulk(Some(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
        other => panic!("expected a string, not {other:?}"),
    }
}

/// Returns whether a process is stopped, and true where the system does not tell.
fn is_stopped(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return true;
    };
    // The state follows the program's name, which stands in parentheses.
    stat.rsplit(") ")
        .next()
        .is_some_and(|rest| rest.starts_with('T'))
}

/// The arguments of a server in cluster mode. Its port for other servers is ten thousand above its own.
fn cluster_mode() -> Vec<String> {
    [CLUSTER_ENABLED, "yes"].map(str::to_owned).into()
}

fn temp_dir() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("tower-redlock-test-{}-{count}", process::id());
    let dir = std::env::temp_dir().join(name);
    fs::create_dir_all(&dir).expect("a temporary directory can be created");
    // The server reports the resolved name, which differs where the temporary directory is a link.
    dir.canonicalize().expect("the directory was just made")
}

const PORTS_TO_TRY: u32 = 5;

const CLUSTER_ENABLED: &str = "--cluster-enabled";
const ALL_SLOTS: Range<u16> = 0..16_384;

/// How long a server may take to answer: generous, because tests start many at once.
const START: Duration = Duration::from_secs(20);
