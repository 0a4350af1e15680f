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
//! The third message is a redelivery of the first. The last one reuses a key with another payload. A real consumer
//! shares Redis servers with the other consumers, in place of the embedded nodes here.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::convert::Infallible;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tower_redlock::{OnceError, Outcome, Redlock};

/// A message of a queue that delivers at least once.
struct Message {
    id: u32,
    amount: u64,
}

/// The result of a message, recorded for its redeliveries.
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
                let how = if outcome.is_replayed() {
                    "replayed"
                } else {
                    "executed"
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
        .once(("charge", message.id))
        .fingerprint(amount.to_be_bytes())
        .retention(Duration::from_secs(24 * 60 * 60))
        .run(move |_execution| charge(amount))
        .await
}

/// Charges the amount. A real consumer writes to its storage here, and passes the fencing token of the execution
/// along, so that the storage can refuse an execution that was paused for too long.
async fn charge(amount: u64) -> Result<Receipt, Infallible> {
    Ok(Receipt { charged: amount })
}
