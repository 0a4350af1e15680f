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
    let packed = packet.packed.get_or_init(|| {
        let packed = shared(packet, generation_key).get_packed_command();
        packed.into()
    });
    match &passport.generation {
        Some(generation) if ends_with_generation(request) => {
            let generation = generation.as_str();
            // One argument more than it says.
            let (count, arguments) = split_count(packed);
            let length = generation.len();
            output.extend(format!("*{}\r\n", count + 1).as_bytes());
            output.extend(arguments);
            output.extend(format!("${length}\r\n{generation}\r\n").as_bytes());
        }
        _ => output.extend(&**packed),
    }
}

/// Splits a packed command into the number of its arguments and these.
fn split_count(packed: &[u8]) -> (usize, &[u8]) {
    let digits = packed[1..].iter().take_while(|byte| byte.is_ascii_digit());
    let (count, length) = digits.fold((0, 0), |(count, length), digit| {
        (10 * count + usize::from(digit - b'0'), length + 1)
    });
    (count, &packed[1 + length + 2..])
}

/// Returns the encoded command, which all nodes share but for the generation that each must have.
fn shared<'a>(packet: &'a Packet, generation_key: Option<&[u8]>) -> &'a Cmd {
    packet
        .wire
        .get_or_init(|| encode(&packet.command, packet.tells, generation_key))
}

/// Whether the command ends with the generation that the server must have: all scripts that vote.
pub(super) fn ends_with_generation(request: &Request) -> bool {
    match request {
        Request::Command(packet) => match packet.command.op {
            Op::Acquire { proposal, .. } => {
                // Only the plain command of the Redlock description is no script.
                let names = &packet.command.names;
                proposal.is_some() || names.len() > 1 || names[0].record.is_some()
            }
            Op::Confirm { .. } => true,
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

fn encode(command: &Command, tells: bool, generation_key: Option<&[u8]>) -> Cmd {
    let Command { names, owner, op } = command;
    if let [name] = &**names
        && let Some(record) = &name.record
    {
        return encode_once(name, record, owner, op, tells, generation_key);
    }
    let (scripts, owner, single) = (&*SCRIPTS, owner.as_str(), names.len() == 1);
    let (script, number, ttl, retention) = match *op {
        // The plain command of the Redlock description.
        Op::Acquire {
            proposal: None,
            ttl,
            ..
        } if single => {
            let mut set = sized("SET");
            set.arg(&*names[0].lock).arg(owner);
            set.arg("NX").arg("PX").arg(millis(ttl));
            return set;
        }
        Op::Acquire {
            proposal,
            ttl,
            retention,
        } if single => (&scripts.acquire, proposal, ttl, retention),
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
            let mut eval = evalsha(script, names, false, None);
            eval.arg(owner).arg(tells.then_some(1));
            return eval;
        }
    };
    let mut eval = evalsha(script, names, number.is_some(), generation_key);
    eval.arg(owner);
    match number {
        Some(number) => eval.arg(number),
        None => eval.arg(""),
    };
    eval.arg(millis(ttl)).arg(millis(retention));
    if !std::ptr::eq(script, &scripts.acquire) && !std::ptr::eq(script, &scripts.confirm) {
        eval.arg(names.len());
    }
    eval
}

/// The commands for a key that keeps records.
fn encode_once(
    name: &KeyNames,
    record: &RecordNames,
    owner: &OwnerToken,
    op: &Op,
    tells: bool,
    generation_key: Option<&[u8]>,
) -> Cmd {
    let (scripts, owner) = (&*SCRIPTS, owner.as_str());
    let (lock, fence, done) = (&*name.lock, &*name.fence, &*record.done);
    let intent = record.intent.as_ref();
    let intent_name = intent.map(|intent| &*intent.name);
    let eval = |script: &Lua, keys: &[Option<&[u8]>]| {
        let mut eval = sized("EVALSHA");
        let keys: Vec<&[u8]> = keys.iter().copied().flatten().collect();
        eval.arg(&script.hash).arg(keys.len()).arg(keys);
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
            eval.arg(owner).arg(proposal.unwrap_or(0));
            eval.arg(millis(*ttl)).arg(millis(*retention));
            match intent {
                Some(intent) => eval.arg(millis(intent.retention)),
                None => eval.arg(""),
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
            eval.arg(owner).arg(token.unwrap_or(0));
            eval.arg(millis(*ttl)).arg(millis(*retention));
            eval
        }
        Op::Release if intent.is_some() => {
            let mut eval = eval(&scripts.release_once, &[Some(lock), intent_name]);
            eval.arg(owner).arg(tells.then_some(1));
            eval
        }
        Op::Release | Op::ReleaseExecuted => {
            let mut eval = eval(&scripts.release, &[Some(lock)]);
            eval.arg(owner).arg(tells.then_some(1));
            eval
        }
        Op::Record { record, retention } => {
            let keys = [Some(lock), Some(fence), Some(done), intent_name];
            let mut eval = eval(&scripts.record, &keys);
            eval.arg(owner)
                .arg(record.as_bytes())
                .arg(millis(*retention))
                .arg(tells.then_some(1));
            eval
        }
        Op::TopUp { record, retention } => {
            let mut eval = eval(&scripts.top_up, &[Some(done)]);
            eval.arg(record.as_bytes()).arg(millis(*retention));
            eval
        }
        Op::Look => eval(&scripts.look, &[Some(done)]),
        // No script, which would copy it twice more while the server does nothing else.
        Op::Fetch => {
            let mut get = cmd("GET");
            get.arg(done);
            get
        }
    }
}

fn evalsha(script: &Lua, names: &[KeyNames], fences: bool, generation: Option<&[u8]>) -> Cmd {
    let mut eval = sized("EVALSHA");
    let keys = names.len() * (1 + usize::from(fences)) + usize::from(generation.is_some());
    eval.arg(&script.hash).arg(keys);
    for name in names {
        eval.arg(&*name.lock);
    }
    for name in names.iter().filter(|_| fences) {
        eval.arg(&*name.fence);
    }
    eval.arg(generation);
    eval
}

/// A command with room for the arguments of an ordinary lock, which then need not grow it.
fn sized(name: &str) -> Cmd {
    let mut command = Cmd::with_capacity(12, 384);
    command.arg(name);
    command
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
