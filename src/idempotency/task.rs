//! The task that executes a request and records its response, and the answers to requests that are not executed.
//!
//! # Implementation details
//!
//! The execution runs in a task, so that a disconnect does not stop it. The order of its steps matters:
//!
//! 1. `begin` asks whether a record has arrived since the grant; a record decides instead. Then the locks of outer
//!    layers are checked by the clock.
//! 2. From here on, an outer idempotency layer counts the handler as called.
//! 3. The inner service runs until it answers, an outer lock is lost, or `max_hold` is over. The loss is checked
//!    first on each poll: a handler without its lock must not be polled again.
//! 4. The body of the response is read to its end, or to that of its message. If it may be kept, that is before the
//!    response is returned. Otherwise the task passes it on to the client, and reads on if the client leaves.
//! 5. The response is recorded on a majority. Then the shares of the outer locks are dropped, and the response, or the
//!    last frame of its body, is returned, so that the outer layers release their locks before the client gets it.
//!
//! If nothing is recorded, the state of the handler decides about the key:
//!
//! | handler | key |
//! |---|---|
//! | not called, as after an error of `LoadShed` | released: a retry executes |
//! | answered, and the response is not to be recorded | released: the operation had no effect |
//! | stopped, failed, or panicked after it may have been called | locked until its ttl, because its effect is unknown |

use std::any::Any;
use std::future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version, response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tower::load_shed::error::Overloaded;
use tower::{BoxError, Service};
use tracing::Instrument;

use crate::idempotency::codec::MALFORMED;
use crate::idempotency::config::Config;
use crate::idempotency::stored;
use crate::lock::{Denied, LockError, LostReason};
use crate::middleware::{
    CallTracker, HandlerState, HeldShare, LockBody, OnLost, Rejection, RequestKind, WholeBody,
    declared_length,
};
use crate::node::unguessable;
use crate::once::{ExecuteOnce, Execution, ExecutionHandle, report_conflict};
use crate::protocol::lease::{Decided, Effect};
use crate::protocol::{ExecutionId, KeyError, Record};

/// A request that may be executed, and everything that its execution holds.
pub(super) struct ExecutionTask {
    pub(super) execution: Execution,
    /// Shares of the locks that outer layers hold for the request. They last as long as the execution, even if
    /// the client disconnects.
    pub(super) held: Vec<HeldShare>,
    /// The calls of the handler.
    pub(super) calls: Arc<CallTracker>,
    pub(super) matched_no_route: bool,
    /// The version of the request, which says whether trailers may follow the length of a body.
    pub(super) version: Version,
    pub(super) is_answered: Arc<AtomicBool>,
    pub(super) responder: Responder,
}

/// The answer of the inner service.
enum Answered<B> {
    /// That of a layer, which did not call the handler.
    Refusal(Response<B>),
    /// With a body that is too large to be read before the response is returned.
    Streamed(Response<B>),
    /// With a body that was read to its end, or until it failed.
    Read(response::Parts, Result<WholeBody, BoxError>),
}

impl ExecutionTask {
    /// Executes the request, and records its response.
    ///
    /// A panic of the inner service drops this, which leaves the key locked until its ttl.
    pub(super) async fn run<S, ReqBody, ResBody>(
        mut self,
        mut inner: S,
        request: Request<ReqBody>,
    ) -> Result<Response<LockBody<ResBody>>, S::Error>
    where
        S: Service<Request<ReqBody>, Response = Response<ResBody>>,
        ResBody: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
        S::Error: 'static,
    {
        let outer_calls = self.responder.outer_calls.as_deref();
        let begun = self.execution.begin().await;
        // After `begin`, which may ask all nodes once more.
        let expired = self.held.iter().find_map(HeldShare::lost_reason);
        if let Err(denied) = begun.and_then(|()| expired.map(Denied::Lost).map_or(Ok(()), Err)) {
            self.execution.release(Effect::NotBegun).await;
            return Ok(self.responder.denied(denied).await);
        }
        if let Some(outer_calls) = outer_calls {
            outer_calls.count_call();
        }
        let began = Instant::now();
        let limit = self.responder.config.max_response_body as u64;
        let answering = async {
            let response = inner.call(request).await?;
            if self.calls.handler_state() != HandlerState::MaybeCalled {
                return Ok(Answered::Refusal(response));
            }
            let (body, upper) = (response.body(), response.body().size_hint().upper());
            if !body.is_end_stream() && upper.is_none_or(|upper| upper > limit) {
                return Ok(Answered::Streamed(response));
            }
            let (head, body) = response.into_parts();
            let read = body.collect().await.map(WholeBody::collected);
            Ok(Answered::Read(head, read.map_err(Into::into)))
        };
        let answered = until_stopped(&mut self.held, self.execution.handle(), began, answering);
        let answered = answered.await;
        // Relaxed: a layer that sends the request again has the answer, which orders this.
        self.is_answered.store(true, Ordering::Relaxed);
        let state = match (self.calls.handler_state(), &answered) {
            (HandlerState::MaybeCalled, Err(_)) => HandlerState::Stopped,
            (_, Ok(Err(error))) if self.calls.is_single() && is_shed(error) => {
                HandlerState::NotCalled
            }
            (state, _) => state,
        };
        match (state, outer_calls) {
            (HandlerState::NotCalled, Some(outer_calls)) => outer_calls.take_back(),
            (HandlerState::Stopped, Some(outer_calls)) => outer_calls.mark_stopped(),
            (HandlerState::MaybeCalled, _) | (_, None) => {}
        }
        let answer = match answered {
            Ok(Ok(Answered::Read(head, body))) => return Ok(self.finish(head, body).await),
            Ok(Ok(Answered::Streamed(response))) => return Ok(self.stream(response, began)),
            Ok(Ok(Answered::Refusal(response))) => Ok(response.map(LockBody::unlocked)),
            Ok(Err(error)) => Err(error),
            Err(reason) => {
                if state != HandlerState::NotCalled {
                    log_stopped(reason);
                }
                Ok(self.responder.refuse(Rejection::Lost(reason)))
            }
        };
        // Otherwise, such as after the error of a timeout, the handler may have had an effect.
        if state == HandlerState::NotCalled {
            self.execution.release(Effect::NotBegun).await;
        }
        answer
    }

    /// Ends the execution, and returns its response.
    async fn finish<B>(
        self,
        mut head: response::Parts,
        body: Result<WholeBody, BoxError>,
    ) -> Response<LockBody<B>> {
        let config = &self.responder.config;
        let is_recorded = config.is_recorded(&head, self.matched_no_route);
        // Without its body, the request was executed all the same.
        let read = body.as_ref().ok();
        // A record cannot keep an upgraded connection.
        let kept = read.filter(|_| head.status != StatusCode::SWITCHING_PROTOCOLS);
        let kept = kept.map(|body| (&head, body));
        let trailers = read.and_then(|body| body.trailers.as_ref());
        match self.conclude(is_recorded, trailers, kept).await {
            Ok(true) => {}
            Ok(false) => drop(head.headers.insert(RECORDED, NOT_RECORDED)),
            Err(other) => return other,
        }
        let body = body.map_or_else(broken, LockBody::boxed);
        Response::from_parts(head, body)
    }

    /// Returns a response, and passes its body on to the client in a task, which reads it to its end also without the
    /// client, and ends the execution with it.
    ///
    /// The client does not see the end before: the frames that end the message are held back, which are those that
    /// complete its length or report its end, and the trailers.
    fn stream<B>(mut self, response: Response<B>, began: Instant) -> Response<LockBody<B>>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let (mut head, body) = response.into_parts();
        let config = &self.responder.config;
        let is_recorded = config.is_recorded(&head, self.matched_no_route);
        if let Some(size) = body.size_hint().exact() {
            // The body that is passed on does not know its size.
            head.headers.entry(CONTENT_LENGTH).or_insert(size.into());
        }
        let mut length = declared_length(&head.headers);
        // In HTTP/1, trailers follow chunks only (RFC 9112, section 6.3): here the message is complete, although its body may
        // linger, or go on. A proxy may have made a gRPC call of it.
        let has_trailers =
            self.version >= Version::HTTP_2 || self.responder.kind == RequestKind::Grpc;
        let (client, passed_on) = executing();
        let sending = async move {
            let mut last = Vec::new();
            let reading = async {
                // Dropped with its end, while the locks are held.
                let mut body = pin!(body);
                while !body.is_end_stream() && (has_trailers || length != Some(0)) {
                    let frame = body.frame().await.transpose().map_err(Into::into)?;
                    let Some(frame) = frame else { break };
                    let size = frame.data_ref().map_or(0, |data| data.len() as u64);
                    if has_trailers && length.is_some_and(|left| left < size) {
                        // There may be much more of it.
                        return Err("the body is longer than its length".into());
                    }
                    length = length.map(|left| left.saturating_sub(size));
                    let ends = length == Some(0) || body.is_end_stream();
                    if frame.is_trailers() || (ends && last.is_empty()) {
                        last.push(frame);
                    } else if last.is_empty() {
                        // The client may be gone.
                        drop(client.send(Ok(Some(frame))).await);
                    }
                }
                Ok::<_, BoxError>(())
            };
            let read = until_stopped(&mut self.held, self.execution.handle(), began, reading);
            let Ok(read) = read.await.map_err(log_stopped) else {
                return;
            };
            let trailers = last.last().and_then(Frame::trailers_ref);
            let concluded = self.conclude::<B>(is_recorded, trailers, None).await;
            // Another response cannot be sent any more.
            if concluded.is_ok() {
                for frame in last {
                    drop(client.send(Ok(Some(frame))).await);
                }
                drop(client.send(read.map(|()| None)).await);
            }
        };
        tokio::spawn(sending.in_current_span());
        Response::from_parts(head, passed_on)
    }

    /// Ends the execution with a record of its response, or without one. Returns false if there should be a record, and no
    /// majority has accepted it.
    ///
    /// # Errors
    ///
    /// Returns the response to return in its place.
    async fn conclude<B>(
        self,
        is_recorded: bool,
        trailers: Option<&HeaderMap>,
        response: Option<(&response::Parts, &WholeBody)>,
    ) -> Result<bool, Response<LockBody<B>>> {
        let responder = &self.responder;
        let Responder { config, once, .. } = responder;
        if !is_recorded || !config.is_recorded_with(trailers) {
            // An earlier call may have had an effect.
            if !self.calls.is_stopped() {
                self.execution.release(Effect::WithoutEffect).await;
            }
            return Ok(true);
        }
        let ids = (ExecutionId::from_random(unguessable()), once.fingerprint);
        let token = self.execution.handle().fencing_token();
        let record = stored::record(&once.key, ids, token, response, &config.codec);
        match once.conclude(self.execution, &record).await {
            Ok(()) => Ok(true),
            Err(Some(Decided::Recorded(other))) => Err(responder.replay(&other).await),
            Err(Some(decided)) => Err(responder.denied(Denied::Decided(decided)).await),
            Err(None) if config.require_record => Err(responder.refuse(Rejection::OutcomeUnknown)),
            Err(None) => Ok(false),
        }
    }
}

/// A frame, `None` for the end of the body, or the error that ends it. Without these two, the execution was stopped.
type PassedOn = Result<Option<Frame<Bytes>>, BoxError>;

/// Creates a body that an execution passes on. If the execution is stopped, or its outcome is not this response, the body
/// ends with an error.
fn executing<B>() -> (mpsc::Sender<PassedOn>, LockBody<B>) {
    let (sender, mut frames) = mpsc::channel::<PassedOn>(1);
    let passed_on = stream::poll_fn(move |context| {
        let stopped = || Err("the execution of the request was stopped".into());
        let next = frames.poll_recv(context);
        next.map(|next| next.unwrap_or_else(stopped).transpose())
    });
    (sender, LockBody::boxed(StreamBody::new(passed_on.fuse())))
}

/// Creates the body of a response whose inner body failed while it was read to be recorded.
fn broken<B>(error: BoxError) -> LockBody<B> {
    LockBody::boxed(StreamBody::new(stream::iter([Err(error)])))
}

/// Answers one request that is not executed.
pub(super) struct Responder {
    pub(super) config: Arc<Config>,
    pub(super) once: ExecuteOnce,
    pub(super) kind: RequestKind,
    /// The calls that an outer idempotency layer tracks.
    pub(super) outer_calls: Option<Arc<CallTracker>>,
}

impl Responder {
    /// Answers a request that must not be executed.
    pub(super) async fn denied<B>(&self, denied: Denied) -> Response<LockBody<B>> {
        self.refuse(match denied {
            Denied::Decided(Decided::Recorded(record)) => {
                // To an outer idempotency layer, the replay is a response of the handler.
                if let Some(outer_calls) = &self.outer_calls {
                    outer_calls.count_call();
                }
                return self.replay(&record).await;
            }
            Denied::Lock(error) => not_executed(error),
            Denied::Lost(reason) => Rejection::Lost(reason),
            // Not decided yet, so the client may retry.
            Denied::Decided(Decided::Undecided) => Rejection::InProgress,
            Denied::Decided(Decided::OtherRequest) => Rejection::KeyReused,
            Denied::Decided(Decided::Unknown) => Rejection::OutcomeUnknown,
            Denied::Decided(Decided::Conflicting) => {
                report_conflict();
                Rejection::ConflictingOutcomes
            }
        })
    }

    pub(super) fn refuse<B>(&self, rejection: Rejection) -> Response<LockBody<B>> {
        let refusal = self.config.refusals.refuse(rejection, self.kind);
        refusal.map(LockBody::boxed)
    }

    /// Answers with a recorded response, which any server may have recorded.
    pub(super) async fn replay<B>(&self, record: &Record) -> Response<LockBody<B>> {
        let Self { config, once, .. } = self;
        let replay = |whole: Record| stored::replay(&whole, &once.key, &config.codec);
        let whole = once.read(record).await;
        let replayed = whole.map(|whole| whole.ok_or(MALFORMED).and_then(replay));
        self.refuse(match replayed {
            Ok(Ok(Some(mut response))) => {
                let headers = response.headers_mut();
                headers.insert(REPLAYED, HeaderValue::from_static("true"));
                return response;
            }
            Ok(Ok(None)) => Rejection::ResultNotKept,
            Ok(Err(why)) => {
                // For the log; clients get a text without it.
                let what = format!("a recorded response is unreadable: {why}");
                Rejection::Misconfigured(KeyError::misconfigured(what))
            }
            Err(error) => not_executed(error),
        })
    }
}

/// Converts an error of the lock under which a request is executed.
fn not_executed(error: LockError) -> Rejection {
    match error {
        LockError::Contended { .. } => Rejection::InProgress,
        error => error.into(),
    }
}

/// Runs a part of an execution, unless it is stopped by the loss of a lock or at its `max_hold`.
async fn until_stopped<T>(
    held: &mut [HeldShare],
    execution: ExecutionHandle,
    began: Instant,
    running: impl Future<Output = T>,
) -> Result<T, LostReason> {
    // Of those whose loss stops the handler; forever if there is none.
    let first_lost = future::poll_fn(|context| {
        let mut aborting = held.iter_mut().filter(|held| held.on_lost == OnLost::Abort);
        let lost = aborting.find_map(|held| held.check_lost(context));
        lost.map_or(Poll::Pending, Poll::Ready)
    });
    tokio::select! {
        biased;
        reason = first_lost => Err(reason),
        () = execution.reached_max_hold(began) => Err(LostReason::MaxHold),
        ended = running => Ok(ended),
    }
}

/// Returns whether an error says that `LoadShed` did not call its inner service.
fn is_shed<E: 'static>(error: &E) -> bool {
    let error = (error as &dyn Any).downcast_ref::<BoxError>();
    error.is_some_and(|error| error.is::<Overloaded>())
}

fn log_stopped(reason: LostReason) {
    tracing::error!(
        %reason,
        "idempotent execution stopped because its lock was lost; its key stays locked until its ttl"
    );
}

/// Tells a client that its retry may execute again.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
const RECORDED: HeaderName = HeaderName::from_static("idempotency-recorded");

const NOT_RECORDED: HeaderValue = HeaderValue::from_static("false");
