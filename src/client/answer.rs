//! What a response says about its request: executed for good, refused, or not known yet.

use std::mem;
use std::time::{Duration, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use http::header::{DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use httpdate::parse_http_date;
use serde_json::Value;

use crate::middleware::rejection::Row;
use crate::middleware::response::{coded_response, media_type};
use crate::middleware::{ReadBody, RequestKind};
use crate::node::wall_clock;

/// What an attempt says about its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// To send the request again would change nothing, or is not safe.
    Final,
    /// This attempt was not executed, and a later one may be.
    Refused,
    /// Whether the call was executed is not known yet: the first request with its key still runs, or the connection was
    /// lost.
    Open,
}

/// Judges a response by its head, or if that does not decide, by the `code` in its body, which stays readable.
///
/// # Cancel safety
///
/// If dropped, the response is dropped, too.
pub(super) async fn judge<B>(response: Response<B>) -> (Verdict, Response<ReadBody<B>>)
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut response = response.map(ReadBody::unread);
    let headers = response.headers();
    let is_invited = retry_after(headers).is_some();
    let verdict = match response.status() {
        // Only a server that has not executed the request answers so.
        StatusCode::LOCKED | StatusCode::TOO_MANY_REQUESTS => Verdict::Refused,
        // Without an invitation, such as `lock-lost`, there may have been an effect.
        StatusCode::SERVICE_UNAVAILABLE if is_invited => Verdict::Refused,
        StatusCode::CONFLICT => {
            let is_problem = media_type(headers).eq_ignore_ascii_case(PROBLEM);
            // Whatever it is, it may be kept while the request is sent again, and must not keep its connection.
            if is_invited || is_problem {
                response.body_mut().read(MAX_PROBLEM).await;
            }
            let code = is_problem.then(|| code(response.body())).flatten();
            match code.as_deref() {
                Some(IN_PROGRESS) => Verdict::Open,
                Some("outcome-unknown" | "result-not-kept" | "conflicting-outcomes") => {
                    Verdict::Final
                }
                // The status for contention is a setting of the server.
                Some("lock-contended") if is_invited => Verdict::Refused,
                _ if is_invited => Verdict::Open,
                _ => Verdict::Final,
            }
        }
        // Of a gRPC server, whose refusals are complete in the head.
        StatusCode::OK if is_invited && is_transient(headers) => match headers.get(GRPC_MESSAGE) {
            Some(code) if code == IN_PROGRESS => Verdict::Open,
            _ => Verdict::Refused,
        },
        _ => Verdict::Final,
    };
    (verdict, response)
}

/// Reads `Retry-After` in both of its forms (RFC 9110, section 10.2.3).
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number without end is a time without end.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let date = parse_http_date(value).ok()?;
    // By the server's own clock, if it shows it: that of this machine may differ.
    let now = headers.get(DATE).and_then(|now| now.to_str().ok());
    let now = now.and_then(|now| parse_http_date(now).ok());
    let now = now.unwrap_or_else(|| UNIX_EPOCH + wall_clock());
    Some(date.duration_since(now).unwrap_or_default())
}

/// Returns the response to a call whose deadline passed while an attempt was under way.
pub(super) fn deadline_exceeded<B>(to: RequestKind) -> Response<ReadBody<B>>
where
    B: Body<Data = Bytes>,
{
    const ROW: Row = (504, 4, "deadline-exceeded", "Deadline exceeded", false);
    let detail = "the client's deadline passed before a response arrived; whether the request was executed is unknown";
    let response = coded_response(StatusCode::GATEWAY_TIMEOUT, ROW, (detail, ""), to);
    response.map(|body| ReadBody::whole(body, None))
}

impl<B: Body<Data = Bytes> + Unpin> ReadBody<B> {
    /// Returns a copy, if the body was read to its end.
    pub(super) fn copy(&self) -> Option<Self> {
        let is_whole = self.rest.is_none() && self.error.is_none();
        is_whole.then(|| Self::whole(self.bytes.clone(), self.trailers.clone()))
    }

    /// Reads until the end, an error, or more than `limit` bytes. A body that says that it is longer is not begun.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point: what was read is kept.
    pub(super) async fn read(&mut self, limit: u64) {
        let read = &mut self.bytes;
        while let Some(rest) = &mut self.rest
            && rest.size_hint().lower().saturating_add(read.len() as u64) <= limit
        {
            match rest.frame().await {
                None => self.rest = None,
                Some(Err(error)) => (self.rest, self.error) = (None, Some(error)),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if read.is_empty() => *read = data,
                    Ok(data) => {
                        let mut joined = BytesMut::from(mem::take(read));
                        joined.extend_from_slice(&data);
                        *read = joined.freeze();
                    }
                    Err(frame) => self.trailers = frame.into_trailers().ok(),
                },
            }
        }
    }
}

/// Returns the `code` of a problem (RFC 9457) that was read to its end.
fn code<B>(body: &ReadBody<B>) -> Option<String>
where
    B: Body<Data = Bytes> + Unpin,
{
    let problem: Value = serde_json::from_slice(&body.copy()?.bytes).ok()?;
    Some(problem.get("code")?.as_str()?.to_owned())
}

/// Returns whether a gRPC status is RESOURCE_EXHAUSTED, ABORTED or UNAVAILABLE.
fn is_transient(headers: &HeaderMap) -> bool {
    let status = headers.get(GRPC_STATUS).map(HeaderValue::as_bytes);
    matches!(status, Some(b"8" | b"10" | b"14"))
}

const IN_PROGRESS: &str = "request-in-progress";
const PROBLEM: &str = "application/problem+json";
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Longest problem that is read for its `code`, in bytes. Those of this crate have about 250.
const MAX_PROBLEM: u64 = 16 * 1024;
