//! What the compiler says to a user of `Locked` who forgot something.

#![cfg(test)]
#![allow(clippy::print_stdout, reason = "what is not checked must not go unsaid")]

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
