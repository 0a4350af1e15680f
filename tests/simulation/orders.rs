//! Customers: requests over HTTP that must be executed once, and what they are answered.

use std::fmt;
use std::future::Future;
use std::panic::resume_unwind;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep, timeout};
use tower::{Layer, Service, ServiceExt};
use tower_redlock::{IdempotencyLayer, Redlock, scope};

use crate::history::History;
use crate::network::Network;
use crate::plan::{Plan, ms, up_to};
use crate::tally::Tally;

/// How many keys the customers of a simulation use. The second half is executed at most once.
const KEYS: usize = 6;

/// What became of all orders.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Book>>);

#[derive(Debug, Default)]
struct Book {
    executions: Vec<Execution>,
    answers: Vec<Answer>,
    counts: Tally,
}

#[derive(Debug)]
struct Execution {
    key: usize,
    /// When its request was sent.
    asked: Duration,
    had_no_effect: bool,
}

/// A response with the outcome of an execution.
#[derive(Debug)]
struct Answer {
    key: usize,
    at: Duration,
    body: Bytes,
    recorded: bool,
    /// Whether the client that executed was told that a node has a record.
    told: bool,
}

impl Ledger {
    pub(crate) fn counts(&self) -> Tally {
        self.book().counts.clone()
    }

    /// Returns what is wrong.
    pub(crate) fn violations(&self, plan: &Plan) -> Vec<String> {
        let book = self.book();
        let mut found = Vec::new();
        for key in 0..KEYS {
            let of_key = || book.answers.iter().filter(|answer| answer.key == key);
            let mut recorded = of_key().filter(|answer| answer.recorded);
            let Some(first) = recorded.next() else {
                continue;
            };
            if let Some(other) = recorded.find(|other| other.body != first.body) {
                found.push(format!(
                    "two outcomes are answered: {first:?} and {other:?}"
                ));
            }
            let late = |execution: &&Execution| execution.key == key && execution.asked > first.at;
            if let Some(late) = book.executions.iter().find(late) {
                found.push(format!("executed again after {first:?}: {late:?}"));
            }
        }
        for key in KEYS / 2..KEYS {
            let effects = book.executions.iter();
            let effects = effects.filter(|it| it.key == key && !it.had_no_effect);
            if effects.count() > 1 {
                found.push(format!("order-{key} was executed more than once"));
            }
        }
        if plan.healthy {
            // If records do not wait for a connection, all of them may be lost.
            let may_be_lost = |answer: &Answer| !answer.told && !plan.network.records_again;
            let unrecorded = book.answers.iter().filter(|answer| !answer.recorded);
            let unrecorded = unrecorded.filter(|answer| !may_be_lost(answer));
            found.extend(unrecorded.map(|answer| format!("not recorded: {answer:?}")));
        }
        found
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One who sends orders.
pub(crate) struct Customer {
    pub(crate) process: usize,
    pub(crate) redlock: Redlock,
    pub(crate) network: Arc<Network>,
    pub(crate) history: History,
    pub(crate) ledger: Ledger,
    pub(crate) sent: Arc<Notify>,
    pub(crate) epoch: Instant,
    pub(crate) rng: Rng,
    /// Whether nothing but the connections may break.
    pub(crate) healthy: bool,
    pub(crate) nodes: usize,
}

/// What becomes of one order, as drawn before.
#[derive(Debug, Clone)]
struct Work {
    key: usize,
    /// How long the handler is not ready once the key is granted.
    unready: Duration,
    takes: Duration,
    ends: End,
    /// What goes wrong when it ends.
    fault: Trouble,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    /// An answer that is not to be recorded: it had no effect.
    Refused,
    Error,
    Panic,
}

/// What befalls the network.
#[derive(Debug, Clone)]
enum Trouble {
    Nothing,
    /// The connections to these nodes break after a while, one after the other.
    Break(Vec<(Duration, usize)>),
    /// Nothing passes to these nodes for a while.
    CutOff(Vec<usize>, Duration),
    /// Their connections break, and cannot be opened again for a while.
    Away(Vec<usize>, Duration),
}

impl Customer {
    pub(crate) async fn live(mut self, orders: usize) {
        for _ in 0..orders {
            sleep(up_to(&mut self.rng, ms(600))).await;
            self.order().await;
        }
    }

    async fn order(&mut self) {
        let rng = &mut self.rng;
        let key = rng.usize(..KEYS);
        let work = Work {
            key,
            unready: match rng.u8(..3) {
                0 => up_to(rng, ms(100)),
                _ => Duration::ZERO,
            },
            takes: {
                let longest = ms([5, 50, 300][rng.usize(..3)]);
                up_to(rng, longest)
            },
            ends: match rng.u8(..12) {
                0 => End::Refused,
                1 => End::Error,
                2 => End::Panic,
                _ => End::Done,
            },
            fault: Trouble::draw(rng, self.nodes, self.healthy),
        };
        // Renewed in time, if only connections break.
        let shortest = if self.healthy { 400 } else { 150 };
        let ttl = ms([shortest, 400, 700][rng.usize(..3)]);
        let wait = match rng.u8(..3) {
            0 => Duration::ZERO,
            _ => up_to(rng, ms(1_000)),
        };
        let patience = match rng.u8(..4) {
            0 => up_to(rng, ms(40)),
            _ => Duration::from_secs(60),
        };
        let leaving = Trouble::draw(rng, self.nodes, self.healthy);
        let layer = IdempotencyLayer::new(self.redlock.clone(), scope::public());
        let layer = layer.wait(wait).at_most_once(key >= KEYS / 2);
        let layer = layer.ttl(ttl).expect("long enough");
        let asked = self.now();
        let service = layer.layer(self.shop(work, asked));
        let request = Request::post("/orders").header("idempotency-key", name_of(key));
        let request = request.body(Full::<Bytes>::default()).expect("a request");
        let desk = self.desk();
        let call = tokio::spawn(async move {
            let mut call = pin!(service.oneshot(request));
            if let Ok(answer) = timeout(patience, &mut call).await {
                return Some(answer);
            }
            desk.befall(&leaving).await;
            None
        });
        let now = |this: &Self| this.now();
        match call.await {
            Ok(Some(Ok(response))) => {
                let at = now(self);
                self.answered(key, at, response).await;
            }
            Ok(Some(Err(Failed))) | Err(_) => self.count("failed"),
            Ok(None) => self.count("left"),
        }
    }

    async fn answered<B>(&self, key: usize, at: Duration, response: Response<B>)
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: fmt::Debug,
    {
        let (head, body) = response.into_parts();
        let body = body.collect().await.expect("it is whole").to_bytes();
        let has = |name| head.headers.get(name).is_some();
        self.history.say(
            at,
            format_args!(
                "p{} {}: {} {body:?}",
                self.process,
                name_of(key),
                head.status
            ),
        );
        if head.status != StatusCode::OK {
            return self.count("refused");
        }
        let recorded = !has("idempotency-recorded");
        let told = self.network.state().was_told(&name_of(key));
        let mut book = self.ledger.book();
        book.counts.count("answered");
        book.counts
            .add("replayed", usize::from(has("idempotency-replayed")));
        book.counts.add("unrecorded", usize::from(!recorded));
        book.answers.push(Answer {
            key,
            at,
            body,
            recorded,
            told,
        });
    }

    fn count(&self, what: &'static str) {
        self.ledger.book().counts.count(what);
    }

    fn shop(&self, work: Work, asked: Duration) -> Shop {
        Shop {
            desk: self.desk(),
            work,
            asked,
            is_first: true,
            opens: None,
        }
    }

    fn desk(&self) -> Desk {
        Desk {
            process: self.process,
            network: Arc::clone(&self.network),
            history: self.history.clone(),
            ledger: self.ledger.clone(),
            sent: Arc::clone(&self.sent),
            epoch: self.epoch,
        }
    }

    fn now(&self) -> Duration {
        Instant::now().saturating_duration_since(self.epoch)
    }
}

impl Trouble {
    fn draw(rng: &mut Rng, nodes: usize, healthy: bool) -> Self {
        let count = rng.usize(1..=nodes);
        let at = rng.choose_multiple(0..nodes, count);
        match rng.u8(..8) {
            0..=2 => Self::Nothing,
            3 | 4 => {
                let mut breaks = |node| (ms(rng.u64(0..12)), node);
                Self::Break(at.into_iter().map(&mut breaks).collect())
            }
            _ if healthy => Self::Nothing,
            5 => Self::CutOff(at, up_to(rng, ms(1_500))),
            _ => Self::Away(at, up_to(rng, ms(2_500))),
        }
    }
}

/// Where a process sees orders executed.
#[derive(Debug, Clone)]
struct Desk {
    process: usize,
    network: Arc<Network>,
    history: History,
    ledger: Ledger,
    sent: Arc<Notify>,
    epoch: Instant,
}

impl Desk {
    fn now(&self) -> Duration {
        Instant::now().saturating_duration_since(self.epoch)
    }

    async fn befall(&self, trouble: &Trouble) {
        match trouble {
            Trouble::Nothing => {}
            Trouble::Break(breaks) => {
                // Where records are not sent again, what follows a break has to make up for it, which it
                // cannot if the connections break under that too.
                let at_once = !self.network.state().plan.records_again;
                let first = breaks.first().map(|(after, _)| *after);
                for (after, node) in breaks.clone() {
                    let after = first.filter(|_| at_once).unwrap_or(after);
                    let desk = self.clone();
                    tokio::spawn(async move {
                        sleep(after).await;
                        let now = desk.now();
                        let mut state = desk.network.state();
                        state.break_connections(desk.process, &[node], now);
                        drop(state);
                        desk.sent.notify_one();
                    });
                }
            }
            Trouble::CutOff(nodes, lasts) => {
                let now = self.now();
                self.network
                    .state()
                    .cut_off(self.process, nodes, *lasts, now);
            }
            Trouble::Away(nodes, lasts) => {
                let now = self.now();
                let mut state = self.network.state();
                state.cut_off(self.process, nodes, *lasts, now);
                state.break_connections(self.process, nodes, now);
            }
        }
        self.sent.notify_one();
    }
}

/// What executes orders: a service that may have to be waited for once the key is granted.
#[derive(Debug)]
struct Shop {
    desk: Desk,
    work: Work,
    asked: Duration,
    /// Made ready before the nodes are asked.
    is_first: bool,
    opens: Option<Pin<Box<Sleep>>>,
}

/// Clones are not ready, and the one that is called is a clone.
impl Clone for Shop {
    fn clone(&self) -> Self {
        Self {
            desk: self.desk.clone(),
            work: self.work.clone(),
            asked: self.asked,
            is_first: false,
            opens: None,
        }
    }
}

#[derive(Debug)]
struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the handler failed")
    }
}

impl std::error::Error for Failed {}

impl<B> Service<Request<B>> for Shop {
    type Response = Response<Full<Bytes>>;
    type Error = Failed;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Failed>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        if self.is_first || self.work.unready.is_zero() {
            return Poll::Ready(Ok(()));
        }
        let unready = self.work.unready;
        let opens = self.opens.get_or_insert_with(|| Box::pin(sleep(unready)));
        opens.as_mut().poll(context).map(Ok)
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        let (desk, work, asked) = (self.desk.clone(), self.work.clone(), self.asked);
        let now = desk.now();
        let number = {
            let mut book = desk.ledger.book();
            book.counts.count("executed");
            book.executions.push(Execution {
                key: work.key,
                asked,
                had_no_effect: work.ends == End::Refused,
            });
            book.executions.len()
        };
        let key = name_of(work.key);
        let process = desk.process;
        let owner = desk.network.state().on_execution(process, number, &key);
        let say = |what: &str| format!("p{process} execution {number} of {key} {what}");
        desk.history.say(now, format_args!("{}", say("begins")));
        let ends = say(&format!("ends: {:?} {:?}", work.ends, work.fault));
        Box::pin(async move {
            sleep(work.takes).await;
            desk.history.say(desk.now(), format_args!("{ends}"));
            desk.befall(&work.fault).await;
            let status = match work.ends {
                End::Done => StatusCode::OK,
                End::Refused => {
                    desk.network.state().on_no_effect(&owner);
                    StatusCode::INTERNAL_SERVER_ERROR
                }
                End::Error => return Err(Failed),
                // Without a word: the hook would say something for each.
                End::Panic => resume_unwind(Box::new("as planned")),
            };
            let mut response = Response::new(Full::from(format!("execution {number}")));
            *response.status_mut() = status;
            Ok(response)
        })
    }
}

fn name_of(key: usize) -> String {
    format!("order-{key}")
}
