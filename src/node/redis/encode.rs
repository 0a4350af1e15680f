//! Requests as Redis commands.
//!
//! A command is encoded once and shared by all nodes of the attempt. Only the generation, which comes last, differs
//! between nodes.

use std::sync::Arc;
use std::time::Duration;

use crate::node::job::Request;
use crate::node::packet::{EncodedCommand, Packet};
use crate::node::redis::scripts::{Lua, SCRIPTS};
use crate::protocol::admission::Generation;
use crate::protocol::message::{Command, Op, SharedOp};
use crate::protocol::{KeyNames, OwnerToken, RecordNames};

/// The generation that a request for a vote names, so that it counts only in the memory that was admitted.
#[derive(Debug, Default)]
pub(super) struct GenerationCheck {
    /// The key of the generation, if the restart guard is on.
    pub(super) key: Option<Arc<[u8]>>,
    /// The generation of the server on this connection.
    pub(super) generation: Option<Generation>,
}

/// Appends a request to `output` as it goes over the wire.
pub(super) fn encode_into(request: &Request, check: &GenerationCheck, output: &mut Vec<u8>) {
    let Request::Command(packet) = request else {
        return output.extend(b"*1\r\n$4\r\nPING\r\n");
    };
    let encoded = encoded(packet, check);
    // Every request for a vote ends with it.
    let generation = check.generation.as_ref();
    let generation = generation.filter(|_| packet.command.op.asks_for_vote());
    let arguments = encoded.arguments + usize::from(generation.is_some());
    put_length(output, b'*', arguments);
    output.extend(&encoded.bytes);
    if let Some(generation) = generation {
        put_argument(output, generation.as_str().as_bytes());
    }
}

/// Returns the encoded command, without the generation, which differs between the nodes.
fn encoded<'a>(packet: &'a Packet, check: &GenerationCheck) -> &'a EncodedCommand {
    let encode = || encode(&packet.command, packet.notifies, check.key.as_deref());
    packet.encoded.get_or_init(encode)
}

impl EncodedCommand {
    /// Starts a command, with room for the arguments of an ordinary lock.
    pub(super) fn new() -> Self {
        Self {
            arguments: 0,
            bytes: Vec::with_capacity(BYTES),
        }
    }

    /// Appends an argument; the first one is the name of the command.
    pub(super) fn put(&mut self, argument: &[u8]) -> &mut Self {
        self.arguments += 1;
        put_argument(&mut self.bytes, argument);
        self
    }

    fn put_number(&mut self, number: u64) -> &mut Self {
        self.put(Decimal::new(number).digits())
    }

    /// Appends a duration, in milliseconds.
    pub(super) fn put_millis(&mut self, duration: Duration) -> &mut Self {
        self.put_number(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    }

    /// Appends the request to notify subscribers, if there is one.
    fn put_notifies(&mut self, notifies: bool) -> &mut Self {
        if notifies { self.put(b"1") } else { self }
    }
}

/// The size of an ordinary lock's command, or more.
const BYTES: usize = 384;

pub(super) fn put_argument(output: &mut Vec<u8>, argument: &[u8]) {
    put_length(output, b'$', argument.len());
    output.extend(argument);
    output.extend(b"\r\n");
}

pub(super) fn put_length(output: &mut Vec<u8>, kind: u8, length: usize) {
    output.push(kind);
    match u8::try_from(length) {
        // Nearly all lengths are short, and a command has many.
        Ok(short @ 0..10) => output.push(b'0' + short),
        Ok(short @ 10..100) => output.extend([b'0' + short / 10, b'0' + short % 10]),
        _ => output.extend(Decimal::new(length as u64).digits()),
    }
    output.extend(b"\r\n");
}

/// The decimal digits of a number.
pub(super) struct Decimal {
    /// The number is at the end.
    digits: [u8; 20],
    from: usize,
}

impl Decimal {
    pub(super) fn new(mut number: u64) -> Self {
        let (mut digits, mut from) = ([b'0'; 20], 19);
        while number > 0 {
            digits[from] += (number % 10) as u8;
            number /= 10;
            if number > 0 {
                from -= 1;
            }
        }
        Self { digits, from }
    }

    pub(super) fn digits(&self) -> &[u8] {
        &self.digits[self.from..]
    }
}

/// Encodes a command.
fn encode(command: &Command, notifies: bool, generation_key: Option<&[u8]>) -> EncodedCommand {
    let Command { names, owner, op } = command;
    if let [name] = &**names
        && let Some(record) = &name.record
        && let Some(encoded) = encode_once(name, record, command, notifies, generation_key)
    {
        return encoded;
    }
    let (scripts, owner) = (&*SCRIPTS, owner.as_str().as_bytes());
    let slots = names.first().and_then(|name| name.slots.as_deref());
    let slots = slots.map_or(0, |slots| slots.locks.len());
    let single = names.len() == 1;
    let (script, number, ttl, retention) = match *op {
        // The plain command of the Redlock description, which needs no script.
        Op::Acquire {
            proposal: None,
            ttl,
            ..
        } if single && slots == 0 && generation_key.is_none() && !notifies => {
            let mut set = EncodedCommand::new();
            set.put(b"SET").put(&names[0].lock).put(owner);
            set.put(b"NX").put(b"PX").put_millis(ttl);
            return set;
        }
        Op::Acquire {
            proposal: number @ Some(_),
            ttl,
            retention,
        } if single && slots == 0 => (&scripts.acquire, number, ttl, retention),
        Op::Acquire {
            proposal,
            ttl,
            retention,
        } => (&scripts.acquire_all, proposal, ttl, retention),
        Op::Confirm {
            token: Some(number),
            ttl,
            retention,
        } if single => (&scripts.confirm, Some(number), ttl, retention),
        Op::Confirm {
            token,
            ttl,
            retention,
        } => (&scripts.confirm_all, token, ttl, retention),
        Op::Shared(op) => {
            return encode_shared(names, &command.owner, op, notifies, generation_key);
        }
        Op::Release | Op::ReleaseExecuted if slots > 0 => {
            return encode_release_after(names, owner, Duration::ZERO, notifies);
        }
        Op::ReleaseAfter { left } => return encode_release_after(names, owner, left, notifies),
        Op::Inspect | Op::Revoke { .. } => return encode_for_operators(names, op, notifies),
        // Only keys with records have something to write or read.
        Op::Release
        | Op::ReleaseExecuted
        | Op::Record { .. }
        | Op::TopUp { .. }
        | Op::Look
        | Op::Fetch => {
            let script = if single {
                &scripts.release
            } else {
                &scripts.release_all
            };
            let mut eval = evalsha(script, names, false, None);
            eval.put(owner).put_notifies(notifies);
            return eval;
        }
    };
    let mut eval = evalsha(script, names, number.is_some(), generation_key);
    eval.put(owner);
    match number {
        Some(number) => eval.put_number(number),
        None => eval.put(b""),
    };
    eval.put_millis(ttl).put_millis(retention);
    if !std::ptr::eq(script, &scripts.acquire) && !std::ptr::eq(script, &scripts.confirm) {
        eval.put_number(names.len() as u64);
    }
    if std::ptr::eq(script, &scripts.acquire_all) {
        eval.put_number(slots as u64);
    }
    eval
}

/// Encodes the release of locks that stay taken for a while, or of slots, whose releases have a channel of their own.
fn encode_release_after(
    names: &[KeyNames],
    owner: &[u8],
    left: Duration,
    notifies: bool,
) -> EncodedCommand {
    let mut eval = evalsha(&SCRIPTS.release_after, names, false, None);
    eval.put(owner).put_millis(left);
    for name in names.iter().filter(|_| notifies) {
        eval.put(name.channel());
    }
    eval
}

/// Encodes a command that looks at a key, or frees it whatever its owner is.
fn encode_for_operators(names: &[KeyNames], op: &Op, notifies: bool) -> EncodedCommand {
    let scripts = &*SCRIPTS;
    let shared = names.iter().filter_map(|name| name.shared.as_ref());
    let records = names.iter().filter_map(|name| name.record.as_ref());
    let locks = names.iter().map(|name| &*name.lock);
    let keys = locks.chain(shared.map(|shared| &*shared.readers));
    if let Op::Revoke { holder, until } = op {
        let mut eval = eval_keys(&scripts.revoke, keys);
        eval.put(holder.as_bytes()).put_millis(*until);
        eval.put_notifies(notifies);
        eval
    } else {
        let fences = names.iter().map(|name| &*name.fence);
        let records = records.map(|record| &*record.done);
        eval_keys(&scripts.inspect, keys.chain(fences).chain(records))
    }
}

fn eval_keys<'a>(script: &Lua, keys: impl Iterator<Item = &'a [u8]> + Clone) -> EncodedCommand {
    let mut eval = EncodedCommand::new();
    eval.put(b"EVALSHA").put(script.hash.as_bytes());
    eval.put_number(keys.clone().count() as u64);
    for key in keys {
        eval.put(key);
    }
    eval
}

/// Encodes a command on keys that readers share.
fn encode_shared(
    names: &[KeyNames],
    owner: &OwnerToken,
    op: SharedOp,
    notifies: bool,
    generation_key: Option<&[u8]>,
) -> EncodedCommand {
    let scripts = &*SCRIPTS;
    let shared = || names.iter().filter_map(|name| name.shared.as_ref());
    let locks = || names.iter().map(|name| &*name.lock);
    let readers = || shared().map(|shared| &*shared.readers);
    let writers = || shared().map(|shared| &*shared.writer);
    let (script, keys): (_, Vec<&[u8]>) = match op {
        SharedOp::Acquire { .. } => {
            let keys = locks().chain(readers()).chain(writers());
            let keys = keys.chain(generation_key);
            (&scripts.acquire_shared, keys.collect())
        }
        SharedOp::Confirm { .. } => {
            let keys = locks().chain(readers()).chain(generation_key);
            (&scripts.confirm_shared, keys.collect())
        }
        SharedOp::Release => (&scripts.release_shared, locks().chain(readers()).collect()),
        SharedOp::Announce { .. } => (&scripts.announce, locks().chain(writers()).collect()),
        SharedOp::Withdraw => (&scripts.withdraw, writers().collect()),
    };
    let mut eval = eval_keys(script, keys.iter().copied());
    eval.put(owner.as_str().as_bytes());
    match op {
        SharedOp::Acquire { ttl } | SharedOp::Confirm { ttl } => {
            eval.put_millis(ttl).put_number(names.len() as u64)
        }
        SharedOp::Release => eval.put_notifies(notifies),
        SharedOp::Announce { patience } => eval.put_millis(patience),
        SharedOp::Withdraw => &mut eval,
    };
    eval
}

/// Encodes a command on a key with records, if it has to do with them.
fn encode_once(
    name: &KeyNames,
    record: &RecordNames,
    command: &Command,
    notifies: bool,
    generation_key: Option<&[u8]>,
) -> Option<EncodedCommand> {
    let (scripts, owner) = (&*SCRIPTS, command.owner.as_str().as_bytes());
    let (lock, fence, done) = (&*name.lock, &*name.fence, &*record.done);
    let intent = record.intent.as_ref();
    let intent_name = intent.map(|intent| &*intent.name);
    let encoded = match &command.op {
        Op::Acquire {
            proposal,
            ttl,
            retention,
        } => {
            let keys = [lock, fence, done].into_iter().chain(intent_name);
            let mut eval = eval_keys(&scripts.acquire_once, keys.chain(generation_key));
            eval.put(owner).put_number(proposal.unwrap_or(0));
            eval.put_millis(*ttl).put_millis(*retention);
            match intent {
                Some(intent) => eval.put_millis(intent.retention),
                None => eval.put(b""),
            };
            eval
        }
        Op::Confirm {
            token,
            ttl,
            retention,
        } => {
            let keys = [lock, fence, done].into_iter().chain(generation_key);
            let mut eval = eval_keys(&scripts.confirm_once, keys);
            eval.put(owner).put_number(token.unwrap_or(0));
            eval.put_millis(*ttl).put_millis(*retention);
            eval
        }
        Op::Release if intent.is_some() => {
            let mut eval = eval_keys(&scripts.release_once, [lock].into_iter().chain(intent_name));
            eval.put(owner).put_notifies(notifies);
            eval
        }
        Op::Record { record, retention } => {
            let keys = [lock, fence, done].into_iter().chain(intent_name);
            let mut eval = eval_keys(&scripts.record, keys);
            eval.put(owner)
                .put(record.as_bytes())
                .put_millis(*retention)
                .put_notifies(notifies);
            eval
        }
        Op::TopUp { record, retention } => {
            let mut eval = eval_keys(&scripts.top_up, [done].into_iter().chain(intent_name));
            eval.put(record.as_bytes()).put_millis(*retention);
            eval
        }
        Op::Look => eval_keys(&scripts.look, [done].into_iter()),
        // Not a script, which would copy the record twice more while it blocks the server.
        Op::Fetch => {
            let mut get = EncodedCommand::new();
            get.put(b"GET").put(done);
            get
        }
        Op::Release
        | Op::ReleaseExecuted
        | Op::ReleaseAfter { .. }
        | Op::Shared(_)
        | Op::Inspect
        | Op::Revoke { .. } => return None,
    };
    Some(encoded)
}

fn evalsha(
    script: &Lua,
    names: &[KeyNames],
    fences: bool,
    generation: Option<&[u8]>,
) -> EncodedCommand {
    let locks = names.iter().map(|name| &*name.lock);
    let fences = names.iter().filter(|_| fences).map(|name| &*name.fence);
    // A slot that is held is answered with the free ones.
    let lists_slots = std::ptr::eq(script, &SCRIPTS.acquire_all);
    let slots = names.iter().filter(|_| lists_slots);
    let slots = slots.filter_map(|name| name.slots.as_deref());
    let slots = slots.flat_map(|slots| &slots.locks).map(|lock| &**lock);
    eval_keys(script, locks.chain(fences).chain(slots).chain(generation))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_and_lengths_are_written_as_the_standard_library_writes_them() {
        let tens = (0..20).map(|zeros| 10_u64.pow(zeros));
        let around = |ten: u64| [ten - 1, ten, ten + 1, ten.wrapping_mul(9)];
        for number in tens.flat_map(around).chain([0, u64::MAX]) {
            let written = Decimal::new(number);
            assert_eq!(written.digits(), number.to_string().as_bytes());
        }
        for length in [0, 9, 10, 99, 100, 12_345] {
            let mut written = Vec::new();
            put_length(&mut written, b'$', length);
            assert_eq!(written, format!("${length}\r\n").as_bytes());
        }
    }
}
