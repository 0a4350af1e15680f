//! Responses of all shapes, and whether they are recorded and replayed unchanged.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, DATE, ETAG, LINK,
    LOCATION, SET_COOKIE, TRAILER, VARY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version};
use axum::response::{IntoResponse, Response};
use futures_util::{FutureExt, StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, SizeHint};
use support::{Answer, Executed, ms, request_with, secs, set_all};
use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

use crate::payments::{answering, layer, pay, request, sized};

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// A body of some frames, which says how long it is.
fn framed(frames: Vec<Result<Frame<Bytes>, &'static str>>, len: u64) -> Body {
    sized(
        StreamBody::new(stream::iter(frames)),
        SizeHint::with_exact(len),
    )
}

fn data(text: &'static str) -> Result<Frame<Bytes>, &'static str> {
    Ok(Frame::data(text.into()))
}

/// Responses of all shapes, each in the hands of a handler.
fn shapes() -> Vec<(&'static str, fn() -> Response)> {
    vec![
        ("an empty body", || ().into_response()),
        ("created, elsewhere", || {
            let headers = [(LOCATION, "/payments/7"), (ETAG, "\"7\"")];
            (StatusCode::CREATED, headers).into_response()
        }),
        ("no content", || StatusCode::NO_CONTENT.into_response()),
        ("not modified", || {
            (StatusCode::NOT_MODIFIED, [(ETAG, "\"7\"")]).into_response()
        }),
        ("an unknown status", || {
            let status = StatusCode::from_u16(299).expect("it is one");
            status.into_response()
        }),
        ("headers several times, in order", || {
            let mut response = "paid".into_response();
            for (name, value) in [
                (LINK, "</a>; rel=a"),
                (VARY, "accept-encoding"),
                (LINK, "</b>; rel=b"),
                (VARY, "origin"),
                (LINK, "</a>; rel=a"),
            ] {
                let value = HeaderValue::from_static(value);
                response.headers_mut().append(name, value);
            }
            response
        }),
        ("bytes that are no text, and nothing", || {
            let mut response = vec![0, 159, 146, 150].into_response();
            let bytes = HeaderValue::from_bytes(b"caf\xe9 \xff").expect("it is a value");
            response.headers_mut().insert("x-bytes", bytes);
            let nothing = HeaderValue::from_static("");
            response.headers_mut().insert("x-nothing", nothing);
            response
        }),
        ("very many headers", || {
            let mut response = "paid".into_response();
            for number in 0..2_000_usize {
                let name = format!("x-{number}").parse::<HeaderName>();
                let name = name.expect("it is a name");
                response.headers_mut().insert(name, number.into());
            }
            response
        }),
        ("encoded by the handler", || {
            let kept = [(CONTENT_ENCODING, "br"), (CACHE_CONTROL, "no-store")];
            (kept, [(CONTENT_LENGTH, "4")], "what").into_response()
        }),
        ("a stream of a known size", || {
            framed(vec![data("pa"), data(""), data("id")], 4).into_response()
        }),
        ("trailers", || {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-sum", HeaderValue::from_static("a"));
            trailers.append("x-sum", HeaderValue::from_static("b"));
            let frames = vec![data("paid"), Ok(Frame::trailers(trailers))];
            ([(TRAILER, "x-sum")], framed(frames, 4)).into_response()
        }),
    ]
}

// Rules: replayed
#[tokio::test(start_paused = true)]
async fn responses_of_all_shapes_are_replayed_unchanged() {
    for (what, shape) in shapes() {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let app = answering(&executed, shape).layer(layer(&nodes));
        let first = pay(&app, "/payments", "a").await;
        assert!(!first.is_replayed(), "{what}");
        assert_eq!(first.trailers.is_some(), what == "trailers", "{what}");
        for _ in 0..2 {
            let again = pay(&app, "/payments", "a").await;
            assert!(again.is_replayed(), "{what}: {}", again.code());
            assert_eq!(again.as_recorded(), first.as_recorded(), "{what}");
        }
        assert_eq!(executed.count(), 1, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn record_keeps_no_cookies_and_no_connection_headers() {
    let answer = || {
        let mut response = "paid".into_response();
        let headers = [
            (SET_COOKIE, "a=1"),
            (SET_COOKIE, "b=2; HttpOnly"),
            (CONNECTION, "x-hop, close"),
            (CONNECTION, "X-Another"),
            (DATE, "Sat, 21 Nov 2026 00:00:00 GMT"),
        ];
        for (name, value) in headers {
            let value = HeaderValue::from_static(value);
            response.headers_mut().append(name, value);
        }
        for name in ["x-hop", "x-another", "keep-alive", "upgrade", "x-stays"] {
            let value = HeaderValue::from_static("something");
            response.headers_mut().insert(name, value);
        }
        response
    };
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = answering(&executed, answer).layer(layer(&nodes));
    let first = pay(&app, "/payments", "a").await;
    let mut expected = first.headers.clone();
    let dropped = "connection date set-cookie x-hop x-another keep-alive upgrade";
    for name in dropped.split(' ') {
        assert!(expected.remove(name).is_some(), "{name}");
    }
    let again = pay(&app, "/payments", "a").await;
    assert!(again.is_replayed());
    assert_eq!(again.as_recorded().1, expected);
}

#[tokio::test(start_paused = true)]
async fn streamed_or_truncated_response_is_never_executed_again() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let chunks = || {
        let chunks = ["pa", "id"].map(|chunk| Ok::<_, Infallible>(Bytes::from(chunk)));
        Body::from_stream(stream::iter(chunks)).into_response()
    };
    let app = answering(&executed, chunks).layer(layer(&nodes));
    assert_eq!(pay(&app, "/payments", "a").await.body, "paid");
    assert_eq!(pay(&app, "/payments", "a").await.code(), "result-not-kept");

    let broken = || framed(vec![data("pa"), Err("the disk is gone")], 4).into_response();
    let app = answering(&executed, broken).layer(layer(&nodes));
    let Ok(first) = app.clone().oneshot(request("/payments", "b")).await;
    assert_eq!(first.status(), StatusCode::OK);
    let error = first.into_body().collect().await.unwrap_err();
    assert!(format!("{error:?}").contains("the disk is gone"));
    assert_eq!(pay(&app, "/payments", "b").await.code(), "result-not-kept");
    assert_eq!(executed.count(), 2);
}

/// A body may linger behind its length, or have trailers there: in HTTP/2, and in a call that a proxy made of one
/// (RFC 9112, section 6.3).
#[tokio::test(start_paused = true)]
async fn streamed_response_ends_with_its_length_or_its_trailers() {
    let hour = secs(3_600);
    let trailers = || HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from_static("0"))]);
    let app = answering(&Executed::default(), move || {
        let lingers = sleep(hour).map(move |()| Ok(Frame::trailers(trailers())));
        let frames = stream::iter([data("he"), data("llo")]).chain(stream::once(lingers));
        ([(CONTENT_LENGTH, "5")], Body::new(StreamBody::new(frames))).into_response()
    });
    let app = app.layer(layer(&ScriptedNodes::new(3)));
    for (key, version, content_type, has_trailers) in [
        ("a", Version::HTTP_10, "text/plain", false),
        ("b", Version::HTTP_11, "text/plain", false),
        ("c", Version::HTTP_11, "application/grpc", true),
        ("d", Version::HTTP_2, "text/plain", true),
    ] {
        let (mut first, began) = (request("/payments", key), Instant::now());
        *first.version_mut() = version;
        let content_type = HeaderValue::from_static(content_type);
        first.headers_mut().insert(CONTENT_TYPE, content_type);
        let first = Answer::to(&app, first).await;
        assert_eq!(first.body, "hello", "{key}");
        let expected = (has_trailers.then(trailers), has_trailers);
        assert_eq!((first.trailers, began.elapsed() >= hour), expected, "{key}");
    }
}

/// With its last byte, a client has its response, and may send the request again at once.
#[tokio::test(start_paused = true)]
async fn last_data_of_a_streamed_response_comes_when_its_end_is_recorded() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = answering(&executed, || {
        let frames = StreamBody::new(stream::iter([data("he"), data("llo")]));
        ([(CONTENT_LENGTH, "5")], Body::new(frames)).into_response()
    });
    let app = app.layer(layer(&nodes));
    set_all(&nodes, OpKind::Record, Gate::Slow(ms(20)));
    let Ok(first) = app.clone().oneshot(request("/payments", "a")).await;
    let (mut body, began) = (first.into_body(), Instant::now());
    for (text, recorded) in [("he", false), ("llo", true)] {
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), text);
        assert_eq!(began.elapsed() >= ms(20), recorded, "{text}");
    }
    assert_eq!(pay(&app, "/payments", "a").await.code(), "result-not-kept");
}

/// What is too much is not kept until the end, which may never come.
#[tokio::test(start_paused = true)]
async fn streamed_response_that_is_longer_than_its_length_ends_with_it_or_with_an_error() {
    let executed = Executed::default();
    let app = answering(&executed, || {
        let more = stream::repeat_with(|| data("again")).take(1_000);
        let longer = stream::iter([data("hell"), data("o again")]).chain(more);
        ([(CONTENT_LENGTH, "5")], Body::new(StreamBody::new(longer))).into_response()
    });
    let app = app.layer(layer(&ScriptedNodes::new(3)));
    // The server cuts the last frame.
    assert_eq!(pay(&app, "/payments", "a").await.body, "hello again");
    let mut second = request("/payments", "b");
    *second.version_mut() = Version::HTTP_2;
    let Ok(second) = app.clone().oneshot(second).await;
    let error = second.into_body().collect().await.unwrap_err();
    assert!(
        format!("{error:?}").contains("longer than its length"),
        "{error:?}"
    );
    for key in ["a", "b"] {
        assert_eq!(pay(&app, "/payments", key).await.code(), "result-not-kept");
    }
    assert_eq!(executed.count(), 2);
}

/// What the handler says had an effect is kept with its body, whatever its status is, and that of its trailers.
#[tokio::test(start_paused = true)]
async fn record_if_keeps_a_response_of_any_status() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let failed = || {
        let unavailable = HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from_static("14"))]);
        let frames = vec![data("paid, but"), Ok(Frame::trailers(unavailable))];
        (StatusCode::INTERNAL_SERVER_ERROR, framed(frames, 9)).into_response()
    };
    let once = layer(&nodes).record_if(|_| true);
    let app = answering(&executed, failed).layer(once);
    let first = pay(&app, "/payments", "b").await;
    let again = pay(&app, "/payments", "b").await;
    assert!(again.is_replayed());
    assert_eq!(again.as_recorded(), first.as_recorded());
}

/// The marks of headers and trailers that no log and no table of a compression may have.
#[tokio::test(start_paused = true)]
async fn sensitive_header_is_replayed_as_sensitive() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let secret = || {
        let mut value = HeaderValue::from_static("secret");
        value.set_sensitive(true);
        let mut trailers = HeaderMap::new();
        trailers.insert("x-plain", HeaderValue::from_static("secret"));
        trailers.insert("x-secret", value.clone());
        let mut response =
            framed(vec![data("paid"), Ok(Frame::trailers(trailers))], 4).into_response();
        let first = HeaderValue::from_static("one");
        response.headers_mut().append("x-token", first);
        response.headers_mut().append("x-token", value);
        response
    };
    let app = answering(&executed, secret).layer(layer(&nodes));
    let first = pay(&app, "/payments", "a").await;
    let again = pay(&app, "/payments", "a").await;
    assert_eq!(again.as_recorded(), first.as_recorded());
    for answer in [first, again] {
        let mut tokens = answer.headers.get_all("x-token").iter();
        assert!(tokens.next_back().unwrap().is_sensitive());
        let trailers = answer.trailers.unwrap();
        let fields = answer.headers.iter().chain(&trailers);
        let sensitive = fields.filter(|(_, value)| value.is_sensitive());
        let sensitive: Vec<_> = sensitive.map(|(name, _)| name.as_str()).collect();
        assert_eq!(sensitive, ["x-token", "x-secret"]);
    }
}

/// The gRPC status is in the head, behind a body that is kept, or behind a stream.
// Rules: http.recorded
#[tokio::test(start_paused = true)]
async fn grpc_status_decides_whether_a_call_is_recorded() {
    let with = |status: u16| {
        let mut fields = HeaderMap::new();
        fields.insert("grpc-status", status.into());
        fields
    };
    for status in 0..=16 {
        for (shape, is_kept) in [("head", true), ("trailers", true), ("stream", false)] {
            let answer = move || {
                let mut response = match shape {
                    "head" => ().into_response(),
                    "trailers" => {
                        let frames = vec![data("paid"), Ok(Frame::trailers(with(status)))];
                        framed(frames, 4).into_response()
                    }
                    _ => {
                        let frames = [data("paid"), Ok(Frame::trailers(with(status)))];
                        Body::new(StreamBody::new(stream::iter(frames))).into_response()
                    }
                };
                if shape == "head" {
                    response.headers_mut().extend(with(status));
                }
                response
            };
            for at_most_once in [false, true] {
                let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
                let app = answering(&executed, answer);
                let app = app.layer(layer(&nodes).at_most_once(at_most_once));
                let headers = [
                    ("idempotency-key", "a"),
                    ("content-type", "application/grpc"),
                ];
                let call =
                    async || Answer::to(&app, request_with("POST", "/payments", &headers)).await;
                let first = call().await;
                assert_eq!(first.code(), "");
                let again = call().await;
                let is_recorded = ![1, 4, 8, 10, 13, 14, 16].contains(&status);
                let what = format!("{status} in the {shape}, at most once: {at_most_once}");
                let code = match (is_recorded, at_most_once) {
                    (false, true) => "outcome-unknown",
                    (true, _) if !is_kept => "result-not-kept",
                    _ => "",
                };
                assert_eq!(again.code(), code, "{what}");
                assert_eq!(again.is_replayed(), is_recorded && is_kept, "{what}");
                let executions = if is_recorded || at_most_once { 1 } else { 2 };
                assert_eq!(executed.count(), executions, "{what}");
                assert_eq!(nodes.locks(), [0, 0, 0], "{what}");
            }
        }
    }
}
