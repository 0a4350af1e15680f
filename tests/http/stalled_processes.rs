//! Threads that block and processes that are stopped beyond the validity of a lock.
//!
//! The crate compares the validity with the clock and does not rely on a timer alone: neither begins a handler
//! without its lock, and neither passes on a response that came too late.

use std::convert::Infallible;
use std::env;
use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::http::{Request, Response, StatusCode, request::Parts};
use axum::routing;
use bytes::Bytes;
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use nix::sys::signal::Signal;
use support::{ChildProcess, http, ms, secs};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::{OnLost, Redlock, RedlockLayer, RunToCompletion};

use crate::scripted_bodies::{code, post};

const TTL: Duration = ms(200);

/// Keeps the thread busy until every lock that was held before is over.
fn block() {
    let end = Instant::now() + 2 * TTL;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

fn layer() -> RedlockLayer {
    let redlock = Redlock::builder().embedded(3).ttl(TTL).build().unwrap();
    RedlockLayer::new(redlock, |parts: &Parts| parts.uri.path().to_owned())
}

// Rules: http.clock
#[tokio::test]
async fn handler_that_blocks_its_thread_beyond_the_lock_is_answered_lock_lost() {
    for (on_lost, expected) in [(OnLost::Abort, "lock-lost"), (OnLost::Notify, "none")] {
        let handler = service_fn(|_: Request<()>| {
            block();
            ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())))
        });
        let Ok(response) = layer()
            .on_lost(on_lost)
            .layer(handler)
            .oneshot(post())
            .await;
        assert_eq!(code(&response), expected, "{on_lost:?}");
    }
}

/// Keeps the thread busy while it becomes ready, but for the first time.
#[derive(Clone, Default)]
struct SlowReadiness {
    asked: Arc<AtomicUsize>,
    called: Arc<AtomicUsize>,
}

impl Service<Request<()>> for SlowReadiness {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.asked.fetch_add(1, Ordering::SeqCst) > 0 {
            block();
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        self.called.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::default()))
    }
}

#[tokio::test]
async fn on_lost_notify_begins_no_handler_after_the_validity_of_its_lock() {
    for on_lost in [OnLost::Abort, OnLost::Notify] {
        let inner = SlowReadiness::default();
        let called = Arc::clone(&inner.called);
        let layer = layer().on_lost(on_lost).wait(secs(1));
        let Ok(response) = layer.layer(inner).oneshot(post()).await;
        assert_eq!(code(&response), "lock-lost", "{on_lost:?}");
        assert_eq!(called.load(Ordering::SeqCst), 0, "{on_lost:?}");
    }
}

#[tokio::test]
async fn run_to_completion_polls_no_handler_after_the_validity_of_its_lock() {
    for (on_lost, expected) in [(OnLost::Abort, "lock-lost"), (OnLost::Notify, "none")] {
        let polled = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&polled);
        let handler = service_fn(move |_: Request<()>| {
            let counted = Arc::clone(&counted);
            async move {
                tokio::spawn(async { block() });
                tokio::task::yield_now().await;
                counted.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        });
        let layer = layer().on_lost(on_lost).on_disconnect(RunToCompletion);
        let Ok(response) = layer.layer(handler).oneshot(post()).await;
        assert_eq!(code(&response), expected, "{on_lost:?}");
        let is_polled = usize::from(on_lost == OnLost::Notify);
        assert_eq!(polled.load(Ordering::SeqCst), is_polled, "{on_lost:?}");
    }
}

#[tokio::test]
async fn body_that_blocks_its_thread_beyond_the_lock_ends_with_an_error() {
    let handler = service_fn(|_: Request<()>| {
        let frames = (0..3).map(|number| {
            if number == 1 {
                block();
            }
            Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"part")))
        });
        let body = StreamBody::new(futures_util::stream::iter(frames));
        ready(Ok::<_, Infallible>(Response::new(body)))
    });
    let Ok(response) = layer().layer(handler).oneshot(post()).await;
    assert_eq!(response.status(), StatusCode::OK);
    let error = response.into_body().collect().await.err().unwrap();
    assert!(error.to_string().contains("lost"), "{error}");
}

/// A server process whose handler sleeps for less than its lock lives.
#[test]
#[ignore = "it is the server process of the test below, which starts and stops it"]
fn server_process() {
    let workers: usize = env::var(WORKERS).unwrap().parse().unwrap();
    let mut runtime = match workers {
        0 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    runtime.enable_all().worker_threads(workers.max(1));
    runtime.build().unwrap().block_on(async {
        let app = routing::post(async || {
            println!("\n#begun");
            sleep(TTL / 2).await;
        });
        let app = Router::new().route("/account", app).layer(layer());
        let (listener, addr) = http::listen().await;
        println!("\n{LISTENING}{addr}");
        axum::serve(listener, app).await.unwrap();
    });
}

/// Whichever timer and task the process comes to first after it goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_process_stopped_beyond_the_ttl_answers_lock_lost() {
    for workers in ["0", "1", "2"] {
        let program = env::current_exe().unwrap();
        let args = [
            "stalled_processes::server_process",
            "--exact",
            "--ignored",
            "--nocapture",
        ];
        let server = ChildProcess::start(program, &args, &[(WORKERS, workers)]);
        let line = server.wait_for_line(LISTENING, PATIENCE);
        let addr: SocketAddr = line.trim_start_matches(LISTENING).parse().unwrap();
        let response = tokio::spawn(http::request(addr, "POST", "/account", &[], b""));
        tokio::task::block_in_place(|| server.wait_for_line("#begun", PATIENCE));
        server.signal(Signal::SIGSTOP);
        sleep(3 * TTL).await;
        server.signal(Signal::SIGCONT);
        let response = response.await.unwrap();
        assert_eq!(response.status, 503, "{workers}: {}", response.text());
        assert!(response.text().contains("lock-lost"), "{}", response.text());
    }
}

const WORKERS: &str = "CLOCKS_WORKERS";
const LISTENING: &str = "#listening on ";
const PATIENCE: Duration = secs(30);
