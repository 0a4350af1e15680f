//! Layers over several groups of nodes: one lock per request, and no deadlock between groups.

use axum::Router;
use axum::middleware::{Next, from_fn};
use axum::routing::post;
use http::StatusCode;
use support::{ms, secs};
use tokio::time::{Instant, sleep};
use tower_redlock::protocol::Placement;
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{
    LockHandle, LockHandles, LockKey, NodeGroup, Redlock, RedlockBuilder, RedlockLayer,
};

use crate::shop::send;

fn groups(nodes: &[ScriptedNodes]) -> Vec<NodeGroup> {
    let groups = nodes.iter().enumerate();
    let groups =
        groups.map(|(name, nodes)| NodeGroup::new().name(name.to_string()).scripted(nodes));
    groups.collect()
}

fn redlock(now: &[ScriptedNodes], next: Option<&[ScriptedNodes]>) -> Redlock {
    let builder = Redlock::builder().ttl(secs(10));
    let builder = groups(now)
        .into_iter()
        .fold(builder, RedlockBuilder::node_group);
    let builder = match next {
        Some(next) => builder.moving_to(groups(next)),
        None => builder,
    };
    builder.build().unwrap()
}

/// The key with a number of those that belong to one of several groups.
fn key_in(group: usize, of: usize, number: usize) -> &'static str {
    let placement = Placement::new((0..of).map(|name| name.to_string()));
    let keys = (0..).map(|candidate| format!("resource {candidate}"));
    let mut keys = keys.filter(|key| placement.group_of(&LockKey::from(key.as_str())) == group);
    keys.nth(number).unwrap().leak()
}

/// Two routes that lock the keys in opposite orders. Both requests have their first lock before either asks for its
/// second. Returns whether each is served.
async fn served_in_opposite_orders(
    one: &Redlock,
    other: &Redlock,
    [first, second]: [&'static str; 2],
) -> [bool; 2] {
    let layer = |redlock: &Redlock, key: &'static str| {
        RedlockLayer::new(redlock.clone(), key).wait(secs(30))
    };
    let handler = || sleep(ms(100));
    let between = from_fn(async |request: axum::extract::Request, next: Next| {
        sleep(ms(10)).await;
        next.run(request).await
    });
    let app = Router::new()
        .route(
            "/one",
            post(handler).layer((layer(one, first), between.clone(), layer(one, second))),
        )
        .route(
            "/other",
            post(handler).layer((layer(other, second), between, layer(other, first))),
        );
    let began = Instant::now();
    let (one, other) = tokio::join!(send(&app, "POST", "/one"), send(&app, "POST", "/other"));
    let served = [one.0, other.0].map(|status| match status {
        StatusCode::OK => true,
        StatusCode::LOCKED => false,
        other => panic!("{other}"),
    });
    assert!(began.elapsed() < secs(1), "{:?}", began.elapsed());
    served
}

#[tokio::test(start_paused = true)]
async fn nested_layers_over_two_groups_in_opposite_orders_do_not_deadlock() {
    let nodes = [ScriptedNodes::new(3), ScriptedNodes::new(3)];
    let redlock = redlock(&nodes, None);
    // The order of the keys differs from that of their groups, too.
    for numbers in [[0, 0], [0, 5], [5, 0]] {
        let keys = [key_in(0, 2, numbers[0]), key_in(1, 2, numbers[1])];
        // The one in the order of all locks waits, and the other makes room for it.
        let served = served_in_opposite_orders(&redlock, &redlock, keys).await;
        assert_eq!(served, [true, false], "{keys:?}");
        let served = served_in_opposite_orders(&redlock, &redlock, [keys[1], keys[0]]).await;
        assert_eq!(served, [false, true], "{keys:?}");
    }
}

/// The request of the process that moves has the first key in the new group already.
#[tokio::test(start_paused = true)]
async fn nested_layers_over_a_key_that_moves_do_not_deadlock() {
    let nodes = [ScriptedNodes::new(3), ScriptedNodes::new(3)];
    let (both, new) = (redlock(&nodes[..1], Some(&nodes)), redlock(&nodes, None));
    for number in 0..10 {
        let (moves, stays) = (key_in(1, 2, number), key_in(0, 2, 9 - number));
        // For the new process, the group decides. Where the key decides otherwise for the one that moves, each
        // request may be against the order, and be refused.
        let agree = LockKey::from(stays) < LockKey::from(moves);
        for keys in [[moves, stays], [stays, moves]] {
            let served = served_in_opposite_orders(&both, &new, keys).await;
            assert!(served.contains(&true) || !agree, "{keys:?}");
        }
        let served = served_in_opposite_orders(&both, &both, [moves, stays]).await;
        assert!(served.contains(&true), "{moves} {stays}");
        for nodes in &nodes {
            assert_eq!(nodes.locks(), [0; 3]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn layers_of_one_request_share_a_key_that_moves() {
    async fn handler(handle: LockHandle, handles: LockHandles) -> String {
        assert!(handle.is_valid());
        format!("{} {}", handle.keys().len(), handles.to_vec().len())
    }
    let nodes = [ScriptedNodes::new(3), ScriptedNodes::new(3)];
    let redlock = redlock(&nodes[..1], Some(&nodes));
    let layer = RedlockLayer::new(redlock.clone(), key_in(1, 2, 0));
    let app: Router = Router::new().route("/", post(handler).layer((layer.clone(), layer)));
    assert_eq!(send(&app, "POST", "/").await.1, "1 1");
    for nodes in &nodes {
        assert_eq!(nodes.locks(), [0; 3]);
    }
    assert!(redlock.drain(secs(1)).await.is_clean());
}
