//! Keys from the host that a request is for.

use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;

use crate::middleware::key::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the host that the request is for, in lower case, without its port and without the dot that
/// may end a full name: for services that tell tenants apart by it.
///
/// It stands in the request target (every HTTP/2 request has one there), in the `Host` header, or in
/// both. Missing or empty: the request names no resource. The request is malformed if
///
/// * the two differ, by the host or by ports that both name (RFC 9113, section 8.3.1): the lock would
///   be on one tenant and the handler, which may read the other place, on another;
/// * there are several `Host` headers, or one that is no host;
/// * either has user information, `user@host` (RFC 9110, section 4.2.4).
///
/// A `Forwarded` header is not looked at: who may set it depends on what stands in front.
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
            // What a request has that is for no host (RFC 9112, section 3.2).
            Some(value) if value.is_empty() && target.is_none() => None,
            Some(value) => {
                let authority = Authority::try_from(value.as_bytes());
                let authority = authority.map_err(|_| malformed("is no host"))?;
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
}

/// Returns what an authority names, in one spelling, and the port if it has one.
fn name(authority: &Authority) -> Result<(String, Option<u16>), KeyError> {
    if authority.as_str().contains('@') {
        return Err(KeyError::malformed("the host has user information"));
    }
    let host = authority.host().to_ascii_lowercase();
    let host = host.strip_suffix('.').unwrap_or(&host);
    if host.is_empty() || host.ends_with('.') {
        return Err(KeyError::malformed("the host has no name"));
    }
    // No name of a host has one: a proxy has merged two headers.
    if host.contains(',') {
        return Err(KeyError::malformed("the host is several"));
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
        for headers in [["a", "a"].as_slice(), &["a b"]] {
            assert!(matches!(
                extract("/x", headers),
                Err(KeyError::Malformed(_))
            ));
        }
        let differing = extract("http://A.example:80/x", &["b"]);
        assert!(matches!(differing, Err(KeyError::Malformed(_))));
    }
}
