//! The wire: requests as Redis commands, Redis replies as answers.

use std::sync::{Arc, LazyLock};

use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::{Cmd, Pipeline, RedisError, Script, Value, cmd};

use crate::node::NodeFailure;
use crate::node::job::{Packet, Request};
use crate::node::redis::connection::with_remedy;
use crate::protocol::message::{Command, Op, Reply};
use crate::protocol::{FencingToken, Fingerprint, KeyNames, OwnerToken, Record, RecordNames};

/// A Lua script and the hash by which a server knows it.
struct Lua {
    code: &'static str,
    hash: String,
}

struct Scripts {
    acquire: Lua,
    confirm: Lua,
    release: Lua,
    acquire_all: Lua,
    confirm_all: Lua,
    release_all: Lua,
    acquire_once: Lua,
    confirm_once: Lua,
    release_once: Lua,
    record: Lua,
    top_up: Lua,
    look: Lua,
    admit: Lua,
}

static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts {
    acquire: Lua::new(include_str!("scripts/acquire.lua")),
    confirm: Lua::new(include_str!("scripts/confirm.lua")),
    release: Lua::new(include_str!("scripts/release.lua")),
    acquire_all: Lua::new(include_str!("scripts/acquire_all.lua")),
    confirm_all: Lua::new(include_str!("scripts/confirm_all.lua")),
    release_all: Lua::new(include_str!("scripts/release_all.lua")),
    acquire_once: Lua::new(include_str!("scripts/acquire_once.lua")),
    confirm_once: Lua::new(include_str!("scripts/confirm_once.lua")),
    release_once: Lua::new(include_str!("scripts/release_once.lua")),
    record: Lua::new(include_str!("scripts/record.lua")),
    top_up: Lua::new(include_str!("scripts/top_up.lua")),
    look: Lua::new(include_str!("scripts/look.lua")),
    admit: Lua::new(include_str!("scripts/admit.lua")),
});

impl Lua {
    fn new(code: &'static str) -> Self {
        Self {
            code,
            hash: Script::new(code).get_hash().to_owned(),
        }
    }
}

/// Loads all scripts, so that lock commands can name them by hash.
pub(super) async fn load(connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
    let scripts = load_all();
    let loaded = connection
        .req_packed_commands(&scripts, 0, scripts.len())
        .await?;
    // What is refused is refused for all of them; once is enough.
    loaded
        .into_iter()
        .try_for_each(|value| value.extract_error().map(drop))
}

/// The pipeline that loads all scripts; also sent when a server forgot them.
pub(super) fn load_all() -> Pipeline {
    let scripts = &*SCRIPTS;
    let mut pipeline = Pipeline::new();
    for script in [
        &scripts.acquire,
        &scripts.confirm,
        &scripts.release,
        &scripts.acquire_all,
        &scripts.confirm_all,
        &scripts.release_all,
        &scripts.acquire_once,
        &scripts.confirm_once,
        &scripts.release_once,
        &scripts.record,
        &scripts.top_up,
        &scripts.look,
        &scripts.admit,
    ] {
        pipeline.cmd("SCRIPT").arg("LOAD").arg(script.code).ignore();
    }
    pipeline
}

/// Returns the encoded command, which all nodes share but for the generation that each must have.
pub(super) fn wire<'a>(request: &'a Request, generation_key: Option<&[u8]>) -> &'a Cmd {
    static PING: LazyLock<Cmd> = LazyLock::new(|| cmd("PING"));
    match request {
        Request::Command(packet) => packet
            .wire
            .get_or_init(|| encode(&packet.command, generation_key)),
        Request::Ping => &PING,
    }
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
            Op::Release | Op::ReleaseExecuted | Op::Record { .. } | Op::TopUp { .. } | Op::Look => {
                false
            }
        },
        Request::Ping => false,
    }
}

/// The request for a server's generation, and for one to begin if there is none for this process.
pub(super) fn admit(generation_key: &[u8], random: &str, run_id: &str) -> Cmd {
    let mut admit = cmd("EVALSHA");
    admit.arg(&SCRIPTS.admit.hash).arg(1).arg(generation_key);
    admit.arg(random).arg(run_id);
    admit
}

/// Reads a server's reply as the answer to `request`.
pub(super) fn answer(
    request: &Request,
    value: Value,
    node: &Arc<str>,
) -> Result<Reply, NodeFailure> {
    let refused = |why: String| NodeFailure::Refused {
        node: Arc::clone(node),
        why: why.into(),
    };
    if let Value::ServerError(error) = value {
        let details = error.details().unwrap_or_default();
        let why = format!("{} {details}", error.code());
        return Err(refused(with_remedy(why)));
    }
    let reply = match request {
        Request::Ping => Some(Reply::Released),
        Request::Command(packet) => decode(packet, &value),
    };
    let reply = reply.ok_or_else(|| refused("a reply that is none of a lock script's".into()))?;
    NodeFailure::vote(node, reply)
}

/// Whether a server's reply says that it does not know a script that was loaded.
pub(super) fn is_noscript(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.code() == "NOSCRIPT")
}

fn encode(command: &Command, generation_key: Option<&[u8]>) -> Cmd {
    let Command { names, owner, op } = command;
    if let [name] = &**names
        && let Some(record) = &name.record
    {
        return encode_once(name, record, owner, op, generation_key);
    }
    let (scripts, owner, single) = (&*SCRIPTS, owner.as_str(), names.len() == 1);
    let (script, number, ttl, retention) = match *op {
        // The plain command of the Redlock description.
        Op::Acquire {
            proposal: None,
            ttl,
            ..
        } if single => {
            let mut set = cmd("SET");
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
        Op::Release | Op::ReleaseExecuted | Op::Record { .. } | Op::TopUp { .. } | Op::Look => {
            let script = if single {
                &scripts.release
            } else {
                &scripts.release_all
            };
            let mut eval = evalsha(script, names, false, None);
            eval.arg(owner);
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
    generation_key: Option<&[u8]>,
) -> Cmd {
    let (scripts, owner) = (&*SCRIPTS, owner.as_str());
    let (lock, fence, done) = (&*name.lock, &*name.fence, &*record.done);
    let intent = record.intent.as_ref();
    let intent_name = intent.map(|intent| &*intent.name);
    let eval = |script: &Lua, keys: &[Option<&[u8]>]| {
        let mut eval = cmd("EVALSHA");
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
            eval.arg(owner);
            eval
        }
        Op::Release | Op::ReleaseExecuted => {
            let mut eval = eval(&scripts.release, &[Some(lock)]);
            eval.arg(owner);
            eval
        }
        Op::Record { record, retention } => {
            let keys = [Some(lock), Some(fence), Some(done), intent_name];
            let mut eval = eval(&scripts.record, &keys);
            eval.arg(owner)
                .arg(record.as_bytes())
                .arg(millis(*retention));
            eval
        }
        Op::TopUp { record, retention } => {
            let mut eval = eval(&scripts.top_up, &[Some(done)]);
            eval.arg(record.as_bytes()).arg(millis(*retention));
            eval
        }
        Op::Look => eval(&scripts.look, &[Some(done)]),
    }
}

fn evalsha(script: &Lua, names: &[KeyNames], fences: bool, generation: Option<&[u8]>) -> Cmd {
    let mut eval = cmd("EVALSHA");
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

fn decode(packet: &Packet, value: &Value) -> Option<Reply> {
    match (&packet.command.op, value) {
        (Op::Acquire { proposal: None, .. }, Value::Okay) => Some(Reply::Granted(0)),
        (Op::Acquire { proposal: None, .. }, Value::Nil) => Some(Reply::Held {
            expires_in: None,
            fingerprint: None,
        }),
        (op, Value::Array(parts)) => match (op, parts.as_slice()) {
            (Op::Acquire { .. }, [Value::Int(1), number]) => Some(Reply::Granted(parse(number)?)),
            (Op::Acquire { .. }, [Value::Int(0), Value::Int(pttl)]) => Some(Reply::Held {
                // Negative: the key never expires.
                expires_in: u64::try_from(*pttl)
                    .ok()
                    .map(std::time::Duration::from_millis),
                fingerprint: None,
            }),
            (Op::Acquire { .. }, [Value::Int(0), Value::Int(pttl), Value::BulkString(asked)]) => {
                Some(Reply::Held {
                    expires_in: u64::try_from(*pttl)
                        .ok()
                        .map(std::time::Duration::from_millis),
                    fingerprint: Fingerprint::from_hex(asked),
                })
            }
            (Op::Acquire { .. }, [Value::Int(5)]) => Some(Reply::Intended),
            (
                Op::Acquire { .. }
                | Op::Confirm { .. }
                | Op::Record { .. }
                | Op::TopUp { .. }
                | Op::Look,
                [Value::Int(4), Value::BulkString(record), Value::Int(pttl)],
            ) => Some(Reply::Done {
                record: Record::from_bytes(record.as_slice().into())?,
                // Negative, if somebody made it last for ever.
                expires_in: std::time::Duration::from_millis(u64::try_from(*pttl).unwrap_or(0)),
            }),
            (Op::Record { .. }, [Value::Int(0)]) => Some(Reply::Lost),
            (Op::Look, [Value::Int(0)]) => Some(Reply::NotDone),
            (Op::Acquire { .. }, [Value::Int(2)]) => Some(Reply::Overflow),
            (Op::Acquire { .. } | Op::Confirm { .. }, [Value::Int(3)]) => Some(Reply::Amnesia),
            (Op::Confirm { .. }, [Value::Int(1), number]) => Some(Reply::At(parse(number)?)),
            (Op::Confirm { .. }, [Value::Int(0)]) => Some(Reply::Lost),
            (Op::Release | Op::ReleaseExecuted, [Value::Int(1)]) => Some(Reply::Released),
            _ => None,
        },
        _ => None,
    }
}

fn parse(number: &Value) -> Option<u64> {
    let Value::BulkString(digits) = number else {
        return None;
    };
    let number = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (number <= FencingToken::MAX.as_u64()).then_some(number)
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use deadpool_redis::redis::Arg;

    use super::*;
    use crate::node::job::Packet;
    use crate::protocol::{LockKey, LockKeys, Namespace};

    const TIME: Duration = Duration::from_secs(1);
    const GENERATION: &[u8] = b"redlock:generation";

    fn recorded(intents: bool) -> Arc<[KeyNames]> {
        let intents = intents.then_some(TIME * 4);
        let names = Namespace::default().names_with_record(&"k".into(), intents, |_| [0; 32]);
        [names.unwrap()].into()
    }

    fn plain(keys: &[&str]) -> Arc<[KeyNames]> {
        let keys: LockKeys = keys.iter().map(|key| LockKey::from(*key)).collect();
        let names = Namespace::default().names(&keys, |_| [0; 32]);
        names.unwrap().into()
    }

    fn acquire(proposal: Option<u64>) -> Op {
        Op::Acquire {
            proposal,
            ttl: TIME,
            retention: TIME * 2,
        }
    }

    fn confirm(token: Option<u64>) -> Op {
        Op::Confirm {
            token,
            ttl: TIME,
            retention: TIME * 2,
        }
    }

    fn request(names: &Arc<[KeyNames]>, op: Op) -> Request {
        Request::Command(Packet::new(Command {
            names: Arc::clone(names),
            owner: OwnerToken::from_random([7; 16]),
            op,
        }))
    }

    fn arguments(request: &Request) -> Vec<Vec<u8>> {
        let command = wire(request, Some(GENERATION));
        let bytes = |arg: Arg<&[u8]>| match arg {
            Arg::Simple(bytes) => bytes.to_vec(),
            _ => Vec::new(),
        };
        command.args_iter().map(bytes).collect()
    }

    /// The scripts look at it as soon as they are given one.
    #[test]
    fn a_script_that_is_given_the_generations_key_is_given_the_generation_too() {
        let names = [
            plain(&["k"]),
            plain(&["k", "l"]),
            recorded(false),
            recorded(true),
        ];
        for names in &names {
            for number in [None, Some(5)] {
                for op in [acquire(number), confirm(number), Op::Release, Op::Look] {
                    let request = request(names, op.clone());
                    let has_key = arguments(&request).iter().any(|part| part == GENERATION);
                    assert_eq!(ends_with_generation(&request), has_key, "{op:?}");
                }
            }
        }
    }
}
