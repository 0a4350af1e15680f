//! Takes the pictures of the playground that the README and the guide show: `screenshots <folder>`.

#![allow(clippy::print_stdout, reason = "a program that says what it did")]

use std::env;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use browser::{Page, small_png};
use tokio::time::sleep;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Some(folder) = env::args_os().nth(1) else {
        println!("usage: screenshots <folder>");
        return ExitCode::FAILURE;
    };
    let folder = Path::new(&folder);
    let Some(page) = Page::open(&[]).await else {
        return ExitCode::FAILURE;
    };
    page.resize(WHOLE_SCENE).await;
    page.turn_load_on().await;
    // One whole width of the timeline.
    sleep(Duration::from_secs(31)).await;
    page.click("[data-node=\"3\"][data-action=kill]").await;
    sleep(Duration::from_secs(1)).await;
    page.click("[data-node=\"3\"][data-action=restart]").await;
    page.click("[data-node=\"4\"][data-action=kill]").await;
    sleep(Duration::from_secs(1)).await;
    page.see(".caller[data-state=holding]").await;
    save(folder, "playground.png", &page.picture().await);

    page.resize(LEDGER).await;
    page.click("#tour .run[data-step=\"4\"]").await;
    let end = "#tour > li[data-step=\"4\"][data-state=expected]";
    page.see_within(end, Duration::from_secs(60)).await;
    page.run(SCROLL_TO_TIMELINE).await;
    sleep(Duration::from_millis(500)).await;
    save(folder, "playground_fencing.png", &page.picture().await);
    ExitCode::SUCCESS
}

fn save(folder: &Path, name: &str, picture: &[u8]) {
    let small = small_png(picture);
    let file = folder.join(name);
    println!("{}: {} KB", file.display(), small.len() / 1024);
    assert!(small.len() <= MOST_BYTES, "more than {MOST_BYTES} bytes");
    fs::write(&file, small).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
}

/// High enough for the nodes, the servers and the timeline.
const WHOLE_SCENE: u32 = 1160;

/// High enough for the timeline and the ledger, below the invariants.
const LEDGER: u32 = 820;

/// What a repository keeps gladly.
const MOST_BYTES: usize = 150_000;

const SCROLL_TO_TIMELINE: &str = "
const head = document.querySelector('.watch').getBoundingClientRect().height;
scrollTo({ top: document.querySelector('#timeline').offsetTop - head - 8, behavior: 'instant' });
const tour = document.querySelector('.tour');
tour.scrollTop = tour.querySelector('[data-step=\"4\"]').offsetTop - 60;
document.activeElement.blur();
";
