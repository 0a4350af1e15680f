//! Responses as they are recorded.

use bytes::Bytes;
use http::header::{
    CONNECTION, DATE, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, SET_COOKIE, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use serde::{Deserialize, Serialize};

use crate::idempotency::body::IdempotencyBody;
use crate::node::sha256;
use crate::protocol::{ExecutionId, FencingToken, Fingerprint, Record};

/// What is behind the head of a record: a byte that says how it is encoded, and this.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Stored<'a> {
    /// Under which the operation was executed, for an audit.
    token: Option<u64>,
    /// `None` if the response was not kept.
    #[serde(borrow)]
    response: Option<Kept<'a>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Kept<'a> {
    status: u16,
    #[serde(borrow)]
    headers: Fields<'a>,
    #[serde(borrow)]
    body: &'a [u8],
    #[serde(borrow)]
    trailers: Option<Fields<'a>>,
}

type Fields<'a> = Vec<(&'a str, &'a [u8])>;

/// A response that is there as a whole.
pub(super) struct Outcome<'a> {
    pub(super) head: &'a Parts,
    pub(super) body: &'a [u8],
    pub(super) trailers: Option<&'a HeaderMap>,
    pub(super) keep_cookies: bool,
}

/// Why there is no response to replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoReplay {
    NotKept,
    /// Written by another version of this crate, or not by it.
    Unreadable,
}

/// Makes the record of a response that is there as a whole.
pub(super) fn kept(
    execution: ExecutionId,
    fingerprint: Fingerprint,
    token: Option<FencingToken>,
    outcome: &Outcome<'_>,
) -> Record {
    let Outcome { head, body, .. } = *outcome;
    let dropped = connection_options(&head.headers);
    let headers = head.headers.iter().filter(|(name, _)| {
        let is_cookie = !outcome.keep_cookies && *name == SET_COOKIE;
        !is_cookie && !OF_ONE_HOP.contains(name) && *name != DATE && !dropped.contains(name)
    });
    let response = Kept {
        status: head.status.as_u16(),
        headers: fields(headers),
        body,
        trailers: outcome.trailers.map(|trailers| fields(trailers.iter())),
    };
    record(execution, fingerprint, token, Some(response))
}

/// Makes the record of a response that cannot be kept.
pub(super) fn not_kept(
    execution: ExecutionId,
    fingerprint: Fingerprint,
    token: Option<FencingToken>,
) -> Record {
    record(execution, fingerprint, token, None)
}

/// Reads a whole record.
pub(super) fn replay<B>(record: &Record) -> Result<Response<IdempotencyBody<B>>, NoReplay> {
    let Some((&PLAIN, stored)) = record.rest().split_first() else {
        return Err(NoReplay::Unreadable);
    };
    if sha256(record.rest()) != record.digest() {
        return Err(NoReplay::Unreadable);
    }
    match postcard::from_bytes::<Stored<'_>>(stored) {
        Ok(Stored { response: None, .. }) => Err(NoReplay::NotKept),
        Ok(Stored {
            response: Some(kept),
            ..
        }) => response(&kept).ok_or(NoReplay::Unreadable),
        Err(_) => Err(NoReplay::Unreadable),
    }
}

fn record(
    execution: ExecutionId,
    fingerprint: Fingerprint,
    token: Option<FencingToken>,
    response: Option<Kept<'_>>,
) -> Record {
    let token = token.map(FencingToken::as_u64);
    let stored = Stored { token, response };
    let rest = postcard::to_extend(&stored, vec![PLAIN]);
    // Serialising plain data into memory cannot fail; a record without a response is one all the same.
    let rest = rest.unwrap_or_else(|_| vec![PLAIN, 0, 0]);
    Record::new(execution, fingerprint, sha256(&rest), &rest)
}

fn response<B>(kept: &Kept<'_>) -> Option<Response<IdempotencyBody<B>>> {
    let trailers = match &kept.trailers {
        Some(trailers) => Some(header_map(trailers)?),
        None => None,
    };
    let body = IdempotencyBody::whole(Bytes::copy_from_slice(kept.body), trailers);
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(kept.status).ok()?;
    *response.headers_mut() = header_map(&kept.headers)?;
    Some(response)
}

fn fields<'a>(headers: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>) -> Fields<'a> {
    headers
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect()
}

fn header_map(fields: &Fields<'_>) -> Option<HeaderMap> {
    let mut headers = HeaderMap::with_capacity(fields.len());
    for (name, value) in fields {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        headers.append(name, HeaderValue::from_bytes(value).ok()?);
    }
    Some(headers)
}

/// Returns the headers that `Connection` names (RFC 9110, section 7.6.1).
fn connection_options(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(CONNECTION).iter();
    let values = values.filter_map(|value| value.to_str().ok());
    let names = values.flat_map(|value| value.split(','));
    names.filter_map(|name| name.trim().parse().ok()).collect()
}

/// As it was serialised, neither compressed nor encrypted.
const PLAIN: u8 = 0;

/// What concerns one connection and not the response (RFC 9110, section 7.6.1).
const OF_ONE_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];
