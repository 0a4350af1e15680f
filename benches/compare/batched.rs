//! The ceiling: a lock written by hand without redis-rs, which sends its commands in batches.
//!
//! A lane per node owns a plain TCP connection. Callers queue a job in each lane, and the answer that completes
//! a majority wakes them. A lane sends one script call for all acquisitions that wait and one for all releases,
//! and continues to send while answers are outstanding.
//!
//! It lacks what a library needs: reconnection, time limits, cancellation, renewal, authentication.

use std::collections::VecDeque;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use futures_util::future::poll_fn;
use support::Connection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::yield_now;

use crate::same::{ACQUIRE_FENCED, NODES, RELEASE_FENCED, RETENTION_MS, millis, next_proposal};

/// A hand-written lock service with batches.
#[derive(Clone)]
pub(crate) struct Batched {
    lanes: Arc<[Arc<Lane>]>,
    fencing: bool,
}

/// A held lock: the job that acquired it.
pub(crate) struct BatchedClaim(Arc<Job>);

impl Batched {
    pub(crate) async fn connect(urls: &[String], fencing: bool) -> Self {
        let mut lanes = Vec::with_capacity(urls.len());
        for url in urls {
            lanes.push(Lane::connect(url, fencing).await);
        }
        let lanes = lanes.into();
        Self { lanes, fencing }
    }

    /// Tries every node once, and releases the key if only a minority granted it.
    pub(crate) async fn acquire(&self, key: &str) -> Option<BatchedClaim> {
        let proposal = if self.fencing { next_proposal() } else { 0 };
        let claim = BatchedClaim(Arc::new(Job {
            kind: Kind::Acquire,
            hash: BuildHasherDefault::<DefaultHasher>::default().hash_one(key),
            lock: bulk(&format!("batched:{{{key}}}")),
            fence: bulk(&format!("batched:{{{key}}}:fence")),
            owner: bulk(&format!(
                "{:016x}{:016x}",
                fastrand::u64(..),
                fastrand::u64(..)
            )),
            proposal,
            digits: bulk(&format!("{proposal:016}")),
            votes: Votes::new(self.lanes.len()),
        }));
        if self.ask(&claim.0).await {
            return Some(claim);
        }
        self.release(&claim).await;
        None
    }

    pub(crate) async fn release(&self, BatchedClaim(acquired): &BatchedClaim) -> bool {
        let job = Job {
            kind: Kind::Release,
            hash: acquired.hash,
            lock: acquired.lock.clone(),
            fence: Vec::new(),
            owner: acquired.owner.clone(),
            proposal: 0,
            digits: Vec::new(),
            votes: Votes::new(self.lanes.len()),
        };
        self.ask(&Arc::new(job)).await
    }

    /// Queues a job for all nodes; returns true as soon as a majority answered the same number.
    async fn ask(&self, job: &Arc<Job>) -> bool {
        for lane in self.lanes.iter() {
            lane.push(Arc::clone(job));
        }
        poll_fn(|context| {
            let mut votes = lock(&job.votes);
            match votes.verdict {
                Some(agreed) => Poll::Ready(agreed),
                None => {
                    votes.caller = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// A request to all nodes, with its arguments in the format of the wire.
struct Job {
    kind: Kind,
    /// A hash of the key. A collision only makes a batch shorter.
    hash: u64,
    lock: Vec<u8>,
    fence: Vec<u8>,
    owner: Vec<u8>,
    proposal: u64,
    /// The proposal in digits.
    digits: Vec<u8>,
    votes: Mutex<Votes>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Acquire,
    Release,
}

/// The answers of the nodes to one job.
struct Votes {
    nodes: usize,
    answered: usize,
    /// The numbers of the nodes that did not refuse.
    numbers: [u64; NODES],
    granted: usize,
    most: usize,
    verdict: Option<bool>,
    caller: Option<Waker>,
}

impl Votes {
    fn new(nodes: usize) -> Mutex<Self> {
        Mutex::new(Self {
            nodes,
            answered: 0,
            numbers: [0; NODES],
            granted: 0,
            most: 0,
            verdict: None,
            caller: None,
        })
    }

    /// Counts an answer; returns the caller if the answer decides.
    fn count(&mut self, number: Option<u64>) -> Option<Waker> {
        self.answered += 1;
        if let Some(number) = number {
            self.numbers[self.granted] = number;
            self.granted += 1;
            let known = self.numbers[..self.granted].iter();
            self.most = self
                .most
                .max(known.filter(|known| **known == number).count());
        }
        let majority = self.nodes / 2 + 1;
        if self.verdict.is_none() {
            let possible = self.most + self.nodes - self.answered >= majority;
            self.verdict = match self.most >= majority {
                true => Some(true),
                false if possible => None,
                false => Some(false),
            };
        }
        self.verdict.and_then(|_| self.caller.take())
    }
}

/// The connection of one node.
struct Lane {
    queue: Mutex<VecDeque<Arc<Job>>>,
    filled: Notify,
    fencing: bool,
    scripts: Scripts,
}

/// The hashes of the scripts, in the format of the wire.
struct Scripts {
    acquire_one: Vec<u8>,
    acquire_many: Vec<u8>,
    release_one: Vec<u8>,
    release_many: Vec<u8>,
}

impl Lane {
    /// Connects to a node; the lane ends with the server.
    async fn connect(url: &str, fencing: bool) -> Arc<Self> {
        let addr = url
            .strip_prefix("redis://")
            .and_then(|addr| addr.parse().ok());
        let addr = addr.expect("the harness makes such URLs");
        let mut loading = Connection::open(addr).expect("the server runs");
        let mut load = |code| {
            let hash = loading.call(&["SCRIPT", "LOAD", code]);
            let hash = hash.expect("the server answers");
            bulk(hash.as_str().expect("the server takes scripts"))
        };
        let lane = Arc::new(Self {
            queue: Mutex::default(),
            filled: Notify::new(),
            fencing,
            scripts: Scripts {
                acquire_one: load(ACQUIRE_FENCED),
                acquire_many: load(ACQUIRE_MANY),
                release_one: load(RELEASE_FENCED),
                release_many: load(RELEASE_MANY),
            },
        });
        let stream = TcpStream::connect(addr).await.expect("the server runs");
        stream.set_nodelay(true).expect("TCP supports it");
        tokio::spawn(Arc::clone(&lane).run(stream));
        lane
    }

    fn push(&self, job: Arc<Job>) {
        let mut queue = lock(&self.queue);
        queue.push_back(job);
        if queue.len() == 1 {
            drop(queue);
            self.filled.notify_one();
        }
    }

    async fn run(self: Arc<Self>, mut stream: TcpStream) {
        let (mut reader, mut writer) = stream.split();
        let mut input = Vec::with_capacity(BUFFER);
        let mut output = Vec::with_capacity(BUFFER);
        let mut sent = VecDeque::new();
        loop {
            tokio::select! {
                read = reader.read_buf(&mut input) => {
                    if !read.is_ok_and(|length| length > 0) {
                        return;
                    }
                    take_answers(&mut input, &mut sent);
                }
                () = self.filled.notified() => {}
            }
            if !sent.is_empty() {
                // The node is busy anyway: let more callers add their jobs.
                yield_now().await;
            }
            while self.write_batch(&mut output, &mut sent) {}
            if writer.write_all(&output).await.is_err() {
                return;
            }
            output.clear();
        }
    }

    /// Writes the commands of the jobs that wait; returns false if there are none.
    fn write_batch(&self, output: &mut Vec<u8>, sent: &mut VecDeque<Sent>) -> bool {
        let (mut early, mut acquired, mut late) = (Vec::new(), Vec::new(), Vec::new());
        let mut acquired_keys = Vec::new();
        let mut queue = lock(&self.queue);
        while let Some(job) = queue.front() {
            let jobs = match (job.kind, acquired_keys.contains(&job.hash)) {
                // The script reads all keys before it writes, so that it must not get a key twice.
                (Kind::Acquire, true) => break,
                (Kind::Acquire, false) => {
                    acquired_keys.push(job.hash);
                    &mut acquired
                }
                // A release must not overtake the acquisition of its own lock. The others go first, because
                // they may free keys of this batch.
                (Kind::Release, true) => &mut late,
                (Kind::Release, false) => &mut early,
            };
            if jobs.len() == MOST_JOBS {
                break;
            }
            jobs.extend(queue.pop_front());
        }
        drop(queue);
        let before = sent.len();
        self.write_releases(early, output, sent);
        self.write_acquisitions(acquired, output, sent);
        self.write_releases(late, output, sent);
        sent.len() > before
    }

    fn write_acquisitions(
        &self,
        jobs: Vec<Arc<Job>>,
        output: &mut Vec<u8>,
        sent: &mut VecDeque<Sent>,
    ) {
        let (ttl, retention) = (bulk(&millis().to_string()), bulk(&RETENTION_MS.to_string()));
        if !self.fencing {
            for job in jobs {
                output.extend(b"*6\r\n$3\r\nSET\r\n");
                append(output, [&job.lock, &job.owner]);
                output.extend(b"$2\r\nPX\r\n");
                append(output, [&ttl]);
                output.extend(b"$2\r\nNX\r\n");
                sent.push_back(Sent::Set(job));
            }
            return;
        }
        match jobs.as_slice() {
            [] => return,
            [job] => {
                append_call(output, &self.scripts.acquire_one, 2, 4);
                append(output, [&job.lock, &job.fence, &job.owner, &job.digits]);
                append(output, [&ttl, &retention]);
            }
            jobs => {
                let count = jobs.len();
                append_call(output, &self.scripts.acquire_many, 2 * count, 2 + 2 * count);
                append(output, jobs.iter().map(|job| &job.lock));
                append(output, jobs.iter().map(|job| &job.fence));
                append(output, [&ttl, &retention]);
                append(
                    output,
                    jobs.iter().flat_map(|job| [&job.owner, &job.digits]),
                );
            }
        }
        sent.push_back(Sent::Call(jobs));
    }

    fn write_releases(&self, jobs: Vec<Arc<Job>>, output: &mut Vec<u8>, sent: &mut VecDeque<Sent>) {
        match jobs.as_slice() {
            [] => return,
            [job] => {
                append_call(output, &self.scripts.release_one, 1, 2);
                append(output, [&job.lock, &job.owner]);
                output.extend(b"$1\r\n1\r\n");
            }
            jobs => {
                append_call(output, &self.scripts.release_many, jobs.len(), jobs.len());
                append(output, jobs.iter().map(|job| &job.lock));
                append(output, jobs.iter().map(|job| &job.owner));
            }
        }
        sent.push_back(Sent::Call(jobs));
    }
}

/// A command without an answer yet.
enum Sent {
    Set(Arc<Job>),
    Call(Vec<Arc<Job>>),
}

/// Counts the complete answers, and leaves the rest.
fn take_answers(input: &mut Vec<u8>, sent: &mut VecDeque<Sent>) {
    let mut rest = input.as_slice();
    while let Some((answer, after)) = Answer::parse(rest) {
        rest = after;
        match sent
            .pop_front()
            .expect("the server answers each command once")
        {
            Sent::Set(job) => count(&job, matches!(answer, Answer::Done).then_some(1)),
            Sent::Call(jobs) => {
                for (place, job) in jobs.iter().enumerate() {
                    count(job, answer.number(place, &jobs));
                }
            }
        }
    }
    let used = input.len() - rest.len();
    input.drain(..used);
}

fn count(job: &Job, number: Option<u64>) {
    let caller = lock(&job.votes).count(number);
    if let Some(caller) = caller {
        caller.wake();
    }
}

/// An answer, as far as these commands have different ones.
enum Answer {
    Done,
    Number(u64),
    Numbers(Vec<u64>),
    Refused,
}

impl Answer {
    /// Returns the first answer and the bytes after it, unless it is incomplete.
    fn parse(input: &[u8]) -> Option<(Self, &[u8])> {
        let end = input.iter().position(|byte| *byte == b'\n')? + 1;
        let (line, mut rest) = input.split_at(end);
        let number = || str::from_utf8(line).ok()?.get(1..)?.trim_end().parse().ok();
        let answer = match line[0] {
            b'+' => Self::Done,
            b':' => number().map_or(Self::Refused, Self::Number),
            b'*' => {
                let mut numbers = Vec::new();
                for _ in 0..number()? {
                    let (element, after) = Self::parse(rest)?;
                    rest = after;
                    numbers.push(match element {
                        Self::Number(number) => number,
                        Self::Done | Self::Numbers(_) | Self::Refused => 0,
                    });
                }
                Self::Numbers(numbers)
            }
            // An error, or no value. No command has a string as its answer.
            _ => Self::Refused,
        };
        Some((answer, rest))
    }

    /// Returns what the answer to a call says about one of its jobs.
    fn number(&self, place: usize, jobs: &[Arc<Job>]) -> Option<u64> {
        match (self, jobs) {
            (Self::Number(fence), [job]) if job.kind == Kind::Acquire => Some(*fence),
            (Self::Number(_), jobs) if jobs[place].kind == Kind::Acquire => {
                Some(jobs[place].proposal)
            }
            (Self::Number(_), _) => Some(1),
            // The script for one lock refuses with numbers that are not fences.
            (Self::Numbers(numbers), [_, _, ..]) => numbers.get(place).copied().filter(|n| *n > 0),
            _ => None,
        }
    }
}

/// Writes the beginning of a script call.
fn append_call(output: &mut Vec<u8>, script: &[u8], keys: usize, args: usize) {
    output.extend(format!("*{}\r\n$7\r\nEVALSHA\r\n", 3 + keys + args).as_bytes());
    output.extend(script);
    output.extend(bulk(&keys.to_string()));
}

fn append<'a>(output: &mut Vec<u8>, arguments: impl IntoIterator<Item = &'a Vec<u8>>) {
    for argument in arguments {
        output.extend_from_slice(argument);
    }
}

/// Returns an argument in the format of the wire.
fn bulk(text: &str) -> Vec<u8> {
    format!("${}\r\n{text}\r\n", text.len()).into_bytes()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const ACQUIRE_MANY: &str = include_str!("batched_acquire.lua");
const RELEASE_MANY: &str = include_str!("batched_release.lua");

/// The most jobs of one script call: the server executes nothing else meanwhile.
const MOST_JOBS: usize = 64;

const BUFFER: usize = 1 << 16;
