//! A parser for the replies of a server: the small part of RESP2 that the scripts use.

use std::num::ParseIntError;
use std::str::Utf8Error;

use deadpool_redis::redis::{Value, parse_redis_value};

/// Why no reply could be parsed.
#[derive(Debug, PartialEq, Eq)]
enum ParseError {
    /// The end of the reply has not been read yet.
    Incomplete,
    /// The bytes are no reply.
    Invalid,
}

/// The bytes that were not parsed yet.
struct Unparsed<'a>(&'a [u8]);

/// Parses the reply at the beginning of `bytes` and returns it with its length, or `None` if it is incomplete.
///
/// # Errors
///
/// The bytes are no reply.
pub(super) fn read_reply(bytes: &[u8]) -> Result<Option<(Value, usize)>, &'static str> {
    let mut rest = Unparsed(bytes);
    match rest.value(MAX_DEPTH) {
        Ok(value) => Ok(Some((value, bytes.len() - rest.0.len()))),
        Err(ParseError::Incomplete) => Ok(None),
        Err(ParseError::Invalid) => {
            Err("the reply is not RESP2; check that the URL names a Redis server")
        }
    }
}

impl<'a> Unparsed<'a> {
    fn value(&mut self, depth: usize) -> Result<Value, ParseError> {
        let whole = self.0;
        let line = self.line()?;
        let (kind, text) = line.split_first().ok_or(ParseError::Invalid)?;
        match kind {
            b':' => Ok(Value::Int(number(text)?)),
            b'+' if text == b"OK" => Ok(Value::Okay),
            b'+' => Ok(Value::SimpleString(str::from_utf8(text)?.to_owned())),
            // redis-rs distinguishes the kinds of errors.
            b'-' => parse_redis_value(&whole[..line.len() + LINE_END.len()])
                .map_err(|_| ParseError::Invalid),
            b'$' => match usize::try_from(number(text)?) {
                Ok(length) if length <= MAX_BULK => {
                    Ok(Value::BulkString(self.bulk(length)?.to_vec()))
                }
                Ok(_) => Err(ParseError::Invalid),
                Err(_) => Ok(Value::Nil),
            },
            b'*' => match usize::try_from(number(text)?) {
                Ok(length) if length <= MAX_PARTS && depth > 0 => (0..length)
                    .map(|_| self.value(depth - 1))
                    .collect::<Result<_, _>>()
                    .map(Value::Array),
                Ok(_) => Err(ParseError::Invalid),
                Err(_) => Ok(Value::Nil),
            },
            _ => Err(ParseError::Invalid),
        }
    }

    fn line(&mut self) -> Result<&'a [u8], ParseError> {
        let end = self.0.iter().position(|byte| *byte == b'\n');
        let Some(end) = end else {
            let is_endless = self.0.len() > MAX_LINE;
            return Err(if is_endless {
                ParseError::Invalid
            } else {
                ParseError::Incomplete
            });
        };
        let (line, rest) = self.0.split_at(end + 1);
        self.0 = rest;
        line.strip_suffix(LINE_END).ok_or(ParseError::Invalid)
    }

    fn bulk(&mut self, length: usize) -> Result<&'a [u8], ParseError> {
        let end = length.checked_add(LINE_END.len());
        let (bulk, rest) = end
            .and_then(|end| self.0.split_at_checked(end))
            .ok_or(ParseError::Incomplete)?;
        self.0 = rest;
        bulk.strip_suffix(LINE_END).ok_or(ParseError::Invalid)
    }
}

fn number(text: &[u8]) -> Result<i64, ParseError> {
    Ok(str::from_utf8(text)?.parse()?)
}

impl From<Utf8Error> for ParseError {
    fn from(_: Utf8Error) -> Self {
        Self::Invalid
    }
}

impl From<ParseIntError> for ParseError {
    fn from(_: ParseIntError) -> Self {
        Self::Invalid
    }
}

const LINE_END: &[u8] = b"\r\n";

// An incomplete reply is parsed anew when more of it has been read, so replies are bounded. No reply of a script
// comes near the bounds.

/// The depth of nested arrays; the scripts nest none.
const MAX_DEPTH: usize = 2;
/// The length of an array; a call has one element for each of its requests.
const MAX_PARTS: usize = 1024;
/// The length of an error.
const MAX_LINE: usize = 64 << 10;
/// The length of a record.
const MAX_BULK: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All kinds of replies that a server may send, one behind the other.
    const STREAM: &[u8] = b":1\r\n:-9007199254740993\r\n+OK\r\n+PONG\r\n$-1\r\n*-1\r\n$0\r\n\r\n$4\r\na\r\nb\r\n\
        *3\r\n:4\r\n$2\r\nxy\r\n:100\r\n*0\r\n-NOSCRIPT No matching script.\r\n-ERR\r\n*1\r\n*1\r\n:5\r\n";

    fn read_all(mut bytes: &[u8]) -> Vec<Value> {
        let mut values = Vec::new();
        while let Some((value, length)) = read_reply(bytes).unwrap() {
            values.push(value);
            bytes = &bytes[length..];
        }
        assert!(bytes.is_empty());
        values
    }

    #[test]
    fn read_reply_returns_what_redis_rs_parses() {
        let values = read_all(STREAM);
        assert_eq!(values.len(), 13);
        let mut bytes = STREAM;
        for value in values {
            let (_, length) = read_reply(bytes).unwrap().unwrap();
            assert_eq!(parse_redis_value(&bytes[..length]).unwrap(), value);
            bytes = &bytes[length..];
        }
    }

    #[test]
    fn read_reply_returns_none_for_every_incomplete_reply() {
        let mut bytes = STREAM;
        while !bytes.is_empty() {
            let (_, length) = read_reply(bytes).unwrap().unwrap();
            for short in 0..length {
                assert_eq!(read_reply(&bytes[..short]), Ok(None), "{short} of {length}");
            }
            bytes = &bytes[length..];
        }
    }

    #[test]
    fn read_reply_refuses_what_is_no_reply() {
        for bytes in [
            &b"\r\n"[..],
            b"\n",
            b":1\n",
            b":\r\n",
            b":one\r\n",
            b":99999999999999999999\r\n",
            b"$1\r\nabc",
            b"%1\r\n",
            b"HTTP/1.1 400 Bad Request\r\n",
            b"*1\r\n*1\r\n*1\r\n:1\r\n",
            b"*1025\r\n",
            b"*9223372036854775807\r\n",
            b"$9223372036854775807\r\n",
            &[b'+'; MAX_LINE + 1],
            b"*2\r\n:1\r\nx\r\n",
        ] {
            assert!(
                read_reply(bytes).is_err(),
                "{:?}",
                String::from_utf8_lossy(bytes)
            );
        }
    }

    proptest! {
        #[test]
        fn read_reply_never_panics(bytes in proptest::collection::vec(prop_oneof![
            Just(b'\r'), Just(b'\n'), Just(b'*'), Just(b'$'), Just(b':'), b'0'..=b'9', any::<u8>()
        ], 0..64)) {
            if let Ok(Some((_, length))) = read_reply(&bytes) {
                prop_assert!(length <= bytes.len());
            }
        }
    }
}
