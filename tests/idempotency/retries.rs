//! tower retries inside, outside and between the layers of an execution.

use std::convert::Infallible;
use std::future::ready;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, Request};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use support::{Executed, ms, once, redlock, secs, three_nodes};
use tokio::time::sleep;
use tower::retry::RetryLayer;
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{Locked, Redlock};

use crate::payments::{Account, Again, cloneable, pay, per_account};

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
    let payer = app.clone();
    let first = tokio::spawn(async move { pay(&payer, "/payments?account=1", "a").await });
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
    let last = *statuses.last().unwrap();
    let expected = if refused { 423 } else { last };
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
        assert_eq!(again.code(), "request-in-progress", "{refused}: {again:?}");
        assert_eq!(executed.count(), before);
        sleep(secs(11)).await;
        pay(&app, "/payments?account=1", "a").await;
        assert!(executed.count() > before);
    }
}

#[tokio::test(start_paused = true)]
async fn inner_retry_that_is_refused_after_an_execution_counts_as_executed() {
    let (executed, (_nodes, redlock)) = (Executed::default(), three_nodes());
    let (counted, locks) = (executed.clone(), redlock.clone());
    // Takes the lock itself when it fails, so that the retry is refused.
    let handler = service_fn(move |_| {
        let (counted, locks) = (counted.clone(), locks.clone());
        async move {
            counted.one_more();
            tokio::spawn(async move {
                let guard = locks.lock(("account", "1")).await.unwrap();
                sleep(secs(1)).await;
                drop(guard);
            });
            tokio::task::yield_now().await;
            let mut response = Response::new(String::new());
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            Ok::<_, Infallible>(response)
        }
    });
    // The account's lock is held by the retry's first call until its body is dropped.
    let stack = ServiceBuilder::new()
        .layer(once(&redlock).at_most_once(true))
        .map_request(|request: http::Request<_>| request.map(|_| String::new()))
        .layer(RetryLayer::new(Again::at_once(1)))
        .layer(per_account(&redlock))
        .service(handler);
    let call = || stack.clone().oneshot(cloneable("/payments?account=1", "a"));
    let Ok(first) = call().await;
    assert_eq!(first.status(), StatusCode::LOCKED);
    sleep(secs(2)).await;
    let Ok(second) = call().await;
    assert_eq!(second.status(), StatusCode::CONFLICT);
    assert_eq!(executed.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn inner_retry_that_executes_after_a_refused_extractor_is_recorded() {
    let (accounts, records) = (ScriptedNodes::new(3), ScriptedNodes::new(3));
    (0..2).for_each(|node| accounts.set(node, Gate::Down));
    let executed = Executed::default();
    let counted = executed.clone();
    let pay_locked = async move |_: Locked<Query<Account>>| counted.one_more().to_string();
    let router = Router::new().route("/payments", post(pay_locked));
    let router: Router = router.with_state(redlock(&accounts));
    let stack = ServiceBuilder::new()
        .layer(once(&redlock(&records)))
        .map_request(|request: http::Request<_>| request.map(|_| String::new()))
        .layer(RetryLayer::new(Again::after(ms(100), 1)))
        .map_request(|request: http::Request<String>| request.map(Body::from))
        .service(router);
    let app = Router::new().route_service("/payments", stack);
    tokio::spawn(async move {
        sleep(ms(90)).await;
        (0..2).for_each(|node| accounts.set(node, Gate::Ready));
    });
    for _ in 0..2 {
        let answer = pay(&app, "/payments?account=1", "a").await;
        assert_eq!(answer.status, StatusCode::OK);
    }
    assert_eq!(executed.count(), 1);
}

// Rules: http.errors
#[tokio::test(start_paused = true)]
async fn outer_retry_does_not_meet_the_lock_of_its_first_attempt() {
    let (nodes, redlock) = three_nodes();
    (0..3).for_each(|node| nodes.set_for(node, OpKind::Release, Gate::Slow(ms(20))));
    for with_error in [false, true] {
        let calls = Executed::default();
        let counted = calls.clone();
        let handler = service_fn(move |_: http::Request<String>| {
            let mut response = Response::new("body".to_owned());
            ready(match (counted.one_more(), with_error) {
                (1, true) => Err("it failed"),
                (1, false) => {
                    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                    Ok(response)
                }
                _ => Ok(response),
            })
        });
        let stack = ServiceBuilder::new()
            .layer(RetryLayer::new(Again::at_once(1)))
            .layer(per_account(&redlock))
            .service(handler);
        let answer = stack.oneshot(cloneable("/?account=1", "a")).await;
        assert_eq!(answer.unwrap().status(), StatusCode::OK, "{with_error}");
        assert_eq!(calls.count(), 2);
        sleep(secs(1)).await;
    }
}
