//! Drives the page of `examples/playground`, and that of operators, in a headless Chromium, by WebDriver.

#![allow(
    missing_docs,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    reason = "only tests use it"
)]

mod chromedriver;
mod commands;
mod page;
mod picture;
mod playground;

pub use page::Page;
pub use picture::small_png;
pub use playground::Playground;
