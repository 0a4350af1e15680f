//! Responses as they are recorded.

use std::borrow::Cow;

use bytes::Bytes;
use http::header::{
    CONNECTION, DATE, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, SET_COOKIE, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use serde::{Deserialize, Serialize};

use crate::idempotency::body::IdempotencyBody;
use crate::idempotency::codec::{Codec, Of, Unreadable};
use crate::node::sha256;
use crate::once::is_undamaged;
use crate::protocol::{ExecutionId, FencingToken, Fingerprint, LockKey, Record};

/// What is behind the head of a record, as the codec is given it.
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

/// What every record says of its execution.
#[derive(Debug, Clone, Copy)]
pub(super) struct Executed<'a> {
    pub(super) resource: &'a LockKey,
    pub(super) execution: ExecutionId,
    pub(super) fingerprint: Fingerprint,
    pub(super) token: Option<FencingToken>,
}

/// The bytes behind the head, which are those of the record.
struct Rest(Record);

impl AsRef<[u8]> for Rest {
    fn as_ref(&self) -> &[u8] {
        self.0.rest()
    }
}

/// Why there is no response to replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoReplay {
    NotKept,
    Unreadable(Unreadable),
}

/// Makes the record of a response that is there as a whole; if its headers and trailers are too large, of one
/// that cannot be kept.
pub(super) fn kept(executed: Executed<'_>, outcome: &Outcome<'_>, codec: &Codec) -> Record {
    let Outcome { head, body, .. } = *outcome;
    let dropped = connection_options(&head.headers);
    let headers = head.headers.iter().filter(|(name, _)| {
        let is_cookie = !outcome.keep_cookies && *name == SET_COOKIE;
        !is_cookie && !OF_ONE_HOP.contains(name) && *name != DATE && !dropped.contains(name)
    });
    let headers = fields(headers);
    let trailers = outcome.trailers.map(|trailers| fields(trailers.iter()));
    let all = headers.iter().chain(trailers.iter().flatten());
    // With their lengths, lest many small ones are for nothing.
    let size: usize = all.map(|(name, value)| name.len() + value.len() + 4).sum();
    let response = Kept {
        status: head.status.as_u16(),
        headers,
        body,
        trailers,
    };
    record(
        executed,
        (size <= LARGEST_FIELDS).then_some(response),
        codec,
    )
}

/// Makes the record of a response that cannot be kept.
pub(super) fn not_kept(executed: Executed<'_>, codec: &Codec) -> Record {
    record(executed, None, codec)
}

/// Reads a whole record.
pub(super) fn replay<B>(
    record: &Record,
    resource: &LockKey,
    codec: &Codec,
) -> Result<Response<IdempotencyBody<B>>, NoReplay> {
    let malformed = NoReplay::Unreadable(Unreadable::Malformed);
    // What is bigger was checked when it was read, once for all who are answered with it.
    if record.as_bytes().len() <= Record::MAX_INLINE && !is_undamaged(record) {
        return Err(malformed);
    }
    let of = Of {
        resource,
        execution: record.execution(),
        fingerprint: record.fingerprint(),
    };
    // Not a copy for each of those who are answered at the same time.
    let shared = Bytes::from_owner(Rest(record.clone()));
    let stored = match codec.read(of, &shared).map_err(NoReplay::Unreadable)? {
        Cow::Borrowed(plain) => shared.slice_ref(plain),
        Cow::Owned(read) => Bytes::from(read),
    };
    match postcard::from_bytes::<Stored<'_>>(&stored) {
        Ok(Stored { response: None, .. }) => Err(NoReplay::NotKept),
        Ok(Stored {
            response: Some(kept),
            ..
        }) => response(&kept, stored.slice_ref(kept.body)).ok_or(malformed),
        Err(_) => Err(malformed),
    }
}

fn record(executed: Executed<'_>, response: Option<Kept<'_>>, codec: &Codec) -> Record {
    let Executed {
        resource,
        execution,
        fingerprint,
        token,
    } = executed;
    let token = token.map(FencingToken::as_u64);
    let stored = postcard::to_allocvec(&Stored { token, response });
    // Serialising plain data into memory cannot fail; a record without a response is one all the same.
    let stored = stored.unwrap_or_else(|_| vec![0, 0]);
    let of = Of {
        resource,
        execution,
        fingerprint,
    };
    let rest = codec.write(of, stored);
    Record::new(execution, fingerprint, sha256(&rest), &rest)
}

fn response<B>(kept: &Kept<'_>, body: Bytes) -> Option<Response<IdempotencyBody<B>>> {
    let trailers = match &kept.trailers {
        Some(trailers) => Some(header_map(trailers)?),
        None => None,
    };
    let body = IdempotencyBody::whole(body, trailers);
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
    // Whoever writes to the nodes may have made it up.
    let mut headers = HeaderMap::try_with_capacity(fields.len()).ok()?;
    for (name, value) in fields {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        let value = HeaderValue::from_bytes(value).ok()?;
        headers.try_append(name, value).ok()?;
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

/// Most bytes of headers and trailers together that are kept. Not a setting: what is larger comes from a
/// mistake, or from a client that has its own header echoed.
const LARGEST_FIELDS: usize = 64 * 1024;

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

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever writes to the nodes can write what no server does.
    #[test]
    fn a_record_that_is_made_up_is_unreadable_and_nothing_worse() {
        let resource = LockKey::from("key");
        let executed = Executed {
            resource: &resource,
            execution: ExecutionId::from_random([1; 16]),
            fingerprint: Fingerprint::from_digest([2; 32]),
            token: None,
        };
        let numbers: Vec<String> = (0..30_000).map(|number| format!("x-{number}")).collect();
        let many: Fields<'_> = numbers
            .iter()
            .map(|name| (name.as_str(), &b""[..]))
            .collect();
        let made_up = [
            (200, vec![("", &b""[..]); 40_000]),
            (200, many),
            (200, vec![("a b", b"")]),
            (200, vec![("a", b"\n")]),
            (0, vec![]),
        ];
        for (status, headers) in made_up {
            let kept = Kept {
                status,
                headers,
                body: b"",
                trailers: None,
            };
            let record = record(executed, Some(kept), &Codec::default());
            let read = replay::<String>(&record, &resource, &Codec::default());
            let unreadable = NoReplay::Unreadable(Unreadable::Malformed);
            assert_eq!(read.err(), Some(unreadable), "{status}");
        }
    }
}
