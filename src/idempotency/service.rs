//! The service: executes once, and replays.

use std::fmt;
use std::future::Future;
use std::mem;
use std::panic;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full, Limited};
use pin_project::pin_project;
use tower::{BoxError, Service, ServiceExt};
use tracing::Instrument;

use crate::idempotency::body::{IdempotencyBody, IdempotencyRequestBody};
use crate::idempotency::layer::{Asked, Config, OnUnrecorded};
use crate::idempotency::stored::{self, NoReplay};
use crate::lock::{Execution, LockError, NotGranted, Recorded};
use crate::middleware::{BufferedRequestBody, LockHandles, Rejection, RequestKind, unread};
use crate::node::{telemetry, unguessable};
use crate::protocol::{ExecutionId, Fingerprint, KeyError, LockKey, Record};

/// Middleware that executes a request once per idempotency key, and replays its response.
///
/// Made by [`IdempotencyLayer`](crate::IdempotencyLayer); see there for an example.
#[derive(Clone)]
pub struct IdempotencyService<S> {
    inner: S,
    config: Arc<Config>,
}

impl<S> IdempotencyService<S> {
    pub(super) fn new(inner: S, config: Arc<Config>) -> Self {
        Self { inner, config }
    }

    /// Returns a reference to the inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns a mutable reference to the inner service.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for IdempotencyService<S>
where
    S: Service<Request<IdempotencyRequestBody<ReqBody>>, Response = Response<ResBody>>
        + Clone
        + Send
        + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    ReqBody: Body<Data = Bytes> + Send + 'static,
    ReqBody::Error: Into<BoxError>,
    ResBody: Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    type Response = Response<IdempotencyBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, ResBody, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let kind = match self.config.asked(&parts) {
            Ok(None) => {
                let body = IdempotencyRequestBody::untouched(body);
                Kind::Passing(self.inner.call(Request::from_parts(parts, body)))
            }
            Ok(Some(asked)) => {
                // Reading the body and asking the nodes may take long: what readiness holds back from
                // others is given back, and asked for again before the inner service is called.
                let clone = self.inner.clone();
                drop(mem::replace(&mut self.inner, clone));
                let (inner, config) = (self.inner.clone(), Arc::clone(&self.config));
                Kind::Idempotent(Box::pin(serve(inner, config, asked, parts, body)))
            }
            Err(rejection) => {
                let refusal = self
                    .config
                    .refusals
                    .refuse(rejection, RequestKind::of(&parts));
                Kind::Refused(Some(refusal))
            }
        };
        ResponseFuture { kind }
    }
}

impl<S: fmt::Debug> fmt::Debug for IdempotencyService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyService")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

/// Response future of [`IdempotencyService`].
///
/// # Design
///
/// A box, unlike the future of the lock layer: what it waits for runs in a task of its own, so all that
/// a box would ask for is asked for already.
#[pin_project]
pub struct ResponseFuture<F, B, E> {
    #[pin]
    kind: Kind<F, B, E>,
}

#[pin_project(project = KindProjection)]
enum Kind<F, B, E> {
    Passing(#[pin] F),
    Idempotent(Pin<Box<dyn Future<Output = Outcome<B, E>> + Send>>),
    Refused(Option<Response<Full<Bytes>>>),
}

type Outcome<B, E> = Result<Response<IdempotencyBody<B>>, E>;

impl<F, B, E> Future for ResponseFuture<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Outcome<B, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProjection::Passing(inner) => {
                let response = inner.poll(context);
                response.map_ok(|response| response.map(IdempotencyBody::streaming))
            }
            KindProjection::Idempotent(serving) => serving.as_mut().poll(context),
            KindProjection::Refused(refusal) => {
                let refusal = refusal
                    .take()
                    .expect("a future is not polled after its end");
                Poll::Ready(Ok(refusal.map(IdempotencyBody::refusal)))
            }
        }
    }
}

impl<F, B, E> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

/// Serves a request that has a key. Dropped before the inner service is called, it leaves nothing; from
/// then on the execution goes on without it.
async fn serve<S, ReqBody, ResBody>(
    mut inner: S,
    config: Arc<Config>,
    asked: Asked,
    mut parts: Parts,
    body: ReqBody,
) -> Outcome<ResBody, S::Error>
where
    S: Service<Request<IdempotencyRequestBody<ReqBody>>, Response = Response<ResBody>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    ReqBody: Body<Data = Bytes>,
    ReqBody::Error: Into<BoxError>,
    ResBody: Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    let answer = Answer {
        config,
        resource: asked.resource,
        kind: RequestKind::of(&parts),
    };
    let config = &answer.config;
    let body = match read(body, config.max_request_body).await {
        Ok(body) => body,
        Err(rejection) => return Ok(answer.refuse(rejection)),
    };
    let asked_for = config.fingerprint_of(&parts, body.bytes());
    let once = config.once(answer.resource.clone(), asked_for);
    let execution = match config.redlock.once(once).await {
        Ok(execution) => execution,
        Err(NotGranted::Done(record)) => return Ok(answer.replay(record).await),
        Err(reason) => {
            if matches!(reason, NotGranted::Conflicting) {
                telemetry::conflict();
                tracing::error!(
                    "an idempotent request was executed more than once, with outcomes that no majority agrees on"
                );
            }
            return Ok(answer.refuse(refusal(reason)));
        }
    };
    inner.ready().await?;
    let handle = execution.handle();
    LockHandles::of(&mut parts.extensions).add(&handle);
    parts.extensions.insert(handle);
    parts.extensions.insert(asked.key);
    if let Err(reason) = execution.begin() {
        return Ok(answer.refuse(Rejection::Lost(reason)));
    }
    let request = Request::from_parts(parts, IdempotencyRequestBody::read(body));
    let executing = execute(inner.call(request), execution, asked_for, answer);
    match tokio::spawn(executing.in_current_span()).await {
        Ok(outcome) => outcome,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => panic::resume_unwind(panic),
            // The runtime is shutting down, and this future with it.
            Err(_) => std::future::pending().await,
        },
    }
}

/// Reads the body of a request, which is part of what it asks for.
async fn read<B>(body: B, limit: usize) -> Result<BufferedRequestBody, Rejection>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    if body.size_hint().lower() > limit as u64 {
        return Err(Rejection::BodyTooLarge);
    }
    let collected = Limited::new(body, limit).collect().await;
    let collected = collected.map_err(|error| unread(&*error))?;
    let trailers = collected.trailers().cloned();
    Ok(BufferedRequestBody::new(collected.to_bytes(), trailers))
}

/// Waits for the response of the inner service, and records it.
///
/// Dropped by a panic of that, it gives the key back.
async fn execute<F, B, E>(
    running: F,
    execution: Execution,
    asked_for: Fingerprint,
    answer: Answer,
) -> Outcome<B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let config = &answer.config;
    // In both cases before the answer: whoever retries must not meet the lock of what it retries.
    let (mut head, body) = match running.await {
        Ok(response) => response.into_parts(),
        Err(error) => {
            execution.release().await;
            return Err(error);
        }
    };
    if !config.is_recorded(&head) {
        execution.release().await;
        let body = IdempotencyBody::streaming(body);
        return Ok(Response::from_parts(head, body));
    }
    let executed = stored::Executed {
        resource: &answer.resource,
        execution: ExecutionId::from_random(unguessable()),
        fingerprint: asked_for,
        token: execution.handle().fencing_token(),
    };
    let codec = &config.codec;
    let upper = body.size_hint().upper();
    // What becomes of the connection is the better part of an upgrade, and is in no record.
    let fits = head.status != StatusCode::SWITCHING_PROTOCOLS
        && upper.is_some_and(|upper| upper <= config.max_response_body as u64);
    let (record, body) = if fits {
        match body.collect().await {
            Ok(collected) => {
                let trailers = collected.trailers().cloned();
                let bytes = collected.to_bytes();
                let outcome = stored::Outcome {
                    head: &head,
                    body: &bytes,
                    trailers: trailers.as_ref(),
                    keep_cookies: config.keep_cookies,
                };
                let record = stored::kept(executed, &outcome, codec);
                (record, IdempotencyBody::whole(bytes, trailers))
            }
            // It was executed all the same.
            Err(error) => {
                let record = stored::not_kept(executed, codec);
                (record, IdempotencyBody::broken(error.into()))
            }
        }
    } else {
        let record = stored::not_kept(executed, codec);
        (record, IdempotencyBody::streaming(body))
    };
    match execution.record(record, config.retention).await {
        Recorded::Yes => {}
        Recorded::Another(other) => {
            telemetry::conflict();
            tracing::warn!(
                "an idempotent request was executed twice; the outcome that was recorded first is answered"
            );
            // The response to another request is not for whoever made this one.
            if other.fingerprint() != asked_for {
                return Ok(answer.refuse(Rejection::ConflictingOutcomes));
            }
            return Ok(answer.replay(other).await);
        }
        Recorded::No => {
            telemetry::unrecorded();
            tracing::warn!(
                "the outcome of an idempotent request could not be recorded; a retry may execute it again"
            );
            if config.on_unrecorded == OnUnrecorded::Fail {
                return Ok(answer.refuse(Rejection::OutcomeUnknown));
            }
            head.headers
                .insert(RECORDED, HeaderValue::from_static("false"));
        }
    }
    Ok(Response::from_parts(head, body))
}

/// What is needed to answer without executing.
struct Answer {
    config: Arc<Config>,
    resource: LockKey,
    kind: RequestKind,
}

impl Answer {
    fn refuse<B>(&self, rejection: Rejection) -> Response<IdempotencyBody<B>> {
        let refusal = self.config.refusals.refuse(rejection, self.kind);
        refusal.map(IdempotencyBody::refusal)
    }

    /// Answers with what was recorded, by whomever.
    async fn replay<B>(&self, record: Record) -> Response<IdempotencyBody<B>> {
        let read = |record: &Record| stored::replay(record, &self.resource, &self.config.codec);
        let rest = self.config.redlock.rest_of(&self.resource, &record);
        let replayed = if record.is_whole() {
            match read(&record) {
                // Of a damaged copy there is a better one elsewhere.
                Err(NoReplay::Unreadable(why)) => match rest.await {
                    Ok(other) => read(&other),
                    Err(_) => Err(NoReplay::Unreadable(why)),
                },
                replayed => replayed,
            }
        } else {
            match rest.await {
                Ok(whole) => read(&whole),
                Err(error) => return self.refuse(Rejection::of(error, StatusCode::CONFLICT)),
            }
        };
        match replayed {
            Ok(mut response) => {
                let name = self.config.replay_header.clone();
                let headers = response.headers_mut();
                headers.insert(name, HeaderValue::from_static("true"));
                response
            }
            Err(NoReplay::NotKept) => self.refuse(Rejection::ResultNotKept),
            Err(NoReplay::Unreadable(why)) => {
                tracing::error!(%why, "the recorded response of an idempotent request cannot be read");
                let what = KeyError::misconfigured("a recorded response cannot be read");
                self.refuse(Rejection::Misconfigured(what))
            }
        }
    }
}

fn refusal(reason: NotGranted) -> Rejection {
    match reason {
        NotGranted::Lock(error) => Rejection::of(error, StatusCode::CONFLICT),
        // Nothing is decided, or nothing can be told: come back.
        NotGranted::Undecided | NotGranted::Done(_) => Rejection::of(
            LockError::Contended { retry_after: None },
            StatusCode::CONFLICT,
        ),
        NotGranted::OtherRequest => Rejection::KeyReused,
        NotGranted::Conflicting => Rejection::ConflictingOutcomes,
        NotGranted::Unknown => Rejection::OutcomeUnknown,
    }
}

/// Tells a client that its retry may execute again.
const RECORDED: HeaderName = HeaderName::from_static("idempotency-recorded");
