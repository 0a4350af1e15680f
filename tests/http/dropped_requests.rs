//! Response futures that are dropped at any poll, and thousands at any instant, leave no key.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fastrand::Rng;
use http::{Request, Response};
use http_body_util::BodyExt;
use support::{Executed, ms, poll_times, request, secs};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{RedlockLayer, ReleaseAt, RunToCompletion};

use crate::scripted_bodies::Step::{Data, Trailers, Wait};
use crate::scripted_bodies::{
    NODE_TIMEOUT, RELEASE, Script, TICK, TTL, is_free, layer, ok, post, redlock, stream,
};
use crate::sockets::server::Counted;

/// Drops a request at every poll of its head and body, over all kinds of nodes, on which another owner has the key for
/// some time first.
async fn drop_the_request_everywhere(
    taken_for: Duration,
    configure: fn(RedlockLayer) -> RedlockLayer,
) {
    const GATES: [Gate; 4] = [Gate::Ready, Gate::Slow(RELEASE), Gate::Never, Gate::Failing];
    let all = |i: usize| [GATES[i % 4], GATES[i / 4 % 4], GATES[i / 16]];
    for gates in (0..64).map(all) {
        for polls in 0.. {
            let what = format!("{gates:?} after {polls} polls");
            let nodes = ScriptedNodes::new(3);
            if !taken_for.is_zero() {
                let theirs = support::redlock(&nodes).lock("resource");
                let guard = theirs.hold_at_least(taken_for).await.unwrap();
                guard.release().await.unwrap();
            }
            for (node, gate) in gates.into_iter().enumerate() {
                nodes.set(node, gate);
            }
            let redlock = redlock(&nodes);
            let service = service_fn(|_: Request<()>| async {
                sleep(ms(10)).await;
                let steps = [Data("ab"), Wait(ms(10)), Data("cd"), Trailers];
                Ok::<_, Infallible>(ok(stream(&steps)))
            });
            let service = configure(layer(&redlock)).layer(service);
            let mut serving = Box::pin(async {
                let response = service.oneshot(post()).await.unwrap();
                response.into_body().collect().await.unwrap();
            });
            let finished = poll_times(&mut serving, polls, 3).await.is_some();
            drop(serving);

            let began = Instant::now();
            assert_eq!(redlock.drain(10 * TTL).await.held, [], "{what}");
            assert!(began.elapsed() <= 3 * NODE_TIMEOUT, "{what}");
            // What is on a slow wire arrives.
            sleep(RELEASE.max(taken_for) + TICK).await;
            assert!(is_free(&nodes), "{what}: {:?}", nodes.locks());
            if finished {
                let can_wait = gates == [Gate::Ready; 3] && !taken_for.is_zero();
                // Theirs is the first.
                assert!(!can_wait || nodes.sent(0, OpKind::Acquire) > 2, "{what}");
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn response_future_dropped_at_any_poll_leaves_no_key() {
    drop_the_request_everywhere(ms(0), |layer| layer).await;
}

#[tokio::test(start_paused = true)]
async fn response_future_dropped_at_any_poll_leaves_no_key_with_release_at_head() {
    let at_head = |layer: RedlockLayer| layer.release_at(ReleaseAt::ResponseHead);
    drop_the_request_everywhere(ms(0), at_head).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_request_dropped_at_any_poll_leaves_no_key() {
    let waiting = |layer: RedlockLayer| layer.wait(TTL).await_release(false);
    drop_the_request_everywhere(ms(100), waiting).await;
}

/// Of handlers.
#[derive(Clone, Default)]
struct Counts {
    inside: Arc<AtomicUsize>,
    begun: Executed,
    /// Those that were not dropped.
    done: Executed,
}

/// An inner service that takes its time, streams some of its answers, and counts what is in it.
fn inner(
    counts: &Counts,
) -> impl Service<Request<()>, Response = Response<Script>, Error = Infallible, Future: Send + 'static>
+ Clone
+ use<> {
    let counts = counts.clone();
    service_fn(move |request: Request<()>| {
        let counts = counts.clone();
        async move {
            let here = Counted::new(&counts.inside);
            let inside = counts.inside.load(Ordering::Relaxed);
            assert_eq!(inside, 1, "two are inside");
            counts.begun.one_more();
            sleep(ms(3)).await;
            counts.done.one_more();
            drop(here);
            let steps = match request.method().as_str() {
                "PUT" => &[Wait(ms(1)), Data("ab"), Wait(ms(1)), Data("cd")][..],
                _ => &[Data("done")],
            };
            Ok(ok(stream(steps).ending()))
        }
    })
}

/// Those of the last service run on, and all end.
#[tokio::test(start_paused = true)]
async fn requests_dropped_at_10000_instants_leave_no_lock_and_no_task() {
    const REQUESTS: usize = 10_000;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let nodes = ScriptedNodes::new(3);
    for (node, op, delay) in [
        (0, OpKind::Acquire, 1),
        (1, OpKind::Acquire, 2),
        (1, OpKind::Release, 3),
        (2, OpKind::Acquire, 7),
        (2, OpKind::Release, 1),
    ] {
        nodes.set_for(node, op, Gate::Slow(ms(delay)));
    }
    let redlock = redlock(&nodes);
    let layer = layer(&redlock).wait(ms(20));
    let dropped = Counts::default();
    let kept = Counts {
        inside: Arc::clone(&dropped.inside),
        ..Counts::default()
    };
    let head = layer.clone().release_at(ReleaseAt::ResponseHead);
    let hasty = layer.clone().await_release(false);
    let to_completion = layer.clone().on_disconnect(RunToCompletion);
    let services = [
        layer.layer(inner(&dropped)).boxed_clone(),
        head.layer(inner(&dropped)).boxed_clone(),
        hasty.layer(inner(&dropped)).boxed_clone(),
        to_completion.layer(inner(&kept)).boxed_clone(),
    ];
    let (mut done, mut tasks) = (0, Vec::new());
    for number in 0..REQUESTS {
        let service = services[rng.usize(..4)].clone();
        let method = ["POST", "PUT"][rng.usize(..2)];
        let patience = Duration::from_micros(rng.u64(0..30_000));
        tasks.push(tokio::spawn(timeout(patience, async move {
            let request = request(method, "/").map(drop);
            let response = service.oneshot(request).await.unwrap();
            response.into_body().collect().await.map(drop).unwrap();
        })));
        // A few at a time.
        if number % 4 == 3 {
            for task in tasks.drain(..) {
                done += usize::from(task.await.unwrap().is_ok());
            }
        }
    }
    assert!(done > REQUESTS / 10 && done < REQUESTS, "{done} were done");
    let drained = redlock.drain(secs(1)).await;
    assert_eq!((drained.held, drained.unconfirmed), (vec![], vec![]));
    // After a third of the ttl, nothing is due for any lock, and what wakes them ends.
    sleep(TTL).await;
    assert_eq!(nodes.locks(), [0, 0, 0]);
    // The home has one.
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 1);
    let ended = [&dropped, &kept].map(|counts| counts.begun.count() == counts.done.count());
    assert_eq!(ended, [false, true]);
    assert!(kept.done.count() > REQUESTS / 100);
}
