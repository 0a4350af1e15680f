//! Response futures that are dropped at any poll leave no key.

use std::convert::Infallible;
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use support::{ms, poll_times};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{RedlockLayer, ReleaseAt};

use crate::scripted_bodies::Step::{Data, Trailers, Wait};
use crate::scripted_bodies::{
    NODE_TIMEOUT, RELEASE, TICK, TTL, is_free, layer, ok, post, redlock, stream,
};

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
                Ok::<_, Infallible>(ok(stream(&[
                    Data("ab"),
                    Wait(ms(10)),
                    Data("cd"),
                    Trailers,
                ])))
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
