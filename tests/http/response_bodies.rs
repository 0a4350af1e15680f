//! When a request's lock is released: at the head, with the last frame, on a drop, a panic or a loss.
//!
//! The tests run over scripted nodes on tokio's paused clock, so the elapsed time shows whether a frame was
//! held. They read responses as hyper does: it stops at trailers, at the end that the body reports, and at
//! the content-length, without polling further.

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, pending, ready};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::RETRY_AFTER;
use http::{Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Empty, Full};
use support::ms;
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, ScriptedNodes};
use tower_redlock::{LockHandle, LostReason, OnLost, Rejection, ReleaseAt};

use crate::scripted_bodies::Step::{Data, Error, Panic, Trailers, Wait};
use crate::scripted_bodies::{
    Flag, NODE_TIMEOUT, RELEASE, Script, TICK, TTL, answered, code, is_free, layer, lose, ok,
    pieces, post, redlock, set_release, slow_to_release, stream, with_length, working,
};

// Rules: http.sequence
#[tokio::test(start_paused = true)]
async fn last_frame_that_the_client_waits_for_is_held() {
    let full = ok(Full::<Bytes>::from("ab"));
    assert_eq!(pieces(post(), full).await, ["head", "held data ab"]);
    let two = || stream(&[Data("ab"), Data("cd")]);
    let trailers = stream(&[Data("ab"), Trailers]);
    // hyper does not poll beyond the declared length, so the end of the stream is too late.
    let never_ends = with_length("4", stream(&[Data("ab"), Data("cd"), Wait(10 * TTL)]));
    for (response, expected) in [
        (ok(two().ending()), &["head", "data ab", "held data cd"][..]),
        (ok(two().sized(4)), &["head", "data ab", "held data cd"]),
        (never_ends, &["head", "data ab", "held data cd"]),
        (ok(trailers), &["head", "data ab", "held trailers"]),
        (ok(two()), &["head", "data ab", "data cd", "held end"]),
        (ok(stream(&[])), &["head", "held end"]),
        // hyper ends such a message with its head and drops the body without a poll.
        (with_length("0", stream(&[])), &["held head"]),
    ] {
        assert_eq!(pieces(post(), response).await, expected);
    }
}

// Rules: http.sequence
#[tokio::test(start_paused = true)]
async fn head_is_held_when_no_body_is_sent() {
    let empty = ok(Empty::<Bytes>::new());
    assert_eq!(pieces(post(), empty).await, ["held head"]);
    let endless = || stream(&[Wait(10 * TTL)]);
    let sent = &["head", "data no", "held end"];
    for (method, status, body, expected) in [
        ("POST", 200, stream(&[]).sized(0), &["held head"][..]),
        ("POST", 204, endless(), &["held head"]),
        ("POST", 304, endless(), &["held head"]),
        ("HEAD", 200, endless(), &["held head"]),
        ("HEAD", 404, endless(), &["held head"]),
        ("CONNECT", 200, endless(), &["held head"]),
        ("CONNECT", 404, stream(&[Data("no")]), sent),
    ] {
        let mut response = ok(body);
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        let request = support::request(method, "/").map(drop);
        let pieces = pieces(request, response).await;
        assert_eq!(pieces, expected, "{method} {status}");
    }
}

#[tokio::test(start_paused = true)]
async fn body_reads_no_frame_ahead_and_delays_only_the_last() {
    let nodes = slow_to_release();
    let steps = [Data("a"), Wait(ms(7)), Data("b"), Wait(ms(7)), Data("c")];
    let response = ok(stream(&steps).ending());
    let response = answered(&layer(&redlock(&nodes)), post(), response).await;
    let mut body = response.into_body();
    for expected in [ms(0), ms(7), ms(7) + RELEASE] {
        let began = Instant::now();
        assert!(body.frame().await.unwrap().unwrap().is_data());
        let took = began.elapsed();
        assert!(took >= expected && took <= expected + 2 * TICK, "{took:?}");
        // Time that the client takes is not the body's.
        sleep(ms(100)).await;
    }
    assert!(body.frame().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn body_with_a_held_frame_is_not_at_its_end_and_counts_the_frame() {
    let nodes = slow_to_release();
    let body = Full::<Bytes>::from("abcd");
    let body = answered(&layer(&redlock(&nodes)), post(), ok(body))
        .await
        .into_body();
    let mut body = pin!(body);
    assert!(!body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(4));
    assert!(futures_util::poll!(body.as_mut().frame()).is_pending());
    // The inner body is at its end now, but its frame is here.
    assert!(!body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(4));
    let frame = body.as_mut().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "abcd");
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(body.as_mut().frame().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn body_that_fails_or_is_dropped_releases_in_the_background() {
    for (frames, fails) in [(0, false), (1, false), (2, false), (2, true)] {
        let nodes = slow_to_release();
        let redlock = redlock(&nodes);
        let last = if fails { Error } else { Wait(10 * TTL) };
        let inner = stream(&[Data("ab"), Data("cd"), last]);
        let dropped = inner.dropped.clone();
        let response = answered(&layer(&redlock), post(), ok(inner)).await;
        let mut body = response.into_body();
        for _ in 0..frames {
            body.frame().await.unwrap().unwrap();
        }
        assert!(!is_free(&nodes));
        let began = Instant::now();
        let body = if fails {
            let error = body.frame().await.unwrap().unwrap_err();
            assert_eq!(error.downcast_ref(), Some(&fmt::Error));
            assert_eq!(began.elapsed(), Duration::ZERO, "the error is not held");
            Some(body)
        } else {
            drop(body);
            assert!(dropped.is_set());
            None
        };
        sleep(RELEASE + TICK).await;
        assert!(is_free(&nodes), "after {frames} frames");
        assert_eq!(redlock.drain(TTL).await.held, []);
        drop(body);
    }
}

#[tokio::test(start_paused = true)]
async fn release_at_head_awaits_a_majority_and_not_the_slowest_node() {
    let slow = |millis| Gate::Slow(ms(millis));
    for (gates, expected) in [
        ([Gate::Ready, Gate::Ready, Gate::Never], ms(0)),
        ([Gate::Ready, slow(20), slow(40)], ms(20)),
        ([slow(20), Gate::Never, slow(30)], ms(30)),
        ([slow(10), Gate::Failing, slow(10)], ms(10)),
    ] {
        let nodes = ScriptedNodes::new(3);
        set_release(&nodes, gates);
        let redlock = redlock(&nodes);
        let layer = layer(&redlock).release_at(ReleaseAt::ResponseHead);
        let began = Instant::now();
        let body = stream(&[Data("ab"), Wait(TTL), Data("cd")]);
        let response = answered(&layer, post(), ok(body)).await;
        let took = began.elapsed();
        assert!(
            took >= expected && took <= expected + TICK,
            "{gates:?}: {took:?}"
        );
        let free = nodes.locks().iter().filter(|locks| **locks == 0).count();
        assert!(free >= 2, "{gates:?}: {:?}", nodes.locks());
        // The body has nothing to do with the lock any more.
        let began = Instant::now();
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "abcd"
        );
        assert!(began.elapsed() <= TTL + TICK);
    }
}

#[tokio::test(start_paused = true)]
async fn unconfirmed_release_holds_the_response_for_one_node_timeout() {
    for gate in [Gate::Mute, Gate::Never] {
        for release_at in [ReleaseAt::BodyEnd, ReleaseAt::ResponseHead] {
            let nodes = ScriptedNodes::new(3);
            set_release(&nodes, [gate, gate, Gate::Ready]);
            let layer = layer(&redlock(&nodes)).release_at(release_at);
            let began = Instant::now();
            let response = answered(&layer, post(), ok(Full::<Bytes>::from("ab"))).await;
            let body = response.into_body().collect().await.unwrap();
            let took = began.elapsed();
            assert_eq!(body.to_bytes(), "ab", "the response is what it is");
            assert!(
                took >= NODE_TIMEOUT && took <= NODE_TIMEOUT + TICK,
                "{gate:?} {release_at:?}: {took:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn await_release_off_holds_no_frame() {
    for release_at in [ReleaseAt::BodyEnd, ReleaseAt::ResponseHead] {
        let nodes = slow_to_release();
        let layer = layer(&redlock(&nodes)).release_at(release_at);
        let layer = layer.await_release(false);
        let began = Instant::now();
        let response = answered(&layer, post(), ok(stream(&[Data("ab"), Data("cd")]))).await;
        response.into_body().collect().await.unwrap();
        // A client's next request may find its own lock at another server: that is the price.
        let other = self::layer(&redlock(&nodes));
        let response = answered(&other, post(), ok(Empty::<Bytes>::new()));
        let refused = response.await.status() == StatusCode::LOCKED;
        assert!(refused, "{release_at:?}");
        assert_eq!(began.elapsed(), Duration::ZERO, "{release_at:?}");
        sleep(RELEASE + TICK).await;
        assert!(is_free(&nodes));
    }
}

// Rules: lock-lost
#[tokio::test(start_paused = true)]
async fn lock_lost_during_the_handler_aborts_it_with_503() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let dropped = Flag::default();
    let service = working(&dropped, |_| pending::<Response<Full<Bytes>>>());
    // Called directly: `oneshot` would drop the future as soon as it is done.
    let mut calling = pin!(layer(&redlock).layer(service).call(post()));
    assert!(futures_util::poll!(&mut calling).is_pending());
    sleep(ms(5)).await;
    lose(&nodes);
    let began = Instant::now();
    let response = calling.as_mut().await.unwrap();
    // The next renewal finds out.
    assert!(began.elapsed() <= TTL / 3 + TICK, "{:?}", began.elapsed());
    assert!(dropped.is_set(), "not only when the future is dropped");
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(code(&response), "lock-lost");
    assert_eq!(response.headers().get(RETRY_AFTER), None);
    let rejection = response.extensions().get::<Rejection>();
    assert_eq!(rejection, Some(&Rejection::Lost(LostReason::Gone)));
    sleep(NODE_TIMEOUT).await;
    assert!(is_free(&nodes), "the third node has nothing left either");
}

#[tokio::test(start_paused = true)]
async fn lock_lost_during_the_body_ends_it_with_an_error() {
    for max_hold in [ms(60_000), ms(500)] {
        let nodes = ScriptedNodes::new(3);
        let redlock = redlock(&nodes);
        let layer = layer(&redlock).max_hold(max_hold);
        let inner = stream(&[Data("ab"), Wait(10 * TTL), Data("cd")]);
        let dropped = inner.dropped.clone();
        let mut body = answered(&layer, post(), ok(inner)).await.into_body();
        body.frame().await.unwrap().unwrap();
        let expected = if max_hold < TTL {
            LostReason::MaxHold
        } else {
            lose(&nodes);
            LostReason::Gone
        };
        let error = body.frame().await.unwrap().unwrap_err();
        let lost = error.downcast_ref::<Rejection>();
        assert_eq!(lost, Some(&Rejection::Lost(expected)));
        assert!(dropped.is_set(), "the inner body is of no use any more");
        assert!(body.frame().await.is_none());
        assert!(body.is_end_stream());
        sleep(NODE_TIMEOUT).await;
        assert!(is_free(&nodes));
    }
}

#[tokio::test(start_paused = true)]
async fn on_lost_notify_lets_handler_and_body_go_on() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let dropped = Flag::default();
    let losing = nodes.clone();
    let service = working(&dropped, move |request| {
        let losing = losing.clone();
        async move {
            let lock = request.extensions().get::<LockHandle>().unwrap().clone();
            assert!(lock.is_valid());
            lose(&losing);
            assert_eq!(lock.lost().await, LostReason::Gone);
            assert!(!lock.is_valid());
            ok(stream(&[Data("ab"), Wait(TTL), Data("cd")]))
        }
    });
    let service = layer(&redlock).on_lost(OnLost::Notify).layer(service);
    let response = service.oneshot(post()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let body = response.into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), "abcd");
    // The lock is lost while the body streams.
    let notifying = layer(&redlock).on_lost(OnLost::Notify).max_hold(ms(500));
    let streaming = stream(&[Data("ab"), Wait(10 * TTL), Data("cd")]);
    let response = answered(&notifying, post(), ok(streaming)).await;
    let body = response.into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), "abcd");
    assert_eq!(redlock.drain(TTL).await.held, []);
}

#[tokio::test(start_paused = true)]
async fn hold_until_sent_releases_with_the_last_frame() {
    let nodes = slow_to_release();
    let redlock = redlock(&nodes);
    let guard = redlock.lock("a").await.unwrap();
    let response = guard.hold_until_sent(ok(stream(&[Data("ab"), Data("cd")]).ending()));
    let mut body = response.into_body();
    let began = Instant::now();
    body.frame().await.unwrap().unwrap();
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert!(!is_free(&nodes));
    body.frame().await.unwrap().unwrap();
    assert!(began.elapsed() >= RELEASE && is_free(&nodes));

    let guard = redlock.lock("a").await.unwrap();
    let response = guard.hold_until_sent(ok(stream(&[Wait(10 * TTL)])));
    lose(&nodes);
    let error = response.into_body().frame().await.unwrap().unwrap_err();
    assert!(error.is::<Rejection>());
}

#[tokio::test(start_paused = true)]
async fn panic_in_the_handler_or_the_body_releases_the_lock() {
    type Handled = Pin<Box<dyn Future<Output = Response<Script>> + Send>>;
    let handlers: [fn() -> Handled; 3] = [
        || panic!("in the call"),
        || Box::pin(sleep(ms(5)).map(|()| panic!("in the future"))),
        || Box::pin(ready(ok(stream(&[Data("ab"), Panic])))),
    ];
    for handler in handlers {
        let nodes = ScriptedNodes::new(3);
        let redlock = redlock(&nodes);
        let service = service_fn(move |_| handler().map(Ok::<_, Infallible>));
        let service = layer(&redlock).layer(service);
        let serving = async {
            let response = service.oneshot(post()).await.unwrap();
            drop(response.into_body().collect().await);
        };
        AssertUnwindSafe(serving).catch_unwind().await.unwrap_err();
        assert_eq!(redlock.drain(TTL).await.held, []);
        assert!(is_free(&nodes));
    }
}
