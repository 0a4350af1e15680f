//! The parts of a lock that need no server: a round, a key and its names, and the layer.
//!
//! ```not_rust
//! cargo bench -p benches --bench micro
//! ```

use std::convert::Infallible;
use std::hint::black_box;

use bytes::Bytes;
use criterion::{Criterion, criterion_group, criterion_main};
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::protocol::acquire::{AcquireRound, AcquireStep};
use tower_redlock::protocol::message::{Answer, Reply};
use tower_redlock::protocol::round::{ReleaseRound, VoteStep};
use tower_redlock::protocol::{Namespace, NodeSet, Quorum};
use tower_redlock::{LockKey, LockKeys, Redlock, RedlockLayer, key};

criterion_group!(micro, rounds, keys, locks, middleware);
criterion_main!(micro);

fn rounds(criterion: &mut Criterion) {
    let quorum = Quorum::new(NODES).expect("five is not zero");
    let granted = Answer::Replied(Reply::Granted(1_763_659_999_000_000));
    criterion.bench_function("acquire round, equal numbers", |bencher| {
        bencher.iter(|| {
            let mut round = AcquireRound::new(quorum);
            let mut step = AcquireStep::Wait;
            for node in 0..quorum.majority() {
                step = round.on_acquire(node, black_box(&granted));
            }
            assert_ne!(step, AcquireStep::Wait);
        });
    });
    let released = Answer::Replied(Reply::Released);
    criterion.bench_function("release round", |bencher| {
        bencher.iter(|| {
            let mut round = ReleaseRound::new(quorum, NodeSet::all(quorum));
            for node in 0..quorum.majority() {
                round.on_release(node, black_box(&released));
            }
            assert_eq!(round.step(), VoteStep::Agreed);
        });
    });
}

fn keys(criterion: &mut Criterion) {
    criterion.bench_function("key of two parts", |bencher| {
        bencher.iter(|| LockKey::from(("account", black_box("1234567"))));
    });
    let namespace = Namespace::default();
    let keys = LockKeys::from(LockKey::from(("account", "1234567")));
    criterion.bench_function("names of a key", |bencher| {
        bencher.iter(|| namespace.names(black_box(&keys), |_| [0; 32]));
    });
}

fn locks(criterion: &mut Criterion) {
    let runtime = runtime();
    let redlock = runtime.block_on(async { Redlock::in_memory(NODES) });
    criterion.bench_function("lock and release on embedded nodes", |bencher| {
        bencher.to_async(&runtime).iter(|| async {
            let guard = redlock.try_lock("bench").await;
            guard.expect("the lock is free").release().await
        });
    });
}

fn middleware(criterion: &mut Criterion) {
    let runtime = runtime();
    let redlock = runtime.block_on(async { Redlock::in_memory(NODES) });
    let bare = service_fn(answer);
    let layer = RedlockLayer::new(redlock, ("account", key::header("x-id")));
    let locked = layer.layer(bare);
    let mut group = criterion.benchmark_group("request on embedded nodes");
    group.bench_function("bare service", |bencher| {
        bencher.to_async(&runtime).iter(|| send(bare));
    });
    group.bench_function("behind the layer", |bencher| {
        bencher.to_async(&runtime).iter(|| send(locked.clone()));
    });
    group.finish();
}

async fn answer(_: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("done")))
}

/// Sends one request and reads its response to the end.
async fn send<S, B>(service: S)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>>,
    B: http_body::Body,
{
    let request = Request::post("/").header("x-id", "1234567");
    let request = request.body(Full::default()).expect("the parts are valid");
    let Ok(response) = service.oneshot(request).await else {
        panic!("the service never fails");
    };
    let Ok(body) = response.into_body().collect().await else {
        panic!("the body never fails");
    };
    assert!(!body.to_bytes().is_empty());
}

/// One thread, so that the measurement contains no hand-overs between threads.
fn runtime() -> Runtime {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("the runtime starts")
}

const NODES: usize = 5;
