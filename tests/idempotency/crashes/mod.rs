//! Server processes that are killed during an execution, and the answers of others to the next duplicate.

mod random;
mod server;
mod steps;

use std::time::Duration;

use support::{ms, secs};

#[test]
#[ignore = "it is the server process of the other tests, which they start and kill"]
fn server_process() {
    server::run();
}

/// How long anything may take that must happen.
const PATIENCE: Duration = secs(30);

const POLL: Duration = ms(5);

const KEY: &str = "idempotency-key";
