//! Requests of hostile clients and odd proxies: header spellings, bodies, forged tokens, and what logs show.

use std::convert::Infallible;
use std::future::IntoFuture;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, post};
use futures_util::{StreamExt, stream};
use http::header::{CONNECTION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use support::{
    Answer, Executed, Log, keyed_request, ms, once, redlock, request_with, secs, three_nodes,
    three_nodes_with, users,
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_http::timeout::RequestBodyTimeoutLayer;
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{
    BufferBodyLayer, IdempotencyLayer, KeyExtractor, LockHandle, LockKeys, Redlock, RedlockLayer,
    key,
};

#[tokio::test(start_paused = true)]
async fn key_form_field_inside_an_idempotency_layer_needs_the_buffer_with_or_without_a_key() {
    let nodes = ScriptedNodes::new(3);
    let echo =
        async |handle: LockHandle, body: Bytes| format!("{:?} {}", handle.keys(), body.len());
    let by_field = || RedlockLayer::new(redlock(&nodes), ("account", key::form_field("id")));
    let buffer = BufferBodyLayer::new(64);
    let unbuffered = Router::new().route("/", post(echo)).layer(by_field());
    let outside = unbuffered
        .clone()
        .layer(once(&redlock(&nodes)))
        .layer(buffer.clone());
    let within = unbuffered
        .clone()
        .layer(buffer)
        .layer(once(&redlock(&nodes)));
    let without = unbuffered.layer(once(&redlock(&nodes)));
    let locked = "[LockKey(\"7:account,1:7,\")] 4";
    for (number, app, expected) in [
        (1, outside, Some(locked)),
        (2, within, Some(locked)),
        (3, without, None),
    ] {
        for key in ["", "a", "", "b"] {
            let mut headers = vec![("content-type", "application/x-www-form-urlencoded")];
            let key = format!("{number}{key}");
            if key.len() > 1 {
                headers.push(("idempotency-key", &key));
            }
            let request = request_with("POST", "/", &headers);
            let answer = Answer::to(&app, request.map(|_| Body::from("id=7"))).await;
            match expected {
                Some(body) => assert_eq!((answer.told(), &*answer.text()), ((200, ""), body)),
                None => assert_eq!(answer.told(), (500, "misconfigured")),
            }
        }
    }
}

/// Sends a request with these headers through a layer that forwards its token, and returns the headers that
/// the service within got.
async fn forwarded(layer: &RedlockLayer, method: Method, headers: &[(&str, &[u8])]) -> HeaderMap {
    let inner = service_fn(async |request: Request| {
        let mut response = Response::new(Body::empty());
        *response.headers_mut() = request.headers().clone();
        Ok::<_, Infallible>(response)
    });
    let mut request = Request::new(Body::empty());
    *request.method_mut() = method;
    for (name, value) in headers {
        let name = HeaderName::try_from(*name).unwrap();
        request
            .headers_mut()
            .append(name, HeaderValue::from_bytes(value).unwrap());
    }
    let response = layer.layer(inner).oneshot(request).await.unwrap();
    response.headers().clone()
}

/// Requests without a lock must not arrive with a token of the client's either.
#[tokio::test(start_paused = true)]
async fn forward_token_removes_client_headers_that_resemble_the_token() {
    let nodes = ScriptedNodes::new(3);
    let forged: &[(&str, &[u8])] = &[
        ("x-fencing-token", b"1"),
        ("x-fencing-token", b"2"),
        ("x_fencing_token", b"3"),
        ("x_fencing-token", b"4"),
        ("x-fencing_token", b"5"),
        ("connection", b"close, X-Fencing-Token"),
        (
            "connection",
            b" x_fencing_token ,keep-alive,\tX_FENCING-TOKEN",
        ),
        ("connection", b"te, x-fencing-token, x-hop"),
        ("connection", b"\xff, x-fencing-token"),
        ("proxy-connection", b"x-fencing-token"),
        ("x-other_header", b"kept"),
        ("x-fencing-token-2", b"kept"),
    ];
    let unfenced = || Redlock::builder().scripted(&nodes).fencing(false);
    for name in ["x-fencing-token", "x_fencing_token"] {
        let name = HeaderName::from_static(name);
        let layer = |redlock| {
            let layer = RedlockLayer::new(redlock, ("thing", "a")).forward_token(name.clone());
            layer.expose_token(HeaderName::from_static("x-exposed"))
        };
        let locked = layer(redlock(&nodes));
        let skipping = locked.clone().skip(|_| true);
        let safe = ["GET", "HEAD", "OPTIONS", "TRACE", "QUERY"];
        let passing = safe.map(|method| (method, locked.clone()));
        let unfenced = layer(unfenced().build().unwrap());
        let without = [("POST", skipping), ("POST", unfenced)];
        let all = [("POST", locked)].into_iter().chain(passing).chain(without);
        for (number, (method, layer)) in all.enumerate() {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let got = forwarded(&layer, method, forged).await;
            let resembles =
                |name: &HeaderName| name.as_str().replace('_', "-") == "x-fencing-token";
            let tokens: Vec<_> = got.iter().filter(|(found, _)| resembles(found)).collect();
            assert_eq!(tokens.len(), usize::from(number == 0), "{number}: {got:?}");
            let exposed = got.get("x-exposed");
            let is_ours = |(found, value): &(&_, &HeaderValue)| {
                **found == name && value.len() > 9 && exposed == Some(value)
            };
            assert!(tokens.iter().all(is_ours), "{got:?}");
            assert_eq!(exposed.is_some(), number == 0, "{number}: {got:?}");
            let options = got.get_all(CONNECTION).iter();
            let options: Vec<&[u8]> = options.map(HeaderValue::as_bytes).collect();
            assert_eq!(
                options,
                [&b"close"[..], b"keep-alive", b"te", b"x-hop", b"\xff"]
            );
            assert!(!got.contains_key("proxy-connection"));
            for name in ["x-other_header", "x-fencing-token-2"] {
                assert_eq!(got[name], "kept");
            }
        }
    }
    // What is about nothing of ours is as it came.
    let plain: &[(&str, &[u8])] = &[("connection", b"close ,, x-y"), ("te", b"trailers")];
    let layer = RedlockLayer::new(redlock(&nodes), ("thing", "b"));
    let layer = layer.forward_token(HeaderName::from_static("x-fencing-token"));
    let got = forwarded(&layer, Method::GET, plain).await;
    assert_eq!((got["connection"].as_bytes(), got.len()), (plain[0].1, 2));
}

#[tokio::test(start_paused = true)]
async fn expose_token_and_replay_header_replace_headers_of_the_handler() {
    let nodes = ScriptedNodes::new(3);
    let said = async || {
        let mut response = "paid".into_response();
        for (name, value) in [
            ("x-token", "1"),
            ("x-token", "2"),
            ("idempotency-replayed", "never"),
            ("idempotency-replayed", "no"),
        ] {
            response
                .headers_mut()
                .append(name, HeaderValue::from_static(value));
        }
        response
    };
    let exposing = RedlockLayer::new(redlock(&nodes), ("thing", key::path("name")));
    let exposing = exposing.expose_token(HeaderName::from_static("x-token"));
    let app = Router::new()
        .route("/users/{name}", post(said))
        .layer(exposing)
        .layer(once(&redlock(&nodes)));
    for is_replay in [false, true] {
        let answer = Answer::to(&app, keyed_request(Method::POST, "/users/bob", b"k")).await;
        let tokens: Vec<_> = answer.headers.get_all("x-token").iter().collect();
        assert!(tokens.len() == 1 && tokens[0].len() > 9, "{tokens:?}");
        let replayed = answer.headers.get_all("idempotency-replayed");
        if is_replay {
            assert_eq!(replayed.iter().collect::<Vec<_>>(), ["true"]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn buffer_body_layer_reads_a_body_without_a_length_up_to_its_limit() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let app = users(&executed, once(&redlock(&nodes)).max_request_body(64));
    for (chunks, expected) in [
        (8, (200, "")),
        (9, (413, "body-too-large")),
        (usize::MAX, (413, "body-too-large")),
    ] {
        let read = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&read);
        let body = stream::repeat_with(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok::<_, Infallible>(Bytes::from_static(b"12345678"))
        });
        let mut upload = keyed_request(Method::POST, "/users/bob", format!("k{chunks}").as_bytes());
        *upload.body_mut() = Body::from_stream(body.take(chunks));
        let answer = Answer::to(&app, upload).await;
        assert_eq!(answer.told(), expected, "{chunks}");
        assert!(read.load(Ordering::SeqCst) <= 10, "{read:?}");
    }
    assert_eq!((executed.count(), nodes.sent(0, OpKind::Acquire)), (1, 1));
}

/// Requests whose key the set-up cannot hold: the operator learns what to do about it.
#[tokio::test(start_paused = true)]
async fn key_that_cannot_be_is_logged_once_with_the_remedy() {
    let (log, _guard) = Log::subscribed();
    let (_nodes, redlock) = three_nodes_with(|builder| builder.namespace(""));
    let many = key::from_fn(|parts: &http::request::Parts| {
        let count = parts.headers.get("x-count")?.to_str().ok()?.parse().ok()?;
        let keys = (0..count).map(|number: usize| number.to_string());
        Some(keys.collect::<LockKeys>())
    });
    let layer = RedlockLayer::new(redlock, key::header("x-key").or(many));
    let app = Router::new()
        .route("/", any(async || "served"))
        .layer(layer);
    let (long, longer) = ("k".repeat(513), "k".repeat(600));
    let longest = "k".repeat(512);
    let served = request_with("POST", "/", &[("x-key", &longest)]);
    assert_eq!(Answer::to(&app, served).await.text(), "served");
    for (name, value) in [
        ("x-key", long.as_str()),
        ("x-key", &longer),
        ("x-key", "redlock:fence:{a}"),
        ("x-count", "33"),
        ("x-count", "34"),
    ] {
        let refused = Answer::to(&app, request_with("POST", "/", &[(name, value)])).await;
        assert_eq!(refused.told(), (400, "key-invalid"));
        assert!(!refused.text().contains("redlock:"), "{refused:?}");
    }
    // Each once, lest clients fill the log.
    let log = log.text();
    for advice in [
        "set a namespace, which hashes",
        "may not begin with",
        "lock a coarser resource",
    ] {
        assert_eq!(log.matches(advice).count(), 1, "{advice}: {log}");
    }
}

// Rules: body-unreadable
#[tokio::test(start_paused = true)]
async fn truncated_or_late_body_is_refused_as_unreadable() {
    let (nodes, executed) = (ScriptedNodes::new(3), Executed::default());
    let late = RequestBodyTimeoutLayer::new(secs(1));
    let idempotent = users(&executed, once(&redlock(&nodes)));
    let locked = RedlockLayer::new(redlock(&nodes), ("user", key::path("name")));
    let buffered = Router::new().route(
        "/users/{name}",
        any(async |body: Bytes| body.len().to_string()),
    );
    let buffered = buffered.layer((BufferBodyLayer::new(64), locked));
    let upload = |content_type: &'static str, broken: Option<io::ErrorKind>| {
        let begun = stream::iter([Ok(Bytes::from_static(b"amount"))]);
        let rest = match broken {
            Some(kind) => stream::iter([Err(io::Error::new(kind, "as the test wants it"))]).boxed(),
            None => stream::pending().boxed(),
        };
        let mut upload = keyed_request(Method::POST, "/users/bob", b"k");
        let content_type = HeaderValue::from_static(content_type);
        upload.headers_mut().insert(CONTENT_TYPE, content_type);
        *upload.body_mut() = Body::from_stream(begun.chain(rest));
        upload
    };
    for app in [idempotent, buffered] {
        let app = Router::new().merge(app).layer(late.clone());
        for (broken, status, grpc) in [
            (Some(io::ErrorKind::BrokenPipe), 400, "1"),
            (Some(io::ErrorKind::TimedOut), 408, "4"),
            (None, 408, "4"),
        ] {
            let refused = Answer::to(&app, upload("text/plain", broken)).await;
            let told = refused.text();
            assert_eq!(refused.told(), (status, "body-unreadable"), "{told}");
            for hidden in ["key", "as the test wants it"] {
                assert!(!told.contains(hidden), "{told}");
            }
            let of_call = Answer::to(&app, upload("application/grpc", broken)).await;
            assert_eq!(of_call.headers["grpc-status"], grpc);
            assert_eq!(of_call.rejection, refused.rejection);
        }
    }
    assert_eq!((executed.count(), nodes.sent(0, OpKind::Acquire)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn idempotency_settings_out_of_range_log_the_value_used() {
    let nodes = ScriptedNodes::new(3);
    let said = |set: &dyn Fn(IdempotencyLayer) -> IdempotencyLayer| {
        let (log, _guard) = Log::subscribed();
        let _layer = set(once(&redlock(&nodes)));
        log.text()
    };
    for (log, words) in [
        (
            said(&|layer| layer.retention(Duration::ZERO)),
            "retention 0ns 1ms",
        ),
        (
            said(&|layer| layer.retention(Duration::MAX)),
            "retention 18446744073709551615.999999999s 3153600000s",
        ),
        (
            said(&|layer| layer.max_response_body(1024 * 1024 + 1)),
            "max_response_body 1048577 1048576",
        ),
    ] {
        assert_eq!(log.matches("WARN").count(), 1, "{log}");
        assert!(words.split(' ').all(|word| log.contains(word)), "{log}");
    }
    for log in [
        said(&|layer| layer.retention(ms(1)).max_response_body(1024 * 1024)),
        said(&|layer| layer.retention(secs(86_400)).max_response_body(0)),
    ] {
        assert_eq!(log, "");
    }
}

/// What is printed of a thing is about that thing.
// Rules: http.secrets
#[tokio::test(start_paused = true)]
async fn debug_of_public_types_shows_no_keys() {
    let (nodes, redlock) = three_nodes();
    let held = redlock.lock("theirs").await.unwrap();
    let waiting = tokio::spawn(redlock.lock("theirs").into_future());
    tokio::task::yield_now().await;
    let own = redlock.lock("own").ttl(secs(7)).await.unwrap();
    let layer = RedlockLayer::new(redlock.clone(), ("thing", key::header("x-key")));
    let mut service = layer.layer(users(&Executed::default(), once(&redlock)));
    let future = Service::call(&mut service, request_with("POST", "/", &[("x-key", "7")]));
    let shown = [
        format!("{redlock:?}"),
        format!("{:?}", redlock.lock("own")),
        format!("{:?}", redlock.lock("own").into_future()),
        format!("{own:?} {:?} {:?}", own.handle(), own.lost()),
        format!("{layer:?} {service:?} {future:?}"),
        format!("{:?}", once(&redlock)),
        format!("{:?}", once(&redlock).layer(layer.clone())),
        format!("{:?}", redlock.health().await),
        format!("{:?}", Redlock::builder().scripted(&nodes)),
        format!("{nodes:?}"),
    ];
    for shown in shown {
        for hidden in ["theirs", "Front"] {
            assert!(!shown.contains(hidden), "{shown}");
        }
        assert!(shown.len() < 2_000, "{shown}");
    }
    let request = format!("{:?}", redlock.lock("own").ttl(secs(7)));
    for part in ["own", "7s"] {
        assert!(request.contains(part), "{request}");
    }
    drop((held, own));
    waiting.abort();
}

/// What a server behind reads as one header is one here, too.
#[tokio::test(start_paused = true)]
async fn key_header_sent_twice_or_in_two_spellings_is_refused() {
    let nodes = ScriptedNodes::new(3);
    let layer = RedlockLayer::new(redlock(&nodes), ("thing", key::header("x-thing-id")));
    let app = Router::new()
        .route("/", any(async || "served"))
        .layer(layer);
    for (other, expected) in [
        ("x_thing_id", (400, "key-invalid")),
        ("x_thing-id", (400, "key-invalid")),
        ("x-thing-id", (400, "key-invalid")),
        ("x-thing-id2", (200, "")),
        ("x-thingid", (200, "")),
    ] {
        let request = request_with("POST", "/", &[("x-thing-id", "a"), (other, "b")]);
        let answer = Answer::to(&app, request).await;
        assert_eq!(answer.told(), expected, "{other}");
    }
    let only = request_with("POST", "/", &[("x_thing_id", "b")]);
    assert_eq!(Answer::to(&app, only).await.code(), "key-missing");
    let executed = Executed::default();
    let app = users(&executed, once(&redlock(&nodes)));
    let mut twice = keyed_request(Method::POST, "/users/bob", b"a");
    twice
        .headers_mut()
        .insert("idempotency_key", HeaderValue::from_static("b"));
    assert_eq!(Answer::to(&app, twice).await.code(), "key-invalid");
}

#[tokio::test(start_paused = true)]
async fn forward_token_and_expose_token_of_two_layers_may_share_a_header() {
    let (_nodes, redlock) = three_nodes();
    let name = HeaderName::from_static("x-token");
    let layer = |what: &'static str| {
        let layer = RedlockLayer::new(redlock.clone(), (what, key::query("account")));
        layer.forward_token(name.clone()).expose_token(name.clone())
    };
    let seen = any(async |request: Request| {
        let tokens = request.headers().get_all("x-token").iter();
        let tokens: Vec<_> = tokens
            .map(|token| token.to_str().unwrap().to_owned())
            .collect();
        tokens.join(",")
    });
    let app = Router::new().route("/", seen);
    let app = app.layer(layer("inner")).layer(layer("outer"));
    let forged = [("x-token", "1"), ("x_token", "2"), ("x-token", "3")];
    let answer = Answer::to(&app, request_with("POST", "/?account=1", &forged)).await;
    let exposed: Vec<_> = answer.headers.get_all("x-token").iter().collect();
    assert_eq!(exposed.len(), 1);
    for token in [&*answer.text(), exposed[0].to_str().unwrap()] {
        assert!(token.parse::<u64>().unwrap() > 3, "{answer:?}");
    }
}
