//! A queue consumer that handles each message once, although the queue delivers some of them twice.
//!
//! Run with
//!
//! ```not_rust
//! cargo run -q --example queue_consumer
//! message 17: charged 5 (executed)
//! message 18: charged 9 (executed)
//! message 17: charged 5 (replayed)
//! message 18: refused: the key was used with another fingerprint; use a new key
//! ```
//!
//! The last message reuses a key with another payload. Embedded nodes stand for the Redis servers that a real
//! consumer shares with the others.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::convert::Infallible;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tower_redlock::{ExecutionHandle, OnceError, Outcome, Redlock};

/// A message as the queue delivers it: at least once.
struct Message {
    id: u32,
    amount: u64,
}

/// The result of a message, which is recorded for its redeliveries.
#[derive(Serialize, Deserialize)]
struct Receipt {
    charged: u64,
}

#[tokio::main]
async fn main() {
    let redlock = Redlock::in_memory(3);
    for (id, amount) in [(17, 5), (18, 9), (17, 5), (18, 90)] {
        let message = Message { id, amount };
        match handle(&redlock, &message).await {
            Ok(outcome) => {
                let how = match &outcome {
                    Outcome::Replayed(_) => "replayed",
                    _ => "executed",
                };
                let Receipt { charged } = outcome.into_inner();
                println!("message {id}: charged {charged} ({how})");
            }
            Err(error) => println!("message {id}: refused: {error}"),
        }
    }
    redlock.drain(Duration::from_secs(1)).await;
}

async fn handle(
    redlock: &Redlock,
    message: &Message,
) -> Result<Outcome<Receipt>, OnceError<Infallible, Receipt>> {
    let amount = message.amount;
    redlock
        .once(("charge", message.id.to_string()))
        .fingerprint(amount.to_be_bytes())
        .retention(Duration::from_secs(24 * 60 * 60))
        .run(move |execution| charge(amount, execution))
        .await
}

/// A storage that is written to here would check the fencing token and keep the key of the execution.
async fn charge(amount: u64, execution: ExecutionHandle) -> Result<Receipt, Infallible> {
    debug_assert!(execution.fencing_token().is_some());
    Ok(Receipt { charged: amount })
}
