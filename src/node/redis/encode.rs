//! Requests as Redis commands.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use deadpool_redis::redis::{Cmd, cmd};

use crate::node::job::{Packet, Request};
use crate::node::redis::scripts::{Lua, SCRIPTS};
use crate::protocol::admission::Generation;
use crate::protocol::message::{Command, Op};
use crate::protocol::{KeyNames, OwnerToken, RecordNames};

/// A request as a command.
pub(super) enum Wired {
    /// That all nodes share.
    Shared(Arc<Packet>),
    Ping,
    Own(Cmd),
}

static PING: LazyLock<Cmd> = LazyLock::new(|| cmd("PING"));

impl Wired {
    pub(super) fn as_cmd(&self) -> &Cmd {
        match self {
            // Without a generation, because what is encoded already is not encoded again.
            Self::Shared(packet) => shared(packet, None),
            Self::Ping => &PING,
            Self::Own(command) => command,
        }
    }

    pub(super) fn into_cmd(self) -> Cmd {
        match self {
            Self::Own(command) => command,
            shared => shared.as_cmd().clone(),
        }
    }
}

/// A command as it goes over the wire, but for how many arguments it has.
#[derive(Debug)]
pub(crate) struct Packed {
    count: usize,
    arguments: Vec<u8>,
}

/// What a request for a vote must name so that it only counts in the memory that was admitted.
#[derive(Debug, Default)]
pub(super) struct Passport {
    /// The key that the generation is kept under, if the restart guard is on.
    pub(super) generation_key: Option<Arc<[u8]>>,
    /// The generation of the server on this connection.
    pub(super) generation: Option<Generation>,
}

/// Returns a request as a command of redis-rs.
pub(super) fn wire(request: &Request, passport: &Passport) -> Wired {
    let Request::Command(packet) = request else {
        return Wired::Ping;
    };
    let command = shared(packet, passport.generation_key.as_deref());
    match &passport.generation {
        Some(generation) if ends_with_generation(request) => {
            let mut command = command.clone();
            command.arg(generation.as_str());
            Wired::Own(command)
        }
        _ => Wired::Shared(Arc::clone(packet)),
    }
}

/// Appends a request to `output` as it goes over the wire.
pub(super) fn pack(request: &Request, passport: &Passport, output: &mut Vec<u8>) {
    let Request::Command(packet) = request else {
        return output.extend(b"*1\r\n$4\r\nPING\r\n");
    };
    let generation_key = passport.generation_key.as_deref();
    let packed = packet
        .packed
        .get_or_init(|| encode(&packet.command, packet.tells, generation_key));
    let generation = passport.generation.as_ref();
    let generation = generation.filter(|_| ends_with_generation(request));
    put_length(
        output,
        b'*',
        packed.count + usize::from(generation.is_some()),
    );
    output.extend(&packed.arguments);
    if let Some(generation) = generation {
        put_argument(output, generation.as_str().as_bytes());
    }
}

/// Returns the encoded command, which all nodes share but for the generation that each must have.
fn shared<'a>(packet: &'a Packet, generation_key: Option<&[u8]>) -> &'a Cmd {
    packet
        .wire
        .get_or_init(|| encode(&packet.command, packet.tells, generation_key))
}

/// A command that is written, one argument after the other; its name is the first.
trait Arguments: Sized {
    /// Starts a command, with room for the arguments of an ordinary lock, which then need not grow it.
    fn sized() -> Self;

    fn put(&mut self, argument: &[u8]) -> &mut Self;

    fn put_number(&mut self, number: u64) -> &mut Self {
        self.put(Decimal::of(number).digits())
    }

    /// Adds a duration, in milliseconds.
    fn put_millis(&mut self, duration: Duration) -> &mut Self {
        self.put_number(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    }

    /// Adds whether others are to be told.
    fn put_tells(&mut self, tells: bool) -> &mut Self {
        if tells { self.put(b"1") } else { self }
    }
}

/// For redis-rs.
impl Arguments for Cmd {
    fn sized() -> Self {
        Self::with_capacity(ARGUMENTS, BYTES)
    }

    fn put(&mut self, argument: &[u8]) -> &mut Self {
        self.arg(argument)
    }
}

/// For a socket.
impl Arguments for Packed {
    fn sized() -> Self {
        Self {
            count: 0,
            arguments: Vec::with_capacity(BYTES),
        }
    }

    fn put(&mut self, argument: &[u8]) -> &mut Self {
        self.count += 1;
        put_argument(&mut self.arguments, argument);
        self
    }
}

/// How many arguments the command of an ordinary lock has at most, and how many bytes they take.
const ARGUMENTS: usize = 12;
const BYTES: usize = 384;

fn put_argument(output: &mut Vec<u8>, argument: &[u8]) {
    put_length(output, b'$', argument.len());
    output.extend(argument);
    output.extend(b"\r\n");
}

fn put_length(output: &mut Vec<u8>, kind: u8, length: usize) {
    output.push(kind);
    match u8::try_from(length) {
        // Nearly all are short, and there are many.
        Ok(short @ 0..10) => output.push(b'0' + short),
        Ok(short @ 10..100) => output.extend([b'0' + short / 10, b'0' + short % 10]),
        _ => output.extend(Decimal::of(length as u64).digits()),
    }
    output.extend(b"\r\n");
}

/// A number's digits.
struct Decimal {
    /// The last of them are used.
    digits: [u8; 20],
    from: usize,
}

impl Decimal {
    fn of(mut number: u64) -> Self {
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

    fn digits(&self) -> &[u8] {
        &self.digits[self.from..]
    }
}

/// Whether the command ends with the generation that the server must have, if there is one: all that vote.
pub(super) fn ends_with_generation(request: &Request) -> bool {
    match request {
        Request::Command(packet) => match packet.command.op {
            Op::Acquire { .. } | Op::Confirm { .. } => true,
            Op::Release
            | Op::ReleaseExecuted
            | Op::Record { .. }
            | Op::TopUp { .. }
            | Op::Look
            | Op::Fetch => false,
        },
        Request::Ping => false,
    }
}

fn encode<A: Arguments>(command: &Command, tells: bool, generation_key: Option<&[u8]>) -> A {
    let Command { names, owner, op } = command;
    if let [name] = &**names
        && let Some(record) = &name.record
    {
        return encode_once(name, record, owner, op, tells, generation_key);
    }
    let (scripts, owner, single) = (&*SCRIPTS, owner.as_str().as_bytes(), names.len() == 1);
    let (script, number, ttl, retention) = match *op {
        // The plain command of the Redlock description, which compares nothing.
        Op::Acquire {
            proposal: None,
            ttl,
            ..
        } if single && generation_key.is_none() => {
            let mut set = A::sized();
            set.put(b"SET").put(&names[0].lock).put(owner);
            set.put(b"NX").put(b"PX").put_millis(ttl);
            return set;
        }
        Op::Acquire {
            proposal: number @ Some(_),
            ttl,
            retention,
        } if single => (&scripts.acquire, number, ttl, retention),
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
        // What is there to be read is of keys that keep records.
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
            let mut eval: A = evalsha(script, names, false, None);
            eval.put(owner).put_tells(tells);
            return eval;
        }
    };
    let mut eval: A = evalsha(script, names, number.is_some(), generation_key);
    eval.put(owner);
    match number {
        Some(number) => eval.put_number(number),
        None => eval.put(b""),
    };
    eval.put_millis(ttl).put_millis(retention);
    if !std::ptr::eq(script, &scripts.acquire) && !std::ptr::eq(script, &scripts.confirm) {
        eval.put_number(names.len() as u64);
    }
    eval
}

/// The commands for a key that keeps records.
fn encode_once<A: Arguments>(
    name: &KeyNames,
    record: &RecordNames,
    owner: &OwnerToken,
    op: &Op,
    tells: bool,
    generation_key: Option<&[u8]>,
) -> A {
    let (scripts, owner) = (&*SCRIPTS, owner.as_str().as_bytes());
    let (lock, fence, done) = (&*name.lock, &*name.fence, &*record.done);
    let intent = record.intent.as_ref();
    let intent_name = intent.map(|intent| &*intent.name);
    let eval = |script: &Lua, keys: &[Option<&[u8]>]| {
        let keys: Vec<&[u8]> = keys.iter().copied().flatten().collect();
        let mut eval = A::sized();
        eval.put(b"EVALSHA").put(script.hash.as_bytes());
        eval.put_number(keys.len() as u64);
        for key in keys {
            eval.put(key);
        }
        eval
    };
    match op {
        Op::Acquire {
            proposal,
            ttl,
            retention,
        } => {
            let keys = [
                Some(lock),
                Some(fence),
                Some(done),
                intent_name,
                generation_key,
            ];
            let mut eval = eval(&scripts.acquire_once, &keys);
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
            let keys = [Some(lock), Some(fence), Some(done), generation_key];
            let mut eval = eval(&scripts.confirm_once, &keys);
            eval.put(owner).put_number(token.unwrap_or(0));
            eval.put_millis(*ttl).put_millis(*retention);
            eval
        }
        Op::Release if intent.is_some() => {
            let mut eval = eval(&scripts.release_once, &[Some(lock), intent_name]);
            eval.put(owner).put_tells(tells);
            eval
        }
        Op::Release | Op::ReleaseExecuted => {
            let mut eval = eval(&scripts.release, &[Some(lock)]);
            eval.put(owner).put_tells(tells);
            eval
        }
        Op::Record { record, retention } => {
            let keys = [Some(lock), Some(fence), Some(done), intent_name];
            let mut eval = eval(&scripts.record, &keys);
            eval.put(owner)
                .put(record.as_bytes())
                .put_millis(*retention)
                .put_tells(tells);
            eval
        }
        Op::TopUp { record, retention } => {
            let mut eval = eval(&scripts.top_up, &[Some(done)]);
            eval.put(record.as_bytes()).put_millis(*retention);
            eval
        }
        Op::Look => eval(&scripts.look, &[Some(done)]),
        // No script, which would copy it twice more while the server does nothing else.
        Op::Fetch => {
            let mut get = A::sized();
            get.put(b"GET").put(done);
            get
        }
    }
}

fn evalsha<A: Arguments>(
    script: &Lua,
    names: &[KeyNames],
    fences: bool,
    generation: Option<&[u8]>,
) -> A {
    let mut eval = A::sized();
    let keys = names.len() * (1 + usize::from(fences)) + usize::from(generation.is_some());
    eval.put(b"EVALSHA").put(script.hash.as_bytes());
    eval.put_number(keys as u64);
    for name in names {
        eval.put(&name.lock);
    }
    for name in names.iter().filter(|_| fences) {
        eval.put(&name.fence);
    }
    if let Some(generation) = generation {
        eval.put(generation);
    }
    eval
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_others_write_them() {
        let tens = (0..20).map(|zeros| 10_u64.pow(zeros));
        let around = |ten: u64| [ten - 1, ten, ten + 1, ten.wrapping_mul(9)];
        for number in tens.flat_map(around).chain([0, u64::MAX]) {
            let written = Decimal::of(number);
            assert_eq!(written.digits(), number.to_string().as_bytes());
        }
        for length in [0, 9, 10, 99, 100, 12_345] {
            let mut written = Vec::new();
            put_length(&mut written, b'$', length);
            assert_eq!(written, format!("${length}\r\n").as_bytes());
        }
    }
}
