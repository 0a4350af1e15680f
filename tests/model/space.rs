//! Numbers in the place of the shipped nodes, so that millions of states fit.
//!
//! Nothing of the protocol is written down here but what is done wrong on purpose. A [`Store`] is pure data, so a model
//! may keep each of its values once, name it by a number, and remember what the shipped code did when it was first
//! asked to take a certain step from a certain value. `leases` does the same for the clients.

use std::hash::Hash;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use ahash::RandomState;
use indexmap::IndexMap;
use tower_redlock::protocol::lease::Access;
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, OwnerToken, Shown, Store};

use crate::leases::{Heard, Words, small};
use crate::requests::{self, names_with_record};
use crate::spec::{May, Spec, Variant};

/// No fence is ever forgotten within the time of a model.
pub(crate) const RETENTION: Duration = Duration::from_secs(1_000_000);

/// The values seen so far, each with a number and a note; or the arguments of a pure function, each with what it answered.
#[derive(Debug)]
pub(crate) struct Seen<T, N>(RwLock<IndexMap<T, N, RandomState>>);

impl<T: Eq + Hash, N> Seen<T, N> {
    pub(crate) fn new() -> Self {
        Self(RwLock::default())
    }

    /// One that knows this, by number 0.
    pub(crate) fn of(value: T, note: N) -> Self {
        Self(RwLock::new(IndexMap::from_iter([(value, note)])))
    }

    pub(crate) fn see<R>(&self, id: u32, see: impl FnOnce(&T, &N) -> R) -> R {
        let values = self.0.read().expect("no panic");
        let (value, note) = values.get_index(id as usize).expect("a value seen before");
        see(value, note)
    }

    /// The number of a value. The note stays that with which it was seen first.
    pub(crate) fn id(&self, value: T, note: N) -> u32 {
        let mut values = self.0.write().expect("no panic");
        let entry = values.entry(value);
        let id = entry.index();
        entry.or_insert(note);
        u32::try_from(id).expect("few enough values")
    }

    pub(crate) fn get_or(&self, value: T, make: impl FnOnce(&T) -> N) -> N
    where
        N: Clone,
    {
        let known = self.0.read().expect("no panic").get(&value).cloned();
        known.unwrap_or_else(|| {
            let note = make(&value);
            self.id(value, note.clone());
            note
        })
    }
}

/// What a node has of executions that are decided.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kept {
    /// Whose record.
    pub(crate) record: Option<u8>,
    /// Whether it also has an intent, which refuses the key when the record has ended.
    pub(crate) and_intent: bool,
}

type Names = Arc<[KeyNames]>;

/// All nodes: one function from a store and a request to a store and an answer.
#[derive(Debug)]
pub(crate) struct Nodes {
    pub(crate) words: Arc<Words>,
    variant: Variant,
    /// Whether the clients execute, and whether outcomes are large.
    pub(crate) executes: bool,
    pub(crate) is_large: bool,
    pub(crate) owners: Vec<OwnerToken>,
    /// Per client the names of its keys.
    names: Vec<Names>,
    stores: Seen<Store, Kept>,
    executed: Seen<(u32, u8, u8, u8), (u32, Heard)>,
    vanished: Seen<(u32, usize, u8), u32>,
}

impl Nodes {
    /// Nodes for the clients of a model, and one more, which was there before them or comes after them.
    pub(crate) fn new(spec: &Spec) -> Self {
        let namespace = Namespace::default();
        let name = |keys: &[u8]| -> Names {
            if spec.has(May::Execute) {
                return [names_with_record(&namespace, spec.has(May::Intend))].into();
            }
            let keys: LockKeys = keys.iter().map(|key| format!("key{key}")).collect();
            let names = namespace.names(&keys, |_| [0; 32]).expect("plain names");
            let names = names.iter().cloned();
            names.map(|name| namespace.with_shared(name)).collect()
        };
        let sets = spec.clients.iter().map(|role| role.keys);
        let names: Vec<Names> = sets.chain([&[0][..]]).map(name).collect();
        let owner = |client| match spec.has(May::Execute) {
            true => {
                let fingerprint = Some(requests::once(true).fingerprint);
                OwnerToken::showing([client; 16], Shown::new(fingerprint, None))
            }
            false => OwnerToken::from_random([client; 16]),
        };
        Self {
            words: Words::new(),
            variant: spec.variant,
            executes: spec.has(May::Execute),
            is_large: spec.has(May::BeLarge),
            owners: (0_u8..).take(names.len()).map(owner).collect(),
            names,
            stores: Seen::of(Store::new(), Kept::default()),
            executed: Seen::new(),
            vanished: Seen::new(),
        }
    }

    /// What a node has of executions that are decided.
    pub(crate) fn kept(&self, store: u32) -> Kept {
        self.stores.see(store, |_, kept| *kept)
    }

    /// Carries out a request of `client`, by its number, at a node, at `now`.
    pub(crate) fn execute(&self, store: u32, client: usize, op: u8, now: u8) -> (u32, Heard) {
        let key = (store, small(client), op, now);
        self.executed.get_or(key, |_| {
            let mut node = self.get(store);
            let reply = self.apply(&mut node, client, self.words.op(op), ticks(now));
            (self.intern(node), self.words.hear(reply))
        })
    }

    /// Lets the lock of `client` on the `key`th of its keys vanish from a node; what else is there stays.
    pub(crate) fn vanish(&self, store: u32, client: usize, key: u8) -> u32 {
        self.vanished.get_or((store, client, key), |_| {
            let mut node = self.get(store);
            let names = [self.names[client][usize::from(key)].clone()].into();
            self.send(&mut node, client, &names, Op::ReleaseExecuted, ticks(0));
            self.intern(node)
        })
    }

    /// How many locks a node has.
    pub(crate) fn held(&self, store: u32, now: u8) -> usize {
        self.get(store).held(ticks(now))
    }

    fn apply(&self, node: &mut Store, client: usize, op: Op, now: Duration) -> Reply {
        let all = &self.names[client];
        match (self.variant, &op) {
            (Variant::RaisesNewFencesOnly, &Op::Acquire { ttl, .. }) => {
                // What the shipped node answers is the right number; it is then carried out on
                // the free keys alone.
                let reply = self.send(&mut node.clone(), client, all, op, now);
                let Reply::Granted(number) = reply else {
                    return reply;
                };
                for names in all.iter().map(|names| [names.clone()].into()) {
                    let mut without = node.clone();
                    self.send(&mut without, client, &names, Op::Release, now);
                    if without == *node {
                        self.send(node, client, &names, acquire(Some(number), ttl), now);
                    }
                }
                reply
            }
            (Variant::ConfirmShortens, &Op::Confirm { ttl, .. }) => {
                let reply = self.send(node, client, all, op, now);
                if let Reply::At(fence) = reply {
                    // Set anew, with the number that the fence has, only the expiry can have changed. A shipped node
                    // never grants without raising the fence, so the node is built again, which is for a single key.
                    *node = Store::new();
                    self.send(node, client, all, acquire(Some(fence), ttl), now);
                }
                reply
            }
            _ => self.send(node, client, all, op, now),
        }
    }

    pub(crate) fn ask(&self, node: &mut Store, client: usize, op: Op, now: Duration) -> Reply {
        self.send(node, client, &self.names[client], op, now)
    }

    fn send(&self, node: &mut Store, client: usize, names: &Names, op: Op, now: Duration) -> Reply {
        let command = Command {
            names: Arc::clone(names),
            owner: self.owners[client].clone(),
            op,
        };
        node.apply(&command, now)
    }

    fn get(&self, id: u32) -> Store {
        self.stores.see(id, |store, _| store.clone())
    }

    fn intern(&self, mut store: Store) -> u32 {
        let kept = self.forget_beside_record(&mut store);
        self.stores.id(store, kept)
    }
}

/// A node that remembers nothing.
pub(crate) const EMPTY: u32 = 0;

/// The request for a lock.
pub(crate) fn acquire(proposal: Option<u64>, ttl: Duration) -> Op {
    Access::Exclusive.acquire(proposal, ttl, RETENTION)
}

/// A tick of a model is long, so that the drift of clocks is less than one.
pub(crate) fn ticks(ticks: u8) -> Duration {
    Duration::from_secs(u64::from(ticks))
}
