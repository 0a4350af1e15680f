//! `grpc`: two clients of which one waits as it is told, and what is on the wire.

use support::{ChildProcess, example_path};

use crate::documented::Example;
use crate::{PATIENCE, has_curl, try_paste};

#[test]
fn second_of_two_grpc_clients_waits_as_documented() {
    let server = Example::start("grpc", &[]);
    let listen = server.addr.to_string();
    let envs = [("LISTEN", listen.as_str())];
    let start = || ChildProcess::start(example_path("grpc"), &["alice", "5"], &envs);
    let mut clients = [start(), start()];
    let mut said = String::new();
    for client in &mut clients {
        let status = client.wait(PATIENCE);
        assert!(status.success(), "{}", client.stderr());
        said += &format!("{}\n", client.stdout());
    }
    // Waiting for as long as it is told, the second one needs no third attempt; unless its first met
    // the other one still asking for the lock, whose remaining time is unknown yet: then it is told 1s.
    let documented: Vec<&str> = header()
        .filter(|line| line.starts_with("alice: "))
        .collect();
    let balances = |lines: &[&str]| {
        let mut balances: Vec<String> = lines.iter().map(ToString::to_string).collect();
        balances.retain(|line| line.contains("balance"));
        balances.sort_unstable();
        balances
    };
    let said: Vec<&str> = said.lines().collect();
    assert_eq!(balances(&said), balances(&documented));
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
    let mut lines = header().skip_while(|line| !line.starts_with("printf "));
    let command = lines.next().unwrap();
    let command = command.replace("127.0.0.1:3000", &server.addr.to_string());
    let shown: Vec<&str> = lines.take_while(|line| *line != "```").collect();
    // It is answered before its body is read, and curls up to 7.88 at least drop such an answer if it comes
    // while they still send.
    let tries = (0..10).find_map(|_| try_paste(&command));
    let answer = tries.expect("curl shows the answer");
    let answer: Vec<&str> = answer.lines().map(str::trim).collect();
    assert_eq!(answer, shown);
}

fn header() -> impl Iterator<Item = &'static str> {
    let source = include_str!("../../examples/grpc/grpc.rs");
    source.lines().filter_map(|line| line.strip_prefix("//! "))
}
