//! An axum server: this crate's layer, and handlers that take a lock themselves.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::serve::ListenerExt;
use support::Cluster;
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;
use tower_redlock::{RedlockLayer, key};

use crate::child;
use crate::faults::flush;
use crate::figures::{Figures, Metric, Samples};
use crate::options::Options;
use crate::participants::{Participant, Who};
use crate::report::{Line, Target, print_figures};
use crate::same::NODES;

pub(crate) async fn w7(options: &Options, samples: &mut Samples) -> Vec<Line> {
    println!("the load generator is a child process with one thread and keep-alive connections");
    let cluster = Cluster::start(NODES);
    let mut servers = Vec::new();
    for who in Who::ALL {
        let server = serve(who.connect(&cluster.urls()).await).await;
        load(server, 16, Duration::from_millis(200)).await;
        servers.push((who, server));
    }
    let mut lines = Vec::new();
    for concurrency in [16, 64] {
        let name = format!("axum, c={concurrency}");
        for _ in 0..options.rounds {
            fastrand::shuffle(&mut servers);
            for (who, server) in &servers {
                let figures = load(*server, concurrency, options.time).await;
                samples.push(&name, *who, figures);
                flush(&cluster);
            }
        }
        print_figures(&name, samples);
        for (who, to) in [
            (Who::Ours, Who::ByHand),
            (Who::OursFenced, Who::ByHandFenced),
        ] {
            lines.push(Line::new(
                format!(
                    "W7 c={concurrency} requests/s, {}, x {}",
                    who.name(),
                    to.name()
                ),
                Target::AtLeast(1.0),
                samples.ratios(&name, Metric::Requests, who, to),
            ));
        }
    }
    lines
}

/// Serves one route in the background, and returns its address.
async fn serve(participant: Participant) -> SocketAddr {
    let app = match participant {
        Participant::Ours(redlock) => {
            let layer = RedlockLayer::new(redlock, ("bench", key::path("id")));
            let app = Router::new().route("/{id}", post(answer));
            app.route_layer(layer)
        }
        by_hand => Router::new()
            .route("/{id}", post(answer_under_lock))
            .with_state(by_hand),
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
    let listener = listener.expect("a port is free");
    let addr = listener.local_addr().expect("it is bound");
    // See the section TCP_NODELAY of the README.
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    tokio::spawn(async move {
        let served = axum::serve(listener, app).await;
        served.expect("axum's server never ends");
    });
    addr
}

async fn answer() -> &'static str {
    ANSWER
}

async fn answer_under_lock(
    State(participant): State<Participant>,
    Path(id): Path<String>,
) -> (StatusCode, &'static str) {
    let Some(held) = participant.acquire(&id).await else {
        return (StatusCode::LOCKED, "");
    };
    let answer = answer().await;
    participant.release(held).await;
    (StatusCode::OK, answer)
}

async fn load(server: SocketAddr, concurrency: usize, time: Duration) -> Figures {
    let wanted = [
        server.to_string(),
        concurrency.to_string(),
        time.as_millis().to_string(),
    ];
    let figures = spawn_blocking(move || {
        let args = wanted.each_ref().map(String::as_str);
        let mut process = child::start_load(&args);
        let status = process.wait(time + Duration::from_secs(30));
        assert!(status.success(), "{}", process.stderr());
        process.stdout()
    });
    let figures = figures.await.expect("the load generator ends");
    let figures: Vec<f64> = figures.split_whitespace().map(child::parse).collect();
    let metrics = [
        Metric::Requests,
        Metric::ResponseP50,
        Metric::ResponseP99,
        Metric::Errors,
    ];
    metrics.into_iter().zip(figures).collect()
}

const ANSWER: &str = "done";
