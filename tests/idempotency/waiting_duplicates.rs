//! Duplicates that wait, limits around them, and `drain`.

use axum::Router;
use axum::body::Body;
use axum::extract::{OriginalUri, Request};
use axum::http::header::HOST;
use axum::http::{HeaderValue, Response, StatusCode};
use axum::routing::{any, post};
use support::{Executed, SlowReadiness, ms, once, redlock, secs, set_all, three_nodes};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tower::limit::ConcurrencyLimitLayer;
use tower::load_shed::LoadShedLayer;
use tower::load_shed::error::Overloaded;
use tower::util::BoxCloneService;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_redlock::middleware::ReadBody;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{IdempotencyLayer, KeyExtractor, Redlock, RedlockLayer, RunToCompletion, key};

use crate::payments::{counts_begun, pay, per_account, request};

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
        let apps = [(); 2].map(|()| {
            let layer = once(&redlock(&nodes)).wait(secs(60)).max_hold(secs(15));
            app.clone().layer(layer).layer(CatchPanicLayer::new())
        });
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
        let replayed = with("payment 2").filter(|answer| answer.is_replayed());
        assert_eq!(replayed.count(), 8);
    }
}

/// Within, the limit is of executions; outside, of those who wait too.
#[tokio::test(start_paused = true)]
async fn waiting_duplicates_do_not_deadlock_a_concurrency_limit() {
    for within in [true, false] {
        let (executed, (_nodes, redlock)) = (Executed::default(), three_nodes());
        let app = counts_begun(&executed).layer(per_account(&redlock).wait(secs(5)));
        let (once, limit) = (once(&redlock).wait(secs(5)), ConcurrencyLimitLayer::new(1));
        let app = match within {
            true => Router::new().fallback_service((once, limit).layer(app)),
            false => Router::new().fallback_service((limit, once).layer(app)),
        };
        let mut calls = JoinSet::new();
        for number in 0..12 {
            let (app, key) = (app.clone(), format!("{}", number % 3));
            calls.spawn(async move { pay(&app, "/payments?account=1&ms=100", &key).await });
        }
        let answers = timeout(secs(5), calls.join_all()).await;
        let answers = answers.expect("none hangs");
        assert!(answers.iter().all(|answer| answer.status == StatusCode::OK));
        assert_eq!(executed.count(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn load_shed_inside_frees_the_key_of_a_request_that_it_sheds() {
    let plain = |app: Router, redlock: &Redlock| {
        let layer = once(redlock).at_most_once(true);
        let stack = ServiceBuilder::new().layer(layer).layer(shed_all_but_one());
        boxed(stack.service(app))
    };
    // The extractors copy the extensions, for what axum has put into them.
    let locked = |app: Router, redlock: &Redlock| {
        let key = ("account", key::path("id").or(key::query("account")));
        let stack = ServiceBuilder::new()
            .layer(once(redlock).at_most_once(true))
            .layer(RedlockLayer::new(redlock.clone(), key))
            .layer(shed_all_but_one());
        boxed(stack.service(app))
    };
    let twice = |app: Router, redlock: &Redlock| {
        let scope = key::path("id").or(key::host());
        let layer = IdempotencyLayer::new(redlock.clone(), scope).at_most_once(true);
        let stack = ServiceBuilder::new().layer(layer.clone()).layer(layer);
        let stack = stack.layer(shed_all_but_one());
        boxed(stack.service(app))
    };
    type Stack = BoxCloneService<Request, StatusCode, BoxError>;
    let stacks: [fn(Router, &Redlock) -> Stack; 3] = [plain, locked, twice];
    for (number, stack) in stacks.into_iter().enumerate() {
        for is_routed in [true, false] {
            if number > 0 && !is_routed {
                // `key::path` needs a router.
                continue;
            }
            let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
            let stack = stack(counts_begun(&executed), &redlock(&nodes));
            let call = |key: &str| {
                let mut request = request(&format!("/payments?ms=500&account={key}"), key);
                let host = HeaderValue::from_str(key).unwrap();
                request.headers_mut().insert(HOST, host);
                if is_routed {
                    let uri = OriginalUri(request.uri().clone());
                    request.extensions_mut().insert(uri);
                }
                stack.clone().oneshot(request)
            };
            let (first, second) = tokio::join!(call("a"), async {
                sleep(ms(10)).await;
                call("b").await
            });
            assert!(first.is_ok() && second.is_err(), "{number}, {is_routed}");
            assert_eq!(nodes.locks(), [0, 0, 0], "{number}, {is_routed}");
            assert_eq!(call("b").await.unwrap(), StatusCode::OK);
            assert_eq!(executed.count(), 2);
        }
    }
}

/// The first of two calls may have had an effect, whatever the second one says.
#[tokio::test(start_paused = true)]
async fn request_that_is_shed_when_it_is_sent_again_keeps_its_key() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = counts_begun(&executed);
    let sends_again = service_fn(move |request: Request<ReadBody<Body>>| {
        let (app, (parts, body)) = (app.clone(), request.into_parts());
        async move {
            let _again = parts.clone();
            let first = Request::from_parts(parts, body);
            assert_eq!(app.oneshot(first).await?.status(), StatusCode::OK);
            Err::<Response<Body>, _>(BoxError::from(Overloaded::new()))
        }
    });
    let stack = once(&redlock(&nodes)).layer(sends_again);
    let call = || stack.clone().oneshot(request("/payments", "a"));
    assert!(call().await.is_err());
    let retried = call().await.unwrap();
    assert_eq!(retried.status(), StatusCode::CONFLICT);
    assert_eq!(executed.count(), 1);
}

fn shed_all_but_one() -> (LoadShedLayer, ConcurrencyLimitLayer) {
    (LoadShedLayer::new(), ConcurrencyLimitLayer::new(1))
}

fn boxed<S, B>(stack: S) -> BoxCloneService<Request, StatusCode, BoxError>
where
    S: Service<Request, Response = Response<B>, Error = BoxError> + Clone + Send + 'static,
    S::Future: Send,
{
    let status = |response: Response<B>| response.status();
    stack.map_response(status).boxed_clone()
}

#[tokio::test(start_paused = true)]
async fn drain_waits_for_a_pending_execution() {
    let (executed, (nodes, redlock)) = (Executed::default(), three_nodes());
    let slow = SlowReadiness::new(counts_begun(&executed), ms(300));
    let service = once(&redlock).at_most_once(true).layer(slow);
    let call = tokio::spawn(service.clone().oneshot(request("/payments?ms=100", "a")));
    // Once before it is called, and once more behind the grant.
    sleep(ms(400)).await;
    let drained = redlock.drain(secs(5)).await;
    assert!(drained.is_clean(), "{drained:?}");
    assert_eq!(call.await.unwrap().unwrap().status(), StatusCode::OK);
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0; 3]));
}

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
