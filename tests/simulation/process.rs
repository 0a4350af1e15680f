//! A simulated process: a runtime with a clock of its own, a `Redlock`, and users who want locks.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::{Instant, advance, sleep, sleep_until, timeout, timeout_at};
use tower_redlock::protocol::{LockKeys, Namespace};
use tower_redlock::test_util::{SimEnv, SimNetwork, Traces};
use tower_redlock::{Drained, LockGuard, Redlock, RestartGuard, Retry};

use crate::history::{History, LeaseId};
use crate::network::{Line, Network};
use crate::orders::{Customer, Ledger};
use crate::plan::{MAX_TTL, NODE_TIMEOUT, Plan, ms, up_to};
use crate::resize::Step;

/// What all wall clocks show at the beginning, but for the skew of each.
const WALL_EPOCH: Duration = Duration::from_secs(1_700_000_000);

/// How long a drain may take.
const DRAIN: Duration = Duration::from_secs(5);

pub(crate) struct Process {
    index: usize,
    runtime: Option<Runtime>,
    world: SimEnv,
    skew: Duration,
    epoch: Instant,
    sent: Arc<Notify>,
    history: History,
    redlock: Redlock,
    pub(crate) traces: Traces,
    /// How far its clock has come.
    pub(crate) now: Duration,
    users: Vec<oneshot::Receiver<()>>,
    /// Has a permit once the users may begin.
    begin: Arc<Semaphore>,
    drained: Option<oneshot::Receiver<Drained>>,
}

/// What a user needs.
struct User {
    process: usize,
    redlock: Redlock,
    network: Arc<Network>,
    history: History,
    epoch: Instant,
    rng: Rng,
    shares: bool,
}

impl Process {
    pub(crate) fn new(
        plan: &Plan,
        index: usize,
        network: &Arc<Network>,
        history: &History,
        ledger: &Ledger,
        rng: &mut Rng,
    ) -> Self {
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime without I/O needs nothing");
        let mut randomness = rng.fork();
        let mut world = SimEnv::new(move || randomness.u64(..));
        let skew = plan.processes[index].skew;
        world.set_wall_clock(WALL_EPOCH + skew);
        let (sent, entered) = (Arc::new(Notify::new()), runtime.enter());
        let epoch = Instant::now();
        let line = Line {
            network: Arc::clone(network),
            process: index,
            epoch,
            sent: Arc::clone(&sent),
        };
        let line: Arc<dyn SimNetwork> = Arc::new(line);
        let (builder, waits_to_begin) = match &plan.resize {
            None => (Redlock::builder().simulated(plan.nodes.len(), line), false),
            Some(resize) => {
                let step = resize.steps[index];
                (resize.groups(step, &line), step == Step::New)
            }
        };
        let begin = Arc::new(Semaphore::new(usize::from(!waits_to_begin)));
        let traces = Traces::default();
        let redlock = builder
            .ttl(MAX_TTL)
            .node_timeout(NODE_TIMEOUT)
            .renew(plan.processes[index].renews)
            .retry(Retry::default().poll_interval(plan.processes[index].poll_interval))
            .restart_guard(RestartGuard::Off)
            .traces(&traces)
            .build()
            .expect("the settings are valid");
        let users = plan.processes[index].users.iter().map(|wishes| {
            let user = User {
                process: index,
                redlock: redlock.clone(),
                network: Arc::clone(network),
                history: history.clone(),
                epoch,
                rng: rng.fork(),
                shares: plan.shares,
            };
            let (done, is_done) = oneshot::channel();
            let (wishes, starts) = (*wishes, plan.processes[index].starts);
            let begin = Arc::clone(&begin);
            tokio::spawn(async move {
                // Never closed.
                drop(begin.acquire().await);
                sleep(starts).await;
                user.live(wishes).await;
                drop(done);
            });
            is_done
        });
        let mut users: Vec<_> = users.collect();
        for orders in plan.processes[index].customers.iter().copied() {
            let customer = Customer {
                process: index,
                redlock: redlock.clone(),
                network: Arc::clone(network),
                history: history.clone(),
                ledger: ledger.clone(),
                sent: Arc::clone(&sent),
                epoch,
                rng: rng.fork(),
                healthy: plan.healthy,
                nodes: plan.nodes.len(),
            };
            let (done, is_done) = oneshot::channel();
            let starts = plan.processes[index].starts;
            tokio::spawn(async move {
                sleep(starts).await;
                customer.live(orders).await;
                drop(done);
            });
            users.push(is_done);
        }
        drop(entered);
        Self {
            index,
            runtime: Some(runtime),
            world,
            skew,
            epoch,
            sent,
            history: history.clone(),
            redlock,
            traces,
            now: Duration::ZERO,
            users,
            begin,
            drained: None,
        }
    }

    /// Lets the users begin, if they have to wait for that.
    pub(crate) fn begin(&self) {
        if self.begin.available_permits() == 0 {
            self.begin.add_permits(1);
        }
    }

    /// Lets the process run until some instant, or until it sends something.
    pub(crate) fn run_until(&mut self, until: Duration) {
        let (end, sent) = (self.epoch + until, Arc::clone(&self.sent));
        self.run(async move {
            tokio::select! {
                biased;
                () = sent.notified() => {}
                () = sleep_until(end) => {}
            }
        });
    }

    /// Makes the process miss everything until some instant.
    pub(crate) fn skip_to(&mut self, instant: Duration) {
        let missed = instant.saturating_sub(self.now);
        self.run(advance(missed));
    }

    fn run(&mut self, until: impl Future<Output = ()>) {
        let Some(runtime) = &self.runtime else { return };
        self.world.set_wall_clock(WALL_EPOCH + self.skew + self.now);
        let epoch = self.epoch;
        self.now = self.world.enter(|| {
            runtime.block_on(async {
                until.await;
                Instant::now().saturating_duration_since(epoch)
            })
        });
        let _entered = runtime.enter();
        self.history.look(self.index, self.now);
    }

    /// Ends the process without giving it a chance to do anything about it.
    pub(crate) fn kill(&mut self) {
        self.runtime = None;
        self.history.kill(self.index, self.now);
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.runtime.is_some()
    }

    /// Whether all users are done.
    pub(crate) fn is_done(&mut self) -> bool {
        let gone = Err(oneshot::error::TryRecvError::Closed);
        self.users.retain_mut(|user| user.try_recv() != gone);
        self.users.is_empty()
    }

    /// Begins to end the process in order, if that has not begun.
    pub(crate) fn start_drain(&mut self) {
        let Some(runtime) = self.runtime.as_ref().filter(|_| self.drained.is_none()) else {
            return;
        };
        let (tell, drained) = oneshot::channel();
        let redlock = self.redlock.clone();
        runtime.spawn(async move {
            // The receiver is gone once the simulation has failed.
            drop(tell.send(redlock.drain(DRAIN).await));
        });
        self.drained = Some(drained);
    }

    /// Returns what the drain came to, once it is over.
    pub(crate) fn drained(&mut self) -> Option<Drained> {
        self.drained.as_mut()?.try_recv().ok()
    }

    /// Returns the number of its tasks without the one of the home, which lives as long as the service.
    pub(crate) fn tasks(&self) -> usize {
        let alive = |runtime: &Runtime| runtime.metrics().num_alive_tasks().saturating_sub(1);
        self.runtime.as_ref().map_or(0, alive)
    }
}

impl User {
    async fn live(mut self, wishes: usize) {
        for _ in 0..wishes {
            sleep(up_to(&mut self.rng, ms(600))).await;
            let keys: LockKeys = match self.rng.u8(..6) {
                0..=2 => ["x"].into_iter().collect(),
                3 => ["y"].into_iter().collect(),
                _ => ["x", "y"].into_iter().collect(),
            };
            self.lock(keys).await;
        }
    }

    async fn lock(&mut self, keys: LockKeys) {
        let ttl = ms([150, 300, 600, 1_000][self.rng.usize(..4)]);
        let wait = match self.rng.u8(..4) {
            0 => Duration::ZERO,
            _ => up_to(&mut self.rng, ms(2_000)),
        };
        let patience = match self.rng.u8(..6) {
            0 => up_to(&mut self.rng, ms(100)),
            _ => Duration::from_secs(60),
        };
        let mut request = self.redlock.lock_all(keys.as_slice().to_vec());
        let is_shared = self.shares && self.rng.bool();
        if is_shared {
            request = request.shared();
        }
        let asked = self.now();
        let locked = timeout(patience, request.ttl(ttl).wait(wait)).await;
        let now = self.now();
        self.history
            .waited(self.process, asked, wait.min(patience), now);
        match locked {
            Ok(Ok(guard)) => self.hold(guard, ttl, &keys, is_shared, now).await,
            Ok(Err(error)) => {
                self.history
                    .refused(self.process, &keys, asked, now, &error);
            }
            Err(_) => self.history.abandoned(self.process, &keys, asked, now),
        }
    }

    async fn hold(
        &mut self,
        guard: LockGuard,
        ttl: Duration,
        keys: &LockKeys,
        is_shared: bool,
        now: Duration,
    ) {
        assert_eq!(guard.fencing_token().is_none(), is_shared);
        let names = Namespace::default().names(keys, |_| [0; 32]);
        let names = names.expect("the keys are short");
        let attempt = {
            let state = self.network.state();
            state.latest_attempt(self.process, &names, is_shared)
        };
        let attempt = attempt.expect("an attempt came before the lock");
        let lease = self
            .history
            .granted(self.process, keys, &guard, ttl, attempt.began, now);
        self.watch(lease, &guard);
        let holds = match self.rng.u8(..4) {
            0 => up_to(&mut self.rng, ms(2_500)),
            _ => up_to(&mut self.rng, ms(400)),
        };
        if self.rng.u8(..4) == 0 {
            let first = up_to(&mut self.rng, holds);
            sleep(first).await;
            let ttl = up_to(&mut self.rng, MAX_TTL).max(2 * NODE_TIMEOUT);
            let extended = guard.extend(ttl).await;
            self.history.extended(lease, self.now(), ttl, &extended);
            sleep(holds - first).await;
        } else {
            sleep(holds).await;
        }
        self.history.ended(lease, self.now());
        if self.rng.bool() {
            let released = guard.release().await;
            self.history.released(lease, self.now(), &released);
        } else {
            drop(guard);
        }
    }

    /// Notes when the loss of a lock is told, and looks at its validity whenever that would end. A lock in several groups is
    /// valid as long as the first of its leases, so that an extension of one may be worth less than a step of the time.
    fn watch(&self, lease: LeaseId, guard: &LockGuard) {
        let (mut lost, history, epoch) = (guard.lost(), self.history.clone(), self.epoch);
        tokio::spawn(async move {
            let now = || Instant::now().saturating_duration_since(epoch);
            loop {
                let ends = epoch + history.valid_until(lease, now());
                let reason = if ends > Instant::now() {
                    timeout_at(ends, &mut lost).await.ok()
                } else {
                    Some((&mut lost).await)
                };
                if let Some(reason) = reason {
                    history.lost(lease, now(), reason);
                    return;
                }
            }
        });
    }

    fn now(&self) -> Duration {
        Instant::now().saturating_duration_since(self.epoch)
    }
}
