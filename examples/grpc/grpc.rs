//! The same layer on a tonic server: a lock per account, named by the call's metadata.
//!
//! Run with
//!
//! ```not_rust
//! cargo run --example grpc
//! ```
//!
//! and, in another terminal, withdraw twice at once:
//!
//! ```not_rust
//! cargo run -q --example grpc -- alice 5 & cargo run -q --example grpc -- alice 5; wait
//! alice: lock-contended, again in 1s
//! alice: balance 95
//! alice: balance 90
//! ```
//!
//! `google.rpc.RetryInfo` gives the second client a delay. A call without an account, by curl:
//!
//! ```not_rust
//! printf '\0\0\0\0\0' | curl -si --http2-prior-knowledge -H content-type:application/grpc -H te:trailers --data-binary @- http://127.0.0.1:3000/bank.Bank/Withdraw | grep grpc-
//! grpc-status: 3
//! grpc-message: key-missing
//! ```
//!
//! `LISTEN` changes the address. tonic-prost-build generates `bank.rs` from `bank.proto`.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status};
use tonic_types::StatusExt;
use tower_redlock::{LockHandle, Redlock, RedlockLayer, key};

use crate::bank::bank_client::BankClient;
use crate::bank::bank_server::{Bank, BankServer};
use crate::bank::{Balance, WithdrawRequest};

/// Balances by account. Every account starts with 100.
#[derive(Default)]
struct Balances(Mutex<HashMap<MetadataValue<Ascii>, u64>>);

#[tonic::async_trait]
impl Bank for Balances {
    /// Reads, waits, and writes: without the lock, some withdrawals would be lost.
    async fn withdraw(&self, call: Request<WithdrawRequest>) -> Result<Response<Balance>, Status> {
        let lock = call.extensions().get::<LockHandle>();
        let fencing_token = lock.and_then(LockHandle::fencing_token);
        let account = call.metadata().get("account").cloned();
        let account = account.ok_or_else(|| Status::invalid_argument("no account"))?;
        let balance = *self.0.lock().await.entry(account.clone()).or_insert(100);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let balance = balance
            .checked_sub(call.get_ref().amount)
            .ok_or_else(|| Status::failed_precondition("insufficient funds"))?;
        self.0.lock().await.insert(account, balance);
        Ok(Response::new(Balance {
            balance,
            fencing_token: fencing_token.map_or(0, |token| token.as_u64()),
        }))
    }
}

async fn serve(listen: &str) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(listen).await?;
    let address = listener.local_addr()?;
    println!("Listening on http://{address}\nCtrl-C stops it.");
    let account = ("account", key::header("account"));
    // The retry delay of a refused client is at most the ttl.
    let layer = RedlockLayer::new(Redlock::in_memory(3), account).ttl(Duration::from_secs(2))?;
    Ok(Server::builder()
        .layer(layer)
        .add_service(BankServer::new(Balances::default()))
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)))
        .await?)
}

async fn withdraw(server: String, account: &str, amount: u64) -> Result<(), Box<dyn Error>> {
    let mut bank = BankClient::connect(server).await?;
    loop {
        let mut call = Request::new(WithdrawRequest { amount });
        call.metadata_mut().insert("account", account.parse()?);
        let refusal = match bank.withdraw(call).await {
            Ok(answer) => {
                println!("{account}: balance {}", answer.get_ref().balance);
                return Ok(());
            }
            Err(status) if status.code() == Code::Aborted => status,
            Err(status) => return Err(status.into()),
        };
        let retry = refusal.get_details_retry_info();
        let delay = retry.and_then(|info| info.retry_delay).unwrap_or_default();
        println!("{account}: {}, again in {delay:?}", refusal.message());
        tokio::time::sleep(delay).await;
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listen = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let args: Vec<String> = env::args().skip(1).collect();
    match &args[..] {
        [account, amount] => withdraw(format!("http://{listen}"), account, amount.parse()?).await,
        _ => serve(&listen).await,
    }
}

#[allow(warnings, reason = "generated")]
mod bank {
    include!("bank.rs");
}
