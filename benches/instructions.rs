//! Takes a given number of locks on embedded nodes or on servers, for `benches/instructions.sh` to count instructions.

use std::convert::Infallible;
use std::env;
use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join_all;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Empty};
use support::Cluster;
use tokio::runtime::Builder;
use tokio::task::spawn;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::{NodeGroup, Redlock, RedlockLayer, RestartGuard, key};

#[path = "compare/batched.rs"]
mod batched;
#[path = "compare/same.rs"]
mod same;

use crate::batched::Batched;
use crate::same::NODES;

fn main() {
    let args: Vec<String> = env::args().collect();
    let [_, user, fencing, groups, locks, ..] = args.as_slice() else {
        // `cargo test -p benches --benches` only starts it.
        return;
    };
    let (Ok(groups), Ok(locks)) = (groups.parse::<usize>(), locks.parse::<u32>()) else {
        return;
    };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("the runtime starts");
    runtime.block_on(async {
        let builder = Redlock::builder().fencing(fencing == "on");
        if user == "lanes" {
            let servers = Cluster::start(NODES);
            let lanes = Batched::connect(&servers.urls(), fencing == "on").await;
            let take = async |lanes: Batched, key: String| {
                let claim = lanes.acquire(&key).await.expect("the lock is free");
                assert!(lanes.release(&claim).await, "all nodes answer");
            };
            return take_together(&lanes, locks, take).await;
        }
        if user == "servers" {
            let servers = Cluster::start(NODES);
            let builder = builder.urls(servers.urls());
            // Fresh servers refuse locks at first; and valgrind is slow.
            let builder = builder.restart_guard(RestartGuard::Off);
            let built = builder.node_timeout(Duration::from_secs(2)).build();
            let take = async |redlock: Redlock, key: String| take_lock(&redlock, &key).await;
            return take_together(&built.expect("the settings are valid"), locks, take).await;
        }
        let builder = (0..groups).fold(builder, |builder, _| {
            builder.node_group(NodeGroup::new().embedded(NODES))
        });
        let redlock = builder.build().expect("the settings are valid");
        let handler = service_fn(async |_: Request<Empty<Bytes>>| {
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        });
        match user.as_str() {
            "handler" => send_requests(handler, locks).await,
            "layer" => {
                let layer = RedlockLayer::new(redlock, key::header("x-resource"));
                send_requests(layer.layer(handler), locks).await;
            }
            _ => take_locks(&redlock, locks).await,
        }
    });
}

/// The tasks that lock on servers at once.
const TASKS: u32 = 64;

async fn take_locks(redlock: &Redlock, locks: u32) {
    for _ in 0..locks {
        take_lock(redlock, "instructions").await;
    }
}

/// Takes one lock in each of many tasks, which share the connections, again and again.
async fn take_together<S: Clone, F>(service: &S, locks: u32, take: impl Fn(S, String) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    for _ in 0..locks / TASKS {
        let tasks =
            (0..TASKS).map(|task| spawn(take(service.clone(), format!("instructions {task}"))));
        try_join_all(tasks).await.expect("no task panics");
    }
}

async fn take_lock(redlock: &Redlock, key: &str) {
    let guard = redlock.try_lock(key).await;
    let released = guard.expect("the lock is free").release().await;
    released.expect("all nodes answer");
}

/// Sends requests to a service that answers at once, and reads the responses to their end.
async fn send_requests<S, B>(mut service: S, requests: u32)
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error = Infallible>,
    B: Body<Error: Debug>,
{
    for _ in 0..requests {
        let request = Request::post("/").header("x-resource", "instructions");
        let request = request.body(Empty::new()).expect("the parts are valid");
        let service = service.ready().await.expect("it is always ready");
        let response = service.call(request).await.expect("no error is possible");
        assert!(response.status().is_success(), "{}", response.status());
        let mut body = pin!(response.into_body());
        while body.frame().await.is_some() {}
        assert!(body.is_end_stream());
    }
}
