//! The records of shipped nodes: whose they are, and what a node that has one does.

use std::time::Duration;

use tower_redlock::protocol::lease::{Access, OnceSpec};
use tower_redlock::protocol::message::{Answer, Op, Reply};
use tower_redlock::protocol::{ExecutionId, Fingerprint, KeyNames, Namespace, Record, Store};

use crate::once;
use crate::space::{Kept, Nodes, RETENTION, acquire};

/// More than any number that a node of a model grants.
const MOST_TOKENS: u64 = 8;

const TTL: Duration = Duration::from_secs(once::TTL as u64);

const NOW: Duration = Duration::ZERO;

impl Nodes {
    /// The outcome of the execution of this client.
    pub(crate) fn record(&self, of: u8) -> Record {
        let bytes = if self.is_large { Record::MAX_INLINE } else { 1 };
        let execution = ExecutionId::from_random([of; 16]);
        Record::new(
            execution,
            once(true).fingerprint,
            [of; 32],
            &vec![of; bytes],
        )
    }

    pub(crate) fn top_up(&self, of: u8) -> Op {
        Op::TopUp {
            record: self.record(of),
            retention: RETENTION,
        }
    }

    /// A node with a record answers that whatever it is asked, so what else it has is not told apart.
    pub(crate) fn forget_beside_record(&self, node: &mut Store) -> Kept {
        if !self.executes {
            return Kept::default();
        }
        let record = self.looked_up(node);
        if let Some(of) = record.filter(|of| self.answers_only(node, *of)) {
            *node = Store::new();
            self.ask(node, 0, self.top_up(of), NOW);
        }
        let and_intent = record.is_some() && self.refuses_afterwards(node);
        Kept { record, and_intent }
    }

    fn looked_up(&self, node: &mut Store) -> Option<u8> {
        of_answer(&Answer::Replied(self.ask(node, 0, Op::Look, NOW)))
    }

    /// Whether the node refuses the key to one who comes after the record has ended.
    fn refuses_afterwards(&self, node: &Store) -> bool {
        let (mut node, last) = (node.clone(), self.owners.len() - 1);
        let reply = self.ask(&mut node, last, acquire(Some(1), TTL), RETENTION);
        reply == Reply::Intended
    }

    /// The node itself is asked: one that forgets its record, does more than answer it, or has an intent
    /// beside it, stays as it is.
    fn answers_only(&self, node: &Store, of: u8) -> bool {
        if self.refuses_afterwards(node) {
            return false;
        }
        let clients = self.owners.len() - 1;
        let record = |of| Op::Record {
            record: self.record(of),
            retention: RETENTION,
        };
        let acquire = |number| acquire(Some(number), TTL);
        let confirm = |number| Access::Exclusive.confirm(Some(number), TTL, RETENTION);
        let asks = (1..=MOST_TOKENS).flat_map(|number| [acquire(number), confirm(number)]);
        let records = (0_u8..).take(clients - 1);
        let asks = asks.chain(records.flat_map(|of| [record(of), self.top_up(of)]));
        let asks: Vec<Op> = asks.chain([Op::Release, Op::ReleaseExecuted]).collect();
        (0..clients).all(|client| {
            asks.iter().all(|op| {
                let mut after = node.clone();
                let reply = self.ask(&mut after, client, op.clone(), NOW);
                let answers = op.is_release() || of_answer(&Answer::Replied(reply)) == Some(of);
                answers && self.looked_up(&mut after) == Some(of)
            })
        })
    }
}

/// The names of a key that keeps records, and intents, for longer than records.
pub(crate) fn names_with_record(namespace: &Namespace, intents: bool) -> KeyNames {
    let intents = intents.then_some(RETENTION * 2);
    let names = namespace.names_with_record(&"key".into(), intents, |_| [0; 32]);
    names.expect("a plain name")
}

/// Of which client a node has the outcome.
pub(crate) fn of_answer(answer: &Answer) -> Option<u8> {
    match answer {
        Answer::Replied(Reply::Done { record, .. }) => Some(executed(record)),
        _ => None,
    }
}

/// Of which client this is the outcome.
pub(crate) fn executed(record: &Record) -> u8 {
    record.digest()[0]
}

pub(crate) fn once(executes: bool) -> OnceSpec {
    OnceSpec {
        fingerprint: Fingerprint::from_digest([0; 32]),
        executes,
    }
}
