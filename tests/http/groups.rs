//! Layers over several groups of nodes: one lock per request, and no deadlock between groups or services.

use axum::Router;
use axum::middleware::{Next, from_fn};
use axum::routing::post;
use http::StatusCode;
use serde_json::json;
use support::{ms, secs, send};
use tokio::time::{Instant, sleep};
use tower_redlock::protocol::Placement;
use tower_redlock::test_util::{Gate, ScriptedNodes};
use tower_redlock::{
    LockKey, NodeGroup, Redlock, RedlockBuilder, RedlockLayer, admin_router, health_router, key,
};

/// Two groups of nodes, locks over them, and for each the identifiers whose keys belong to it, in ascending order.
async fn groups() -> ([ScriptedNodes; 2], Redlock, [Vec<u32>; 2]) {
    let nodes: [ScriptedNodes; 2] = std::array::from_fn(|_| ScriptedNodes::new(3));
    let redlock = redlock(&nodes, None);
    let mut ids = [Vec::new(), Vec::new()];
    // With as many digits, so that their keys sort as the numbers do.
    for id in 100..150 {
        let group = redlock.inspect(("account", id)).await.group;
        ids[group.parse::<usize>().unwrap()].push(id);
    }
    (nodes, redlock, ids)
}

#[tokio::test(start_paused = true)]
async fn requests_for_keys_of_a_failed_group_get_503_and_no_others() {
    let (nodes, redlock, ids) = groups().await;
    let locked = RedlockLayer::new(redlock.clone(), ("account", key::path("id")));
    let app = Router::new()
        .route("/accounts/{id}", post(async || "ok").layer(locked))
        .nest("/healthz", health_router(redlock.clone()))
        .nest("/admin", admin_router(redlock));
    (0..3).for_each(|node| nodes[1].set(node, Gate::Down));
    let health = send(&app, "GET", "/healthz").await;
    assert_eq!(health.status, StatusCode::OK);
    let body = health.json();
    assert_eq!(
        (&body["status"], &body["needed"]),
        (&"degraded".into(), &4.into())
    );
    for (group, told, status) in [
        (0, (200, ""), "ready"),
        (1, (503, "lock-unavailable"), "down"),
    ] {
        for id in &ids[group][..3] {
            let answer = send(&app, "POST", &format!("/accounts/{id}")).await;
            assert_eq!(answer.told(), told);
        }
        let name = group.to_string();
        let shown = json!({ "group": name, "status": status, "quorum": group == 0, "needed": 2 });
        assert_eq!(body["groups"][group], shown);
        let nodes = body["nodes"].as_array().unwrap().iter();
        assert_eq!(nodes.filter(|node| node["group"] == *name).count(), 3);
    }
    let path = format!("/admin/locks/account/{}", ids[0][0]);
    let body = send(&app, "GET", &path).await.json();
    assert_eq!(
        (&body["group"], &body["state"]),
        (&"0".into(), &"free".into())
    );
    assert_eq!(body.get("next"), None);
}

fn named(nodes: &[ScriptedNodes]) -> Vec<NodeGroup> {
    let group = |(name, nodes): (usize, _)| NodeGroup::new().name(name.to_string()).scripted(nodes);
    nodes.iter().enumerate().map(group).collect()
}

fn redlock(now: &[ScriptedNodes], next: Option<&[ScriptedNodes]>) -> Redlock {
    let builder = Redlock::builder().ttl(secs(10));
    let mut builder = named(now)
        .into_iter()
        .fold(builder, RedlockBuilder::node_group);
    if let Some(next) = next {
        builder = builder.moving_to(named(next));
    }
    builder.build().unwrap()
}

/// The key with a number of those that belong to one of several groups.
fn key_in(group: usize, of: usize, number: usize) -> &'static str {
    let placement = Placement::new((0..of).map(|name| name.to_string()));
    let keys = (0..).map(|candidate| format!("resource {candidate}"));
    let mut keys = keys.filter(|key| placement.group_of(&LockKey::from(key.as_str())) == group);
    keys.nth(number).unwrap().leak()
}

/// Two routes that lock two keys, each of its service, in opposite orders. Both requests have their first lock before
/// either asks for its second. Returns whether each is served.
async fn served_in_opposite_orders(
    one: [(&Redlock, &'static str); 2],
    other: [(&Redlock, &'static str); 2],
) -> [bool; 2] {
    let handler = || sleep(ms(100));
    let between = from_fn(async |request: axum::extract::Request, next: Next| {
        sleep(ms(10)).await;
        next.run(request).await
    });
    let route = |keys: [(&Redlock, &'static str); 2]| {
        let layer = |(redlock, key): (&Redlock, _)| RedlockLayer::new(redlock.clone(), key);
        let [outer, inner] = keys.map(|key| layer(key).wait(secs(30)));
        post(handler).layer((outer, between.clone(), inner))
    };
    let app = Router::new().route("/one", route(one));
    let app = app.route("/other", route(other));
    let began = Instant::now();
    let (one, other) = tokio::join!(send(&app, "POST", "/one"), send(&app, "POST", "/other"));
    assert!(began.elapsed() < secs(1), "{:?}", began.elapsed());
    [one, other].map(|answer| match answer.status {
        StatusCode::OK => true,
        StatusCode::LOCKED => false,
        other => panic!("{other}"),
    })
}

/// There is no order between services.
#[tokio::test(start_paused = true)]
async fn nested_layers_of_two_services_in_opposite_orders_do_not_deadlock() {
    let services = [Redlock::in_memory(3), Redlock::in_memory(3)];
    let [a, b] = [(&services[0], "a"), (&services[1], "b")];
    let served = served_in_opposite_orders([a, b], [b, a]).await;
    assert_ne!(served[0], served[1], "one makes room for the other");
}

// Rules: http.shared
#[tokio::test(start_paused = true)]
async fn nested_layers_of_one_service_in_opposite_orders_do_not_deadlock() {
    let nodes = [ScriptedNodes::new(3), ScriptedNodes::new(3)];
    let (one_group, two_groups) = (redlock(&nodes[..1], None), redlock(&nodes, None));
    let of_group = |group, number| (&two_groups, key_in(group, 2, number));
    for [first, second] in [
        [(&one_group, "a"), (&one_group, "b")],
        [of_group(0, 0), of_group(1, 0)],
        // The order of the keys differs from that of their groups, too.
        [of_group(0, 0), of_group(1, 5)],
        [of_group(0, 5), of_group(1, 0)],
    ] {
        // The one in the order of all locks waits, and the other makes room for it.
        let served = served_in_opposite_orders([first, second], [second, first]).await;
        assert_eq!(served, [true, false], "{} {}", first.1, second.1);
        let served = served_in_opposite_orders([second, first], [first, second]).await;
        assert_eq!(served, [false, true], "{} {}", first.1, second.1);
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
        for [first, second] in [[moves, stays], [stays, moves]] {
            let one = [(&both, first), (&both, second)];
            let other = [(&new, second), (&new, first)];
            let served = served_in_opposite_orders(one, other).await;
            assert!(served.contains(&true) || !agree, "{first} {second}");
        }
        let keys = [(&both, moves), (&both, stays)];
        let served = served_in_opposite_orders(keys, [keys[1], keys[0]]).await;
        assert!(served.contains(&true), "{moves} {stays}");
        for nodes in &nodes {
            assert_eq!(nodes.locks(), [0; 3]);
        }
    }
}
