//! `testing_your_handlers`: its tests are run by cargo, and counted here.

const SOURCE: &str = include_str!("../../examples/testing_your_handlers.rs");

#[test]
fn the_header_of_the_tested_handlers_counts_their_tests() {
    let tests = SOURCE.matches("#[tokio::test").count();
    let promised = format!("//! test result: ok. {tests} passed; 0 failed; ");
    assert!(SOURCE.contains(&promised), "{promised}");
}
