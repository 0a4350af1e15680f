//! Keys from query strings and form bodies. The first line is the content type, and the rest the form.
//!
//! The key is the only value that another implementation finds for the name. A form with two values for it, or with a
//! value that is not UTF-8, is refused, and so is a body of another type.

#![no_main]

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request};
use libfuzzer_sys::fuzz_target;
use tower_redlock::{BufferedBody, KeyError, KeyExtractor, LockKey, LockKeys, key};
use tower_redlock_fuzz::first_line;

type Extracted = Result<Option<LockKeys>, KeyError>;

fuzz_target!(|data: &[u8]| {
    let (content_type, form) = first_line(data);
    let mut request = Request::new(());
    if let Ok(query) = std::str::from_utf8(form)
        && let Ok(uri) = format!("/path?{query}").parse()
    {
        *request.uri_mut() = uri;
        let query = request.uri().query().unwrap_or_default().to_owned();
        let (parts, ()) = request.clone().into_parts();
        compare(&key::query("id").extract(&parts), query.as_bytes());
    }
    // The key of a form that is sent by GET is in the query string.
    *request.method_mut() = Method::POST;
    let body = BufferedBody(Bytes::copy_from_slice(form));
    request.extensions_mut().insert(body);
    let Ok(content_type) = HeaderValue::from_bytes(content_type) else {
        return;
    };
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, content_type.clone());
    let (parts, ()) = request.into_parts();
    let extracted = key::form_field("id").extract(&parts);
    let essence = content_type.as_bytes().split(|byte| *byte == b';').next();
    let essence = essence.unwrap_or_default().trim_ascii();
    let is_form = essence.eq_ignore_ascii_case(b"application/x-www-form-urlencoded");
    if is_form && std::str::from_utf8(form).is_ok() {
        compare(&extracted, form);
    } else {
        assert!(extracted.is_err());
    }
});

fn compare(ours: &Extracted, form: &[u8]) {
    let theirs: Vec<String> = form_urlencoded::parse(form)
        .filter(|(name, _)| name == "id")
        .map(|(_, value)| value.into_owned())
        .collect();
    match theirs.as_slice() {
        [] => assert_eq!(*ours, Ok(None)),
        [value] if value.contains('\u{fffd}') => {
            // In place of bytes that are not UTF-8, unless the client sent it.
            let sent = Ok(Some(LockKey::from(value).into()));
            assert!(ours.is_err() || *ours == sent);
        }
        [value] if value.is_empty() => assert_eq!(*ours, Ok(None)),
        [value] => assert_eq!(*ours, Ok(Some(LockKey::from(value).into()))),
        _ => assert!(ours.is_err()),
    }
}
