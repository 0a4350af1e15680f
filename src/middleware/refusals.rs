//! How a layer refuses: the responses it is told to make, and the mistakes that it has logged.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::Response;
use http_body_util::Full;

use crate::middleware::rejection::{Rejection, RejectionResponse, RequestKind, default_response};
use crate::protocol::KeyError;

/// The refusals of one layer; clones are of the same layer.
#[derive(Clone)]
pub(crate) struct Refusals {
    response: Arc<dyn RejectionResponse>,
    /// The mistakes that were logged: as many as there are in the program.
    mistakes: Arc<Mutex<BTreeSet<String>>>,
}

impl Refusals {
    pub(crate) fn new() -> Self {
        Self {
            response: Arc::new(default_response as DefaultResponse),
            mistakes: Arc::default(),
        }
    }

    /// Sets how they look.
    pub(crate) fn set_response(&mut self, response: impl RejectionResponse) {
        self.response = Arc::new(response);
    }

    /// Builds the response for a refusal, which is also put into its extensions. What is a mistake of the
    /// program is logged.
    pub(crate) fn refuse(&self, rejection: Rejection, to: RequestKind) -> Response<Full<Bytes>> {
        self.log_mistake(&rejection);
        let mut response = self.response.response(&rejection, &to);
        response.extensions_mut().insert(rejection);
        response
    }

    /// Logs a refusal that is a mistake of the program, or a key that it cannot take as it is set up. Each
    /// once: every request like this one meets it, and clients are not told what to set.
    fn log_mistake(&self, rejection: &Rejection) {
        let mistake = match rejection {
            Rejection::Misconfigured(error) => error.to_string(),
            Rejection::ScopeMissing => "the scope of an IdempotencyLayer found nobody".to_owned(),
            Rejection::KeyInvalid(error) => {
                self.log_limit(error);
                return;
            }
            _ => return,
        };
        if self.is_new(mistake.clone()) {
            tracing::error!(error = %mistake, "redlock layer refuses requests like this one");
        }
    }

    /// Logs a key that only another set-up could take.
    fn log_limit(&self, error: &KeyError) {
        // Without the numbers, which are the client's choice.
        let limit = match error {
            KeyError::TooLong { .. } => "a key is too long",
            KeyError::TooMany { .. } => "too many keys",
            KeyError::Reserved => "a key is reserved",
            _ => return,
        };
        if self.is_new(limit.to_owned()) {
            tracing::warn!(%error, "redlock layer refuses a key");
        }
    }

    fn is_new(&self, mistake: String) -> bool {
        let known = self.mistakes.lock();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        known.len() < MOST_MISTAKES && known.insert(mistake)
    }
}

type DefaultResponse = fn(&Rejection, &RequestKind) -> Response<Full<Bytes>>;

/// How many mistakes are told apart, lest those of an extractor that names the request fill the log.
const MOST_MISTAKES: usize = 32;
