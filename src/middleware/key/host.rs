//! Keys from the host that a request is for.

use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;

use crate::middleware::key::KeyExtractor;
use crate::protocol::{KeyError, LockKey, LockKeys};

/// Takes the host that the request is for, in lower case and without its port: for services that
/// tell tenants apart by it.
///
/// From the request target if it has one, as every HTTP/2 request does, else from the `Host`
/// header (RFC 9112, section 3.2.2). Missing or empty: the request names no resource. Several
/// `Host` headers, or one that is no host: the request is malformed. A `Forwarded` header is not
/// looked at: who may set it depends on what stands in front.
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
        if let Some(target) = parts.uri.authority() {
            return Ok(key(target));
        }
        let mut headers = parts.headers.get_all(HOST).iter();
        let Some(value) = headers.next().filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        let malformed = |what: &str| KeyError::malformed(format!("header `host` {what}"));
        if headers.next().is_some() {
            return Err(malformed("is sent more than once"));
        }
        let authority = Authority::try_from(value.as_bytes());
        Ok(key(&authority.map_err(|_| malformed("is no host"))?))
    }
}

fn key(authority: &Authority) -> Option<LockKeys> {
    let host = authority.host().to_lowercase();
    (!host.is_empty()).then(|| LockKey::from(host).into())
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
        assert_eq!(extract("http://A.example:80/x", &["b"]), key("a.example"));
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
    }
}
