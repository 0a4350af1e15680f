//! The header with the idempotency key of a request.

use http::HeaderName;
use http::request::Parts;

use crate::middleware::idempotency_key::IdempotencyKey;
use crate::middleware::key::header_text;
use crate::protocol::KeyError;

/// Reads the header, bare or as a structured-field string (RFC 9651, section 3.3.3).
///
/// A proxy joins two headers by a comma, so a bare key must not contain one; a string may.
///
/// # Errors
///
/// The header is malformed.
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn read_key(parts: &Parts, name: &HeaderName) -> Result<Option<IdempotencyKey>, KeyError> {
    let malformed = |what: &str| KeyError::malformed(format!("header `{name}` {what}"));
    let Some(text) = header_text(name, parts)? else {
        return Ok(None);
    };
    let key = match text.strip_prefix('"') {
        Some(rest) => unquote(rest).ok_or_else(|| malformed("is an unfinished string"))?,
        None if text.contains(',') => {
            return Err(malformed(
                "has a comma, which also joins two headers; quote the value if the key contains it",
            ));
        }
        None => text.to_owned(),
    };
    key.parse().map(Some)
}

/// Reads a structured-field string behind its first quote.
fn unquote(quoted: &str) -> Option<String> {
    let mut text = String::new();
    let mut chars = quoted.chars();
    loop {
        match chars.next()? {
            '"' => return chars.as_str().is_empty().then_some(text),
            '\\' => text.push(chars.next().filter(|next| matches!(next, '"' | '\\'))?),
            plain @ ' '..='~' => text.push(plain),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::middleware::key::parts_with;

    fn read(values: &[&[u8]]) -> Result<Option<String>, KeyError> {
        let name = HeaderName::from_static("idempotency-key");
        let parts = parts_with("idempotency-key", values);
        let key = read_key(&parts, &name)?;
        Ok(key.map(|key| key.to_string()))
    }

    #[test]
    fn a_key_is_bare_or_a_string() {
        assert_eq!(read(&[]), Ok(None));
        for same in [&b"8e03978e-40d5-43dd"[..], b"\"8e03978e-40d5-43dd\""] {
            assert_eq!(read(&[same]), Ok(Some("8e03978e-40d5-43dd".into())));
        }
        assert_eq!(read(&[b"\"a,b\""]), Ok(Some("a,b".into())));
        assert_eq!(read(&[br#""a\"\\""#]), Ok(Some("a\"\\".into())));
        let longest = "x".repeat(255);
        assert_eq!(read(&[longest.as_bytes()]), Ok(Some(longest.clone())));
    }

    #[test]
    fn an_invalid_key_is_malformed() {
        let long = "x".repeat(256);
        let cases: [&[&[u8]]; 16] = [
            &[b""],
            &[b"\"\""],
            &[b"\""],
            &[br#""a"#],
            &[br#""a\""#],
            &[br#""a\b""#],
            &[br#""a"b""#],
            &[br#""a";p=1"#],
            &[long.as_bytes()],
            &[b"a b"],
            &[b"\"a b\""],
            &[b"a\tb"],
            &["ä".as_bytes()],
            &[b"a", b"a"],
            &[b"a,a"],
            &[b"a,"],
        ];
        for case in cases {
            assert!(
                matches!(read(case), Err(KeyError::Malformed(_))),
                "{case:?}"
            );
        }
        let too_long = read(&[long.as_bytes()]).unwrap_err().to_string();
        assert!(
            too_long.ends_with("the idempotency key is not 1 to 255 characters of visible ASCII")
        );
    }
}
