//! A server of payments: in the test's own process, or in one that can be killed.

use std::env;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{self, ChildStdin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, State};
use axum::routing::post;
use nix::sys::signal::Signal;
use support::http::listen;
use support::{Answer, ChildProcess, Cluster, Deadline, ms, request_with, until_all_up};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::runtime;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use tower_redlock::{IdempotencyKey, IdempotencyLayer, Redlock, RestartGuard, Retry, scope};

use crate::crashes::{KEY, PATIENCE, POLL};

/// What servers of the same payments have in common.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) urls: Vec<String>,
    pub(crate) at_most_once: bool,
    pub(crate) ttl: Duration,
    pub(crate) effects: PathBuf,
}

impl Setup {
    pub(crate) fn new(
        cluster: &Cluster,
        effects: &Effects,
        at_most_once: bool,
        ttl: Duration,
    ) -> Self {
        Self {
            urls: cluster.urls(),
            at_most_once,
            ttl,
            effects: effects.path(),
        }
    }
}

/// A file that has a line for every execution; removed when dropped.
#[derive(Debug)]
pub(crate) struct Effects(PathBuf);

impl Effects {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("tower-redlock-effects-{}-{count}", process::id());
        Self(env::temp_dir().join(name))
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.clone()
    }

    /// Returns the key of every execution so far, and the process that executed.
    pub(crate) fn lines(&self) -> Vec<(String, String)> {
        let lines = fs::read_to_string(&self.0).unwrap_or_default();
        let lines = lines.lines().map(|line| line.split_once(' '));
        let lines = lines.map(|line| line.expect("it was written as a whole"));
        lines.map(|(key, who)| (key.into(), who.into())).collect()
    }
}

impl Drop for Effects {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
    }
}

/// What a payment is to do; by default, to be made at once.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
struct Form {
    /// Where to stop and wait until the server is told to go on: `before` its effect, or `after`.
    stop: String,
    before_us: u64,
    after_us: u64,
}

#[derive(Clone)]
struct Bank {
    effects: PathBuf,
    /// Where the server was told to go on.
    go: Arc<Semaphore>,
}

impl Bank {
    async fn pay(self, form: Form, key: IdempotencyKey) -> String {
        self.stop(&form, "before").await;
        sleep(Duration::from_micros(form.before_us)).await;
        self.note(key.as_str());
        self.stop(&form, "after").await;
        sleep(Duration::from_micros(form.after_us)).await;
        format!("payment {:016x} of {}", fastrand::u64(..), process::id())
    }

    async fn stop(&self, form: &Form, at: &str) {
        if form.stop == at {
            // At the beginning of a line, whatever the test runner has printed before.
            println!("\n#{at}");
            let going = self.go.acquire().await;
            going.expect("it is never closed").forget();
        }
    }

    /// In one write at the end of the file: it is there as a whole or not at all.
    fn note(&self, key: &str) {
        let mut file = OpenOptions::new();
        let file = file.create(true).append(true).open(&self.effects);
        let mut file = file.expect("the folder is there");
        let written = file.write_all(format!("{key} {}\n", process::id()).as_bytes());
        written.expect("the disk is not full");
    }
}

/// What a client is told in the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Told {
    Paid {
        body: String,
        replayed: bool,
    },
    /// 409 `outcome-unknown`.
    Unknown,
    /// Nothing is decided: 409 `request-in-progress`.
    Contended,
    /// Too few nodes were in time, or the server itself was not: on a busy machine an execution loses its lock.
    Unavailable,
}

impl Told {
    /// Whether it was paid by this very request.
    pub(crate) fn is_executed(&self) -> bool {
        matches!(self, Self::Paid { replayed, .. } if !replayed)
    }

    /// Returns the response of the payment, if there is one.
    pub(crate) fn body(&self) -> Option<&str> {
        match self {
            Self::Paid { body, .. } => Some(body),
            Self::Unknown | Self::Contended | Self::Unavailable => None,
        }
    }

    #[track_caller]
    pub(crate) fn of(answer: &Answer) -> Self {
        let (body, replayed) = (answer.text(), answer.is_replayed());
        let has = |code: &str| body.contains(&format!("\"code\":\"{code}\""));
        match answer.status.as_u16() {
            200 => Self::Paid { body, replayed },
            409 if has("outcome-unknown") => Self::Unknown,
            409 if has("request-in-progress") => Self::Contended,
            503 if LATE.iter().any(|code| has(code)) => Self::Unavailable,
            status => panic!("{status} {body}"),
        }
    }
}

/// A server in the test's own process, which lives.
#[derive(Debug, Clone)]
pub(crate) struct Survivor(Router);

impl Survivor {
    pub(crate) async fn start(setup: &Setup) -> Self {
        Self(app(setup, Arc::new(Semaphore::new(0))).await)
    }

    async fn pay(&self, key: &str) -> Told {
        let request = request_with("POST", "/payments", &[(KEY, key)]);
        Told::of(&Answer::to(&self.0, request).await)
    }

    /// Sends duplicates until enough nodes are in time.
    pub(crate) async fn pay_in_time(&self, key: &str) -> Told {
        let is_in_time = |told: &Told| *told != Told::Unavailable;
        self.pay_until(key, POLL, is_in_time).await
    }

    /// Sends duplicates until one is told what became of the payment.
    pub(crate) async fn pay_in_the_end(&self, key: &str, pause: Duration) -> Told {
        let is_final = |told: &Told| matches!(told, Told::Paid { .. } | Told::Unknown);
        self.pay_until(key, pause, is_final).await
    }

    async fn pay_until(&self, key: &str, pause: Duration, ends: impl Fn(&Told) -> bool) -> Told {
        let deadline = Deadline::after(PATIENCE);
        loop {
            let told = self.pay(key).await;
            if ends(&told) {
                return told;
            }
            assert!(!deadline.is_over(), "{key}: {told:?} in the end");
            sleep(pause).await;
        }
    }
}

/// A server in a process of its own, which is killed when dropped.
#[derive(Debug)]
pub(crate) struct Victim {
    process: ChildProcess,
    orders: ChildStdin,
    pub(crate) addr: SocketAddr,
}

impl Victim {
    /// Starts it and blocks until it is connected to all nodes.
    pub(crate) fn start(setup: &Setup) -> Self {
        let urls = setup.urls.join(",");
        let ttl = setup.ttl.as_millis().to_string();
        let effects = setup.effects.to_str().expect("the name is plain");
        let mut envs = vec![(URLS, &*urls), (TTL_MS, &*ttl), (EFFECTS, effects)];
        if setup.at_most_once {
            envs.push((AT_MOST_ONCE, "1"));
        }
        let program = env::current_exe().expect("a test knows its own path");
        let args = "crashes::server_process --exact --ignored --nocapture";
        let args: Vec<_> = args.split(' ').collect();
        let (process, orders) = ChildProcess::start_to_talk(program, &args, &envs);
        let line = process.wait_for_line(LISTENING, PATIENCE);
        let addr = line.trim_start_matches(LISTENING).parse();
        Self {
            process,
            orders,
            addr: addr.expect("it is an address"),
        }
    }

    /// Blocks until its payment has stopped where it was to.
    #[track_caller]
    pub(crate) fn wait_until_at(&self, stop: &str) {
        self.process.wait_for_line(&format!("#{stop}"), PATIENCE);
    }

    pub(crate) fn go_on(&mut self) {
        let told = self.orders.write_all(b"go\n");
        told.expect("the process reads its orders until it is killed");
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn kill(&mut self) {
        self.process.signal(Signal::SIGKILL);
        self.process.wait(PATIENCE);
    }
}

/// Serves until stdin ends; does nothing unless it was started by [`Victim::start`].
pub(crate) fn run() {
    let Ok(urls) = env::var(URLS) else { return };
    let var = |name| env::var(name).expect("the server was started with it");
    let setup = Setup {
        urls: urls.split(',').map(str::to_owned).collect(),
        at_most_once: env::var(AT_MOST_ONCE).is_ok(),
        ttl: ms(var(TTL_MS).parse().expect("a number")),
        effects: var(EFFECTS).into(),
    };
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    runtime.block_on(serve(&setup));
}

async fn serve(setup: &Setup) {
    let go = Arc::new(Semaphore::new(0));
    let app = app(setup, Arc::clone(&go)).await;
    let (listener, addr) = listen().await;
    println!("\n{LISTENING}{addr}");
    let orders = async {
        let mut orders = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(_)) = orders.next_line().await {
            go.add_permits(1);
        }
    };
    tokio::select! {
        served = axum::serve(listener, app) => served.expect("axum serves until it is dropped"),
        () = orders => {}
    }
}

/// Makes the service, and waits until it is connected to all nodes.
async fn app(setup: &Setup, go: Arc<Semaphore>) -> Router {
    let redlock = Redlock::builder()
        .urls(&setup.urls)
        .ttl(setup.ttl)
        // Long, because a busy machine makes healthy nodes late.
        .node_timeout(setup.ttl / 2)
        .retry(Retry::new(POLL, 10 * POLL))
        .restart_guard(RestartGuard::Off)
        .build()
        .expect("the settings are valid");
    until_all_up(&redlock, PATIENCE).await;
    let once = IdempotencyLayer::new(redlock, scope::public()).at_most_once(setup.at_most_once);
    let bank = Bank {
        effects: setup.effects.clone(),
        go,
    };
    let pay = async |State(bank): State<Bank>, Query(form), key| bank.pay(form, key).await;
    Router::new()
        .route("/payments", post(pay))
        // Where it is to stop is no part of what is paid.
        .route_layer(once.fingerprint(|_, _| Vec::new()))
        .with_state(bank)
}

/// The codes of refusals for want of time.
const LATE: [&str; 3] = ["lock-unavailable", "lock-expired", "lock-lost"];

const URLS: &str = "CRASHES_URLS";
const TTL_MS: &str = "CRASHES_TTL_MS";
const EFFECTS: &str = "CRASHES_EFFECTS";
const AT_MOST_ONCE: &str = "CRASHES_AT_MOST_ONCE";
const LISTENING: &str = "#listening on ";
