//! Replies to requests, as votes of three nodes, and replies to calls that several requests share.
//!
//! No reply makes the decoding or a round panic. Each kind of request has its own kinds of votes, an error of the
//! server is no vote, numbers are tokens, and a token is granted only by a majority that answered exactly it.

#![no_main]

use std::sync::Arc;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tower_redlock::deadpool_redis::redis::{Parser, Value};
use tower_redlock::fuzzing::{self, deal};
use tower_redlock::protocol::acquire::{AcquireRound, AcquireStep};
use tower_redlock::protocol::message::{
    Answer, Command, HolderMark, KeyState, Op, Reply, SharedOp,
};
use tower_redlock::protocol::round::{LookRound, ReleaseRound, Sought, VoteRound};
use tower_redlock::protocol::{
    ExecutionId, Fingerprint, LockKey, Namespace, NodeSet, OwnerToken, Quorum, Record,
};
use tower_redlock::{FencingToken, NodeFailure};

const SECOND: Duration = Duration::from_secs(1);

fuzz_target!(|data: &[u8]| {
    let (mut parser, mut rest, mut values) = (Parser::new(), data, Vec::new());
    while let Ok(value) = parser.parse_value(&mut rest) {
        values.push(value);
    }
    for op in ops() {
        for is_slot in [false, true] {
            let votes: Vec<Answer> = values
                .iter()
                .map(|value| vote(&op, is_slot, value))
                .collect();
            count(&op, &votes);
        }
        share(&op, &values);
    }
    let ping = request(&Op::Ping, "k");
    for value in &values {
        let is_error = matches!(value, Value::ServerError(_));
        assert_eq!(decode(&ping, value).is_err(), is_error);
    }
});

fn decode(command: &Command, value: &Value) -> Result<Reply, NodeFailure> {
    fuzzing::decode(command, value, &"node".into())
}

fn vote(op: &Op, is_slot: bool, value: &Value) -> Answer {
    let decoded = match is_slot {
        true => decode(&slot_request(op), value),
        false => decode(&request(op, "k"), value),
    };
    if matches!(value, Value::ServerError(_)) {
        assert!(decoded.is_err(), "{value:?}");
    }
    let Ok(reply) = decoded else {
        return Answer::Failed;
    };
    let is_alone = matches!(op, Op::Acquire { .. });
    let is_acquire = is_alone || matches!(op, Op::Shared(SharedOp::Acquire { .. }));
    let is_confirm = matches!(
        op,
        Op::Confirm { .. } | Op::Shared(SharedOp::Confirm { .. })
    );
    let is_shared = matches!(op, Op::Shared(_));
    // Readers have no token.
    let is_number = |number: u64| match is_shared {
        true => number == 0,
        false => FencingToken::try_from(number).is_ok(),
    };
    let is_fitting = match &reply {
        Reply::Granted(number) => is_acquire && is_number(*number),
        Reply::At(number) => is_confirm && is_number(*number),
        Reply::Held { .. } => is_acquire,
        Reply::HeldShared { .. } | Reply::Intended => is_alone,
        Reply::HeldSlot { .. } => is_acquire && is_slot,
        Reply::Seen(seen) => {
            let has_holder = seen.mark.is_some() || seen.state == KeyState::Free;
            let fence = seen.fence.unwrap_or_default();
            *op == Op::Inspect && FencingToken::try_from(fence).is_ok() && has_holder
        }
        Reply::Scanned(_) => matches!(op, Op::Scan { .. }),
        Reply::Revoked { .. } | Reply::TooLate => matches!(op, Op::Revoke { .. }),
        Reply::Amnesia => is_acquire || is_confirm,
        Reply::Lost => is_confirm || op.is_release() || matches!(op, Op::Record { .. }),
        Reply::Released => {
            let is_release = matches!(
                op,
                Op::Release | Op::ReleaseExecuted | Op::ReleaseAfter { .. }
            );
            is_release || is_shared && !is_acquire && !is_confirm
        }
        Reply::Done { record, .. } => {
            record.as_bytes().len() >= Record::HEAD
                && !is_shared
                && !matches!(op, Op::Release | Op::ReleaseExecuted | Op::Fetch)
        }
        Reply::Whole(record) => record.as_bytes().len() >= Record::HEAD && *op == Op::Fetch,
        Reply::NotDone => matches!(op, Op::Look | Op::Fetch),
        // It is a failure.
        Reply::Overflow => false,
    };
    assert!(is_fitting, "{reply:?} to {op:?}");
    Answer::Replied(reply)
}

/// Feeds the votes of three nodes to the rounds.
fn count(op: &Op, votes: &[Answer]) {
    let quorum = Quorum::new(3).expect("there are three nodes");
    let mut acquire = AcquireRound::new(quorum);
    let mut once = AcquireRound::of_execution(quorum, Fingerprint::from_digest([2; 32]));
    let mut extend = VoteRound::new(quorum, Sought::Token(5));
    let mut release = ReleaseRound::new(quorum, NodeSet::all(quorum));
    let mut record = VoteRound::new(quorum, Sought::Record(ExecutionId::from_random([1; 16])));
    let mut look = LookRound::new(quorum, ExecutionId::from_random([1; 16]));
    for (node, vote) in votes.iter().enumerate().take(6) {
        let (node, again) = (node % 3, node >= 3);
        match op {
            Op::Acquire { .. } if !again => {
                if let AcquireStep::Granted(token) = acquire.on_acquire(node, vote) {
                    assert!(acquire.acknowledged(token).len() >= quorum.majority());
                }
                once.on_acquire(node, vote);
            }
            Op::Confirm { .. } => {
                if let AcquireStep::Granted(token) = acquire.on_confirm(node, vote) {
                    assert!(acquire.acknowledged(token).len() >= quorum.majority());
                }
                once.on_confirm(node, vote);
                once.on_other(node, vote);
                extend.on_answer(node, vote);
            }
            Op::Shared(SharedOp::Acquire { .. }) if !again => {
                if let AcquireStep::Granted(token) = acquire.on_acquire(node, vote) {
                    assert!(acquire.acknowledged(token).len() >= quorum.majority());
                }
            }
            Op::Shared(SharedOp::Confirm { .. }) => {
                extend.on_answer(node, vote);
            }
            Op::Release
            | Op::ReleaseExecuted
            | Op::ReleaseAfter { .. }
            | Op::Shared(SharedOp::Release) => {
                release.on_release(node, vote);
            }
            Op::Record { .. } | Op::TopUp { .. } => {
                record.on_answer(node, vote);
                once.on_record(node, vote);
            }
            Op::Look => {
                look.on_look(node, vote);
            }
            Op::Acquire { .. }
            | Op::Shared(_)
            | Op::Fetch
            | Op::Inspect
            | Op::Scan { .. }
            | Op::Revoke { .. }
            | Op::Ping => {}
        }
    }
}

/// A call that several requests share deals each of them its own part of an array, in order.
fn share(op: &Op, values: &[Value]) {
    let requests: Vec<Command> = ["a", "b", "c"].map(|key| request(op, key)).into();
    for value in values {
        for count in 1..=requests.len() {
            let dealt = deal(value.clone(), &requests[..count]);
            assert_eq!(dealt.len(), count);
            match value {
                Value::Array(parts) if count > 1 && parts.len() == count => {
                    assert_eq!(dealt, *parts);
                }
                single if count == 1 => assert_eq!(dealt, [single.clone()]),
                _ => {}
            }
        }
    }
}

fn request(op: &Op, key: &str) -> Command {
    let (namespace, key) = (Namespace::default(), LockKey::from(key));
    let names = namespace.names_with_record(&key, None, |_| [0; 32]);
    let mut names = names.expect("the key is valid");
    if matches!(op, Op::Shared(_)) {
        // No execution shares its key.
        names.record = None;
        names = namespace.with_shared(names);
    }
    if matches!(op, Op::Inspect | Op::Revoke { .. }) {
        names = namespace.with_shared(names);
    }
    Command {
        names: Arc::new([names]),
        owner: OwnerToken::from_random([7; 16]),
        op: op.clone(),
    }
}

/// The same for one slot of three.
fn slot_request(op: &Op) -> Command {
    let namespace = Namespace::default();
    let names = namespace.slot_names(&LockKey::from("k").into(), 3, |_| [0; 32]);
    let slots = names.expect("the key is valid");
    let names = slots[1].iter().cloned();
    Command {
        names: names.map(|name| namespace.with_shared(name)).collect(),
        owner: OwnerToken::from_random([7; 16]),
        op: op.clone(),
    }
}

fn ops() -> [Op; 18] {
    let (ttl, retention) = (SECOND, SECOND);
    let id = ExecutionId::from_random([1; 16]);
    let record = Record::new(id, Fingerprint::from_digest([2; 32]), [3; 32], b"rest");
    let acquire = |proposal| Op::Acquire {
        proposal,
        ttl,
        retention,
    };
    let confirm = |token| Op::Confirm {
        token,
        ttl,
        retention,
    };
    [
        acquire(None),
        acquire(Some(5)),
        confirm(None),
        confirm(Some(5)),
        Op::Release,
        Op::ReleaseExecuted,
        Op::Record {
            record: record.clone(),
            retention,
        },
        Op::TopUp { record, retention },
        Op::Look,
        Op::Fetch,
        Op::ReleaseAfter { left: ttl },
        Op::Inspect,
        Op::Revoke {
            holder: HolderMark::from_bytes(b"some"),
            until: ttl,
        },
        Op::Shared(SharedOp::Acquire { ttl }),
        Op::Shared(SharedOp::Confirm { ttl }),
        Op::Shared(SharedOp::Release),
        Op::Shared(SharedOp::Announce { patience: ttl }),
        Op::Shared(SharedOp::Withdraw),
    ]
}
