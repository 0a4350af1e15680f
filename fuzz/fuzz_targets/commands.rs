//! Requests on any keys as they go over the wire. The first line chooses the requests, and keys follow, each with its
//! length in front.
//!
//! Whatever bytes the keys have, a server reads one command, which has exactly the names, owners and numbers of
//! the requests as its arguments.

#![no_main]

use std::sync::Arc;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tower_redlock::deadpool_redis::redis::{Parser, Value};
use tower_redlock::fuzzing::encode;
use tower_redlock::protocol::message::{Command, HolderMark, Op, SharedOp};
use tower_redlock::protocol::{
    ExecutionId, Fingerprint, KeyNames, LockKey, LockKeys, Namespace, OwnerToken, Record,
    SharedNames,
};
use tower_redlock_fuzz::{first_line, parts_of, sha256};

const GENERATION: &str = "r:100:999999:run";

fuzz_target!(|data: &[u8]| {
    let (choices, keys) = first_line(data);
    let [op, form, number] = [0, 1, 2].map(|at| choices.get(at).copied().unwrap_or_default());
    let parts = parts_of(keys);
    let op = op_of(
        op,
        u64::from(number) << (number % 47),
        parts.concat().as_slice(),
    );
    let generation = (form & 1 == 1).then_some(GENERATION);
    let key: Option<Arc<[u8]>> = (form & 2 == 2).then(|| b"redlock:generation"[..].into());
    let encode = |requests: &[_]| encode(requests, key.clone(), generation);
    let alone = |request: &(Command, bool)| {
        let call = encode(std::slice::from_ref(request));
        arguments(&call.expect("it shares its call with no other"))
    };
    let namespace = Namespace::default();

    // One request on all keys.
    let all: LockKeys = parts.iter().map(|part| LockKey::from(*part)).collect();
    let is_shared = matches!(op, Op::Shared(_));
    let is_of_operator = matches!(op, Op::Inspect | Op::Revoke { .. });
    let is_of_record = matches!(op, Op::TopUp { .. } | Op::Look | Op::Fetch);
    let with_shared = |name| match is_shared || is_of_operator {
        true => namespace.with_shared(name),
        false => name,
    };
    if let Ok(names) = namespace.names(&all, sha256) {
        let names: Arc<[KeyNames]> = names.iter().cloned().map(with_shared).collect();
        let arguments = alone(&request(&names, &op, 1));
        for expected in names.iter().flat_map(|name| named(name, &op)) {
            assert!(arguments.contains(&expected));
        }
        assert!(is_of_operator || is_of_record || arguments.contains(&owner(1)));
    }

    // One slot of each key: the others are among the arguments of an acquisition only.
    let count = 1 + usize::from(form >> 4);
    if let Ok(slots) = namespace.slot_names(&all, count, sha256)
        && !is_shared
        && !is_of_operator
        && !is_of_record
    {
        for names in &slots {
            let arguments = alone(&request(names, &op, 1));
            let acquires = matches!(op, Op::Acquire { .. });
            for name in names.iter() {
                assert!(arguments.contains(&name.lock.to_vec()));
                for slot in &name.slots.as_ref().expect("it is one of several").locks {
                    assert!(arguments.contains(&slot.to_vec()) == acquires || *slot == name.lock);
                }
            }
        }
    }

    // One request for each key, in one call if they may share it.
    let intent = (form & 4 == 4).then_some(Duration::from_secs(9));
    let names = |key: &LockKey| match form & 8 {
        8 if !is_shared => namespace.names_with_record(key, intent, sha256).ok(),
        _ => namespace
            .names(&key.clone().into(), sha256)
            .ok()?
            .first()
            .cloned(),
    };
    let names: Vec<KeyNames> = all
        .as_slice()
        .iter()
        .filter_map(names)
        .map(with_shared)
        .collect();
    let requests: Vec<_> = names
        .iter()
        .zip(0..)
        .map(|(name, number)| request(&[name.clone()].into(), &op, number))
        .collect();
    for ((name, request), number) in names.iter().zip(&requests).zip(0..) {
        let alone = alone(request);
        let expected = named(name, &op);
        for expected in &expected {
            assert!(alone.contains(expected));
        }
        assert!(is_of_record || is_of_operator || alone.contains(&owner(number)));
    }
    if requests.len() > 1
        && let Some(call) = encode(&requests)
    {
        assert!(!is_shared);
        let arguments = arguments(&call);
        for (name, number) in names.iter().zip(0..) {
            for expected in [name.lock.to_vec(), owner(number)] {
                let found = arguments.iter().filter(|argument| **argument == expected);
                assert_eq!(found.count(), 1);
            }
        }
    }
});

/// Reads a command as a server does.
fn arguments(written: &[u8]) -> Vec<Vec<u8>> {
    let (mut parser, mut rest) = (Parser::new(), written);
    let Ok(Value::Array(arguments)) = parser.parse_value(&mut rest) else {
        panic!("it is no command: {}", written.escape_ascii());
    };
    assert!(rest.is_empty(), "it is more than one command");
    let bytes = |argument| match argument {
        Value::BulkString(bytes) => bytes,
        other => panic!("it is no argument: {other:?}"),
    };
    let arguments: Vec<Vec<u8>> = arguments.into_iter().map(bytes).collect();
    // The number of keys fits the arguments.
    if arguments[0] == b"EVALSHA" {
        let keys = std::str::from_utf8(&arguments[2]).ok();
        let keys: usize = keys
            .and_then(|keys| keys.parse().ok())
            .expect("it is a number");
        assert!(arguments.len() >= 3 + keys);
    }
    arguments
}

/// Returns the names that a request has among its arguments.
fn named(name: &KeyNames, op: &Op) -> Vec<Vec<u8>> {
    let shared = |of: fn(&SharedNames) -> &Arc<[u8]>| {
        let shared = name
            .shared
            .as_ref()
            .expect("it is for keys that are shared");
        of(shared).to_vec()
    };
    let (lock, readers) = (name.lock.to_vec(), || shared(|it| &it.readers));
    let writer = || shared(|it| &it.writer);
    match op {
        Op::Shared(SharedOp::Acquire { .. }) => vec![lock, readers(), writer()],
        Op::Shared(SharedOp::Confirm { .. } | SharedOp::Release) => vec![lock, readers()],
        Op::Shared(SharedOp::Announce { .. }) => vec![lock, writer()],
        Op::Shared(SharedOp::Withdraw) => vec![writer()],
        Op::TopUp { .. } | Op::Look | Op::Fetch => Vec::new(),
        Op::Inspect => vec![lock, readers(), name.fence().to_vec()],
        Op::Revoke { .. } => vec![lock, readers()],
        _ => vec![lock],
    }
}

/// Returns a command, and whether it notifies.
fn request(names: &Arc<[KeyNames]>, op: &Op, number: u8) -> (Command, bool) {
    let command = Command {
        names: Arc::clone(names),
        owner: OwnerToken::from_random([number; 16]),
        op: op.clone(),
    };
    (command, number & 1 == 1 && matches!(op, Op::Record { .. }))
}

fn owner(number: u8) -> Vec<u8> {
    OwnerToken::from_random([number; 16])
        .to_value()
        .into_bytes()
}

fn op_of(choice: u8, number: u64, rest: &[u8]) -> Op {
    let (ttl, retention) = (Duration::from_millis(number), Duration::from_millis(1_500));
    let number = (choice & 16 == 0).then_some(number);
    let id = ExecutionId::from_random([1; 16]);
    let record = Record::new(id, Fingerprint::from_digest([2; 32]), sha256(rest), rest);
    match choice % 16 {
        0 => Op::Acquire {
            proposal: number,
            ttl,
            retention,
        },
        1 => Op::Confirm {
            token: number,
            ttl,
            retention,
        },
        2 => Op::Release,
        3 => Op::ReleaseExecuted,
        4 => Op::Record { record, retention },
        5 => Op::TopUp { record, retention },
        6 => Op::Look,
        7 => Op::Fetch,
        8 => Op::Shared(SharedOp::Acquire { ttl }),
        9 => Op::Shared(SharedOp::Confirm { ttl }),
        10 => Op::Shared(SharedOp::Release),
        11 => Op::Shared(SharedOp::Announce { patience: ttl }),
        12 => Op::Shared(SharedOp::Withdraw),
        13 => Op::ReleaseAfter { left: ttl },
        14 => Op::Inspect,
        _ => Op::Revoke {
            holder: HolderMark::from_bytes(rest),
            until: ttl,
        },
    }
}
