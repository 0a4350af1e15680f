//! Answers to requests that are not executed: refusals and replays.

use std::sync::Arc;

use http::{HeaderValue, Response};

use crate::idempotency::body::IdempotencyBody;
use crate::idempotency::config::Config;
use crate::idempotency::stored;
use crate::lock::LockError;
use crate::middleware::{CallTracker, Rejection, RequestKind};
use crate::node::telemetry;
use crate::once::{Denied, ExecuteOnce};
use crate::protocol::lease::Decided;
use crate::protocol::{KeyError, Record};

/// Answers one request that is not executed.
pub(super) struct Responder {
    pub(super) config: Arc<Config>,
    pub(super) once: ExecuteOnce,
    pub(super) kind: RequestKind,
}

impl Responder {
    /// Answers a request that must not be executed.
    pub(super) async fn denied<B>(
        &self,
        denied: Denied,
        outer_calls: Option<&CallTracker>,
    ) -> Response<IdempotencyBody<B>> {
        self.refuse(match denied {
            Denied::Decided(Decided::Recorded(record)) => {
                // To an outer idempotency layer, the replay is a response of the handler.
                if let Some(outer_calls) = outer_calls {
                    outer_calls.count_call();
                }
                return self.replay(&record).await;
            }
            Denied::Lock(error) => self.not_executed(error),
            Denied::Lost(reason) => Rejection::Lost(reason),
            // Not decided yet, so the client may retry.
            Denied::Decided(Decided::Undecided) => self.in_progress(),
            Denied::Decided(Decided::OtherRequest) => Rejection::KeyReused,
            Denied::Decided(Decided::Unknown) => Rejection::OutcomeUnknown,
            Denied::Decided(Decided::Conflicting) => {
                telemetry::conflict();
                tracing::error!(
                    "idempotent request was executed more than once, and no majority of the nodes has one of the outcomes"
                );
                Rejection::ConflictingOutcomes
            }
        })
    }

    pub(super) fn refuse<B>(&self, rejection: Rejection) -> Response<IdempotencyBody<B>> {
        let refusal = self.config.refusals.refuse(rejection, self.kind);
        refusal.map(IdempotencyBody::refusal)
    }

    /// Answers with a recorded response, which any server may have recorded.
    pub(super) async fn replay<B>(&self, record: &Record) -> Response<IdempotencyBody<B>> {
        let decode = |record: &Record| stored::replay(record, &self.once.key, &self.config.codec);
        self.refuse(match self.once.read(record, decode).await {
            Ok(Ok(Some(mut response))) => {
                let name = self.config.replay_header.clone();
                let headers = response.headers_mut();
                headers.insert(name, HeaderValue::from_static("true"));
                return response;
            }
            Ok(Ok(None)) => Rejection::ResultNotKept,
            Ok(Err(why)) => {
                tracing::error!(%why, "recorded response of an idempotent request is unreadable");
                let what = KeyError::misconfigured("a recorded response is unreadable");
                Rejection::Misconfigured(what)
            }
            Err(error) => self.not_executed(error),
        })
    }

    /// Converts an error of the lock under which a request is executed.
    fn not_executed(&self, error: LockError) -> Rejection {
        match error {
            LockError::Contended { .. } => self.in_progress(),
            error => error.into(),
        }
    }

    fn in_progress(&self) -> Rejection {
        let retry_after = self.config.retry_after;
        Rejection::InProgress { retry_after }
    }
}
