//! Settings and keys that the builder or a lock request refuses, and `max_waiters`.

use std::error::Error;
use std::fmt;
use std::iter::successors;
use std::time::Duration;

use support::{assert_matches, ms, secs, three_nodes, three_nodes_with};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    BuildError, LockError, LockedRejection, NodeGroup, OnceError, Redlock, RedlockBuilder,
    RestartGuard,
};

fn embedded() -> RedlockBuilder {
    Redlock::builder().embedded(3)
}

/// Asserts that a builder is refused for one setting, and that the error has all of these words, which bars separate.
#[track_caller]
fn refused(builder: RedlockBuilder, setting: &str, words: &str) -> BuildError {
    let error = builder.build().expect_err(setting);
    assert_eq!(error.setting(), setting, "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("`{setting}`")), "{text}");
    for word in words.split('|') {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    // Setting, value, and what to do about it.
    let (_, remedy) = text.split_once(": ").expect("a remedy");
    assert!(remedy.len() > 15, "{text}");
    error
}

// Rules: guard.window_of_ttl
#[test]
fn build_rejects_settings_out_of_range() {
    let short = || embedded().ttl(secs(1));
    let of = |count| Redlock::builder().embedded(count);
    let many = NodeGroup::new().name("many").embedded(65);
    let decade = secs(3_650 * 86_400);
    // The nodes count whole milliseconds.
    let almost = Duration::from_micros(2_999);
    let guard = RestartGuard::For(secs(1));
    let braces = "braces|leave them out";
    for (builder, setting, words) in [
        (Redlock::builder(), "nodes", "0|add"),
        (of(0), "nodes", "0|embedded"),
        (of(65), "nodes", "65|64 nodes"),
        (
            Redlock::builder().node_group(many),
            "group",
            "many|64 nodes",
        ),
        (embedded().ttl(secs(0)), "ttl", "0ns|drift|seconds"),
        (embedded().ttl(ms(2)), "ttl", "2ms|drift"),
        (embedded().ttl(almost), "ttl", "2.999ms|drift"),
        (embedded().ttl(Duration::MAX), "ttl", "at most"),
        (embedded().ttl(secs(11 * 86_400)), "ttl", "950400s"),
        (embedded().max_ttl(Duration::MAX), "max_ttl", "at most"),
        (
            short().node_timeout(secs(1)),
            "node_timeout",
            "1s|ttl = 1s|below",
        ),
        (short().node_timeout(Duration::MAX), "node_timeout", "below"),
        (short().node_timeout(secs(0)), "node_timeout", "0ns"),
        // The default of 50 ms counts too.
        (embedded().ttl(ms(50)), "node_timeout", "50ms"),
        (
            embedded().connect_timeout(secs(0)),
            "connect_timeout",
            "0ns",
        ),
        (embedded().max_hold(secs(0)), "max_hold", "0ns"),
        (
            embedded().fence_retention(decade + ms(1)),
            "fence_retention",
            "at most",
        ),
        (
            short().restart_guard(guard),
            "restart_guard",
            "1s|more than max_ttl = 1s",
        ),
        (
            embedded().ttl(secs(20)).max_ttl(secs(10)),
            "max_ttl",
            "10s|ttl = 20s|raise",
        ),
        (embedded().namespace("a{b"), "namespace", braces),
        (embedded().namespace("}"), "namespace", braces),
        (embedded().namespace("{tag}"), "namespace", braces),
    ] {
        refused(builder, setting, words);
    }
}

#[test]
fn build_accepts_settings_at_their_limits_in_any_order() {
    for builder in [
        Redlock::builder().embedded(64),
        embedded().ttl(secs(10 * 86_400)),
        embedded().ttl(secs(1)).node_timeout(ms(999)),
        embedded().connect_timeout(secs(10 * 86_400)),
        embedded().fence_retention(secs(3_650 * 86_400)),
        embedded().ttl(secs(20)).max_ttl(secs(20)),
        embedded().namespace(""),
        embedded().ttl(secs(60)).max_ttl(secs(90)),
        embedded().max_ttl(secs(90)).ttl(secs(60)),
        embedded().restart_guard(RestartGuard::Off),
        embedded()
            .ttl(secs(1))
            .restart_guard(RestartGuard::For(ms(1_001))),
    ] {
        assert!(builder.clone().build().is_ok(), "{builder:?}");
    }
}

#[test]
#[should_panic(expected = "1 to 64 nodes")]
fn in_memory_panics_for_more_nodes_than_a_lock_can_ask() {
    drop(Redlock::in_memory(usize::MAX));
}

#[test]
#[should_panic(expected = "1 to 64 nodes")]
fn in_memory_panics_for_zero_nodes() {
    drop(Redlock::in_memory(0));
}

// Rules: guard.window_of_ttl
#[test]
fn build_rejects_a_fence_retention_that_could_end_under_a_lock() {
    let long = embedded().ttl(secs(10)).max_ttl(secs(60));
    let held = long.clone().max_hold(secs(1_000));
    for (builder, least, told) in [
        (long, 120, "119s|120s|max_ttl"),
        (held, 1_060, "1060s|max_hold"),
    ] {
        let of = |least| builder.clone().fence_retention(secs(least));
        refused(of(least - 1), "fence_retention", told);
        assert!(of(least).build().is_ok(), "{least}");
    }
    // The default follows the other settings.
    assert!(embedded().ttl(secs(86_400)).build().is_ok());
    assert!(embedded().max_hold(secs(86_400)).build().is_ok());
    // As long as no bound, which every retention outlives.
    for held in [Duration::MAX, secs(3_650 * 86_400)] {
        let unbounded = embedded().max_hold(held);
        assert!(unbounded.clone().build().is_ok(), "{held:?}");
        assert!(unbounded.fence_retention(secs(60)).build().is_ok());
    }
}

/// What must never be read in a log.
const SECRETS: [&str; 3] = ["hunter2", "hunt", "er2"];

#[track_caller]
fn shows_no_secret(text: &str) {
    for secret in SECRETS {
        assert!(!text.contains(secret), "{text}");
    }
}

// Rules: http.secrets
#[test]
fn build_names_a_malformed_url_without_its_credentials() {
    for url in [
        "redis://:hunter2@host:notaport",
        "redis://user:hunter2@host:99999",
        "redis://user:hunter2@host/notadb",
        "redis://user:hunter2@/",
        "redis://:hunter2@",
        "http://user:hunter2@host",
        "redis:/user:hunter2@host",
        "user:hunter2@host:6379",
        // Passwords that were not percent-encoded.
        "redis://:hunt@er2@host:notaport",
        "redis://:hunt?er2@host",
        "redis://:hunt#er2@host",
        "redis://:hunt/er2@host",
        "redis://:hunt er2@host:notaport",
        "redis://:%zzhunter2@host:notaport",
        "http://host?password=hunter2",
        "http://host?password=hunt@er2",
    ] {
        let builder = Redlock::builder().url(url);
        shows_no_secret(&format!("{builder:?}"));
        match builder.build() {
            Ok(redlock) => shows_no_secret(&format!("{redlock:?}")),
            Err(error) => {
                assert_eq!(error.setting(), "url", "{error}");
                shows_no_secret(&error.to_string());
                shows_no_secret(&format!("{error:?}"));
                assert!(error.to_string().contains("expected redis://"), "{error}");
            }
        }
    }
    refused(Redlock::builder().url(""), "url", "expected redis://");
    refused(Redlock::builder().url("nonsense"), "url", "nonsense");
    let mixed = Redlock::builder().urls(["redis://good", "ftp://host"]);
    refused(mixed, "url", "ftp://host");
}

// Rules: http.secrets
#[test]
fn debug_of_builder_and_redlock_shows_addresses_without_credentials() {
    let builder = Redlock::builder().urls([
        "redis://user:hunter2@10.0.0.1",
        "redis://:hunter2@10.0.0.2:6380/3",
        "redis+unix:///tmp/redis.sock?user=u&pass=hunter2",
    ]);
    shows_no_secret(&format!("{builder:?} {builder:#?}"));
    let redlock = builder.build().unwrap();
    let shown = format!("{redlock:?} {redlock:#?}");
    shows_no_secret(&shown);
    for address in ["10.0.0.1:6379", "10.0.0.2:6380", "/tmp/redis.sock"] {
        assert!(shown.contains(address), "{shown}");
    }
}

#[test]
fn build_rejects_the_same_server_twice() {
    for again in [
        "redis://10.0.0.1",
        "redis://10.0.0.1:6379",
        "redis://10.0.0.1/5",
        "redis://user:hunter2@10.0.0.1:6379/1",
    ] {
        let builder = Redlock::builder().urls(["redis://10.0.0.1:6379/0", "redis://10.0.0.2"]);
        let error = refused(builder.url(again), "url", "10.0.0.1:6379|twice");
        shows_no_secret(&format!("{error} {error:?}"));
    }
    let spellings = ["redis://Node.example", "redis://b", "redis://nODE.EXAMPLE"];
    let spellings = Redlock::builder().urls(spellings);
    refused(spellings, "url", "node.example:6379|twice");
    let ports = Redlock::builder().urls(["redis://h:1", "redis://h:2", "redis://h:3"]);
    assert!(ports.build().is_ok());
}

#[tokio::test(start_paused = true)]
async fn lock_with_a_ttl_out_of_range_is_refused_before_any_node_is_asked() {
    let (nodes, redlock) = three_nodes_with(|builder| builder.max_ttl(secs(20)));
    let (asked, max) = (ms(20_001), secs(20));
    let error = redlock.lock("k").ttl(asked).await.unwrap_err();
    assert_eq!(error, LockError::TtlTooLong { asked, max });
    assert!(error.to_string().contains("raise max_ttl"));
    for ttl in [ms(0), Duration::from_nanos(1), ms(2)] {
        let error = redlock.lock("k").ttl(ttl).await.unwrap_err();
        assert_eq!(error, LockError::TtlTooShort { asked: ttl });
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
    assert!(redlock.lock("k").ttl(max).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn max_waiters_refuses_one_more_waiter_at_once() {
    let redlock = embedded().max_waiters(2).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    let waiting = || tokio::spawn(redlock.lock("k").into_future());
    let [first, second] = [waiting(), waiting()];
    sleep(ms(1)).await;
    let began = Instant::now();
    let error = redlock.lock("k").await.unwrap_err();
    assert_eq!(error, LockError::Overloaded { max: 2 });
    assert_eq!(began.elapsed(), ms(0));
    // Who does not wait needs no place, and who finds its key free does not wait.
    let error = redlock.try_lock("k").await.unwrap_err();
    assert_matches!(error, LockError::Contended { .. });
    assert!(redlock.lock("other").await.is_ok());

    // A place is free again when its waiter is served, and when it goes away.
    second.abort();
    assert!(second.await.unwrap_err().is_cancelled());
    let third = waiting();
    sleep(ms(1)).await;
    assert!(redlock.lock("k").await.is_err());
    drop(guard);
    let guard = first.await.unwrap().unwrap();
    let fourth = waiting();
    sleep(ms(1)).await;
    drop(guard);
    drop(third.await.unwrap().unwrap());
    drop(fourth.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn max_waiters_counts_callers_that_wait_for_another_process() {
    let nodes = ScriptedNodes::new(3);
    let there = Redlock::builder().scripted(&nodes).build().unwrap();
    let here = Redlock::builder().scripted(&nodes).max_waiters(1);
    let here = here.build().unwrap();
    let _k = there.try_lock("k").await.unwrap();
    let _l = there.try_lock("l").await.unwrap();
    let waiting = tokio::spawn(here.lock("k").into_future());
    sleep(ms(1)).await;
    let error = here.lock("l").await.unwrap_err();
    assert_eq!(error, LockError::Overloaded { max: 1 });
    assert!(waiting.await.unwrap().is_err());
    let error = here.lock("l").wait(ms(10)).await.unwrap_err();
    assert_matches!(error, LockError::Contended { .. });
}

/// An error of a user, with a cause.
#[derive(Debug)]
struct Failed(Option<Box<Self>>);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "effect" } else { "cause" })
    }
}

impl Error for Failed {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(self.0.as_deref()?)
    }
}

/// As a reporter of errors prints them, one under the other.
#[tokio::test(start_paused = true)]
async fn chain_of_an_error_has_each_message_once() {
    let (nodes, redlock) = three_nodes();
    let guard = redlock.lock("k").await.unwrap();
    (0..3).for_each(|node| nodes.set(node, Gate::Failing));
    let unavailable = redlock.try_lock("l").await.unwrap_err();
    let key = redlock.try_lock("").await.unwrap_err();
    let failed = || Failed(Some(Box::new(Failed(None))));
    let errors: [Box<dyn Error>; 8] = [
        Box::new(OnceError::<Failed>::Lock(unavailable.clone())),
        Box::new(OnceError::<Failed>::Lock(key.clone())),
        Box::new(unavailable),
        Box::new(key),
        Box::new(guard.extend(secs(5)).await.unwrap_err()),
        Box::new(guard.release().await.unwrap_err()),
        Box::new(OnceError::<Failed>::Work(failed())),
        Box::new(LockedRejection::Inner(failed())),
    ];
    for (number, error) in errors.iter().enumerate() {
        let error: &dyn Error = &**error;
        let chain = successors(Some(error), |error| (*error).source());
        let chain: Vec<String> = chain.map(ToString::to_string).collect();
        for (depth, message) in chain.iter().enumerate() {
            let mut before = chain[..depth].iter();
            assert!(!before.any(|text| text.contains(message)), "{chain:?}");
        }
        if number >= 6 {
            assert_eq!(chain, ["effect", "cause"]);
        }
    }
}
