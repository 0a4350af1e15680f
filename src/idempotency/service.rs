//! The service: executes once, and replays.

use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, response};
use http_body::Body;
use http_body_util::{BodyExt, Full, Limited};
use pin_project::pin_project;
use tower::{BoxError, Service, ServiceExt};

use crate::idempotency::body::{IdempotencyBody, IdempotencyRequestBody};
use crate::idempotency::layer::{Answered, Asked, Config, Executing, OnUnrecorded};
use crate::idempotency::stored::{self, NoReplay};
use crate::lock::{LockError, Lost, LostReason};
use crate::middleware::{
    BufferedRequestBody, HeldLock, LockHandles, OnLost, Passage, Passages, Reached, Rejection,
    RequestKind, Taken, unread,
};
use crate::node::{telemetry, unguessable};
use crate::once::{BeginError, Denied, Execution, Recorded, run_to_end};
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
                Passage::refuse(&parts.extensions);
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
    S: Service<Request<IdempotencyRequestBody<ReqBody>>, Response = Response<ResBody>>
        + Send
        + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    ReqBody: Body<Data = Bytes> + Send + 'static,
    ReqBody::Error: Into<BoxError>,
    ResBody: Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    // Until the handler may have been called, all that follows is a refusal for a layer outside.
    let outside = Passage::take(&mut parts.extensions);
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
    let execution = match once.acquire().await {
        Ok(execution) => execution,
        Err(reason) => return Ok(answer.not_granted(reason, outside.as_ref()).await),
    };
    if let Err(error) = inner.ready().await {
        // Before the error is answered: a retry must not meet the lock of the request that it repeats.
        execution.release().await;
        return Err(error);
    }
    let handle = execution.handle();
    let mut executing = Executing::of(&parts.extensions);
    let answered = executing.push(handle.clone());
    parts.extensions.insert(executing);
    parts.extensions.insert(handle);
    parts.extensions.insert(asked.key);
    let passages = Passages::default();
    passages.open(&mut parts.extensions);
    let held = parts.extensions.get::<LockHandles>();
    let held = held.map(LockHandles::share).unwrap_or_default();
    let request = Request::from_parts(parts, IdempotencyRequestBody::read(body));
    let granted = Granted {
        execution,
        held,
        passages,
        outside,
        asked_for,
        matched_no_route: asked.matched_no_route,
        answered,
        answer,
    };
    run_to_end(granted.execute(inner, request)).await
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

/// A request that may be executed, and all that its execution holds.
struct Granted {
    execution: Execution,
    /// Shares of the locks that layers outside hold for the request. They last as long as the execution,
    /// whatever becomes of the client and of those layers.
    held: Vec<HeldLock>,
    /// What the layers and extractors within do with the calls of the handler.
    passages: Passages,
    /// The same for an idempotency layer outside.
    outside: Option<Taken>,
    asked_for: Fingerprint,
    matched_no_route: bool,
    answered: Answered,
    answer: Answer,
}

/// What the inner service answered.
enum Produced<B> {
    /// To be recorded with this body.
    Whole(response::Parts, Bytes, Option<HeaderMap>),
    /// To be recorded without its body, which cannot be kept.
    Large(response::Parts, B),
    /// The same; the body broke off while it was read.
    Broken(response::Parts, BoxError),
    /// Not to be recorded.
    Unrecorded(Response<B>),
}

impl Granted {
    /// Executes and records, in a task of its own.
    ///
    /// The locks that are held are given back before the outcome is: the layers outside release theirs in
    /// order then, and the client does not meet them with its next request. Dropped by a panic of the
    /// inner service, this leaves the key locked until its ttl.
    async fn execute<S, ReqBody, ResBody>(
        self,
        mut inner: S,
        request: Request<IdempotencyRequestBody<ReqBody>>,
    ) -> Outcome<ResBody, S::Error>
    where
        S: Service<Request<IdempotencyRequestBody<ReqBody>>, Response = Response<ResBody>>,
        ResBody: Body<Data = Bytes>,
        ResBody::Error: Into<BoxError>,
    {
        let begun = self.execution.begin().await;
        // Behind that: to begin may take as long as to ask all nodes once more.
        let begun = begun.and_then(|()| match self.held_is_over() {
            Some(reason) => Err(BeginError::Lost(reason)),
            None => Ok(()),
        });
        if let Err(reason) = begun {
            let answer = self.answer;
            self.execution.release().await;
            return Ok(match reason {
                BeginError::Lost(reason) => answer.refuse(Rejection::Lost(reason)),
                BeginError::Denied(reason) => {
                    answer.not_granted(reason, self.outside.as_ref()).await
                }
            });
        }
        if let Some(outside) = &self.outside {
            outside.reached();
        }
        let produced = tokio::select! {
            biased;
            // First: once a lock is lost, the handler must not be polled again.
            reason = self.stopped() => Err(reason),
            produced = self.produce(&mut inner, request) => Ok(produced),
        };
        self.answered.set();
        let reached = match (self.passages.reached(), &produced) {
            (Reached::Perhaps, Err(_)) => Reached::Stopped,
            (reached, _) => reached,
        };
        if let Some(outside) = &self.outside {
            outside.follow(reached);
        }
        match produced {
            Err(reason) => {
                let answer = self.answer;
                if reached == Reached::No {
                    self.execution.release().await;
                } else {
                    tracing::error!(
                        %reason,
                        "an idempotent execution was stopped midway; its key stays locked until its ttl"
                    );
                }
                Ok(answer.refuse(Rejection::Lost(reason)))
            }
            Ok(Err(error)) => {
                // A timeout, say: what the handler did by then is not known.
                if reached == Reached::No {
                    self.execution.release().await;
                }
                Err(error)
            }
            Ok(Ok(Produced::Unrecorded(response))) => {
                match reached {
                    // A call before this one may have had an effect.
                    _ if self.passages.was_stopped() => drop(self.execution),
                    Reached::No => self.execution.release().await,
                    Reached::Perhaps => self.execution.release_without_effect().await,
                    Reached::Stopped => drop(self.execution),
                }
                Ok(response.map(IdempotencyBody::streaming))
            }
            Ok(Ok(produced)) => Ok(self.record(produced).await),
        }
    }

    /// Calls the inner service, and reads of its response what is to be recorded.
    async fn produce<S, ReqBody, ResBody>(
        &self,
        inner: &mut S,
        request: Request<IdempotencyRequestBody<ReqBody>>,
    ) -> Result<Produced<ResBody>, S::Error>
    where
        S: Service<Request<IdempotencyRequestBody<ReqBody>>, Response = Response<ResBody>>,
        ResBody: Body<Data = Bytes>,
        ResBody::Error: Into<BoxError>,
    {
        let config = &self.answer.config;
        let (head, body) = inner.call(request).await?.into_parts();
        if self.passages.reached() != Reached::Perhaps
            || !config.is_recorded(&head, self.matched_no_route)
        {
            return Ok(Produced::Unrecorded(Response::from_parts(head, body)));
        }
        let upper = body.size_hint().upper();
        // What becomes of the connection is the better part of an upgrade, and is in no record.
        let fits = head.status != StatusCode::SWITCHING_PROTOCOLS
            && upper.is_some_and(|upper| upper <= config.max_response_body as u64);
        if !fits {
            return Ok(Produced::Large(head, body));
        }
        Ok(match body.collect().await {
            Ok(collected) => {
                let trailers = collected.trailers().cloned();
                Produced::Whole(head, collected.to_bytes(), trailers)
            }
            // It was executed all the same.
            Err(error) => Produced::Broken(head, error.into()),
        })
    }

    /// Records what was executed, and answers.
    async fn record<ResBody>(
        self,
        produced: Produced<ResBody>,
    ) -> Response<IdempotencyBody<ResBody>> {
        let Self {
            execution,
            held,
            asked_for,
            answer,
            ..
        } = self;
        let config = &answer.config;
        let executed = stored::Executed {
            resource: &answer.resource,
            execution: ExecutionId::from_random(unguessable()),
            fingerprint: asked_for,
            token: execution.handle().fencing_token(),
        };
        let codec = &config.codec;
        let (record, mut head, body) = match produced {
            Produced::Whole(head, bytes, trailers) => {
                let outcome = stored::Outcome {
                    head: &head,
                    body: &bytes,
                    trailers: trailers.as_ref(),
                    keep_cookies: config.keep_cookies,
                };
                let record = stored::kept(executed, &outcome, codec);
                (record, head, IdempotencyBody::whole(bytes, trailers))
            }
            Produced::Large(head, body) => {
                let record = stored::not_kept(executed, codec);
                (record, head, IdempotencyBody::streaming(body))
            }
            Produced::Broken(head, error) => {
                let record = stored::not_kept(executed, codec);
                (record, head, IdempotencyBody::broken(error))
            }
            Produced::Unrecorded(response) => return response.map(IdempotencyBody::streaming),
        };
        match execution.record(record, config.retention).await {
            Recorded::Yes => {}
            Recorded::Another(other) => {
                telemetry::conflict();
                tracing::warn!(
                    "an idempotent request was executed twice; the outcome that was recorded first is answered"
                );
                // The response to another request is not for the client that made this one.
                if other.fingerprint() != asked_for {
                    return answer.refuse(Rejection::ConflictingOutcomes);
                }
                return answer.replay(other).await;
            }
            Recorded::No => {
                telemetry::unrecorded();
                tracing::warn!(
                    "the outcome of an idempotent request could not be recorded; a retry may execute it again"
                );
                if config.on_unrecorded == OnUnrecorded::Fail {
                    return answer.refuse(Rejection::OutcomeUnknown);
                }
                head.headers
                    .insert(RECORDED, HeaderValue::from_static("false"));
            }
        }
        drop(held);
        Response::from_parts(head, body)
    }

    /// Waits until the execution must not go on; for ever, if nothing ends it.
    async fn stopped(&self) -> LostReason {
        let aborting = self
            .held
            .iter()
            .filter(|held| held.on_lost == OnLost::Abort);
        let mut lost: Vec<Lost> = aborting.map(|held| held.guard.lost()).collect();
        let first_lost = poll_fn(|context| {
            let polled = lost.iter_mut().map(|lost| Pin::new(lost).poll(context));
            polled.fold(
                Poll::Pending,
                |first, next| if first.is_ready() { first } else { next },
            )
        });
        let handle = self.execution.handle();
        tokio::select! {
            biased;
            reason = first_lost => reason,
            () = handle.reached_max_hold(self.answer.config.options.max_hold) => LostReason::MaxHold,
        }
    }

    /// Looks by the clock whether a lock that the request holds is over: then its handler must not begin.
    fn held_is_over(&self) -> Option<LostReason> {
        let is_valid = self.held.iter().all(|held| held.guard.is_valid());
        (!is_valid).then_some(LostReason::Expired)
    }
}

/// What is needed to answer without executing.
struct Answer {
    config: Arc<Config>,
    resource: LockKey,
    kind: RequestKind,
}

impl Answer {
    /// Answers a request that is not to be executed.
    async fn not_granted<B>(
        &self,
        reason: Denied,
        outside: Option<&Taken>,
    ) -> Response<IdempotencyBody<B>> {
        match reason {
            Denied::Recorded(record) => {
                // For a layer outside this is the handler's response.
                if let Some(outside) = outside {
                    outside.reached();
                }
                return self.replay(record).await;
            }
            Denied::Conflicting => {
                telemetry::conflict();
                tracing::error!(
                    "an idempotent request was executed more than once, with outcomes that no majority agrees on"
                );
            }
            _ => {}
        }
        self.refuse(refusal(reason))
    }

    fn refuse<B>(&self, rejection: Rejection) -> Response<IdempotencyBody<B>> {
        let refusal = self.config.refusals.refuse(rejection, self.kind);
        refusal.map(IdempotencyBody::refusal)
    }

    /// Answers with what was recorded, by whomever.
    async fn replay<B>(&self, record: Record) -> Response<IdempotencyBody<B>> {
        let read = |record: &Record| stored::replay(record, &self.resource, &self.config.codec);
        let once = self.config.redlock.once(self.resource.clone());
        let rest = once.fetch(&record);
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

fn refusal(reason: Denied) -> Rejection {
    match reason {
        Denied::Lock(error) => Rejection::of(error, StatusCode::CONFLICT),
        // Nothing is decided, or nothing can be told: come back.
        Denied::Undecided | Denied::Recorded(_) => Rejection::of(
            LockError::Contended { retry_after: None },
            StatusCode::CONFLICT,
        ),
        Denied::OtherRequest => Rejection::KeyReused,
        Denied::Conflicting => Rejection::ConflictingOutcomes,
        Denied::Unknown => Rejection::OutcomeUnknown,
    }
}

/// Tells a client that its retry may execute again.
const RECORDED: HeaderName = HeaderName::from_static("idempotency-recorded");
