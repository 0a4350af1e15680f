//! `reverse_proxy`: what it lets through, what it replaces, and that it waits for nothing.

use std::net::SocketAddr;

use http_body_util::BodyExt;
use support::http::{Client, request};
use support::ms;
use tokio::time::{sleep, timeout};

use crate::PATIENCE;
use crate::documented::Example;

const ACCOUNT: &str = "/accounts/alice";

#[test]
fn the_curl_lines_of_the_reverse_proxy_answer_as_documented() {
    let example = Example::start("reverse_proxy", &[]);
    example.answers_as_documented(include_str!("../../examples/reverse_proxy.rs"));
}

async fn write(addr: SocketAddr, token: &str) -> u64 {
    let headers = [("x-fencing-token", token)];
    let response = request(addr, "POST", ACCOUNT, &headers, b"").await;
    let text = response.text();
    let token = text.strip_prefix("begun with token ");
    let token = token.and_then(|token| token.strip_suffix("\ndone\n"));
    token.and_then(|token| token.parse().ok()).expect(&text)
}

#[tokio::test]
async fn reverse_proxy_forwards_the_token_of_its_lock_and_no_other() {
    let example = Example::start("reverse_proxy", &[]);
    let first = write(example.addr, "1").await;
    let second = write(example.addr, &first.to_string()).await;
    assert!(1_700_000_000_000_000 < first && first < second);

    let forged = second.to_string();
    let forged = [("x-fencing-token", forged.as_str())];
    let read = request(example.addr, "GET", ACCOUNT, &forged, b"").await;
    assert_eq!(read.text(), "begun without a token\ndone\n");
}

#[tokio::test]
async fn reverse_proxy_streams_a_response_under_its_lock() {
    let example = Example::start("reverse_proxy", &[]);
    let mut client = Client::connect(example.addr).await;
    let never = format!("{ACCOUNT}?ms=3600000");
    let slow = client.send("POST", &never, &[], b"").await.unwrap();
    let mut body = slow.into_body();
    let piece = timeout(PATIENCE, body.frame()).await.unwrap().unwrap();
    let piece = piece.unwrap().into_data().unwrap();
    assert!(piece.starts_with(b"begun with token "), "{piece:?}");

    let refused = request(example.addr, "POST", ACCOUNT, &[], b"").await;
    assert_eq!(refused.status, 423, "{}", refused.text());
    let other = request(example.addr, "POST", "/accounts/bob", &[], b"").await;
    assert_eq!(other.status, 200, "{}", other.text());

    // A client that disconnects during the response releases the lock.
    drop((client, body));
    let free = async {
        while request(example.addr, "POST", ACCOUNT, &[], b"")
            .await
            .status
            != 200
        {
            sleep(ms(5)).await;
        }
    };
    timeout(PATIENCE, free).await.unwrap();
}
