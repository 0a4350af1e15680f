//! Executions with broken leases that left different outcomes: detected, counted and logged.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use support::{Answer, Executed, Log, ms, once, recorded, secs, set_all};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tower_redlock::Redlock;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

use crate::payments::pay_for;

/// What was counted and what was said while a test ran.
struct Told {
    counters: BTreeMap<String, u64>,
    log: String,
}

impl Told {
    fn by(test: impl Future<Output = ()>) -> Self {
        let (log, _guard) = Log::subscribed();
        let counters = recorded(test);
        let log = log.text();
        Self { counters, log }
    }

    fn conflicts(&self) -> u64 {
        self.counters["redlock_conflicts_total{}"]
    }

    /// Returns how loud it was said that something was executed more than once, each time.
    fn alarms(&self) -> Vec<&str> {
        let lines = self.log.lines();
        let alarms = lines.filter(|line| line.contains("was executed"));
        let levels = alarms.filter_map(|line| line.split_whitespace().nth(1));
        levels.collect()
    }
}

/// Three servers over three nodes, of which every payment takes until a certain moment.
struct Scene {
    nodes: ScriptedNodes,
    servers: [Router; 3],
    executed: Executed,
    end: Instant,
}

impl Scene {
    /// The payments of the first server end the latest, and those of the others so much earlier.
    fn new(earlier: [Duration; 3]) -> Self {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let end = Instant::now() + secs(20);
        let servers = earlier.map(|earlier| {
            let redlock = Redlock::builder().scripted(&nodes).ttl(TTL);
            let layer = once(&redlock.build().unwrap());
            let executed = executed.clone();
            let pay = post(async move || {
                let number = executed.one_more();
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
        set_all(&self.nodes, OpKind::Confirm, Gate::Failing);
    }

    /// Sends a payment of each amount to a server of its own, the second when the broken lease of the first has expired.
    async fn pay_one_after_another(&self, amounts: [&'static str; 2]) -> [Answer; 2] {
        self.break_leases();
        let first = tokio::spawn(pay_amount(self.servers[0].clone(), amounts[0]));
        sleep(2 * TTL).await;
        let second = tokio::spawn(pay_amount(self.servers[1].clone(), amounts[1]));
        [first.await.unwrap(), second.await.unwrap()]
    }

    /// Lets each server in its turn send a payment, which one of the nodes reads only when the locks of
    /// all have expired that were not renewed; so each is the last to be granted the key there.
    async fn pay_everywhere(&self) -> Vec<JoinHandle<Answer>> {
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
        set_all(&self.nodes, OpKind::Record, Gate::Slow(ms(10)));
        paying
    }
}

async fn pay(server: Router) -> Answer {
    pay_amount(server, "").await
}

async fn pay_amount(server: Router, amount: &'static str) -> Answer {
    pay_for(&server, "/payments", "a", amount).await
}

// Rules: once.conflict, outcome-unknown
#[test]
fn outcomes_without_a_majority_are_a_conflict_for_every_duplicate() {
    let told = Told::by(async {
        let scene = Scene::new([Duration::ZERO; 3]);
        scene.break_leases();
        for paid in scene.pay_everywhere().await {
            let paid = paid.await.unwrap();
            assert_eq!(paid.status, 200);
            assert_eq!(paid.headers["idempotency-recorded"], "false");
        }
        assert_eq!(scene.executed.count(), 3);
        for server in &scene.servers {
            let refused = pay(server.clone()).await;
            assert_eq!(refused.status, 409);
            assert_eq!(refused.code(), "conflicting-outcomes");
        }
        assert_eq!(scene.executed.count(), 3);
    });
    assert_eq!(told.counters["redlock_unrecorded_total{}"], 3);
    assert_eq!(told.conflicts(), 3, "{:?}", told.counters);
    assert_eq!(told.alarms(), ["ERROR"; 3], "{}", told.log);
}

/// And that of another request is an error.
#[test]
fn late_second_outcome_is_a_conflict_for_its_executor() {
    for (amounts, code, alarm) in [
        (["", ""], "", "WARN"),
        (["5", "7"], "conflicting-outcomes", "ERROR"),
    ] {
        let told = Told::by(async {
            let scene = Scene::new([Duration::ZERO, TTL, TTL]);
            let [first, second] = scene.pay_one_after_another(amounts).await;
            assert_eq!([first.code(), second.code()], [code, ""]);
            let replayed = [first.is_replayed(), second.is_replayed()];
            assert_eq!(replayed, [code.is_empty(), false]);
            let third = pay_amount(scene.servers[2].clone(), amounts[1]).await;
            assert!(third.is_replayed(), "{third:?}");
            assert_eq!(scene.executed.count(), 2);
        });
        assert_eq!(told.conflicts(), 1, "{:?}", told.counters);
        assert_eq!(told.alarms(), [alarm], "{}", told.log);
    }
}

/// The same, but for the renewals.
#[test]
fn unbroken_leases_leave_one_outcome_and_no_conflict() {
    let told = Told::by(async {
        let scene = Scene::new([Duration::ZERO; 3]);
        let mut paying = scene.pay_everywhere().await.into_iter();
        let paid = paying.next().unwrap().await.unwrap();
        assert_eq!((paid.status.as_u16(), paid.code()), (200, ""));
        assert!(!paid.headers.contains_key("idempotency-recorded"));
        for refused in paying {
            assert_eq!(refused.await.unwrap().code(), "request-in-progress");
        }
        for server in &scene.servers {
            assert!(pay(server.clone()).await.is_replayed());
        }
        assert_eq!(scene.executed.count(), 1);
    });
    assert_eq!((told.conflicts(), told.alarms()), (0, Vec::new()));
}

const TTL: Duration = secs(1);
