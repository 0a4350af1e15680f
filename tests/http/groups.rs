//! Layers over several groups of nodes.

use axum::Router;
use axum::routing::post;
use http::StatusCode;
use support::{ms, secs};
use tokio::time::Instant;
use tower_redlock::test_util::{Gate, ScriptedNodes};
use tower_redlock::{
    IdempotencyLayer, LockHandle, LockKey, NodeGroup, Redlock, RedlockLayer, admin_router,
    health_router, key, scope,
};

use crate::shop::send;

struct Groups {
    nodes: [ScriptedNodes; 2],
    redlock: Redlock,
    /// Identifiers whose keys belong to the groups, in ascending order.
    ids: [Vec<u32>; 2],
}

async fn groups() -> Groups {
    let nodes: [ScriptedNodes; 2] = std::array::from_fn(|_| ScriptedNodes::new(3));
    let builder = nodes.iter().fold(Redlock::builder(), |builder, nodes| {
        builder.node_group(NodeGroup::new().scripted(nodes))
    });
    let redlock = builder.ttl(secs(10)).build().unwrap();
    let mut ids = [Vec::new(), Vec::new()];
    // With as many digits, so that their keys sort as the numbers do.
    for id in 100..150 {
        let group = redlock.inspect(("account", id)).await.group;
        ids[group.parse::<usize>().unwrap()].push(id);
    }
    Groups {
        nodes,
        redlock,
        ids,
    }
}

#[tokio::test(start_paused = true)]
async fn requests_for_keys_of_a_failed_group_get_503_and_no_others() {
    let Groups {
        nodes,
        redlock,
        ids,
    } = groups().await;
    let accounts = Router::new()
        .route("/accounts/{id}", post(async || "ok"))
        .route_layer(RedlockLayer::new(
            redlock.clone(),
            ("account", key::path("id")),
        ))
        .route("/payments/{id}", post(async || "paid"))
        .route_layer(IdempotencyLayer::new(redlock.clone(), scope::public()));
    let app = accounts
        .nest("/healthz", health_router(redlock.clone()))
        .nest("/admin", admin_router(redlock));
    (0..3).for_each(|node| nodes[1].set(node, Gate::Down));
    for (group, expected) in [(0, StatusCode::OK), (1, StatusCode::SERVICE_UNAVAILABLE)] {
        for id in &ids[group][..3] {
            let (status, body) = send(&app, "POST", &format!("/accounts/{id}")).await;
            assert_eq!(status, expected);
            assert_eq!(body.contains("lock-unavailable"), group == 1, "{body}");
        }
    }
    let (status, body) = send(&app, "GET", "/healthz").await;
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, StatusCode::OK);
    assert_eq!(
        (&body["status"], &body["needed"]),
        (&"degraded".into(), &4.into())
    );
    for (group, expected) in [(0, "ready"), (1, "down")] {
        let (shown, name) = (&body["groups"][group], group.to_string());
        assert_eq!(shown["group"], *name);
        assert_eq!(shown["status"], expected);
        assert_eq!(shown["needed"], 2);
        assert_eq!(shown["quorum"], group == 0);
        let nodes = body["nodes"].as_array().unwrap().iter();
        let of_group = nodes.filter(|node| node["group"] == *name);
        assert_eq!(of_group.count(), 3);
    }
    let key = LockKey::from(("account", ids[0][0]));
    let path = format!("/admin/locks/{}", String::from_utf8_lossy(key.as_bytes()));
    let (_, body) = send(&app, "GET", &path).await;
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (&body["group"], &body["state"]),
        (&"0".into(), &"free".into())
    );
    assert_eq!(body["next"], serde_json::Value::Null);
}

/// Of one lock over both groups, which a handler sees as one.
#[tokio::test(start_paused = true)]
async fn keys_of_both_groups_have_one_token_and_one_response_body() {
    let Groups {
        nodes,
        redlock,
        ids,
    } = groups().await;
    let both = key::each(
        ("account", key::query("from")),
        ("account", key::query("to")),
    );
    let layer = RedlockLayer::new(redlock, both).forward_token("x-token".parse().unwrap());
    let handler = async |handle: LockHandle, headers: http::HeaderMap| {
        assert_eq!(handle.keys().len(), 2);
        let token = handle.fencing_token().unwrap().to_string();
        assert_eq!(headers["x-token"], *token);
        "moved"
    };
    let app: Router = Router::new()
        .route("/transfer", post(handler))
        .route_layer(layer);
    let path = format!("/transfer?from={}&to={}", ids[1][0], ids[0][0]);
    assert_eq!(send(&app, "POST", &path).await.0, StatusCode::OK);
    for nodes in &nodes {
        assert_eq!(nodes.locks(), [0; 3]);
    }
}

/// Requests that take a key of the second group first would wait for each other in a circle with callers that lock both
/// at once.
#[tokio::test(start_paused = true)]
async fn request_waits_only_for_keys_of_later_groups() {
    let Groups { redlock, ids, .. } = groups().await;
    let layer =
        |part| RedlockLayer::new(redlock.clone(), ("account", key::query(part))).wait(secs(2));
    let app: Router = Router::new()
        .route("/transfer", post(async || "moved"))
        .route_layer(layer("to"))
        .route_layer(layer("from"));
    let [low, high] = [ids[0][0], *ids[0].last().unwrap()];
    let second = *ids[1].iter().find(|id| (low..high).contains(*id)).unwrap();
    for (from, to, waits) in [
        // By the groups, whatever the order of the keys.
        (low, second, true),
        (high, second, true),
        (second, low, false),
        (second, high, false),
        // Within a group, by the keys.
        (low, high, true),
        (high, low, false),
    ] {
        let held = redlock.lock(("account", to)).await.unwrap();
        let began = Instant::now();
        let (status, _) = send(&app, "POST", &format!("/transfer?from={from}&to={to}")).await;
        assert_eq!(status, StatusCode::LOCKED);
        let waited = began.elapsed();
        assert_eq!(waited > ms(1_000), waits, "{from} then {to}: {waited:?}");
        held.release().await.unwrap();
    }
}
