//! A payment at the quickstart, by reqwest with the layers of the feature `client`.
//!
//! Start the server, and in another terminal the client:
//!
//! ```not_rust
//! cargo run --example quickstart
//! cargo run -q -p reqwest-example --example reqwest_client -- alice 5
//! 200 OK, replayed: false
//! ```
//!
//! While the server is down or busy, the client tries again for 30 s. `LISTEN` changes the address.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::env;
use std::error::Error;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_redlock::client::{IdempotentLayer, RetryLockedLayer};
use tower_redlock::middleware::ReadBody;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let args: Vec<String> = env::args().skip(1).collect();
    let [account, amount] = &args[..] else {
        return Err("usage: reqwest_client ACCOUNT AMOUNT".into());
    };
    let client = reqwest::Client::new();
    // reqwest has requests and responses of its own.
    let client = service_fn(move |request: Request<ReadBody<Full<Bytes>>>| {
        let client = client.clone();
        async move {
            let request = request.map(reqwest::Body::wrap).try_into()?;
            let response = client.execute(request).await?;
            Ok::<_, reqwest::Error>(Response::<reqwest::Body>::from(response))
        }
    });
    let client = ServiceBuilder::new()
        .layer(IdempotentLayer::new())
        .layer(RetryLockedLayer::new())
        .service(client);
    let request = Request::post(format!("http://{server}/payments"))
        .header("content-type", "application/json")
        .body(Full::from(format!(
            r#"{{"account":"{account}","amount":{amount}}}"#
        )))?;
    let response = client.oneshot(request).await?;
    let replayed = response.headers().contains_key("idempotency-replayed");
    println!("{}, replayed: {replayed}", response.status());
    let body = response.into_body().collect().await?.to_bytes();
    println!("{}", String::from_utf8_lossy(&body));
    Ok(())
}
