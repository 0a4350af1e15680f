//! Keys from the host of a request.

use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;

use crate::middleware::key::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

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
pub fn host() -> Host {
    Host { _private: () }
}

/// Extractor of [`host`].
#[derive(Debug, Clone)]
pub struct Host {
    _private: (),
}

impl KeyExtractor for Host {
    fn extract(&self, parts: &Parts) -> Result<Option<LockKeys>, KeyError> {
        let malformed = |what: &str| KeyError::malformed(format!("header `host` {what}"));
        let mut headers = parts.headers.get_all(HOST).iter();
        let header = headers.next();
        if headers.next().is_some() {
            return Err(malformed("is sent more than once"));
        }
        let target = parts.uri.authority().map(name).transpose()?;
        let header = match header {
            // A request without a host has an empty header (RFC 9112, section 3.2).
            Some(value) if value.is_empty() && target.is_none() => None,
            Some(value) => {
                let authority = Authority::try_from(value.as_bytes());
                let authority = authority.map_err(|_| malformed("is not a host"))?;
                Some(name(&authority)?)
            }
            None => None,
        };
        if let (Some((target, port)), Some((host, other))) = (&target, &header)
            && (target != host || (port.is_some() && other.is_some() && port != other))
        {
            return Err(malformed("is not the host of the request target"));
        }
        Ok(target
            .or(header)
            .map(|(host, _)| LockKey::from(host).into()))
    }

    fn source(&self) -> Option<String> {
        Some("header `host`".to_owned())
    }
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

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn extract(target: &str, headers: &[&str]) -> Result<Option<LockKeys>, KeyError> {
        let mut request = Request::get(target);
        for value in headers {
            request = request.header(HOST, *value);
        }
        host().extract(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn the_host_is_that_of_the_target_or_else_of_the_header() {
        let key = |key: &str| Ok(Some(LockKey::from(key).into()));
        let both = extract("http://A.example:80/x", &["a.EXAMPLE"]);
        assert_eq!(both, key("a.example"));
        assert_eq!(extract("/x", &["B.example:8080"]), key("b.example"));
        assert_eq!(extract("/x", &["[::1]:80"]), key("[::1]"));
        assert_eq!(extract("/x", &[]), Ok(None));
        assert_eq!(extract("/x", &[""]), Ok(None));
    }

    #[test]
    fn an_ambiguous_or_unreadable_host_is_malformed() {
        for headers in [["a", "a"].as_slice(), &["a b"], &["QQQQ.Q[::0]:80"]] {
            assert!(matches!(
                extract("/x", headers),
                Err(KeyError::Malformed(_))
            ));
        }
        let differing = extract("http://A.example:80/x", &["b"]);
        assert!(matches!(differing, Err(KeyError::Malformed(_))));
    }
}
