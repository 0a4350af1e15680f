//! The layer among the layers and routers of a service: compression, timeouts, panics.

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::CONTENT_ENCODING;
use axum::middleware::{Next, from_fn};
use axum::routing::{any, get, post};
use support::{Answer, Executed, request_with, secs, send, subscribe};
use tokio::time::sleep;
use tower::Layer;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::timeout::TimeoutLayer;
use tower_redlock::IdempotencyKey;
use tower_redlock::test_util::ScriptedNodes;
use tracing::Instrument;

use crate::payments::{answering, counts_ended, layer, pay as pay_at, request};

const KEY: &str = "idempotency-key";

async fn pay(app: &Router, key: &str) -> Answer {
    pay_at(app, "/payments", key).await
}

#[tokio::test(start_paused = true)]
async fn compression_outside_applies_to_replays_and_inside_prevents_the_record() {
    let receipt = || "a receipt that is worth compressing ".repeat(100);
    let gzip = |key| {
        let headers = [(KEY, key), ("accept-encoding", "gzip")];
        request_with("POST", "/payments", &headers)
    };
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = answering(&executed, receipt);
    let outside = app.layer(layer(&nodes)).layer(CompressionLayer::new());
    let first = Answer::to(&outside, gzip("a")).await;
    assert_eq!(first.headers[CONTENT_ENCODING], "gzip");
    let again = Answer::to(&outside, gzip("a")).await;
    assert!(again.is_replayed());
    assert_eq!(again.as_recorded(), first.as_recorded());
    // The retry is read by another library.
    let plain = pay(&outside, "a").await;
    assert_eq!((plain.body, executed.count()), (receipt().into(), 1));

    let app = answering(&executed, receipt).layer(CompressionLayer::new());
    let within = app.layer(layer(&nodes));
    let first = Answer::to(&within, gzip("b")).await;
    assert_eq!(first.headers[CONTENT_ENCODING], "gzip");
    let again = Answer::to(&within, gzip("b")).await;
    assert_eq!((again.code(), executed.count()), ("result-not-kept", 2));
}

#[tokio::test(start_paused = true)]
async fn timeout_outside_lets_the_execution_finish_and_inside_frees_the_key() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let short = TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, secs(1));
    let slow = "/payments?ms=2000";
    let outside = counts_ended(&executed).layer(layer(&nodes)).layer(short);
    let late = pay_at(&outside, slow, "a").await;
    assert_eq!(late.status, StatusCode::REQUEST_TIMEOUT);
    sleep(secs(2)).await;
    let again = pay_at(&outside, slow, "a").await;
    assert!(again.is_replayed());
    assert_eq!((again.body, executed.count()), ("payment 1".into(), 1));

    for (at_most_once, then) in [(false, ""), (true, "outcome-unknown")] {
        let once = layer(&nodes).at_most_once(at_most_once);
        let within = counts_ended(&executed).layer(short).layer(once);
        let key = format!("b{at_most_once}");
        for code in ["", then] {
            let late = pay_at(&within, slow, &key).await;
            assert_eq!((late.code(), late.is_replayed()), (code, false));
        }
    }
    assert_eq!((executed.count(), nodes.locks()), (1, vec![0, 0, 0]));
}

#[tokio::test(start_paused = true)]
async fn catch_panic_inside_frees_the_key_and_outside_leaves_it_to_its_ttl() {
    for (within, code) in [(true, ""), (false, "request-in-progress")] {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let pay_there = post(async move || {
            assert!(executed.one_more() > 1, "as the test wants it");
            "paid"
        });
        let app = Router::new().route("/payments", pay_there);
        let (catch, once) = (CatchPanicLayer::new(), layer(&nodes));
        let app = if within {
            app.layer(catch).layer(once)
        } else {
            app.layer(once).layer(catch)
        };
        assert_eq!(pay(&app, "a").await.status, 500);
        // Outside, what the handler did by then is not known.
        assert_eq!(pay(&app, "a").await.code(), code);
        sleep(secs(11)).await;
        assert_eq!(pay(&app, "a").await.body, "paid");
        assert!(pay(&app, "a").await.is_replayed());
        assert_eq!(nodes.locks(), [0, 0, 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn idempotency_layer_keys_whole_paths_wherever_it_is_applied() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let once = || layer(&nodes).required(true);
    let routes = || {
        let executed = executed.clone();
        let pay = async move || executed.one_more().to_string();
        Router::new()
            .route("/payments", post(pay))
            .route("/read", get(async || "read"))
    };
    let stacks = [
        routes().layer(once()),
        routes().route_layer(once()),
        Router::new().nest("/v1", routes().layer(once())),
        Router::new().nest("/v2", routes()).layer(once()),
        Router::new().merge(routes().route_layer(once())),
        Router::new().route_service("/payments", once().layer(routes())),
    ];
    for (number, (app, prefix)) in stacks
        .into_iter()
        .zip(["", "", "/v1", "/v2", "", ""])
        .enumerate()
    {
        let (path, key) = (format!("{prefix}/payments"), number.to_string());
        let before = executed.count();
        let first = Answer::to(&app, request(&path, &key)).await;
        assert_eq!(first.status, StatusCode::OK, "{number}");
        let again = Answer::to(&app, request(&path, &key)).await;
        assert!(again.is_replayed(), "{number}");
        assert_eq!(again.as_recorded(), first.as_recorded(), "{number}");
        assert_eq!(executed.count(), before + 1, "{number}");
        let keyless = send(&app, "POST", &path).await;
        assert_eq!(keyless.code(), "key-missing", "{number}");
        if number != 5 {
            let read = request_with("GET", &format!("{prefix}/read"), &[(KEY, &key)]);
            assert_eq!(Answer::to(&app, read).await.body, "read", "{number}");
        }
        for path in ["/nowhere", "/v1/nowhere"] {
            let nowhere = Answer::to(&app, request(path, "unused")).await;
            assert_eq!(nowhere.status, StatusCode::NOT_FOUND, "{number}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn handler_sees_extensions_and_span_of_outer_layers_and_no_task_locals() {
    tokio::task_local! {
        static REQUEST: u32;
    }
    #[derive(Clone)]
    struct Outer;
    let _subscriber = subscribe(tracing_subscriber::registry());
    let see = post(async |request: Request| {
        let span = tracing::Span::current();
        let name = span.metadata().map(tracing::Metadata::name);
        let is_extended = request.extensions().get::<Outer>().is_some();
        let local = REQUEST.try_with(|number| *number);
        format!("{name:?} {is_extended} {:?}", local.ok())
    });
    let see = Router::new().route("/payments", see);
    let outer = from_fn(async |mut request: Request, next: Next| {
        request.extensions_mut().insert(Outer);
        let span = tracing::info_span!("request");
        REQUEST.scope(7, next.run(request)).instrument(span).await
    });
    let behind = see.layer(layer(&ScriptedNodes::new(3))).layer(outer);
    assert_eq!(pay(&behind, "a").await.body, "Some(\"request\") true None");
}

#[tokio::test(start_paused = true)]
async fn fallback_service_executes_once_per_key() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let counted = executed.clone();
    // A gateway, say: it has no routes of its own.
    let forward = any(async move || counted.one_more().to_string());
    let once = || layer(&nodes);
    let stacks = [
        Router::new().fallback_service(once().layer(forward.clone())),
        Router::new().fallback(forward.clone()).layer(once()),
        Router::new().fallback_service(forward.layer(once())),
    ];
    for (number, app) in stacks.into_iter().enumerate() {
        let first = pay(&app, &number.to_string()).await;
        assert_eq!(first.status, StatusCode::OK);
        let again = pay(&app, &number.to_string()).await;
        assert!(again.is_replayed(), "{number}");
        assert_eq!((again.body, executed.count()), (first.body, number + 1));
    }
    // Without a key it could be a missing page; what must not run then asks for the key itself.
    let counted = executed.clone();
    let forward = async move |_: IdempotencyKey| counted.one_more().to_string();
    let app = Router::new().fallback(forward);
    let app = app.layer(once().required(true));
    let keyless = send(&app, "POST", "/payments").await;
    assert_eq!(keyless.code(), "misconfigured");
    assert_eq!(executed.count(), 3);
    assert_eq!(pay(&app, "keyed").await.body, "4");
}
