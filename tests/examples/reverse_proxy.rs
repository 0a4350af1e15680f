//! `reverse_proxy`: what it lets through, what it replaces, and that it waits for nothing.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::time::{sleep, timeout};

use crate::PATIENCE;
use crate::documented::Example;
use crate::support::http::{Client, Response, request};

const ACCOUNT: &str = "/accounts/alice";

/// Returns the example and the address of the service behind its proxy.
fn start() -> (Example, SocketAddr) {
    let example = Example::start("reverse_proxy", &[]);
    let said = example.stdout();
    let (_, behind) = said.split_once("in front of http://").unwrap();
    let (behind, _) = behind.split_once(". Try").unwrap();
    (example, behind.parse().unwrap())
}

async fn write(addr: SocketAddr, token: &str) -> Response {
    let headers = [("x-fencing-token", token)];
    request(addr, "POST", ACCOUNT, &headers, b"").await
}

fn token_in(response: &Response) -> String {
    let text = response.text();
    let line = text.lines().next().unwrap();
    let token = line.strip_prefix("written with token ");
    token.unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[test]
fn the_curl_lines_of_the_reverse_proxy_answer_as_documented() {
    let (example, behind) = start();
    let source = include_str!("../../examples/reverse_proxy.rs");
    example.answers_as_documented(source, &[("127.0.0.1:40233", &behind.to_string())]);
}

#[tokio::test]
async fn the_service_behind_the_proxy_gets_the_token_of_the_lock_and_no_other() {
    let (example, behind) = start();
    let first = token_in(&write(example.addr, "1").await);
    let second = token_in(&write(example.addr, &first).await);
    let numbers = [&first, &second].map(|token| token.parse::<u64>().unwrap());
    assert!(1_700_000_000_000_000 < numbers[0] && numbers[0] < numbers[1]);
    assert_eq!(write(behind, &first).await.status, 409);
    assert_eq!(write(behind, &second).await.status, 200);

    let forged = [("x-fencing-token", second.as_str())];
    let read = request(example.addr, "GET", ACCOUNT, &forged, b"").await;
    assert_eq!(read.text(), "read without a token\n");
}

#[tokio::test]
async fn a_response_goes_through_the_proxy_piece_by_piece_under_its_lock() {
    let (example, _) = start();
    let mut client = Client::connect(example.addr).await;
    let never = format!("{ACCOUNT}?ms=3600000");
    let slow = client.send("POST", &never, &[], b"").await.unwrap();
    let mut body = slow.into_body();
    let piece = timeout(PATIENCE, body.frame()).await.unwrap().unwrap();
    let piece = piece.unwrap().into_data().unwrap();
    assert!(piece.starts_with(b"written with token "), "{piece:?}");

    let refused = request(example.addr, "POST", ACCOUNT, &[], b"").await;
    assert_eq!(refused.status, 423, "{}", refused.text());
    let other = request(example.addr, "POST", "/accounts/bob", &[], b"").await;
    assert_eq!(other.status, 200, "{}", other.text());

    // Whoever goes away in the middle takes the lock along.
    drop((client, body));
    let free = async {
        while request(example.addr, "POST", ACCOUNT, &[], b"")
            .await
            .status
            != 200
        {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, free).await.unwrap();
}

#[tokio::test]
async fn trailers_go_through_the_proxy_behind_all_data() {
    let (example, _) = start();
    let mut client = Client::connect(example.addr).await;
    let wanted = [("te", "trailers")];
    let response = client.send("POST", ACCOUNT, &wanted, b"").await.unwrap();
    let read = timeout(PATIENCE, response.into_body().collect()).await;
    let read = read.unwrap().unwrap();
    assert_eq!(read.trailers().unwrap()["x-lines"], "2");
    let data: Bytes = read.to_bytes();
    assert!(data.ends_with(b"\nthat was all\n"), "{data:?}");
}
