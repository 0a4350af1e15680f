//! Finds the end of a reply, and parses the most common replies itself.

use std::sync::Arc;

use deadpool_redis::redis::{Value, parse_redis_value};

/// Finds the end of each reply in a stream of bytes, so that the parser of redis-rs gets whole replies.
///
/// # Design
///
/// That parser can also continue an incomplete reply. But it then owns the bytes that were read, and each number, which
/// is what a request usually gets, costs it two clearings of a buffer of eight kibibytes and three allocations.
#[derive(Debug, Default)]
pub(super) struct ReplyEnd {
    /// The elements that are outstanding in each open array, the outermost first.
    open: Vec<usize>,
    /// The length of the elements and the headers before them.
    at: usize,
}

impl ReplyEnd {
    /// Returns the length of the reply at the beginning of `bytes`, or `None` until it is complete. `bytes` must begin
    /// like those of the call before if that returned `None`.
    ///
    /// # Errors
    ///
    /// The bytes are no reply.
    pub(super) fn find(&mut self, bytes: &[u8]) -> Result<Option<usize>, Arc<str>> {
        loop {
            let rest = &bytes[self.at..];
            let Some(kind) = rest.first() else {
                return Ok(None);
            };
            if !b":+-$*".contains(kind) {
                return Err(INVALID.into());
            }
            // A line that is too long is refused however many pieces it arrives in.
            let Some(line) = rest.iter().take(MAX_LINE).position(|byte| *byte == b'\n') else {
                return match rest.len() <= MAX_LINE {
                    true => Ok(None),
                    false => Err(INVALID.into()),
                };
            };
            // The parser would take a lone line feed for a part of the line, and end the reply elsewhere.
            if !rest[..line].ends_with(b"\r") {
                return Err(INVALID.into());
            }
            let mut length = line + 1;
            let mut elements = 0;
            if matches!(kind, b'$' | b'*') {
                let count = parse_number(&rest[..length]).ok_or(INVALID)?;
                // A negative count stands for nil.
                if count >= 0 {
                    let count = usize::try_from(count).map_err(|_| INVALID)?;
                    match kind {
                        b'*' => elements = count,
                        _ => length = length.saturating_add(count).saturating_add(2),
                    }
                }
            }
            if rest.len() < length {
                return Ok(None);
            }
            self.at += length;
            if elements > 0 {
                if self.open.len() == MAX_DEPTH {
                    return Err(INVALID.into());
                }
                self.open.push(elements);
                continue;
            }
            while let Some(outstanding) = self.open.last_mut() {
                *outstanding -= 1;
                if *outstanding > 0 {
                    break;
                }
                self.open.pop();
            }
            if self.open.is_empty() {
                return Ok(Some(std::mem::take(&mut self.at)));
            }
        }
    }
}

/// Parses a whole reply.
///
/// # Errors
///
/// The bytes are no reply.
pub(super) fn parse_reply(bytes: &[u8]) -> Result<Value, Arc<str>> {
    match bytes {
        b"+OK\r\n" => Ok(Value::Okay),
        [b':', ..] => parse_number(bytes)
            .map(Value::Int)
            .ok_or_else(|| INVALID.into()),
        _ => parse_redis_value(bytes).map_err(|_| INVALID.into()),
    }
}

/// Parses a line that has a number behind its kind.
fn parse_number(line: &[u8]) -> Option<i64> {
    let digits = line.get(1..)?.strip_suffix(b"\r\n")?;
    str::from_utf8(digits).ok()?.parse().ok()
}

const INVALID: &str = "the reply is not RESP2; check that the URL names a Redis server";

/// The maximum length of a line, with its end.
const MAX_LINE: usize = 64 << 10;
/// The depth of nested arrays; the scripts nest two.
const MAX_DEPTH: usize = 8;
