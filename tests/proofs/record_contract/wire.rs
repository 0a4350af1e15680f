//! Requests as the scripts of recorded keys take them, and their answers.

use std::time::Duration;

use support::{self, ScriptNode, secs};
use tower_redlock::protocol::admission::Generation;
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{
    ExecutionId, Fingerprint, KeyNames, LockKey, Namespace, OwnerToken, Record, Shown, holder,
};

use crate::node_contract::{NOT_HELD, held};

/// Names the kind of an answer, as finely as the protocol tells them apart.
pub(crate) fn kind(op: &Op, reply: &Reply) -> &'static str {
    match (op, reply) {
        (_, Reply::Granted(_)) => "granted",
        (_, Reply::Held { shown, .. }) => match shown {
            Some(_) => "held for an owner",
            None => "held",
        },
        (_, Reply::HeldShared { .. }) => "held by readers",
        (_, Reply::At(_)) => "at",
        (Op::Confirm { .. }, Reply::Lost) => "lost to confirm",
        (Op::Release | Op::ReleaseExecuted, Reply::Lost) => "nothing to release",
        (_, Reply::Lost) => "lost to record",
        (_, Reply::Released) => "released",
        (_, Reply::Done { record, .. }) if record.is_whole() => "done: whole",
        (_, Reply::Done { .. }) => "done: head",
        (_, Reply::Whole(_)) => "whole",
        (_, Reply::NotDone) => "not done",
        (_, Reply::Intended) => "intended",
        (_, Reply::Overflow) => "overflow",
        (_, Reply::Amnesia) => "amnesia",
        (
            _,
            Reply::HeldSlot { .. }
            | Reply::Seen(_)
            | Reply::Scanned(_)
            | Reply::Revoked { .. }
            | Reply::TooLate,
        ) => {
            panic!("{reply:?} is not an answer to {op:?}")
        }
    }
}

pub(crate) fn start_node() -> ScriptNode {
    ScriptNode::start(&SCRIPTS)
}

/// Sends a request as the headers of the scripts say; an error is what the server said, or that there is
/// something under the name of the record that is none.
pub(crate) fn send(
    node: &mut ScriptNode,
    command: &Command,
    known: Option<&Generation>,
) -> Result<Reply, String> {
    let reply = send_raw(node, command, known)?;
    decode(&command.op, &reply)
}

pub(crate) fn send_raw(
    node: &mut ScriptNode,
    command: &Command,
    known: Option<&Generation>,
) -> Result<support::Reply, String> {
    let [name] = &*command.names else {
        panic!("a set keeps no record");
    };
    let beside = name.record.as_ref().unwrap();
    let (lock, fence, done): (&[u8], &[u8], &[u8]) = (&name.lock, &name.fence, &beside.done);
    let intent: Option<&[u8]> = beside.intent.as_ref().map(|intent| &*intent.name);
    let generation = known.map(|_| GENERATION.as_bytes());
    let millis = |time: &Duration| time.as_millis().to_string().into_bytes();
    let owner = command.owner.to_value().into_bytes();
    let number = |number: &Option<u64>| number.unwrap().to_string().into_bytes();
    let (script, keys, mut args) = match &command.op {
        Op::Acquire {
            proposal,
            ttl,
            retention,
        } => {
            let lives = beside.intent.as_ref();
            let lives = lives.map(|intent| millis(&intent.retention));
            let keys = [Some(lock), Some(fence), Some(done), intent, generation];
            let mut args = vec![owner, number(proposal), millis(ttl), millis(retention)];
            args.push(lives.unwrap_or_default());
            (0, keys, args)
        }
        Op::Confirm {
            token,
            ttl,
            retention,
        } => {
            let keys = [Some(lock), Some(fence), Some(done), generation, None];
            let args = vec![owner, number(token), millis(ttl), millis(retention)];
            (1, keys, args)
        }
        Op::Release if intent.is_some() => (2, [Some(lock), intent, None, None, None], vec![owner]),
        Op::Release | Op::ReleaseExecuted => (3, [Some(lock), None, None, None, None], vec![owner]),
        Op::Record { record, retention } => {
            let keys = [Some(lock), Some(fence), Some(done), intent, None];
            let args = vec![owner, record.as_bytes().to_vec(), millis(retention)];
            (4, keys, args)
        }
        Op::TopUp { record, retention } => {
            let args = vec![record.as_bytes().to_vec(), millis(retention)];
            (5, [Some(done), intent, None, None, None], args)
        }
        op @ (Op::Shared(_)
        | Op::ReleaseAfter { .. }
        | Op::Inspect
        | Op::Scan { .. }
        | Op::Revoke { .. }
        | Op::Ping) => {
            panic!("{op:?} is no request on a record")
        }
        Op::Look => (6, [Some(done), None, None, None, None], vec![]),
        Op::Fetch => {
            let done = std::str::from_utf8(done).unwrap();
            return match node.call(&["GET", done]) {
                support::Reply::Error(error) => Err(error),
                reply => Ok(reply),
            };
        }
    };
    if script < 2 {
        args.extend(known.map(|known| known.as_str().as_bytes().to_vec()));
    }
    let keys: Vec<&[u8]> = keys.into_iter().flatten().collect();
    let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
    node.eval(script, &keys, &args)
}

fn decode(op: &Op, reply: &support::Reply) -> Result<Reply, String> {
    if *op == Op::Fetch {
        return Ok(match reply {
            support::Reply::Bulk(Some(bytes)) => {
                Reply::Whole(Record::from_bytes(bytes.as_slice().into()).ok_or("no record")?)
            }
            _ => Reply::NotDone,
        });
    }
    if let Some(number) = reply.as_int() {
        let fence = || u64::try_from(number).unwrap();
        return Ok(match op {
            Op::Acquire { .. } => Reply::Granted(fence()),
            Op::Confirm { .. } => Reply::At(fence()),
            Op::Release | Op::ReleaseExecuted if number == NOT_HELD => Reply::Lost,
            Op::Release | Op::ReleaseExecuted => Reply::Released,
            _ => panic!("{op:?} is answered {reply:?}"),
        });
    }
    let parts = reply.as_array().unwrap();
    let answer = parts[0].as_int().unwrap();
    let left = |place: usize| {
        let left = u64::try_from(parts[place].as_int().unwrap()).ok();
        left.map(Duration::from_millis)
    };
    Ok(match (op, answer, parts.len()) {
        (Op::Acquire { .. }, 0, 3) => held(parts),
        (Op::Acquire { .. }, 2, 1) => Reply::Overflow,
        (Op::Acquire { .. }, 5, 1) => Reply::Intended,
        (Op::Acquire { .. } | Op::Confirm { .. }, 3, 1) => Reply::Amnesia,
        (Op::Confirm { .. } | Op::Record { .. }, 0, 1) => Reply::Lost,
        (Op::Look, 0, 1) => Reply::NotDone,
        (
            Op::Acquire { .. }
            | Op::Confirm { .. }
            | Op::Record { .. }
            | Op::TopUp { .. }
            | Op::Look,
            4,
            3,
        ) => Reply::Done {
            record: Record::from_bytes(bytes_of(&parts[1]).into()).ok_or("no record")?,
            expires_in: left(2).unwrap_or_default(),
        },
        _ => panic!("{op:?} is answered {reply:?}"),
    })
}

/// Returns all the text of an answer.
pub(crate) fn bytes_of(reply: &support::Reply) -> Vec<u8> {
    match reply {
        support::Reply::Bulk(Some(bytes)) => bytes.clone(),
        support::Reply::Array(Some(parts)) => parts.iter().flat_map(bytes_of).collect(),
        _ => Vec::new(),
    }
}

/// Each op once, as the owner `id` may send it.
pub(crate) fn all_ops(id: u8) -> [Op; 8] {
    [
        acquire(id).op,
        confirm(9),
        Op::Release,
        Op::ReleaseExecuted,
        keep(id),
        Op::TopUp {
            record: record(id, 1),
            retention: STEP,
        },
        Op::Look,
        Op::Fetch,
    ]
}

pub(crate) fn acquire(id: u8) -> Command {
    let op = Op::Acquire {
        proposal: Some(7),
        ttl: TTL,
        retention: STEP * 20,
    };
    command(id, INTENTS, op)
}

pub(crate) fn confirm(token: u64) -> Op {
    Op::Confirm {
        token: Some(token),
        ttl: TTL,
        retention: STEP * 20,
    }
}

pub(crate) fn keep(id: u8) -> Op {
    Op::Record {
        record: record(id, 1),
        retention: STEP,
    }
}

pub(crate) fn command(id: u8, intents: Option<Duration>, op: Op) -> Command {
    Command {
        names: [named("k", intents)].into(),
        owner: owner(id),
        op,
    }
}

pub(crate) fn named(key: &str, intents: Option<Duration>) -> KeyNames {
    let key = LockKey::from(key);
    let names = Namespace::default().names_with_record(&key, intents, |_| [0; 32]);
    names.unwrap()
}

/// Returns the Redis key that has this role for the key of the tests.
pub(crate) fn name_of(role: &str) -> String {
    let names = named("k", INTENTS);
    let beside = names.record.unwrap();
    let name = match role {
        "lock" => names.lock,
        "fence" => names.fence,
        "record" => beside.done,
        _ => beside.intent.unwrap().name,
    };
    String::from_utf8(name.to_vec()).unwrap()
}

pub(crate) fn owner(id: u8) -> OwnerToken {
    let random = [0x9a, id, 0x5b, 0xe1].repeat(4).try_into().unwrap();
    if id == PLAIN {
        OwnerToken::from_random(random)
    } else {
        // Every other one shows who it is.
        let holder = holder::parse(format!("{id} host/{id}\ta note").as_bytes());
        let holder = holder.filter(|_| id % 2 == 1);
        OwnerToken::showing(random, Shown::new(Some(fingerprint(id)), holder))
    }
}

pub(crate) fn fingerprint(id: u8) -> Fingerprint {
    Fingerprint::from_digest([0x40 + id; 32])
}

pub(crate) fn execution(id: u8) -> ExecutionId {
    ExecutionId::from_random([id; 16])
}

/// Returns a record with so many bytes behind its head, of all values.
pub(crate) fn record(id: u8, len: usize) -> Record {
    let rest: Vec<u8> = (0..=u8::MAX).rev().cycle().take(len).collect();
    Record::new(execution(id), fingerprint(id), [0xd1; 32], &rest)
}

/// All times are multiples of this, so that a difference in an expiry is no matter of speed.
pub(crate) const STEP: Duration = secs(100);
pub(crate) const TTL: Duration = secs(300);
pub(crate) const INTENTS: Option<Duration> = Some(secs(4_000));

/// The owner that does not tell what it asks for.
pub(crate) const PLAIN: u8 = 4;

/// What a key that keeps records and intents has on a node.
pub(crate) const ROLES: [&str; 4] = ["lock", "fence", "record", "intent"];

pub(crate) const GENERATION: &str = "redlock:generation";

/// The scripts as the node loads them.
pub(crate) const SCRIPTS: [&str; 7] = [
    concat!(
        include_str!("../../../src/node/redis/scripts/once.lua"),
        include_str!("../../../src/node/redis/scripts/acquire_once.lua")
    ),
    concat!(
        include_str!("../../../src/node/redis/scripts/once.lua"),
        include_str!("../../../src/node/redis/scripts/unrecorded.lua"),
        include_str!("../../../src/node/redis/scripts/confirm.lua")
    ),
    include_str!("../../../src/node/redis/scripts/release_once.lua"),
    include_str!("../../../src/node/redis/scripts/release.lua"),
    include_str!("../../../src/node/redis/scripts/record.lua"),
    include_str!("../../../src/node/redis/scripts/top_up.lua"),
    concat!(
        include_str!("../../../src/node/redis/scripts/once.lua"),
        include_str!("../../../src/node/redis/scripts/look.lua")
    ),
];
