//! `grpc`: two clients of which one waits as it is told, and what is on the wire.

use support::{ChildProcess, example_path};

use crate::documented::{Example, lines_behind, output};
use crate::{has_curl, try_paste};

const SOURCE: &str = include_str!("../../examples/grpc/grpc.rs");

/// Returns what two clients print that withdraw at the same time.
pub(crate) fn run_two(client: &str) -> String {
    let server = Example::start("grpc", &[]);
    let listen = server.addr.to_string();
    let envs = [("LISTEN", listen.as_str())];
    let start = |_| ChildProcess::start(example_path(client), &["alice", "5"], &envs);
    [0, 1].map(start).map(output).join("\n")
}

#[test]
fn second_of_two_grpc_clients_waits_as_documented() {
    let said = run_two("grpc");
    let said: Vec<&str> = said.lines().collect();
    // Waiting for as long as it is told, the second one needs no third attempt; unless its first met
    // the other one still asking for the lock, whose remaining time is unknown yet: then it is told 1s.
    let documented = lines_behind("cargo run -q", SOURCE);
    let [balances, expected] = [&said, &documented].map(|lines| {
        let mut balances = lines.clone();
        balances.retain(|line| line.contains("balance"));
        balances.sort_unstable();
        balances
    });
    assert_eq!(balances, expected);
    let refusals = said.iter().filter(|line| line.contains("contended"));
    let known = |line: &&str| line.ends_with("again in 1s") || documented.contains(line);
    assert!(refusals.clone().all(known), "{said:?}");
    assert!((1..=2).contains(&refusals.count()), "{said:?}");
}

#[test]
fn the_curl_line_of_grpc_shows_what_is_on_the_wire() {
    if !has_curl() {
        return;
    }
    let server = Example::start("grpc", &[]);
    let mut header = SOURCE.lines().filter_map(|line| line.strip_prefix("//! "));
    let command = header.find(|line| line.starts_with("printf "));
    let command = command
        .unwrap()
        .replace("127.0.0.1:3000", &server.addr.to_string());
    let shown = lines_behind("printf ", SOURCE);
    // It is answered before its body is read, and curls up to 7.88 at least drop such an answer if it comes
    // while they still send.
    let tries = (0..10).find_map(|_| try_paste(&command));
    let answer = tries.expect("curl shows the answer");
    let answer: Vec<&str> = answer.lines().map(str::trim).collect();
    assert_eq!(answer, shown);
}
