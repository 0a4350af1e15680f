//! The page without its tour: what is there, and how it is used.

use browser::Page;
use serde_json::json;

#[tokio::test]
async fn the_page_shows_callers_votes_and_writes_and_logs_no_errors() {
    let Some(page) = Page::open(&[]).await else {
        return;
    };
    page.turn_load_on().await;
    page.see("[data-write=accepted]").await;
    page.see(".node:not([data-holder=\"\"])").await;
    page.wait_for(
        "a caller that holds the lock, with its token and its time",
        HOLDS,
    )
    .await;
    page.see("circle.vote").await;
    page.see(".hold").await;
    page.wait_for("a refusal in words", REFUSED).await;
    page.wait_for("tokens that increase", INCREASING).await;
    page.see_count(".caller", 5).await;
    page.click("[data-action=more-callers]").await;
    page.see_count(".caller", 6).await;
    page.click("[data-action=fewer-callers]").await;
    page.see_count(".caller", 5).await;
    page.click("[data-caller=Ann][data-action=pause]").await;
    page.see("[data-server=A][data-state=paused]").await;
    assert_eq!(page.run(FROM_ELSEWHERE).await, json!([]));
    page.check_console().await;
}

#[tokio::test]
async fn node_buttons_work_by_keyboard() {
    let Some(page) = Page::open(&[]).await else {
        return;
    };
    let node = ".node[data-node=\"1\"]";
    // The button stays where it is, and so does the focus.
    for (button, state) in [
        ("kill", "[data-state=down]"),
        ("restart", "[data-state=quarantined]"),
        ("hang", "[data-state=hung]"),
        ("resume", "[data-state=up]"),
        ("delay", "[data-delay=\"100\"]"),
        ("wipe", "[data-state=quarantined]"),
    ] {
        if button == "hang" {
            page.see(&format!("{node}[data-state=up]")).await;
        }
        page.press_by_keyboard(&format!("button[data-node=\"1\"][data-action={button}]"))
            .await;
        page.see(&format!("{node}{state}")).await;
    }
    let cut = "[data-node=\"1\"][data-server=B]";
    page.press_by_keyboard(&format!("button[data-action=cut]{cut}"))
        .await;
    page.see(&format!(".wire[data-state=cut]{cut}")).await;
    page.press_by_keyboard("[data-action=reset]").await;
    page.see(&format!("{node}[data-state=up]")).await;
    page.check_console().await;
}

#[tokio::test]
async fn the_page_reconnects_and_says_so() {
    let Some(mut page) = Page::open(&[]).await else {
        return;
    };
    page.playground().end();
    page.see_match("#connection", "reconnecting").await;
    page.playground().restart();
    page.see_text("#connection", "Live").await;
    page.wait_for("its first state", "document.body.dataset.instance")
        .await;
}

const HOLDS: &str = "[...document.querySelectorAll('.caller[data-state=holding]')].some(caller => \
     /^[0-9.]+ s$/.test(caller.querySelector('.left').textContent) \
     && /^[+][0-9,]+$/.test(caller.querySelector('.token').textContent) \
     && caller.querySelector('.token').title.length >= 6 \
     && caller.querySelector('.validity i').getBoundingClientRect().width > 1)";

/// The ledger has the newest write first.
const INCREASING: &str = "(tokens => tokens.length > 2 && tokens.every((token, at) => token >= 0 && !(token <= tokens[at + 1])))( \
     [...document.querySelectorAll('#ledger-body .token')].map(token => Number(token.textContent.replaceAll(',', ''))))";

const REFUSED: &str = "[...document.querySelectorAll('.last[data-code=lock-contended]')] \
     .some(last => /^Last answer: 423 · Busy: [A-Z][a-z]+ on server [AB] holds it$/.test(last.textContent))";

/// What the page asked of others than its own server.
const FROM_ELSEWHERE: &str = "return performance.getEntriesByType('resource').map(entry => entry.name) \
     .filter(url => !url.startsWith(location.origin) && !url.startsWith('data:'))";
