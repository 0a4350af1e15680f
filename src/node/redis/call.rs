//! Calls: one script call for several requests.
//!
//! # Implementation details
//!
//! A server takes much longer for many script calls than for one that does the work of all. Requests of one
//! [`CallKind`] can share a call: each is granted or refused on its own, as if it had been sent alone. The scripts read
//! all keys by one `MGET` before the first write, so no key may come twice in a call. A call for a single request would
//! take longer than its own script, which is used instead.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;
use std::vec;

use deadpool_redis::redis::Value;

use crate::node::job::Request;
use crate::node::packet::{EncodedPart, Packet};
use crate::node::redis::decode::is_refusal_of_call;
use crate::node::redis::encode::{
    Decimal, GenerationCheck, encode_into, millis, put_argument, put_length,
};
use crate::node::redis::scripts::{Lua, SCRIPTS};
use crate::protocol::KeyNames;
use crate::protocol::message::Op;

/// What requests must have in common to share a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallKind {
    Acquire {
        ttl: Duration,
        retention: Duration,
    },
    /// Without fences, but with the generation. Without both, requests are plain commands and share no call.
    AcquireUnfenced {
        ttl: Duration,
    },
    Confirm {
        ttl: Duration,
        retention: Duration,
    },
    Release {
        notifies: bool,
    },
}

impl CallKind {
    /// Returns the kind of call that the request can share: one on a single key, and not on its record.
    pub(super) fn of(request: &Request, check: &GenerationCheck) -> Option<Self> {
        let Request::Command(packet) = request else {
            return None;
        };
        let [name] = &*packet.command.names else {
            return None;
        };
        let record = name.record.as_ref();
        match packet.command.op {
            Op::Acquire {
                proposal,
                ttl,
                retention,
            } if record.is_none() => match proposal {
                Some(_) => Some(Self::Acquire { ttl, retention }),
                None if check.generation.is_some() => Some(Self::AcquireUnfenced { ttl }),
                None => None,
            },
            Op::Confirm {
                token: Some(_),
                ttl,
                retention,
            } if record.is_none() => Some(Self::Confirm { ttl, retention }),
            Op::Release if record.is_some_and(|record| record.intent.is_some()) => None,
            Op::Release | Op::ReleaseExecuted => Some(Self::Release {
                notifies: packet.notifies,
            }),
            Op::Acquire { .. }
            | Op::Confirm { .. }
            | Op::Record { .. }
            | Op::TopUp { .. }
            | Op::Look
            | Op::Fetch => None,
        }
    }

    fn script(self) -> &'static Lua {
        match self {
            Self::Acquire { .. } => &SCRIPTS.acquire_batch,
            Self::AcquireUnfenced { .. } => &SCRIPTS.acquire_batch_unfenced,
            Self::Confirm { .. } => &SCRIPTS.confirm_batch,
            Self::Release { .. } => &SCRIPTS.release_batch,
        }
    }

    fn is_fenced(self) -> bool {
        matches!(self, Self::Acquire { .. } | Self::Confirm { .. })
    }
}

/// Returns the part of a request in a call, if the request is on a single key.
pub(super) fn part(request: &Request) -> Option<&EncodedPart> {
    let Request::Command(packet) = request else {
        return None;
    };
    let [name] = &*packet.command.names else {
        return None;
    };
    Some(packet.part.get_or_init(|| encode_part(name, packet)))
}

/// Encodes the lock and, if the request has a number, the fence; then the owner and the number.
fn encode_part(name: &KeyNames, packet: &Packet) -> EncodedPart {
    let number = match packet.command.op {
        Op::Acquire { proposal, .. } => proposal,
        Op::Confirm { token, .. } => token,
        _ => None,
    };
    let mut bytes = Vec::with_capacity(256);
    let mut hasher = DefaultHasher::new();
    name.lock.hash(&mut hasher);
    put_argument(&mut bytes, &name.lock);
    if number.is_some() {
        put_argument(&mut bytes, &name.fence);
    }
    let keys = bytes.len();
    put_argument(&mut bytes, packet.command.owner.as_str().as_bytes());
    if let Some(number) = number {
        put_argument(&mut bytes, Decimal::new(number).digits());
    }
    EncodedPart {
        bytes,
        keys,
        hash: hasher.finish(),
    }
}

/// Appends a call to `output` as it goes over the wire. Several requests of a call are of one kind.
pub(super) fn encode_call_into<'a>(
    requests: impl ExactSizeIterator<Item = &'a Request> + Clone,
    check: &GenerationCheck,
    output: &mut Vec<u8>,
) {
    let Some(first) = requests.clone().next() else {
        return;
    };
    let kind = CallKind::of(first, check).filter(|_| requests.len() > 1);
    let Some(kind) = kind else {
        return encode_into(first, check, output);
    };
    let generation_key = match kind {
        CallKind::Release { .. } => None,
        _ => check.key.as_deref(),
    };
    let each = if kind.is_fenced() { 2 } else { 1 };
    let common = match kind {
        CallKind::Acquire { .. } | CallKind::Confirm { .. } => 3,
        CallKind::AcquireUnfenced { .. } => 2,
        CallKind::Release { .. } => 1,
    };
    let keys = each * requests.len() + usize::from(generation_key.is_some());
    put_length(output, b'*', 3 + keys + common + each * requests.len());
    put_argument(output, b"EVALSHA");
    put_argument(output, kind.script().hash.as_bytes());
    put_argument(output, Decimal::new(keys as u64).digits());
    let parts = requests.filter_map(part);
    for part in parts.clone() {
        output.extend(&part.bytes[..part.keys]);
    }
    if let Some(key) = generation_key {
        put_argument(output, key);
    }
    let generation = check.generation.as_ref();
    let generation = generation.map_or(&b""[..], |generation| generation.as_str().as_bytes());
    match kind {
        CallKind::Acquire { ttl, retention } | CallKind::Confirm { ttl, retention } => {
            put_argument(output, Decimal::new(millis(ttl)).digits());
            put_argument(output, Decimal::new(millis(retention)).digits());
            put_argument(output, generation);
        }
        CallKind::AcquireUnfenced { ttl } => {
            put_argument(output, Decimal::new(millis(ttl)).digits());
            put_argument(output, generation);
        }
        CallKind::Release { notifies } => put_argument(output, if notifies { b"1" } else { b"" }),
    }
    for part in parts {
        output.extend(&part.bytes[part.keys..]);
    }
}

/// The reply to a call, which is dealt out to its requests in order.
pub(super) enum CallReply {
    /// The call has a single request.
    Single(Value),
    /// There is a reply for each request.
    Each(vec::IntoIter<Value>),
    /// There is one reply for all requests: what they asked for if it is a one, else an error.
    Common(Value),
}

impl CallReply {
    pub(super) fn new(reply: Value, requests: usize) -> Self {
        match reply {
            single if requests == 1 => Self::Single(single),
            Value::Array(parts) if parts.len() == requests => Self::Each(parts.into_iter()),
            common => Self::Common(common),
        }
    }

    /// Returns the reply to the next request, as if it had been sent alone.
    pub(super) fn next(&mut self, request: &Request) -> Value {
        match self {
            Self::Single(reply) => std::mem::replace(reply, Value::Nil),
            Self::Each(replies) => replies.next().unwrap_or(Value::Nil),
            Self::Common(Value::Int(1)) => match asked_number(request).map(i64::try_from) {
                Some(Ok(number)) => Value::Int(number),
                _ => Value::Int(1),
            },
            Self::Common(reply) => reply.clone(),
        }
    }

    /// Returns whether the server refused the call as a whole before it executed anything, so that it may accept the
    /// requests one by one.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self, Self::Common(reply) if is_refusal_of_call(reply))
    }
}

/// Returns the number that a granted or confirmed request has as its reply.
fn asked_number(request: &Request) -> Option<u64> {
    let Request::Command(packet) = request else {
        return None;
    };
    match packet.command.op {
        Op::Acquire { proposal, .. } => Some(proposal.unwrap_or(0)),
        Op::Confirm { token, .. } => Some(token.unwrap_or(0)),
        _ => None,
    }
}
