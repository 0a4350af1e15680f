//! The task that executes a request and records its response.
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
//! 4. The response is recorded on a majority. Then the shares of the outer locks are dropped, and the response is
//!    returned, so that the outer layers release their locks before the client gets the response.
//!
//! If nothing is recorded, the state of the handler decides about the key:
//!
//! | handler | key |
//! |---|---|
//! | not called | released: a retry executes |
//! | answered, and the response is not to be recorded | released: the operation had no effect |
//! | stopped, failed, or panicked after it may have been called | locked until its ttl, because its effect is unknown |

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, response};
use http_body::Body;
use http_body_util::BodyExt;
use tower::{BoxError, Service};

use crate::idempotency::answer::Responder;
use crate::idempotency::body::{IdempotencyBody, IdempotencyRequestBody};
use crate::idempotency::codec::RecordContext;
use crate::idempotency::config::OnUnrecorded;
use crate::idempotency::stored::{self, CompleteResponse};
use crate::lock::LostReason;
use crate::middleware::{CallTracker, HandlerState, HeldLock, OnLost, Rejection};
use crate::node::{telemetry, unguessable};
use crate::once::{BeginError, Execution, Recorded};
use crate::protocol::{ExecutionId, Fingerprint};

/// A request that may be executed, and everything that its execution holds.
pub(super) struct ExecutionTask {
    pub(super) execution: Execution,
    /// Shares of the locks that outer layers hold for the request. They last as long as the execution, even if
    /// the client disconnects.
    pub(super) held: Vec<HeldLock>,
    /// The calls of the handler.
    pub(super) calls: Arc<CallTracker>,
    /// The calls that an outer idempotency layer tracks.
    pub(super) outer_calls: Option<Arc<CallTracker>>,
    pub(super) fingerprint: Fingerprint,
    pub(super) matched_no_route: bool,
    pub(super) is_answered: Arc<AtomicBool>,
    pub(super) responder: Responder,
}

/// The answer of the inner service, by how it is recorded.
enum Answered<B> {
    /// With its body.
    Whole(response::Parts, Bytes, Option<HeaderMap>),
    /// Without its body, which is too large.
    Large(response::Parts, B),
    /// Without its body, which failed while it was read.
    Broken(response::Parts, BoxError),
    /// Not at all.
    Unrecorded(Response<B>),
}

impl ExecutionTask {
    /// Executes the request, and records its response.
    ///
    /// A panic of the inner service drops this, which leaves the key locked until its ttl.
    pub(super) async fn run<S, ReqBody, ResBody>(
        mut self,
        mut inner: S,
        request: Request<IdempotencyRequestBody<ReqBody>>,
    ) -> Result<Response<IdempotencyBody<ResBody>>, S::Error>
    where
        S: Service<Request<IdempotencyRequestBody<ReqBody>>, Response = Response<ResBody>>,
        ResBody: Body<Data = Bytes>,
        ResBody::Error: Into<BoxError>,
    {
        let outer_calls = self.outer_calls.as_deref();
        let _measured = self.responder.config.retry_after.measure(None);
        let begun = self.execution.begin().await;
        // After `begin`, which may ask all nodes once more.
        let begun = begun.and_then(|()| {
            let expired = self.held.iter().find_map(HeldLock::check_expired);
            expired.map_or(Ok(()), |reason| Err(BeginError::Lost(reason)))
        });
        if let Err(reason) = begun {
            let responder = self.responder;
            self.execution.release().await;
            return Ok(match reason {
                BeginError::Lost(reason) => responder.refuse(Rejection::Lost(reason)),
                BeginError::Denied(denied) => responder.denied(denied, outer_calls).await,
            });
        }
        if let Some(outer_calls) = outer_calls {
            outer_calls.count_call();
        }
        let answering = answer(
            &mut inner,
            request,
            &self.responder,
            &self.calls,
            self.matched_no_route,
        );
        let max_hold = self.responder.config.options.max_hold;
        let handle = self.execution.handle();
        let answered = tokio::select! {
            biased;
            reason = first_lost(&mut self.held) => Err(reason),
            () = handle.reached_max_hold(max_hold) => Err(LostReason::MaxHold),
            answered = answering => Ok(answered),
        };
        self.is_answered.store(true, Ordering::Release);
        let state = match (self.calls.handler_state(), &answered) {
            (HandlerState::MaybeCalled, Err(_)) => HandlerState::Stopped,
            (state, _) => state,
        };
        if let Some(outer_calls) = outer_calls {
            outer_calls.correct(state);
        }
        match answered {
            Err(reason) => {
                let responder = self.responder;
                if state == HandlerState::NotCalled {
                    self.execution.release().await;
                } else {
                    tracing::error!(
                        %reason,
                        "idempotent execution stopped because its lock was lost; its key stays locked until its ttl"
                    );
                }
                Ok(responder.refuse(Rejection::Lost(reason)))
            }
            Ok(Err(error)) => {
                // Such as the error of a timeout: the handler may have had an effect by then.
                if state == HandlerState::NotCalled {
                    self.execution.release().await;
                }
                Err(error)
            }
            Ok(Ok(Answered::Unrecorded(response))) => {
                match state {
                    // An earlier call may have had an effect.
                    _ if self.calls.is_stopped() => drop(self.execution),
                    HandlerState::NotCalled => self.execution.release().await,
                    HandlerState::MaybeCalled => self.execution.release_without_effect().await,
                    HandlerState::Stopped => drop(self.execution),
                }
                Ok(response.map(IdempotencyBody::streaming))
            }
            Ok(Ok(answered)) => Ok(self.record(answered).await),
        }
    }

    /// Records the answer, and returns the response to it.
    async fn record<ResBody>(
        self,
        answered: Answered<ResBody>,
    ) -> Response<IdempotencyBody<ResBody>> {
        let Self {
            execution,
            held,
            fingerprint,
            responder,
            ..
        } = self;
        let config = &responder.config;
        let context = RecordContext {
            resource: &responder.resource,
            execution: ExecutionId::from_random(unguessable()),
            fingerprint,
        };
        let token = execution.handle().fencing_token();
        let codec = &config.codec;
        let (record, mut head, body) = match answered {
            Answered::Whole(head, bytes, trailers) => {
                let response = CompleteResponse {
                    head: &head,
                    body: &bytes,
                    trailers: trailers.as_ref(),
                    keep_cookies: config.keep_cookies,
                };
                let record = stored::with_response(context, token, &response, codec);
                (record, head, IdempotencyBody::whole(bytes, trailers))
            }
            Answered::Large(head, body) => {
                let record = stored::without_response(context, token, codec);
                (record, head, IdempotencyBody::streaming(body))
            }
            Answered::Broken(head, error) => {
                let record = stored::without_response(context, token, codec);
                (record, head, IdempotencyBody::broken(error))
            }
            Answered::Unrecorded(response) => return response.map(IdempotencyBody::streaming),
        };
        match execution.record(record, config.retention).await {
            Recorded::Yes => {}
            Recorded::Another(other) => {
                telemetry::conflict();
                tracing::warn!(
                    "idempotent request was executed twice; the outcome that was recorded first is answered"
                );
                // The response to another request is not for this client.
                if other.fingerprint() != fingerprint {
                    return responder.refuse(Rejection::ConflictingOutcomes);
                }
                return responder.replay(other).await;
            }
            Recorded::No => {
                telemetry::unrecorded();
                tracing::warn!(
                    "no majority recorded the outcome of an idempotent request; a retry may execute it again"
                );
                if config.on_unrecorded == OnUnrecorded::Fail {
                    return responder.refuse(Rejection::OutcomeUnknown);
                }
                head.headers
                    .insert(RECORDED, HeaderValue::from_static("false"));
            }
        }
        drop(held);
        Response::from_parts(head, body)
    }
}

/// Calls the inner service, and reads the part of its response that is to be recorded.
async fn answer<S, ReqBody, ResBody>(
    inner: &mut S,
    request: Request<IdempotencyRequestBody<ReqBody>>,
    responder: &Responder,
    calls: &CallTracker,
    matched_no_route: bool,
) -> Result<Answered<ResBody>, S::Error>
where
    S: Service<Request<IdempotencyRequestBody<ReqBody>>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes, Error: Into<BoxError>>,
{
    let config = &responder.config;
    let (head, body) = inner.call(request).await?.into_parts();
    let is_recorded = calls.handler_state() == HandlerState::MaybeCalled
        && config.is_recorded(&head, matched_no_route);
    if !is_recorded {
        return Ok(Answered::Unrecorded(Response::from_parts(head, body)));
    }
    let upper = body.size_hint().upper();
    // A record cannot keep an upgraded connection.
    let is_kept = head.status != StatusCode::SWITCHING_PROTOCOLS
        && upper.is_some_and(|upper| upper <= config.max_response_body as u64);
    if !is_kept {
        return Ok(Answered::Large(head, body));
    }
    Ok(match body.collect().await {
        Ok(collected) => {
            let trailers = collected.trailers().cloned();
            Answered::Whole(head, collected.to_bytes(), trailers)
        }
        // The request was executed all the same.
        Err(error) => Answered::Broken(head, error.into()),
    })
}

/// Waits until a lock is lost whose loss stops the execution; forever if there is none.
async fn first_lost(held: &mut [HeldLock]) -> LostReason {
    poll_fn(|context| {
        let mut aborting = held.iter_mut().filter(|held| held.on_lost == OnLost::Abort);
        match aborting.find_map(|held| held.check_lost(context)) {
            Some(reason) => Poll::Ready(reason),
            None => Poll::Pending,
        }
    })
    .await
}

/// Tells a client that its retry may execute again.
const RECORDED: HeaderName = HeaderName::from_static("idempotency-recorded");
