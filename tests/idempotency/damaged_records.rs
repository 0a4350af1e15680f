//! Records that are damaged, truncated, forged, or written by another version or with another encryption key.
//!
//! No such record leads to another execution or to a response that was not recorded.

use std::collections::BTreeSet;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use support::{Answer, Cluster, Connection, Executed, Log, Reply, once, secs, wait_until};
use tower_redlock::idempotency::RecordKeys;
use tower_redlock::protocol::Record;
use tower_redlock::{IdempotencyLayer, Redlock, RestartGuard};

use crate::payments;

/// A service that paid once, and what its nodes kept of it.
struct Scene {
    cluster: Cluster,
    redlock: Redlock,
    app: Router,
    executed: Executed,
    first: Answer,
    name: String,
    record: Vec<u8>,
}

impl Scene {
    async fn new(set: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        let cluster = Cluster::start(3);
        let redlock = Redlock::builder()
            .urls(cluster.urls())
            // A busy machine is no outage.
            .node_timeout(secs(1))
            .restart_guard(RestartGuard::Off)
            .build()
            .expect("the settings are valid");
        let executed = Executed::default();
        let app = app(&redlock, &executed, set);
        let first = pay(&app).await;
        assert_eq!(first.told(), (200, ""));
        wait_until("recorded everywhere", PATIENCE, || {
            cluster.servers.iter().all(|s| !s.keys("*:done").is_empty())
        })
        .await;
        let name = cluster.servers[0].keys("*:done").remove(0);
        let record = connections(&cluster).remove(0).call(&["GET", &name]);
        let Ok(Reply::Bulk(Some(record))) = record else {
            panic!("{record:?}");
        };
        Self {
            cluster,
            redlock,
            app,
            executed,
            first,
            name,
            record,
        }
    }

    /// Puts bytes in the place of the record, at the nodes named.
    fn put(&self, nodes: &[usize], bytes: &[u8]) {
        let mut connections = connections(&self.cluster);
        for node in nodes {
            let set: [&[u8]; 5] = [b"SET", self.name.as_bytes(), bytes, b"PX", b"60000"];
            let set = connections[*node].call_with_bytes(&set);
            assert_eq!(set.expect("it answers").as_str(), Some("OK"));
        }
    }

    /// Puts bytes there, asks again, and returns the answer, which is not that of another execution.
    async fn ask_with(&self, nodes: &[usize], bytes: &[u8]) -> Answer {
        self.put(nodes, bytes);
        let again = pay(&self.app).await;
        self.put(nodes, &self.record);
        assert_eq!(self.executed.count(), 1, "{bytes:?}");
        if again.status == StatusCode::OK {
            assert!(again.is_replayed(), "{bytes:?}");
            assert_eq!(again.body, self.first.body, "{bytes:?}");
        } else {
            assert_ne!(again.code(), "", "{again:?} with {bytes:?}");
        }
        again
    }
}

fn connections(cluster: &Cluster) -> Vec<Connection> {
    let servers = cluster.servers.iter();
    let open = servers.map(|server| Connection::open(server.addr()));
    let open = open.map(|connection| connection.expect("it listens"));
    open.collect()
}

fn app(
    redlock: &Redlock,
    executed: &Executed,
    set: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
) -> Router {
    let executed = executed.clone();
    let pay = post(async move || {
        let number = executed.one_more();
        format!("payment {number} payment payment payment")
    });
    Router::new()
        .route("/payments", pay)
        .layer(set(once(redlock)))
}

async fn pay(app: &Router) -> Answer {
    payments::pay(app, "/payments", "a").await
}

fn keys(id: u32, key: u8) -> RecordKeys {
    RecordKeys::new(id, &[key; 32])
}

const SETTINGS: [(&str, fn(IdempotencyLayer) -> IdempotencyLayer); 3] = [
    ("as it is", |layer| layer),
    ("compressed", |layer| layer.compress_above(16)),
    ("encrypted", |layer| {
        layer.compress_above(16).encrypt(keys(1, 1))
    }),
];

#[tokio::test]
async fn record_with_any_byte_changed_is_refused_or_replayed_and_never_executed_again() {
    for (how, set) in SETTINGS {
        let scene = Scene::new(set).await;
        let mut codes = BTreeSet::new();
        for at in 0..scene.record.len() {
            for bit in [1, 0x80] {
                let mut changed = scene.record.clone();
                changed[at] ^= bit;
                let everywhere = scene.ask_with(&[0, 1, 2], &changed).await;
                codes.insert(everywhere.code());
                // In the clear head of what is not encrypted there is an id that nothing else is bound to.
                let may_be_replayed = how != "encrypted" && (1..17).contains(&at);
                assert_eq!(everywhere.is_replayed(), may_be_replayed, "{how}: {at}");
                let expected = match at {
                    0 => "lock-unavailable",
                    1..17 if may_be_replayed => "",
                    17..33 => "idempotency-key-reused",
                    _ => "misconfigured",
                };
                assert_eq!(everywhere.code(), expected, "{how}: {at}");
            }
            // At one node only: there are others.
            let mut changed = scene.record.clone();
            changed[at] ^= 1;
            let one = scene.ask_with(&[at % 3], &changed).await;
            // Between them, the head, which says what the rest must be.
            if !(17..Record::HEAD).contains(&at) {
                assert!(one.is_replayed(), "{how}: {at}, {}", one.code());
                assert!(one.body == scene.first.body || at < 17, "{how}: {at}");
            }
        }
        for length in 0..scene.record.len() {
            let cut = scene.ask_with(&[0, 1, 2], &scene.record[..length]).await;
            assert!(!cut.is_replayed(), "{how}: {length}");
        }
        let again = pay(&scene.app).await;
        assert!(again.is_replayed(), "{how}: {}", again.code());
        assert_eq!(again.body, scene.first.body);
    }
}

#[tokio::test]
async fn record_of_another_or_missing_encryption_key_is_an_error_without_an_execution() {
    let plain = Scene::new(|layer| layer).await;
    let sealed = Scene::new(|layer| layer.encrypt(keys(1, 1))).await;
    let other = |scene: &Scene, set: fn(IdempotencyLayer) -> IdempotencyLayer| {
        app(&scene.redlock, &scene.executed, set)
    };
    let refused = [
        ("no keys", other(&sealed, |layer| layer)),
        (
            "another id",
            other(&sealed, |layer| layer.encrypt(keys(2, 1))),
        ),
        (
            "another key",
            other(&sealed, |layer| layer.encrypt(keys(1, 2))),
        ),
        (
            "keys only",
            other(&plain, |layer| layer.encrypt(keys(1, 1))),
        ),
    ];
    for (what, app) in refused {
        let (log, _guard) = Log::subscribed();
        for _ in 0..2 {
            let refused = pay(&app).await;
            assert_eq!(refused.code(), "misconfigured", "{what}");
            assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR, "{what}");
            let body = String::from_utf8_lossy(&refused.body);
            assert!(!body.contains("encrypt"), "{what}: {body}");
        }
        let text = log.text();
        assert_eq!(text.matches("unreadable").count(), 1, "{what}: {text}");
    }
    let read = [
        other(&sealed, |layer| {
            layer.encrypt(keys(2, 2).reading(1, &[1; 32]))
        }),
        other(&plain, |layer| layer.encrypt(keys(1, 1).reading_plain())),
    ];
    for app in read {
        assert!(pay(&app).await.is_replayed());
    }
    for scene in [plain, sealed] {
        assert_eq!(scene.executed.count(), 1);
        scene.cluster.wait_until_free(PATIENCE).await;
    }
}

/// How long anything may take that must happen.
const PATIENCE: Duration = secs(10);
