//! What the compiler says to a user who forgot something, and the builder to one who forgot a feature.

#![cfg(test)]
#![allow(
    clippy::print_stdout,
    reason = "what is not checked must not go unsaid"
)]

use std::process::Command;

/// Every release of the compiler words its messages a little differently. To renew them for
/// another one, change this and run the test with `TRYBUILD=overwrite`.
const COMPILER: &str = "rustc 1.95.";

#[test]
fn compiler_errors_name_the_missing_impl() {
    let output = Command::new("rustc").arg("--version").output();
    let version = String::from_utf8(output.unwrap().stdout).unwrap();
    if !version.starts_with(COMPILER) {
        println!("not comparing messages: they are those of {COMPILER}*, and this is {version}");
        return;
    }
    trybuild::TestCases::new().compile_fail("cases/*.rs");
}

/// The tests of the crate itself have all of its features.
#[test]
fn rediss_url_without_the_feature_names_the_feature() {
    let refused = tower_redlock::Redlock::builder().url("rediss://app:hunter2@10.0.0.1");
    assert_eq!(
        refused.build().unwrap_err().to_string(),
        "`url` is rediss://***@10.0.0.1: TLS needs the feature `tls-rustls` of tower-redlock; add it to the dependency"
    );
}
