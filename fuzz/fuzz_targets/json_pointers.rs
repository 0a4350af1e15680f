//! Keys from JSON bodies, and the refusals of bodies. The first byte chooses the pointer.
//!
//! The key is the string, or the digits of the integer, at the pointer, however the document is written. The refusal of
//! a body is itself valid JSON, whatever the body contains.

#![no_main]

use bytes::Bytes;
use http::Request;
use http::header::CONTENT_TYPE;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use tower_redlock::{
    BufferedBody, KeyError, KeyExtractor, LockKey, LockKeys, Rejection, RequestKind, key,
};
use tower_redlock_fuzz::read_body;

const POINTERS: [&str; 8] = [
    "",
    "/",
    "/id",
    "/a/0/id",
    "/a~1b",
    "/a~0b/1",
    "/a/01",
    "/\u{e9}~01",
];

fuzz_target!(|data: &[u8]| {
    let Some((choice, body)) = data.split_first() else {
        return;
    };
    let pointer = POINTERS[usize::from(*choice) % POINTERS.len()];
    let ours = extract(pointer, body);
    let Ok(document) = serde_json::from_slice::<Value>(body) else {
        let error = ours.expect_err("the body is not JSON");
        for kind in [RequestKind::Http, RequestKind::Grpc] {
            let detail = Rejection::KeyInvalid(error.clone());
            let response = detail.default_response(&kind);
            if kind == RequestKind::Http {
                let (problem, _) = read_body(response);
                let problem: Value = serde_json::from_slice(&problem).expect("it is JSON");
                assert!(problem["detail"].is_string());
            }
        }
        return;
    };
    let expected = match find(&document, pointer) {
        None | Some(Value::Null) => Some(String::new()),
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Number(number)) => {
            let number = number.to_string();
            let digits = number.strip_prefix('-').unwrap_or(&number);
            let is_integer = digits.bytes().all(|digit| digit.is_ascii_digit());
            is_integer.then_some(number)
        }
        Some(_) => None,
    };
    match expected {
        None => assert!(ours.is_err()),
        Some(text) if text.is_empty() => assert_eq!(ours, Ok(None)),
        Some(text) => assert_eq!(ours, Ok(Some(LockKey::from(text).into()))),
    }
    for written in [
        serde_json::to_vec(&document),
        serde_json::to_vec_pretty(&document),
    ] {
        let written = written.expect("it was read");
        assert_eq!(extract(pointer, &written), ours);
    }
});

fn extract(pointer: &'static str, body: &[u8]) -> Result<Option<LockKeys>, KeyError> {
    let request = Request::post("/").header(CONTENT_TYPE, "application/json");
    let request = request.extension(BufferedBody(Bytes::copy_from_slice(body)));
    let (parts, ()) = request.body(()).expect("it is valid").into_parts();
    key::json_pointer(pointer).extract(&parts)
}

/// Follows a pointer (RFC 6901).
fn find<'a>(document: &'a Value, pointer: &str) -> Option<&'a Value> {
    let mut steps = pointer.split('/').skip(1);
    steps.try_fold(document, |at, step| {
        let step = step.replace("~1", "/").replace("~0", "~");
        match at {
            Value::Object(members) => members.get(&step),
            Value::Array(elements) if step == "0" || !step.starts_with('0') => {
                elements.get(step.parse::<usize>().ok()?)
            }
            _ => None,
        }
    })
}
