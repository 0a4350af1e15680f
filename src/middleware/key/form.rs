//! Keys from forms: the query string, and bodies that a `BufferBodyLayer` has read. Keys from JSON bodies.
//!
//! Forms are split here, because the crate `form_urlencoded` replaces what is not UTF-8, by which two keys would be one. A
//! fuzz target compares the two.

use http::Method;
use http::header::CONTENT_ENCODING;
use http::request::Parts;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode};

use crate::middleware::buffered::BufferedBody;
use crate::middleware::key::extractor::{Described, KeyExtractor, named};
use crate::middleware::response::media_type;
use crate::protocol::{KeyError, LockKeys};

/// All but the unreserved characters, which mean the same whether they are encoded or not (RFC 3986, section 2.3).
pub(crate) const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// Takes the key from the query parameter `name`, decoded as a form field: `%41` and `A` are the
/// same key, and so are `+` and `%20`.
///
/// Missing or empty: the request names no resource. Given more than once, or not UTF-8 when
/// decoded: the request is malformed.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("invoice", key::query("number"));
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn query(name: &'static str) -> impl KeyExtractor + Clone {
    Described::part(format!("query parameter `{name}`"), move |parts| {
        let query = parts.uri.query().unwrap_or_default();
        form_value(query, name, "query parameter")
    })
}

/// Finds the value of a name in `application/x-www-form-urlencoded` data.
fn form_value(form: &str, name: &str, what: &str) -> Result<Option<LockKeys>, KeyError> {
    let malformed = |problem: &str| KeyError::malformed(format!("{what} `{name}` {problem}"));
    // Before anything is decoded, because `%2B` is a plus.
    let spaced = form.replace('+', " ");
    let pairs = spaced.split('&');
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let ours = pairs.filter(|(found, _)| percent_decode(found.as_bytes()).eq(name.bytes()));
    let mut values = ours.map(|(_, value)| percent_decode(value.as_bytes()));
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(malformed("is given more than once"));
    }
    let text = value.decode_utf8().map_err(|_| malformed("is not UTF-8"))?;
    Ok(named(&text))
}

/// Takes the key from the field `name` of a form in the body
/// (`application/x-www-form-urlencoded`), decoded.
///
/// Of GET and HEAD, whose bodies mean nothing, it takes the query parameter `name`, as axum's `Form` does.
///
/// Missing or empty: the request names no resource. Given more than once, not UTF-8 when decoded,
/// or a body of another content type or with a content encoding: the request is malformed. Put a layer
/// that decodes bodies outside of the [`BufferBodyLayer`](crate::BufferBodyLayer). Without a
/// `BufferBodyLayer` outside of the lock's layer: 500 `misconfigured`, except for GET and HEAD.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("account", key::form_field("account"));
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn form_field(name: &'static str) -> impl KeyExtractor + Clone {
    Described::part(format!("form field `{name}`"), move |parts| {
        if matches!(parts.method, Method::GET | Method::HEAD) {
            let query = parts.uri.query().unwrap_or_default();
            return form_value(query, name, "form field");
        }
        let body = buffered(parts, "key::form_field")?;
        let media_type = media_type(&parts.headers);
        if !media_type.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
            return Err(KeyError::malformed(
                "the body is not application/x-www-form-urlencoded",
            ));
        }
        let form = str::from_utf8(&body.0);
        let form = form.map_err(|_| KeyError::malformed("the form is not UTF-8"))?;
        form_value(form, name, "form field")
    })
}

/// Takes the key from the value at a JSON pointer (RFC 6901) in the body: a string, or an
/// integer by its digits.
///
/// Missing, null or empty: the request names no resource. A value that is neither a string nor an integer
/// of 64 bits, a body that is not JSON, has another content type than `application/json` and
/// `application/*+json`, or has a content encoding: the request is malformed. Put a layer that
/// decodes bodies outside of the [`BufferBodyLayer`](crate::BufferBodyLayer). If an object has a member more
/// than once, the last one counts; refuse such bodies in the handler, as types with a derived `Deserialize`
/// do. Without a `BufferBodyLayer` outside of the lock's layer: 500 `misconfigured`.
///
/// # Panics
///
/// If `pointer` is not empty and does not begin with `/`.
///
/// ```
/// use tower_redlock::key;
///
/// let both_accounts = (
///     "account",
///     key::each(key::json_pointer("/from"), key::json_pointer("/to")),
/// );
/// # let _: &dyn tower_redlock::KeyExtractor = &both_accounts;
/// ```
#[cfg(feature = "json")]
#[must_use]
pub fn json_pointer(pointer: &'static str) -> impl KeyExtractor + Clone {
    use serde_json::Value;

    assert!(
        pointer.is_empty() || pointer.starts_with('/'),
        "a JSON pointer is empty or begins with `/`"
    );
    Described::part(format!("JSON pointer `{pointer}`"), move |parts| {
        let body = buffered(parts, "key::json_pointer")?;
        let media_type = media_type(&parts.headers).to_ascii_lowercase();
        let subtype = media_type.strip_prefix("application/").unwrap_or("");
        if subtype != "json" && !subtype.ends_with("+json") {
            return Err(KeyError::malformed("the body is not application/json"));
        }
        let json: Value = serde_json::from_slice(&body.0)
            .map_err(|error| KeyError::malformed(format!("the body is not JSON: {error}")))?;
        match json.pointer(pointer) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(named(text)),
            Some(Value::Number(number)) if number.is_i64() || number.is_u64() => {
                Ok(named(&number.to_string()))
            }
            Some(_) => Err(KeyError::malformed(format!(
                "`{pointer}` is neither a string nor an integer"
            ))),
        }
    })
}

fn buffered<'a>(parts: &'a Parts, extractor: &str) -> Result<&'a BufferedBody, KeyError> {
    let body = BufferedBody::of(parts).ok_or_else(|| {
        KeyError::misconfigured(format!(
            "{extractor} needs the body of the request; apply a BufferBodyLayer outside of the RedlockLayer"
        ))
    })?;
    let mut encodings = parts.headers.get_all(CONTENT_ENCODING).iter();
    let is_plain = |value: &[u8]| value.is_empty() || value.eq_ignore_ascii_case(b"identity");
    // Some bytes are valid both encoded and decoded. Then the lock and the handler would use different
    // resources.
    if !encodings.all(|value| is_plain(value.as_bytes())) {
        return Err(KeyError::malformed("the body has a content encoding"));
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Request;
    use http::header::CONTENT_TYPE;

    use super::*;
    use crate::protocol::LockKey;

    fn parts(content_type: &str, body: &'static [u8]) -> Parts {
        let request = Request::post("/").header(CONTENT_TYPE, content_type);
        let mut parts = request.body(()).unwrap().into_parts().0;
        parts
            .extensions
            .insert(BufferedBody(Bytes::from_static(body)));
        parts
    }

    fn key(key: &str) -> Result<Option<LockKeys>, KeyError> {
        Ok(Some(LockKey::from(key).into()))
    }

    #[test]
    fn a_form_field_is_decoded() {
        let form = "application/x-www-form-urlencoded";
        let extract = |body| form_field("id").extract(&parts(form, body));
        assert_eq!(extract(b"a=1&id=%41+b"), key("A b"));
        assert_eq!(extract(b"a=1"), Ok(None));
        assert_eq!(extract(b""), Ok(None));
        for body in [b"id=1&id=2".as_slice(), b"id=%ff", b"\xff"] {
            assert!(matches!(extract(body), Err(KeyError::Malformed(_))));
        }
    }

    #[test]
    fn body_keys_refuse_another_content_type_as_malformed_and_an_unread_body_as_misconfigured() {
        for content_type in ["", "text/plain", "multipart/form-data", "application/jsonx"] {
            let parts = parts(content_type, b"id=1");
            assert!(matches!(
                form_field("id").extract(&parts),
                Err(KeyError::Malformed(_))
            ));
            #[cfg(feature = "json")]
            assert!(matches!(
                json_pointer("/id").extract(&parts),
                Err(KeyError::Malformed(_))
            ));
        }
        let unread = Request::post("/").body(()).unwrap().into_parts().0;
        let refused = form_field("id").extract(&unread);
        assert!(matches!(refused, Err(KeyError::Misconfigured(_))));
    }

    #[cfg(feature = "json")]
    #[test]
    fn a_json_value_is_a_string_or_an_integer() {
        let extract = |body| {
            json_pointer("/a/0/id").extract(&parts("application/ld+json; charset=utf-8", body))
        };
        assert_eq!(extract(br#"{"a":[{"id":"x y"}]}"#), key("x y"));
        assert_eq!(extract(br#"{"a":[{"id":7}]}"#), key("7"));
        assert_eq!(extract(br#"{"a":[{"id":-7}]}"#), key("-7"));
        let largest = br#"{"a":[{"id":18446744073709551615}]}"#;
        assert_eq!(extract(largest), key("18446744073709551615"));
        for nothing in [
            br#"{"a":[{"id":""}]}"#.as_slice(),
            br#"{"a":[{"id":null}]}"#,
            br#"{"a":[]}"#,
            b"7",
        ] {
            assert_eq!(extract(nothing), Ok(None));
        }
        for malformed in [
            br#"{"a":[{"id":1.5}]}"#.as_slice(),
            br#"{"a":[{"id":18446744073709551616}]}"#,
            br#"{"a":[{"id":true}]}"#,
            br#"{"a":[{"id":[7]}]}"#,
            br#"{"a":"#,
            b"",
        ] {
            assert!(matches!(extract(malformed), Err(KeyError::Malformed(_))));
        }
    }

    fn extract_parameter(query_string: &str) -> Result<Option<LockKeys>, KeyError> {
        let uri = format!("/path?{query_string}");
        let request = Request::get(uri).body(()).unwrap();
        query("id").extract(&request.into_parts().0)
    }

    #[test]
    fn a_parameter_is_decoded() {
        for (query_string, expected) in [
            ("a=1&id=7", "7"),
            ("a=1&id=7&&", "7"),
            ("%69d=%41+b%20c", "A b c"),
            ("id=a%2Fb%00", "a/b\0"),
            ("id=%", "%"),
            ("id=%7", "%7"),
            ("id=a=b", "a=b"),
        ] {
            assert_eq!(
                extract_parameter(query_string),
                key(expected),
                "{query_string}"
            );
        }
    }

    #[test]
    fn missing_and_empty_parameters_name_nothing() {
        for query_string in ["", "a=1", "id", "id=", "ID=7&xid=7"] {
            assert_eq!(extract_parameter(query_string), Ok(None), "{query_string}");
        }
        let without = Request::get("/path").body(()).unwrap().into_parts().0;
        assert_eq!(query("id").extract(&without), Ok(None));
    }

    #[test]
    fn ambiguous_and_unreadable_parameters_are_malformed() {
        for query_string in [
            "id=1&id=2",
            "id=7&id=7",
            "id=&id=7",
            "id=7&%69d=8",
            "id=%ff",
        ] {
            let found = extract_parameter(query_string);
            assert!(
                matches!(found, Err(KeyError::Malformed(_))),
                "{query_string}"
            );
        }
    }
}
