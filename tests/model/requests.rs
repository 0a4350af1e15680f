//! Numbers in the place of the shipped nodes that keep records, and the clients that ask them.
//!
//! As in `leases`, nothing of the protocol is written down here: a node is a [`Store`].

use std::sync::{Arc, RwLock};
use std::time::Duration;

use tower_redlock::protocol::lease::{Access, Input, LeaseSpec, OnceSpec};
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{ExecutionId, Fingerprint, KeyNames, Namespace, Record, Store};

use crate::leases::{Heard, Words, spec};
use crate::space::{Interner, Memo, RETENTION, ticks};

/// The most requests that a model has; one more attempt is for the one that repairs after executing.
pub(crate) const REQUESTS: usize = 3;

/// The attempt that repairs for a request that executed and could not record.
pub(crate) const RETRY: usize = REQUESTS;

/// The most attempts that a model has.
pub(crate) const ATTEMPTS: usize = REQUESTS + 1;

/// More than any number that a node of a model grants.
const MOST_TOKENS: u64 = 8;

/// The owner that asks for the key after a record has ended: none of the attempts.
const AFTERWARDS: u8 = 0xff;

/// What a node has of executions that are decided.
#[derive(Clone, Copy, Debug)]
struct Kept {
    /// Whose record.
    record: Option<u8>,
    /// Whether it also has an intent, which refuses the key when the record has ended.
    and_intent: bool,
}

/// All nodes: one function from a store and a request to a store and an answer.
#[derive(Debug)]
pub(crate) struct Nodes {
    words: Arc<Words>,
    names: Arc<[KeyNames]>,
    is_large: bool,
    stores: RwLock<Interner<Store, Kept>>,
    asked: Memo<(u32, u8, u8), (u32, Heard)>,
}

impl Nodes {
    pub(crate) fn new(words: &Arc<Words>, intents: bool, is_large: bool) -> Self {
        // Longer than any record, as an intent is.
        let intents = intents.then_some(RETENTION * 2);
        let names = Namespace::default().names_with_record(&"key".into(), intents, |_| [0; 32]);
        Self {
            words: Arc::clone(words),
            names: [names.expect("a plain name")].into(),
            is_large,
            stores: Interner::new(),
            asked: Memo::new(),
        }
    }

    /// A node that remembers nothing.
    pub(crate) fn empty(&self) -> u32 {
        self.intern(Store::new())
    }

    /// Whose record the node has.
    pub(crate) fn recorded(&self, store: u32) -> Option<u8> {
        self.stores.read().expect("no panic").note(store).record
    }

    /// Whether the node would refuse the key after the end of its record.
    pub(crate) fn has_intent_beside_record(&self, store: u32) -> bool {
        self.stores.read().expect("no panic").note(store).and_intent
    }

    /// Carries out a request of `attempt` at a node.
    pub(crate) fn ask(&self, store: u32, attempt: u8, op: u8) -> (u32, Heard) {
        self.asked.get_or((store, attempt, op), || {
            let mut node = self.stores.read().expect("no panic").value(store).clone();
            let reply = self.send(&mut node, attempt, self.words.op(op), 0);
            (self.intern(node), self.words.hear(reply))
        })
    }

    /// The outcome of the execution of this attempt.
    pub(crate) fn record(&self, of: u8) -> Record {
        let bytes = if self.is_large { Record::MAX_INLINE } else { 1 };
        Record::new(execution(of), fingerprint(), [of; 32], &vec![of; bytes])
    }

    pub(crate) fn top_up(&self, of: u8) -> Op {
        Op::TopUp {
            record: self.record(of),
            retention: RETENTION,
        }
    }

    /// What tells a lease of the outcome.
    pub(crate) fn outcome(&self, of: u8) -> Input {
        Input::Record {
            record: self.record(of),
            retention: RETENTION,
        }
    }

    fn send(&self, node: &mut Store, attempt: u8, op: Op, now: u32) -> Reply {
        let command = Command {
            names: Arc::clone(&self.names),
            owner: once(true).owner([attempt; 16]),
            op,
        };
        node.apply(&command, RETENTION * now)
    }

    /// A node with a record answers that whatever it is asked, so what else it has is not told apart.
    fn intern(&self, mut node: Store) -> u32 {
        let recorded = self.looked_up(&mut node);
        if let Some(of) = recorded.filter(|of| self.answers_only(&node, *of)) {
            node = Store::new();
            self.send(&mut node, 0, self.top_up(of), 0);
        }
        let kept = Kept {
            record: recorded,
            and_intent: recorded.is_some() && self.refuses_afterwards(&node),
        };
        self.stores.write().expect("no panic").id(node, kept)
    }

    fn looked_up(&self, node: &mut Store) -> Option<u8> {
        of_reply(&self.send(node, 0, Op::Look, 0))
    }

    fn refuses_afterwards(&self, node: &Store) -> bool {
        let reply = self.send(&mut node.clone(), AFTERWARDS, acquire(1), 1);
        reply == Reply::Intended
    }

    /// The node itself is asked: one that forgets its record, does more than answer it, or has an intent
    /// beside it, stays as it is.
    fn answers_only(&self, node: &Store, of: u8) -> bool {
        if self.refuses_afterwards(node) {
            return false;
        }
        let others = || (0_u8..).take(REQUESTS);
        let record = |of| Op::Record {
            record: self.record(of),
            retention: RETENTION,
        };
        let asks = (1..=MOST_TOKENS).flat_map(|number| [acquire(number), confirm(number)]);
        let asks = asks.chain(others().flat_map(|of| [record(of), self.top_up(of)]));
        let asks: Vec<Op> = asks.chain([Op::Release, Op::ReleaseExecuted]).collect();
        (0_u8..).take(ATTEMPTS).all(|attempt| {
            asks.iter().all(|op| {
                let mut after = node.clone();
                let reply = self.send(&mut after, attempt, op.clone(), 0);
                let answers = op.is_release() || of_reply(&reply) == Some(of);
                answers && self.looked_up(&mut after) == Some(of)
            })
        })
    }
}

/// The request of an attempt for the key.
pub(crate) fn acquire(number: u64) -> Op {
    Access::Exclusive.acquire(Some(number), TTL, RETENTION)
}

fn confirm(number: u64) -> Op {
    Access::Exclusive.confirm(Some(number), TTL, RETENTION)
}

/// Of which attempt a node has the outcome.
pub(crate) fn of_reply(reply: &Reply) -> Option<u8> {
    match reply {
        Reply::Done { record, .. } => Some(executed(record)),
        _ => None,
    }
}

/// Of which attempt this is the outcome.
pub(crate) fn executed(record: &Record) -> u8 {
    record.digest()[0]
}

fn execution(of: u8) -> ExecutionId {
    ExecutionId::from_random([of; 16])
}

fn fingerprint() -> Fingerprint {
    Fingerprint::from_digest([0; 32])
}

fn once(executes: bool) -> OnceSpec {
    OnceSpec {
        fingerprint: fingerprint(),
        executes,
    }
}

/// Longer than any model takes.
const TTL: Duration = Duration::from_secs(1_000);

/// How long a node may take, in ticks.
pub(crate) const NODE_TIMEOUT: u8 = 1;

/// The lease of an attempt.
pub(crate) fn attempt(executes: bool) -> LeaseSpec {
    LeaseSpec {
        node_timeout: ticks(NODE_TIMEOUT),
        ttl: TTL,
        once: Some(once(executes)),
        ..spec(0, Some(1))
    }
}
