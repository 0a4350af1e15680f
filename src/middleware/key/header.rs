//! Keys from the head of a request: any header, a cookie, the host, the method, and extensions, which other middleware
//! inserted.
//!
//! Cookies are split here, in ten lines, because the crate `cookie` brings seven crates, with `time`, into every program that
//! locks. A fuzz target compares the two.

use std::any::type_name;
use std::fmt::Debug;

use http::HeaderName;
use http::header::{COOKIE, HOST};
use http::request::Parts;
use http::uri::Authority;
use percent_encoding::percent_decode;

use crate::middleware::key::extractor::{Described, KeyExtractor, named};
use crate::middleware::routed::matched_no_route;
use crate::middleware::token_header::are_alike;
use crate::protocol::{KeyError, LockKey};

/// Takes the key from the request header `name`, byte for byte: `7` and `"7"` are two keys.
///
/// Missing or empty: the request names no resource. Sent more than once (also under a name that is equal
/// once `_` is read as `-`, as CGI and WSGI do), or not UTF-8: the request is malformed. The client chooses header values: put a literal in front
/// (`("upload", key::header("x-upload-id"))`), and an authentication layer outside.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("upload", key::header("x-upload-id"));
/// # let _: &dyn KeyExtractor = &key;
/// ```
///
/// # Panics
///
/// If `name` is not a header name.
pub fn header<N>(name: N) -> impl KeyExtractor + Clone
where
    N: TryInto<HeaderName, Error: Debug>,
{
    let name = name.try_into();
    let name = name.expect("key::header needs a valid header name");
    Described::part(format!("header `{name}`"), move |parts| {
        Ok(header_text(&name, parts)?.and_then(named))
    })
}

/// Takes the text of a key from a header; see [`header`].
pub(crate) fn header_text<'a>(
    name: &HeaderName,
    parts: &'a Parts,
) -> Result<Option<&'a str>, KeyError> {
    let mut values = parts.headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    let malformed = |what: &str| KeyError::malformed(format!("header `{name}` {what}"));
    // Proxies and frameworks disagree on which of the values counts.
    let is_other = |other: &HeaderName| other != name && are_alike(other.as_str().as_bytes(), name);
    if values.next().is_some() || parts.headers.keys().any(is_other) {
        return Err(malformed("is sent more than once"));
    }
    let text = str::from_utf8(value.as_bytes());
    text.map(Some).map_err(|_| malformed("is not UTF-8"))
}

/// Takes the key from the cookie `name` as a `CookieJar` reads it: name and value are percent-decoded
/// and trimmed, and quotes around the value are removed.
///
/// So `sid=REAL`, `sid=%52EAL` and `%73id="REAL"` are one key, because they are one session. Missing or
/// empty: the request names no resource. Sent more than once, in any spelling, or not UTF-8 when
/// decoded: the request is malformed. A session cookie is a secret and would be visible on the nodes: use its hash
/// ([`hashed`](crate::KeyExtractor::hashed)).
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("session", key::cookie("sid").hashed());
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn cookie(name: &'static str) -> impl KeyExtractor + Clone {
    Described::part(format!("cookie `{name}`"), move |parts| {
        let malformed = |what: &str| KeyError::malformed(format!("cookie `{name}` {what}"));
        // HTTP/2 may send each cookie in a header of its own (RFC 9113, section 8.2.3).
        let headers = parts.headers.get_all(COOKIE).iter();
        let pairs = headers.flat_map(|header| header.as_bytes().split(|byte| *byte == b';'));
        let mut values = pairs.filter_map(|pair| {
            let sign = pair.iter().position(|byte| *byte == b'=')?;
            let (found, value) = (&pair[..sign], &pair[sign + 1..]);
            let is_ours = percent_decode(trimmed(found)).eq(name.bytes());
            is_ours.then(|| percent_decode(trimmed(value)))
        });
        let Some(value) = values.next() else {
            return Ok(None);
        };
        if values.next().is_some() {
            return Err(malformed("is sent more than once"));
        }
        let text = value.decode_utf8().map_err(|_| malformed("is not UTF-8"))?;
        // After decoding, because a jar reads `%22` as a quote.
        let quoted = text
            .strip_prefix('"')
            .and_then(|text| text.strip_suffix('"'));
        Ok(named(quoted.unwrap_or(&text)))
    })
}

/// Removes the white space that a `CookieJar` removes: that of Unicode, in a header that is UTF-8.
fn trimmed(text: &[u8]) -> &[u8] {
    match str::from_utf8(text) {
        Ok(text) => text.trim().as_bytes(),
        Err(_) => text.trim_ascii(),
    }
}

/// Takes the host of the request, in lower case, without its port and without the final dot of a
/// fully qualified name: for services that distinguish tenants by host.
///
/// The host stands in the request target (as in every HTTP/2 request), in the `Host` header, or in
/// both. Missing or empty: the request names no resource. The request is malformed if
///
/// * the two have different hosts, or both have a port and these differ (RFC 9113, section 8.3.1): the lock
///   could be on one tenant and the handler on another;
/// * it has several `Host` headers, or an invalid one;
/// * either has user information, `user@host` (RFC 9110, section 4.2.4).
///
/// A `Forwarded` header is ignored: whether a client can set it depends on the proxies in front.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("tenant", key::host());
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn host() -> impl KeyExtractor + Clone {
    Described::part("header `host`", |parts| {
        let malformed = |what: &str| KeyError::malformed(format!("header `host` {what}"));
        let mut headers = parts.headers.get_all(HOST).iter();
        let header = headers.next();
        if headers.next().is_some() {
            return Err(malformed("is sent more than once"));
        }
        let target = parts.uri.authority().map(name).transpose()?;
        // A request without a host has an empty header (RFC 9112, section 3.2).
        let header = header.filter(|value| !value.is_empty() || target.is_some());
        let authority = header.map(|value| Authority::try_from(value.as_bytes()));
        let authority = authority.transpose();
        let authority = authority.map_err(|_| malformed("is not a host"))?;
        let header = authority.as_ref().map(name).transpose()?;
        if let (Some((target, port)), Some((host, other))) = (&target, &header)
            && (target != host || (port.is_some() && other.is_some() && port != other))
        {
            return Err(malformed("is not the host of the request target"));
        }
        Ok(target.or(header).and_then(|(host, _)| named(&host)))
    })
}

/// Returns the normalized host of an authority, and its port.
fn name(authority: &Authority) -> Result<(String, Option<u16>), KeyError> {
    if authority.as_str().contains('@') {
        return Err(KeyError::malformed("the host has user information"));
    }
    let host = authority.host().to_ascii_lowercase();
    let host = host.strip_suffix('.').unwrap_or(&host);
    if host.is_empty() || host.ends_with('.') {
        return Err(KeyError::malformed("the host has no name"));
    }
    // `a[::1]` has no host that readers agree on.
    let address = host.strip_prefix('[');
    let address = address.and_then(|address| address.strip_suffix(']'));
    if address.unwrap_or(host).contains(['[', ']']) {
        return Err(KeyError::malformed("the host has misplaced brackets"));
    }
    // A proxy has joined two headers; no host name has a comma.
    if host.contains(',') {
        return Err(KeyError::malformed("the request has several hosts"));
    }
    Ok((host.to_owned(), authority.port_u16()))
}

/// Takes the request's method as a part of the key, so that `PUT /a/7` and `DELETE /a/7` do not
/// exclude each other.
///
/// ```
/// use tower_redlock::{KeyExtractor, key};
///
/// let key = ("document", key::method(), key::query("id"));
/// # let _: &dyn KeyExtractor = &key;
/// ```
#[must_use]
pub fn method() -> impl KeyExtractor + Clone {
    |parts: &Parts| LockKey::from(parts.method.as_str())
}

/// Takes the key from the extension of type `T`, such as the user that authentication found.
///
/// Empty: the request names no resource. Missing: 500 `misconfigured`, logged with the name of the
/// type. A client cannot leave an extension out: the layer that inserts it is missing, or stands inside
/// of the layer that needs it. A request that matched no route of an axum router names no resource, and
/// passes to its 404.
///
/// ```
/// use tower_redlock::key;
///
/// #[derive(Clone)]
/// struct UserId(String);
///
/// impl UserId {
///     fn as_str(&self) -> &str {
///         &self.0
///     }
/// }
///
/// let by_user = ("user", key::extension::<UserId>(UserId::as_str));
/// # let _: &dyn tower_redlock::KeyExtractor = &by_user;
/// ```
///
/// If requests may lack the extension, such as those of anonymous clients, a closure reads it:
///
/// ```
/// use tower_redlock::key;
///
/// # #[derive(Clone)]
/// # struct UserId(String);
/// let user = key::from_fn(|parts| Some(parts.extensions.get::<UserId>()?.0.clone()));
/// # let _: &dyn tower_redlock::KeyExtractor = &user;
/// ```
pub fn extension<T>(name: impl Fn(&T) -> &str + Send + Sync + 'static) -> impl KeyExtractor + Clone
where
    T: Send + Sync + 'static,
{
    Described::part(
        format!("extension `{}`", type_name::<T>()),
        move |parts| match parts.extensions.get::<T>() {
            Some(extension) => Ok(named(name(extension))),
            // Authentication of routes does not see a request that matched none.
            None if matched_no_route(parts) => Ok(None),
            None => Err(KeyError::misconfigured(format!(
                "the request has no extension `{}`; apply the layer that inserts it outside of the one that takes a key from it (with `.layer(..)` calls: after it), or read it with `key::from_fn` if requests may lack it",
                type_name::<T>()
            ))),
        },
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use http::{HeaderValue, Request};

    use super::*;
    use crate::protocol::LockKeys;

    /// Returns the head of a request with a header of each value.
    pub(crate) fn parts_with(name: &'static str, values: &[&[u8]]) -> Parts {
        let mut request = Request::new(());
        for value in values {
            let value = HeaderValue::from_bytes(value).unwrap();
            request.headers_mut().append(name, value);
        }
        request.into_parts().0
    }

    fn extract(values: &[&[u8]]) -> Result<Option<LockKeys>, KeyError> {
        header("X-Key").extract(&parts_with("x-key", values))
    }

    #[test]
    fn a_header_is_the_key_byte_for_byte() {
        for text in ["a b", "\"a b\"", "\"\"", "\"", r#""a";p=1"#, "a\"b"] {
            let key = LockKey::from(text).into();
            assert_eq!(extract(&[text.as_bytes()]), Ok(Some(key)));
        }
        assert_eq!(extract(&[]), Ok(None));
        assert_eq!(extract(&[b""]), Ok(None));
    }

    #[test]
    fn ambiguous_and_unreadable_headers_are_malformed() {
        assert!(matches!(
            extract(&[b"a", b"a"]),
            Err(KeyError::Malformed(_))
        ));
        assert!(matches!(extract(&[b"\xff"]), Err(KeyError::Malformed(_))));
    }

    fn extract_cookie(values: &[&[u8]]) -> Result<Option<LockKeys>, KeyError> {
        cookie("id").extract(&parts_with("cookie", values))
    }

    #[test]
    fn a_cookie_is_the_one_that_a_cookie_jar_has() {
        let key = |key: &str| Ok(Some(LockKey::from(key).into()));
        let rows: [(&[&[u8]], &str); 17] = [
            (&[b"a=1; id=7; b=2"], "7"),
            (&[b"a=1", b"id=a=b"], "a=b"),
            (&[b"id=\"7\""], "7"),
            // A no-break space.
            (&[b"\xc2\xa0id=\xc2\xa07"], "7"),
            (&[b"id=REAL"], "REAL"),
            (&[b"id=%52EAL"], "REAL"),
            (&[b"%69d=REAL"], "REAL"),
            (&[b"a=1; %69%64 = %52%45%41%4c ;b=2"], "REAL"),
            (&[b"id=%22REAL%22"], "REAL"),
            (&[b"id=%22%52EAL\""], "REAL"),
            (&[b"id=a%3Bb"], "a;b"),
            (&[b"id=%"], "%"),
            (&[b"id=%zz"], "%zz"),
            (&[b"id=a+b"], "a+b"),
            (&[b"id=a=b"], "a=b"),
            (&[b"id=\"REAL\""], "REAL"),
            (&[b"ID=7; id=8"], "8"),
        ];
        for (values, expected) in rows {
            assert_eq!(extract_cookie(values), key(expected), "{expected}");
        }
    }

    #[test]
    fn missing_and_empty_cookies_name_nothing() {
        for value in [
            "",
            "a=1",
            "id",
            "%69d",
            "id=",
            "id=\"\"",
            "id=%22%22",
            "xid=7",
            "ID=7",
            "idx=7",
        ] {
            assert_eq!(extract_cookie(&[value.as_bytes()]), Ok(None), "{value}");
        }
    }

    #[test]
    fn ambiguous_and_unreadable_cookies_are_malformed() {
        let rows: [&[&[u8]]; 7] = [
            &[b"id=1; id=2"],
            &[b"id=1; %69d=2"],
            &[b"id=1", b"%69d=1"],
            &[b"id=; %69d=1"],
            &[b"id=\xff"],
            &[b"id=%ff"],
            &[b"%69d=\xff"],
        ];
        for headers in rows {
            assert!(matches!(
                extract_cookie(headers),
                Err(KeyError::Malformed(_))
            ));
        }
    }

    fn extract_host(target: &str, headers: &[&str]) -> Result<Option<LockKeys>, KeyError> {
        let mut request = Request::get(target);
        for value in headers {
            request = request.header(HOST, *value);
        }
        host().extract(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn the_host_is_that_of_the_target_or_else_of_the_header() {
        let rows: [(&str, &[&str], &str); 12] = [
            ("/x", &["A.Example"], "a.example"),
            ("/x", &["a.example:8080"], "a.example"),
            ("/x", &["a.example."], "a.example"),
            ("/x", &["A.Example.:80"], "a.example"),
            ("/x", &["[::1]:80"], "[::1]"),
            ("http://A.example/x", &[], "a.example"),
            ("http://a.example./x", &["a.example"], "a.example"),
            ("http://A.example:80/x", &["a.EXAMPLE"], "a.example"),
            ("http://a.example/x", &["a.example:8080"], "a.example"),
            ("http://a.example:80/x", &["a.example:80"], "a.example"),
            ("http://[::1]/x", &["[::1]:80"], "[::1]"),
            ("http://a.example:80/x", &["a.example"], "a.example"),
        ];
        for (target, headers, expected) in rows {
            let key = LockKey::from(expected).into();
            assert_eq!(
                extract_host(target, headers),
                Ok(Some(key)),
                "{target} {headers:?}"
            );
        }
        for nothing in [&[][..], &[""]] {
            assert_eq!(extract_host("/x", nothing), Ok(None));
        }
    }

    #[test]
    fn an_ambiguous_or_unreadable_host_is_malformed() {
        let rows: [(&str, &[&str]); 16] = [
            ("/x", &["a", "a"]),
            ("/x", &["a b"]),
            ("/x", &["QQQQ.Q[::0]:80"]),
            ("/x", &["b.example@a.example"]),
            ("/x", &["."]),
            ("/x", &["a.example.."]),
            ("/x", &["%61.example"]),
            ("/x", &["a.example,b.example"]),
            ("http://A.example:80/x", &["b"]),
            ("http://a.example/x", &["b.example"]),
            ("http://a.example/x", &["a.example.b"]),
            ("http://a.example/x", &[""]),
            ("http://a.example/x", &["a.example"; 2]),
            ("http://a.example:80/x", &["a.example:8080"]),
            ("http://user@a.example/x", &[]),
            ("http://b.example@a.example/x", &["a.example"]),
        ];
        for (target, headers) in rows {
            let found = extract_host(target, headers);
            assert!(
                matches!(found, Err(KeyError::Malformed(_))),
                "{target} {headers:?}"
            );
        }
    }
}
