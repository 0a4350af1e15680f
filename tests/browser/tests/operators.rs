//! The page of `admin_router`, as operators use it.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn};
use browser::Page;
use serde_json::{Value, json};
use tokio::time::Duration;
use tower_redlock::test_util::{Gate, ScriptedNodes};
use tower_redlock::{LockGuard, LockKey, NodeGroup, Redlock, admin_router};

/// Opens a page of an application.
async fn open_at(app: Router, path: &str) -> Option<Page> {
    let (addr, ..) = support::http::serve(app).await;
    let page = Page::of(format!("http://{addr}{path}")).await?;
    page.load().await;
    Some(page)
}

/// Opens the page of a service, nested at `/admin`.
async fn open(redlock: &Redlock) -> Option<Page> {
    let app = Router::new().nest("/admin", admin_router(redlock.clone()));
    let page = open_at(app, "/admin").await?;
    page.see("#nodes td").await;
    Some(page)
}

fn redlock(nodes: &ScriptedNodes) -> Redlock {
    let builder = Redlock::builder().scripted(nodes).holder("server A");
    let builder = builder.node_timeout(Duration::from_secs(5));
    builder.ttl(Duration::from_secs(600)).build().unwrap()
}

/// Sets the text of a field as a person who pastes it does.
async fn paste(page: &Page, field: &str, text: &str) {
    let text = json!(text);
    page.run(&format!(
        "const field = document.querySelector('{field}'); field.value = {text}; \
         field.dispatchEvent(new Event('input', {{ bubbles: true }}))"
    ))
    .await;
}

async fn search(page: &Page, prefix: &str, found: &str) {
    paste(page, "#prefix", prefix).await;
    page.click(SEARCH).await;
    page.see_text("#found", found).await;
}

const SEARCH: &str = "#search button:not([type=button])";

async fn is_disabled(page: &Page, button: &str) -> bool {
    let script = format!("return document.querySelector('{button}').disabled");
    page.run(&script).await == json!(true)
}

const REVOKE: &str = "#revoke .danger";
const REVOKED: &str = "revoked on 3 nodes. Now: free";

/// Keys that try to be more than a text, each with what the page shows of it.
fn hostile_keys() -> Vec<(LockKey, &'static str)> {
    let (script, shown) = (
        "<img src=x onerror=hurt=1>",
        "<img%20src=x%20onerror=hurt=1>",
    );
    vec![
        (script.into(), shown),
        (("</bdi><script>", "'\"&").into(), "<%2Fbdi><script>/'\"&"),
        (("a/b", "100%", "..x").into(), "a%2Fb/100%25/..x"),
        (("a", "..").into(), "1:a,2:..,"),
        (("emoji", "🔒👩‍🚀").into(), "emoji/🔒👩%E2%80%8D🚀"),
        (("rtl", "مفتاح").into(), "rtl/مفتاح"),
        ("r\u{202e}\0\n\u{3164}".into(), "r%E2%80%AE%00%0A%E3%85%A4"),
        (b"\xff\xfe".into(), "%FF%FE"),
        ("__proto__".into(), "__proto__"),
        ("?a=b#c".into(), "?a=b#c"),
    ]
}

#[tokio::test]
async fn hostile_keys_and_labels_are_shown_as_text_and_can_be_revoked() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let mut guards = Vec::new();
    let notes = ["<b>Ann</b>", "\u{202e}nnA", "آن"];
    for ((key, _), note) in hostile_keys().iter().zip(notes.iter().cycle()) {
        guards.push(redlock.try_lock(key).note(*note).await.unwrap());
    }
    let Some(page) = open(&redlock).await else {
        return;
    };
    let count = guards.len();
    search(&page, "", &format!("{count} locks")).await;
    let mut expected: Vec<_> = hostile_keys().into_iter().map(|(_, shown)| shown).collect();
    expected.sort();
    for (table, holder) in [("#held", 2), ("#locks", 3)] {
        page.see_count(&format!("{table} tbody tr"), count).await;
        assert_eq!(
            texts(&page, &format!("{table} td:first-child")).await,
            expected
        );
        let holders = texts(&page, &format!("{table} td:nth-child({holder})")).await;
        for note in ["<b>Ann</b>", "\\u{202e}nnA", "آن"] {
            let holder = format!("server A: {note}");
            assert!(holders.contains(&holder), "{holder} {holders:?}");
        }
    }
    for ((key, shown), guard) in hostile_keys().iter().zip(&guards) {
        let named = json!(shown);
        page.run(&format!(
            "[...document.querySelectorAll('#locks button')].find(button => button.textContent === {named}).click()"
        ))
        .await;
        page.see_match("#lock-state", "^held, .* left, held by server A: ")
            .await;
        assert_eq!(page.text("#lock-title").await, *shown);
        for wrong in [&shown[1..], "", &format!("{shown} ")] {
            paste(&page, "#confirmation", wrong).await;
            assert!(is_disabled(&page, REVOKE).await, "{wrong}");
        }
        assert!(guard.is_valid());
        paste(&page, "#confirmation", shown).await;
        page.click(REVOKE).await;
        page.see_text("#lock-state", REVOKED).await;
        assert!(!guard.is_valid(), "{key:?}");
        page.click("#close").await;
    }
    search(&page, "", "0 locks").await;
    assert_eq!(page.run("return window.hurt ?? null").await, Value::Null);
    page.check_console().await;
}

/// The texts of all elements, in the order of the alphabet.
async fn texts(page: &Page, selector: &str) -> Vec<String> {
    let script = format!(
        "return [...document.querySelectorAll('{selector}')].map(element => element.textContent)"
    );
    let mut texts: Vec<String> = serde_json::from_value(page.run(&script).await).unwrap();
    texts.sort();
    texts
}

#[tokio::test]
async fn ten_thousand_locks_are_listed_some_at_a_time() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let mut guards: Vec<LockGuard> = Vec::new();
    for number in 0..10_000 {
        guards.push(redlock.try_lock(("account", number)).await.unwrap());
    }
    let Some(page) = open(&redlock).await else {
        return;
    };
    page.see_text("#held-count", "10000; the 100 oldest:").await;
    search(&page, "account/", "10000 locks").await;
    let rows = "#locks tbody tr";
    assert_eq!(page.count(rows).await, 100);
    page.click("#more").await;
    assert_eq!(page.count(rows).await, 200);
    // The page still answers at once.
    search(&page, "account/9876", "1 lock").await;
    assert_eq!(page.count(rows).await, 1);
    page.see("#more[hidden]").await;
    // Two hundred requests, which take longer than any look at the page.
    (0..3).for_each(|node| nodes.set(node, Gate::Slow(Duration::from_millis(200))));
    paste(&page, "#prefix", "").await;
    page.click(SEARCH).await;
    page.see_match("#found", "^[1-9][0-9]* locks, searching$")
        .await;
    page.click("#stop").await;
    page.see_match("#found", "^[1-9][0-9]* locks, stopped$")
        .await;
    page.check_console().await;
}

#[tokio::test]
async fn a_key_is_found_and_revoked_by_keyboard() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let guard = redlock.try_lock(("report", "eu")).await.unwrap();
    let _other = redlock.try_lock("other").await.unwrap();
    let waiting = redlock.lock("other").wait(Duration::from_secs(60));
    let waiting = tokio::spawn(waiting.into_future());
    let Some(page) = open(&redlock).await else {
        return;
    };
    page.wait_for(
        "who waits",
        "document.querySelector('#waited tbody tr')?.innerText.replace(/\\s+/g, ' ') === 'other 1'",
    )
    .await;
    page.tab_to("#prefix").await;
    page.type_keys("report/\u{e007}").await;
    page.see_text("#found", "1 lock").await;
    page.press_by_keyboard("#locks button").await;
    page.see("dialog[open]").await;
    page.type_keys("\u{e00c}").await;
    page.wait_for("the page", "!document.querySelector('dialog[open]')")
        .await;
    page.type_keys(" ").await;
    page.tab_to("#confirmation").await;
    // Enter does nothing before the key is typed.
    page.type_keys("report/\u{e007}").await;
    page.type_keys("eu").await;
    assert!(guard.is_valid());
    page.type_keys("\u{e007}").await;
    page.see_text("#lock-state", REVOKED).await;
    assert!(!guard.is_valid());
    waiting.abort();
    page.check_console().await;
}

/// Browsers and proxies change some paths on their way.
#[tokio::test]
async fn the_key_that_is_revoked_is_the_one_that_stands_above() {
    let [old, new] = [(); 2].map(|()| ScriptedNodes::new(3));
    let group = |name, nodes| NodeGroup::new().name(name).scripted(nodes);
    let builder = Redlock::builder().node_group(group("old", &old));
    let redlock = builder.moving_to([group("new", &new)]).build().unwrap();
    let guard = redlock.try_lock(("report", "eu")).await.unwrap();
    (0..2).for_each(|node| old.wipe(node));
    let Some(page) = open(&redlock).await else {
        return;
    };
    assert_eq!(
        page.text("#quorum").await,
        "group old: ready, group new: ready"
    );
    paste(&page, "#prefix", "report/").await;
    assert!(is_disabled(&page, "#open").await);
    paste(&page, "#prefix", "job/../report/eu").await;
    page.click("#open").await;
    page.see_match(
        "#lock-state",
        "^group old: free; group new: held, .* left, held by not named, token [0-9]+$",
    )
    .await;
    assert_eq!(page.text("#lock-title").await, "report/eu");
    paste(&page, "#confirmation", "job/../report/eu").await;
    assert!(is_disabled(&page, REVOKE).await);
    paste(&page, "#confirmation", "report/eu").await;
    assert!(!is_disabled(&page, REVOKE).await);
    drop(guard);
    // One that no client can ask for.
    page.click("#close").await;
    paste(&page, "#prefix", "..").await;
    page.click("#open").await;
    page.see_match("#lock-state", "^the service answers 404")
        .await;
}

#[tokio::test]
async fn nodes_that_fail_and_services_that_refuse_are_told() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let Some(page) = open(&redlock).await else {
        return;
    };
    page.see_text("#status", "ready").await;
    nodes.set(0, Gate::Failing);
    page.see("#nodes .unreachable").await;
    page.see_text("#status", "degraded").await;
    nodes.set(1, Gate::Failing);
    page.see_text("#status", "down").await;
    paste(&page, "#prefix", "").await;
    page.click(SEARCH).await;
    page.see_match("#found", "^0 locks; the list broke off: .*embedded-0")
        .await;
    paste(&page, "#prefix", "k").await;
    page.click("#open").await;
    page.see_text("#lock-state", "unknown").await;
    page.see_match("#lock-nodes .unknown", "embedded-0").await;
    page.click("#close").await;
    redlock.drain(Duration::ZERO).await;
    page.see_text("#status", "draining").await;
}

/// The application's authentication answers for the router, as when a session has ended.
#[tokio::test]
async fn a_page_with_a_slash_at_its_end_says_that_the_session_has_ended() {
    let redlock = redlock(&ScriptedNodes::new(3));
    let refuse = from_fn(async |headers: HeaderMap, request: Request, next: Next| {
        if headers["accept"].to_str().unwrap().contains("text/html") {
            Ok(next.run(request).await)
        } else {
            Err(StatusCode::UNAUTHORIZED)
        }
    });
    let app = Router::new().nest("/ops/", admin_router(redlock).layer(refuse));
    let Some(page) = open_at(app, "/ops/").await else {
        return;
    };
    page.see_text(
        "#problem",
        "the service answers 401 Unauthorized; sign in again, or see its log",
    )
    .await;
}
