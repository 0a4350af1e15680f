//! The layer on a tonic server: what a gRPC client reads, and when the lock is free.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

use std::net::SocketAddr;
use std::time::Duration;

use http::HeaderMap;
use support::{ms, secs, set_all};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
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

struct Service {
    addr: SocketAddr,
    serving: AbortHandle,
}

impl Service {
    async fn start(redlock: &Redlock, key: impl KeyExtractor) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let server = Server::builder()
            .layer(RedlockLayer::new(redlock.clone(), key))
            .add_service(BankServer::new(Slow))
            .serve_with_incoming(incoming);
        let serving = tokio::spawn(async move { server.await.unwrap() });
        Self {
            addr,
            serving: serving.abort_handle(),
        }
    }

    async fn client(&self) -> BankClient<Channel> {
        let url = format!("http://{}", self.addr);
        BankClient::connect(url).await.unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.serving.abort();
    }
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
    let service = Service::start(&redlock(&nodes), account()).await;
    let (mut one, mut other) = (service.client().await, service.client().await);
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
    let service = Service::start(&redlock, account()).await;
    let refused = async |service: &Service, account: &str| {
        let mut client = service.client().await;
        let answer = client.withdraw(withdraw(account, 0)).await;
        let refusal = answer.unwrap_err();
        let retry = refusal.get_details_retry_info();
        let delay = retry.map(|retry| retry.retry_delay.unwrap().as_secs());
        (refusal.code(), refusal.message().to_owned(), delay)
    };
    let says = |code, message: &str, delay| (code, message.to_owned(), delay);
    let no_key = says(Code::InvalidArgument, "key-missing", None);
    assert_eq!(refused(&service, "").await, no_key);
    let no_router = Service::start(&redlock, key::path("id")).await;
    let mistake = says(Code::Internal, "misconfigured", None);
    assert_eq!(refused(&no_router, "alice").await, mistake);
    nodes.set(0, Gate::Down);
    nodes.set(1, Gate::Down);
    // The time at which the nodes recover is unknown.
    let no_quorum = says(Code::Unavailable, "lock-unavailable", Some(1));
    assert_eq!(refused(&service, "alice").await, no_quorum);
    nodes.set(0, Gate::Ready);
    nodes.set(1, Gate::Ready);
    assert!(redlock.drain(SOON).await.is_clean());
    let draining = says(Code::Unavailable, "shutting-down", Some(1));
    assert_eq!(refused(&service, "alice").await, draining);
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

/// A unary answer ends with its trailers, which wait for the release.
#[tokio::test]
async fn sequential_grpc_client_of_two_servers_is_never_refused() {
    let nodes = ScriptedNodes::new(3);
    set_all(&nodes, OpKind::Release, Gate::Slow(ms(5)));
    let one = Service::start(&redlock(&nodes), account()).await;
    let other = Service::start(&redlock(&nodes), account()).await;
    let mut clients = [one.client().await, other.client().await];
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
async fn grpc_call_over_its_deadline_releases_the_lock() {
    let nodes = ScriptedNodes::new(3);
    let service = Service::start(&redlock(&nodes), account()).await;
    let mut client = service.client().await;
    let mut call = withdraw("alice", 60_000);
    // The client gives up by itself, and the server at the same time.
    call.set_timeout(ms(300));
    let held = wait_until("held", || nodes.locks() == [1, 1, 1]);
    let (answer, ()) = tokio::join!(client.withdraw(call), held);
    let timeout = answer.unwrap_err();
    assert_eq!(timeout.message(), "Timeout expired", "{timeout:?}");
    wait_until("free", || nodes.locks() == [0, 0, 0]).await;
    client.withdraw(withdraw("alice", 0)).await.unwrap();
}

#[tokio::test]
async fn lock_lost_during_a_grpc_call_aborts_it() {
    let nodes = ScriptedNodes::new(3);
    let redlock = Redlock::builder().scripted(&nodes).ttl(ms(600));
    let redlock = redlock.node_timeout(ms(300)).build().unwrap();
    let service = Service::start(&redlock, account()).await;
    let mut client = service.client().await;
    let call = client.withdraw(withdraw("alice", 60_000));
    let wipe = async {
        wait_until("held", || nodes.locks() == [1, 1, 1]).await;
        nodes.wipe(0);
        nodes.wipe(1);
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
