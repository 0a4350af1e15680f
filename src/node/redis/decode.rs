//! Redis replies as votes. The tests compare requests and replies with the headers of the scripts.

use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::redis::{FromRedisValue, Value};

use crate::node::failure::NodeFailure;
use crate::node::redis::describe::{describe_refusal, with_remedy};
use crate::node::redis::table::number;
use crate::protocol::message::{
    Command, HolderMark, KeyState, MAX_HOLDERS, Op, Reply, Scanned, Seen, SharedOp,
};
use crate::protocol::{FencingToken, Record, Shown};

/// Decodes a server's reply to a command.
///
/// # Errors
///
/// The reply is no vote.
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn decode(command: &Command, value: &Value, node: &Arc<str>) -> Result<Reply, NodeFailure> {
    // Asked here, because most replies are no errors.
    if matches!(value, Value::ServerError(_))
        && let Some(why) = describe_refusal(value)
    {
        return Err(NodeFailure::refused(node, why));
    }
    match read(command, value) {
        Some(Reply::Overflow) => Err(NodeFailure::overflow(node)),
        Some(reply) => Ok(reply),
        None => Err(NodeFailure::refused(
            node,
            describe_unexpected(&command.op, value),
        )),
    }
}

/// Describes a reply that is no vote.
fn describe_unexpected(op: &Op, value: &Value) -> String {
    match (op, value) {
        // It has the form of a reply with a record, so the value of the record key is none.
        (_, Value::Array(parts)) if matches!(**parts, [Value::Int(4), _, _]) => {
            with_remedy(FOREIGN_RECORD.into())
        }
        (Op::Fetch, Value::BulkString(_)) => with_remedy(FOREIGN_RECORD.into()),
        _ => "unexpected reply from lock script; check that the URL names the Redis server itself"
            .into(),
    }
}

/// The reply to a call as a whole, if its script answers all requests at once: what each asked for is granted.
const ALL_GRANTED: Value = Value::Int(1);

/// Returns the part of the reply to a call of `count` jobs that is the reply to the job at `place`, with this operation, as if
/// that had been sent alone. Each part is taken once.
pub(super) fn deal(reply: &mut Value, count: usize, place: usize, op: &Op) -> Value {
    match reply {
        single if count == 1 => std::mem::replace(single, Value::Nil),
        Value::Array(parts) if parts.len() == count => {
            std::mem::replace(&mut parts[place], Value::Nil)
        }
        all if *all == ALL_GRANTED => {
            let vote = Some(op).filter(|op| op.is_vote());
            let number = vote.map(|op| i64::try_from(number(op).unwrap_or(0)));
            number.and_then(Result::ok).map_or(ALL_GRANTED, Value::Int)
        }
        // An error, or a lost memory.
        common => common.clone(),
    }
}

/// Reads the reply to a command, as the headers of the scripts describe it; `None` if it is none.
fn read(command: &Command, value: &Value) -> Option<Reply> {
    let op = &command.op;
    Some(match (op, value) {
        (Op::Ping, _) => Reply::Released,
        (_, Value::Array(parts)) => return read_parts(command, parts),
        (Op::Acquire { .. }, Value::Int(granted)) => Reply::Granted(fence_of(*granted)?),
        (Op::Confirm { .. }, Value::Int(confirmed)) => Reply::At(fence_of(*confirmed)?),
        // The plain `SET`, which gives no reason.
        (Op::Acquire { proposal: None, .. }, Value::Okay) => Reply::Granted(0),
        (Op::Acquire { proposal: None, .. }, Value::Nil) => held(-1, b""),
        (Op::Shared(SharedOp::Acquire { .. }), Value::Int(_)) => Reply::Granted(0),
        (Op::Shared(SharedOp::Confirm { .. }), Value::Int(_)) => Reply::At(0),
        (Op::Shared(SharedOp::Announce { .. }), Value::Int(_)) => Reply::Released,
        (op, Value::Int(-3)) if op.is_release() => Reply::Lost,
        (op, Value::Int(_)) if op.is_release() => Reply::Released,
        (Op::Fetch, Value::BulkString(record)) => {
            Reply::Whole(Record::from_bytes(record.as_slice().into())?)
        }
        (Op::Fetch, Value::Nil) => Reply::NotDone,
        _ => return None,
    })
}

/// Reads a reply that is an array.
fn read_parts(command: &Command, parts: &[Value]) -> Option<Reply> {
    let op = &command.op;
    let is_slot = || command.names.iter().any(|name| name.slots.is_some());
    Some(match (op, parts) {
        (Op::Acquire { .. }, [Value::Int(0), Value::Int(pttl), Value::Int(1)]) => {
            let expires_in = millis(*pttl);
            Reply::HeldShared { expires_in }
        }
        (
            Op::Acquire { .. } | Op::Shared(SharedOp::Acquire { .. }),
            [Value::Int(0), Value::Int(pttl), Value::BulkString(word)],
        ) => match is_slot() {
            true => Reply::HeldSlot {
                expires_in: millis(*pttl),
                free: free_slots(word),
            },
            false => held(*pttl, word),
        },
        (Op::Acquire { .. }, [Value::Int(2)]) => Reply::Overflow,
        (op, [Value::Int(3)]) if op.is_vote() => Reply::Amnesia,
        (
            Op::Acquire { .. }
            | Op::Confirm { .. }
            | Op::Record { .. }
            | Op::TopUp { .. }
            | Op::Look,
            [Value::Int(4), Value::BulkString(record), Value::Int(pttl)],
        ) => Reply::Done {
            record: Record::from_bytes(record.as_slice().into())?,
            // Negative if another client removed the expiry.
            expires_in: millis(*pttl).unwrap_or_default(),
        },
        (Op::Acquire { .. }, [Value::Int(5)]) => Reply::Intended,
        (
            Op::Confirm { .. } | Op::Shared(SharedOp::Confirm { .. }) | Op::Record { .. },
            [Value::Int(0)],
        ) => Reply::Lost,
        (Op::Look, [Value::Int(0)]) => Reply::NotDone,
        (Op::Revoke { .. }, [Value::Int(-1)]) => Reply::TooLate,
        (Op::Revoke { .. }, [Value::Int(was_held)]) => Reply::Revoked {
            was_held: *was_held != 0,
        },
        (Op::Inspect, [numbers @ .., Value::BulkString(mark), Value::Array(holders)]) => {
            let numbers = i64::from_redis_value_refs(numbers).ok()?;
            let [is_held, pttl, readers, token, records, at] = numbers.try_into().ok()?;
            Reply::Seen(Box::new(Seen {
                state: state(is_held, pttl, readers),
                fence: fence_of(token),
                is_recorded: records > 0,
                at: millis(at)?,
                mark: (!mark.is_empty()).then(|| HolderMark::from_bytes(mark)),
                holders: holders
                    .iter()
                    .take(MAX_HOLDERS)
                    .filter_map(|shown| Shown::parse(bytes(shown)?)?.holder)
                    .collect(),
            }))
        }
        (Op::Scan { .. }, [Value::BulkString(next), Value::Array(names)]) => {
            let names = names.iter().map(|name| bytes(name).map(Arc::from));
            Reply::Scanned(Box::new(Scanned {
                names: names.collect::<Option<_>>()?,
                next: (next != b"0").then(|| next.as_slice().into()),
            }))
        }
        _ => return None,
    })
}

/// The expiry is negative if the key never expires, or if the server did not report it.
fn held(pttl: i64, shown: &[u8]) -> Reply {
    Reply::Held {
        expires_in: millis(pttl),
        shown: Shown::parse(shown).map(Arc::new),
    }
}

fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        _ => None,
    }
}

/// Returns a time in milliseconds; keys without an expiry have a negative one.
fn millis(time: i64) -> Option<Duration> {
    u64::try_from(time).ok().map(Duration::from_millis)
}

/// Reads one digit for each slot, which is not 0 if the slot is free.
fn free_slots(digits: &[u8]) -> u64 {
    let digits = digits.iter().take(u64::BITS as usize).enumerate();
    let free = digits.filter(|(_, digit)| **digit != b'0');
    free.fold(0, |free, (slot, _)| free | 1 << slot)
}

fn state(is_held: i64, pttl: i64, readers: i64) -> KeyState {
    let left = millis(pttl);
    match usize::try_from(readers) {
        _ if is_held == 0 => KeyState::Free,
        Ok(readers) => KeyState::Shared { readers, left },
        Err(_) => KeyState::Held { left },
    }
}

fn fence_of(fence: i64) -> Option<u64> {
    let fence = u64::try_from(fence).ok()?;
    (fence <= FencingToken::MAX.as_u64()).then_some(fence)
}

/// Without the name of the key, which contains the user's key.
const FOREIGN_RECORD: &str =
    "WRONGTYPE the record key (NAMESPACE:{KEY}:done) holds no record of this version";

#[cfg(test)]
mod tests;
