//! A tonic client that waits for its turn: the layer of the feature `client` around a channel.
//!
//! Start the server of the example `grpc`, and in another terminal two clients at once:
//!
//! ```not_rust
//! cargo run --example grpc
//! cargo run -q --example grpc_client -- alice 5 & cargo run -q --example grpc_client -- alice 5; wait
//! alice: refused, again
//! alice: balance 95
//! alice: balance 90
//! ```
//!
//! The lock of the account refuses the second one, which sends its call again when `Retry-After` says. Without an
//! `IdempotencyLayer` on the server, the client has no `IdempotentLayer`: a call whose connection is lost is not repeated.
//! `LISTEN` changes the address.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::env;
use std::error::Error;

use tonic::body::Body;
use tonic::transport::Endpoint;
use tower::ServiceBuilder;
use tower_redlock::client::{Attempt, Decision, RetryLockedLayer};
use tower_redlock::middleware::ReadBody;

use crate::bank::WithdrawRequest;
use crate::bank::bank_client::BankClient;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let args: Vec<String> = env::args().skip(1).collect();
    let [account, amount] = &args[..] else {
        return Err("usage: grpc_client ACCOUNT AMOUNT".into());
    };
    let name = account.clone();
    let retry = RetryLockedLayer::new().on_attempt(move |attempt: &Attempt| {
        if let Decision::SendAgain(_) = attempt.decision {
            println!("{name}: refused, again");
        }
    });
    let channel = Endpoint::new(format!("http://{server}"))?.connect().await?;
    let channel = ServiceBuilder::new()
        .layer(retry)
        // A channel has a body type of its own.
        .map_request(|request: http::Request<ReadBody<Body>>| request.map(Body::new))
        .service(channel);
    let amount = amount.parse()?;
    let mut call = tonic::Request::new(WithdrawRequest { amount });
    call.metadata_mut().insert("account", account.parse()?);
    let answer = BankClient::new(channel).withdraw(call).await?;
    println!("{account}: balance {}", answer.get_ref().balance);
    Ok(())
}

#[allow(warnings, reason = "generated")]
mod bank {
    include!("bank.rs");
}
