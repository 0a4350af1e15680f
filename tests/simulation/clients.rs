//! Clients: calls through the layers of the crate, over connections that break, to processes that die.
//!
//! A seed decides what becomes of each message and when each process dies: after any number of steps, of which each
//! request to a node is one. A process that dies stands still for ever: nothing of it reaches a client, a node or the
//! ledger any more, and no destructor runs. The nodes answer at once and keep their memory, because the other
//! simulations have those that do not.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tower::util::BoxCloneService;
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_redlock::client::{IdempotentLayer, RetryLockedLayer};
use tower_redlock::middleware::ReadBody;
use tower_redlock::protocol::Store;
use tower_redlock::test_util::{SimEnv, SimNetwork, SimRequest};
use tower_redlock::{IdempotencyKey, IdempotencyLayer, Redlock, RedlockLayer, key, scope};

use crate::plan::{ms, up_to};
use crate::tally::Tally;

/// How effects are kept from happening twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protection {
    /// By the layer alone, which promises it unless a process dies between an effect and its record.
    Layer,
    /// By `at_most_once`.
    AtMostOnce,
    /// By a unique index on the key, in the transaction of the effect.
    Index,
}

/// What is wrong with the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    /// It draws a key for each attempt.
    KeyPerAttempt,
    /// It takes `outcome-unknown` for a refusal.
    OverlooksFinal,
}

pub(crate) struct CallOutcome {
    pub(crate) story: String,
    pub(crate) counts: Tally,
    pub(crate) violations: Vec<String>,
}

/// Runs the calls of one seed.
pub(crate) fn simulate_calls(seed: u64, protection: Protection, flaw: Flaw) -> CallOutcome {
    let mut rng = Rng::with_seed(seed ^ 0xca11);
    let mut randomness = rng.fork();
    let mut env = SimEnv::new(move || randomness.u64(..));
    env.set_wall_clock(Duration::from_secs(1_700_000_000));
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    let runtime = runtime.expect("a runtime without I/O needs nothing");
    let world = env.enter(|| {
        runtime.block_on(async {
            let world = World::new(rng, protection, flaw);
            world.run().await;
            world
        })
    });
    let state = world.state();
    let mut violations = state.violations.clone();
    for (call, known) in &state.calls {
        let effects = known.effects;
        let is_wrong = match known.claim {
            Claim::Executed => effects != 1,
            // A duplicate that the network makes is another request.
            Claim::NotExecuted => effects != 0 && !known.duplicated,
            Claim::Unknown => effects > 1,
        };
        if effects > 1 || is_wrong {
            violations.push(format!("call {call:?}: {effects} effects, {known:?}"));
        }
    }
    CallOutcome {
        story: state.story.join("\n"),
        counts: state.counts.clone(),
        violations,
    }
}

#[derive(Clone)]
struct World {
    state: Arc<Mutex<State>>,
    nodes: Arc<Mutex<Vec<Store>>>,
    epoch: Instant,
    protection: Protection,
    flaw: Flaw,
}

struct State {
    rng: Rng,
    processes: Vec<Process>,
    calls: BTreeMap<Bytes, Call>,
    /// The keys in the unique index, with the number of the payment.
    index: BTreeMap<IdempotencyKey, usize>,
    payments: usize,
    story: Vec<String>,
    counts: Tally,
    violations: Vec<String>,
}

/// What is known of one call.
#[derive(Debug, Clone, Default)]
struct Call {
    effects: usize,
    duplicated: bool,
    /// Whether nothing befalls its messages any more.
    is_calm: bool,
    /// The client has a final response.
    ended: bool,
    claim: Claim,
}

/// What the end of a call tells its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Claim {
    Executed,
    NotExecuted,
    #[default]
    Unknown,
}

#[derive(Clone)]
struct Process {
    app: BoxCloneService<Request<Full<Bytes>>, Response<Bytes>, Lost>,
    line: Arc<Line>,
}

/// A process, as it ends: its way to the nodes, and how many steps it has left.
#[derive(Debug)]
struct Line {
    nodes: Arc<Mutex<Vec<Store>>>,
    epoch: Instant,
    steps: Mutex<u32>,
    /// Closed when the process dies.
    died: Semaphore,
    /// What is never answered.
    kept: Mutex<Vec<SimRequest>>,
}

impl SimNetwork for Line {
    fn carry(&self, node: usize, request: SimRequest) {
        if self.steps_on() {
            let now = self.epoch.elapsed();
            let reply = lock(&self.nodes)[node].apply(request.command(), now);
            request.answer(Ok(reply));
        } else {
            lock(&self.kept).push(request);
        }
    }
}

impl Line {
    /// Returns whether the process lives to make a step.
    fn steps_on(&self) -> bool {
        let mut left = lock(&self.steps);
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.died.close();
        }
        *left > 0
    }

    /// Makes a step, or none ever again.
    async fn step(&self) {
        if !self.steps_on() {
            pending::<()>().await;
        }
    }

    fn is_dead(&self) -> bool {
        self.died.is_closed()
    }
}

/// The connection was lost.
#[derive(Debug, Clone, Copy)]
struct Lost;

/// What becomes of one attempt.
#[derive(Debug)]
struct Trip {
    there: Duration,
    back: Duration,
    /// After this time the connection is cut; if the server notices, it ends the request.
    cut: Option<(Duration, bool)>,
    /// A second copy arrives after this time.
    duplicate: Option<Duration>,
    arrives: bool,
    response: Arrival,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrival {
    Whole,
    /// The body breaks off.
    Cut,
    Lost,
    /// Neither the response nor an error arrives.
    Silent,
}

impl World {
    fn new(rng: Rng, protection: Protection, flaw: Flaw) -> Self {
        let state = State {
            rng,
            processes: Vec::new(),
            calls: BTreeMap::new(),
            index: BTreeMap::new(),
            payments: 0,
            story: Vec::new(),
            counts: Tally::default(),
            violations: Vec::new(),
        };
        let stores = (0..3).map(|_| Store::default());
        let world = Self {
            state: Arc::new(Mutex::new(state)),
            nodes: Arc::new(Mutex::new(stores.collect())),
            epoch: Instant::now(),
            protection,
            flaw,
        };
        for _ in 0..2 {
            let process = world.process();
            world.state().processes.push(process);
        }
        world
    }

    async fn run(&self) {
        let callers = (0..3).map(|caller| {
            let world = self.clone();
            tokio::spawn(async move {
                for number in 0..2 {
                    let pause = up_to(&mut world.state().rng, ms(2_000));
                    sleep(pause).await;
                    world.call(&format!("{caller}-{number}")).await;
                }
            })
        });
        let callers: Vec<_> = callers.collect();
        for caller in callers {
            caller.await.expect("a caller does not panic");
        }
        // What is still on its way arrives.
        sleep(Duration::from_secs(120)).await;
    }

    /// Makes a call, and if it ends without a known outcome, makes it again once all is well.
    async fn call(&self, id: &str) {
        let (deadline, account, own_key) = {
            let rng = &mut self.state().rng;
            (up_to(rng, Duration::from_secs(40)), rng.u8(..2), rng.bool())
        };
        let mut request = Request::post("/payments").header("x-account", account.to_string());
        if own_key {
            let own: IdempotencyKey = format!("own-{id}").parse().expect("it is a key");
            request = request.extension(own);
        }
        let body = Bytes::from(id.to_owned());
        let request = request
            .body(Full::from(body.clone()))
            .expect("it is a request");
        self.state().calls.insert(body.clone(), Call::default());
        let claim = self.send(&request, deadline).await;
        {
            let mut state = self.state();
            state.counts.count("calls");
            state.call(&body).claim = claim;
        }
        if claim != Claim::Unknown || !own_key {
            return;
        }
        sleep(Duration::from_secs(90)).await;
        // The caller asks what came of it, which is a call of its own.
        {
            let mut state = self.state();
            let call = state.call(&body);
            (call.ended, call.is_calm) = (false, true);
        }
        let claim = self.send(&request, Duration::from_secs(600)).await;
        let mut state = self.state();
        if claim == Claim::Executed {
            state.counts.count("known later");
            state.call(&body).claim = claim;
        } else if self.protection != Protection::AtMostOnce {
            let wrong = format!("call {id} ends as {claim:?} without faults");
            state.violations.push(wrong);
        }
    }

    async fn send(&self, request: &Request<Full<Bytes>>, deadline: Duration) -> Claim {
        let world = self.clone();
        let network = service_fn(move |request| {
            let world = world.clone();
            async move { world.attempt(request).await }
        });
        let client = ServiceBuilder::new()
            .layer(IdempotentLayer::new())
            .layer(RetryLockedLayer::new().attempts(30).deadline(deadline))
            .service(network);
        let began = Instant::now();
        let result = client.oneshot(request.clone()).await;
        let took = began.elapsed();
        let (claim, end) = self.judge(result).await;
        let call = request
            .body()
            .clone()
            .collect()
            .await
            .unwrap_or_default()
            .to_bytes();
        self.say(&call, format_args!("{claim:?} after {took:?}: {end}"));
        if took > deadline + ms(1) {
            let late = format!("call {call:?} took {took:?} of {deadline:?}");
            self.state().violations.push(late);
        }
        claim
    }

    /// Returns what the end of a call says, which must be one of the known ends.
    async fn judge(&self, result: Result<Response<ReadBody<Wire>>, Lost>) -> (Claim, String) {
        let Ok(response) = result else {
            self.state().counts.count("failed");
            return (Claim::Unknown, "lost".to_owned());
        };
        let (head, body) = response.into_parts();
        let body = body.collect().await;
        let is_whole = body.is_ok();
        let body = body
            .map(http_body_util::Collected::to_bytes)
            .unwrap_or_default();
        let code = code_of(&head.headers, &body);
        let end = format!("{} {code} {is_whole}", head.status);
        let mut state = self.state();
        let (claim, what) = match (head.status.as_u16(), code.as_str()) {
            (200, _) if is_whole => (Claim::Executed, "succeeded"),
            (200, _) => (Claim::Executed, "cut"),
            (423, "lock-contended") | (503, "refused") => (Claim::NotExecuted, "refused"),
            (409, "request-in-progress") => (Claim::Unknown, "in progress"),
            (409, "outcome-unknown") => (Claim::Unknown, "unknown"),
            (409, _) if !is_whole => (Claim::Unknown, "cut"),
            (423 | 503, _) if !is_whole => (Claim::NotExecuted, "refused"),
            (504, "deadline-exceeded") => (Claim::Unknown, "late"),
            _ => {
                state.violations.push(format!("no known end: {end}"));
                return (Claim::Unknown, end);
            }
        };
        state.counts.count(what);
        (claim, end)
    }

    /// Sends one request over the network.
    async fn attempt(
        &self,
        request: Request<ReadBody<Full<Bytes>>>,
    ) -> Result<Response<Wire>, Lost> {
        let (mut head, body) = request.into_parts();
        let body = body
            .collect()
            .await
            .map_err(|never| match never {})?
            .to_bytes();
        let trip = self.depart(&mut head.headers, &body);
        let serve = |after| {
            let (world, head, body) = (self.clone(), head.clone(), body.clone());
            tokio::spawn(async move {
                sleep(after).await;
                world
                    .serve(Request::from_parts(head, Full::from(body)))
                    .await
            })
        };
        if let Some(after) = trip.duplicate {
            drop(serve(after));
        }
        let lost = || {
            self.state().counts.count("lost");
            Err(Lost)
        };
        if !trip.arrives {
            sleep(trip.there).await;
            return lost();
        }
        let mut serving = serve(trip.there);
        let answered = match trip.cut {
            Some((after, notices)) => match timeout(after, &mut serving).await {
                Ok(answered) => answered,
                Err(_) => {
                    if notices {
                        serving.abort();
                    }
                    return lost();
                }
            },
            None => serving.await,
        };
        let Ok(Ok(response)) = answered else {
            return lost();
        };
        sleep(trip.back).await;
        match trip.response {
            Arrival::Lost => return lost(),
            Arrival::Silent => pending::<()>().await,
            Arrival::Whole | Arrival::Cut => {}
        }
        Ok(self.arrive(&body, response, trip.response == Arrival::Cut))
    }

    /// Notes that a client sends a body, and draws what becomes of it.
    fn depart(&self, headers: &mut HeaderMap, body: &Bytes) -> Trip {
        let mut state = self.state();
        state.counts.count("attempts");
        if state.call(body).ended {
            let wrong = format!("call {body:?} is sent again after its end");
            state.violations.push(wrong);
        }
        if self.flaw == Flaw::KeyPerAttempt {
            let drawn = format!("\"{}\"", state.counts.of("attempts"));
            let drawn = HeaderValue::try_from(drawn).expect("it is a header value");
            headers.insert("idempotency-key", drawn);
        }
        let trip = match state.call(body).is_calm {
            true => Trip::calm(),
            false => Trip::draw(&mut state.rng),
        };
        if trip.duplicate.is_some() {
            state.counts.count("duplicates");
            state.call(body).duplicated = true;
        }
        drop(state);
        self.say(
            body,
            format_args!("{:?} {trip:?}", headers["idempotency-key"]),
        );
        trip
    }

    /// Notes what response a client gets.
    fn arrive(&self, call: &Bytes, response: Response<Bytes>, is_cut: bool) -> Response<Wire> {
        let (mut head, body) = response.into_parts();
        let code = code_of(&head.headers, &body);
        self.say(
            call,
            format_args!("answered {} {code} {is_cut}", head.status),
        );
        let is_unknown = code == "outcome-unknown";
        let mut state = self.state();
        if head.status.is_success() || (is_unknown && !is_cut) {
            state.call(call).ended = true;
        }
        if self.flaw == Flaw::OverlooksFinal && is_unknown {
            head.status = StatusCode::LOCKED;
        }
        let data = Some(if is_cut {
            body.slice(..body.len() / 2)
        } else {
            body
        });
        Response::from_parts(head, Wire { data, is_cut })
    }

    /// Serves a request, at one of the processes.
    async fn serve(&self, request: Request<Full<Bytes>>) -> Result<Response<Bytes>, Lost> {
        let index = self.state().rng.usize(..2);
        let mut process = self.state().processes[index].clone();
        if process.line.is_dead() {
            if self.state().rng.bool() {
                return Err(Lost);
            }
            process = self.process();
            let mut state = self.state();
            state.counts.count("deaths");
            state.processes[index] = process.clone();
        }
        let died = &process.line.died;
        tokio::select! {
            biased;
            _ = died.acquire() => Err(Lost),
            response = process.app.oneshot(request) => response,
        }
    }

    /// Starts a process.
    fn process(&self) -> Process {
        let steps = {
            let mut state = self.state();
            match state.rng.u8(..3) {
                0 => u32::MAX,
                1 => state.rng.u32(1..20),
                _ => state.rng.u32(1..200),
            }
        };
        let line = Arc::new(Line {
            nodes: Arc::clone(&self.nodes),
            epoch: self.epoch,
            steps: Mutex::new(steps),
            died: Semaphore::new(0),
            kept: Mutex::default(),
        });
        let network: Arc<dyn SimNetwork> = Arc::clone(&line) as _;
        let redlock = Redlock::builder().simulated(3, network).build();
        let redlock = redlock.expect("the settings are valid");
        let once = IdempotencyLayer::new(redlock.clone(), scope::public());
        let once = once.at_most_once(self.protection == Protection::AtMostOnce);
        let account = RedlockLayer::new(redlock, ("account", key::header("x-account")));
        let (world, at) = (self.clone(), Arc::clone(&line));
        let handler = service_fn(move |request: Request<_>| {
            let (world, at) = (world.clone(), Arc::clone(&at));
            async move { Ok::<_, Infallible>(world.pay(request, &at).await) }
        });
        let app = once.layer(account.layer(handler));
        let app = service_fn(move |request: Request<Full<Bytes>>| {
            let app = app.clone();
            async move {
                let Ok(response) = app.oneshot(request).await;
                let (head, body) = response.into_parts();
                let body = body.collect().await.map_err(|_| Lost)?;
                Ok(Response::from_parts(head, body.to_bytes()))
            }
        });
        let app = BoxCloneService::new(app);
        Process { app, line }
    }

    /// The handler: its effect is one payment.
    async fn pay<B>(&self, request: Request<B>, at: &Line) -> Response<Full<Bytes>>
    where
        B: Body<Data = Bytes>,
        B::Error: std::fmt::Debug,
    {
        let key = request.extensions().get::<IdempotencyKey>().cloned();
        let key = key.expect("each request has a key");
        let body = request.into_body().collect().await;
        let call = body.expect("it was read before").to_bytes();
        let (before, after, refuses) = {
            let rng = &mut self.state().rng;
            let longest = ms([20, 500, 6_000][rng.usize(..3)]);
            (up_to(rng, longest), up_to(rng, longest), rng.u8(..8) == 0)
        };
        at.step().await;
        sleep(before).await;
        at.step().await;
        if refuses {
            let mut response = Response::new(Full::from("{\"code\":\"refused\"}"));
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            let headers = response.headers_mut();
            headers.insert("retry-after", HeaderValue::from_static("1"));
            return response;
        }
        let number = self.take_effect(&call, key, at);
        at.step().await;
        sleep(after).await;
        at.step().await;
        Response::new(Full::from(format!("payment {number}")))
    }

    fn take_effect(&self, call: &Bytes, key: IdempotencyKey, at: &Line) -> usize {
        let mut state = self.state();
        let paid = state.index.get(&key).copied();
        if let Some(paid) = paid.filter(|_| self.protection == Protection::Index) {
            return paid;
        }
        state.payments += 1;
        state.counts.count("effects");
        state.call(call).effects += 1;
        let number = state.payments;
        state.index.insert(key, number);
        if self.protection == Protection::Layer {
            // It lives to record what it has done.
            *lock(&at.steps) = u32::MAX;
        }
        drop(state);
        self.say(call, format_args!("payment {number}"));
        number
    }

    fn say(&self, call: &Bytes, what: std::fmt::Arguments<'_>) {
        let now = self.epoch.elapsed();
        let call = String::from_utf8_lossy(call);
        self.state().story.push(format!("{now:?} {call}: {what}"));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn call(&mut self, id: &Bytes) -> &mut Call {
        self.calls.entry(id.clone()).or_default()
    }
}

impl Trip {
    fn calm() -> Self {
        Self {
            there: ms(1),
            back: ms(1),
            cut: None,
            duplicate: None,
            arrives: true,
            response: Arrival::Whole,
        }
    }

    fn draw(rng: &mut Rng) -> Self {
        let delay = |rng: &mut Rng| {
            let longest = ms([5, 5, 200, 3_000, 15_000][rng.usize(..5)]);
            up_to(rng, longest)
        };
        Self {
            there: delay(rng),
            back: delay(rng),
            cut: (rng.u8(..4) == 0).then(|| (delay(rng), rng.bool())),
            duplicate: (rng.u8(..5) == 0).then(|| delay(rng) * rng.u32(1..4)),
            arrives: rng.u8(..8) > 0,
            response: match rng.u8(..16) {
                0..=2 => Arrival::Lost,
                3 => Arrival::Cut,
                4 => Arrival::Silent,
                _ => Arrival::Whole,
            },
        }
    }
}

/// A response body on its way.
#[derive(Debug)]
struct Wire {
    data: Option<Bytes>,
    is_cut: bool,
}

impl Body for Wire {
    type Data = Bytes;
    type Error = Lost;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Lost>>> {
        let data = self.data.take().map(|data| Ok(Frame::data(data)));
        let cut = || std::mem::take(&mut self.is_cut).then_some(Err(Lost));
        Poll::Ready(data.or_else(cut))
    }
}

fn code_of(headers: &HeaderMap, body: &Bytes) -> String {
    let text = String::from_utf8_lossy(body);
    let is_json = text.starts_with('{') || headers.contains_key("retry-after");
    let code = text.split(r#""code":""#).nth(1).filter(|_| is_json);
    let code = code.and_then(|rest| rest.split('"').next());
    code.unwrap_or_default().to_owned()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
