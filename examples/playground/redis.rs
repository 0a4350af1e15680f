//! Five real servers, which are child processes, behind proxies that can delay or cut off each server of the bank.

use std::env;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::board::Board;
use crate::events::lock;
use crate::monitor::{Monitor, Seen};
use crate::proxy::Proxy;
use crate::{NODES, SERVERS};

/// The servers of one instance, which end with it.
#[derive(Debug)]
pub(crate) struct RedisNodes {
    nodes: Vec<Node>,
    /// By server of the bank, then by node.
    proxies: Vec<Vec<Proxy>>,
    board: Arc<Board>,
    monitors: Vec<AbortHandle>,
}

#[derive(Debug)]
struct Node {
    address: SocketAddr,
    directory: PathBuf,
    server: Mutex<Option<Server>>,
}

/// A running server.
#[derive(Debug)]
struct Server {
    /// Ends the server if this process is killed. Dropped before the server, whose id another process may get then.
    _watchdog: Option<Child>,
    child: Child,
}

impl RedisNodes {
    pub(crate) async fn start(board: &Arc<Board>) -> io::Result<Self> {
        let nodes = (0..NODES)
            .map(Node::launch)
            .collect::<io::Result<Vec<_>>>()?;
        for node in &nodes {
            node.wait_until_ready().await?;
        }
        let seen = Arc::<Mutex<Seen>>::default();
        let mut proxies = Vec::new();
        for server in 0..SERVERS.len() {
            let mut of_server = Vec::new();
            for (node, its) in nodes.iter().enumerate() {
                of_server.push(Proxy::start(server, node, its.address, board, &seen).await?);
            }
            proxies.push(of_server);
        }
        let monitors = nodes.iter().enumerate().map(|(node, its)| {
            let monitor = Monitor::new(node, its.address, board, &seen);
            tokio::spawn(monitor.run()).abort_handle()
        });
        Ok(Self {
            monitors: monitors.collect(),
            nodes,
            proxies,
            board: Arc::clone(board),
        })
    }

    /// Returns the addresses at which a server of the bank reaches the nodes.
    pub(crate) fn urls(&self, server: usize) -> Vec<String> {
        let proxies = self.proxies[server].iter();
        proxies
            .map(|proxy| format!("redis://{}", proxy.address))
            .collect()
    }

    pub(crate) fn kill(&self, node: usize) {
        // Dropping a child kills it, also a stopped one.
        drop(lock(&self.nodes[node].server).take());
    }

    /// Returns whether a server is gone.
    pub(crate) fn has_ended(&self, node: usize) -> bool {
        self.nodes[node].has_ended()
    }

    pub(crate) async fn restart(&self, node: usize) -> io::Result<()> {
        self.kill(node);
        let node = &self.nodes[node];
        let deadline = Instant::now() + START;
        loop {
            node.start()?;
            match node.wait_until_ready().await {
                Ok(()) => break,
                // The former process may still have the port.
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => sleep(PAUSE).await,
            }
        }
        Ok(())
    }

    pub(crate) fn stop(&self, node: usize) -> io::Result<()> {
        self.nodes[node].signal("STOP")
    }

    pub(crate) fn resume(&self, node: usize) -> io::Result<()> {
        self.nodes[node].signal("CONT")
    }

    pub(crate) async fn wipe(&self, node: usize) -> io::Result<()> {
        let answer = call(self.nodes[node].address, "FLUSHALL").await?;
        self.board.forgot(node);
        if answer.starts_with("+OK") {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "FLUSHALL was answered with {answer}"
        )))
    }
}

impl Drop for RedisNodes {
    fn drop(&mut self) {
        for monitor in &self.monitors {
            monitor.abort();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(lock(&self.server).take());
        // What a temporary directory keeps does no harm.
        drop(std::fs::remove_dir_all(&self.directory));
    }
}

impl Node {
    fn launch(index: usize) -> io::Result<Self> {
        // A free port: the system gives it to no other process for a while.
        let port = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let mut directory = directories().into_os_string();
        directory.push(format!("{index}-{}", port.port()));
        let directory = PathBuf::from(directory);
        std::fs::create_dir_all(&directory)?;
        // Before the server starts, so that the directory is removed if it does not.
        let node = Self {
            address: port,
            directory,
            server: Mutex::default(),
        };
        node.start()?;
        Ok(node)
    }

    fn start(&self) -> io::Result<()> {
        let child = spawn(self.address, &self.directory)?;
        *lock(&self.server) = Some(Server {
            _watchdog: watch(&child),
            child,
        });
        Ok(())
    }

    async fn wait_until_ready(&self) -> io::Result<()> {
        let deadline = Instant::now() + START;
        loop {
            match call(self.address, "PING").await {
                Ok(answer) if answer.starts_with("+PONG") => return Ok(()),
                _ if self.has_ended() => {
                    return Err(io::Error::other("redis-server ended at its start"));
                }
                _ if Instant::now() > deadline => {
                    return Err(io::Error::other(format!(
                        "redis-server does not answer at {}",
                        self.address
                    )));
                }
                _ => sleep(PAUSE).await,
            }
        }
    }

    fn has_ended(&self) -> bool {
        let mut server = lock(&self.server);
        let has_ended = server.as_mut().is_none_or(|server| {
            let ended = server.child.try_wait();
            ended.is_ok_and(|status| status.is_some())
        });
        if has_ended {
            *server = None;
        }
        has_ended
    }

    #[cfg(unix)]
    fn signal(&self, name: &str) -> io::Result<()> {
        use nix::sys::signal::{Signal, kill};
        use nix::unistd::Pid;

        let signal = if name == "STOP" {
            Signal::SIGSTOP
        } else {
            Signal::SIGCONT
        };
        let server = lock(&self.server);
        let id = server.as_ref().and_then(|server| server.child.id());
        let id = id.and_then(|id| id.try_into().ok());
        let id = id.ok_or_else(|| io::Error::other("the server is down"))?;
        kill(Pid::from_raw(id), signal).map_err(io::Error::from)
    }

    #[cfg(not(unix))]
    fn signal(&self, name: &str) -> io::Result<()> {
        Err(io::Error::other(format!(
            "this system has no signal SIG{name}"
        )))
    }
}

/// What the directories of all servers of this process begin with.
fn directories() -> PathBuf {
    env::temp_dir().join(format!("tower-redlock-playground-{}-", std::process::id()))
}

/// Starts a shell that ends a server, also a stopped one, and removes the directories when this process is gone: the
/// system closes the pipe between them then, even after SIGKILL. `None` on a system without a shell.
fn watch(server: &Child) -> Option<Child> {
    let shell = Command::new("sh")
        .args([
            "-c",
            "read -r _; kill -9 \"$1\"; rm -rf \"$2\"*",
            "watchdog",
        ])
        .arg(server.id()?.to_string())
        .arg(directories())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn();
    shell.ok()
}

/// Starts a server without persistence.
fn spawn(address: SocketAddr, directory: &Path) -> io::Result<Child> {
    let program = env::var_os("REDIS_SERVER").unwrap_or_else(|| "redis-server".into());
    let port = address.port().to_string();
    let child = Command::new(&program)
        .args([
            "--port",
            &port,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ])
        .args(["--daemonize", "no", "--loglevel", "warning", "--dir"])
        .arg(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn();
    child.map_err(|error| {
        let program = program.display();
        io::Error::new(
            error.kind(),
            format!(
                "{program} does not start: {error}; install redis-server, or run without --redis"
            ),
        )
    })
}

/// Sends one command without arguments, and returns the first line of the answer.
async fn call(address: SocketAddr, command: &str) -> io::Result<String> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        stream
            .write_all(format!("{command}\r\n").as_bytes())
            .await?;
        let mut answer = [0; 64];
        let length = stream.read(&mut answer).await?;
        Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
    };
    timeout(ANSWER, exchange).await?
}

/// How long a server may take to start.
const START: Duration = Duration::from_secs(10);

/// How long a server may take to answer.
const ANSWER: Duration = Duration::from_secs(2);

const PAUSE: Duration = Duration::from_millis(20);
