//! What an observer is told of each attempt.

use std::time::Duration;

use http::StatusCode;

/// One attempt to send a request, for [`on_attempt`](crate::client::RetryLockedLayer::on_attempt).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// Its number within the call, from 1 on.
    pub number: u32,
    /// The status of its response; `None` if the inner service returned an error, or the deadline passed before.
    pub status: Option<StatusCode>,
    /// What follows it.
    pub decision: Decision,
}

/// What follows an attempt. All but [`SendAgain`](Self::SendAgain) end the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decision {
    /// The response is final.
    Return,
    /// The request is sent again after this delay.
    SendAgain(Duration),
    /// The connection was lost, and the request has neither an `Idempotency-Key` nor an idempotent method: to send it
    /// again might execute it twice.
    NoKey,
    /// The body cannot be sent again; see [`max_body`](crate::client::RetryLockedLayer::max_body).
    BodyConsumed,
    /// This was the last attempt; see [`attempts`](crate::client::RetryLockedLayer::attempts).
    NoAttemptLeft,
    /// The deadline has passed, or would pass before the next attempt; see
    /// [`deadline`](crate::client::RetryLockedLayer::deadline).
    NoTimeLeft,
}
