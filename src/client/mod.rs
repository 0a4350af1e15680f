//! The client's side: requests that are sent again, for one effect.
//!
//! Both layers work for each `tower::Service<http::Request<B>>`, such as the clients of hyper-util, tonic and reqwest:
//!
//! ```
//! use std::convert::Infallible;
//!
//! use bytes::Bytes;
//! use http::{Request, Response};
//! use http_body_util::Full;
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//! use tower_redlock::client::{IdempotentLayer, RetryLockedLayer};
//! use tower_redlock::middleware::ReadBody;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Infallible> {
//! // In its place: a client of hyper-util, or another one.
//! let client = service_fn(async |request: Request<ReadBody<Full<Bytes>>>| {
//!     assert!(request.headers().contains_key("idempotency-key"));
//!     Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("paid")))
//! });
//! let client = ServiceBuilder::new()
//!     .layer(IdempotentLayer::new())
//!     .layer(RetryLockedLayer::new())
//!     .service(client);
//! let request = Request::post("http://bank.example/payments").body(Full::from("amount=5")).unwrap();
//! let response = client.oneshot(request).await?;
//! # assert_eq!(response.status(), 200);
//! # Ok(())
//! # }
//! ```
//!
//! [`IdempotentLayer`] stands outside of every layer that sends a request again, so that all attempts have one key.
//! A layer that limits the time of each attempt stands inside of [`RetryLockedLayer`], for which its error is a lost
//! connection.
//!
//! The [guide](crate::guide::clients) tells what each `code` means for a client.

mod answer;
mod idempotent;
mod service;
#[cfg(test)]
mod tests;

pub use idempotent::{IdempotentLayer, IdempotentService};
pub use service::{Attempt, Decision, RetryLockedLayer, RetryLockedService};
