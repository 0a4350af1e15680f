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
    let reply = reply.ok_or_else(|| refused(why_none(&value)))?;
    NodeFailure::vote(node, reply)
}

/// Says what is wrong with a reply that is no answer.
fn why_none(value: &Value) -> String {
    match value {
        // It has the form of a record's, so it is what stands for the record that is none.
        Value::Array(parts) if matches!(**parts, [Value::Int(4), _, _]) => {
            with_remedy(FOREIGN_RECORD.into())
        }
        _ => "a reply that is none of a lock script's".into(),
    }
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

/// Not by its name, which has the key in it.
const FOREIGN_RECORD: &str =
    "WRONGTYPE the record key (NAMESPACE:{KEY}:done) holds no record of this version";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use deadpool_redis::redis::Arg;

    use super::*;
    use crate::node::job::Packet;
    use crate::protocol::{ExecutionId, LockKey, LockKeys, Namespace};

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

    fn record() -> Record {
        let id = ExecutionId::from_random([1; 16]);
        Record::new(id, Fingerprint::of_digest([2; 32]), [3; 32], b"rest")
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

    fn read(request: &Request, parts: Vec<Value>) -> Result<Reply, NodeFailure> {
        answer(request, Value::Array(parts), &"node".into())
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

    #[test]
    fn the_scripts_of_recorded_keys_are_given_what_their_headers_say() {
        let (lock, fence) = ("redlock:{k}", "redlock:{k}:fence");
        let (done, intent) = ("redlock:{k}:done", "redlock:{k}:intent");
        let owner = OwnerToken::from_random([7; 16]);
        let owner = owner.as_str();
        let generation = std::str::from_utf8(GENERATION).unwrap();
        let bytes = record().as_bytes().to_vec();
        let kept = String::from_utf8(bytes).unwrap();
        let kept = kept.as_str();
        let keep = || Op::Record {
            record: record(),
            retention: TIME * 3,
        };
        let top_up = Op::TopUp {
            record: record(),
            retention: TIME * 3,
        };
        let scripts = &*SCRIPTS;
        let cases: [(bool, Op, &Lua, &[&str]); 11] = [
            (
                false,
                acquire(Some(5)),
                &scripts.acquire_once,
                &[
                    "4", lock, fence, done, generation, owner, "5", "1000", "2000", "",
                ],
            ),
            (
                true,
                acquire(Some(5)),
                &scripts.acquire_once,
                &[
                    "5", lock, fence, done, intent, generation, owner, "5", "1000", "2000", "4000",
                ],
            ),
            (
                true,
                confirm(Some(5)),
                &scripts.confirm_once,
                &[
                    "4", lock, fence, done, generation, owner, "5", "1000", "2000",
                ],
            ),
            (false, Op::Release, &scripts.release, &["1", lock, owner]),
            (
                true,
                Op::Release,
                &scripts.release_once,
                &["2", lock, intent, owner],
            ),
            (
                false,
                Op::ReleaseExecuted,
                &scripts.release,
                &["1", lock, owner],
            ),
            (
                true,
                Op::ReleaseExecuted,
                &scripts.release,
                &["1", lock, owner],
            ),
            (
                false,
                keep(),
                &scripts.record,
                &["3", lock, fence, done, owner, kept, "3000"],
            ),
            (
                true,
                keep(),
                &scripts.record,
                &["4", lock, fence, done, intent, owner, kept, "3000"],
            ),
            (true, top_up, &scripts.top_up, &["1", done, kept, "3000"]),
            (true, Op::Look, &scripts.look, &["1", done]),
        ];
        for (intents, op, script, expected) in cases {
            let head = ["EVALSHA", &script.hash];
            let expected: Vec<&[u8]> = head
                .iter()
                .chain(expected)
                .map(|arg| arg.as_bytes())
                .collect();
            let what = format!("{op:?}, intents: {intents}");
            assert_eq!(
                arguments(&request(&recorded(intents), op)),
                expected,
                "{what}"
            );
        }
    }

    #[test]
    fn the_answers_of_the_scripts_of_recorded_keys_are_read_as_their_headers_say() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let keep = Op::Record {
            record: record(),
            retention: TIME,
        };
        let top_up = Op::TopUp {
            record: record(),
            retention: TIME,
        };
        let digits = "0a".repeat(16);
        let held = |fingerprint| Reply::Held {
            expires_in: Some(TIME),
            fingerprint,
        };
        let asked = Fingerprint::from_hex(digits.as_bytes());
        assert!(asked.is_some());
        let refusal = |asked: &str| vec![Value::Int(0), Value::Int(1_000), text(asked)];
        let cases = [
            (
                acquire(Some(1)),
                vec![Value::Int(1), text("5")],
                Reply::Granted(5),
            ),
            (acquire(Some(1)), refusal(&digits), held(asked)),
            (acquire(Some(1)), refusal(""), held(None)),
            (acquire(Some(1)), refusal("another client's"), held(None)),
            (acquire(Some(1)), vec![Value::Int(3)], Reply::Amnesia),
            (acquire(Some(1)), vec![Value::Int(5)], Reply::Intended),
            (
                confirm(Some(1)),
                vec![Value::Int(1), text("5")],
                Reply::At(5),
            ),
            (confirm(Some(1)), vec![Value::Int(0)], Reply::Lost),
            (confirm(Some(1)), vec![Value::Int(3)], Reply::Amnesia),
            (keep.clone(), vec![Value::Int(0)], Reply::Lost),
            (Op::Release, vec![Value::Int(1)], Reply::Released),
            (Op::ReleaseExecuted, vec![Value::Int(1)], Reply::Released),
            (Op::Look, vec![Value::Int(0)], Reply::NotDone),
        ];
        for (op, parts, expected) in cases {
            let reply = read(&request(&recorded(true), op.clone()), parts);
            assert_eq!(reply, Ok(expected), "{op:?}");
        }
        let kept = Value::BulkString(record().as_bytes().to_vec());
        let head = Value::BulkString(record().as_bytes()[..Record::HEAD].to_vec());
        for op in [acquire(Some(1)), confirm(Some(1)), keep, top_up, Op::Look] {
            let request = request(&recorded(true), op.clone());
            for (kept, whole) in [(&kept, true), (&head, false)] {
                // The last is somebody's who made it last for ever.
                for (left, expected) in [(1_000, TIME), (-1, Duration::ZERO)] {
                    let reply = read(
                        &request,
                        vec![Value::Int(4), kept.clone(), Value::Int(left)],
                    );
                    let Ok(Reply::Done {
                        record: read,
                        expires_in,
                    }) = reply
                    else {
                        panic!("{op:?}: {reply:?}");
                    };
                    assert_eq!((read.is_whole(), expires_in), (whole, expected), "{op:?}");
                    assert_eq!(read.execution(), record().execution());
                }
            }
            // What is there is something, and no record: neither an answer of none nor a vote.
            let long = "x".repeat(200);
            for foreign in ["", "nothing of ours", &long] {
                let reply = read(&request, vec![Value::Int(4), text(foreign), Value::Int(-1)]);
                let why = reply.expect_err("it is no record").to_string();
                assert!(
                    why.contains("the record key (NAMESPACE:{KEY}:done)"),
                    "{why}"
                );
                assert!(why.contains("delete it there"), "{why}");
            }
        }
    }
}
