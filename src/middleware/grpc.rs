//! Refusals of gRPC requests.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::Full;

use crate::middleware::rejection::{Rejection, insert_retry_after};

/// Builds a "trailers-only" response: everything in the head, no body.
pub(super) fn status(rejection: &Rejection) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", code(rejection).into());
    headers.insert("grpc-message", HeaderValue::from_static(rejection.code()));
    insert_retry_after(headers, rejection);
    insert_details(headers, rejection);
    response
}

/// Returns the number of the gRPC status code.
fn code(rejection: &Rejection) -> u16 {
    match rejection {
        Rejection::Contended { .. } | Rejection::InProgress { .. } | Rejection::Lost(_) => ABORTED,
        // Not ABORTED, after which clients call again.
        Rejection::ResultNotKept => ALREADY_EXISTS,
        Rejection::OutcomeUnknown | Rejection::ConflictingOutcomes => FAILED_PRECONDITION,
        Rejection::Failed(_) => UNAVAILABLE,
        Rejection::KeyMissing { .. } | Rejection::KeyInvalid(_) | Rejection::KeyReused => {
            INVALID_ARGUMENT
        }
        Rejection::BodyTooLarge | Rejection::TooManyConcurrent { .. } => RESOURCE_EXHAUSTED,
        // The client cancelled its request body.
        Rejection::BodyUnreadable { timed_out: false } => CANCELLED,
        Rejection::BodyUnreadable { timed_out: true } => DEADLINE_EXCEEDED,
        Rejection::Misconfigured(_) | Rejection::ScopeMissing => INTERNAL,
    }
}

#[cfg(not(feature = "grpc"))]
fn insert_details(_: &mut HeaderMap, _: &Rejection) {}

/// Adds the details of a `google.rpc.Status` with a `RetryInfo`, which some clients obey without further code.
#[cfg(feature = "grpc")]
fn insert_details(headers: &mut HeaderMap, rejection: &Rejection) {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD_NO_PAD;
    use prost::Message;

    let Some(retry_after) = rejection.retry_after() else {
        return;
    };
    let retry_info = RetryInfo {
        retry_delay: retry_after.try_into().ok(),
    };
    let status = RpcStatus {
        code: code(rejection).into(),
        message: rejection.code().into(),
        details: vec![prost_types::Any {
            type_url: "type.googleapis.com/google.rpc.RetryInfo".into(),
            value: retry_info.encode_to_vec(),
        }],
    };
    // "Implementations must emit un-padded values": gRPC over HTTP2, on binary headers.
    let details = STANDARD_NO_PAD.encode(status.encode_to_vec());
    let details = HeaderValue::try_from(details).expect("base64 is visible ASCII");
    headers.insert("grpc-status-details-bin", details);
}

/// `google.rpc.Status`; `grpc-status-details-bin` is its encoding.
#[cfg(feature = "grpc")]
#[derive(Clone, PartialEq, prost::Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

/// `google.rpc.RetryInfo`.
#[cfg(feature = "grpc")]
#[derive(Clone, PartialEq, prost::Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<prost_types::Duration>,
}

const CANCELLED: u16 = 1;
const INVALID_ARGUMENT: u16 = 3;
const DEADLINE_EXCEEDED: u16 = 4;
const ALREADY_EXISTS: u16 = 6;
const RESOURCE_EXHAUSTED: u16 = 8;
const FAILED_PRECONDITION: u16 = 9;
const ABORTED: u16 = 10;
const INTERNAL: u16 = 13;
const UNAVAILABLE: u16 = 14;

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use http_body::Body;

    use super::*;
    #[cfg(feature = "grpc")]
    use crate::lock::LockError;

    #[test]
    fn grpc_refusals_have_their_status_in_the_head_and_no_body() {
        let contended = Rejection::Contended {
            status: StatusCode::LOCKED,
            retry_after: None,
        };
        let response = status(&contended);
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["grpc-status"], "10");
        assert_eq!(response.body().size_hint().exact(), Some(0));
    }

    #[cfg(feature = "grpc")]
    #[test]
    fn details_are_not_padded() {
        // Codes of 13, 14 and 16 letters: at least one of the encodings would need padding.
        let contended = Rejection::Contended {
            status: StatusCode::LOCKED,
            retry_after: None,
        };
        let unavailable = LockError::Unavailable {
            reached: 0,
            needed: 2,
            voted: Vec::new(),
            nodes: Vec::new(),
        };
        let closed = Rejection::Failed(LockError::Closed);
        for rejection in [contended, Rejection::Failed(unavailable), closed] {
            let response = status(&rejection);
            let details = response.headers()["grpc-status-details-bin"].as_bytes();
            assert!(details.len() > 60, "{rejection:?}");
            assert!(!details.contains(&b'='), "{rejection:?}");
        }
    }
}
