//! `forward_token`, `expose_token` and `methods` of a layer.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, Method};
use axum::routing::any;
use support::{Answer, redlock};
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{RedlockLayer, key};

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
