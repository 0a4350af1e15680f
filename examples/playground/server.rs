//! The two servers of the bank: axum services with the crate's layers, each on a thread and a runtime of its own.
//!
//! A pause blocks that thread, as a garbage collector or a hypervisor would: nothing of the server runs, not even
//! the renewal of its locks.

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::serve::ListenerExt;
use axum::{Json, Router};
use serde_json::json;
use tokio::runtime::{self, Handle};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tower_redlock::{
    Health, IdempotencyLayer, LockHandle, LockOptions, Redlock, RedlockBuilder, RedlockLayer, key,
};

use crate::CALLERS;
use crate::checker::Checker;
use crate::events::lock;
use crate::storage::Storage;

/// One server; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) clock: Arc<WorldClock>,
    redlock: Redlock,
    runtime: Handle,
    /// Dropping it stops the server.
    _stop: oneshot::Sender<()>,
}

/// Stops the world of one server.
#[derive(Debug, Default)]
pub(crate) struct WorldClock {
    state: Mutex<Pause>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Pause {
    asked: Option<Duration>,
    until: Option<Instant>,
    is_over: bool,
}

#[derive(Debug, Clone)]
struct Bank {
    server: usize,
    checker: Arc<Checker>,
    storage: Arc<Storage>,
    clock: Arc<WorldClock>,
}

impl Server {
    pub(crate) fn start(
        server: usize,
        redlock: RedlockBuilder,
        checker: &Arc<Checker>,
        storage: &Arc<Storage>,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let clock = Arc::<WorldClock>::default();
        let bank = Bank {
            server,
            checker: Arc::clone(checker),
            storage: Arc::clone(storage),
            clock: Arc::clone(&clock),
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        // A pause stops the renewal of locks, too.
        let redlock = redlock.runtime(handle.clone()).build()?;
        let observed = redlock.clone();
        thread::Builder::new().spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    served = serve(listener, bank.router(redlock)) => drop(served),
                }
            });
        })?;
        Ok(Self {
            address,
            clock,
            redlock: observed,
            runtime: handle,
            _stop: stop,
        })
    }

    /// Returns what the server knows of its nodes; `None` while it is paused.
    pub(crate) async fn health(&self) -> Option<Health> {
        if self.clock.paused_for().is_some() {
            return None;
        }
        let redlock = self.redlock.clone();
        // On the server's own runtime, to which its connections belong.
        let health = self.runtime.spawn(async move { redlock.health().await });
        timeout(HEALTH, health).await.ok()?.ok()
    }

    /// Pauses the server: in the middle of a handler, if one runs.
    pub(crate) fn pause(&self, duration: Duration) {
        let clock = Arc::clone(&self.clock);
        lock(&clock.state).asked = Some(duration);
        self.runtime.spawn(async move {
            sleep(3 * STEP).await;
            clock.pause_if_asked();
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        lock(&self.clock.state).is_over = true;
        self.clock.changed.notify_all();
    }
}

impl WorldClock {
    /// Returns for how long the server is still paused.
    pub(crate) fn paused_for(&self) -> Option<Duration> {
        let until = lock(&self.state).until?;
        Some(until.saturating_duration_since(Instant::now()))
    }

    /// Blocks the thread, and with it the whole server.
    fn block(&self, duration: Duration) {
        let mut state = lock(&self.state);
        state.until = Some(Instant::now() + duration);
        let waited = self
            .changed
            .wait_timeout_while(state, duration, |pause| !pause.is_over);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.until = None;
    }

    fn pause_if_asked(&self) {
        let asked = lock(&self.state).asked.take();
        if let Some(duration) = asked {
            self.block(duration);
        }
    }
}

impl Bank {
    fn router(self, redlock: Redlock) -> Router {
        let locked = RedlockLayer::new(redlock.clone(), ("account", key::path("id")))
            .options(|parts| LockOptions::default().note(CALLERS[caller_of(&parts.headers)]))
            .expose_holder(true);
        let once = IdempotencyLayer::new(redlock, key::header(CALLER));
        Router::new()
            .route("/accounts/{id}/deposit", post(deposit).layer(locked))
            .route("/payments", post(pay).layer(once))
            .with_state(self)
    }

    /// Does what takes a while between the read and the write.
    async fn work(&self, parameters: &HashMap<String, u64>) {
        let of = |name| {
            let millis = parameters.get(name)?.min(&LONGEST_WORK);
            Some(Duration::from_millis(*millis))
        };
        if let Some(pause) = of("pause_ms") {
            // Not in a future: Kleppmann's pause is between the last check of the lock and the write.
            self.clock.block(pause);
        }
        let end = Instant::now() + of("hold_ms").unwrap_or_default();
        while Instant::now() < end {
            sleep(STEP.min(end - Instant::now())).await;
            self.clock.pause_if_asked();
        }
    }
}

/// Reads the balance, works, and writes the new balance, under the lock of the layer.
async fn deposit(
    State(bank): State<Bank>,
    Query(parameters): Query<HashMap<String, u64>>,
    lock: LockHandle,
    headers: HeaderMap,
) -> Response {
    let caller = caller_of(&headers);
    let token = lock.fencing_token();
    let hold = bank.checker.enter(bank.server, caller, lock);
    let amount = amount_of(&parameters);
    let Ok(read) = bank.storage.read(token) else {
        return stale_token();
    };
    bank.work(&parameters).await;
    let written = bank.storage.deposit(caller, read, amount, token);
    drop(hold);
    match written {
        Ok(balance) => Json(json!({"code": "ok", "balance": balance})).into_response(),
        Err(_) => stale_token(),
    }
}

/// Pays once per idempotency key, which is the layer's work.
async fn pay(
    State(bank): State<Bank>,
    Query(parameters): Query<HashMap<String, u64>>,
    headers: HeaderMap,
) -> Response {
    let amount = amount_of(&parameters);
    let balance = bank.storage.pay(caller_of(&headers), amount);
    let payment = format!("{:08x}", fastrand::u32(..));
    Json(json!({"code": "ok", "payment": payment, "balance": balance})).into_response()
}

fn amount_of(parameters: &HashMap<String, u64>) -> u64 {
    let amount = parameters.get("amount").copied();
    amount.unwrap_or(5).min(LARGEST_AMOUNT)
}

fn stale_token() -> Response {
    (StatusCode::CONFLICT, Json(json!({"code": "stale-token"}))).into_response()
}

fn caller_of(headers: &HeaderMap) -> usize {
    let number = headers
        .get(CALLER)
        .and_then(|caller| caller.to_str().ok()?.parse().ok());
    number.filter(|caller| *caller < CALLERS.len()).unwrap_or(0)
}

async fn serve(listener: TcpListener, router: Router) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let listener = listener.tap_io(|stream| {
        stream.set_nodelay(true).unwrap_or_default();
    });
    axum::serve(listener, router).await
}

/// The header with the number of the caller.
pub(crate) const CALLER: &str = "x-caller";

/// How long a handler sleeps before it looks for a pause.
const STEP: Duration = Duration::from_millis(20);

/// Longer than a health check takes, unless the server is paused during it.
const HEALTH: Duration = Duration::from_secs(2);

/// The longest pause of a handler, in milliseconds.
const LONGEST_WORK: u64 = 10_000;

const LARGEST_AMOUNT: u64 = 1_000_000;
