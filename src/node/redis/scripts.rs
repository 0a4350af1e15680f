//! The wire: requests as Redis commands, Redis replies as answers.

use std::sync::{Arc, LazyLock};

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::{Cmd, Pipeline, RedisError, Script, Value, cmd};

use crate::node::NodeFailure;
use crate::node::job::{Packet, Request};
use crate::protocol::message::{Command, Op, Reply};
use crate::protocol::{FencingToken, KeyNames};

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
}

static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts {
    acquire: Lua::new(include_str!("scripts/acquire.lua")),
    confirm: Lua::new(include_str!("scripts/confirm.lua")),
    release: Lua::new(include_str!("scripts/release.lua")),
    acquire_all: Lua::new(include_str!("scripts/acquire_all.lua")),
    confirm_all: Lua::new(include_str!("scripts/confirm_all.lua")),
    release_all: Lua::new(include_str!("scripts/release_all.lua")),
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
    load_all().query_async(connection).await
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
    ] {
        pipeline.cmd("SCRIPT").arg("LOAD").arg(script.code).ignore();
    }
    pipeline
}

/// Returns the encoded command, which all nodes share.
pub(super) fn wire(request: &Request) -> &Cmd {
    static PING: LazyLock<Cmd> = LazyLock::new(|| cmd("PING"));
    match request {
        Request::Command(packet) => packet.wire.get_or_init(|| encode(&packet.command)),
        Request::Ping => &PING,
    }
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
        return Err(refused(format!("{} {details}", error.code())));
    }
    let reply = match request {
        Request::Ping => Some(Reply::Released),
        Request::Command(packet) => decode(packet, &value),
    };
    reply.ok_or_else(|| refused("a reply that is none of a lock script's".into()))
}

/// Whether a server's reply says that it does not know a script that was loaded.
pub(super) fn is_noscript(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.code() == "NOSCRIPT")
}

fn encode(command: &Command) -> Cmd {
    let Command { names, owner, op } = command;
    let owner = owner.as_str();
    match (*op, &**names) {
        // The plain command of the Redlock description.
        (
            Op::Acquire {
                proposal: None,
                ttl,
                ..
            },
            [name],
        ) => {
            let mut set = cmd("SET");
            set.arg(&*name.lock)
                .arg(owner)
                .arg("NX")
                .arg("PX")
                .arg(millis(ttl));
            set
        }
        (
            Op::Acquire {
                proposal: Some(number),
                ttl,
                retention,
            },
            [_],
        ) => {
            let mut eval = evalsha(&SCRIPTS.acquire, names, true);
            eval.arg(owner)
                .arg(number)
                .arg(millis(ttl))
                .arg(millis(retention));
            eval
        }
        (
            Op::Confirm {
                token: Some(number),
                ttl,
                retention,
            },
            [_],
        ) => {
            let mut eval = evalsha(&SCRIPTS.confirm, names, true);
            eval.arg(owner)
                .arg(number)
                .arg(millis(ttl))
                .arg(millis(retention));
            eval
        }
        (
            Op::Acquire {
                proposal,
                ttl,
                retention,
            },
            _,
        ) => {
            let mut eval = evalsha(&SCRIPTS.acquire_all, names, proposal.is_some());
            eval.arg(owner).arg(number_or_nothing(proposal));
            eval.arg(millis(ttl))
                .arg(millis(retention))
                .arg(names.len());
            eval
        }
        (
            Op::Confirm {
                token,
                ttl,
                retention,
            },
            _,
        ) => {
            let mut eval = evalsha(&SCRIPTS.confirm_all, names, token.is_some());
            eval.arg(owner).arg(number_or_nothing(token));
            eval.arg(millis(ttl))
                .arg(millis(retention))
                .arg(names.len());
            eval
        }
        (Op::Release, [_]) => {
            let mut eval = evalsha(&SCRIPTS.release, names, false);
            eval.arg(owner);
            eval
        }
        (Op::Release, _) => {
            let mut eval = evalsha(&SCRIPTS.release_all, names, false);
            eval.arg(owner);
            eval
        }
    }
}

fn evalsha(script: &Lua, names: &[KeyNames], fences: bool) -> Cmd {
    let mut eval = cmd("EVALSHA");
    let keys = if fences { 2 * names.len() } else { names.len() };
    eval.arg(&script.hash).arg(keys);
    for name in names {
        eval.arg(&*name.lock);
    }
    if fences {
        for name in names {
            eval.arg(&*name.fence);
        }
    }
    eval
}

fn decode(packet: &Packet, value: &Value) -> Option<Reply> {
    match (packet.command.op, value) {
        (Op::Acquire { proposal: None, .. }, Value::Okay) => Some(Reply::Granted(0)),
        (Op::Acquire { proposal: None, .. }, Value::Nil) => Some(Reply::Held { expires_in: None }),
        (op, Value::Array(parts)) => match (op, parts.as_slice()) {
            (Op::Acquire { .. }, [Value::Int(1), number]) => Some(Reply::Granted(parse(number)?)),
            (Op::Acquire { .. }, [Value::Int(0), Value::Int(pttl)]) => Some(Reply::Held {
                // Negative: the key never expires.
                expires_in: u64::try_from(*pttl)
                    .ok()
                    .map(std::time::Duration::from_millis),
            }),
            (Op::Acquire { .. }, [Value::Int(2)]) => Some(Reply::Overflow),
            (Op::Confirm { .. }, [Value::Int(1), number]) => Some(Reply::At(parse(number)?)),
            (Op::Confirm { .. }, [Value::Int(0)]) => Some(Reply::Lost),
            (Op::Release, [Value::Int(1)]) => Some(Reply::Released),
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

fn number_or_nothing(number: Option<u64>) -> String {
    number.map_or_else(String::new, |number| number.to_string())
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
