//! Attacks on the layers as a whole: stacks, calls within calls, and ends that no one planned for.

use std::convert::Infallible;
use std::future::{Future, poll_fn, ready};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, Request};
use axum::http::header::{COOKIE, HOST};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, post};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, stream};
use http_body_util::{BodyExt, Full};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};
use tower::limit::ConcurrencyLimitLayer;
use tower::retry::RetryLayer;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{
    ExecutionHandle, IdempotencyLayer, KeyExtractor, LockError, LockKey, LockKeys, Locked,
    LockedRejection, LostReason, OnLost, OnUnavailable, Redlock, RedlockLayer, Rejection,
    RequestKind, RunToCompletion, key,
};

use crate::payments::{
    Account, Again, AppState, cloneable, counts_begun, once, pay, per_account, rebuilt, request,
};
use crate::support::{Answer, Executed, SlowReadiness, ms, redlock, secs, set_all};

/// A service that gives its answers one after the other, and the last for ever.
fn answering(
    executed: &Executed,
    statuses: &'static [u16],
) -> impl Service<
    Request<String>,
    Response = Response<String>,
    Error = Infallible,
    Future: Send + 'static,
> + Clone
+ Send
+ use<> {
    let executed = executed.clone();
    service_fn(move |_| {
        let number = executed.one_more();
        async move {
            sleep(ms(100)).await;
            let mut response = Response::new(format!("payment {number}"));
            let status = statuses[(number - 1).min(statuses.len() - 1)];
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            Ok(response)
        }
    })
}

// ---- calls within calls ----

/// An app whose handler pays, and then makes a request of its own, with its extensions, to `within`.
fn calling(executed: &Executed, within: &Router, key: &'static str) -> Router {
    let (executed, within) = (executed.clone(), within.clone());
    let pay = async move |extensions: Extensions| {
        let number = executed.one_more();
        let mut call = request("/payments?account=1&ms=1000", key);
        *call.extensions_mut() = extensions;
        let answer = Answer::to(&within, call).await;
        format!("payment {number}, then {}", answer.status.as_u16())
    };
    Router::new().route("/payments", post(pay))
}

#[tokio::test(start_paused = true)]
async fn handler_whose_nested_call_is_refused_is_recorded() {
    for at_most_once in [false, true] {
        let redlock = redlock(&ScriptedNodes::new(3));
        let other = redlock.lock(("account", "1")).await.unwrap();
        let executed = Executed::default();
        let within = counts_begun(&Executed::default()).layer(per_account(&redlock));
        let app = calling(&executed, &within, "inner");
        let app = app.layer(once(&redlock).at_most_once(at_most_once));
        let first = pay(&app, "/payments", "a").await;
        assert_eq!(first.body, "payment 1, then 423");
        let again = pay(&app, "/payments", "a").await;
        assert!(again.is_replayed(), "{again:?}");
        assert_eq!((again.body, executed.count()), (first.body, 1));
        drop(other);
    }
}

#[tokio::test(start_paused = true)]
async fn handler_whose_nested_idempotent_call_is_refused_or_stopped_is_recorded() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let stopped = once(&redlock).max_hold(ms(500)).ttl(ms(200)).unwrap();
    let (executed, inner) = (Executed::default(), Executed::default());
    let within = counts_begun(&inner).layer(stopped);
    let app = calling(&executed, &within, "inner");
    let app = app.layer(once(&redlock).at_most_once(true));
    for key in ["stopped", "contended-or-unknown"] {
        let first = pay(&app, "/payments", key).await;
        assert_eq!(first.status, StatusCode::OK);
        assert!(pay(&app, "/payments", key).await.is_replayed(), "{key}");
    }
    assert_eq!(executed.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn handler_that_calls_its_own_key_with_its_extensions_does_not_deadlock() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let executed = Executed::default();
    let within = counts_begun(&executed).layer(once(&redlock));
    let app = calling(&executed, &within, "a").layer(once(&redlock));
    let first = timeout(secs(5), pay(&app, "/payments", "a")).await.unwrap();
    assert_eq!(first.body, "payment 1, then 200", "it does not meet itself");
    assert!(pay(&app, "/payments", "a").await.is_replayed());
    assert_eq!(executed.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn task_with_the_extensions_of_a_recorded_execution_gets_a_replay() {
    for late in [5, 15, 500] {
        let nodes = ScriptedNodes::new(3);
        set_all(&nodes, OpKind::Record, Gate::Slow(ms(20)));
        let redlock = redlock(&nodes);
        let (executed, again) = (Executed::default(), Executed::default());
        let behind = counts_begun(&again).layer(once(&redlock).wait(secs(1)));
        let (sender, answered) = tokio::sync::oneshot::channel();
        let sender = Arc::new(std::sync::Mutex::new(Some(sender)));
        let counted = executed.clone();
        let pay_and_leave = async move |extensions: Extensions| {
            let sender = sender.lock().unwrap().take().unwrap();
            tokio::spawn(async move {
                sleep(ms(late)).await;
                let mut call = request("/payments", "a");
                *call.extensions_mut() = extensions;
                sender.send(Answer::to(&behind, call).await).unwrap();
            });
            format!("payment {}", counted.one_more())
        };
        let app = Router::new().route("/payments", post(pay_and_leave));
        let app = app.layer(once(&redlock));
        assert_eq!(pay(&app, "/payments", "a").await.body, "payment 1");
        let answer = answered.await.unwrap();
        assert!(answer.is_replayed(), "after {late} ms: {answer:?}");
        assert_eq!((executed.count(), again.count()), (1, 0), "after {late} ms");
    }
}

// ---- retries within an execution ----

/// An execution whose first attempt loses its account's lock, and what the second is answered.
async fn retried_after_a_loss(statuses: &'static [u16], refused: bool) -> (Router, Executed) {
    let (accounts, records) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
    let locks = Redlock::builder().scripted(&accounts).ttl(ms(150));
    let locks = locks.build().unwrap();
    let executed = Executed::default();
    let stack = ServiceBuilder::new()
        .layer(once(&redlock(&records)))
        .map_request(|request: http::Request<_>| request.map(|_| String::new()))
        .layer(RetryLayer::new(Again::after(ms(100), 1)))
        .layer(per_account(&locks))
        .service(answering(&executed, statuses));
    let app = Router::new().route_service("/payments", stack);
    let first = tokio::spawn({
        let app = app.clone();
        async move { pay(&app, "/payments?account=1", "a").await }
    });
    sleep(ms(10)).await;
    (0..3).for_each(|node| accounts.wipe(node));
    if refused {
        let other = redlock(&accounts).lock(("account", "1")).await.unwrap();
        tokio::spawn(async move {
            sleep(secs(5)).await;
            drop(other);
        });
    }
    let first = first.await.unwrap();
    let expected = if refused {
        423
    } else {
        *statuses.last().unwrap()
    };
    assert_eq!(first.status.as_u16(), expected);
    (app, executed)
}

#[tokio::test(start_paused = true)]
async fn inner_retry_that_succeeds_after_a_lost_lock_is_recorded() {
    let (app, executed) = retried_after_a_loss(&[200], false).await;
    assert_eq!(executed.count(), 2, "the first was stopped midway");
    for _ in 0..2 {
        let again = pay(&app, "/payments?account=1", "a").await;
        assert!(again.is_replayed(), "{again:?}");
        sleep(secs(20)).await;
    }
    assert_eq!(executed.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn inner_retry_that_fails_after_a_lost_lock_leaves_the_key_locked_until_its_ttl() {
    for refused in [false, true] {
        let (app, executed) = retried_after_a_loss(&[200, 503], refused).await;
        let before = executed.count();
        assert_eq!(before, if refused { 1 } else { 2 });
        let again = pay(&app, "/payments?account=1", "a").await;
        assert_eq!(again.code(), "lock-contended", "{refused}: {again:?}");
        assert_eq!(executed.count(), before);
        sleep(secs(11)).await;
        pay(&app, "/payments?account=1", "a").await;
        assert!(executed.count() > before);
    }
}

// ---- panics ----

#[derive(Clone)]
struct PanicsIn(&'static str);

impl<R> Service<R> for PanicsIn {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: R) -> Self::Future {
        assert_ne!(self.0, "call", "as the test wants it");
        ready(Ok(Response::default()))
    }
}

#[tokio::test(start_paused = true)]
async fn panic_in_call_releases_the_lock_before_catch_panic_answers() {
    let nodes = ScriptedNodes::new(3);
    set_all(&nodes, OpKind::Release, Gate::Slow(ms(20)));
    let redlock = redlock(&nodes);
    let extractor = |_: &Parts| -> Option<LockKey> { panic!("as the test wants it") };
    let second = RedlockLayer::new(redlock.clone(), extractor).layer(PanicsIn("never"));
    let caught = CatchPanicLayer::new();
    let request = || cloneable("/?account=1", "a");
    let of_call = (caught, per_account(&redlock)).layer(PanicsIn("call"));
    let of_key = (caught, per_account(&redlock)).layer(second);
    for turn in 0..2 {
        let answer = of_call.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            (answer.status().as_u16(), nodes.locks()),
            (500, vec![0; 3]),
            "{turn}"
        );
        let answer = of_key.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            (answer.status().as_u16(), nodes.locks()),
            (500, vec![0; 3]),
            "{turn}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn panic_in_poll_ready_releases_the_lock_before_catch_panic_answers() {
    #[derive(Clone)]
    struct ReadyOnce(Arc<AtomicUsize>);

    impl<R> Service<R> for ReadyOnce {
        type Response = Response<String>;
        type Error = Infallible;
        type Future = std::future::Ready<Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            let calls = self.0.fetch_add(1, Ordering::SeqCst);
            assert_eq!(calls, 0, "as the test wants it");
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: R) -> Self::Future {
            ready(Ok(Response::default()))
        }
    }

    let nodes = ScriptedNodes::new(3);
    set_all(&nodes, OpKind::Release, Gate::Slow(ms(20)));
    let layer = per_account(&redlock(&nodes)).wait(secs(1));
    let service = (CatchPanicLayer::new(), layer).layer(ReadyOnce(Arc::default()));
    let answer = service
        .oneshot(cloneable("/?account=1", "a"))
        .await
        .unwrap();
    assert_eq!((answer.status().as_u16(), nodes.locks()), (500, vec![0; 3]));
}

/// Calls, and says whether that panicked.
async fn panics(app: &Router, target: &str, key: &str) -> bool {
    AssertUnwindSafe(pay(app, target, key))
        .catch_unwind()
        .await
        .is_err()
}

#[tokio::test(start_paused = true)]
async fn panic_in_fingerprint_or_record_if_executes_at_most_once() {
    type Set = fn(IdempotencyLayer) -> IdempotencyLayer;
    let before: [Set; 1] = [|layer| layer.fingerprint(|_, _| panic!("as the test wants it"))];
    let after: [Set; 1] = [|layer| layer.record_if(|_| panic!("as the test wants it"))];
    for (sets, executions) in [(before, 0), (after, 1)] {
        for set in sets {
            let nodes = ScriptedNodes::new(3);
            let (redlock, executed) = (redlock(&nodes), Executed::default());
            let app = counts_begun(&executed).layer(per_account(&redlock));
            let broken = app.clone().layer(set(once(&redlock)));
            let target = "/payments?account=1";
            assert!(panics(&broken, target, "a").await);
            assert_eq!(executed.count(), executions);
            // What was executed may have had an effect: only its key stays locked.
            sleep(ms(100)).await;
            assert_eq!(nodes.locks(), vec![executions; 3]);
            let mended = app.layer(once(&redlock));
            let again = pay(&mended, target, "a").await;
            let code = if executions == 0 {
                ""
            } else {
                "lock-contended"
            };
            assert_eq!((again.code(), executed.count()), (code, 1));
            assert!(redlock.drain(secs(1)).await.held.is_empty());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn panic_in_rejection_leaves_no_lock_and_no_intent() {
    let nodes = ScriptedNodes::new(3);
    let (redlock, executed) = (redlock(&nodes), Executed::default());
    let broken = |_: &Rejection, _: &RequestKind| -> http::Response<Full<Bytes>> {
        panic!("as the test wants it")
    };
    let layer = once(&redlock).at_most_once(true);
    let app = counts_begun(&executed).layer(per_account(&redlock).rejection(broken));
    let app = app
        .layer(CatchPanicLayer::new())
        .layer(layer.rejection(broken));
    let other = redlock.lock(("account", "1")).await.unwrap();
    let refused = pay(&app, "/payments?account=1", "a").await;
    assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR);
    other.release().await.unwrap();
    let paid = pay(&app, "/payments?account=1", "a").await;
    assert_eq!((paid.status, executed.count()), (StatusCode::OK, 1));
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn panic_in_lock_keys_takes_no_lock_and_releases_outer_locks() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let pay_there = async |_: Locked<Query<Account>>| "paid";
    let app = Router::new().route("/payments", post(pay_there));
    let state = AppState {
        redlock: redlock.clone(),
    };
    let app = app.with_state(state).layer(per_account(&redlock));
    let app = app.layer(CatchPanicLayer::new());
    let broken = pay(&app, "/payments?account=broken", "a").await;
    assert_eq!(broken.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(nodes.locks(), [0, 0, 0]);
    assert_eq!(pay(&app, "/payments?account=1", "a").await.body, "paid");
}

#[tokio::test(start_paused = true)]
async fn panic_in_the_response_body_leaves_the_key_locked_until_its_ttl() {
    for at_most_once in [false, true] {
        let nodes = ScriptedNodes::new(3);
        let (redlock, executed) = (redlock(&nodes), Executed::default());
        let counted = executed.clone();
        let pay_there = async move || {
            let number = counted.one_more();
            let body = Body::from("paid").map_frame(move |frame| {
                assert!(number > 1, "as the test wants it");
                frame
            });
            // Of a size that is known, so that it is read to be recorded.
            Response::new(Body::new(http_body_util::Limited::new(
                Sized::new(body, 4),
                4,
            )))
        };
        let app = Router::new().route("/payments", post(pay_there));
        let app = app.layer(per_account(&redlock));
        let app = app.layer(once(&redlock).at_most_once(at_most_once));
        assert!(panics(&app, "/payments?account=1", "a").await);
        sleep(ms(100)).await;
        assert_eq!(nodes.locks(), [1, 1, 1], "the key, and not the account");
        let again = pay(&app, "/payments?account=1", "a").await;
        assert_eq!(again.code(), "lock-contended");
        sleep(secs(11)).await;
        let again = pay(&app, "/payments?account=1", "a").await;
        let code = if at_most_once { "outcome-unknown" } else { "" };
        assert_eq!(again.code(), code);
    }
}

/// A body that tells its size.
struct Sized<B> {
    body: Pin<Box<B>>,
    size: u64,
}

impl<B> Sized<B> {
    fn new(body: B, size: u64) -> Self {
        let body = Box::pin(body);
        Self { body, size }
    }
}

impl<B: hyper::body::Body> hyper::body::Body for Sized<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<B::Data>, B::Error>>> {
        self.body.as_mut().poll_frame(context)
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        hyper::body::SizeHint::with_exact(self.size)
    }
}

// ---- locks that end while something begins ----

#[tokio::test(start_paused = true)]
async fn outer_lock_lost_while_the_key_is_confirmed_again_prevents_the_execution() {
    for on_lost in [OnLost::Abort, OnLost::Notify] {
        let (accounts, records) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
        let locks = Redlock::builder().scripted(&accounts).ttl(secs(3));
        let locks = locks.build().unwrap();
        let executed = Executed::default();
        // Asked for at 980 ms, it begins at 1,960 ms and asks until 2,005 ms; the account's lock is renewed
        // at 1,980 ms.
        set_all(&records, OpKind::Confirm, Gate::Slow(ms(45)));
        let slow = SlowReadiness::new(counts_begun(&executed), ms(980));
        let slow = once(&redlock(&records)).at_most_once(true).layer(slow);
        let service = per_account(&locks).on_lost(on_lost).layer(slow);
        let call = service.oneshot(request("/payments?account=1", "a"));
        let (answer, ()) = tokio::join!(call, async {
            sleep(ms(1_500)).await;
            (0..3).for_each(|node| accounts.wipe(node));
        });
        assert_eq!(answer.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
        sleep(secs(1)).await;
        assert_eq!(executed.count(), 0, "{on_lost:?}");
        assert_eq!(records.locks(), [0, 0, 0], "{on_lost:?}");
        let app = counts_begun(&executed).layer(once(&redlock(&records)).at_most_once(true));
        assert_eq!(
            pay(&app, "/payments?account=1", "a").await.body,
            "payment 1"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn max_hold_below_the_ttl_stops_the_execution() {
    for (max_hold, latest) in [(ms(0), ms(200)), (ms(500), ms(600)), (secs(3), ms(3_100))] {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let app = counts_begun(&executed);
        let app = app.layer(once(&redlock(&nodes)).max_hold(max_hold).at_most_once(true));
        let began = Instant::now();
        let late = pay(&app, "/payments?ms=8000", "a").await;
        let took = began.elapsed();
        assert_eq!(late.code(), "lock-lost", "{max_hold:?}");
        let reason = Some(Rejection::Lost(LostReason::MaxHold));
        assert_eq!(late.rejection, reason, "{max_hold:?}");
        assert!(
            took + ms(10) >= max_hold && took <= latest,
            "{max_hold:?}: {took:?}"
        );
        sleep(secs(10)).await;
        let again = pay(&app, "/payments?ms=8000", "a").await;
        assert_eq!((again.code(), executed.count()), ("outcome-unknown", 1));
    }
}

// ---- clients that go away ----

/// Polls a request as often as `polls`, with time going on in between, and drops it then. Returns whether it
/// had ended.
async fn dropped_after(app: &Router, polls: usize) -> bool {
    let mut call = pin!(pay(app, "/payments?account=1&ms=30", "a"));
    for _ in 0..polls {
        let polled = poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_ready())).await;
        if polled {
            return true;
        }
        // Timers and tasks go on.
        sleep(ms(1)).await;
    }
    false
}

#[tokio::test(start_paused = true)]
async fn request_dropped_at_any_poll_leaves_no_key_or_one_recorded_execution() {
    type Stack = fn(Router, &Redlock) -> Router;
    let stacks: [(&str, Stack); 5] = [
        ("alone", |app, redlock| {
            app.layer(once(redlock).at_most_once(true))
        }),
        ("lock outside", |app, redlock| {
            app.layer(once(redlock).at_most_once(true))
                .layer(per_account(redlock))
        }),
        ("lock inside", |app, redlock| {
            app.layer(per_account(redlock))
                .layer(once(redlock).at_most_once(true))
        }),
        ("running on, outside", |app, redlock| {
            let app = app.layer(once(redlock).at_most_once(true));
            app.layer(per_account(redlock).on_disconnect(RunToCompletion))
        }),
        ("running on, inside", |app, redlock| {
            let app = app.layer(per_account(redlock).on_disconnect(RunToCompletion));
            app.layer(once(redlock).at_most_once(true))
        }),
    ];
    for (name, stack) in stacks {
        let mut outcomes = [0; 2];
        for polls in 0..90 {
            let nodes = ScriptedNodes::new(3);
            (0..3).for_each(|node| nodes.set(node, Gate::Slow(ms(5))));
            let (redlock, executed) = (redlock(&nodes), Executed::default());
            let app = stack(counts_begun(&executed), &redlock);
            let ended = dropped_after(&app, polls).await;
            sleep(ms(200)).await;
            let what = format!("{name}: dropped after {polls} polls");
            assert_eq!(nodes.locks(), [0, 0, 0], "{what}");
            let before = executed.count();
            assert!(before <= 1, "{what}");
            outcomes[before] += 1;
            let again = pay(&app, "/payments?account=1&ms=30", "a").await;
            assert_eq!(again.body, "payment 1", "{what}: {again:?}");
            assert_eq!(again.is_replayed(), before == 1, "{what}");
            assert_eq!(executed.count(), 1, "{what}");
            assert!(redlock.drain(secs(1)).await.held.is_empty(), "{what}");
            if ended {
                break;
            }
        }
        assert!(
            outcomes.iter().all(|count| *count > 3),
            "{name}: {outcomes:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn execution_without_its_client_keeps_all_outer_locks() {
    let nodes = ScriptedNodes::new(3);
    let (redlock, executed) = (redlock(&nodes), Executed::default());
    let tenant = RedlockLayer::new(redlock.clone(), ("tenant", key::query("tenant")));
    let app = counts_begun(&executed).layer(once(&redlock));
    let app = app.layer(per_account(&redlock)).layer(tenant);
    let call = pay(&app, "/payments?account=1&tenant=2&ms=1000", "a");
    assert!(timeout(ms(100), call).await.is_err());
    sleep(ms(100)).await;
    for target in [
        "/payments?account=1&tenant=3",
        "/payments?account=4&tenant=2",
    ] {
        let beside = pay(&app, target, "b").await;
        assert_eq!(beside.status, StatusCode::LOCKED, "{target}");
    }
    sleep(secs(1)).await;
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0; 3]));
}

#[tokio::test(start_paused = true)]
async fn outer_lock_is_held_until_a_streamed_response_is_sent_or_dropped() {
    for leaves in [false, true] {
        let nodes = ScriptedNodes::new(3);
        let redlock = redlock(&nodes);
        let streaming = async || {
            let pieces = stream::iter(0..20).then(|piece| async move {
                sleep(ms(100)).await;
                Ok::<_, Infallible>(format!("{piece}\n"))
            });
            Body::from_stream(pieces)
        };
        let app = Router::new().route("/payments", post(streaming));
        let app = app.layer(once(&redlock)).layer(per_account(&redlock));
        let target = "/payments?account=1";
        let response = app.clone().oneshot(request(target, "a")).await.unwrap();
        let mut body = response.into_body();
        assert!(body.frame().await.unwrap().is_ok());
        assert_eq!(pay(&app, target, "b").await.status, StatusCode::LOCKED);
        if leaves {
            drop(body);
            sleep(ms(10)).await;
        } else {
            body.collect().await.unwrap();
        }
        assert_eq!(nodes.locks(), [0, 0, 0]);
        assert_eq!(pay(&app, target, "a").await.code(), "result-not-kept");
    }
}

// ---- refusals within ----

/// What a refusal within is made to look like.
fn refusing_layers(redlock: &Redlock) -> Vec<(&'static str, RedlockLayer)> {
    let ok = |_: &Rejection, _: &RequestKind| http::Response::new(Full::from("please wait"));
    let layer = || per_account(redlock);
    vec![
        ("200", layer().contended_status(StatusCode::OK)),
        ("404", layer().contended_status(StatusCode::NOT_FOUND)),
        ("409", layer().contended_status(StatusCode::CONFLICT)),
        (
            "503",
            layer().contended_status(StatusCode::SERVICE_UNAVAILABLE),
        ),
        ("a response of the user's", layer().rejection(ok)),
    ]
}

#[tokio::test(start_paused = true)]
async fn inner_refusal_is_no_execution_whatever_its_response() {
    let redlock = redlock(&ScriptedNodes::new(3));
    for rebuilds in [false, true] {
        for content_type in ["application/json", "application/grpc"] {
            for (number, (name, layer)) in refusing_layers(&redlock).into_iter().enumerate() {
                let executed = Executed::default();
                let app = counts_begun(&executed).layer(layer);
                let app = if rebuilds {
                    app.layer(map_response(rebuilt))
                } else {
                    app
                };
                let app = app.layer(once(&redlock).at_most_once(true));
                let key = format!("{rebuilds}-{content_type}-{number}").replace('/', "-");
                let call = || {
                    let mut call = request("/payments?account=1", &key);
                    let value = HeaderValue::from_static(content_type);
                    call.headers_mut().insert("content-type", value);
                    call
                };
                let other = redlock.lock(("account", "1")).await.unwrap();
                let refused = Answer::to(&app, call()).await;
                assert_eq!(executed.count(), 0);
                other.release().await.unwrap();
                let paid = Answer::to(&app, call()).await;
                let what = format!("{name}, {content_type}, rebuilt: {rebuilds}");
                assert_eq!(executed.count(), 1, "{what}: {refused:?}, then {paid:?}");
                assert!(Answer::to(&app, call()).await.is_replayed(), "{what}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_by_the_second_of_two_inner_locks_is_no_execution() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    for extractor in [false, true] {
        let executed = Executed::default();
        let counted = executed.clone();
        let locked = async move |_: Locked<Query<Account>>| counted.one_more().to_string();
        let state = AppState {
            redlock: redlock.clone(),
        };
        let app = if extractor {
            let app = Router::new().route("/payments", post(locked));
            app.with_state(state)
        } else {
            counts_begun(&executed).layer(per_account(&redlock))
        };
        let first = RedlockLayer::new(redlock.clone(), ("tenant", key::query("tenant")));
        let app = app.layer(first).layer(map_response(rebuilt));
        let app = app.layer(once(&redlock).at_most_once(true));
        let target = "/payments?account=1&tenant=2";
        let key = format!("extractor-{extractor}");
        let other = redlock.lock(("account", "1")).await.unwrap();
        pay(&app, target, &key).await;
        assert_eq!((executed.count(), nodes.locks()), (0, vec![1; 3]));
        other.release().await.unwrap();
        pay(&app, target, &key).await;
        assert_eq!((executed.count(), nodes.locks()), (1, vec![0; 3]));
        assert!(pay(&app, target, &key).await.is_replayed());
    }
}

#[tokio::test(start_paused = true)]
async fn handler_that_ignores_its_lock_rejection_is_recorded() {
    type Refused = LockedRejection<axum::extract::rejection::QueryRejection>;
    let redlock = redlock(&ScriptedNodes::new(3));
    let executed = Executed::default();
    let counted = executed.clone();
    let pay_anyway = async move |locked: Result<Locked<Query<Account>>, Refused>| {
        let number = counted.one_more();
        let without = if locked.is_err() { " without" } else { "" };
        format!("payment {number}{without}")
    };
    let state = AppState {
        redlock: redlock.clone(),
    };
    let app = Router::new().route("/payments", post(pay_anyway));
    let app = app
        .with_state(state)
        .layer(once(&redlock).at_most_once(true));
    let other = redlock.lock(("account", "1")).await.unwrap();
    let target = "/payments?account=1";
    assert_eq!(pay(&app, target, "a").await.body, "payment 1 without");
    assert!(pay(&app, target, "a").await.is_replayed());
    assert_eq!(executed.count(), 1);
    drop(other);
}

#[tokio::test(start_paused = true)]
async fn handler_that_returns_its_lock_rejection_is_no_execution() {
    type Refused = LockedRejection<axum::extract::rejection::QueryRejection>;
    let redlock = redlock(&ScriptedNodes::new(3));
    let executed = Executed::default();
    let counted = executed.clone();
    let pay_locked = async move |locked: Result<Locked<Query<Account>>, Refused>| match locked {
        Ok(_) => format!("payment {}", counted.one_more()).into_response(),
        Err(refused) => refused.into_response(),
    };
    let state = AppState {
        redlock: redlock.clone(),
    };
    let app = Router::new().route("/payments", post(pay_locked));
    let app = app.with_state(state).layer(map_response(rebuilt));
    let app = app.layer(once(&redlock).at_most_once(true));
    let other = redlock.lock(("account", "1")).await.unwrap();
    let target = "/payments?account=1";
    assert_eq!(pay(&app, target, "a").await.status, StatusCode::BAD_REQUEST);
    other.release().await.unwrap();
    assert_eq!(pay(&app, target, "a").await.body, "payment 1");
    assert!(pay(&app, target, "a").await.is_replayed());
}

// ---- idempotency within idempotency ----

fn scoped(redlock: &Redlock, header: &'static str) -> IdempotencyLayer {
    IdempotencyLayer::new(redlock.clone(), key::header(header)).at_most_once(true)
}

#[tokio::test(start_paused = true)]
async fn nested_scopes_each_replay_their_own_records() {
    for of_two_services in [false, true] {
        let nodes = [ScriptedNodes::new(3), ScriptedNodes::new(3)];
        let executed = Executed::default();
        let outer = redlock(&nodes[0]);
        let inner = redlock(&nodes[usize::from(of_two_services)]);
        let app = counts_begun(&executed).layer(scoped(&inner, "x-tenant"));
        let app = app.layer(scoped(&outer, "x-user"));
        let call = async |user: &str, tenant: &str| {
            let mut call = request("/payments", "a");
            for (name, value) in [("x-user", user), ("x-tenant", tenant)] {
                let value = HeaderValue::from_str(value).unwrap();
                call.headers_mut()
                    .insert(HeaderName::from_static(name), value);
            }
            Answer::to(&app, call).await
        };
        assert!(!call("ann", "t").await.is_replayed());
        assert!(call("ann", "t").await.is_replayed());
        assert!(call("bob", "t").await.is_replayed(), "by the inner layer");
        assert!(
            call("bob", "other").await.is_replayed(),
            "by the outer layer"
        );
        assert_eq!(executed.count(), 1);
        assert_eq!(call("eve", "other").await.body, "payment 2");
        assert_eq!(
            (nodes[0].locks(), nodes[1].locks()),
            (vec![0; 3], vec![0; 3])
        );
    }
}

#[tokio::test(start_paused = true)]
async fn duplicate_refused_by_the_inner_scope_leaves_the_outer_key_free() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let executed = Executed::default();
    let inner = counts_begun(&executed).layer(once(&redlock).at_most_once(true));
    let outer = inner.clone().layer(scoped(&redlock, "host"));
    let call = || {
        let mut call = request("/payments?ms=100", "a");
        call.headers_mut()
            .insert(HOST, HeaderValue::from_static("a"));
        call
    };
    let (first, refused) = tokio::join!(Answer::to(&inner, call()), async {
        sleep(ms(10)).await;
        Answer::to(&outer, call()).await
    });
    assert_eq!(
        (first.body, refused.code()),
        ("payment 1".into(), "lock-contended")
    );
    let again = Answer::to(&outer, call()).await;
    assert_eq!(again.body, "payment 1", "{again:?}");
    assert_eq!(executed.count(), 1);
}

// ---- those who wait ----

#[tokio::test(start_paused = true)]
async fn waiting_duplicates_of_a_failed_execution_execute_once_and_share_the_record() {
    for how in ["stopped", "panics", "error"] {
        let nodes = ScriptedNodes::new(3);
        let executed = Executed::default();
        let counted = executed.clone();
        let pay_there = async move || {
            let number = counted.one_more();
            if number == 1 && how == "stopped" {
                sleep(secs(1_000)).await;
            }
            sleep(ms(100)).await;
            assert!(number > 1 || how != "panics", "as the test wants it");
            let status = if number == 1 { 500 } else { 200 };
            let status = StatusCode::from_u16(status).unwrap();
            (status, format!("payment {number}"))
        };
        let app = Router::new().route("/payments", post(pay_there));
        // Two processes.
        let apps: Vec<Router> = (0..2)
            .map(|_| {
                let layer = once(&redlock(&nodes)).wait(secs(60)).max_hold(secs(15));
                app.clone().layer(layer).layer(CatchPanicLayer::new())
            })
            .collect();
        let mut calls = JoinSet::new();
        for number in 0..10 {
            let app = apps[number % 2].clone();
            calls.spawn(async move {
                sleep(ms(number as u64)).await;
                pay(&app, "/payments", "a").await
            });
        }
        let answers = calls.join_all().await;
        let with = |body: &'static str| answers.iter().filter(move |answer| answer.body == body);
        assert_eq!(executed.count(), 2, "{how}");
        assert_eq!(with("payment 2").count(), 9, "{how}: {answers:?}");
        assert_eq!(
            with("payment 2")
                .filter(|answer| answer.is_replayed())
                .count(),
            8
        );
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_duplicates_do_not_deadlock_a_concurrency_limit() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = redlock(&nodes);
    let limit = ConcurrencyLimitLayer::new(1);
    let target = "/payments?account=1&ms=100";
    let app = counts_begun(&executed).layer(per_account(&redlock).wait(secs(5)));
    // Within, the limit is of executions; outside, of those who wait too.
    let within = ServiceBuilder::new()
        .layer(once(&redlock).wait(secs(5)))
        .layer(limit.clone())
        .service(app.clone());
    let outside = (limit, once(&redlock).wait(secs(5))).layer(app);
    let within = Router::new().fallback_service(within);
    let outside = Router::new().fallback_service(outside);
    for app in [within, outside] {
        let mut calls = JoinSet::new();
        let before = executed.count();
        for number in 0..12 {
            let (app, key) = (app.clone(), format!("{before}-{}", number % 3));
            calls.spawn(async move { pay(&app, target, &key).await });
        }
        let answers = timeout(secs(5), calls.join_all())
            .await
            .expect("none hangs");
        assert!(answers.iter().all(|answer| answer.status == StatusCode::OK));
        assert_eq!(executed.count(), before + 3);
    }
}

#[tokio::test(start_paused = true)]
async fn load_shed_inside_leaves_the_key_locked_until_its_ttl() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let stack = ServiceBuilder::new()
        .layer(once(&redlock(&nodes)))
        .layer(tower::load_shed::LoadShedLayer::new())
        .layer(ConcurrencyLimitLayer::new(1))
        .service(counts_begun(&executed));
    let call = |key| stack.clone().oneshot(request("/payments?ms=500", key));
    let (first, second) = tokio::join!(call("a"), async {
        sleep(ms(10)).await;
        call("b").await
    });
    assert!(first.is_ok() && second.is_err());
    assert_eq!(call("b").await.unwrap().status(), StatusCode::CONFLICT);
    sleep(secs(11)).await;
    assert_eq!(call("b").await.unwrap().status(), StatusCode::OK);
    assert_eq!(executed.count(), 2);
}

// ---- drain ----

#[tokio::test(start_paused = true)]
async fn drain_waits_for_a_pending_execution_and_reports_an_endless_one_as_held() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = redlock(&nodes);
    let slow = SlowReadiness::new(counts_begun(&executed), ms(300));
    let service = once(&redlock).at_most_once(true).layer(slow);
    let call = tokio::spawn(service.clone().oneshot(request("/payments?ms=100", "a")));
    // Once before it is called, and once more behind the grant.
    sleep(ms(400)).await;
    let drained = redlock.drain(secs(5)).await;
    assert!(drained.held.is_empty(), "{drained:?}");
    assert_eq!(call.await.unwrap().unwrap().status(), StatusCode::OK);
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0; 3]));

    let redlock = self::redlock(&nodes);
    let app = counts_begun(&executed).layer(once(&redlock));
    let endless = tokio::spawn(async move { pay(&app, "/payments?ms=999999999", "b").await });
    sleep(ms(100)).await;
    let began = Instant::now();
    let drained = redlock.drain(secs(2)).await;
    assert!(began.elapsed() < secs(3));
    assert_eq!(drained.held.len(), 1, "{drained:?}");
    assert_eq!(nodes.locks(), [1, 1, 1], "never released under it");
    endless.abort();
}

#[tokio::test(start_paused = true)]
async fn inner_lock_refused_by_drain_is_no_execution() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = redlock(&nodes);
    let locked = per_account(&redlock).layer(counts_begun(&executed));
    let slow = SlowReadiness::new(locked, ms(300));
    let service = once(&redlock).at_most_once(true).layer(slow);
    let call = tokio::spawn(service.oneshot(request("/payments?account=1", "a")));
    sleep(ms(400)).await;
    assert!(redlock.drain(secs(5)).await.held.is_empty());
    let refused = call.await.unwrap().unwrap();
    let rejection = refused.extensions().get::<Rejection>();
    assert_eq!(rejection.map(Rejection::code), Some("shutting-down"));
    assert_eq!((executed.count(), nodes.locks()), (0, vec![0; 3]));
    // Another server takes it.
    let app = counts_begun(&executed).layer(once(&self::redlock(&nodes)).at_most_once(true));
    assert_eq!(
        pay(&app, "/payments?account=1", "a").await.body,
        "payment 1"
    );
}

// ---- locks without HTTP ----

#[tokio::test(start_paused = true)]
async fn lock_all_without_a_wait_is_contended_at_once_and_blocks_no_free_key() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let held = redlock.lock("b").await.unwrap();
    let ending = redlock.lock("a").await.unwrap();
    drop(ending);
    let began = Instant::now();
    let both = redlock.lock_all(["a", "b"]).wait(Duration::ZERO);
    let (both, alone) = tokio::join!(both, async {
        for _ in 0..3 {
            yield_now().await;
        }
        redlock.try_lock("a").await
    });
    assert!(matches!(both, Err(LockError::Contended { .. })));
    assert!(began.elapsed() < ms(5), "{:?}", began.elapsed());
    assert!(alone.is_ok(), "it is in no one's way: {alone:?}");
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn try_lock_twice_behind_a_dropped_guard_refuses_the_second_at_once() {
    let redlock = redlock(&ScriptedNodes::new(3));
    drop(redlock.try_lock("k").await.unwrap());
    let began = Instant::now();
    let (first, second) = tokio::join!(redlock.try_lock("k"), redlock.try_lock("k"));
    assert!(first.is_ok() && matches!(second, Err(LockError::Contended { .. })));
    assert!(began.elapsed() < ms(5), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn concurrent_try_lock_calls_end_at_once_with_one_holder_at_a_time() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let (holders, granted) = (Arc::<AtomicUsize>::default(), Executed::default());
    let began = Instant::now();
    let mut calls = JoinSet::new();
    for number in 0..300_u32 {
        let (redlock, holders, granted) = (redlock.clone(), holders.clone(), granted.clone());
        calls.spawn(async move {
            for _ in 0..number % 7 {
                yield_now().await;
            }
            let guard = if number % 3 == 0 {
                redlock.lock_all(["k", "l"]).wait(Duration::ZERO).await
            } else {
                redlock.try_lock("k").await
            };
            if let Ok(guard) = guard {
                assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                granted.one_more();
                yield_now().await;
                holders.fetch_sub(1, Ordering::SeqCst);
                drop(guard);
            }
        });
    }
    calls.join_all().await;
    assert!(granted.count() > 0 && began.elapsed() < ms(50));
    assert!(redlock.try_lock("k").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn try_lock_behind_a_panicked_lease_task_returns_within_50_ms() {
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder().scripted(&nodes).fencing(false);
    let redlock = redlock.ttl(secs(3)).build().unwrap();
    let guard = redlock.lock("k").await.unwrap();
    set_all(&nodes, OpKind::Confirm, Gate::Panic);
    guard.lost().await;
    (0..3).for_each(|node| nodes.set(node, Gate::Ready));
    drop(guard);
    let began = Instant::now();
    let next = redlock.try_lock("k").await;
    assert!(began.elapsed() <= ms(50), "{:?}", began.elapsed());
    // Whether it was released or ends by its ttl is the nodes' to say.
    drop(next);
    sleep(secs(4)).await;
    assert!(redlock.try_lock("k").await.is_ok());
}

// ---- one after the other, over two servers ----

#[tokio::test(start_paused = true)]
async fn sequential_client_of_two_servers_never_meets_its_own_lock() {
    type Stack = fn(Router, &Redlock) -> Router;
    let stacks: [(&str, Stack); 4] = [
        ("outside", |app, redlock| {
            app.layer(once(redlock)).layer(per_account(redlock))
        }),
        ("inside", |app, redlock| {
            app.layer(per_account(redlock)).layer(once(redlock))
        }),
        ("running on", |app, redlock| {
            let app = app.layer(per_account(redlock).on_disconnect(RunToCompletion));
            app.layer(once(redlock)).layer(CatchPanicLayer::new())
        }),
        ("running on, outside", |app, redlock| {
            let app = app.layer(once(redlock));
            app.layer(per_account(redlock).on_disconnect(RunToCompletion))
        }),
    ];
    for (name, stack) in stacks {
        let nodes = ScriptedNodes::new(3);
        set_all(&nodes, OpKind::Release, Gate::Slow(ms(20)));
        set_all(&nodes, OpKind::Record, Gate::Slow(ms(10)));
        let executed = Executed::default();
        let counted = executed.clone();
        let handler = any(async move || {
            let number = counted.one_more();
            let status = [200, 500, 204, 429, 404][number % 5];
            (StatusCode::from_u16(status).unwrap(), format!("{number}"))
        });
        let app = Router::new().route("/payments", handler);
        let servers = [(); 2].map(|()| stack(app.clone(), &redlock(&nodes)));
        for number in 0..40 {
            // Every second one is a duplicate of the one before.
            let key = format!("k{}", number / 2);
            let answer = pay(&servers[number % 2], "/payments?account=1", &key).await;
            assert_eq!(answer.code(), "", "{name}, {number}: {answer:?}");
        }
        assert!(executed.count() > 20);
    }
}

#[tokio::test(start_paused = true)]
async fn request_dropped_before_its_service_is_ready_leaves_the_key_to_the_next() {
    for waits in [false, true] {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let redlock = redlock(&nodes);
        let layer = once(&redlock)
            .at_most_once(true)
            .wait(secs(u64::from(waits) * 30));
        let slow = layer.layer(SlowReadiness::new(counts_begun(&executed), secs(5)));
        let first = tokio::spawn(slow.oneshot(request("/payments", "a")));
        sleep(secs(7)).await;
        assert_eq!(nodes.locks(), [1, 1, 1], "granted, and not begun");
        let app = counts_begun(&executed).layer(layer.clone());
        let mut others = JoinSet::new();
        if waits {
            (0..3).for_each(|_| {
                let app = app.clone();
                others.spawn(async move { pay(&app, "/payments", "a").await });
            });
            sleep(ms(10)).await;
        }
        first.abort();
        sleep(ms(100)).await;
        let answers = others.join_all().await;
        assert!(answers.iter().all(|answer| answer.body == "payment 1"));
        let again = pay(&app, "/payments", "a").await;
        assert_eq!((again.body, executed.count()), ("payment 1".into(), 1));
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn timeout_between_two_scopes_lets_the_inner_execution_finish_and_be_replayed() {
    use tower_http::timeout::TimeoutLayer;

    let nodes = ScriptedNodes::new(3);
    let (redlock, executed) = (redlock(&nodes), Executed::default());
    let short = TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, ms(200));
    let app = counts_begun(&executed).layer(once(&redlock)).layer(short);
    let app = app.layer(scoped(&redlock, "host").at_most_once(false));
    let call = async || {
        let mut call = request("/payments?ms=1000", "a");
        call.headers_mut()
            .insert(HOST, HeaderValue::from_static("a"));
        Answer::to(&app, call).await
    };
    assert_eq!(call().await.status, StatusCode::REQUEST_TIMEOUT);
    assert_eq!(call().await.code(), "lock-contended");
    sleep(secs(2)).await;
    for _ in 0..2 {
        let again = call().await;
        assert!(
            again.is_replayed() && again.body == "payment 1",
            "{again:?}"
        );
    }
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0; 3]));
}

#[tokio::test(start_paused = true)]
async fn max_hold_stops_an_execution_whose_lock_ended_before() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = counts_begun(&executed).layer(once(&redlock(&nodes)).max_hold(secs(30)));
    set_all(&nodes, OpKind::Confirm, Gate::Failing);
    let began = Instant::now();
    let late = pay(&app, "/payments?ms=300000", "a").await;
    assert_eq!(late.rejection, Some(Rejection::Lost(LostReason::MaxHold)));
    let took = began.elapsed();
    assert!(took > secs(29) && took < secs(31), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn inner_refusal_of_a_copied_request_is_outcome_unknown() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let executed = Executed::default();
    let app = counts_begun(&executed).layer(per_account(&redlock));
    // Drops the request, and sends a copy of it.
    let copying = service_fn(move |request: Request| {
        let (app, (parts, body)) = (app.clone(), request.into_parts());
        let copy = Request::from_parts(parts.clone(), body);
        drop(parts);
        app.oneshot(copy)
    });
    let app = Router::new().fallback_service(copying);
    let app = app.layer(once(&redlock).at_most_once(true));
    let target = "/payments?account=1";
    let other = redlock.lock(("account", "1")).await.unwrap();
    assert_eq!(pay(&app, target, "a").await.status, StatusCode::LOCKED);
    other.release().await.unwrap();
    assert_eq!(pay(&app, target, "a").await.code(), "outcome-unknown");
    assert_eq!(pay(&app, target, "b").await.body, "payment 1");
    assert!(pay(&app, target, "b").await.is_replayed());
}

#[tokio::test(start_paused = true)]
async fn on_unavailable_proceed_still_executes_once() {
    let (accounts, records) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
    let executed = Executed::default();
    let layer = || per_account(&redlock(&accounts)).on_unavailable(OnUnavailable::Proceed);
    set_all(&accounts, OpKind::Acquire, Gate::Failing);
    let once = || once(&redlock(&records)).at_most_once(true);
    let inside = counts_begun(&executed).layer(layer()).layer(once());
    let outside = counts_begun(&executed).layer(once()).layer(layer());
    for (number, app) in [inside, outside].iter().enumerate() {
        let key = format!("k{number}");
        let first = pay(app, "/payments?account=1", &key).await;
        assert_eq!(
            (first.status, executed.count()),
            (StatusCode::OK, number + 1)
        );
        assert!(pay(app, "/payments?account=1", &key).await.is_replayed());
    }
}

// ---- keys ----

#[test]
fn key_cookie_reads_random_headers_like_the_cookie_crate_or_refuses_them() {
    const PIECES: [&str; 22] = [
        "sid", "%73id", "=", "=", "=", ";", ";", " ", "\t", "\"", "%22", "%20", "%3B", "%3D", "%",
        "%5", "%00", "A", "B", ",", "+", "%C3%A9",
    ];
    let mut random = fastrand::Rng::with_seed(12);
    let mut read = 0;
    for _ in 0..200_000 {
        let pieces: String = (0..random.usize(1..9))
            .map(|_| random.choice(PIECES).unwrap())
            .collect();
        let text = if random.bool() {
            format!("sid={pieces}")
        } else {
            pieces
        };
        let Ok(value) = HeaderValue::from_str(&text) else {
            continue;
        };
        let mut request = Request::new(());
        request.headers_mut().insert(COOKIE, value);
        let ours = key::cookie("sid").extract(&request.into_parts().0);
        // As axum-extra's `CookieJar::from_headers` does.
        let mut jar = cookie::CookieJar::new();
        for cookie in text
            .split(';')
            .filter_map(|text| cookie::Cookie::parse_encoded(text.to_owned()).ok())
        {
            jar.add_original(cookie);
        }
        let Ok(ours) = ours else { continue };
        let theirs = jar
            .get("sid")
            .map(|cookie| cookie.value_trimmed().to_owned());
        let theirs = theirs.filter(|value| !value.is_empty());
        read += usize::from(theirs.is_some());
        assert_eq!(
            ours,
            theirs.map(|value| LockKey::from(value).into()),
            "{text:?}"
        );
    }
    assert!(read > 10_000, "{read}");
}

#[tokio::test(start_paused = true)]
async fn idempotency_key_executes_once_for_all_encodings_of_a_path() {
    const PIECES: [&str; 18] = [
        "a", "%61", "%41", "A", "~", "%7e", "%7E", "@", "%40", "%2f", "%2F", ".", "%2e", "%25",
        "%2561", "+", "%20", ":",
    ];
    let redlock = redlock(&ScriptedNodes::new(3));
    let read = Arc::new(std::sync::Mutex::new(std::collections::BTreeMap::<
        String,
        usize,
    >::new()));
    let noted = Arc::clone(&read);
    let handler = post(async move |Path(id): Path<String>| {
        *noted.lock().unwrap().entry(id.clone()).or_default() += 1;
        id
    });
    let app = Router::new().route("/p/{id}", handler);
    let app = app.layer(once(&redlock));
    let mut random = fastrand::Rng::with_seed(12);
    let mut second = 0;
    for _ in 0..3_000 {
        let id: String = (0..random.usize(1..3))
            .map(|_| random.choice(PIECES).unwrap())
            .collect();
        let answer = pay(&app, &format!("/p/{id}"), "a").await;
        let decoded = percent_encoding::percent_decode_str(&id)
            .decode_utf8()
            .unwrap();
        assert!(
            answer.status == 422 || answer.body == decoded.as_bytes(),
            "{id}: {answer:?}"
        );
        second += usize::from(answer.is_replayed());
    }
    let read = read.lock().unwrap();
    let twice: Vec<_> = read.iter().filter(|(_, times)| **times > 1).collect();
    assert!(twice.is_empty() && second > 1_000, "{twice:?}");
}

#[tokio::test(start_paused = true)]
async fn methods_can_lock_head_alone() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let layer = RedlockLayer::new(redlock.clone(), "all").methods([Method::HEAD]);
    let app = Router::new().route("/", any(async || "read")).layer(layer);
    let held = redlock.lock("all").await.unwrap();
    for (method, status) in [(Method::HEAD, 423), (Method::GET, 200), (Method::POST, 200)] {
        let request = Request::builder().method(&method).uri("/");
        let answer = Answer::to(&app, request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status.as_u16(), status, "{method}");
    }
    drop(held);
}

#[derive(Clone)]
struct UserId(&'static str);

fn keys_of(extractor: &impl KeyExtractor, user: Option<&'static str>) -> Option<LockKeys> {
    let mut request = Request::get("/?device=d").body(()).unwrap();
    if let Some(user) = user {
        request.extensions_mut().insert(UserId(user));
    }
    extractor.extract(&request.into_parts().0).unwrap()
}

#[test]
fn key_extension_optional_is_missing_in_every_combinator() {
    let user = || key::extension::<UserId>(|user| user.0).optional();
    let device = || key::query("device");
    let some = |key: LockKey| Some(LockKeys::from(key));
    for absent in [None, Some("")] {
        assert_eq!(keys_of(&("user", user()), absent), None);
        assert_eq!(keys_of(&key::each(device(), user()), absent), None);
        assert_eq!(keys_of(&user().or(device()), absent), some("d".into()));
        assert_eq!(
            keys_of(&user().when(|_| true).or(device()), absent),
            some("d".into())
        );
        assert_eq!(keys_of(&user().hashed().or(user()), absent), None);
        assert_eq!(
            keys_of(&("x", user().or(device())), absent),
            some(("x", "d").into())
        );
    }
    assert_eq!(
        keys_of(&("user", user()), Some("u")),
        some(("user", "u").into())
    );
}

#[test]
fn key_or_behind_a_conditional_literal_is_not_constant() {
    let staff = || "staff".when(|parts: &Parts| parts.uri.path() == "/staff");
    assert!(!staff().or(key::query("device")).is_constant());
    assert!(!staff().or("customers").is_constant());
    assert!("staff".or(key::query("device")).is_constant());
}

#[tokio::test(start_paused = true)]
async fn forward_token_and_expose_token_of_two_layers_may_share_a_header() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let name = HeaderName::from_static("x-token");
    let layer = |what: &'static str| {
        let layer = RedlockLayer::new(redlock.clone(), (what, key::query("account")));
        layer.forward_token(name.clone()).expose_token(name.clone())
    };
    let seen = any(async |request: Request| {
        let tokens = request.headers().get_all("x-token").iter();
        let tokens: Vec<_> = tokens
            .map(|token| token.to_str().unwrap().to_owned())
            .collect();
        tokens.join(",")
    });
    let app = Router::new().route("/", seen);
    let app = app.layer(layer("inner")).layer(layer("outer"));
    let call = Request::post("/?account=1")
        .header("x-token", "1")
        .header("x_token", "2");
    let call = call.header("x-token", "3").body(Body::empty()).unwrap();
    let answer = Answer::to(&app, call).await;
    let exposed: Vec<_> = answer.headers.get_all("x-token").iter().collect();
    assert_eq!(exposed.len(), 1);
    let (inner, outer) = (
        str::from_utf8(&answer.body).unwrap(),
        exposed[0].to_str().unwrap(),
    );
    assert!(
        inner.parse::<u64>().unwrap() > 3 && outer.parse::<u64>().unwrap() > 3,
        "{answer:?}"
    );
}

// ---- the smallest settings ----

#[tokio::test(start_paused = true)]
async fn retention_zero_executes_again_and_max_waiters_zero_refuses_duplicates() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let redlock = redlock(&nodes);
    let app = counts_begun(&executed).layer(once(&redlock).retention(Duration::ZERO));
    for number in 1..4 {
        let paid = pay(&app, "/payments", "a").await;
        assert_eq!(paid.body, format!("payment {number}"));
        sleep(ms(50)).await;
    }
    let app = counts_begun(&executed).layer(once(&redlock).wait(secs(5)).max_waiters(0));
    let (first, second) = tokio::join!(pay(&app, "/payments?ms=100", "b"), async {
        sleep(ms(10)).await;
        pay(&app, "/payments?ms=100", "b").await
    });
    assert_eq!(
        (first.status, second.code()),
        (StatusCode::OK, "lock-overloaded")
    );
    assert_eq!((executed.count(), nodes.locks()), (4, vec![0; 3]));
}

#[test]
fn runtime_dropped_during_an_execution_leaves_the_key_locked_until_its_ttl() {
    let nodes = ScriptedNodes::new(3);
    let executed = Executed::default();
    let redlock = redlock(&nodes);
    let app = counts_begun(&executed)
        .layer(once(&redlock))
        .layer(per_account(&redlock));
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let first = runtime();
    first.block_on(async {
        let call = pay(&app, "/payments?account=1&ms=60000", "a");
        assert!(timeout(ms(50), call).await.is_err());
    });
    drop(first);
    runtime().block_on(async {
        let again = pay(&app, "/payments?account=2", "a").await;
        assert!(!again.status.is_success(), "{again:?}");
        assert_eq!(executed.count(), 1);
        let other = pay(&app, "/payments?account=2", "b").await;
        assert_eq!(other.body, "payment 2");
    });
}

#[tokio::test(start_paused = true)]
async fn execution_of_an_unpolled_request_runs_to_its_end() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = counts_begun(&executed).layer(once(&redlock(&nodes)));
    let mut call = Box::pin(pay(&app, "/payments?ms=20000", "a"));
    let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
    for _ in 0..100 {
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        yield_now().await;
        if executed.count() == 1 {
            break;
        }
    }
    sleep(secs(30)).await;
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0; 3]));
    assert_eq!(call.await.body, "payment 1");
    let dropped = catch_unwind(AssertUnwindSafe(|| drop(app)));
    assert!(dropped.is_ok());
}

#[tokio::test(start_paused = true)]
async fn outer_lock_lost_with_on_lost_notify_lets_the_execution_be_recorded() {
    let (accounts, records) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
    let executed = Executed::default();
    let counted = executed.clone();
    let pay_there = post(async move |execution: ExecutionHandle| {
        sleep(secs(20)).await;
        assert!(execution.is_valid());
        format!("payment {}", counted.one_more())
    });
    let app = Router::new().route("/payments", pay_there);
    let outer = per_account(&redlock(&accounts)).on_lost(OnLost::Notify);
    let app = app
        .layer(once(&redlock(&records)).at_most_once(true))
        .layer(outer);
    let (first, ()) = tokio::join!(pay(&app, "/payments?account=1", "a"), async {
        sleep(secs(1)).await;
        (0..3).for_each(|node| accounts.wipe(node));
    });
    assert_eq!(first.body, "payment 1");
    assert!(pay(&app, "/payments?account=1", "a").await.is_replayed());
    assert_eq!(
        (accounts.locks(), records.locks()),
        (vec![0; 3], vec![0; 3])
    );
}
