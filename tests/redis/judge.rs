//! A judge: other processes tell it when they begin and end what few may do at a time.
//!
//! A process tells it that it has begun after it got its lock, and that it ends before it releases it, and waits for
//! the judge's answer both times. So whatever the judge sees at the same time was held at the same time.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::ChildProcess;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

/// Says to a child which of the programs in this file to run.
pub(crate) const ROLE: &str = "JUDGED_ROLE";

/// Says to a child where the judge is, and the urls of the nodes.
pub(crate) const JUDGE: &str = "JUDGED_BY";
pub(crate) const URLS: &str = "JUDGED_URLS";

/// What the judge has seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Who is inside, by the name that it told.
    pub(crate) inside: Vec<String>,
    /// The most at a time.
    pub(crate) most: usize,
    /// How often each began.
    pub(crate) begun: BTreeMap<String, usize>,
    /// When each began, its name, and when it ended.
    pub(crate) turns: Vec<(Instant, String, Option<Instant>)>,
    /// The time during which so many were inside, summed up.
    area: Duration,
    changed: Option<Instant>,
}

/// A judge, which listens until it is dropped.
#[derive(Debug)]
pub(crate) struct Judge {
    pub(crate) addr: SocketAddr,
    pub(crate) seen: Arc<Mutex<Seen>>,
    listening: tokio::task::JoinHandle<()>,
}

impl Judge {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let all = Arc::clone(&seen);
        let listening = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(judge(stream, Arc::clone(&all)));
            }
        });
        Self {
            addr,
            seen,
            listening,
        }
    }

    /// Starts a process with a role, which the judge watches.
    pub(crate) fn start_process(&self, role: &str, entry: &str, urls: &[String]) -> ChildProcess {
        let program = std::env::current_exe().unwrap();
        let (judge, urls) = (self.addr.to_string(), urls.join(","));
        let envs = [(ROLE, role), (JUDGE, judge.as_str()), (URLS, urls.as_str())];
        ChildProcess::start(
            program,
            &[entry, "--exact", "--ignored", "--nocapture"],
            &envs,
        )
    }

    /// Returns how many were inside on average from `from` to now, in hundredths.
    pub(crate) fn average(&self, from: Instant) -> u128 {
        let mut seen = self.seen.lock().unwrap();
        seen.count_area();
        100 * seen.area.as_micros() / from.elapsed().as_micros()
    }
}

impl Drop for Judge {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl Seen {
    /// Forgets what has ended.
    pub(crate) fn restart(&mut self) {
        self.begun.clear();
        self.turns.retain(|(_, _, end)| end.is_none());
        self.area = Duration::ZERO;
        self.changed = Some(Instant::now());
    }

    fn count_area(&mut self) {
        let now = Instant::now();
        let since = self.changed.replace(now).unwrap_or(now);
        self.area += (now - since) * u32::try_from(self.inside.len()).unwrap();
    }

    fn begin(&mut self, name: &str) {
        self.count_area();
        self.inside.push(name.to_owned());
        self.most = self.most.max(self.inside.len());
        *self.begun.entry(name.to_owned()).or_default() += 1;
        self.turns.push((Instant::now(), name.to_owned(), None));
    }

    fn end(&mut self, name: &str) {
        self.count_area();
        if let Some(place) = self.inside.iter().position(|inside| inside == name) {
            self.inside.swap_remove(place);
            let mut turns = self.turns.iter_mut().rev();
            let turn = turns.find(|(_, of, end)| of == name && end.is_none());
            turn.unwrap().2 = Some(Instant::now());
        }
    }
}

/// Takes `begin NAME` and `end NAME` of one connection. What was begun ends with the connection, as its process does.
async fn judge(stream: TcpStream, seen: Arc<Mutex<Seen>>) {
    stream.set_nodelay(true).unwrap();
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    let mut open: Vec<String> = Vec::new();
    while let Ok(Some(line)) = lines.next_line().await {
        let (what, name) = line.split_once(' ').unwrap();
        if what == "begin" {
            seen.lock().unwrap().begin(name);
            open.push(name.to_owned());
        } else {
            seen.lock().unwrap().end(name);
            open.retain(|open| open != name);
        }
        if write.write_all(b"seen\n").await.is_err() {
            break;
        }
    }
    for name in open {
        seen.lock().unwrap().end(&name);
    }
}

/// Tells the judge that something begins, and when it is dropped that it ends. Blocks for a moment each time, so that the
/// judge knows of the end before the lock is released.
#[derive(Debug)]
pub(crate) struct Inside {
    stream: std::io::BufReader<std::net::TcpStream>,
    name: String,
}

impl Inside {
    pub(crate) fn begin(name: &str) -> Self {
        let stream = std::net::TcpStream::connect(std::env::var(JUDGE).unwrap()).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut inside = Self {
            stream: std::io::BufReader::new(stream),
            name: name.to_owned(),
        };
        inside.tell("begin").unwrap();
        inside
    }

    fn tell(&mut self, what: &str) -> std::io::Result<usize> {
        let line = format!("{what} {}\n", self.name);
        self.stream.get_mut().write_all(line.as_bytes())?;
        self.stream.read_line(&mut String::new())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // The judge may have ended.
        drop(self.tell("end"));
    }
}

/// The urls of the nodes of this process.
pub(crate) fn urls() -> Vec<String> {
    let urls = std::env::var(URLS).unwrap();
    urls.split(',').map(str::to_owned).collect()
}
