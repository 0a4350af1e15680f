//! The router for operators.

use std::convert::Infallible;

use axum::middleware::{Next, from_fn};
use axum::{Extension, Router};
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use support::{Answer, redlock, request, request_with, secs, send, three_nodes, three_nodes_with};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower::ServiceExt;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{LockKey, NodeGroup, Redlock, admin_router};

fn admin(redlock: &Redlock) -> Router {
    Router::new().nest("/admin", admin_router(redlock.clone()))
}

async fn json(app: &Router, method: &str, target: &str) -> (u16, Value) {
    let answer = send(app, method, target).await;
    assert_eq!(answer.headers["cache-control"], "no-store", "{target}");
    (answer.status.as_u16(), answer.json())
}

#[tokio::test(start_paused = true)]
async fn operators_see_the_health_and_the_state_of_a_key_and_free_it() {
    let (nodes, redlock) = three_nodes();
    let app = admin(&redlock);
    let (status, free) = json(&app, "GET", "/admin/locks/report").await;
    assert_eq!((status, &free["state"]), (200, &"free".into()));
    assert_eq!(free["nodes"].as_array().unwrap().len(), 3);
    assert!(free["fencing_token"].is_null());

    let guard = redlock.try_lock(("account", 7)).await.unwrap();
    let target = "/admin/locks/7%3Aaccount%2C1%3A7%2C";
    let (status, held) = json(&app, "GET", target).await;
    assert_eq!((status, &held["state"]), (200, &"held".into()));
    assert_eq!(held["key"], "7:account,1:7,");
    assert_eq!(held["left_ms"], 10_000);
    let token = guard.fencing_token().unwrap().as_u64();
    assert_eq!(held["fencing_token"], token);
    assert_eq!(held["recorded"], false);

    // The same key by its parts; a slash within a part is none between two.
    let _slash = redlock.try_lock(("a/b", "locks/ü")).await.unwrap();
    for (target, state, path) in [
        ("account/7", "held", "account/7"),
        ("a%2Fb/locks%2F%C3%BC", "held", "a%2Fb/locks%2F%C3%BC"),
        ("a/%FF", "free", "a/%FF"),
    ] {
        let (_, shown) = json(&app, "GET", &format!("/admin/locks/{target}")).await;
        assert_eq!(
            (&shown["state"], &shown["path"]),
            (&state.into(), &path.into())
        );
    }

    let (status, freed) = json(&app, "DELETE", target).await;
    assert_eq!((status, &freed["nodes_held"]), (200, &3.into()));
    assert_eq!(freed["was_held"], true);
    assert!(!guard.is_valid());
    let _reader = redlock.try_lock(("account", 7)).shared().await.unwrap();
    let (_, shared) = json(&app, "GET", target).await;
    assert_eq!(
        (&shared["state"], &shared["readers"]),
        (&"shared".into(), &1.into())
    );
    nodes.set(0, Gate::Failing);
    let (_, freed) = json(&app, "DELETE", target).await;
    assert_eq!(freed["nodes_held"], 2);
    assert_names_a_node(&freed["failures"][0]);

    nodes.set(1, Gate::Failing);
    let (status, unknown) = json(&app, "GET", target).await;
    assert_eq!((status, &unknown["state"]), (503, &"unknown".into()));
    assert_eq!(unknown["nodes"][0]["state"], "unknown");
    assert_names_a_node(&unknown["nodes"][0]["error"]);
    let (status, failed) = json(&app, "DELETE", target).await;
    assert_eq!(status, 503);
    assert_names_a_node(&failed["error"]);
    let other = send(&app, "POST", target).await;
    assert_eq!(other.status, StatusCode::METHOD_NOT_ALLOWED);
}

#[track_caller]
fn assert_names_a_node(error: &Value) {
    let error = error.as_str().unwrap();
    assert!(error.contains("embedded-0"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn operators_see_what_each_node_knows_and_what_a_majority_does() {
    let (nodes, redlock) = three_nodes();
    let once = redlock.once("report");
    once.run(async |_| Ok::<_, Infallible>(())).await.unwrap();
    (0..2).for_each(|node| nodes.wipe(node));
    let mut readers = Vec::new();
    for down in 0..2 {
        nodes.set(down, Gate::Failing);
        readers.push(redlock.try_lock("report").shared().await.unwrap());
        nodes.set(down, Gate::Ready);
    }
    let (status, shown) = json(&admin(&redlock), "GET", "/admin/locks/report").await;
    assert_eq!((status, &shown["state"]), (200, &"shared".into()));
    assert_eq!(shown["readers"], 2);
    assert_eq!(shown["recorded"], false);
    assert_eq!((&shown["needed"], shown.get("next")), (&2.into(), None));
    let known = shown["nodes"].as_array().unwrap();
    let readers = known.iter().map(|node| node["readers"].as_u64().unwrap());
    assert_eq!(readers.collect::<Vec<_>>(), [1, 1, 2]);
    let recorded = known.iter().map(|node| node["recorded"].as_bool().unwrap());
    assert_eq!(recorded.collect::<Vec<_>>(), [false, false, true]);
    // Readers have no token: it is that of the execution.
    assert!(known[0]["fencing_token"].is_null() && known[2]["fencing_token"].is_u64());
    assert_eq!(shown["fencing_token"], known[2]["fencing_token"]);
}

#[tokio::test(start_paused = true)]
async fn operators_see_a_key_that_moves_in_both_of_its_groups() {
    let [old, new] = [(); 2].map(|()| ScriptedNodes::new(3));
    let group = |name, nodes| NodeGroup::new().name(name).scripted(nodes);
    let builder = Redlock::builder().node_group(group("old", &old));
    let builder = builder.moving_to([group("new", &new)]);
    let redlock = builder.build().unwrap();
    let _guard = redlock.try_lock("k").await.unwrap();
    for (wiped, state) in [(None, "held"), (Some(0), "held"), (Some(1), "free")] {
        wiped.into_iter().for_each(|node| new.wipe(node));
        let (status, shown) = json(&admin(&redlock), "GET", "/admin/locks/k").await;
        assert_eq!((status, &shown["state"]), (200, &"held".into()));
        let next = &shown["next"];
        assert_eq!(shown["group"], "old");
        assert_eq!(next["group"], "new");
        assert_eq!(next["state"], state);
        assert_eq!(next["nodes"].as_array().unwrap().len(), 3);
        assert_eq!(next.get("next"), None);
    }
}

/// The application's authentication goes around the router.
#[tokio::test(start_paused = true)]
async fn a_layer_around_the_router_of_operators_guards_all_of_it() {
    let (nodes, redlock) = three_nodes();
    let for_operators = from_fn(async |headers: HeaderMap, request, next: Next| {
        if headers.contains_key("authorization") {
            Ok(next.run(request).await)
        } else {
            Err(StatusCode::UNAUTHORIZED)
        }
    });
    let guarded = admin(&redlock).layer(Extension(())).layer(for_operators);
    let guard = redlock.try_lock("k").await.unwrap();
    let targets = [
        ("GET", "/admin"),
        ("GET", "/admin/held"),
        ("GET", "/admin/locks"),
        ("GET", "/admin/locks/k"),
        ("DELETE", "/admin/locks/k"),
    ];
    for (method, target) in targets {
        let refused = send(&guarded, method, target).await;
        assert_eq!(refused.status, 401, "{method} {target}");
    }
    let asked = [OpKind::Ping, OpKind::Inspect, OpKind::Revoke].map(|kind| nodes.sent(0, kind));
    assert_eq!((asked, guard.is_valid()), ([0; 3], true));
    for (method, target) in targets {
        let request = request_with(method, target, &[("authorization", "Bearer secret")]);
        let answer = Answer::to(&guarded, request).await;
        assert_eq!(answer.status, StatusCode::OK, "{method} {target}");
    }
    assert!(!guard.is_valid());
}

#[tokio::test(start_paused = true)]
async fn operators_are_told_of_a_key_that_cannot_be() {
    let (_nodes, redlock) = three_nodes_with(|builder| builder.namespace(""));
    let app = admin(&redlock);
    for method in ["GET", "DELETE"] {
        let (status, body) = json(&app, method, "/admin/locks/redlock:fence:x").await;
        assert_eq!(status, 400, "{body}");
    }
}

/// Returns the lines of a list.
async fn list(app: &Router, target: &str) -> Vec<Value> {
    let answer = send(app, "GET", target).await;
    assert_eq!(answer.headers["content-type"], "application/x-ndjson");
    assert_eq!(answer.headers["cache-control"], "no-store");
    let lines = answer.body.split(|byte| *byte == b'\n');
    let lines = lines.filter(|line| !line.is_empty());
    lines
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect()
}

fn locks(lines: &[Value]) -> impl Iterator<Item = &Value> {
    let locks = lines.iter().map(|line| line["locks"].as_array());
    locks.flat_map(Option::unwrap)
}

#[tokio::test(start_paused = true)]
async fn operators_list_the_locks_of_all_processes_by_the_parts_of_their_keys() {
    let nodes = ScriptedNodes::new(3);
    let [here, there] = ["here", "there"].map(|holder| {
        let builder = Redlock::builder().scripted(&nodes).holder(holder);
        builder.build().unwrap()
    });
    let mut guards = Vec::new();
    for number in 0..120 {
        guards.push(there.try_lock(("job", number)).await.unwrap());
    }
    guards.push(here.try_lock("jobs").await.unwrap());
    let noted = there.try_lock(("job", "a/b", "é")).note("Ann").await;
    guards.push(noted.unwrap());
    let app = admin(&here);
    for (prefix, expected) in [
        ("", 122),
        ("job", 122),
        ("job/", 121),
        ("job/7", 1),
        ("job%2Fa%252Fb", 1),
        ("job%2F", 121),
        ("jobs", 1),
        ("no", 0),
    ] {
        let lines = list(&app, &format!("/admin/locks?prefix={prefix}")).await;
        let (last, others) = lines.split_last().unwrap();
        assert_eq!(last["complete"], true);
        assert!(others.iter().all(|line| line["complete"] == false));
        assert_eq!(locks(&lines).count(), expected, "{prefix}");
    }
    let lines = list(&app, "/admin/locks?prefix=job/a%252Fb").await;
    let lock = locks(&lines).next().unwrap();
    assert_eq!(lock["path"], "job/a%2Fb/%C3%A9");
    assert_eq!(lock["state"], "held");
    assert_eq!(lock["left_ms"], 10_000);
    let token = guards.last().unwrap().fencing_token().unwrap().as_u64();
    assert_eq!(lock["fencing_token"], token);
    let holder = &lock["holders"][0];
    assert_eq!(holder["label"], "there");
    assert_eq!(holder["note"], "Ann");
    // Who does not read on costs the nodes nothing.
    let asked = || nodes.sent(0, OpKind::Inspect);
    let before = asked();
    let response = app.clone().oneshot(request("GET", "/admin/locks")).await;
    let mut body = response.unwrap().into_body();
    assert_eq!(asked(), before);
    body.frame().await.unwrap().unwrap();
    let of_a_page = asked() - before;
    assert!((1..60).contains(&of_a_page), "{of_a_page}");
    sleep(secs(1)).await;
    drop(body);
    sleep(secs(1)).await;
    assert_eq!(asked(), before + of_a_page);
    (0..2).for_each(|node| nodes.set(node, Gate::Failing));
    let lines = list(&app, "/admin/locks").await;
    assert_names_a_node(&lines.last().unwrap()["error"]);
}

#[tokio::test(start_paused = true)]
async fn operators_see_what_this_process_holds_and_waits_for() {
    let nodes = ScriptedNodes::new(3);
    let builder = Redlock::builder().scripted(&nodes).holder("server A");
    let (redlock, other) = (builder.build().unwrap(), redlock(&nodes));
    let _reader = redlock.try_lock("page").shared().await.unwrap();
    sleep(secs(2)).await;
    let _slot = redlock.try_lock("printer").slots(3).await.unwrap();
    let both = redlock.lock_all(["x", "y"]).note("Ann").label("pair");
    let _both = both.await.unwrap();
    let _elsewhere = other.try_lock(("of", "another")).await.unwrap();
    let mut waiting = JoinSet::new();
    for key in [LockKey::from("x"), "x".into(), ("of", "another").into()] {
        let lock = redlock.lock(key).wait(secs(60));
        waiting.spawn(lock.into_future());
    }
    // In its pauses, a caller that waits for several keys keeps none of them.
    let set = redlock.lock_all([LockKey::from("free"), ("of", "another").into()]);
    waiting.spawn(set.wait(secs(60)).into_future());
    sleep(secs(1)).await;
    let (status, shown) = json(&admin(&redlock), "GET", "/admin/held").await;
    assert_eq!((status, &shown["count"]), (200, &json!(3)));
    let [page, printer, both] = [0, 1, 2].map(|at| &shown["held"][at]);
    assert_eq!(
        (&page["shared"], &page["held_ms"]),
        (&json!(true), &json!(3_000))
    );
    assert!(page["slot"].is_null() && page["fencing_token"].is_null());
    let reader = &page["holders"][0];
    assert_eq!(
        (&reader["label"], &reader["note"]),
        (&json!("server A"), &Value::Null)
    );
    assert!(reader["since"].is_u64() && reader["since_seconds"].is_u64());
    assert!(printer["slot"].as_u64().unwrap() < 3);
    let keys = json!([{ "key": "x", "path": "x" }, { "key": "y", "path": "y" }]);
    assert_eq!((&both["keys"], &both["resource"]), (&keys, &json!("pair")));
    assert_eq!(both["holders"][0]["note"], "Ann");
    assert!(both["valid_ms"].as_u64().unwrap() > 5_000);
    let mut waited: Vec<_> = shown["waited_for"].as_array().unwrap().clone();
    waited.sort_by_key(|one| one["path"].to_string());
    let expected = json!([
        { "key": "free", "path": "free", "callers": 1 },
        { "key": "2:of,7:another,", "path": "of/another", "callers": 2 },
        { "key": "x", "path": "x", "callers": 2 },
    ]);
    assert_eq!(json!(waited), expected);
    drop(waiting);
    sleep(secs(1)).await;
    let (_, shown) = json(&admin(&redlock), "GET", "/admin/held").await;
    assert_eq!(shown["waited_for"], json!([]));
}

/// A script of another site can send a request of its own making only if the application's CORS rules allow its headers.
#[tokio::test(start_paused = true)]
async fn a_browser_frees_a_key_only_with_a_header_that_no_form_can_send() {
    let (_nodes, redlock) = three_nodes();
    let app = admin(&redlock);
    for (name, value) in [
        ("origin", "https://evil.example"),
        ("origin", "null"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-origin"),
    ] {
        let guard = redlock.try_lock("k").await.unwrap();
        let delete = async |headers: &[(&str, &str)]| {
            Answer::to(&app, request_with("DELETE", "/admin/locks/k", headers)).await
        };
        let refused = delete(&[(name, value)]).await;
        assert_eq!(refused.status, StatusCode::FORBIDDEN);
        assert!(refused.text().contains("X-Requested-With"), "{refused:?}");
        assert!(guard.is_valid(), "{name}: {value}");
        let by_page = ("x-requested-with", "fetch");
        assert_eq!(delete(&[(name, value), by_page]).await.status, 200);
        assert!(!guard.is_valid());
    }
}

#[tokio::test(start_paused = true)]
async fn browsers_get_a_page_in_which_only_its_own_script_runs() {
    let app = admin(&redlock(&ScriptedNodes::new(3)));
    let mut policies = Vec::new();
    for _ in 0..2 {
        let accept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
        let page = Answer::to(&app, request_with("GET", "/admin", &[("accept", accept)])).await;
        assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
        assert_eq!(page.headers["cache-control"], "no-store");
        assert_eq!(page.headers["vary"], "accept");
        let policy = page.headers["content-security-policy"].to_str().unwrap();
        let (_, nonce) = policy.split_once("script-src 'nonce-").unwrap();
        let (nonce, _) = nonce.split_once('\'').unwrap();
        assert_eq!(nonce.len(), 16);
        assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"));
        let (text, script) = (page.text(), format!("<script nonce=\"{nonce}\">"));
        assert!(text.contains(&script), "{policy}");
        assert!(!text.contains("{nonce}"));
        policies.push(policy.to_owned());
    }
    assert_ne!(policies[0], policies[1]);
    let (status, health) = json(&app, "GET", "/admin").await;
    assert_eq!((status, &health["status"]), (200, &json!("ready")));
}
