//! Metrics and spans of locks: counts that add up, and one span per lock without its key.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use metrics_util::debugging::DebuggingRecorder;
use support::{Log, ms, numbers, paused_runtime, real_runtime, recorded, recording, secs};
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    ExecutionHandle, IdempotencyLayer, KeyExtractor, LockKey, LockKeys, LockOptions, LockResource,
    Locked, LostReason, OnUnavailable, Redlock, RedlockLayer, ReleaseError, RunToCompletion, key,
    scope,
};
use tracing::Level;

const TTL: Duration = secs(3);

fn redlock(nodes: &ScriptedNodes) -> Redlock {
    Redlock::builder().scripted(nodes).ttl(TTL).build().unwrap()
}

#[track_caller]
fn assert_numbers(numbers: &BTreeMap<String, u64>, expected: &[(&str, u64)]) {
    for (name, number) in expected {
        assert_eq!(numbers.get(*name), Some(number), "{name} of {numbers:#?}");
    }
}

/// That of a lease is its own group, and that of an outcome the group that was asked last.
#[test]
fn metrics_of_a_lock_in_two_groups_name_the_group_that_they_belong_to() {
    let numbers = recorded(async {
        let groups = crate::groups::groups::<2>();
        let redlock = crate::groups::builder(&groups).build().unwrap();
        let keys = crate::groups::keys_of(&redlock, 2).await;
        let all = |wait| redlock.lock_all(&keys).label("job").wait(wait);
        all(TTL).await.unwrap().release().await.unwrap();
        for key in &keys {
            let held = redlock.lock(key).label("other").await.unwrap();
            assert!(all(Duration::ZERO).await.is_err());
            held.release().await.unwrap();
        }
        (0..3).for_each(|node| groups[1].set_for(node, OpKind::Acquire, Gate::Failing));
        assert!(all(Duration::ZERO).await.is_err());
        redlock.drain(TTL).await;
    });
    let expected = [
        ("redlock_acquire_total{job,granted,1}", 1),
        ("redlock_acquire_total{job,contended,0}", 1),
        ("redlock_acquire_total{job,contended,1}", 1),
        ("redlock_acquire_total{job,unavailable,1}", 1),
        ("redlock_acquire_total{other,granted,1}", 1),
        // The second attempt had the first group until the second refused.
        ("redlock_hold_seconds{job,0}", 3),
        ("redlock_hold_seconds{job,1}", 1),
        // Registered, so that its first increment shows.
        ("redlock_acquire_total{unnamed,unavailable,1}", 0),
        ("redlock_held{}", 0),
    ];
    assert_numbers(&numbers, &expected);
    let unavailable = numbers.get("redlock_acquire_total{job,unavailable,0}");
    assert!(unavailable.is_none_or(|count| *count == 0), "{numbers:#?}");
}

#[test]
fn metrics_count_each_acquisition_once_by_outcome_and_label() {
    let numbers = recorded(async {
        let nodes = ScriptedNodes::new(3);
        let (redlock, other) = (redlock(&nodes), redlock(&nodes));
        let guard = redlock.lock("k").label("job").await.unwrap();
        assert!(other.try_lock("k").label("job").await.is_err());
        // One waits and gets it, one waits in vain, one goes away.
        let waiting = tokio::spawn(other.lock("k").label("job").wait(TTL).into_future());
        assert!(other.lock("k").label("job").wait(TTL / 10).await.is_err());
        let gone = timeout(TTL / 10, other.lock("k").label("job").into_future());
        assert!(gone.await.is_err());
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        (0..2).for_each(|node| nodes.set(node, Gate::Failing));
        assert!(redlock.try_lock("k").await.is_err());
        assert!(redlock.try_lock("").await.is_err());
        redlock.drain(TTL).await;
        assert!(redlock.try_lock("k").await.is_err());
    });
    let expected = [
        ("redlock_acquire_total{job,granted}", 2),
        ("redlock_acquire_total{job,contended}", 2),
        ("redlock_acquire_total{job,abandoned}", 1),
        ("redlock_acquire_total{k,unavailable}", 1),
        ("redlock_acquire_total{unnamed,invalid}", 1),
        ("redlock_acquire_total{k,closed}", 1),
        ("redlock_acquire_seconds{job,granted}", 2),
        ("redlock_wait_seconds{job}", 3),
        ("redlock_hold_seconds{job}", 2),
        ("redlock_held{}", 0),
        ("redlock_waiters{}", 0),
    ];
    assert_numbers(&numbers, &expected);
    let shown = format!("{numbers:?}");
    assert!(!shown.contains("\"k\""), "a key is a label");
}

#[test]
fn gauges_count_held_locks_and_waiters() {
    for (stage, expected) in [("held", (2, 0)), ("waited for", (2, 1)), ("free", (0, 0))] {
        recording(async |snapshotter| {
            let redlock = redlock(&ScriptedNodes::new(3));
            let a = redlock.lock("a").await.unwrap();
            let b = redlock.lock("b").await.unwrap();
            // From the grant on, although the tasks that hold them have not run since.
            let mut guards = vec![a, b];
            if stage != "held" {
                let waiting = tokio::spawn(redlock.lock("a").into_future());
                sleep(ms(10)).await;
                if stage == "free" {
                    waiting.abort();
                    guards.clear();
                    sleep(ms(10)).await;
                }
            }
            // Only once: a snapshot sets the gauges to zero.
            let seen = numbers(&snapshotter);
            let seen = (seen["redlock_held{}"], seen["redlock_waiters{}"]);
            assert_eq!(seen, expected, "{stage}");
        });
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "it is to block the runtime")]
fn lock_that_expires_while_its_task_does_not_run_is_lost_free_and_counted() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let test = async {
        let ttl = ms(200);
        let redlock = Redlock::builder().embedded(3).ttl(ttl).build().unwrap();
        let lock = redlock.lock("k").hold_at_least(secs(60));
        let guard = lock.await.unwrap();
        // The only thread of the runtime is blocked.
        std::thread::sleep(ttl * 2);
        let lost = Err(ReleaseError::Lost(LostReason::Expired));
        assert_eq!(guard.release().await, lost);
        assert!(redlock.try_lock("k").await.is_ok());
    };
    metrics::with_local_recorder(&recorder, || real_runtime().block_on(test));
    assert_eq!(numbers(&snapshotter)["redlock_lost_total{expired}"], 1);
}

/// Its task learns of it from another one, which has counted it.
#[test]
fn a_revoked_lock_is_counted_as_lost_once() {
    let numbers = recorded(async {
        let redlock = redlock(&ScriptedNodes::new(3));
        let guard = redlock.lock("k").await.unwrap();
        redlock.revoke("k").await.unwrap();
        guard.lost().await;
        sleep(ms(10)).await;
        assert!(guard.release().await.is_err());
    });
    assert_eq!(numbers["redlock_lost_total{revoked}"], 1);
}

/// Serves one request behind the layer.
async fn serve(layer: RedlockLayer, target: &str) {
    let inner = service_fn(async |_: http::Request<()>| {
        let body = http_body_util::Full::<bytes::Bytes>::default();
        Ok::<_, std::convert::Infallible>(http::Response::new(body))
    });
    let request = http::Request::post(target).header("x-user", "mallory");
    let answer = layer.layer(inner).oneshot(request.body(()).unwrap()).await;
    assert!(answer.unwrap().status().is_success());
}

#[test]
fn metric_label_is_that_of_the_layer_unless_the_options_of_the_request_have_one() {
    let numbers = recorded(async {
        let nodes = ScriptedNodes::new(3);
        let layer = RedlockLayer::new(redlock(&nodes), ("account", key::query("id")));
        let layer = layer.on_unavailable(OnUnavailable::Proceed);
        let layer = layer.options(|parts| match parts.uri.path() {
            "/audit" => LockOptions::default().label("audit"),
            _ => LockOptions::default(),
        });
        for gate in [Gate::Ready, Gate::Failing] {
            (0..3).for_each(|node| nodes.set(node, gate));
            for target in ["/?id=7", "/audit?id=7"] {
                serve(layer.clone(), target).await;
            }
        }
    });
    for label in ["account", "audit"] {
        for name in [
            "acquire_total{LABEL,granted}",
            "acquire_total{LABEL,unavailable}",
            "unprotected_total{LABEL}",
        ] {
            let name = format!("redlock_{}", name.replace("LABEL", label));
            assert_eq!(numbers[&name], 1, "{name}");
        }
    }
}

#[test]
fn metric_label_of_a_key_is_its_first_literal() {
    fn label(key: &impl KeyExtractor) -> Option<&'static str> {
        key.describe().label
    }
    for (label, expected) in [
        (label(&("account", key::path("id"))), Some("account")),
        (label(&(key::host(), "account")), Some("account")),
        (label(&key::path("id").prefix("account")), Some("account")),
        (label(&"job".hashed()), Some("job")),
        (label(&key::query("a").or("job")), Some("job")),
        (label(&key::literal("made at run time")), None),
    ] {
        assert_eq!(label, expected);
    }
}

/// Returns how many locks each label counts as granted.
fn granted(numbers: &BTreeMap<String, u64>) -> Vec<(&str, u64)> {
    let granted = numbers.iter().filter_map(|(name, number)| {
        let label = name.strip_prefix("redlock_acquire_total{")?;
        let label = label.strip_suffix(",granted}")?;
        (*number > 0).then_some((label, *number))
    });
    granted.collect()
}

#[test]
fn metric_label_of_a_lock_is_the_literal_that_its_key_begins_with() {
    let numbers = recorded(async {
        let redlock = redlock(&ScriptedNodes::new(3));
        let locks = [
            redlock.lock(("order", "7")),
            redlock.lock_all([("order", "8"), ("order", "9")]),
            redlock.lock(("order", "7")).label("job"),
            redlock.try_lock("rebuild"),
            redlock.lock("rebuild"),
            // They may be the data of users.
            redlock.lock(String::from("plain")),
            redlock.lock((String::from("alice"), "cart")),
            redlock.lock_all(["alice", "bob"]),
            redlock.lock(("alice@example.com", "cart")),
            redlock.lock(LockKey::from_parts(["part", "7"])),
        ];
        for lock in locks {
            drop(lock.await.unwrap());
        }
        let once = redlock.once(("invoice", "7"));
        let executed = once.run(|_| async { Ok::<_, std::fmt::Error>(()) }).await;
        assert!(executed.is_ok());
        let leading = redlock.lead("reports", async |_| sleep(secs(60)).await);
        assert!(timeout(secs(1), leading).await.is_err());
    });
    let numbers = granted(&numbers);
    let expected = [("invoice", 1), ("job", 1), ("order", 2), ("rebuild", 2)];
    assert_eq!(numbers[..4], expected);
    assert_eq!(numbers[4..], [("reports", 1), ("unnamed", 5)]);
}

// Rules: http.labels
#[test]
fn metric_label_of_layers_and_locked_is_never_a_key_of_a_request() {
    let numbers = recorded(async {
        let redlock = redlock(&ScriptedNodes::new(3));
        let user = |parts: &http::request::Parts| {
            LockKey::from((parts.headers["x-user"].to_str().unwrap(), "cart"))
        };
        let by_header = (key::header("x-user"), key::header("x-user"));
        let layer = |key: Arc<dyn KeyExtractor>| RedlockLayer::new(redlock.clone(), key);
        let layers = [
            layer(Arc::new(user)),
            layer(Arc::new(user)).options(|_| LockOptions::default().ttl(TTL)),
            layer(Arc::new(key::from_fn(|_| "mallory"))),
            layer(Arc::new(by_header)),
            layer(Arc::new(("account", user))),
            layer(Arc::new(user)).label("basket"),
        ];
        for layer in layers {
            serve(layer, "/").await;
        }
        for target in ["/mallory", "/named"] {
            let request = http::Request::post(target).body(()).unwrap();
            let mut parts = request.into_parts().0;
            let locked = Locked::<Cart>::from_request_parts(&mut parts, &redlock).await;
            assert!(locked.is_ok());
        }
    });
    let expected = [("account", 1), ("basket", 1), ("cart", 1), ("unnamed", 5)];
    assert_eq!(granted(&numbers), expected);
}

/// The cart of the user that the path names.
struct Cart(String);

impl LockResource for Cart {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from((self.0.as_str(), "cart")).into()
    }

    fn options(&self) -> LockOptions {
        let options = LockOptions::default();
        match self.0.as_str() {
            "named" => options.label("cart"),
            _ => options,
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Cart {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(
        parts: &mut http::request::Parts,
        _: &S,
    ) -> Result<Self, Self::Rejection> {
        Ok(Self(parts.uri.path()[1..].to_owned()))
    }
}

#[test]
fn counters_are_registered_before_they_count() {
    let numbers = recorded(async {
        let redlock = redlock(&ScriptedNodes::new(3));
        let layer = RedlockLayer::new(redlock.clone(), ("shelf", key::query("id")));
        drop(layer.layer(()));
        let layer = RedlockLayer::new(redlock.clone(), ("crate", key::query("id")));
        drop(layer.on_disconnect(RunToCompletion).layer(()));
        let layer = IdempotencyLayer::new(redlock.clone(), scope::public());
        drop(layer.layer(()));
        let guard = redlock.lock(("parcel", "7")).await.unwrap();
        guard.release().await.unwrap();
    });
    for name in [
        "redlock_acquire_total{parcel,contended}",
        "redlock_wait_seconds{parcel}",
        "redlock_acquire_total{unnamed,granted}",
        "redlock_acquire_total{crate,contended}",
        "redlock_acquire_total{shelf,contended}",
        "redlock_acquire_total{shelf,quarantined}",
        "redlock_acquire_total{idempotency,replayed}",
        "redlock_acquire_seconds{shelf,granted}",
        "redlock_wait_seconds{shelf}",
        "redlock_hold_seconds{shelf}",
        "redlock_unprotected_total{shelf}",
        "redlock_lost_total{max_hold}",
        "redlock_lost_total{revoked}",
        "redlock_conflicts_total{}",
        "redlock_unrecorded_total{}",
        "redlock_held{}",
        "redlock_waiters{}",
    ] {
        assert_eq!(numbers.get(name), Some(&0), "{name} of {numbers:#?}");
    }
}

#[test]
fn lock_span_records_the_outcome_and_the_key_only_on_request() {
    let (log, _guard) = Log::with_spans(Level::DEBUG);
    let token = paused_runtime().block_on(async {
        let nodes = ScriptedNodes::new(3);
        let told = Redlock::builder().scripted(&nodes).log_keys(true);
        drop(told.build().unwrap().lock("public").await.unwrap());
        let redlock = redlock(&nodes);
        let guard = redlock.lock("secret").label("job").await.unwrap();
        let token = guard.fencing_token().unwrap();
        assert!(redlock.try_lock("secret").label("job").await.is_err());
        sleep(ms(70)).await;
        guard.release().await.unwrap();
        token
    });
    let text = log.text();
    let span_with = |fields: &[&str]| {
        let mut ends = text.lines().filter(|line| line.contains(": close "));
        let span = ends.find(|line| fields.iter().all(|field| line.contains(field)));
        span.unwrap_or_else(|| panic!("no {fields:?}: {text}"))
    };
    let granted = span_with(&["resource=\"job\"", "outcome=\"granted\""]);
    let token = format!("fencing_token={token}");
    let fields = "redlock.lock{ quorum.nodes=3 quorum.granted=2 wait_ms=0 hold_ms=70";
    for field in fields.split(' ').chain([&*token]) {
        assert!(granted.contains(field), "{field}: {granted}");
    }
    let contended = span_with(&["outcome=\"contended\""]);
    assert!(!contended.contains("fencing_token"), "{contended}");
    assert!(!granted.contains("key="), "{granted}");
    assert!(!text.contains("secret"), "{text}");
    span_with(&[r#"key=[LockKey("public")]"#]);
}

#[test]
fn each_granted_or_refused_lock_is_one_debug_event() {
    let (log, _guard) = Log::with_spans(Level::DEBUG);
    let [token, once] = paused_runtime().block_on(async {
        let nodes = ScriptedNodes::new(3);
        let redlock = redlock(&nodes);
        let guard = redlock.lock(("event", "7")).await.unwrap();
        let other = redlock.lock(("event", "7")).wait(TTL / 10);
        assert!(other.await.is_err());
        let gone = timeout(TTL / 10, redlock.lock(("event", "7")).into_future());
        assert!(gone.await.is_err());
        let token_of = async |execution: ExecutionHandle| {
            let token = execution.fencing_token().unwrap();
            Ok::<_, std::fmt::Error>(token.to_string())
        };
        let executed = redlock.once(("once", "7")).run(token_of).await.unwrap();
        assert!(redlock.once(("once", "7")).run(token_of).await.is_ok());
        (0..3).for_each(|node| nodes.set(node, Gate::Failing));
        assert!(redlock.try_lock("other").await.is_err());
        let token = guard.fencing_token().unwrap().to_string();
        [token, executed.into_inner()]
    });
    let text = log.text();
    let events = text.lines().filter(|line| !line.contains(": close "));
    let events: Vec<_> = events.collect();
    let expected = [
        ("lock acquired", "event", "granted", 0),
        ("lock refused", "event", "contended", 300),
        ("lock abandoned", "event", "abandoned", 300),
        ("lock acquired", "once", "granted", 0),
        ("outcome replayed", "once", "replayed", 0),
        ("lock refused", "other", "unavailable", 0),
    ];
    assert_eq!(events.len(), expected.len(), "{text}");
    for (event, (message, resource, outcome, waited)) in events.into_iter().zip(expected) {
        let token = match (resource, outcome) {
            ("event", "granted") => format!(" fencing_token={token}"),
            (_, "granted") => format!(" fencing_token={once}"),
            _ => String::new(),
        };
        let resource = format!("{message} resource=\"{resource}\"");
        let outcome = format!("outcome=\"{outcome}\"{token} wait_ms={waited}");
        for part in ["DEBUG redlock.lock{", &resource, &outcome] {
            assert!(event.contains(part), "{part}: {event}");
        }
    }
}
