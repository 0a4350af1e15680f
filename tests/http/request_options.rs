//! `RedlockLayer::options`: options of the lock for each request.

use axum::Router;
use axum::routing::any;
use http::StatusCode;
use http::request::Parts;
use support::{Executed, ms, redlock, secs, send, three_nodes_with};
use tokio::time::{Instant, sleep};
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{LockHandle, LockOptions, Redlock, RedlockLayer, key};

/// Options as the query string spells them, such as `wait=2`, in seconds.
fn options(parts: &Parts) -> LockOptions {
    let query = parts.uri.query().unwrap_or_default();
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.fold(LockOptions::default(), |options, (name, seconds)| {
        let time = |seconds: &str| secs(seconds.parse().unwrap());
        match name {
            "ttl" => options.ttl(time(seconds)),
            "wait" => options.wait(time(seconds)),
            "max_hold" => options.max_hold(time(seconds)),
            _ => options,
        }
    })
}

fn layer(redlock: &Redlock) -> RedlockLayer {
    RedlockLayer::new(redlock.clone(), ("thing", key::path("id")))
}

/// Answers with the validity of the lock, in seconds rounded up.
async fn validity(handle: LockHandle) -> String {
    handle.valid_for().as_secs_f32().ceil().to_string()
}

fn app(layer: RedlockLayer) -> Router {
    Router::new().route("/things/{id}", any(validity).layer(layer))
}

#[tokio::test(start_paused = true)]
async fn options_set_the_wait_of_one_request() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let app = app(layer(&redlock).options(options));
    let guard = redlock.try_lock(("thing", 7)).await.unwrap();
    let began = Instant::now();
    let refused = send(&app, "POST", "/things/7").await;
    assert_eq!(refused.status, StatusCode::LOCKED);
    let refused = send(&app, "POST", "/things/7?wait=0").await;
    assert_eq!(refused.status, StatusCode::LOCKED);
    assert!(began.elapsed() < ms(10));
    tokio::spawn(async move {
        sleep(secs(1)).await;
        drop(guard);
    });
    let served = send(&app, "POST", "/things/7?wait=2").await;
    assert_eq!(served.status, StatusCode::OK);
    assert!(began.elapsed() >= secs(1));
}

#[tokio::test(start_paused = true)]
async fn options_set_ttl_and_max_hold_of_one_request_and_leave_the_rest_to_the_layer() {
    let (_nodes, redlock) = three_nodes_with(|builder| builder.max_ttl(secs(60)));
    let layer = layer(&redlock).ttl(secs(20)).unwrap().wait(secs(2));
    let layer = layer.max_hold(secs(50)).options(options);
    let slow = async || sleep(secs(40)).await;
    let app = app(layer.clone()).route("/slow/{id}", any(slow).layer(layer));
    assert_eq!(send(&app, "POST", "/things/7").await.body, "20");
    assert_eq!(send(&app, "POST", "/things/7?ttl=40").await.body, "40");
    let guard = redlock.try_lock(("thing", 7)).await.unwrap();
    let began = Instant::now();
    let refused = send(&app, "POST", "/things/7?ttl=40").await;
    assert_eq!(refused.status, StatusCode::LOCKED);
    assert!(began.elapsed() >= secs(2));
    drop(guard);
    let began = Instant::now();
    let lost = send(&app, "POST", "/slow/8?max_hold=5").await;
    assert_eq!(lost.code(), "lock-lost");
    assert!(began.elapsed() < secs(30));
    let served = send(&app, "POST", "/slow/8").await;
    assert_eq!(served.status, StatusCode::OK);
}

#[tokio::test]
async fn ttl_of_a_layer_is_at_most_max_ttl_and_longer_than_the_drift() {
    let (_nodes, redlock) = three_nodes_with(|builder| builder.max_ttl(secs(60)));
    for (ttl, is_accepted) in [(secs(60), true), (secs(60) + ms(1), false), (ms(2), false)] {
        assert_eq!(layer(&redlock).ttl(ttl).is_ok(), is_accepted, "{ttl:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn options_are_asked_for_locked_requests_only() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let asked = Executed::default();
    let counted = asked.clone();
    let options = move |_: &Parts| {
        counted.one_more();
        LockOptions::default()
    };
    let layer = RedlockLayer::new(redlock, ("thing", key::query("id"))).options(options);
    let layer = layer.skip(|parts| parts.uri.path() == "/skip");
    let app = Router::new().fallback(any(async || "served").layer(layer));
    for (method, target, count) in [
        ("GET", "/?id=7", 0),
        ("POST", "/skip?id=7", 0),
        ("POST", "/", 0),
        ("POST", "/?id=7", 1),
    ] {
        send(&app, method, target).await;
        assert_eq!(asked.count(), count, "{method} {target}");
    }
}
