//! The layers of tower-http that want something of bodies or clones, outside of ours, between them and inside, in one
//! `ServiceBuilder` chain and in an axum router. Compilation is half of the proof.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use support::{once, secs};
use tower::{Service, ServiceBuilder, ServiceExt};
use tower_http::auth::AsyncRequireAuthorizationLayer;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;
use tower_http::decompression::{DecompressionLayer, RequestDecompressionLayer};
use tower_http::follow_redirect::FollowRedirectLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::map_request_body::MapRequestBodyLayer;
use tower_http::map_response_body::MapResponseBodyLayer;
use tower_http::metrics::InFlightRequestsLayer;
use tower_http::on_early_drop::OnEarlyDropLayer;
use tower_http::set_status::SetStatusLayer;
use tower_http::timeout::{RequestBodyTimeoutLayer, ResponseBodyTimeoutLayer, TimeoutLayer};
use tower_http::trace::TraceLayer;
use tower_http::validate_request::ValidateRequestHeaderLayer;
use tower_redlock::middleware::ReadBody;
use tower_redlock::{BufferBodyLayer, LockBody, Redlock, RedlockLayer, key};

/// A service for requests of any body, which it reads.
#[derive(Debug, Clone)]
struct Pay;

impl<B> Service<Request<B>> for Pay
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: std::fmt::Debug,
{
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        Box::pin(async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body, "amount=5");
            Ok(Response::new(Full::new(Bytes::from_static(b"paid"))))
        })
    }
}

fn request<B>(body: B) -> Request<B> {
    Request::post("/payments")
        .header("idempotency-key", "k")
        .header(AUTHORIZATION, "Bearer secret")
        .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
        .body(body)
        .unwrap()
}

fn lock() -> RedlockLayer {
    let by_field = ("payment", key::form_field("amount"));
    RedlockLayer::new(Redlock::in_memory(3), by_field)
}

/// Sends a request to a router or to what a `ServiceBuilder` has made, twice; the second time it is replayed.
async fn check<S, B>(service: S, statuses: [StatusCode; 2])
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error: std::fmt::Debug> + Clone,
    B: Body<Error: std::fmt::Debug>,
{
    for status in statuses {
        let request = request(Full::from("amount=5"));
        let response = service.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), status);
        let body = response.into_body().collect().await.unwrap();
        assert_eq!(body.to_bytes() == "paid", status != StatusCode::CONFLICT);
    }
}

fn router() -> Router {
    Router::new().route("/payments", post(async |_: Bytes| "paid"))
}

/// A test of layers at every place that they can have among ours. They are given to each stack anew, because not all can
/// be cloned.
macro_rules! stacks {
    ($($name:ident: $layer:expr => $status:expr;)+) => {$(
        #[tokio::test(start_paused = true)]
        async fn $name() {
            macro_rules! outside {
                () => {
                    ServiceBuilder::new()
                        .layer($layer)
                        .layer(once(&Redlock::in_memory(3)))
                        .layer(BufferBodyLayer::new(64))
                        .layer(lock())
                };
            }
            macro_rules! between {
                () => {
                    ServiceBuilder::new()
                        .layer(BufferBodyLayer::new(64))
                        .layer($layer)
                        .layer(lock())
                        .layer($layer)
                        .layer(once(&Redlock::in_memory(3)))
                        .layer($layer)
                };
            }
            let status = StatusCode::from_u16($status).unwrap();
            check(outside!().service(Pay), [status; 2]).await;
            check(router().layer(outside!()), [status; 2]).await;
            // What does not say how large it is is not kept.
            let hides_size = stringify!($name) == "response_body_timeout";
            let again = if hides_size { StatusCode::CONFLICT } else { status };
            check(between!().service(Pay), [status, again]).await;
            check(router().layer(between!()), [status, again]).await;
        }
    )+};
}

const HOUR: Duration = secs(3600);

// By what they do to a request or its response. Each stack has code of its own for all our layers, so that one for each
// layer of tower-http would take minutes to compile.
stacks! {
    layers_that_wrap_bodies: ServiceBuilder::new()
        .layer(InFlightRequestsLayer::pair().0)
        .layer(OnEarlyDropLayer::builder())
        .layer(MapResponseBodyLayer::new(std::convert::identity))
        .layer(DecompressionLayer::new())
        .layer(RequestBodyLimitLayer::new(64))
        .layer(RequestDecompressionLayer::new())
        .layer(MapRequestBodyLayer::new(std::convert::identity))
        .layer(SetStatusLayer::new(StatusCode::ACCEPTED))
        .into_inner() => 202;
    layers_that_answer_themselves: ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(CorsLayer::permissive())
        .layer(with_bearer())
        .layer(AsyncRequireAuthorizationLayer::new(authorize))
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, HOUR))
        .layer(CompressionLayer::new())
        .layer(CatchPanicLayer::new())
        .into_inner() => 200;
    layer_that_sends_again: FollowRedirectLayer::new() => 200;
    request_body_timeout: RequestBodyTimeoutLayer::new(HOUR) => 200;
    response_body_timeout: ResponseBodyTimeoutLayer::new(HOUR) => 200;
}

#[allow(deprecated, reason = "it is what many services have")]
fn with_bearer<B: Default>()
-> ValidateRequestHeaderLayer<tower_http::auth::require_authorization::Bearer<B>> {
    ValidateRequestHeaderLayer::bearer("secret")
}

/// An asynchronous look at the credentials, whose refusal has an empty body of the service's type.
async fn authorize<A: Send, B: Default>(request: Request<A>) -> Result<Request<A>, Response<B>> {
    if request.headers().contains_key(AUTHORIZATION) {
        Ok(request)
    } else {
        Err(Response::new(B::default()))
    }
}

#[test]
fn default_bodies_are_empty() {
    let locked = LockBody::<Full<Bytes>>::default();
    let request = ReadBody::<Full<Bytes>>::default();
    let ends = [locked.is_end_stream(), request.is_end_stream()];
    assert_eq!(ends, [true; 2]);
    let sizes = [locked.size_hint(), request.size_hint()];
    assert_eq!(sizes.map(|size| size.exact()), [Some(0); 2]);
}
