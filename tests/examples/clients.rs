//! `grpc_client`, `reqwest_client`: the layers of the feature `client` around two clients.

use crate::documented::{Example, printed};
use crate::grpc::run_two;

#[test]
fn second_of_two_grpc_clients_with_the_layer_waits_for_its_turn() {
    let printed = run_two("grpc_client");
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
    let printed = printed("reqwest_client", &["dave", "5"], &listen);
    assert!(printed.starts_with("200 OK, replayed: false"), "{printed}");
}
