//! Calls: one script call for several requests.
//!
//! # Implementation details
//!
//! A server takes much longer for many script calls than for one that does the work of all. Requests of one
//! [`CallKind`] can share a call: each is granted or refused on its own, as if it had been sent alone. The scripts read
//! all keys by one `MGET` before the first write, so no key may come twice in a call. A call for a single request would
//! take longer than its own script, which is used instead.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::time::Duration;
use std::vec;

use deadpool_redis::redis::Value;

use crate::node::job::Request;
use crate::node::packet::{EncodedCommand, EncodedPart, Packet};
use crate::node::redis::decode::is_refusal_of_call;
use crate::node::redis::encode::{Decimal, GenerationCheck, encode_into, put_argument, put_length};
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
        let (name, packet) = single(request)?;
        let record = name.record.as_ref();
        if name.slots.is_some() && !matches!(packet.command.op, Op::Confirm { .. }) {
            return None;
        }
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
            | Op::Shared(_)
            | Op::ReleaseAfter { .. }
            | Op::Inspect
            | Op::Revoke { .. }
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

/// Returns the hash of the key of a request, if the request is on a single one.
pub(super) fn key_hash(request: &Request) -> Option<u64> {
    let (name, packet) = single(request)?;
    let hash = || BuildHasherDefault::<DefaultHasher>::default().hash_one(&name.lock);
    Some(*packet.hash.get_or_init(hash))
}

/// Returns the part of a request in a call, if the request is on a single key.
pub(super) fn part(request: &Request) -> Option<&EncodedPart> {
    let (name, packet) = single(request)?;
    Some(packet.part.get_or_init(|| encode_part(name, packet)))
}

fn single(request: &Request) -> Option<(&KeyNames, &Packet)> {
    match request {
        Request::Command(packet) => match &*packet.command.names {
            [name] => Some((name, packet)),
            _ => None,
        },
        Request::Ping => None,
    }
}

/// Encodes the lock and, if the request has a number, the fence; then the owner and the number.
fn encode_part(name: &KeyNames, packet: &Packet) -> EncodedPart {
    let number = match packet.command.op {
        Op::Acquire { proposal, .. } => proposal,
        Op::Confirm { token, .. } => token,
        _ => None,
    };
    let mut bytes = Vec::with_capacity(256);
    put_argument(&mut bytes, &name.lock);
    if number.is_some() {
        put_argument(&mut bytes, &name.fence);
    }
    let keys = bytes.len();
    put_argument(&mut bytes, packet.command.owner.as_str().as_bytes());
    if let Some(number) = number {
        put_argument(&mut bytes, Decimal::new(number).digits());
    }
    EncodedPart { bytes, keys }
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
    let common = encode_common(kind, check);
    let keys = each * requests.len() + usize::from(generation_key.is_some());
    let arguments = 3 + keys + common.arguments + each * requests.len();
    put_length(output, b'*', arguments);
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
    output.extend(&common.bytes);
    for part in parts {
        output.extend(&part.bytes[part.keys..]);
    }
}

/// Encodes the arguments that the requests of a call have in common.
fn encode_common(kind: CallKind, check: &GenerationCheck) -> EncodedCommand {
    let generation = check.generation.as_ref();
    let generation = generation.map_or(&b""[..], |generation| generation.as_str().as_bytes());
    let mut common = EncodedCommand::new();
    match kind {
        CallKind::Acquire { ttl, retention } | CallKind::Confirm { ttl, retention } => {
            common.put_millis(ttl).put_millis(retention).put(generation)
        }
        CallKind::AcquireUnfenced { ttl } => common.put_millis(ttl).put(generation),
        CallKind::Release { notifies } => common.put(if notifies { b"1" } else { b"" }),
    };
    common
}

/// The reply to a call, which is dealt out to its requests in order.
pub(super) enum CallReply {
    /// The call has a single request.
    Single(Value),
    /// There is a reply for each request.
    Each(vec::IntoIter<Value>),
    /// There is one reply for all requests: a 1 grants what each has asked for, anything else is an error or a lost memory.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::packet::Trail;
    use crate::node::redis::socket::tests::parse_all;
    use crate::protocol::admission::Generation;
    use crate::protocol::message::Command;
    use crate::protocol::{LockKey, Namespace, OwnerToken};

    const TTL: Duration = Duration::from_secs(1);
    const RETENTION: Duration = Duration::from_secs(2);
    const GENERATION: &str = "r:100:999999:run";

    /// Returns a request of the owner with this number on a key of its own.
    fn request(number: u8, op: Op, notifies: bool) -> Request {
        let key = LockKey::from(format!("k{number}"));
        let names = Namespace::default().names(&key.into(), |_| [0; 32]);
        let command = Command {
            names: names.expect("the key is valid").into(),
            owner: OwnerToken::from_random([number; 16]),
            op,
        };
        Request::Command(Packet::of_attempt(command, notifies, Trail::default()))
    }

    fn acquire(proposal: Option<u64>) -> Op {
        Op::Acquire {
            proposal,
            ttl: TTL,
            retention: RETENTION,
        }
    }

    fn confirm(token: u64) -> Op {
        Op::Confirm {
            token: Some(token),
            ttl: TTL,
            retention: RETENTION,
        }
    }

    fn arguments(requests: &[Request], check: &GenerationCheck) -> Vec<String> {
        let mut written = Vec::new();
        encode_call_into(requests.iter(), check, &mut written);
        let Value::Array(arguments) = parse_all(&written).remove(0) else {
            panic!("a command is an array");
        };
        let text = |argument| match argument {
            Value::BulkString(bytes) => String::from_utf8(bytes).expect("all of them are text"),
            other => panic!("no argument: {other:?}"),
        };
        arguments.into_iter().map(text).collect()
    }

    /// The restart guard off; on with a server whose generation is unknown; and with one that is known.
    fn checks() -> [GenerationCheck; 3] {
        let key = || Some(b"redlock:generation"[..].into());
        let check = |key, generation| GenerationCheck { key, generation };
        let known = Generation::parse(GENERATION);
        assert!(known.is_some());
        [check(None, None), check(key(), None), check(key(), known)]
    }

    #[test]
    fn calls_have_the_arguments_of_the_script_headers() {
        let all = &*SCRIPTS;
        let [off, unknown, known] = &checks();
        let large = 1_763_659_999_000_003;
        let acquires = [acquire(Some(5)), acquire(Some(large))];
        let confirms = [confirm(5), confirm(large)];
        let unfenced = [acquire(None), acquire(None)];
        let releases = [Op::Release, Op::ReleaseExecuted];
        let (lock, check) = (&all.acquire_batch, &all.confirm_batch);
        let (plain, release) = (&all.acquire_batch_unfenced, &all.release_batch);
        let without = "4 L1 F1 L2 F2 1000 2000 none O1 5 O2 1763659999000003";
        let guarded = "5 L1 F1 L2 F2 G 1000 2000 none O1 5 O2 1763659999000003";
        let compared = "5 L1 F1 L2 F2 G 1000 2000 generation O1 5 O2 1763659999000003";
        let cases = [
            (off, &acquires, false, lock, without),
            (unknown, &acquires, false, lock, guarded),
            (known, &acquires, false, lock, compared),
            (off, &confirms, false, check, without),
            (unknown, &confirms, false, check, guarded),
            (known, &confirms, false, check, compared),
            (
                known,
                &unfenced,
                false,
                plain,
                "3 L1 L2 G 1000 generation O1 O2",
            ),
            (off, &releases, false, release, "2 L1 L2 none O1 O2"),
            (known, &releases, false, release, "2 L1 L2 none O1 O2"),
            (known, &releases, true, release, "2 L1 L2 1 O1 O2"),
        ];
        for (check, ops, notifies, script, rest) in cases {
            let [first, second] = ops.clone();
            let requests = [request(1, first, notifies), request(2, second, notifies)];
            let owners = [1, 2].map(|id| OwnerToken::from_random([id; 16]));
            let part = |word: &str| match word {
                "L1" => "redlock:{k1}".to_owned(),
                "F1" => "redlock:{k1}:fence".to_owned(),
                "L2" => "redlock:{k2}".to_owned(),
                "F2" => "redlock:{k2}:fence".to_owned(),
                "G" => "redlock:generation".to_owned(),
                "O1" => owners[0].as_str().to_owned(),
                "O2" => owners[1].as_str().to_owned(),
                "generation" => GENERATION.to_owned(),
                "none" => String::new(),
                number => number.to_owned(),
            };
            let mut expected = vec!["EVALSHA".to_owned(), script.hash.clone()];
            expected.extend(rest.split(' ').map(part));
            assert_eq!(arguments(&requests, check), expected, "{ops:?}, {check:?}");
        }
    }

    /// A request may be in a call of each kind of check: its nodes share what is encoded.
    #[test]
    fn a_single_request_is_sent_by_its_own_script() {
        let ops = [acquire(Some(5)), acquire(None), confirm(5), Op::Release];
        for (op, check) in ops.iter().flat_map(|op| checks().map(|check| (op, check))) {
            let of = || request(1, op.clone(), true);
            let (alone, shared) = (of(), of());
            let mut expected = Vec::new();
            encode_into(&alone, &check, &mut expected);
            // As part of a call before.
            assert!(part(&shared).is_some());
            let mut written = Vec::new();
            encode_call_into([&shared].into_iter(), &check, &mut written);
            assert_eq!(written, expected, "{op:?}, {check:?}");
        }
    }

    #[test]
    fn a_call_of_64_requests_has_lengths_of_three_digits() {
        let check = &checks()[2];
        let requests: Vec<_> = (0..64)
            .map(|number| request(number, acquire(Some(5)), false))
            .collect();
        let sent = arguments(&requests, check);
        assert_eq!(sent.len(), 3 + 129 + 3 + 128);
        assert_eq!(sent[2], "129");
        assert_eq!(sent[3 + 2 * 63], "redlock:{k63}");
        assert_eq!(sent[3 + 128..][..2], ["redlock:generation", "1000"]);
        let last = OwnerToken::from_random([63; 16]);
        assert_eq!(sent[3 + 129 + 3 + 126..], [last.as_str(), "5"]);
    }
}
