//! `paying_client`, `grpc_client`, `reqwest_client`: the layers of the feature `client` around three clients.

use support::{ChildProcess, example_path};

use crate::PATIENCE;
use crate::documented::Example;

/// Returns what a client prints, which succeeds.
fn output(name: &str, args: &[&str], listen: &str) -> String {
    let client = ChildProcess::start(example_path(name), args, &[("LISTEN", listen)]);
    output_of(client)
}

fn output_of(mut client: ChildProcess) -> String {
    let status = client.wait(PATIENCE);
    assert!(status.success(), "{}", client.stderr());
    client.stdout()
}

#[test]
fn paying_client_pays_once_as_documented() {
    let source = include_str!("../../examples/paying_client.rs");
    let shown = source.lines().filter_map(|line| line.strip_prefix("//! "));
    let shown = shown.skip_while(|line| !line.starts_with("attempt 1"));
    let shown: Vec<&str> = shown.take_while(|line| *line != "```").collect();
    let printed = output("paying_client", &[], "");
    assert_eq!(printed.trim().lines().collect::<Vec<_>>(), shown);
}

#[test]
fn second_of_two_grpc_clients_with_the_layer_waits_for_its_turn() {
    let server = Example::start("grpc", &[]);
    let listen = server.addr.to_string();
    let envs = [("LISTEN", listen.as_str())];
    let start = |_| ChildProcess::start(example_path("grpc_client"), &["alice", "5"], &envs);
    let printed = [0, 1].map(start).map(output_of).join("\n");
    let mut balances: Vec<&str> = printed.lines().collect();
    balances.retain(|line| line.contains("balance"));
    balances.sort_unstable();
    assert_eq!(balances, ["alice: balance 90", "alice: balance 95"]);
    assert!(printed.contains("alice: refused, again"), "{printed}");
}

#[test]
fn reqwest_client_pays_at_the_quickstart() {
    let server = Example::start("quickstart", &[]);
    let listen = server.addr.to_string();
    let printed = output("reqwest_client", &["dave", "5"], &listen);
    assert!(printed.starts_with("200 OK, replayed: false"), "{printed}");
}
