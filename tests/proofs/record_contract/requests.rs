//! Requests on a key that keeps records.

use std::time::Duration;

use support::{self, secs};
use tower_redlock::protocol::message::{Command, KeyState, Op, Reply, SharedOp};
use tower_redlock::protocol::{
    ExecutionId, Fingerprint, KeyNames, LockKey, Namespace, OwnerToken, Record, Shown, holder,
};

use crate::wire::STEP;

/// Names the kind of an answer, as finely as the protocol tells them apart.
pub(crate) fn kind(op: &Op, reply: &Reply) -> &'static str {
    match (op, reply) {
        (Op::Shared(_), Reply::Granted(_)) => "reader granted",
        (_, Reply::Granted(_)) => "granted",
        (Op::Shared(_), Reply::Held { .. }) => "reader refused",
        (_, Reply::Held { shown, .. }) => match shown {
            Some(_) => "held for an owner",
            None => "held",
        },
        (_, Reply::HeldShared { .. }) => "held by readers",
        (_, Reply::HeldSlot { free: 0, .. }) => "no free slot",
        (_, Reply::HeldSlot { .. }) => "another slot is free",
        (Op::Shared(_), Reply::At(_)) => "reader extended",
        (_, Reply::At(_)) => "at",
        (Op::Confirm { .. }, Reply::Lost) => "lost to confirm",
        (Op::Shared(SharedOp::Confirm { .. }), Reply::Lost) => "reader lost",
        (op, Reply::Lost) if op.is_release() => "nothing to release",
        (_, Reply::Lost) => "lost to record",
        (Op::ReleaseAfter { .. }, Reply::Released) => "released after a while",
        (Op::Shared(SharedOp::Release), Reply::Released) => "reader released",
        (Op::Shared(_), Reply::Released) => "announced",
        (_, Reply::Released) => "released",
        (_, Reply::Done { record, .. }) if record.is_whole() => "done: whole",
        (_, Reply::Done { .. }) => "done: head",
        (_, Reply::Whole(_)) => "whole",
        (_, Reply::NotDone) => "not done",
        (_, Reply::Intended) => "intended",
        (_, Reply::Overflow) => "overflow",
        (_, Reply::Amnesia) => "amnesia",
        (_, Reply::TooLate) => "too late to revoke",
        (_, Reply::Revoked { was_held: true }) => "revoked",
        (_, Reply::Revoked { was_held: false }) => "nothing to revoke",
        (_, Reply::Seen(seen)) => match seen.state {
            KeyState::Free => "seen free",
            KeyState::Held { .. } => "seen held",
            KeyState::Shared { readers: 1, .. } => "seen with a reader",
            _ => "seen with readers",
        },
        (_, other) => panic!("{other:?} is not an answer to {op:?}"),
    }
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
    let name = match role {
        "lock" => names.lock,
        "fence" => names.fence(),
        "record" => names.record.unwrap(),
        _ => names.intent.unwrap().name,
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

pub(crate) const TTL: Duration = secs(300);
pub(crate) const INTENTS: Option<Duration> = Some(secs(4_000));

/// The owner that does not tell what it asks for.
pub(crate) const PLAIN: u8 = 4;

/// What a key that keeps records and intents has on a node.
pub(crate) const ROLES: [&str; 4] = ["lock", "fence", "record", "intent"];
