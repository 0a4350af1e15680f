//! The layers before a service whose answers are written down.

mod connections;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::header::{CONTENT_TYPE, DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use tokio::time::{Instant, sleep};
use tower::retry::{Policy, RetryLayer};
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::client::answer::{Verdict, judge, retry_after};
use crate::client::{Attempt, Decision, IdempotentLayer, RetryLockedLayer};
use crate::lock::{LockError, LostReason};
use crate::middleware::ReadBody;
use crate::middleware::{Rejection, RequestKind};
use crate::node::Mutex;
use crate::protocol::Retry;

type Answer = Result<Response<Full<Bytes>>, &'static str>;

/// A service that gives its answers one after the other, and then those that take an hour; and what it has seen.
#[derive(Clone, Default)]
struct Server {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    /// The headers and the body of each request, and the time.
    seen: Arc<Mutex<Vec<(HeaderMap, Result<Bytes, &'static str>, Instant)>>>,
    attempts: Arc<Mutex<Vec<Attempt>>>,
}

impl Server {
    fn answering(answers: impl IntoIterator<Item = Answer>) -> Self {
        Self {
            answers: Arc::new(Mutex::new(answers.into_iter().collect())),
            ..Self::default()
        }
    }

    /// Sends a request through a layer without jitter that tells its attempts.
    async fn call<B>(
        &self,
        layer: RetryLockedLayer,
        request: Request<B>,
    ) -> Result<Response<ReadBody<Full<Bytes>>>, &'static str>
    where
        B: Body<Data = Bytes, Error: Send + std::fmt::Debug> + Unpin + Send + 'static,
    {
        let attempts = Arc::clone(&self.attempts);
        let layer = layer.on_attempt(move |attempt| attempts.lock().push(attempt.clone()));
        let server = self.clone();
        let service = service_fn(move |request: Request<ReadBody<B>>| {
            let server = server.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect().await.map_err(|_| "body");
                let body = body.map(http_body_util::Collected::to_bytes);
                server
                    .seen
                    .lock()
                    .push((parts.headers, body, Instant::now()));
                let answer = server.answers.lock().pop_front();
                match answer {
                    Some(answer) => answer,
                    None => {
                        sleep(Duration::from_secs(3_600)).await;
                        Err("too late")
                    }
                }
            }
        });
        layer.layer(service).oneshot(request).await
    }

    fn sent(&self) -> usize {
        self.seen.lock().len()
    }

    fn decisions(&self) -> Vec<Decision> {
        let attempts = self.attempts.lock();
        let numbers = attempts.iter().map(|attempt| attempt.number);
        assert!(numbers.eq(1..=u32::try_from(attempts.len()).unwrap()));
        attempts.iter().map(|attempt| attempt.decision).collect()
    }
}

fn answer(status: u16, retry_after: Option<&'static str>) -> Answer {
    let mut response = Response::new(Full::from("an answer"));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    if let Some(value) = retry_after {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(RETRY_AFTER, value);
    }
    Ok(response)
}

fn problem(rejection: &Rejection) -> Answer {
    Ok(rejection.default_response(&RequestKind::Http))
}

fn request(method: Method, key: Option<&'static str>) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::from("amount=5"));
    *request.method_mut() = method;
    if let Some(key) = key {
        let key = HeaderValue::from_static(key);
        request.headers_mut().insert("idempotency-key", key);
    }
    request
}

/// Without jitter.
fn exact() -> RetryLockedLayer {
    RetryLockedLayer::new().backoff(Retry::new(Duration::ZERO, Duration::ZERO))
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

const IN_PROGRESS: Rejection = Rejection::InProgress;

#[tokio::test(start_paused = true)]
async fn refused_request_is_sent_again_after_retry_after_with_the_same_head_and_body() {
    let server = Server::answering([
        answer(423, Some("3")),
        answer(429, Some("1")),
        answer(503, Some("7")),
        problem(&IN_PROGRESS),
        answer(429, None),
        answer(201, None),
    ]);
    let began = Instant::now();
    let response = server.call(exact(), request(Method::POST, None)).await;
    assert_eq!(response.unwrap().status(), 201);
    let seen = server.seen.lock();
    let times = seen.iter().map(|(.., at)| (*at - began).as_secs());
    assert_eq!(times.collect::<Vec<_>>(), [0, 3, 4, 11, 12, 12]);
    for (headers, body, _) in seen.iter() {
        assert_eq!((headers, body), (&seen[0].0, &Ok(Bytes::from("amount=5"))));
    }
    drop(seen);
    let again = |at| Decision::SendAgain(secs(at));
    let expected = [again(3), again(1), again(7), again(1), again(0)];
    assert_eq!(server.decisions()[..5], expected);
    assert_eq!(server.decisions()[5], Decision::Return);
    assert_eq!(server.attempts.lock()[2].status.unwrap(), 503);
}

#[tokio::test(start_paused = true)]
async fn final_answer_is_returned_at_once_with_its_whole_body() {
    let mut answers: Vec<Answer> = [200, 400, 404, 409, 500, 502, 503, 504]
        .into_iter()
        .map(|status| answer(status, None))
        .collect();
    answers.push(answer(500, Some("1")));
    let finals = [
        Rejection::OutcomeUnknown,
        Rejection::ResultNotKept,
        Rejection::ConflictingOutcomes,
        Rejection::KeyReused,
        Rejection::Lost(LostReason::Expired),
    ];
    answers.extend(finals.iter().map(problem));
    // A proxy that invites to retry everything.
    for rejection in &finals[..4] {
        let mut response = problem(rejection).unwrap();
        let value = HeaderValue::from_static("1");
        response.headers_mut().insert(RETRY_AFTER, value);
        answers.push(Ok(response));
    }
    for answer in answers {
        let server = Server::answering([answer.clone()]);
        let response = server.call(exact(), request(Method::POST, Some("a"))).await;
        let (response, answer) = (response.unwrap(), answer.unwrap());
        assert_eq!(server.decisions(), [Decision::Return], "{answer:?}");
        assert_eq!(response.status(), answer.status());
        assert_eq!(response.headers(), answer.headers());
        assert_eq!(response.size_hint().exact(), answer.size_hint().exact());
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, answer.into_body().collect().await.unwrap().to_bytes());
    }
}

/// The layer reads what the server's side of this crate writes.
#[tokio::test]
async fn every_refusal_of_the_servers_layers_has_its_verdict() {
    let retry_after = None;
    let contended = |status| Rejection::Contended {
        status: StatusCode::from_u16(status).unwrap(),
        retry_after,
        holder: None,
    };
    for (rejection, verdict) in [
        (contended(423), Verdict::Refused),
        (contended(409), Verdict::Refused),
        (contended(503), Verdict::Refused),
        (
            Rejection::TooManyConcurrent { retry_after },
            Verdict::Refused,
        ),
        (Rejection::Failed(LockError::Closed), Verdict::Refused),
        (IN_PROGRESS, Verdict::Open),
        (Rejection::Lost(LostReason::Expired), Verdict::Final),
        (Rejection::KeyMissing { lacking: None }, Verdict::Final),
        (Rejection::BodyTooLarge, Verdict::Final),
        (
            Rejection::BodyUnreadable { timed_out: true },
            Verdict::Final,
        ),
        (Rejection::ScopeMissing, Verdict::Final),
        (Rejection::KeyReused, Verdict::Final),
        (Rejection::OutcomeUnknown, Verdict::Final),
        (Rejection::ResultNotKept, Verdict::Final),
        (Rejection::ConflictingOutcomes, Verdict::Final),
    ] {
        for kind in [RequestKind::Http, RequestKind::Grpc] {
            let (judged, _) = judge(rejection.default_response(&kind)).await;
            assert_eq!(judged, verdict, "{rejection:?} {kind:?}");
        }
    }
}

#[test]
fn retry_after_is_seconds_or_a_date_by_the_clock_of_the_server() {
    let read = |value: &'static str, date: Option<&'static str>| {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_static(value));
        let date = date.map(HeaderValue::from_static);
        headers.extend(date.map(|date| (DATE, date)));
        retry_after(&headers)
    };
    assert_eq!(read("0", None), Some(secs(0)));
    assert_eq!(read(" 120 ", None), Some(secs(120)));
    assert_eq!(read("99999999999999999999", None), Some(secs(u64::MAX)));
    let then = "Wed, 21 Oct 2015 07:28:00 GMT";
    assert_eq!(
        read(then, Some("Wed, 21 Oct 2015 07:26:30 GMT")),
        Some(secs(90))
    );
    assert_eq!(
        read(then, Some("Wed, 21 Oct 2015 07:28:30 GMT")),
        Some(secs(0))
    );
    // By the clock of this machine, if the server shows none.
    assert_eq!(read(then, None), Some(secs(0)));
    let far = read("Fri, 31 Dec 9999 23:59:59 GMT", Some("today")).unwrap();
    assert!(far > secs(7_000 * 365 * 86_400), "{far:?}");
    for invalid in ["", "-1", "1.5", "+1", "soon", "1, 2"] {
        assert_eq!(read(invalid, None), None, "{invalid}");
    }
}

#[tokio::test(start_paused = true)]
async fn lost_connection_is_tried_again_only_with_a_key_or_an_idempotent_method() {
    for (method, key, sent) in [
        (Method::POST, None, 1),
        (Method::PATCH, None, 1),
        (Method::POST, Some("a"), 2),
        (Method::PUT, None, 2),
        (Method::DELETE, None, 2),
        (Method::GET, None, 2),
    ] {
        let server = Server::answering([Err("lost"), answer(200, None)]);
        let response = server.call(exact(), request(method, key)).await;
        assert_eq!(server.sent(), sent);
        match sent {
            1 => assert_eq!(response.unwrap_err(), "lost"),
            _ => assert_eq!(response.unwrap().status(), 200),
        }
        let first = server.decisions()[0];
        let expected = if sent == 1 {
            Decision::NoKey
        } else {
            Decision::SendAgain(secs(0))
        };
        assert_eq!(first, expected);
    }
    // The header is made by an inner layer.
    let server = Server::answering([Err("lost"), answer(200, None)]);
    let mut request = request(Method::POST, None);
    request
        .extensions_mut()
        .insert("a".parse::<crate::IdempotencyKey>().unwrap());
    assert!(server.call(exact(), request).await.is_ok());
    assert_eq!(server.sent(), 2);
}

#[tokio::test(start_paused = true)]
async fn call_that_is_given_up_returns_what_leaves_its_outcome_open() {
    for (answers, expected) in [
        (vec![answer(423, None), answer(503, Some("1"))], Ok(503)),
        (vec![Err("lost"), answer(423, None)], Err("lost")),
        (
            vec![Err("lost"), problem(&IN_PROGRESS), answer(429, None)],
            Ok(409),
        ),
        (
            vec![problem(&IN_PROGRESS), Err("lost"), answer(429, None)],
            Err("lost"),
        ),
        (vec![problem(&IN_PROGRESS), Err("lost")], Err("lost")),
        (
            vec![Err("lost"), answer(423, None), answer(200, None)],
            Ok(200),
        ),
        (vec![Err("lost"), answer(409, None)], Ok(409)),
    ] {
        let attempts = u32::try_from(answers.len()).unwrap();
        let server = Server::answering(answers);
        let layer = exact().attempts(attempts);
        let response = server.call(layer, request(Method::POST, Some("a"))).await;
        assert_eq!(
            response.map(|response| response.status().as_u16()),
            expected
        );
        assert_eq!(server.sent(), usize::try_from(attempts).unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn attempts_bound_a_call_and_zero_counts_as_one() {
    for (attempts, sent) in [(0, 1), (1, 1), (3, 3)] {
        let server = Server::answering((0..5).map(|_| answer(423, None)));
        let layer = exact().attempts(attempts);
        let response = server.call(layer, request(Method::GET, None)).await;
        assert_eq!(response.unwrap().status(), 423);
        assert_eq!(server.sent(), sent);
        assert_eq!(server.decisions().last(), Some(&Decision::NoAttemptLeft));
    }
}

#[tokio::test(start_paused = true)]
async fn delay_that_would_end_after_the_deadline_is_not_begun() {
    let server = Server::answering([
        answer(423, Some("4")),
        answer(423, Some("5")),
        answer(423, Some("1")),
    ]);
    let began = Instant::now();
    let layer = exact().deadline(secs(10));
    let response = server
        .call(layer.clone(), request(Method::POST, None))
        .await;
    let response = response.unwrap();
    assert_eq!(began.elapsed(), secs(9) + secs(0));
    // Ten would be too late.
    assert_eq!(response.headers()[RETRY_AFTER], "1");
    assert_eq!(server.decisions().last(), Some(&Decision::NoTimeLeft));
    let endless = Server::answering([answer(503, Some("99999999999999999999999"))]);
    let response = endless.call(layer, request(Method::POST, None)).await;
    assert_eq!(response.unwrap().status(), 503);
}

#[tokio::test(start_paused = true)]
async fn attempt_that_is_under_way_at_the_deadline_ends_as_deadline_exceeded() {
    for grpc in [false, true] {
        let server = Server::answering([answer(423, Some("4"))]);
        let mut request = request(Method::POST, Some("a"));
        if grpc {
            let value = HeaderValue::from_static("application/grpc+proto");
            request.headers_mut().insert(CONTENT_TYPE, value);
        }
        let began = Instant::now();
        let response = server.call(exact().deadline(secs(10)), request).await;
        assert_eq!(began.elapsed(), secs(10));
        let (parts, body) = response.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        if grpc {
            assert_eq!((parts.status, body.len()), (StatusCode::OK, 0));
            assert_eq!(parts.headers["grpc-status"], "4");
        } else {
            assert_eq!(parts.status, StatusCode::GATEWAY_TIMEOUT);
            let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(problem["code"], "deadline-exceeded");
            assert_eq!(problem["status"], 504);
        }
        assert_eq!(server.decisions()[1..], [Decision::NoTimeLeft]);
        assert_eq!(server.attempts.lock()[1].status, None);
    }
}

#[tokio::test(start_paused = true)]
async fn random_part_of_a_delay_fills_its_window_and_never_shortens_retry_after() {
    let mut drawn = Vec::new();
    for _ in 0..200 {
        let server = Server::answering([answer(423, Some("1")), answer(423, None)]);
        let layer = RetryLockedLayer::new().backoff(Retry::new(secs(1), secs(60)));
        let response = server
            .call(layer.attempts(2), request(Method::GET, None))
            .await;
        assert!(response.is_ok());
        let Decision::SendAgain(delay) = server.decisions()[0] else {
            panic!("it is sent again");
        };
        drawn.push(delay);
    }
    drawn.sort();
    let (first, last) = (drawn[0], drawn[199]);
    assert!(
        first >= secs(1) && first < Duration::from_millis(1_200),
        "{first:?}"
    );
    assert!(
        last < secs(2) && last > Duration::from_millis(1_800),
        "{last:?}"
    );
}

/// A body in several pieces, each of which is there at once or is waited for.
fn pieces(
    waits: bool,
) -> impl Body<Data = Bytes, Error = Infallible> + Unpin + Send + Sync + 'static {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", HeaderValue::from_static("5"));
    let data = ["amo", "unt", "=5"].map(|piece| Frame::data(Bytes::from(piece)));
    let frames = data.into_iter().chain([Frame::trailers(trailers)]);
    let frames = stream::iter(frames).then(move |frame| async move {
        if waits {
            tokio::task::yield_now().await;
        }
        Ok(frame)
    });
    BodyExt::boxed(StreamBody::new(frames))
}

#[tokio::test(start_paused = true)]
async fn body_that_is_there_without_waiting_is_sent_again_and_another_is_sent_once() {
    for (waits, max_body, decision) in [
        (false, 8, Decision::SendAgain(secs(0))),
        (false, 7, Decision::BodyConsumed),
        (true, 8, Decision::BodyConsumed),
    ] {
        let server = Server::answering([answer(423, None), answer(200, None)]);
        let mut request = Request::new(pieces(waits));
        *request.method_mut() = Method::POST;
        let layer = exact().max_body(max_body);
        let response = server.call(layer, request).await;
        let again = matches!(decision, Decision::SendAgain(_));
        assert_eq!(response.unwrap().status(), if again { 200 } else { 423 });
        assert_eq!(server.decisions()[0], decision);
        for (_, body, _) in server.seen.lock().iter() {
            assert_eq!(body, &Ok(Bytes::from("amount=5")));
        }
        assert_eq!(server.sent(), if again { 2 } else { 1 });
    }
    let server = Server::answering([answer(423, None), answer(200, None)]);
    let response = server.call(exact(), Request::new(Empty::new())).await;
    assert_eq!(response.unwrap().status(), 200);
}

#[tokio::test]
async fn body_that_was_begun_keeps_its_frames_its_size_and_its_error() {
    let exact_size = |body: &ReadBody<_>| body.size_hint().exact();
    let mut body = ReadBody::unread(Full::from("amount=5"));
    assert_eq!(exact_size(&body), Some(8));
    body.read(7).await;
    assert!(body.copy().is_none());
    body.read(8).await;
    assert_eq!(exact_size(&body), Some(8));
    assert!(!body.is_end_stream());
    let copied = body.copy().unwrap().collect().await.unwrap();
    assert_eq!(copied.to_bytes(), "amount=5");

    let mut body = ReadBody::unread(pieces(false));
    body.read(100).await;
    let copied = body.copy().unwrap().collect().await.unwrap();
    assert_eq!(copied.trailers().unwrap()["x-sum"], "5");
    assert_eq!(body.size_hint().lower(), 8);

    let frames = [Ok(Frame::data(Bytes::from("amo"))), Err("cut")];
    let mut body = ReadBody::unread(StreamBody::new(stream::iter(frames)));
    body.read(100).await;
    assert!(body.copy().is_none() && !body.is_end_stream());
    let first = body.frame().await.unwrap().unwrap();
    assert_eq!(first.into_data().unwrap(), "amo");
    assert_eq!(body.frame().await.unwrap().unwrap_err(), "cut");
    assert!(body.frame().await.is_none() && body.is_end_stream());
}

/// Sends requests through the layer, and returns the keys that the server reads, or the raw header.
async fn key_of(request: Request<()>) -> Option<HeaderValue> {
    let service = service_fn(|request: Request<()>| {
        ready(Ok::<_, Infallible>(
            request.headers().get("idempotency-key").cloned(),
        ))
    });
    IdempotentLayer::new()
        .layer(service)
        .call(request)
        .await
        .unwrap()
}

#[tokio::test]
async fn idempotent_layer_draws_a_key_per_call_unless_the_request_has_one() {
    let of = |method| {
        let mut request = Request::new(());
        *request.method_mut() = method;
        request
    };
    let mut drawn = Vec::new();
    for method in [Method::POST, Method::PATCH, Method::POST] {
        let key = key_of(of(method)).await.unwrap();
        let key = key.to_str().unwrap().to_owned();
        assert_eq!(key.len(), 34, "{key}");
        assert!(key.starts_with('"') && key.ends_with('"'));
        drawn.push(key);
    }
    drawn.sort();
    drawn.dedup();
    assert_eq!(drawn.len(), 3);
    assert_eq!(key_of(of(Method::PUT)).await, None);
    assert_eq!(key_of(of(Method::GET)).await, None);
    let mut given = of(Method::PUT);
    given
        .extensions_mut()
        .insert(r#"a"\b"#.parse::<crate::IdempotencyKey>().unwrap());
    assert_eq!(key_of(given.clone()).await.unwrap(), r#""a\"\\b""#);
    given
        .headers_mut()
        .insert("idempotency-key", HeaderValue::from_static("bare"));
    assert_eq!(key_of(given).await.unwrap(), "bare");
}

/// Sends each request once more.
#[derive(Clone)]
struct Again(bool);

impl<A> Policy<Request<()>, A, Infallible> for Again {
    type Future = Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<()>,
        _: &mut Result<A, Infallible>,
    ) -> Option<Self::Future> {
        std::mem::take(&mut self.0).then(|| ready(()))
    }

    fn clone_request(&mut self, request: &Request<()>) -> Option<Request<()>> {
        Some(request.clone())
    }
}

#[tokio::test]
async fn key_outlives_tower_retries_inside_and_outside_only_if_the_request_has_it() {
    let sent = Arc::new(Mutex::new(Vec::new()));
    let note = Arc::clone(&sent);
    let server = service_fn(move |request: Request<()>| {
        note.lock()
            .push(request.headers()["idempotency-key"].clone());
        ready(Ok::<_, Infallible>(()))
    });
    let (key, again) = (IdempotentLayer::new(), RetryLayer::new(Again(true)));
    let inside = key.layer(again.layer(server.clone()));
    let outside = again.layer(key.layer(server));
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    assert_eq!(inside.oneshot(request.clone()).await, Ok(()));
    assert_eq!(outside.clone().oneshot(request.clone()).await, Ok(()));
    let own: crate::IdempotencyKey = "own".parse().unwrap();
    request.extensions_mut().insert(own);
    assert_eq!(outside.oneshot(request).await, Ok(()));
    let sent = sent.lock();
    let are_same: Vec<bool> = sent.chunks(2).map(|keys| keys[0] == keys[1]).collect();
    assert_eq!(are_same, [true, false, true], "{sent:?}");
}
