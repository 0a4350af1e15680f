//! Responses in the form in which they are recorded.
//!
//! # Format
//!
//! Behind the head of the record, and before the codec is applied: the fencing token (8 bytes), the status (2), the headers,
//! a byte that says whether trailers follow, the trailers, the body. Headers and trailers begin with their number (2);
//! each has a byte that says whether it is sensitive, and name and value behind their lengths (2 each). A status of zero
//! ends the content: the response was not kept. All numbers are big-endian.

use bytes::{Buf, BufMut, Bytes};
use http::header::{
    CONNECTION, DATE, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, SET_COOKIE, TE, TRANSFER_ENCODING,
    UPGRADE,
};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

use crate::idempotency::codec::{Codec, MALFORMED, Unreadable};
use crate::middleware::{LockBody, WholeBody};
use crate::node::sha256;
use crate::protocol::{ExecutionId, FencingToken, Fingerprint, LockKey, Record};

/// Creates the record of a response, or that of one that cannot be kept. The token is kept for an audit.
pub(super) fn record(
    resource: &LockKey,
    (execution, fingerprint): (ExecutionId, Fingerprint),
    token: Option<FencingToken>,
    response: Option<(&Parts, &WholeBody)>,
    codec: &Codec,
) -> Record {
    let mut content = Vec::new();
    content.put_u64(token.map_or(0, FencingToken::as_u64));
    let kept = response.and_then(|(head, body)| {
        let fields = fields(head, body.trailers.as_ref())?;
        Some((head.status.as_u16(), fields, &*body.bytes))
    });
    // A status of zero and nothing behind it, if it is not kept.
    let (status, fields, body) = kept.unwrap_or_default();
    content.put_u16(status);
    content.extend_from_slice(&fields);
    content.extend_from_slice(body);
    let bound_to = [&execution.0, &fingerprint.0, resource.as_bytes()];
    let bytes = codec.write(bound_to, content);
    Record::new(execution, fingerprint, sha256(&bytes), &bytes)
}

/// Reads a whole record; `None` if its response was not kept.
///
/// # Errors
///
/// The reason for which it cannot be read.
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn replay<B>(
    record: &Record,
    resource: &LockKey,
    codec: &Codec,
) -> Result<Option<Response<LockBody<B>>>, Unreadable> {
    let (execution, fingerprint) = (record.execution(), record.fingerprint());
    // Requests that replay the record at the same time share its bytes.
    let rest = Bytes::from_owner(record.shared()).slice(Record::HEAD..);
    let bound_to = [&execution.0, &fingerprint.0, resource.as_bytes()];
    let mut content = codec.read(bound_to, rest)?;
    let _token = content.try_get_u64().map_err(|_| MALFORMED)?;
    let status = content.try_get_u16().map_err(|_| MALFORMED)?;
    if status == 0 {
        return Ok(None);
    }
    let response = response(status, content).ok_or(MALFORMED)?;
    Ok(Some(response.map(LockBody::boxed)))
}

/// Returns what is kept of headers and trailers; `None` if they are too large.
fn fields(head: &Parts, trailers: Option<&HeaderMap>) -> Option<Vec<u8>> {
    let dropped = connection_options(&head.headers);
    let is_kept = |name: &HeaderName| {
        // Without cookies, so that a session is issued once.
        ![DATE, SET_COOKIE].contains(name) && !HOP_BY_HOP.contains(name) && !dropped.contains(name)
    };
    let headers = head.headers.iter().filter(|(name, _)| is_kept(name));
    let mut fields = Vec::new();
    write(&mut fields, headers);
    fields.put_u8(trailers.is_some().into());
    if let Some(trailers) = trailers {
        write(&mut fields, trailers.iter());
    }
    (fields.len() <= MAX_FIELDS).then_some(fields)
}

/// Writes fields. A number that exceeds its two bytes is wrong; then they are too large to be kept.
fn write<'a>(
    content: &mut Vec<u8>,
    fields: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>,
) {
    let put_length = |content: &mut Vec<u8>, length: usize| {
        content.put_u16(u16::try_from(length).unwrap_or(u16::MAX));
    };
    let fields: Vec<_> = fields.collect();
    put_length(content, fields.len());
    for (name, value) in fields {
        content.put_u8(value.is_sensitive().into());
        for part in [name.as_str().as_bytes(), value.as_bytes()] {
            put_length(content, part.len());
            content.extend_from_slice(part);
        }
    }
}

/// Reads a response, which a client with write access to the nodes may have forged.
fn response(status: u16, mut content: Bytes) -> Option<Response<WholeBody>> {
    let headers = read(&mut content)?;
    let trailers = match content.try_get_u8().ok()? {
        0 => None,
        _ => Some(read(&mut content)?),
    };
    let mut response = Response::new(WholeBody::whole(content, trailers));
    *response.status_mut() = StatusCode::from_u16(status).ok()?;
    *response.headers_mut() = headers;
    Some(response)
}

fn read(content: &mut Bytes) -> Option<HeaderMap> {
    let number = usize::from(content.try_get_u16().ok()?);
    if number > MAX_FIELDS / FIELD {
        return None;
    }
    let mut fields = HeaderMap::try_with_capacity(number).ok()?;
    for _ in 0..number {
        let is_sensitive = content.try_get_u8().ok()? == 1;
        let name = HeaderName::from_bytes(&part(content)?).ok()?;
        let mut value = HeaderValue::from_bytes(&part(content)?).ok()?;
        value.set_sensitive(is_sensitive);
        fields.try_append(name, value).ok()?;
    }
    Some(fields)
}

/// Reads a name or a value behind its length.
fn part(content: &mut Bytes) -> Option<Bytes> {
    let length = usize::from(content.try_get_u16().ok()?);
    (length <= content.len()).then(|| content.split_to(length))
}

/// Returns the headers that `Connection` names (RFC 9110, section 7.6.1).
fn connection_options(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(CONNECTION).iter();
    let values = values.filter_map(|value| value.to_str().ok());
    let names = values.flat_map(|value| value.split(','));
    names.filter_map(|name| name.trim().parse().ok()).collect()
}

/// Most bytes of headers and trailers together that are kept, as they are recorded. Not a setting: larger ones come from a
/// mistake, or from a service that echoes a header of the client.
const MAX_FIELDS: usize = 64 * 1024;

/// What each of them has beyond its name and value.
const FIELD: usize = 5;

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

    /// A client with write access to the nodes can write records that no server writes.
    #[test]
    fn a_forged_record_is_unreadable() {
        let resource = LockKey::from("key");
        let ids = (
            ExecutionId::from_random([1; 16]),
            Fingerprint::from_digest([2; 32]),
        );
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
            (1, vec![]),
        ];
        for (status, headers) in forged {
            let mut content = vec![0; 8];
            content.put_u16(status);
            content.put_u16(u16::try_from(headers.len()).unwrap());
            for (name, value) in headers {
                content.put_u8(0);
                for part in [name.as_bytes(), value] {
                    content.put_u16(u16::try_from(part.len()).unwrap());
                    content.extend(part);
                }
            }
            content.put_u8(0);
            let codec = Codec::default();
            let bytes = codec.write([&ids.0.0, &ids.1.0, resource.as_bytes()], content);
            let record = Record::new(ids.0, ids.1, sha256(&bytes), &bytes);
            let read = replay::<String>(&record, &resource, &codec);
            assert_eq!(read.err(), Some(MALFORMED), "{status}");
        }
    }
}
