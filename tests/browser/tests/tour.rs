//! The whole tour, as the page shows it: on embedded nodes and on real servers.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use browser::{Page, Scheme, Size};
use serde_json::Value;

/// The longest steps wait for two quarantines.
const STEP: Duration = Duration::from_secs(90);

#[tokio::test]
async fn the_tour_shows_what_it_promises_on_embedded_nodes() {
    whole_tour(&[], "embedded").await;
}

#[tokio::test]
async fn the_tour_shows_what_it_promises_on_real_servers() {
    let server = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
    if Command::new(server).arg("--version").output().is_err() {
        support::not_run("the playground's tour on real servers, because redis-server is missing");
        return;
    }
    whole_tour(&["--redis"], "redis").await;
}

async fn whole_tour(arguments: &[&'static str], mode: &'static str) {
    let Some(page) = Page::open(arguments).await else {
        return;
    };
    let shown = page.run("return document.body.dataset.mode").await;
    assert_eq!(shown, mode);
    page.run(RECORD).await;

    let contention = run_step(&page, 1).await.main();
    assert!(contention.grown("acquired") > 0);
    assert!(contention.grown("contended") > 0);
    assert_eq!(contention.after("token_regressions"), 0);
    assert_eq!(contention.after("two_holders"), 0);
    assert_eq!(contention.after("lost_updates"), 0);
    let verdicts = page.run(VERDICTS).await;
    assert_eq!(verdicts, serde_json::json!(["kept", "kept", "kept"]));

    let one_down = run_step(&page, 2).await.main();
    assert!(one_down.saw("down"));
    assert!(one_down.grown("acquired") > 0);
    assert_eq!(one_down.grown("unavailable"), 0);

    let majority_down = run_step(&page, 3).await.main();
    assert!(majority_down.saw("down") && majority_down.saw("quarantined"));
    assert!(majority_down.grown("unavailable") > 0);
    assert!(
        majority_down.refused_with("Last answer: 503 · No quorum: too few nodes answer"),
        "{majority_down:?}"
    );
    assert_eq!(majority_down.after("two_holders"), 0);
    let result = page.run(RESULT_OF_STEP_3).await;
    assert!(
        result.as_str().unwrap().contains(", 0 with 423,"),
        "{result}"
    );

    let unfenced = run_step(&page, 4).await.weak("fencing is off");
    assert!(unfenced.after("lost_updates") >= 1);
    assert!(unfenced.rows("lost-update") >= 1);
    assert_eq!(unfenced.verdict("lost_updates"), "expected");
    assert_banner(&page, "Separate instance: fencing is off").await;
    take_pictures(&page, mode).await;

    let fenced = run_step(&page, 5).await.main();
    assert!(fenced.grown("refused_writes") >= 1);
    assert!(fenced.rows("refused") >= 1);
    assert_eq!(page.run(REFUSED_IS_LOWER).await, true);
    assert_eq!(fenced.after("lost_updates"), 0);
    assert_eq!(fenced.rows("lost-update"), 0);
    let banner = page
        .run("return document.querySelector('#banner').hidden")
        .await;
    assert_eq!(banner, true);

    let forgetful = run_step(&page, 6).await;
    let unguarded = forgetful.weak("the restart guard is off");
    assert!(unguarded.after("two_holders") >= 1);
    assert_eq!(unguarded.verdict("two_holders"), "expected");
    let guarded = forgetful.main();
    assert_eq!(guarded.after("two_holders"), 0);
    assert!(guarded.saw("quarantined"));

    let disconnected = run_step(&page, 7).await.main();
    assert!(disconnected.grown("contended") >= 1);
    let gap = page.run(GAP_AFTER_ANN).await;
    let gap = gap.as_f64().expect("Ann and Ben held the lock");
    assert!((-0.1..1.0).contains(&gap), "{gap} s after Ann had gone");

    let before = page.run(PAYMENTS).await.as_u64().unwrap();
    let paid = run_step(&page, 8).await.main();
    assert_eq!(paid.grown("replayed"), 1);
    let after = page.run(PAYMENTS).await.as_u64().unwrap();
    assert_eq!(after - before, 1);

    let verdicts = page.run(VERDICTS).await;
    assert_eq!(verdicts, serde_json::json!(["kept", "kept", "kept"]));
    assert_eq!(
        page.run(WITHOUT_SIGN_OF_RUNNING).await,
        serde_json::json!([])
    );
    page.run(KEEP_ROWS).await;
    page.click("[data-action=reset]").await;
    page.see_count("#tour > li[data-state=idle]", 8).await;
    // The ledger is empty for a moment only, because the load goes on.
    page.wait_for(
        "a ledger without earlier rows",
        "window.keptRows.length > 0 && window.keptRows.every(row => !row.isConnected)",
    )
    .await;
    assert_eq!(page.console_problems().await, Vec::<String>::new());
}

/// Runs a step by its button, and returns what each instance showed meanwhile.
async fn run_step(page: &Page, step: u32) -> Seen {
    page.run("window.forgetSeen()").await;
    page.click(&format!("#tour .run[data-step=\"{step}\"]"))
        .await;
    let item = format!("document.querySelector('#tour > li[data-step=\"{step}\"]')");
    let has_ended = format!("['done', 'expected', 'failed'].includes({item}.dataset.state)");
    page.wait_longer_for("the end of the step", &has_ended, STEP)
        .await;
    let result = page
        .run(&format!(
            "return {item}.querySelector('.step-result').innerText"
        ))
        .await;
    let result = result.as_str().unwrap();
    // In a weak instance, a failure is what the step shows.
    let sign = if [4, 6].contains(&step) { '⚠' } else { '✓' };
    assert!(result.starts_with(sign), "step {step}: {result}");
    let told = page.text("#announcement").await;
    let is_told = told.starts_with(&format!("Step {step}, "));
    assert!(is_told, "{told}");
    Seen(page.run("return Object.values(window.seen)").await)
}

/// What was seen of the instances while a step ran.
struct Seen(Value);

impl Seen {
    fn main(&self) -> Instance {
        self.weak("")
    }

    /// The latest instance with this weakness.
    fn weak(&self, weakness: &str) -> Instance {
        let all = self.0.as_array().unwrap();
        let found = all.iter().rev().find(|seen| seen["weak"] == weakness);
        Instance(
            found
                .unwrap_or_else(|| panic!("not shown: {weakness:?}"))
                .clone(),
        )
    }
}

/// What the page showed of one instance, from its first state to its last.
#[derive(Debug)]
struct Instance(Value);

impl Instance {
    fn after(&self, counter: &str) -> i64 {
        self.0["last"][counter].as_i64().unwrap()
    }

    fn grown(&self, counter: &str) -> i64 {
        self.after(counter) - self.0["first"][counter].as_i64().unwrap()
    }

    fn saw(&self, state: &str) -> bool {
        self.0["states"]
            .as_array()
            .unwrap()
            .iter()
            .any(|seen| seen == state)
    }

    fn refused_with(&self, words: &str) -> bool {
        self.0["answers"]
            .as_array()
            .unwrap()
            .iter()
            .any(|seen| seen == words)
    }

    /// The most rows of this kind in the ledger.
    fn rows(&self, kind: &str) -> u64 {
        self.0["rows"][kind].as_u64().unwrap_or(0)
    }

    fn verdict(&self, invariant: &str) -> &str {
        self.0["verdicts"][invariant].as_str().unwrap()
    }
}

async fn assert_banner(page: &Page, text: &str) {
    let banner = page
        .run("return document.querySelector('#banner').innerText")
        .await;
    assert!(banner.as_str().unwrap().starts_with(text), "{banner}");
}

/// For a look at them: both widths and themes, while a weak instance is shown.
async fn take_pictures(page: &Page, mode: &str) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pictures");
    fs::create_dir_all(&folder).unwrap();
    for (size, width) in [(Size::DESKTOP, 1280), (Size::PHONE, 390)] {
        for (scheme, theme) in [(Scheme::Light, "light"), (Scheme::Dark, "dark")] {
            page.emulate(size, scheme, false).await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            let file = folder.join(format!("{mode}_{width}_{theme}.png"));
            let picture = page.picture().await;
            assert!(
                picture.len() > 20_000,
                "an empty picture: {}",
                picture.len()
            );
            fs::write(file, picture).unwrap();
        }
    }
    page.emulate(Size::DESKTOP, Scheme::Light, false).await;
}

/// Keeps, for each instance, what the page shows at each change.
const RECORD: &str = "
window.forgetSeen = () => { window.seen = {}; record(); };
const record = () => {
    const { instance, weak } = document.body.dataset;
    const counters = {};
    for (const e of document.querySelectorAll('[data-counter]')) counters[e.dataset.counter] = Number(e.textContent);
    const entry = window.seen[`${weak} ${instance}`] ??= { weak, first: counters, states: [], answers: [], rows: {}, verdicts: {} };
    entry.last = counters;
    const add = (list, value) => { if (!list.includes(value)) list.push(value); };
    for (const e of document.querySelectorAll('.node')) add(entry.states, e.dataset.state);
    for (const e of document.querySelectorAll('.last')) add(entry.answers, e.textContent);
    for (const kind of ['accepted', 'refused', 'lost-update']) {
        const count = document.querySelectorAll(`[data-write=${kind}]`).length;
        entry.rows[kind] = Math.max(entry.rows[kind] ?? 0, count);
    }
    for (const e of document.querySelectorAll('[data-invariant]')) entry.verdicts[e.dataset.invariant] = e.dataset.verdict;
    for (const e of document.querySelectorAll('#tour > [data-state=running][aria-current=step]')) window.ran.add(e.dataset.step);
};
window.seen = {};
window.ran = new Set();
new MutationObserver(record).observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
record();
";

/// The last step may begin and end between two states of the page.
const WITHOUT_SIGN_OF_RUNNING: &str =
    "return ['1', '2', '3', '4', '5', '6', '7'].filter(step => !window.ran.has(step))";

const RESULT_OF_STEP_3: &str =
    "return document.querySelector('#tour > li[data-step=\"3\"] .step-result').innerText";

/// The refused write has a lower token than the write before it, which is below it.
const REFUSED_IS_LOWER: &str = "
const token = row => Number(row.querySelector('.token').textContent.replaceAll(',', ''));
const refused = document.querySelector('[data-write=refused]');
return token(refused) < token(refused.nextElementSibling);
";

const KEEP_ROWS: &str =
    "window.keptRows = [...document.querySelectorAll('#ledger-body tr')]; return null";

const VERDICTS: &str =
    "return [...document.querySelectorAll('[data-invariant]')].map(e => e.dataset.verdict)";

const PAYMENTS: &str = "return [...document.querySelectorAll('#ledger-body tr')] \
     .filter(row => row.children[3].textContent === '+25').length";

/// The seconds from the end of Ann's last lock to the beginning of Ben's first one after it, in the timeline.
const GAP_AFTER_ANN: &str = "
const chart = document.querySelector('#timeline-chart');
const second = (chart.getBoundingClientRect().width - 46) / 30;
const bars = [...chart.querySelectorAll('.hold')].map(bar => ({
    caller: bar.textContent.split(' ')[0],
    from: Number(bar.getAttribute('x')) / second,
    to: (Number(bar.getAttribute('x')) + Number(bar.getAttribute('width'))) / second,
}));
const ann = bars.filter(bar => bar.caller === 'Ann').at(-1);
const ben = bars.filter(bar => bar.caller === 'Ben').find(bar => bar.from > ann.from);
return ben.from - ann.to;
";
