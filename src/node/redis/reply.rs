//! The replies of a server, as they come from a socket: RESP2, of which scripts use a small part.

use std::num::ParseIntError;
use std::str::Utf8Error;

use deadpool_redis::redis::{Value, parse_redis_value};

/// Why there is no reply.
#[derive(Debug, PartialEq, Eq)]
enum Stop {
    /// Its end has not come in yet.
    Short,
    /// It is none.
    Unreadable,
}

/// What has come in and was not read yet.
struct Rest<'a>(&'a [u8]);

/// Reads the reply at the beginning of `bytes`, and says how long it is; `None` as long as its end has
/// not come in.
///
/// # Errors
///
/// What is there is no reply.
pub(super) fn read_reply(bytes: &[u8]) -> Result<Option<(Value, usize)>, &'static str> {
    let mut rest = Rest(bytes);
    match rest.value(MAX_DEPTH) {
        Ok(value) => Ok(Some((value, bytes.len() - rest.0.len()))),
        Err(Stop::Short) => Ok(None),
        Err(Stop::Unreadable) => Err("what it sends is no reply of a Redis server"),
    }
}

impl<'a> Rest<'a> {
    fn value(&mut self, depth: usize) -> Result<Value, Stop> {
        let whole = self.0;
        let line = self.line()?;
        let (kind, text) = line.split_first().ok_or(Stop::Unreadable)?;
        match kind {
            b':' => Ok(Value::Int(number(text)?)),
            b'+' if text == b"OK" => Ok(Value::Okay),
            b'+' => Ok(Value::SimpleString(str::from_utf8(text)?.to_owned())),
            // How an error is told apart is redis-rs's business.
            b'-' => parse_redis_value(&whole[..line.len() + LINE_END.len()])
                .map_err(|_| Stop::Unreadable),
            b'$' => match usize::try_from(number(text)?) {
                Ok(length) if length <= MAX_BULK => {
                    Ok(Value::BulkString(self.bulk(length)?.to_vec()))
                }
                Ok(_) => Err(Stop::Unreadable),
                Err(_) => Ok(Value::Nil),
            },
            b'*' => match usize::try_from(number(text)?) {
                Ok(length) if length <= MAX_PARTS && depth > 0 => (0..length)
                    .map(|_| self.value(depth - 1))
                    .collect::<Result<_, _>>()
                    .map(Value::Array),
                Ok(_) => Err(Stop::Unreadable),
                Err(_) => Ok(Value::Nil),
            },
            _ => Err(Stop::Unreadable),
        }
    }

    fn line(&mut self) -> Result<&'a [u8], Stop> {
        let end = self.0.iter().position(|byte| *byte == b'\n');
        let Some(end) = end else {
            let is_endless = self.0.len() > MAX_LINE;
            return Err(if is_endless {
                Stop::Unreadable
            } else {
                Stop::Short
            });
        };
        let (line, rest) = self.0.split_at(end + 1);
        self.0 = rest;
        line.strip_suffix(LINE_END).ok_or(Stop::Unreadable)
    }

    fn bulk(&mut self, length: usize) -> Result<&'a [u8], Stop> {
        let end = length.checked_add(LINE_END.len());
        let (bulk, rest) = end
            .and_then(|end| self.0.split_at_checked(end))
            .ok_or(Stop::Short)?;
        self.0 = rest;
        bulk.strip_suffix(LINE_END).ok_or(Stop::Unreadable)
    }
}

fn number(text: &[u8]) -> Result<i64, Stop> {
    Ok(str::from_utf8(text)?.parse()?)
}

impl From<Utf8Error> for Stop {
    fn from(_: Utf8Error) -> Self {
        Self::Unreadable
    }
}

impl From<ParseIntError> for Stop {
    fn from(_: ParseIntError) -> Self {
        Self::Unreadable
    }
}

const LINE_END: &[u8] = b"\r\n";

/// The rest are bounds within which a reply that has not come in whole is read anew at each piece of it,
/// and that no reply of ours comes near.
///
/// How deep arrays may be in each other; those of our scripts are not.
const MAX_DEPTH: usize = 2;
/// How many parts an array may have; those of our scripts have three at most.
const MAX_PARTS: usize = 64;
/// As long as an error may be.
const MAX_LINE: usize = 64 << 10;
/// As long as a record may be.
const MAX_BULK: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All forms that a server of ours may use, one behind the other.
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
    fn replies_are_what_redis_rs_reads() {
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
    fn a_reply_is_read_once_all_of_it_is_there() {
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
    fn what_is_no_reply_is_an_error() {
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
            b"*65\r\n",
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
        fn no_bytes_are_too_odd(bytes in proptest::collection::vec(prop_oneof![
            Just(b'\r'), Just(b'\n'), Just(b'*'), Just(b'$'), Just(b':'), b'0'..=b'9', any::<u8>()
        ], 0..64)) {
            if let Ok(Some((_, length))) = read_reply(&bytes) {
                prop_assert!(length <= bytes.len());
            }
        }
    }
}
