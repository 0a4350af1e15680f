//! What a real server does, by its own `MONITOR`: each script call, and the commands inside it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::board::{Board, Reach};
use crate::events::lock;
use crate::{NODES, TTL};

/// What the monitors of all nodes know together.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The server of the bank behind a connection, by the node and the port of the connection.
    connections: HashMap<(usize, u16), usize>,
    /// The latest owners, each of which is one attempt.
    owners: VecDeque<String>,
}

/// Watches one node.
#[derive(Debug)]
pub(crate) struct Monitor {
    node: usize,
    address: SocketAddr,
    board: Arc<Board>,
    seen: Arc<Mutex<Seen>>,
    /// The call whose inner commands are being read.
    call: Option<Call>,
}

#[derive(Debug)]
struct Call {
    server: usize,
    keys: Vec<String>,
    owner: String,
    inner: Vec<Vec<String>>,
}

impl Seen {
    pub(crate) fn connected(&mut self, node: usize, port: u16, server: usize) {
        self.connections.insert((node, port), server);
    }

    /// Returns whether an owner is seen for the first time.
    fn is_new(&mut self, owner: &str) -> bool {
        if self.owners.iter().any(|known| known == owner) {
            return false;
        }
        self.owners.truncate(MAX_OWNERS);
        self.owners.push_front(owner.to_owned());
        true
    }
}

impl Monitor {
    pub(crate) fn new(
        node: usize,
        address: SocketAddr,
        board: &Arc<Board>,
        seen: &Arc<Mutex<Seen>>,
    ) -> Self {
        Self {
            node,
            address,
            board: Arc::clone(board),
            seen: Arc::clone(seen),
            call: None,
        }
    }

    pub(crate) async fn run(mut self) {
        loop {
            // Ends when the server is killed.
            drop(self.watch().await);
            self.call = None;
            sleep(Duration::from_millis(50)).await;
        }
    }

    async fn watch(&mut self) -> io::Result<()> {
        let mut stream = TcpStream::connect(self.address).await?;
        stream.write_all(b"MONITOR\r\n").await?;
        let mut lines = BufReader::new(stream).lines();
        loop {
            let next = if self.call.is_some() {
                timeout(QUIET, lines.next_line()).await
            } else {
                Ok(lines.next_line().await)
            };
            match next {
                Err(_) => self.finish(),
                Ok(line) => match line? {
                    Some(line) => self.read(&line),
                    None => return Ok(()),
                },
            }
        }
    }

    /// Reads a line such as `+1700000000.000000 [0 127.0.0.1:40000] "EVALSHA" "…" "3" …`.
    fn read(&mut self, line: &str) {
        let Some((head, command)) = line.split_once("] ") else {
            return;
        };
        let words = command.trim_matches('"').split("\" \"");
        let words: Vec<String> = words.map(str::to_owned).collect();
        let from = head.rsplit(' ').next().unwrap_or_default();
        if from == "lua" {
            if let Some(call) = &mut self.call {
                call.inner.push(words);
            }
            return;
        }
        self.finish();
        let port = from.rsplit(':').next().and_then(|port| port.parse().ok());
        let server = port.and_then(|port| {
            lock(&self.seen)
                .connections
                .get(&(self.node, port))
                .copied()
        });
        let (Some(server), Some(name)) = (server, words.first()) else {
            return;
        };
        if name.eq_ignore_ascii_case("evalsha") {
            let count: usize = words
                .get(2)
                .and_then(|count| count.parse().ok())
                .unwrap_or(0);
            let keys: Vec<_> = words.iter().skip(3).take(count).cloned().collect();
            let owner = words.get(3 + count).cloned().unwrap_or_default();
            // The call that reads the generation of the memory has no lock.
            if keys.first().is_some_and(|key| key.contains('{')) {
                self.call = Some(Call {
                    server,
                    keys,
                    owner,
                    inner: Vec::new(),
                });
            }
        } else if name.eq_ignore_ascii_case("set") && words.len() > 3 {
            self.read_plain_lock(server, &words);
        }
    }

    /// Reads the lock of a client without fencing and without a restart guard, which is one `SET … NX PX`.
    fn read_plain_lock(&mut self, server: usize, words: &[String]) {
        let (lock_name, owner) = (&words[1], &words[2]);
        let granted =
            !self.board.is_held(self.node) || lock_name.as_bytes() != &*self.board.account;
        self.show_unreached(server, owner);
        self.show(server, "acquire", if granted { "granted" } else { "held" });
        if granted && lock_name.as_bytes() == &*self.board.account {
            self.board.granted(self.node, server, owner, TTL, 0);
        }
    }

    /// Concludes from the commands inside a call what the node answered.
    fn finish(&mut self) {
        let Some(call) = self.call.take() else {
            return;
        };
        let does = |command: &str, key: usize| {
            let key = call.keys.get(key)?;
            let is_it = |words: &&Vec<String>| {
                words[0].eq_ignore_ascii_case(command) && words.get(1) == Some(key)
            };
            call.inner.iter().find(is_it)
        };
        let is_account = call.keys[0].as_bytes() == &*self.board.account;
        let fence = does("set", 1).and_then(|words| words.get(2)?.split(' ').next()?.parse().ok());
        let (kind, answer) = if does("set", 2).is_some() {
            ("record", "stored")
        } else if does("set", 0).is_some() {
            ("acquire", "granted")
        } else if does("del", 0).is_some() || call.keys.len() == 1 {
            ("release", "released")
        } else if fence.is_some() || does("pexpire", 1).is_some() {
            ("confirm", "granted")
        } else if does("pttl", 0).is_some() {
            ("acquire", "held")
        } else if call.inner.len() > 1 {
            ("confirm", "held")
        } else {
            ("acquire", "quarantined")
        };
        if kind == "acquire" {
            self.show_unreached(call.server, &call.owner);
        }
        if is_account {
            match answer {
                "granted" => {
                    let fence = fence.unwrap_or_default();
                    self.board
                        .granted(self.node, call.server, &call.owner, TTL, fence);
                }
                "released" => self.board.released(self.node, &call.owner),
                _ => {}
            }
        }
        self.show(call.server, kind, answer);
    }

    /// Shows the nodes from which an attempt has no vote, at its first vote.
    fn show_unreached(&self, server: usize, owner: &str) {
        if !lock(&self.seen).is_new(owner) {
            return;
        }
        for node in (0..NODES).filter(|node| *node != self.node) {
            let answer = match self.board.reach(node, server) {
                Reach::Broken(_) => "failed",
                Reach::Silent => "silent",
                Reach::Open if self.board.is_quarantined(node) => "quarantined",
                Reach::Open => continue,
            };
            self.board
                .vote(server, node, "acquire", answer, Duration::ZERO);
        }
    }

    fn show(&self, server: usize, kind: &str, answer: &str) {
        let took = self.board.delay(self.node) + Duration::from_millis(1);
        self.board.vote(server, self.node, kind, answer, took);
    }
}

/// How long after its last line a call is over.
const QUIET: Duration = Duration::from_millis(3);

const MAX_OWNERS: usize = 64;
