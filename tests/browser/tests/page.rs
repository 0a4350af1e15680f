//! The page without its tour: what is there, how it looks, and how it is used.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

use std::time::Duration;

use browser::{Page, Scheme, Size};
use serde_json::json;
use tokio::time::sleep;

const SCHEMES: [Scheme; 2] = [Scheme::Light, Scheme::Dark];

/// What the page is made of.
const PARTS: [(&str, usize); 20] = [
    ("h1", 1),
    (".node", 5),
    (".node button", 5 * 6),
    (".server", 2),
    (".caller", 5),
    (".caller button", 5 * 2),
    (".votes > i", 2 * 5),
    (".votes > .past-quorum", 2),
    ("#wires > .wire", 2 * 5),
    ("#timeline-chart .row-name", 5),
    ("#ledger thead th", 6),
    ("[data-invariant]", 3),
    ("[data-counter]", 3 + 4 + 6),
    ("#tour > li", 8),
    (".intro", 1),
    (".scene .legend li", 5),
    ("#timeline .legend li", 4),
    ("#tour .run", 8),
    ("#banner[hidden]", 1),
    ("[data-action=reset]", 1),
];

#[tokio::test]
async fn the_page_has_all_its_parts_and_logs_no_errors() {
    let Some(page) = Page::open(&[]).await else {
        return;
    };
    for (selector, count) in PARTS {
        let found = page
            .run(&format!(
                "return document.querySelectorAll('{selector}').length"
            ))
            .await;
        assert_eq!(found, json!(count), "{selector}");
    }
    turn_load_on(&page).await;
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
    let button = "[data-caller=Ann][data-action=pause]";
    assert_eq!(page.text(button).await, "Pause server A");
    page.click("[data-action=more-callers]").await;
    page.see_count(".caller", 6).await;
    page.click("[data-action=fewer-callers]").await;
    page.see_count(".caller", 5).await;
    page.click("[data-caller=Ann][data-action=pause]").await;
    page.see("[data-server=A][data-state=paused]").await;
    assert_eq!(page.console_problems().await, NONE);
}

#[tokio::test]
async fn node_buttons_work_by_keyboard() {
    let Some(page) = Page::open(&[]).await else {
        return;
    };
    let button = |action: &str| format!("button[data-node=\"1\"][data-action={action}]");
    let state = |state: &str| format!(".node[data-node=\"1\"][data-state={state}]");
    page.press_by_keyboard(&button("kill")).await;
    page.see(&state("down")).await;
    // The button stays where it is, and so does the focus.
    page.press_by_keyboard(&button("restart")).await;
    page.see(&state("quarantined")).await;
    page.see_match("[data-node=\"1\"] .node-state", "quarantined [0-9.]+ s")
        .await;
    page.see(&state("up")).await;
    page.press_by_keyboard(&button("hang")).await;
    page.see(&state("hung")).await;
    page.press_by_keyboard(&button("resume")).await;
    page.see(&state("up")).await;
    page.press_by_keyboard(&button("delay")).await;
    page.see(".node[data-node=\"1\"][data-delay=\"100\"]").await;
    page.press_by_keyboard(&format!("{}[data-server=B]", button("cut")))
        .await;
    page.see(".wire[data-node=\"1\"][data-server=B][data-state=cut]")
        .await;
    page.press_by_keyboard(&button("wipe")).await;
    page.see(&state("quarantined")).await;
    page.press_by_keyboard("[data-action=reset]").await;
    page.see(&state("up")).await;
    assert_eq!(page.console_problems().await, NONE);
}

#[tokio::test]
async fn a_phone_shows_the_scene_while_a_step_runs() {
    let Some(page) = Page::open(&[]).await else {
        return;
    };
    page.emulate(Size::PHONE, Scheme::Light, false).await;
    page.click("#tour .run[data-step=\"1\"]").await;
    page.wait_for("the scene of the step", SCENE_IN_VIEW).await;
    page.see_match("#step-line", "^✓").await;
    page.wait_for(
        "buttons again",
        "document.querySelector('.node button').getClientRects().length",
    )
    .await;
}

#[tokio::test]
async fn controls_have_names_and_all_fits_and_has_contrast() {
    let Some(page) = Page::open(&[]).await else {
        return;
    };
    turn_load_on(&page).await;
    page.see("[data-write=accepted]").await;
    // As many colours as possible: a node of each state, and a step that runs in a weak instance.
    page.click("[data-node=\"0\"][data-action=kill]").await;
    page.click("[data-node=\"1\"][data-action=hang]").await;
    page.click("[data-node=\"2\"][data-action=wipe]").await;
    page.see("[data-state=quarantined]").await;
    check_look(&page).await;
    page.click("#tour [data-step=\"4\"].run").await;
    page.wait_for("the weak instance", "document.body.dataset.weak !== ''")
        .await;
    check_look(&page).await;
    page.wait_longer_for(
        "a lost update",
        "document.querySelector('[data-write=lost-update]')",
        Duration::from_secs(60),
    )
    .await;
    check_look(&page).await;
}

async fn check_look(page: &Page) {
    for scheme in SCHEMES {
        for size in [Size::DESKTOP, Size::PHONE] {
            page.emulate(size, scheme, true).await;
            // A frame to lay the page out.
            sleep(Duration::from_millis(300)).await;
            assert_eq!(page.run(NAMELESS).await, json!([]));
            page.check_width().await;
            let colour = page.run(BACKGROUND).await;
            let is_dark = colour == "rgb(14, 19, 25)";
            assert_eq!(is_dark, scheme == Scheme::Dark, "{colour}");
            assert!(page.check_contrast().await > 100);
        }
    }
}

#[tokio::test]
async fn reduced_motion_shows_votes_without_dots() {
    let Some(page) = Page::blank(&[]).await else {
        return;
    };
    page.emulate(Size::DESKTOP, Scheme::Light, true).await;
    page.visit().await;
    page.run(WATCH_MOTION).await;
    turn_load_on(&page).await;
    page.wait_for("lit wires", "window.lit > 20").await;
    assert_eq!(page.run("return window.dots").await, json!(0));
    let animations = page.run("return document.getAnimations().length").await;
    assert_eq!(animations, json!(0));
    // The same page counts dots once motion is wanted.
    page.emulate(Size::DESKTOP, Scheme::Light, false).await;
    page.wait_for("dots", "window.dots > 20").await;
}

#[tokio::test]
async fn the_page_asks_nothing_but_its_own_server() {
    let Some(page) = Page::blank(&[]).await else {
        return;
    };
    page.requests().await;
    page.visit().await;
    page.click("[data-action=load]").await;
    page.click("[data-action=reset]").await;
    sleep(Duration::from_secs(1)).await;
    let requests = page.requests().await;
    let origin = page.url();
    let inside = requests.iter().filter(|url| url.starts_with(&origin));
    assert!(inside.count() >= 6, "{requests:?}");
    // The icon is part of the page.
    let elsewhere = requests
        .iter()
        .filter(|url| !url.starts_with(&origin) && !url.starts_with("data:"));
    assert_eq!(elsewhere.collect::<Vec<_>>(), Vec::<&String>::new());
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

async fn turn_load_on(page: &Page) {
    page.run("document.querySelector('#load[aria-pressed=false]')?.click()")
        .await;
    page.see("#load[aria-pressed=true]").await;
}

const BACKGROUND: &str = "return getComputedStyle(document.body).backgroundColor";

const NONE: [String; 0] = [];

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

/// All nodes and servers are between the sticky head and the end of the window.
const SCENE_IN_VIEW: &str = "document.querySelector('#step-line').innerText === 'Step 1, Contention, runs…' \
     && document.querySelector('.stage').getBoundingClientRect().top >= document.querySelector('.watch').getBoundingClientRect().bottom \
     && document.querySelector('.stage').getBoundingClientRect().bottom <= innerHeight";

/// Controls, pictures and lists of rows without a name.
const NAMELESS: &str = "
const named = e => (e.getAttribute('aria-label') || '').trim()
    || (e.getAttribute('aria-labelledby') || '').split(' ').map(id => document.getElementById(id)?.textContent ?? '').join('').trim()
    || (['BUTTON', 'A'].includes(e.tagName) && e.textContent.trim());
const wanted = 'button, a, [role=img], [role=group], [role=region], section, aside, ul.nodes, ul.servers, ul.callers';
const wrong = [...document.querySelectorAll(wanted)].filter(e => !named(e)).map(e => e.outerHTML.slice(0, 120));
// A label that a user speaks begins with what stands on the button.
for (const button of document.querySelectorAll('button[aria-label]')) {
    const seen = button.textContent.trim().replace('…', '');
    if (/[a-z]/i.test(seen) && !button.getAttribute('aria-label').startsWith(seen)) wrong.push(button.outerHTML.slice(0, 160));
}
// Of many buttons with the same text, each says what it belongs to.
const names = [...document.querySelectorAll('button')].map(e => e.getAttribute('aria-label') ?? e.textContent);
if (new Set(names).size !== names.length) wrong.push('two buttons have one name');
if (!document.documentElement.lang) wrong.push('html without a language');
if (!document.title) wrong.push('page without a title');
if (!document.querySelector('#announcement[aria-live=polite]')) wrong.push('no live region');
if (!document.querySelector('table caption')) wrong.push('no caption');
const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
if (new Set(ids).size !== ids.length) wrong.push('an id stands twice');
return wrong;
";

/// Counts the dots and the lit wires that appear.
const WATCH_MOTION: &str = "
window.dots = 0;
window.lit = 0;
new MutationObserver(changes => {
    for (const change of changes) {
        if (change.type === 'attributes' && change.target.dataset.answer) window.lit += 1;
        for (const added of change.addedNodes) if (added.matches?.('circle')) window.dots += 1;
    }
}).observe(document.querySelector('#wires'), { childList: true, attributes: true, subtree: true, attributeFilter: ['data-answer'] });
";
