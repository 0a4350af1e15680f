//! Answers to requests that are not executed: refusals and replays.

use std::sync::Arc;

use http::{HeaderValue, Response};

use crate::idempotency::body::IdempotencyBody;
use crate::idempotency::config::Config;
use crate::idempotency::stored;
use crate::lock::LockError;
use crate::middleware::{CallTracker, Rejection, RequestKind};
use crate::node::telemetry;
use crate::once::Denied;
use crate::protocol::{KeyError, LockKey, Record};

/// Answers one request that is not executed.
pub(super) struct Responder {
    pub(super) config: Arc<Config>,
    pub(super) resource: LockKey,
    pub(super) kind: RequestKind,
}

impl Responder {
    /// Answers a request that must not be executed.
    pub(super) async fn denied<B>(
        &self,
        reason: Denied,
        outer_calls: Option<&CallTracker>,
    ) -> Response<IdempotencyBody<B>> {
        match reason {
            Denied::Recorded(record) => {
                // To an outer idempotency layer, the replay is a response of the handler.
                if let Some(outer_calls) = outer_calls {
                    outer_calls.count_call();
                }
                return self.replay(record).await;
            }
            Denied::Conflicting => {
                telemetry::conflict();
                tracing::error!(
                    "idempotent request was executed more than once, and no majority of the nodes has one of the outcomes"
                );
            }
            _ => {}
        }
        self.refuse(rejection(reason))
    }

    pub(super) fn refuse<B>(&self, rejection: Rejection) -> Response<IdempotencyBody<B>> {
        let rejection = rejection.with_retry_after(self.config.retry_after, false);
        let refusal = self.config.refusals.refuse(rejection, self.kind);
        refusal.map(IdempotencyBody::refusal)
    }

    /// Answers with a recorded response, which any server may have recorded.
    pub(super) async fn replay<B>(&self, record: Record) -> Response<IdempotencyBody<B>> {
        let read = |record: &Record| stored::replay(record, &self.resource, &self.config.codec);
        let once = self.config.redlock.once(self.resource.clone());
        let rest = once.fetch(&record);
        let replayed = match record.is_whole().then(|| read(&record)) {
            Some(Ok(replayed)) => Ok(replayed),
            // This copy is cut, or unreadable; another node may have a readable one.
            copy => match (rest.await, copy) {
                (Ok(other), _) => read(&other),
                (Err(_), Some(unreadable)) => unreadable,
                (Err(error), None) => return self.refuse(not_executed(error)),
            },
        };
        match replayed {
            Ok(Some(mut response)) => {
                let name = self.config.replay_header.clone();
                let headers = response.headers_mut();
                headers.insert(name, HeaderValue::from_static("true"));
                response
            }
            Ok(None) => self.refuse(Rejection::ResultNotKept),
            Err(why) => {
                tracing::error!(%why, "recorded response of an idempotent request is unreadable");
                let what = KeyError::misconfigured("a recorded response is unreadable");
                self.refuse(Rejection::Misconfigured(what))
            }
        }
    }
}

/// Converts an error of the lock under which a request is executed.
fn not_executed(error: LockError) -> Rejection {
    match error {
        LockError::Contended { retry_after } => Rejection::InProgress { retry_after },
        error => Rejection::from(error),
    }
}

fn rejection(reason: Denied) -> Rejection {
    match reason {
        Denied::Lock(error) => not_executed(error),
        // Not decided yet, so the client may retry. `Recorded` has been answered before.
        Denied::Undecided | Denied::Recorded(_) => Rejection::InProgress { retry_after: None },
        Denied::OtherRequest => Rejection::KeyReused,
        Denied::Conflicting => Rejection::ConflictingOutcomes,
        Denied::Unknown => Rejection::OutcomeUnknown,
    }
}
