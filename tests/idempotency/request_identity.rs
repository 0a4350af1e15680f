//! Which requests share an idempotency key: encodings of paths and queries, methods, and merged headers.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::Path;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::response::Response;
use axum::routing::post;
use futures_util::stream;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use http_body_util::StreamBody;
use support::{Answer, Executed, keyed_request, once, redlock, users};
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{IdempotencyLayer, key};

use crate::payments::{answering, pay, sized};

#[tokio::test(start_paused = true)]
async fn idempotency_key_executes_once_for_all_encodings_of_a_path() {
    const PIECES: [&str; 18] = [
        "a", "%61", "%41", "A", "~", "%7e", "%7E", "@", "%40", "%2f", "%2F", ".", "%2e", "%25",
        "%2561", "+", "%20", ":",
    ];
    let redlock = redlock(&ScriptedNodes::new(3));
    let read = Arc::new(Mutex::new(BTreeMap::<String, usize>::new()));
    let noted = Arc::clone(&read);
    let handler = post(async move |Path(id): Path<String>| {
        *noted.lock().unwrap().entry(id.clone()).or_default() += 1;
        id
    });
    let app = Router::new().route("/p/{id}", handler);
    let app = app.layer(once(&redlock));
    let mut random = fastrand::Rng::with_seed(12);
    let mut second = 0;
    for _ in 0..3_000 {
        let pieces = (0..random.usize(1..3)).map(|_| random.choice(PIECES).unwrap());
        let id: String = pieces.collect();
        let answer = pay(&app, &format!("/p/{id}"), "a").await;
        let decoded = percent_encoding::percent_decode_str(&id);
        let is_its_own = answer.body == *decoded.decode_utf8().unwrap();
        assert!(answer.status == 422 || is_its_own, "{id}: {answer:?}");
        second += usize::from(answer.is_replayed());
    }
    let read = read.lock().unwrap();
    let twice: Vec<_> = read.iter().filter(|(_, times)| **times > 1).collect();
    assert!(twice.is_empty() && second > 1_000, "{twice:?}");
}

/// Requests that are one, or others, or of which it is not known: for a handler `@` and `%40` are one, for a
/// server behind it perhaps not (RFC 3986, section 2.2), so they are neither executed twice nor answered with what
/// may be another's.
#[tokio::test(start_paused = true)]
async fn idempotency_key_is_shared_by_equivalent_paths_and_queries_only() {
    let first = async |first: &str| {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let app = users(&executed, once(&redlock(&nodes)));
        let paid = pay(&app, first, "k").await;
        assert_eq!(paid.status, StatusCode::OK, "{first}");
        (app, executed, paid)
    };
    for (one, same) in [
        (
            "/users/~bob",
            &["/users/%7Ebob", "/users/%7ebob", "/users/%7E%62o%62"][..],
        ),
        ("/users/%41-_.~9", &["/users/A%2D%5f%2e%7e%39"]),
        ("/users/a%2Fb", &["/users/a%2fb", "/users/%61%2fb"]),
        ("/users/%C3%A9", &["/users/%c3%a9"]),
        ("/users/%zz%", &["/users/%zz%"]),
        ("/users/bob", &["/users/bob?"]),
        (
            "/users/bob?for=%7Eme&x=%3d",
            &["/users/bob?for=~me&x=%3D", "/users/%62ob?for=%7eme&x=%3D"],
        ),
    ] {
        let (app, executed, paid) = first(one).await;
        for same in same {
            let again = pay(&app, same, "k").await;
            assert!(again.is_replayed(), "{one} {same}: {again:?}");
            assert_eq!(again.body, paid.body);
        }
        assert_eq!(executed.count(), 1, "{one}");
    }
    for (one, ambiguous) in [
        ("/users/bob@example.com", "/users/bob%40example.com"),
        ("/users/a:b", "/users/a%3Ab"),
        // A wildcard route hands both to one handler as one path.
        ("/files/a/b", "/files/a%2Fb"),
        ("/files/a%2fb/c", "/files/a/b%2Fc"),
        ("/users/bob?to=a@b", "/users/bob?to=a%40b"),
        ("/users/bob?to=a+b", "/users/bob?to=a%20b"),
        ("/users/bob?a=1&b=2", "/users/bob?b=2&a=1"),
        ("/users/bob?a=1%26b=2", "/users/bob?a=1&b=2"),
    ] {
        let (app, executed, _) = first(one).await;
        let again = pay(&app, ambiguous, "k").await;
        assert_eq!(again.code(), "idempotency-key-reused", "{one} {ambiguous}");
        assert_eq!(executed.count(), 1, "{one} {ambiguous}");
    }
    let (app, executed, _) = first("/users/a%2Fb").await;
    let others = ["a%252Fb", "A%2Fb", "a", "%2541", "A", "a+b", "a%20b"];
    for (already, other) in others.into_iter().enumerate() {
        let paid = pay(&app, &format!("/users/{other}"), "k").await;
        let told = (paid.told(), paid.is_replayed());
        assert_eq!(told, ((200, ""), false), "{other}");
        assert_eq!(executed.count(), already + 2, "{other}");
    }
}

/// With other conditions or another encoding, the same body is another request.
#[tokio::test(start_paused = true)]
async fn idempotency_key_with_another_if_match_or_content_encoding_is_refused_as_reused() {
    for (name, first, other) in [
        ("if-match", Some("\"v1\""), Some("\"v2\"")),
        ("if-match", None, Some("\"v1\"")),
        ("content-encoding", None, Some("gzip")),
        ("content-type", Some("text/plain"), Some("text/html")),
        // Not in the fingerprint.
        ("accept", Some("text/plain"), Some("text/html")),
        ("authorization", Some("Bearer 1"), Some("Bearer 2")),
    ] {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let app = users(&executed, once(&redlock(&nodes)));
        let pay = async |value: Option<&'static str>| {
            let mut request = keyed_request(Method::POST, "/users/bob", b"k");
            if let Some(value) = value {
                let value = HeaderValue::from_static(value);
                request.headers_mut().insert(name, value);
            }
            Answer::to(&app, request).await
        };
        assert_eq!(pay(first).await.status, StatusCode::OK, "{name}");
        assert!(pay(first).await.is_replayed(), "{name}");
        let again = pay(other).await;
        match name {
            "accept" | "authorization" => assert!(again.is_replayed(), "{name}"),
            _ => assert_eq!(again.code(), "idempotency-key-reused", "{name} {other:?}"),
        }
        assert_eq!(executed.count(), 1, "{name}");
    }
}

/// `alice` and `"alice"` may be two users of the authentication in front.
// Rules: http.scope
#[tokio::test(start_paused = true)]
async fn scope_of_a_header_is_the_header_byte_for_byte() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let by_user = IdempotencyLayer::new(redlock(&nodes), key::header("x-user"));
    let app = users(&executed, by_user);
    for (already, user) in ["alice", "\"alice\"", "\"ali\\\"ce\"", "\"", "\"alice"]
        .into_iter()
        .enumerate()
    {
        for is_again in [false, true] {
            let mut request = keyed_request(Method::POST, "/users/bob", b"k");
            let value = HeaderValue::from_str(user).unwrap();
            request.headers_mut().insert("x-user", value);
            let answer = Answer::to(&app, request).await;
            let told = (answer.status, answer.is_replayed());
            assert_eq!(told, (StatusCode::OK, is_again), "{user}");
        }
        assert_eq!(executed.count(), already + 1, "{user}");
    }
}

#[tokio::test(start_paused = true)]
async fn idempotency_methods_with_get_include_head() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = users(&executed, once(&redlock(&nodes)).methods([Method::GET]));
    for method in [Method::GET, Method::HEAD] {
        let first = Answer::to(&app, keyed_request(method.clone(), "/users/bob", b"k")).await;
        let again = Answer::to(&app, keyed_request(method.clone(), "/users/bob", b"k")).await;
        let replayed = [first, again].map(|answer| answer.is_replayed());
        assert_eq!(replayed, [false, true], "{method}");
    }
    assert_eq!(executed.count(), 2);
}

/// Answers with so many bytes of headers and of trailers.
fn oversized(headers: usize, trailers: usize) -> Response {
    let value = |size| HeaderValue::from_bytes(&vec![b'x'; size]).unwrap();
    let mut last = HeaderMap::new();
    if trailers > 0 {
        last.insert("x-last", value(trailers));
    }
    let data = Frame::data(Bytes::from_static(b"paid"));
    let frames = [data, Frame::trailers(last)].map(Ok::<_, Infallible>);
    // At most four bytes.
    let mut hint = SizeHint::new();
    hint.set_upper(4);
    let body = StreamBody::new(stream::iter(frames));
    let mut response = Response::new(sized(body, hint));
    // Each of them is small.
    for number in 0..headers / 1024 {
        let name = HeaderName::try_from(format!("x-{number}")).unwrap();
        response.headers_mut().insert(name, value(1024));
    }
    response
}

#[tokio::test(start_paused = true)]
async fn response_with_oversized_headers_or_trailers_is_not_recorded() {
    const KIB: usize = 1024;
    for (headers, trailers, is_kept) in [
        (60 * KIB, 0, true),
        (0, 60 * KIB, true),
        (30 * KIB, 30 * KIB, true),
        (65 * KIB, 0, false),
        (0, 65 * KIB, false),
        (40 * KIB, 40 * KIB, false),
        (2 * KIB * KIB, 0, false),
    ] {
        let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
        let app = answering(&executed, move || oversized(headers, trailers));
        let app = app.layer(once(&redlock(&nodes)).max_response_body(16));
        let first = pay(&app, "/payments", "k").await;
        assert_eq!((first.told(), &*first.text()), ((200, ""), "paid"));
        let again = pay(&app, "/payments", "k").await;
        let expected = if is_kept { "" } else { "result-not-kept" };
        assert_eq!(again.code(), expected, "{headers} {trailers}");
        assert_eq!(executed.count(), 1, "{headers} {trailers}");
    }
}
