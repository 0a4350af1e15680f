//! Drives the page of `examples/playground` in a headless Chromium, by WebDriver.

mod chromedriver;
mod commands;
#[path = "../../support/not_run.rs"]
mod not_run;
mod page;
mod picture;
mod playground;
mod process;

pub use page::{Page, Scheme, Size};
pub use picture::small_png;
