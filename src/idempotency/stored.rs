//! Responses in the form in which they are recorded.

use std::borrow::Cow;
use std::fmt;
use std::slice::Iter;

use bytes::Bytes;
use http::header::{
    CONNECTION, DATE, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, SET_COOKIE, TE, TRANSFER_ENCODING,
    UPGRADE,
};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::idempotency::body::IdempotencyBody;
use crate::idempotency::codec::{Codec, RecordContext, Unreadable};
use crate::middleware::BufferedRequestBody;
use crate::node::sha256;
use crate::once::is_undamaged;
use crate::protocol::{FencingToken, LockKey, Record};

/// The content of a record after its head, before the codec is applied.
///
/// If a header or trailer is sensitive, one byte for each of them follows: 1 if it is, else 0. Earlier versions of this
/// crate write no such bytes, and ignore them.
#[derive(Debug, Serialize, Deserialize)]
struct StoredResult<'a> {
    /// The fencing token of the execution, for an audit.
    token: Option<u64>,
    /// `None` if the response was not kept.
    #[serde(borrow)]
    response: Option<StoredResponse<'a>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredResponse<'a> {
    status: u16,
    #[serde(borrow)]
    headers: StoredFields<'a>,
    #[serde(borrow)]
    body: &'a [u8],
    #[serde(borrow)]
    trailers: Option<StoredFields<'a>>,
}

/// Headers or trailers.
#[derive(Debug, Serialize)]
struct StoredFields<'a>(Vec<(&'a str, &'a [u8])>);

/// Reads at most as many fields as are kept.
struct FieldsVisitor;

/// The bytes of a record after its head, without a copy.
struct RecordBytes(Record);

impl AsRef<[u8]> for RecordBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.rest()
    }
}

/// Creates the record of a response, or that of one that cannot be kept.
pub(super) fn record(
    context: RecordContext<'_>,
    token: Option<FencingToken>,
    response: Option<(&Parts, &BufferedRequestBody)>,
    codec: &Codec,
) -> Record {
    let response = response.map(|(head, body)| stored(head, body, codec.keep_cookies));
    let (stored, marks) = response.unwrap_or_default();
    encoded(context, token, stored, &marks, codec)
}

/// Returns what is kept of a response, and the marks of its fields. If headers and trailers are too large, the response
/// is left out.
fn stored<'a>(
    head: &'a Parts,
    body: &'a BufferedRequestBody,
    keep_cookies: bool,
) -> (Option<StoredResponse<'a>>, Vec<u8>) {
    let dropped = connection_options(&head.headers);
    let headers = head.headers.iter().filter(|(name, _)| {
        let is_cookie = !keep_cookies && *name == SET_COOKIE;
        !is_cookie && !HOP_BY_HOP.contains(name) && *name != DATE && !dropped.contains(name)
    });
    let mut marks = Vec::new();
    let headers = fields(headers, &mut marks);
    let trailers = body.trailers.as_ref();
    let trailers = trailers.map(|trailers| fields(trailers.iter(), &mut marks));
    if !marks.contains(&1) {
        marks.clear();
    }
    let all = headers.0.iter();
    let all = all.chain(trailers.iter().flat_map(|trailers| &trailers.0));
    // With the overhead of a field, which many small ones add up to.
    let size: usize = all.map(|(name, value)| name.len() + value.len() + 4).sum();
    let stored = StoredResponse {
        status: head.status.as_u16(),
        headers,
        body: &body.bytes,
        trailers,
    };
    ((size <= MAX_FIELDS).then_some(stored), marks)
}

/// Reads a whole record; `None` if its response was not kept.
pub(super) fn replay<B>(
    record: &Record,
    resource: &LockKey,
    codec: &Codec,
) -> Result<Option<Response<IdempotencyBody<B>>>, Unreadable> {
    // A larger record was checked once, when it was fetched for all requests that replay it.
    if record.as_bytes().len() <= Record::MAX_INLINE && !is_undamaged(record) {
        return Err(Unreadable::Malformed);
    }
    let context = RecordContext {
        resource,
        execution: record.execution(),
        fingerprint: record.fingerprint(),
    };
    // Requests that replay the record at the same time share its bytes.
    let shared = Bytes::from_owner(RecordBytes(record.clone()));
    let content = match codec.read(context, &shared)? {
        Cow::Borrowed(plain) => shared.slice_ref(plain),
        Cow::Owned(read) => Bytes::from(read),
    };
    let (result, marks): (StoredResult<'_>, _) =
        postcard::take_from_bytes(&content).map_err(|_| Unreadable::Malformed)?;
    let Some(stored) = result.response else {
        return Ok(None);
    };
    let bytes = content.slice_ref(stored.body);
    let response = response(&stored, marks, bytes).ok_or(Unreadable::Malformed)?;
    Ok(Some(response.map(IdempotencyBody::whole)))
}

fn encoded(
    context: RecordContext<'_>,
    token: Option<FencingToken>,
    response: Option<StoredResponse<'_>>,
    marks: &[u8],
    codec: &Codec,
) -> Record {
    let token = token.map(FencingToken::as_u64);
    let content = postcard::to_allocvec(&StoredResult { token, response });
    // Serializing plain data into memory cannot fail; the fallback is a record without a response.
    let mut content = content.unwrap_or_else(|_| vec![0, 0]);
    content.extend_from_slice(marks);
    let bytes = codec.write(context, content);
    let (execution, fingerprint) = (context.execution, context.fingerprint);
    Record::new(execution, fingerprint, sha256(&bytes), &bytes)
}

fn response(
    stored: &StoredResponse<'_>,
    marks: &[u8],
    bytes: Bytes,
) -> Option<Response<BufferedRequestBody>> {
    let mut marks = marks.iter();
    let headers = header_map(&stored.headers, &mut marks)?;
    let trailers = match &stored.trailers {
        Some(trailers) => Some(header_map(trailers, &mut marks)?),
        None => None,
    };
    let mut response = Response::new(BufferedRequestBody { bytes, trailers });
    *response.status_mut() = StatusCode::from_u16(stored.status).ok()?;
    *response.headers_mut() = headers;
    Some(response)
}

fn fields<'a>(
    headers: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>,
    marks: &mut Vec<u8>,
) -> StoredFields<'a> {
    let fields = headers.map(|(name, value)| {
        marks.push(u8::from(value.is_sensitive()));
        (name.as_str(), value.as_bytes())
    });
    StoredFields(fields.collect())
}

fn header_map(
    StoredFields(fields): &StoredFields<'_>,
    marks: &mut Iter<'_, u8>,
) -> Option<HeaderMap> {
    // The fields may be forged by a client with write access to the nodes.
    let mut headers = HeaderMap::try_with_capacity(fields.len()).ok()?;
    for (name, value) in fields {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        let mut value = HeaderValue::from_bytes(value).ok()?;
        value.set_sensitive(marks.next() == Some(&1));
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

/// By hand: a forged record of 16 KiB, decompressed, may have two million fields, which would take 100 MiB.
impl<'de: 'a, 'a> Deserialize<'de> for StoredFields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(FieldsVisitor).map(Self)
    }
}

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Vec<(&'de str, &'de [u8])>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("headers or trailers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = sequence.next_element()? {
            // Each field counts for four bytes and its own.
            if fields.len() == MAX_FIELDS / 4 {
                return Err(A::Error::custom("too many fields"));
            }
            fields.push(field);
        }
        Ok(fields)
    }
}

/// Most bytes of headers and trailers together that are kept. Not a setting: larger ones come from a
/// mistake, or from a service that echoes a header of the client.
const MAX_FIELDS: usize = 64 * 1024;

/// Headers of one connection, which are not part of the response (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{ExecutionId, Fingerprint};

    /// A client with write access to the nodes can write records that no server writes.
    #[test]
    fn a_forged_record_is_unreadable() {
        let resource = LockKey::from("key");
        let context = RecordContext {
            resource: &resource,
            execution: ExecutionId::from_random([1; 16]),
            fingerprint: Fingerprint::from_digest([2; 32]),
        };
        let numbers: Vec<String> = (0..30_000).map(|number| format!("x-{number}")).collect();
        let many: Vec<(&str, &[u8])> = numbers
            .iter()
            .map(|name| (name.as_str(), &b""[..]))
            .collect();
        let forged = [
            (200, vec![("", &b""[..]); 40_000]),
            (200, many),
            (200, vec![("a", &b""[..]); MAX_FIELDS / 4 + 1]),
            (200, vec![("a b", b"")]),
            (200, vec![("a", b"\n")]),
            (0, vec![]),
        ];
        for (status, headers) in forged {
            let stored = StoredResponse {
                status,
                headers: StoredFields(headers),
                body: b"",
                trailers: None,
            };
            let record = encoded(context, None, Some(stored), &[], &Codec::default());
            let read = replay::<String>(&record, &resource, &Codec::default());
            assert_eq!(read.err(), Some(Unreadable::Malformed), "{status}");
        }
    }
}
