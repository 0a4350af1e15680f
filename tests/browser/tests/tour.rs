//! The whole tour, as the page shows it: on embedded nodes and on real servers.

use std::process::Command;
use std::time::Duration;

use browser::Page;

/// The longest steps wait for two quarantines.
const STEP: Duration = Duration::from_secs(90);

/// The sign of each step's result, and what is counted at its end. In a weak instance, a failure is what the step shows.
const STEPS: [(char, &[&str]); 8] = [
    ('✓', &["acquired", "contended"]),
    ('✓', &["acquired"]),
    ('✓', &["unavailable"]),
    ('⚠', &["lost_updates"]),
    ('✓', &["refused_writes"]),
    ('⚠', &[]),
    ('✓', &["contended"]),
    ('✓', &["replayed"]),
];

/// The one in which an invariant is broken at the end.
const WITHOUT_FENCING: usize = 4;

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
    page.see(&format!("body[data-mode={mode}]")).await;
    for (at, (sign, counters)) in STEPS.iter().enumerate() {
        let step = at + 1;
        let item = format!("#tour > li[data-step=\"{step}\"]");
        page.click(&format!("{item} .run")).await;
        let ends = ["done", "expected", "failed"].map(|end| format!("{item}[data-state={end}]"));
        page.see_within(&ends.join(", "), STEP).await;
        let result = page.text(&format!("{item} .step-result")).await;
        assert!(result.starts_with(*sign), "step {step}: {result}");
        for counter in *counters {
            let shown = page.text(&format!("[data-counter={counter}]")).await;
            assert_ne!(shown, "0", "step {step}: {counter}");
        }
        let broken = usize::from(step == WITHOUT_FENCING);
        page.see_count("[data-invariant][data-verdict=expected]", broken)
            .await;
        page.see_count("[data-invariant][data-verdict=kept]", 3 - broken)
            .await;
        let lost = "[data-write=lost-update]";
        assert_eq!(
            page.count(lost).await > 0,
            step == WITHOUT_FENCING,
            "step {step}"
        );
        if counters.contains(&"refused_writes") {
            assert_eq!(page.run(REFUSED_IS_LOWER).await, true);
        }
    }
    page.click("[data-action=reset]").await;
    page.see_count("#tour > li[data-state=idle]", 8).await;
    page.check_console().await;
}

/// The refused write has a lower token than the write before it, which is below it.
const REFUSED_IS_LOWER: &str = "
const token = row => Number(row.querySelector('.token').textContent.replaceAll(',', ''));
const refused = document.querySelector('[data-write=refused]');
return token(refused) < token(refused.nextElementSibling);
";
