//! `Retry-After` of contended locks: a second, a fixed time, or what is left of a key that stays taken.

use axum::Router;
use axum::extract::Path;
use axum::routing::post;
use http::StatusCode;
use serde::Deserialize;
use support::{ms, secs, send};
use tokio::time::{advance, sleep};
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{
    LockKey, LockKeys, LockOptions, LockResource, Locked, Redlock, RedlockLayer, key,
};

use crate::shop::{OrderId, until_free};

/// A report whose key stays taken for half a minute.
#[derive(Deserialize)]
struct Report(String);

impl LockResource for Report {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("report", &*self.0)).into()
    }

    fn options(&self) -> LockOptions {
        LockOptions::default().hold_at_least(secs(30))
    }
}

/// Each kind of refusal under a path of its own.
fn app(redlock: &Redlock) -> Router {
    let layer = |name| RedlockLayer::new(redlock.clone(), (name, key::path("id")));
    let stays = layer("report").options(|_| LockOptions::default().hold_at_least(secs(30)));
    let serve = async || sleep(ms(500)).await;
    let locked = async |_: Locked<Path<OrderId>>| sleep(ms(500)).await;
    let job = async |_: Locked<Path<Report>>| ();
    Router::new()
        .route("/layer/{id}", post(serve).layer(layer("order")))
        .route("/locked/{id}", post(locked))
        .route("/stays/{id}", post(async || ()).layer(stays))
        .route("/job/{id}", post(job))
        .with_state(redlock.clone())
}

fn processes(nodes: &ScriptedNodes) -> [Redlock; 2] {
    let redlock = || Redlock::builder().scripted(nodes).ttl(secs(20));
    [redlock().build().unwrap(), redlock().build().unwrap()]
}

/// Neither the ttl, which the holder renews, nor an earlier hold says when the present one ends.
#[tokio::test(start_paused = true)]
async fn retry_after_is_a_second_whatever_the_ttl_and_the_earlier_holds() {
    let nodes = ScriptedNodes::new(3);
    let [ours, theirs] = processes(&nodes).map(|redlock| app(&redlock));
    for target in ["/layer/7", "/locked/7"] {
        for serving in [&ours, &theirs, &ours, &theirs] {
            let refused = async {
                sleep(ms(100)).await;
                send(&ours, "POST", target).await
            };
            let (served, refused) = tokio::join!(send(serving, "POST", target), refused);
            assert_eq!(served.status, StatusCode::OK);
            assert_eq!(refused.status, StatusCode::LOCKED);
            assert_eq!(refused.header("retry-after"), Some("1"), "{target}");
            until_free(&nodes).await;
        }
    }
}

/// Such a key is not renewed, so its ttl says when it is free.
#[tokio::test(start_paused = true)]
async fn retry_after_of_a_key_that_stays_taken_is_the_time_that_is_left() {
    let nodes = ScriptedNodes::new(3);
    let [ours, theirs] = processes(&nodes).map(|redlock| app(&redlock));
    for target in ["/stays/7", "/job/7"] {
        assert_eq!(send(&ours, "POST", target).await.status, StatusCode::OK);
        sleep(ms(4_500)).await;
        for app in [&ours, &theirs] {
            let refused = send(app, "POST", target).await;
            assert_eq!(refused.status, StatusCode::LOCKED);
            assert_eq!(refused.headers["retry-after"], "26", "{target}");
        }
        advance(secs(30)).await;
    }
}
