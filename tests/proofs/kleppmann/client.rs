//! A client of the lock and the storage in its own process, which follows the orders of the test.

#![allow(
    clippy::print_stdout,
    reason = "lines on stdout are what the process answers with"
)]

use std::cell::{Cell, RefCell};
use std::env;
use std::io::Write;
use std::process::ChildStdin;
use std::time::Duration;

use nix::sys::signal::Signal;
use support::{ChildProcess, ms, secs};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::runtime;
use tokio::time::{Instant, sleep};
use tower_redlock::{LockError, LockGuard, Redlock, RestartGuard, Retry};

use crate::kleppmann::scene::micros;
use crate::kleppmann::storage::{Access, Storage};

/// What a client is started with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) ttl: Duration,
    /// For how long a node that lost its memory may not vote; `None` turns the guard off.
    pub(crate) guard: Option<Duration>,
}

/// A client process; killed when dropped.
#[derive(Debug)]
pub(crate) struct Client {
    name: &'static str,
    process: ChildProcess,
    orders: RefCell<ChildStdin>,
    told: Cell<u32>,
}

/// An order that was given and not yet answered.
#[derive(Debug, Clone, Copy)]
#[must_use = "the answer is to be waited for"]
pub(crate) struct Told(u32);

/// A lock that a client got.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Acquired {
    pub(crate) token: u64,
    /// When, in microseconds of the client's wall clock.
    pub(crate) at: u64,
}

/// What became of a write to both registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Written {
    /// What `is_valid()` said right before, of which the write took no notice.
    pub(crate) was_valid: bool,
    /// Whether the register that checks tokens took it; the other one takes all.
    pub(crate) fenced: bool,
}

impl Client {
    /// Starts a client; it is ready for orders, but not connected to its nodes.
    pub(crate) fn start(
        name: &'static str,
        urls: &[String],
        setup: Setup,
        storage: &Storage,
        envs: &[(&str, &str)],
    ) -> Self {
        let guard = setup.guard.unwrap_or_default();
        let (urls, addr) = (urls.join(","), storage.addr().to_string());
        let [ttl, guard] = [setup.ttl, guard].map(|time| time.as_millis().to_string());
        let mut all = vec![
            (NAME, name),
            (URLS, &*urls),
            (STORAGE, &*addr),
            (TTL_MS, &*ttl),
            (GUARD_MS, &*guard),
        ];
        all.extend_from_slice(envs);
        let program = env::current_exe().expect("a test knows its own path");
        let args = "kleppmann::client_process --exact --ignored --nocapture";
        let args: Vec<_> = args.split(' ').collect();
        let (process, stdin) = ChildProcess::start_to_talk(program, &args, &all);
        Self {
            name,
            process,
            orders: RefCell::new(stdin),
            told: Cell::new(0),
        }
    }

    /// Starts two clients of the same nodes, and waits until they may count on the votes of all.
    pub(crate) fn start_two(urls: &[String], setup: Setup, storage: &Storage) -> [Self; 2] {
        let two = ["one", "two"].map(|name| Self::start(name, urls, setup, storage, &[]));
        two.iter()
            .for_each(|client| client.wait_until_up(urls.len()));
        two
    }

    /// Waits until the client may count on the votes of `nodes` nodes.
    #[track_caller]
    pub(crate) fn wait_until_up(&self, nodes: usize) {
        self.ask(&format!("up {nodes}"));
    }

    /// Tries to get the lock once.
    #[track_caller]
    pub(crate) fn try_lock(&self) -> Option<Acquired> {
        let told = self.keep_trying(Duration::ZERO);
        self.acquired(told)
    }

    /// Gets the lock, or fails the test.
    #[track_caller]
    pub(crate) fn lock(&self) -> Acquired {
        let told = self.keep_trying(PATIENCE);
        self.acquired(told).expect("the lock is there to be had")
    }

    /// Lets the client try again and again for the lock.
    pub(crate) fn keep_trying(&self, patience: Duration) -> Told {
        self.tell(&format!("lock {}", patience.as_millis()))
    }

    #[track_caller]
    pub(crate) fn acquired(&self, told: Told) -> Option<Acquired> {
        let answer = self.answer(told);
        let (token, at) = answer.strip_prefix("acquired ")?.split_once(' ')?;
        let number = |text: &str| text.parse().expect("a number");
        Some(Acquired {
            token: number(token),
            at: number(at),
        })
    }

    /// Returns until when the client may rely on its lock, by its own wall clock, if it may now.
    #[track_caller]
    pub(crate) fn valid_until(&self) -> Option<u64> {
        self.ask("holds").parse().ok()
    }

    /// Reads both registers, as the first half of an update.
    #[track_caller]
    pub(crate) fn read(&self) {
        self.ask("read");
    }

    /// Adds the client's name to what it has read and writes that back, whatever has happened since.
    #[track_caller]
    pub(crate) fn write(&self) -> Written {
        let told = self.begin_write();
        self.written(told)
    }

    pub(crate) fn begin_write(&self) -> Told {
        self.tell("write")
    }

    #[track_caller]
    pub(crate) fn written(&self, told: Told) -> Written {
        let answer = self.answer(told);
        Written {
            was_valid: answer.contains("valid"),
            fenced: answer.contains("taken"),
        }
    }

    #[track_caller]
    pub(crate) fn release(&self) {
        self.ask("release");
    }

    /// Stops the process, as a long pause of its collector or its hypervisor would.
    #[track_caller]
    pub(crate) fn pause(&self) {
        self.process.signal(Signal::SIGSTOP);
    }

    #[track_caller]
    pub(crate) fn go_on(&self) {
        self.process.signal(Signal::SIGCONT);
    }

    #[track_caller]
    fn ask(&self, order: &str) -> String {
        let told = self.tell(order);
        self.answer(told)
    }

    fn tell(&self, order: &str) -> Told {
        let number = self.told.get() + 1;
        self.told.set(number);
        let line = format!("{number} {order}\n");
        let sent = self.orders.borrow_mut().write_all(line.as_bytes());
        sent.expect("the process reads its orders until it is killed");
        Told(number)
    }

    #[track_caller]
    fn answer(&self, Told(number): Told) -> String {
        let mark = format!("#{number} ");
        let line = self.process.wait_for_line(&mark, PATIENCE);
        let (_, answer) = line.split_once(&mark).expect("the line has it");
        assert!(!answer.starts_with('!'), "{}: {answer}", self.name);
        answer.to_owned()
    }
}

/// What runs in the client's process.
struct Worker {
    name: String,
    redlock: Redlock,
    storage: Access,
    guard: Option<LockGuard>,
    /// What was read of the register that checks tokens and of the other one.
    seen: (String, String),
}

/// Obeys orders from stdin until it ends; does nothing unless it was started by [`Client::start`].
pub(crate) fn run_worker() {
    let Ok(name) = env::var(NAME) else { return };
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(obey(Worker::new(name)));
}

async fn obey(mut worker: Worker) {
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = orders.next_line().await {
        let (number, order) = line.split_once(' ').expect("orders are numbered");
        let answer = worker.obey(order).await;
        // At the beginning of a line, whatever the test runner has printed before.
        println!("\n#{number} {answer}");
    }
}

impl Worker {
    fn new(name: String) -> Self {
        let var = |name| env::var(name).expect("the client was started with it");
        let millis = |name| ms(var(name).parse().expect("a number"));
        let (ttl, guard) = (millis(TTL_MS), millis(GUARD_MS));
        let guard = match guard {
            Duration::ZERO => RestartGuard::Off,
            window => RestartGuard::For(window),
        };
        let redlock = Redlock::builder()
            .urls(var(URLS).split(','))
            .ttl(ttl)
            // Long, because a busy machine makes healthy nodes late.
            .node_timeout((ttl / 2).min(ms(500)))
            .retry(Retry::new(ms(1), ms(8)))
            .restart_guard(guard)
            .build()
            .expect("the settings are valid");
        Self {
            name,
            redlock,
            storage: Access::open(&var(STORAGE)),
            guard: None,
            seen: <(String, String)>::default(),
        }
    }

    async fn obey(&mut self, order: &str) -> String {
        let (order, argument) = order.split_once(' ').unwrap_or((order, "0"));
        let argument: u32 = argument.parse().expect("arguments are numbers");
        let time = ms(argument.into());
        match order {
            "up" => self.wait_until_up(argument).await,
            "lock" => self.keep_trying(time).await,
            "holds" => match self.valid_until() {
                Some(at) => at.to_string(),
                None => "no".into(),
            },
            "read" => self.read(),
            "write" => self.write(),
            "release" => self.release().await,
            _ => format!("! no order: {order}"),
        }
    }

    async fn wait_until_up(&self, nodes: u32) -> String {
        let deadline = Instant::now() + PATIENCE / 2;
        loop {
            let health = self.redlock.health().await;
            if u32::try_from(health.up()).is_ok_and(|up| up >= nodes) {
                return "up".into();
            }
            if Instant::now() >= deadline {
                return format!("! {nodes} nodes are not up: {health:?}");
            }
            sleep(ms(10)).await;
        }
    }

    async fn keep_trying(&mut self, patience: Duration) -> String {
        let deadline = Instant::now() + patience;
        loop {
            match self.redlock.try_lock(KEY).await {
                Ok(guard) => {
                    let at = now();
                    let token = token(&guard);
                    self.guard = Some(guard);
                    return format!("acquired {token} {at}");
                }
                Err(LockError::Contended { .. } | LockError::Unavailable { .. }) => {}
                Err(error) => return format!("! {error}"),
            }
            if Instant::now() >= deadline {
                return "refused".into();
            }
            sleep(ms(2)).await;
        }
    }

    fn valid_until(&self) -> Option<u64> {
        // Before the look: then a pause in between makes the promise seem shorter, never longer.
        let now = now();
        let left = self.holding().valid_for();
        (!left.is_zero()).then(|| now + micros(left))
    }

    fn read(&mut self) -> String {
        self.seen = (self.storage.read_fenced(), self.storage.read_plain());
        "read".into()
    }

    fn write(&mut self) -> String {
        let guard = self.holding();
        let (was_valid, token) = (guard.is_valid(), token(guard));
        let new = |seen: &str| format!("{seen}{} ", self.name);
        let (fenced, plain) = (new(&self.seen.0), new(&self.seen.1));
        let taken = self.storage.write_fenced(token, &fenced);
        self.storage.write_plain(&plain);
        let valid = if was_valid { "valid" } else { "over" };
        format!("{valid} {}", if taken { "taken" } else { "refused" })
    }

    async fn release(&mut self) -> String {
        let guard = self.guard.take().expect("orders are in order");
        match guard.release().await {
            Ok(_) => "released".into(),
            Err(error) => format!("not released in order: {error}"),
        }
    }

    fn holding(&self) -> &LockGuard {
        self.guard.as_ref().expect("orders are in order")
    }
}

fn token(guard: &LockGuard) -> u64 {
    let token = guard.fencing_token();
    token.expect("fencing is on").as_u64()
}

/// Returns what the clock on the wall says, which is one for all processes that it is not faked in.
#[allow(
    clippy::disallowed_types,
    reason = "the monotonic clocks of two processes cannot be compared through std"
)]
fn now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    micros(now.expect("it is after 1970"))
}

/// The one key that all tests are about.
pub(crate) const KEY: &str = "account";

const NAME: &str = "KLEPPMANN_NAME";
const URLS: &str = "KLEPPMANN_URLS";
const STORAGE: &str = "KLEPPMANN_STORAGE";
const TTL_MS: &str = "KLEPPMANN_TTL_MS";
const GUARD_MS: &str = "KLEPPMANN_GUARD_MS";

const PATIENCE: Duration = secs(40);
