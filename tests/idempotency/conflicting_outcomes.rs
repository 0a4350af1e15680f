//! Executions with broken leases that left different outcomes: detected, counted and logged.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use axum::routing::post;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use support::{ms, secs, subscribe};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tower::ServiceExt;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{IdempotencyLayer, Redlock, Rejection, scope};
use tracing::field::{Field, Visit};
use tracing::{Event, Level};
use tracing_subscriber::layer::{Context, SubscriberExt};

/// What was counted and what was said while a test ran.
struct Told {
    counters: BTreeMap<String, u64>,
    events: Vec<(Level, String)>,
}

impl Told {
    /// Runs a test on a paused clock, with a recorder and a log of its own.
    fn by(test: impl Future<Output = ()>) -> Self {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        let events = Events::default();
        let subscriber = tracing_subscriber::registry().with(events.clone());
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().unwrap();
        let _guard = subscribe(subscriber);
        metrics::with_local_recorder(&recorder, || runtime.block_on(test));
        let counters = snapshotter.snapshot().into_vec().into_iter();
        let counters = counters.filter_map(|(key, _, _, value)| match value {
            DebugValue::Counter(count) => Some((key.key().name().to_owned(), count)),
            DebugValue::Gauge(_) | DebugValue::Histogram(_) => None,
        });
        let mut sums = BTreeMap::new();
        for (name, count) in counters {
            *sums.entry(name).or_default() += count;
        }
        let events = events.0.lock().unwrap().clone();
        Self {
            counters: sums,
            events,
        }
    }

    fn conflicts(&self) -> u64 {
        let counted = self.counters.get("redlock_conflicts_total");
        counted.copied().unwrap_or(0)
    }

    /// Returns how loud it was said that something was executed more than once, each time.
    fn alarms(&self) -> Vec<Level> {
        let events = self.events.iter();
        let alarms = events.filter(|(_, said)| said.contains("was executed"));
        alarms.map(|(level, _)| *level).collect()
    }
}

#[derive(Debug, Clone, Default)]
struct Events(Arc<Mutex<Vec<(Level, String)>>>);

#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Events {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut message = Message::default();
        event.record(&mut message);
        let level = *event.metadata().level();
        self.0.lock().unwrap().push((level, message.0));
    }
}

/// Three servers over three nodes, of which every payment takes until a certain moment.
struct Scene {
    nodes: ScriptedNodes,
    servers: [Router; 3],
    executed: Arc<AtomicUsize>,
    end: Instant,
}

impl Scene {
    /// The payments of the first server end the latest, and those of the others so much earlier.
    fn new(earlier: [Duration; 3]) -> Self {
        let (nodes, executed) = (ScriptedNodes::new(3), Arc::<AtomicUsize>::default());
        let end = Instant::now() + secs(20);
        let servers = earlier.map(|earlier| {
            let redlock = Redlock::builder().scripted(&nodes).ttl(TTL);
            let layer = IdempotencyLayer::new(redlock.build().unwrap(), scope::public());
            let executed = Arc::clone(&executed);
            let pay = post(async move || {
                let number = executed.fetch_add(1, Ordering::SeqCst) + 1;
                sleep_until(end - earlier).await;
                format!("payment {number}")
            });
            Router::new().route("/payments", pay).layer(layer)
        });
        Self {
            nodes,
            servers,
            executed,
            end,
        }
    }

    /// No lease can be renewed: all are broken.
    fn break_leases(&self) {
        (0..3).for_each(|node| self.nodes.set_for(node, OpKind::Confirm, Gate::Failing));
    }

    /// Sends a payment of each amount to a server of its own, the second when the broken lease of the first has expired.
    async fn pay_one_after_another(&self, amounts: [&'static str; 2]) -> [Response<Body>; 2] {
        self.break_leases();
        let first = tokio::spawn(pay_amount(self.servers[0].clone(), amounts[0]));
        sleep(2 * TTL).await;
        let second = tokio::spawn(pay_amount(self.servers[1].clone(), amounts[1]));
        [first.await.unwrap(), second.await.unwrap()]
    }

    /// Lets each server in its turn send a payment, which one of the nodes reads only when the locks of
    /// all have expired that were not renewed; so each is the last to be granted the key there.
    async fn pay_everywhere(&self) -> Vec<JoinHandle<Response<Body>>> {
        let mut paying = Vec::new();
        for (late, server) in self.servers.iter().enumerate() {
            let slow = Gate::Slow(secs(6));
            self.nodes.set_for(late, OpKind::Acquire, slow);
            paying.push(tokio::spawn(pay(server.clone())));
            sleep(TTL + TTL / 2).await;
            self.nodes.set_for(late, OpKind::Acquire, Gate::Ready);
        }
        sleep_until(self.end - 2 * TTL).await;
        // All of them record at the same time: no server sees what another has recorded before it is
        // too late.
        for node in 0..3 {
            let slow = Gate::Slow(ms(10));
            self.nodes.set_for(node, OpKind::Record, slow);
        }
        paying
    }
}

async fn pay(server: Router) -> Response<Body> {
    pay_amount(server, "").await
}

async fn pay_amount(server: Router, amount: &'static str) -> Response<Body> {
    let request = Request::post("/payments").header("idempotency-key", "a");
    let request = request.body(Body::from(amount)).unwrap();
    let Ok(response) = server.oneshot(request).await;
    response
}

fn code(response: &Response<Body>) -> &'static str {
    let rejection = response.extensions().get();
    rejection.map_or("", Rejection::code)
}

// Rules: once.conflict, outcome-unknown
#[test]
fn outcomes_without_a_majority_are_a_conflict_for_every_duplicate() {
    let told = Told::by(async {
        let scene = Scene::new([Duration::ZERO; 3]);
        scene.break_leases();
        for paid in scene.pay_everywhere().await {
            let paid = paid.await.unwrap();
            assert_eq!(paid.status(), 200);
            assert_eq!(paid.headers()["idempotency-recorded"], "false");
        }
        assert_eq!(scene.executed.load(Ordering::SeqCst), 3);
        for server in &scene.servers {
            let refused = pay(server.clone()).await;
            assert_eq!(refused.status(), 409);
            assert_eq!(code(&refused), "conflicting-outcomes");
        }
        assert_eq!(scene.executed.load(Ordering::SeqCst), 3);
    });
    assert_eq!(told.counters["redlock_unrecorded_total"], 3);
    assert_eq!(told.conflicts(), 3, "{:?}", told.counters);
    assert_eq!(told.alarms(), [Level::ERROR; 3], "{:?}", told.events);
}

#[test]
fn late_outcome_of_another_request_is_an_error_for_its_executor() {
    let told = Told::by(async {
        let scene = Scene::new([Duration::ZERO, TTL, TTL]);
        let [first, second] = scene.pay_one_after_another(["5", "7"]).await;
        let codes = [code(&first), code(&second)];
        assert_eq!(codes, ["conflicting-outcomes", ""]);
    });
    assert_eq!(told.conflicts(), 1, "{:?}", told.counters);
    assert_eq!(told.alarms(), [Level::ERROR], "{:?}", told.events);
}

#[test]
fn late_second_outcome_is_a_conflict_for_its_executor() {
    let told = Told::by(async {
        let scene = Scene::new([Duration::ZERO, TTL, TTL]);
        let [first, second] = scene.pay_one_after_another(["", ""]).await;
        assert_eq!([first.status(), second.status()], [200, 200]);
        let replayed = |paid: &Response<Body>| paid.headers().contains_key("idempotency-replayed");
        assert_eq!([replayed(&first), replayed(&second)], [true, false]);
        assert!(replayed(&pay(scene.servers[2].clone()).await));
        assert_eq!(scene.executed.load(Ordering::SeqCst), 2);
    });
    assert_eq!(told.conflicts(), 1, "{:?}", told.counters);
    assert_eq!(told.alarms(), [Level::WARN], "{:?}", told.events);
}

/// The same, but for the renewals.
#[test]
fn unbroken_leases_leave_one_outcome_and_no_conflict() {
    let told = Told::by(async {
        let scene = Scene::new([Duration::ZERO; 3]);
        let mut paying = scene.pay_everywhere().await.into_iter();
        let paid = paying.next().unwrap().await.unwrap();
        assert_eq!((paid.status().as_u16(), code(&paid)), (200, ""));
        assert!(!paid.headers().contains_key("idempotency-recorded"));
        for refused in paying {
            assert_eq!(code(&refused.await.unwrap()), "request-in-progress");
        }
        for server in &scene.servers {
            let replayed = pay(server.clone()).await;
            assert!(replayed.headers().contains_key("idempotency-replayed"));
        }
        assert_eq!(scene.executed.load(Ordering::SeqCst), 1);
    });
    assert_eq!((told.conflicts(), told.alarms()), (0, Vec::new()));
}

const TTL: Duration = secs(1);
