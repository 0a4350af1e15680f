//! How a layer refuses: the responses it is told to make, and the mistakes that it has logged.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::Response;
use http_body_util::Full;

use crate::middleware::rejection::{Rejection, RejectionResponse, RequestKind, default_response};

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

    /// Builds the response for a refusal, which is also put into its extensions.
    pub(crate) fn refuse(&self, rejection: Rejection, to: RequestKind) -> Response<Full<Bytes>> {
        let mut response = self.response.response(&rejection, &to);
        response.extensions_mut().insert(rejection);
        response
    }

    /// Logs a refusal that is a mistake of the program. Each once: every request like this one meets it,
    /// and no client can do anything about it.
    pub(crate) fn log_mistake(&self, rejection: &Rejection) {
        let mistake = match rejection {
            Rejection::Misconfigured(error) => error.to_string(),
            Rejection::ScopeMissing => "the scope of an IdempotencyLayer found nobody".to_owned(),
            _ => return,
        };
        let known = self.mistakes.lock();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        if known.len() < MOST_MISTAKES && known.insert(mistake.clone()) {
            tracing::error!(error = %mistake, "redlock layer refuses requests like this one");
        }
    }
}

type DefaultResponse = fn(&Rejection, &RequestKind) -> Response<Full<Bytes>>;

/// How many mistakes are told apart, lest those of an extractor that names the request fill the log.
const MOST_MISTAKES: usize = 32;
