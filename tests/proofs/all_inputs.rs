//! Arithmetic and parsing for all inputs: small domains in full, the ends of large ones, and arbitrary bytes.
//!
//! Tests are built with overflow checks, so a sum that would wrap in a release build fails here.

use std::convert::Infallible;
use std::iter::{once, repeat_n};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{DATE, RETRY_AFTER};
use http::{HeaderValue, Request, StatusCode};
use proptest::collection::vec;
use proptest::prelude::*;
use support::{ms, paused_runtime, secs, send};
use tokio::time::advance;
use tower::{Layer, ServiceExt, service_fn};
use tower_redlock::client::{Decision, RetryLockedLayer};
use tower_redlock::protocol::admission::{Admissions, Generation, Introduction};
use tower_redlock::protocol::{
    Fingerprint, LockKeys, OwnerToken, Placement, Record, Retry, Shown, holder, retry, validity,
};
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{
    FencingToken, LockError, LockKey, NodeFailure, Redlock, Rejection, RestartGuard, admin_router,
};

use crate::round_cases::cases;

/// The ends of what a `Duration` can be, and of what this crate allows.
fn edges() -> [Duration; 11] {
    let ten_years = secs(3_650 * 24 * 60 * 60);
    let (zero, tick) = (Duration::ZERO, Duration::from_nanos(1));
    let (millis, max) = (ms(u64::MAX), Duration::MAX);
    let (second, ttl) = (secs(1), secs(10 * 24 * 60 * 60));
    let least = [zero, tick, ms(1), ms(3), second - tick, second];
    let most = [ttl, ten_years, millis, max - second, max];
    std::array::from_fn(|at| *least.iter().chain(&most).nth(at).unwrap())
}

const MAX: u64 = u64::MAX;
const NUMBERS: [u64; 9] = [0, 1, 2, 99, 1 << 32, 1 << 53, 1 << 63, MAX - 1, MAX];

fn any_duration() -> impl Strategy<Value = Duration> {
    let anywhere = (any::<u64>(), 0..1_000_000_000_u32);
    let anywhere = anywhere.prop_map(|(secs, nanos)| Duration::new(secs, nanos));
    let short = (0..60_000_000_000_u64).prop_map(Duration::from_nanos);
    prop_oneof![anywhere, short, proptest::sample::select(edges().to_vec())]
}

/// Bytes that are often nearly what a parser reads, with numbers that it cannot hold.
fn likely_bytes() -> impl Strategy<Value = Vec<u8>> {
    let pieces = "0|1|99999999999|18446744073709551615|18446744073709551616| |\t|:|,|,4:slot,1:3,|+|\
                  00000000000000000000000000000000";
    let pieces = pieces.split('|').map(|piece| piece.as_bytes().to_vec());
    let piece = proptest::sample::select(pieces.collect::<Vec<_>>());
    let anything = vec(any::<u8>(), 0..4);
    vec(prop_oneof![8 => piece, 1 => anything], 0..8).prop_map(|pieces| pieces.concat())
}

/// All byte strings of these symbols, up to a length.
fn words(symbols: &'static [u8], longest: usize) -> Vec<Vec<u8>> {
    let mut words = vec![Vec::new()];
    for begin in 0.. {
        if words.get(begin).is_none_or(|word| word.len() == longest) {
            break;
        }
        let longer = |symbol: &u8| [&words[begin][..], &[*symbol]].concat();
        let longer: Vec<_> = symbols.iter().map(longer).collect();
        words.extend(longer);
    }
    words
}

/// What is left of a ttl, in numbers that hold any of it.
fn left_of(ttl: Duration, elapsed: Duration) -> Option<u128> {
    let spent = ttl.as_nanos() / 100 + 2_000_000 + elapsed.as_nanos();
    ttl.as_nanos().checked_sub(spent).filter(|left| *left > 0)
}

#[test]
fn validity_of_every_short_ttl_is_exact_to_the_nanosecond() {
    let tick = Duration::from_nanos(1);
    let mut valid = 0;
    let mut check = |ttl, elapsed| {
        let left = validity::remaining(ttl, elapsed).map(|left| left.as_nanos());
        assert_eq!(left, left_of(ttl, elapsed), "{ttl:?} {elapsed:?}");
        valid += u32::from(left.is_some());
    };
    for ttl in (0..=200).map(ms) {
        for elapsed in (0..=200).map(ms) {
            for elapsed in [elapsed.saturating_sub(tick), elapsed, elapsed + tick] {
                check(ttl, elapsed);
            }
        }
        // The last instant at which it is valid, and the next.
        let lifetime = validity::lifetime(ttl).unwrap_or(tick);
        check(ttl, lifetime - tick);
        check(ttl, lifetime);
    }
    for [ttl, elapsed] in tuples(&edges()) {
        check(ttl, elapsed);
    }
    assert!(valid > 10_000, "{valid}");
}

#[test]
fn every_fencing_token_keeps_its_value_and_order_in_each_encoding() {
    let max = FencingToken::MAX.as_u64();
    let numbers = (0..2_000).chain(max - 2_000..=max + 2_000).chain(NUMBERS);
    let mut last = None;
    for number in numbers {
        let text = number.to_string();
        let Ok(token) = FencingToken::try_from(number) else {
            assert!(number > max, "{number}");
            let is_json = serde_json::from_str::<FencingToken>(&text).is_ok();
            assert!(
                text.parse::<FencingToken>().is_err() && !is_json,
                "{number}"
            );
            continue;
        };
        assert!(number <= max, "{number}");
        assert_eq!((u64::from(token), &token.to_string()), (number, &text));
        assert_eq!(i64::from(token), i64::try_from(number).unwrap());
        assert_eq!(text.parse(), Ok(token));
        assert_eq!(serde_json::to_string(&token).unwrap(), text);
        assert_eq!(serde_json::from_str::<FencingToken>(&text).unwrap(), token);
        if let Some((lower, earlier)) = last.replace((number, token)) {
            assert_eq!(token.cmp(&earlier), number.cmp(&lower));
        }
    }
}

#[test]
fn placement_gives_every_short_key_to_the_highest_weight_and_moves_no_other() {
    let all = ["", "0", "1", "a", "1:a,4:slot,1:0,"];
    let named = |set: u32| {
        let names = all.iter().enumerate();
        let names: Vec<_> = names
            .filter(|(bit, _)| set >> bit & 1 == 1)
            .map(|(_, name)| *name)
            .collect();
        (Placement::new(names.iter().copied()), names)
    };
    let sets: Vec<_> = (0..1 << all.len()).map(named).collect();
    for word in words(b"01:,", 4) {
        let key = LockKey::from(word);
        let slots = [0, 9, 10, 63].map(|slot| LockKey::from((&key, "slot", slot)));
        let owner = |set: usize| sets[set].1.get(sets[set].0.group_of(&key)).copied();
        for (set, (placement, names)) in sets.iter().enumerate() {
            let group = placement.group_of(&key);
            if names.is_empty() {
                assert_eq!(group, 0);
                continue;
            }
            let weight = |name: &&&str| Placement::weight(&key, name);
            let heaviest = names.iter().max_by_key(weight);
            assert_eq!(heaviest, names.get(group), "{key:?} {names:?}");
            assert!(slots.iter().all(|slot| placement.group_of(slot) == group));
            for (bit, name) in all.iter().enumerate() {
                let more = owner(set | 1 << bit);
                let is_right = more == owner(set) || more == Some(*name);
                assert!(is_right, "{key:?} {names:?}");
            }
            let backwards = Placement::new(names.iter().rev().copied());
            assert_eq!(backwards.group_of(&key), names.len() - 1 - group);
        }
    }
}

#[test]
fn retry_delays_of_all_ends_stay_within_their_bounds() {
    for [max, base] in tuples(&edges()) {
        let retry = Retry::new(base, max).poll_interval(max);
        for random in NUMBERS {
            for count in [0, 1, 2, 15, 16, 17, 63, 64, u32::MAX - 1, u32::MAX] {
                for hint in once(None).chain(edges().map(Some)) {
                    let delay = retry::delay(&retry, count, hint, random);
                    // A maximum below the base counts as the base.
                    let window = base.saturating_mul(2_u32.saturating_pow(count));
                    assert!(delay <= window.min(max.max(base)));
                    // Full jitter reaches all of the window, not just a part of it.
                    assert_eq!(retry::delay(&retry, count, hint, 0), Duration::ZERO);
                    assert!(retry::delay(&retry, count, hint, random / 2) <= delay);
                    let bound = hint.unwrap_or(Duration::MAX).saturating_add(base);
                    assert!(
                        delay <= bound && retry::poll_delay(&retry, hint, random) <= max.min(bound)
                    );
                }
                let split = retry::split_delay(count, base, random);
                let window = base.saturating_mul(2_u32.saturating_pow(count.saturating_add(1)));
                assert!(split <= window.min(base.saturating_mul(1 << 16)));
            }
        }
    }
}

#[test]
fn node_is_admitted_only_when_its_quarantine_is_over_whatever_the_clocks_say() {
    let node: Arc<str> = "a".into();
    for [window, began, age, uptime, now] in tuples(&edges()) {
        let generation = Generation::new(&OwnerToken::from_random([0; 16]), began, "id");
        // As it is stored, in whole microseconds.
        let stored = Generation::parse(generation.as_str()).unwrap();
        assert_eq!(stored, generation);
        let introduction = Introduction {
            run_id: "id".into(),
            replication_id: "id".into(),
            uptime,
            generation,
            now: began.saturating_add(age),
        };
        let mut admissions = Admissions::new(window);
        let left = admissions.admit(&node, introduction.clone(), now);
        let most = window.saturating_add(secs(2));
        assert!(left <= most, "{left:?} of {window:?}");
        let age = stored.age(introduction.now);
        let is_old = age >= window && (uptime > window || uptime == Duration::MAX);
        assert!(is_old || !left.is_zero(), "{window:?} {age:?} {uptime:?}");
        admissions.admit(&node, introduction, Duration::ZERO);
    }
}

#[test]
fn retry_after_of_every_refusal_is_a_whole_second_at_least() {
    let header = |rejection: Rejection| {
        let response = rejection.into_response();
        let value = response.headers()[RETRY_AFTER].to_str().unwrap();
        value.parse::<u64>().unwrap()
    };
    assert_eq!(header(Rejection::InProgress), 1);
    let contended = |left| Rejection::Contended {
        status: StatusCode::LOCKED,
        retry_after: Some(left),
        holder: None,
    };
    for millis in 0..62_000 {
        let seconds = header(contended(ms(millis)));
        assert_eq!(seconds, millis.div_ceil(1_000).clamp(1, 60), "{millis} ms");
    }
    for left in edges() {
        let too_many = Rejection::TooManyConcurrent {
            retry_after: Some(left),
        };
        for rejection in [contended(left), too_many] {
            let seconds = header(rejection);
            assert!((1..=60).contains(&seconds), "{left:?}: {seconds}");
            assert!(secs(seconds) >= left.min(secs(60)), "{left:?}: {seconds}");
        }
        let node = "a".into();
        let failure = NodeFailure::Quarantined { node, left };
        assert!(failure.to_string().contains("quarantined"));
        let quarantined = LockError::Unavailable {
            reached: 0,
            needed: 1,
            voted: Vec::new(),
            nodes: vec![failure],
        };
        let seconds = header(quarantined.into());
        assert!(seconds >= left.as_secs().max(1), "{left:?}: {seconds}");
    }
}

/// Returns what a client does after a refusal with these headers.
fn decision(retry_after: &[u8], date: Option<&'static str>) -> Option<Decision> {
    let value = HeaderValue::from_bytes(retry_after).ok()?;
    let decisions = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&decisions);
    let layer = RetryLockedLayer::new()
        .deadline(Duration::MAX)
        .attempts(2)
        .backoff(Retry::new(Duration::ZERO, Duration::ZERO))
        .on_attempt(move |attempt| seen.lock().unwrap().push(attempt.decision));
    let refusing = service_fn(move |_| {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::LOCKED;
        response.headers_mut().insert(RETRY_AFTER, value.clone());
        if let Some(date) = date {
            response.headers_mut().insert(DATE, date.parse().unwrap());
        }
        async { Ok::<_, Infallible>(response) }
    });
    let sent = layer.layer(refusing).oneshot(Request::new(Body::empty()));
    paused_runtime().block_on(sent).unwrap();
    let first = decisions.lock().unwrap()[0];
    Some(first)
}

#[test]
fn client_waits_as_both_forms_of_retry_after_say_and_not_for_the_past() {
    let now = Some("Wed, 21 Oct 2015 07:28:00 GMT");
    let again = |seconds| Some(Decision::SendAgain(secs(seconds)));
    let never = Some(Decision::NoTimeLeft);
    for (value, date, expected) in [
        ("0", None, again(0)),
        ("00060", None, again(60)),
        ("4294967296", None, never),
        ("18446744073709551615", None, never),
        ("18446744073709551616", None, never),
        ("-1", None, again(0)),
        ("+1", None, again(0)),
        ("1.5", None, again(0)),
        ("", None, again(0)),
        ("Wed, 21 Oct 2015 07:28:00 GMT", now, again(0)),
        ("Wed, 21 Oct 2015 07:28:09 GMT", now, again(9)),
        ("Wed, 21 Oct 2015 07:27:59 GMT", now, again(0)),
        ("Thu, 01 Jan 1970 00:00:00 GMT", now, again(0)),
        ("Thu, 01 Jan 1970 00:00:00 GMT", None, again(0)),
        ("Fri, 31 Dec 9999 23:59:59 GMT", now, never),
        ("Fri, 31 Dec 9999 23:59:59 GMT", Some("never"), never),
    ] {
        let found = decision(value.as_bytes(), date);
        assert_eq!(found, expected, "{value} {date:?}");
    }
}

#[test]
fn client_reads_every_short_retry_after_as_seconds_or_as_nothing() {
    let mut waits = 0;
    for word in words(b"019+-. ", 4) {
        let text = str::from_utf8(&word).unwrap().trim();
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let seconds = if is_number { text.parse().unwrap() } else { 0 };
        let expected = Some(Decision::SendAgain(secs(seconds)));
        assert_eq!(decision(&word, None), expected, "{text:?}");
        waits += u32::from(seconds > 0);
    }
    assert!(waits > 100, "{waits}");
}

#[tokio::test(start_paused = true)]
async fn lock_with_any_times_is_refused_or_valid_for_its_ttl_at_most() {
    let builder = Redlock::builder().scripted(&ScriptedNodes::new(3));
    let redlock = builder.max_ttl(secs(10 * 24 * 60 * 60)).build().unwrap();
    let times: Vec<_> = edges().into_iter().step_by(2).collect();
    let mut granted = 0;
    for (number, [ttl, wait, max_hold, least]) in tuples(&times).enumerate() {
        let request = redlock.lock(number).ttl(ttl).wait(wait).max_hold(max_hold);
        match request.hold_at_least(least).await {
            Ok(guard) => {
                granted += 1;
                let lifetime = validity::lifetime(ttl).unwrap();
                assert!(guard.valid_for() <= lifetime, "{ttl:?}");
                advance(ms(1)).await;
                let most = lifetime.saturating_sub(ms(1));
                assert!(guard.valid_for() <= most, "{ttl:?}");
                // Refused or granted.
                drop(guard.extend(least).await);
            }
            Err(error) => assert!(!matches!(error, LockError::Closed), "{error}"),
        }
    }
    assert!(granted > 100, "{granted}");
}

#[test]
fn builder_takes_or_refuses_any_time() {
    for time in edges() {
        let builder = || Redlock::builder().scripted(&ScriptedNodes::new(3));
        for builder in [
            builder().ttl(time),
            builder().max_ttl(time),
            builder().wait(time),
            builder().max_hold(time),
            builder().node_timeout(time),
            builder().connect_timeout(time),
            builder().fence_retention(time),
            builder().restart_guard(RestartGuard::For(time)),
            builder().retry(Retry::new(time, time)),
        ] {
            drop(builder.build().map_err(|error| error.to_string()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn path_of_every_short_key_leads_to_the_key() {
    let redlock = Redlock::in_memory(1);
    let app = admin_router(redlock.clone());
    let get = async |path: String| send(&app, "GET", &path).await.json();
    let parts = words(b"a/.", 2);
    let with_each = |one| {
        parts
            .iter()
            .map(move |other| LockKey::from((one, &**other)))
    };
    let tuples = parts.iter().flat_map(|one| with_each(&**one));
    // Not quite tuples.
    let nearly = ["1:a,", "01:a,", "+1:a,", "1:a", "2:a,"];
    let with_each = |one| nearly.map(|other| LockKey::from([one, other].concat()));
    let nearly = nearly.into_iter().flat_map(with_each);
    let plain = words(b"1:a,/.%", 3).into_iter().skip(1).map(LockKey::from);
    let keys: Vec<LockKey> = plain.chain(tuples).chain(nearly).collect();
    for keys in keys.chunks(LockKeys::MAX) {
        let guard = redlock.lock_all(keys.iter().cloned()).await.unwrap();
        let held = get("/held".into()).await;
        let held = held["held"][0]["keys"].as_array().unwrap();
        assert_eq!(held.len(), keys.len());
        for key in held {
            let found = get(format!("/locks/{}", key["path"].as_str().unwrap())).await;
            assert_eq!((&found["key"], &found["path"]), (&key["key"], &key["path"]));
            assert_eq!(found["state"], "held");
        }
        guard.release().await.unwrap();
    }
}

/// All tuples of these times.
fn tuples<const N: usize>(times: &[Duration]) -> impl Iterator<Item = [Duration; N]> {
    let count = repeat_n(times.len(), N).product();
    (0..count).map(|mut number: usize| {
        [(); N].map(|()| {
            let time = times[number % times.len()];
            number /= times.len();
            time
        })
    })
}

proptest! {
    #![proptest_config(cases(2_000))]

    #[test]
    fn validity_never_exceeds_the_ttl_less_elapsed_less_drift(
        ttl in any_duration(),
        elapsed in any_duration(),
    ) {
        let left = validity::remaining(ttl, elapsed).map(|left| left.as_nanos());
        prop_assert_eq!(left, left_of(ttl, elapsed));
        let whole = validity::whole_millis(ttl);
        prop_assert!(whole <= ttl && ttl - whole < ms(1) && whole.subsec_nanos().is_multiple_of(1_000_000));
        let longer = validity::ttl_for(ttl);
        prop_assert!(validity::lifetime(longer) >= Some(ttl) || longer == ms(u64::MAX));
    }

    #[test]
    fn owner_values_are_read_as_they_were_written(
        random: [u8; 16],
        digest in proptest::option::of(any::<[u8; 32]>()),
        holder in proptest::option::of((0..100_000_000_000_u64, "[^\\pC]{0,16}", "[^\\pC]{0,16}")),
    ) {
        let holder = holder.map(|(since, label, note)| {
            holder::parse(format!("{since} {label}\t{note}").as_bytes()).unwrap()
        });
        let shown = Shown::new(digest.map(Fingerprint::from_digest), holder);
        let value = OwnerToken::showing(random, shown.clone()).to_value();
        let (owner, behind) = value.split_at(32);
        prop_assert_eq!(owner, OwnerToken::from_random(random).to_value());
        prop_assert_eq!(Shown::parse(behind.as_bytes()), shown);
    }

    #[test]
    fn no_bytes_make_a_parser_panic(bytes in likely_bytes()) {
        let text = String::from_utf8_lossy(&bytes);
        if let Ok(token) = text.parse::<FencingToken>() {
            prop_assert!(token <= FencingToken::MAX);
        }
        if let Some(holder) = holder::parse(&bytes) {
            prop_assert!(holder.since() >= std::time::UNIX_EPOCH);
        }
        drop((Shown::parse(&bytes), Fingerprint::from_hex(&bytes)));
        if let Some(generation) = Generation::parse(&text) {
            prop_assert_eq!(generation.age(Duration::ZERO), Duration::ZERO);
        }
        if let Some(record) = Record::from_bytes(bytes.clone().into()) {
            prop_assert!(record.rest().len() < bytes.len());
        }
        let key = LockKey::from(bytes.clone());
        prop_assert!(Placement::new(["a", "b", "c"]).group_of(&key) < 3);
        let waits = decision(&bytes, None);
        let known = matches!(waits, None | Some(Decision::SendAgain(_) | Decision::NoTimeLeft));
        prop_assert!(known, "{waits:?}");
    }
}
