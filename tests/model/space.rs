//! Numbers in the place of the shipped nodes, so that millions of states fit.
//!
//! Nothing of the protocol is written down here but what is done wrong on purpose. A [`Store`] is pure data, so a model
//! may keep each of its values once, name it by a number, and remember what the shipped code did when it was first
//! asked to take a certain step from a certain value. `leases` does the same for the clients.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, OwnerToken, Store};

use crate::leases::{Heard, Words};
use crate::requests::{self, names_with_record};
use crate::spec::{May, Spec, Variant};

/// No fence is ever forgotten within the time of a model.
pub(crate) const RETENTION: Duration = Duration::from_secs(1_000_000);

/// The values seen so far, each with a number and a note.
#[derive(Debug)]
pub(crate) struct Interner<T, N> {
    ids: HashMap<T, u32>,
    values: Vec<(T, N)>,
}

impl<T: Clone + Eq + Hash, N> Interner<T, N> {
    pub(crate) fn new() -> RwLock<Self> {
        RwLock::new(Self {
            ids: HashMap::new(),
            values: Vec::new(),
        })
    }

    pub(crate) fn value(&self, id: u32) -> &T {
        &self.values[id as usize].0
    }

    pub(crate) fn note(&self, id: u32) -> &N {
        &self.values[id as usize].1
    }

    pub(crate) fn id(&mut self, value: T, note: N) -> u32 {
        let next = u32::try_from(self.values.len()).expect("few enough values");
        match self.ids.entry(value) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                self.values.push((new.key().clone(), note));
                *new.insert(next)
            }
        }
    }
}

/// What a pure function answered before.
#[derive(Debug)]
pub(crate) struct Memo<K, V>(RwLock<HashMap<K, V>>);

impl<K: Eq + Hash, V: Clone> Memo<K, V> {
    pub(crate) fn new() -> Self {
        Self(RwLock::new(HashMap::new()))
    }

    pub(crate) fn get_or(&self, key: K, make: impl FnOnce() -> V) -> V {
        self.get_or_make(key, |_| make())
    }

    pub(crate) fn get_or_make(&self, key: K, make: impl FnOnce(&K) -> V) -> V {
        if let Some(value) = self.0.read().expect("no panic").get(&key) {
            return value.clone();
        }
        let value = make(&key);
        let mut values = self.0.write().expect("no panic");
        values.insert(key, value.clone());
        value
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
    names: Vec<Arc<[KeyNames]>>,
    /// Per client the names of its keys one by one.
    single: Vec<Vec<Arc<[KeyNames]>>>,
    stores: RwLock<Interner<Store, Kept>>,
    executed: Memo<(u32, u8, u8, u8), (u32, Heard)>,
    vanished: Memo<(u32, usize, u8), u32>,
}

impl Nodes {
    /// Nodes for the clients of a model, and one more, which was there before them or comes after them.
    pub(crate) fn new(spec: &Spec) -> Self {
        let namespace = Namespace::default();
        let name = |keys: &[u8]| -> Arc<[KeyNames]> {
            if spec.has(May::Execute) {
                return [names_with_record(&namespace, spec.has(May::Intend))].into();
            }
            let keys: LockKeys = keys.iter().map(|key| format!("key{key}")).collect();
            let names = namespace.names(&keys, |_| [0; 32]).expect("plain names");
            let names = names.into_iter().map(|name| namespace.with_shared(name));
            names.collect()
        };
        let sets: Vec<&[u8]> = spec.clients.iter().map(|role| role.keys).collect();
        let sets = [&sets[..], &[&[0]]].concat();
        let owner = |client| match spec.has(May::Execute) {
            true => requests::once(true).owner([client; 16]),
            false => OwnerToken::from_random([client; 16]),
        };
        Self {
            words: Words::new(),
            variant: spec.variant,
            executes: spec.has(May::Execute),
            is_large: spec.has(May::BeLarge),
            owners: (0_u8..).take(sets.len()).map(owner).collect(),
            names: sets.iter().map(|set| name(set)).collect(),
            single: sets
                .iter()
                .map(|set| set.iter().map(|key| name(&[*key])).collect())
                .collect(),
            stores: Interner::new(),
            executed: Memo::new(),
            vanished: Memo::new(),
        }
    }

    /// A node that remembers nothing.
    pub(crate) fn empty(&self) -> u32 {
        self.intern(Store::new())
    }

    /// What a node has of executions that are decided.
    pub(crate) fn kept(&self, store: u32) -> Kept {
        *self.stores.read().expect("no panic").note(store)
    }

    /// Carries out a request of `client`, by its number, at a node, at `now`.
    pub(crate) fn execute(&self, store: u32, client: usize, op: u8, now: u8) -> (u32, Heard) {
        let number = u8::try_from(client).expect("few clients");
        self.executed.get_or((store, number, op, now), || {
            let mut node = self.get(store);
            let reply = self.apply(&mut node, client, self.words.op(op), ticks(now));
            (self.intern(node), self.words.hear(reply))
        })
    }

    /// Lets the lock of `client` on the `key`th of its keys vanish from a node; what else is there stays.
    pub(crate) fn vanish(&self, store: u32, client: usize, key: u8) -> u32 {
        self.vanished.get_or((store, client, key), || {
            let mut node = self.get(store);
            let names = &self.single[client][usize::from(key)];
            self.send(&mut node, client, names, Op::ReleaseExecuted, ticks(0));
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
            (Variant::RaisesNewFencesOnly, Op::Acquire { ttl, .. }) => {
                // What the shipped node answers is the right number; it is then carried out on
                // the free keys alone.
                let ttl = *ttl;
                let reply = self.send(&mut node.clone(), client, all, op, now);
                let Reply::Granted(number) = reply else {
                    return reply;
                };
                for names in &self.single[client] {
                    let before = node.clone();
                    self.send(node, client, names, Op::Release, now);
                    let free = *node == before;
                    *node = before;
                    if free {
                        self.send(node, client, names, acquire(Some(number), ttl), now);
                    }
                }
                reply
            }
            (Variant::ConfirmShortens, Op::Confirm { ttl, .. }) => {
                let ttl = *ttl;
                let reply = self.send(node, client, all, op, now);
                if let Reply::At(fence) = reply {
                    // The lock set anew, with the number that the fence has: only the expiry
                    // can have changed. A shipped node never grants without raising the fence, so the node is built
                    // again.
                    self.send(node, client, all, Op::Release, now);
                    assert_eq!(node.held(now), 0, "for models with a single key");
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

    fn send(
        &self,
        node: &mut Store,
        client: usize,
        names: &Arc<[KeyNames]>,
        op: Op,
        now: Duration,
    ) -> Reply {
        let command = Command {
            names: Arc::clone(names),
            owner: self.owners[client].clone(),
            op,
        };
        node.apply(&command, now)
    }

    fn get(&self, id: u32) -> Store {
        let stores = self.stores.read().expect("no panic");
        stores.value(id).clone()
    }

    fn intern(&self, mut store: Store) -> u32 {
        let kept = self.forget_beside_record(&mut store);
        self.stores.write().expect("no panic").id(store, kept)
    }
}

/// The request for a lock.
pub(crate) fn acquire(proposal: Option<u64>, ttl: Duration) -> Op {
    Op::Acquire {
        proposal,
        ttl,
        retention: RETENTION,
    }
}

/// A tick of a model is long, so that the drift of clocks is less than one.
pub(crate) fn ticks(ticks: u8) -> Duration {
    Duration::from_secs(u64::from(ticks))
}
