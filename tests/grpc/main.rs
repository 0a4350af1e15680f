//! The layer on a tonic server: what a gRPC client reads, and when the lock is free.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

use std::time::Duration;

use http::HeaderMap;
use support::{ms, secs, set_all};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};
use tonic_types::StatusExt;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{KeyExtractor, LockHandle, Redlock, RedlockLayer, key};

use crate::bank::bank_client::BankClient;
use crate::bank::bank_server::{Bank, BankServer};
use crate::bank::{Balance, WithdrawRequest};

/// Answers after as many milliseconds as are withdrawn.
struct Slow;

#[tonic::async_trait]
impl Bank for Slow {
    async fn withdraw(&self, call: Request<WithdrawRequest>) -> Result<Response<Balance>, Status> {
        let handle = call.extensions().get::<LockHandle>().unwrap();
        let fencing_token = handle.fencing_token().unwrap().as_u64();
        tokio::time::sleep(ms(call.get_ref().amount)).await;
        let balance = 0;
        Ok(Response::new(Balance {
            balance,
            fencing_token,
        }))
    }
}

/// Starts a service, and returns a client of it; both end with the runtime of the test.
async fn serve(redlock: &Redlock, key: impl KeyExtractor) -> BankClient<Channel> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let server = Server::builder()
        .layer(RedlockLayer::new(redlock.clone(), key))
        .add_service(BankServer::new(Slow))
        .serve_with_incoming(incoming);
    tokio::spawn(async move { server.await.unwrap() });
    BankClient::connect(url).await.unwrap()
}

fn redlock(nodes: &ScriptedNodes) -> Redlock {
    let builder = Redlock::builder().scripted(nodes).ttl(TTL);
    // Real time: a busy machine must not look like a hanging node.
    builder.node_timeout(ms(300)).build().unwrap()
}

fn account() -> impl KeyExtractor {
    ("account", key::header("account"))
}

fn withdraw(account: &str, millis: u64) -> Request<WithdrawRequest> {
    let mut call = Request::new(WithdrawRequest { amount: millis });
    if !account.is_empty() {
        let account = account.parse().unwrap();
        call.metadata_mut().insert("account", account);
    }
    call
}

async fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    support::wait_until(what, SOON, is_so).await;
}

#[tokio::test]
async fn contended_grpc_call_is_aborted_with_retry_info() {
    let nodes = ScriptedNodes::new(3);
    let mut one = serve(&redlock(&nodes), account()).await;
    let mut other = one.clone();
    let first = one.withdraw(withdraw("alice", 60_000));
    let second = async {
        wait_until("held", || nodes.locks() == [1, 1, 1]).await;
        other.withdraw(withdraw("alice", 0)).await.unwrap_err()
    };
    let refusal = tokio::select! {
        ended = first => panic!("{ended:?}"),
        refusal = second => refusal,
    };
    assert_eq!(refusal.code(), Code::Aborted);
    assert_eq!(refusal.message(), "lock-contended");
    let retry = refusal.get_details_retry_info().unwrap();
    let delay = retry.retry_delay.unwrap();
    assert_eq!((delay.as_secs(), delay.subsec_nanos()), (1, 0));
    let headers: HeaderMap = refusal.metadata().clone().into_headers();
    assert_eq!(headers["retry-after"], delay.as_secs().to_string());
    // The first call was dropped with its future: its RST_STREAM ends the handler and the lock.
    wait_until("free", || nodes.locks() == [0, 0, 0]).await;
    other.withdraw(withdraw("alice", 0)).await.unwrap();
    wait_until("free", || nodes.locks() == [0, 0, 0]).await;
}

// Rules: grpc
#[tokio::test]
async fn every_rejection_has_its_grpc_code() {
    let nodes = ScriptedNodes::new(3);
    let redlock = redlock(&nodes);
    let bank = serve(&redlock, account()).await;
    let refused = async |bank: &BankClient<Channel>, account: &str| {
        let answer = bank.clone().withdraw(withdraw(account, 0)).await;
        let refusal = answer.unwrap_err();
        let retry = refusal.get_details_retry_info();
        let delay = retry.map(|retry| retry.retry_delay.unwrap().as_secs());
        (refusal.code(), refusal.message().to_owned(), delay)
    };
    let says = |code, message: &str, delay| (code, message.to_owned(), delay);
    let no_key = says(Code::InvalidArgument, "key-missing", None);
    assert_eq!(refused(&bank, "").await, no_key);
    let no_router = serve(&redlock, key::path("id")).await;
    let mistake = says(Code::Internal, "misconfigured", None);
    assert_eq!(refused(&no_router, "alice").await, mistake);
    (0..2).for_each(|node| nodes.set(node, Gate::Down));
    // The time at which the nodes recover is unknown.
    let no_quorum = says(Code::Unavailable, "lock-unavailable", Some(1));
    assert_eq!(refused(&bank, "alice").await, no_quorum);
    (0..2).for_each(|node| nodes.set(node, Gate::Ready));
    assert!(redlock.drain(SOON).await.is_clean());
    let draining = says(Code::Unavailable, "shutting-down", Some(1));
    assert_eq!(refused(&bank, "alice").await, draining);
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

/// A unary answer ends with its trailers, which wait for the release.
#[tokio::test]
async fn sequential_grpc_client_of_two_servers_is_never_refused() {
    let nodes = ScriptedNodes::new(3);
    set_all(&nodes, OpKind::Release, Gate::Slow(ms(5)));
    let one = serve(&redlock(&nodes), account()).await;
    let other = serve(&redlock(&nodes), account()).await;
    let mut clients = [one, other];
    let mut last = 0;
    for turn in 0..50 {
        for client in &mut clients {
            let answer = client.withdraw(withdraw("alice", 0)).await;
            let answer = answer.unwrap_or_else(|refusal| panic!("turn {turn}: {refusal:?}"));
            let token = answer.get_ref().fencing_token;
            assert!(token > last, "turn {turn}: {token} after {last}");
            last = token;
        }
    }
}

#[tokio::test]
async fn lock_lost_during_a_grpc_call_aborts_it() {
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder().scripted(&nodes).ttl(ms(600));
    let redlock = redlock.node_timeout(ms(300)).build().unwrap();
    let mut client = serve(&redlock, account()).await;
    let call = client.withdraw(withdraw("alice", 60_000));
    let wipe = async {
        wait_until("held", || nodes.locks() == [1, 1, 1]).await;
        (0..2).for_each(|node| nodes.wipe(node));
    };
    let (answer, ()) = tokio::join!(call, wipe);
    let refusal = answer.unwrap_err();
    assert_eq!(refusal.code(), Code::Aborted);
    assert_eq!(refusal.message(), "lock-lost");
    assert!(
        refusal.get_details_retry_info().is_none(),
        "the call has run in part"
    );
}

/// Longer than any test; the ttl must free nothing here.
const TTL: Duration = secs(60);

/// Until when the lock of a call that has ended must be free.
const SOON: Duration = secs(1);

#[allow(warnings, reason = "generated")]
mod bank {
    include!("../../examples/grpc/bank.rs");
}
