//! Panics of services, bodies and settings: locks are released, and nothing is executed twice.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use axum::routing::post;
use bytes::Bytes;
use futures_util::FutureExt;
use http_body_util::{BodyExt, Full};
use hyper::body::SizeHint;
use support::{Executed, ms, once, redlock, secs, set_all};
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{IdempotencyLayer, LockKey, RedlockLayer, Rejection, RequestKind};

use crate::payments::{cloneable, counts_begun, pay, per_account, sized};

type Answered = Result<Response<String>, Infallible>;

#[tokio::test(start_paused = true)]
async fn panic_in_call_releases_the_lock_before_catch_panic_answers() {
    let nodes = ScriptedNodes::new(3);
    set_all(&nodes, OpKind::Release, Gate::Slow(ms(20)));
    let redlock = redlock(&nodes);
    let extractor = |_: &Parts| -> Option<LockKey> { panic!("as the test wants it") };
    let panicking = service_fn(|_: http::Request<String>| -> Ready<Answered> {
        panic!("as the test wants it")
    });
    let second = RedlockLayer::new(redlock.clone(), extractor).layer(panicking);
    let caught = CatchPanicLayer::new();
    let request = || cloneable("/?account=1", "a");
    let of_call = (caught, per_account(&redlock)).layer(panicking);
    let of_key = (caught, per_account(&redlock)).layer(second);
    for turn in 0..2 {
        let answer = of_call.clone().oneshot(request()).await.unwrap();
        assert_eq!(answer.status(), 500, "{turn}");
        assert_eq!(nodes.locks(), [0; 3], "{turn}");
        let answer = of_key.clone().oneshot(request()).await.unwrap();
        assert_eq!(answer.status(), 500, "{turn}");
        assert_eq!(nodes.locks(), [0; 3], "{turn}");
    }
}

#[tokio::test(start_paused = true)]
async fn panic_in_poll_ready_releases_the_lock_before_catch_panic_answers() {
    #[derive(Clone)]
    struct ReadyOnce(Arc<AtomicUsize>);

    impl<R> Service<R> for ReadyOnce {
        type Response = Response<String>;
        type Error = Infallible;
        type Future = Ready<Answered>;

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
    let answer = service.oneshot(cloneable("/?account=1", "a"));
    let answer = answer.await.unwrap();
    assert_eq!((answer.status().as_u16(), nodes.locks()), (500, vec![0; 3]));
}

/// Calls, and says whether that panicked.
async fn panics(app: &Router, target: &str, key: &str) -> bool {
    let call = AssertUnwindSafe(pay(app, target, key));
    call.catch_unwind().await.is_err()
}

#[tokio::test(start_paused = true)]
async fn panic_in_fingerprint_or_record_if_executes_at_most_once() {
    type Set = fn(IdempotencyLayer) -> IdempotencyLayer;
    let before: Set = |layer| layer.fingerprint(|_, _| panic!("as the test wants it"));
    let after: Set = |layer| layer.record_if(|_| panic!("as the test wants it"));
    for (set, executions, code) in [(before, 0, ""), (after, 1, "request-in-progress")] {
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
        assert_eq!((again.code(), executed.count()), (code, 1));
        assert!(redlock.drain(secs(1)).await.held.is_empty());
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
            Response::new(sized(body, SizeHint::with_exact(4)))
        };
        let app = Router::new().route("/payments", post(pay_there));
        let app = app.layer(per_account(&redlock));
        let app = app.layer(once(&redlock).at_most_once(at_most_once));
        assert!(panics(&app, "/payments?account=1", "a").await);
        sleep(ms(100)).await;
        assert_eq!(nodes.locks(), [1, 1, 1], "the key, and not the account");
        let again = pay(&app, "/payments?account=1", "a").await;
        assert_eq!(again.code(), "request-in-progress");
        sleep(secs(11)).await;
        let again = pay(&app, "/payments?account=1", "a").await;
        let code = if at_most_once { "outcome-unknown" } else { "" };
        assert_eq!(again.code(), code);
    }
}
