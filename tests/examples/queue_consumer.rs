//! The queue consumer prints the lines that its header shows.

use support::{ChildProcess, example_path};

use crate::PATIENCE;

#[test]
fn queue_consumer_prints_the_lines_of_its_header() {
    let source = include_str!("../../examples/queue_consumer.rs");
    let header = source.lines().map_while(|line| line.strip_prefix("//!"));
    let shown = header.map(str::trim);
    let shown: Vec<&str> = shown.filter(|line| line.starts_with("message ")).collect();
    let mut consumer = ChildProcess::start(example_path("queue_consumer"), &[], &[]);
    assert!(consumer.wait(PATIENCE).success());
    assert_eq!(consumer.stdout().lines().collect::<Vec<_>>(), shown);
}
