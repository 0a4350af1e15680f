//! `Locked` around extractors that consume the request, such as `Json`.

use axum::body::Body;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Query, Request};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Form, Json, Router, debug_handler};
use bytes::Bytes;
use futures_util::stream;
use http::StatusCode;
use http::header::CONTENT_TYPE;
use support::{Answer, ms, once, redlock, secs, three_nodes};
use tokio::time::sleep;
use tower_redlock::test_util::{OpKind, ScriptedNodes};
use tower_redlock::{
    LockHandles, LockKeys, LockOptions, LockResource, Locked, LockedRejection, Redlock,
    RedlockLayer, key,
};

use crate::shop::{AppState, Transfer, until_free};

const FORM: &str = "application/x-www-form-urlencoded";
const JSON: &str = "application/json";

fn request(content_type: &str, body: impl Into<Body>) -> Request {
    let request = Request::post("/?from=a").header(CONTENT_TYPE, content_type);
    request.body(body.into()).unwrap()
}

fn transfer(from: &str, to: &str) -> Request {
    request(JSON, format!(r#"{{"from":"{from}","to":"{to}"}}"#))
}

#[debug_handler(state = AppState)]
async fn json(Locked(guard, Json(transfer)): Locked<Json<Transfer>>) -> Response {
    let response = format!("{} {}", transfer.from, guard.keys().len()).into_response();
    guard.hold_until_sent(response).into_response()
}

#[debug_handler(state = AppState)]
async fn form(Locked(guard, Form(transfer)): Locked<Form<Transfer>>) -> Response {
    let response = format!("{} {}", transfer.to, guard.keys().len()).into_response();
    guard.hold_until_sent(response).into_response()
}

fn app(redlock: &Redlock) -> Router {
    let redlock = redlock.clone();
    Router::new()
        .route("/", post(json).put(form))
        .with_state(AppState { redlock })
}

#[tokio::test(start_paused = true)]
async fn locked_json_and_form_lock_what_the_body_names() {
    let nodes = ScriptedNodes::new(3);
    let app = app(&redlock(&nodes));
    let answer = Answer::to(&app, transfer("a", "b")).await;
    assert_eq!(answer.text(), "a 2");
    let mut sent = request(FORM, "from=a&to=b");
    *sent.method_mut() = http::Method::PUT;
    let answer = Answer::to(&app, sent).await;
    assert_eq!(answer.text(), "b 2");
    assert_eq!(nodes.sent(0, OpKind::Acquire), 2);
    assert_eq!(nodes.locks(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn locked_json_takes_the_lock_after_its_body_has_arrived() {
    let (_nodes, redlock) = three_nodes();
    let app = app(&redlock);
    let pieces = stream::unfold(0, async |piece: usize| {
        sleep(secs(1)).await;
        let pieces = [r#"{"from":"a","#, r#""to":"b"}"#];
        let sent = Bytes::from_static(pieces.get(piece)?.as_bytes());
        Some((Ok::<_, std::io::Error>(sent), piece + 1))
    });
    let slow = request(JSON, Body::from_stream(Box::pin(pieces)));
    let serving = tokio::spawn(async move { Answer::to(&app, slow).await });
    sleep(ms(1_500)).await;
    let guard = redlock.try_lock(("account", "b")).await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(serving.await.unwrap().body, "a 2");
}

#[tokio::test(start_paused = true)]
async fn locked_json_is_refused_like_the_layer_and_takes_no_lock_for_a_bad_body() {
    let (nodes, redlock) = three_nodes();
    let app = app(&redlock);
    for (content_type, body, status) in [
        (JSON, "{", StatusCode::BAD_REQUEST),
        (JSON, r#"{"from":"a"}"#, StatusCode::UNPROCESSABLE_ENTITY),
        ("text/plain", "{}", StatusCode::UNSUPPORTED_MEDIA_TYPE),
    ] {
        let answer = Answer::to(&app, request(content_type, body)).await;
        assert_eq!((answer.status, answer.code()), (status, ""));
    }
    assert_eq!(nodes.sent(0, OpKind::Acquire), 0);
    let guard = redlock.lock(("account", "b")).await.unwrap();
    let answer = Answer::to(&app, transfer("a", "b")).await;
    assert_eq!(answer.code(), "lock-contended");
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn locked_json_shares_the_lock_of_a_layer() {
    #[debug_handler(state = AppState)]
    async fn handler(
        handles: LockHandles,
        Locked(guard, Json(_)): Locked<Json<Transfer>>,
    ) -> String {
        format!("{} of {}", guard.keys().len(), handles.to_vec().len())
    }
    let (nodes, redlock) = three_nodes();
    let layer = RedlockLayer::new(redlock.clone(), ("account", key::query("from")));
    let app = Router::new()
        .route("/", post(handler).layer(layer))
        .with_state(AppState { redlock });
    let answer = Answer::to(&app, transfer("a", "b")).await;
    assert_eq!(answer.body, "1 of 2");
    until_free(&nodes).await;
}

#[tokio::test(start_paused = true)]
async fn optional_and_fallible_locked_json() {
    #[debug_handler(state = Redlock)]
    async fn optional(locked: Option<Locked<Json<Transfer>>>) -> String {
        format!("{:?}", locked.map(|Locked(guard, _)| guard.keys().len()))
    }
    #[debug_handler(state = Redlock)]
    async fn fallible(
        locked: Result<Locked<Json<Transfer>>, LockedRejection<JsonRejection>>,
    ) -> &'static str {
        match locked {
            Ok(_) => "locked",
            Err(LockedRejection::Inner(JsonRejection::JsonSyntaxError(_))) => "no JSON",
            Err(LockedRejection::Lock(refused)) => refused.rejection().code(),
            Err(_) => "other",
        }
    }
    let (nodes, redlock) = three_nodes();
    let app = Router::new()
        .route("/", post(optional).put(fallible))
        .with_state(redlock.clone());
    let put = |mut request: Request| {
        *request.method_mut() = http::Method::PUT;
        request
    };
    let empty = Request::post("/").body(Body::empty()).unwrap();
    assert_eq!(Answer::to(&app, empty).await.body, "None");
    assert_eq!(Answer::to(&app, transfer("a", "b")).await.body, "Some(2)");
    until_free(&nodes).await;
    let guard = redlock.lock(("account", "b")).await.unwrap();
    let refused = Answer::to(&app, transfer("a", "b")).await;
    assert_eq!(refused.status, StatusCode::LOCKED);
    // The transfer waits for two seconds.
    let refused = Answer::to(&app, put(transfer("a", "b"))).await;
    assert_eq!(refused.body, "lock-contended");
    drop(guard);
    let broken = Answer::to(&app, put(request(JSON, "{"))).await;
    assert_eq!(broken.body, "no JSON");
}

/// An extractor of the program: the lines of a body.
struct Lines(Vec<String>);

impl<S: Send + Sync> FromRequest<S> for Lines {
    type Rejection = <String as FromRequest<S>>::Rejection;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let text = String::from_request(request, state).await?;
        Ok(Self(text.lines().map(str::to_owned).collect()))
    }
}

impl LockResource for Lines {
    fn lock_keys(&self) -> LockKeys {
        self.0.iter().map(|line| ("line", line)).collect()
    }

    fn options(&self) -> LockOptions {
        LockOptions::default().wait(secs(self.0.len() as u64))
    }
}

#[tokio::test(start_paused = true)]
async fn locked_takes_extractors_of_the_program_with_their_options() {
    #[debug_handler(state = Redlock)]
    async fn handler(
        Query(_): Query<Vec<(String, String)>>,
        Locked(guard, lines): Locked<Lines>,
    ) -> String {
        format!("{} {}", guard.keys().len(), lines.0.len())
    }
    let (nodes, redlock) = three_nodes();
    let app = Router::new()
        .route("/", post(handler))
        .with_state(redlock.clone());
    let guard = redlock.lock(("line", "b")).await.unwrap();
    tokio::spawn(async move {
        sleep(secs(2)).await;
        drop(guard);
    });
    let answer = Answer::to(&app, request("text/plain", "a\nb\nb")).await;
    assert_eq!(answer.body, "2 3");
    until_free(&nodes).await;
}

/// With `at_most_once`, a handler that may have been called is never called again.
#[tokio::test(start_paused = true)]
async fn request_whose_locked_json_is_refused_has_not_called_its_handler() {
    let (_nodes, redlock) = three_nodes();
    let app = app(&redlock).layer(once(&redlock).at_most_once(true));
    let keyed = || {
        let mut request = transfer("a", "b");
        let key = "a1".parse().unwrap();
        request.headers_mut().insert("idempotency-key", key);
        request
    };
    let guard = redlock.lock(("account", "b")).await.unwrap();
    assert_eq!(Answer::to(&app, keyed()).await.code(), "lock-contended");
    guard.release().await.unwrap();
    let answer = Answer::to(&app, keyed()).await;
    assert_eq!(answer.text(), "a 2");
}
