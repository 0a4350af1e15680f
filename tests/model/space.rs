//! Numbers in the place of the shipped nodes and rounds, so that millions of states fit.
//!
//! Nothing of the protocol is written down here. [`Store`], [`AcquireRound`] and [`ExtendRound`]
//! are pure data, so a model may keep each of their values once, name it by a number, and remember
//! what the shipped code did when it was first asked to take a certain step from a certain value.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::round::{AcquireRound, AcquireStep, Answer, ExtendRound, ExtendStep};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, OwnerToken, Quorum, Store};

use crate::leases::{self, Words};

/// No fence is ever forgotten within the time of a model.
pub(crate) const RETENTION: Duration = Duration::from_secs(1_000_000);

/// What is done wrong on purpose; all else is shared with the run of the shipped protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Nothing: the protocol as it is shipped.
    Shipped,
    /// T1: the second phase counts every node that still has the key, whatever its fence.
    CountsEveryOk,
    /// T2: the highest number of a majority is the token at once, without a second phase.
    NoWriteBack,
    /// T4: an extension counts every node that still has the key, whatever its fence.
    ExtendsByKey,
    /// T10: a node raises the fences of the newly locked keys of a set only.
    RaisesNewFencesOnly,
    /// T11: a node's `CONFIRM` sets the expiry even if that shortens the lock.
    ConfirmShortens,
    /// T12: answers to an older extension are counted for a newer one.
    CountsOldExtension,
    /// A majority that answered after the ttl is as good as one that answered in time.
    IgnoresValidity,
    /// The validity of a lock counts from when the majority was read.
    EndFromReply,
    /// T33: a client that has released begins again as the same owner.
    ReusesOwner,
    /// T13: the node does not compare the generation that the client was admitted with.
    NoCompare,
    /// T14: the age of a node counts, for each client, from when that client noticed.
    AgeFromNotice,
    /// T15: a node votes as soon as its generation is old enough, whatever process made it and
    /// however young the one that runs.
    NoUptimeRule,
    /// T16: what a node said on one connection goes for the next one, too.
    CachesAdmission,
    /// T18: the stamp of a generation is read in a step of its own before it is set.
    StampOutside,
    /// T19: a generation goes for every process that has it.
    GenerationOfAnyProcess,
}

/// What a client hears from a node; replies without what takes no part in safety.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Heard {
    Granted(u8),
    Held,
    At(u8),
    Lost,
    Released,
}

impl Heard {
    fn of(reply: Reply) -> Self {
        match reply {
            Reply::Granted(number) => Self::Granted(small(number)),
            Reply::Held { .. } => Self::Held,
            Reply::At(number) => Self::At(small(number)),
            Reply::Lost => Self::Lost,
            Reply::Released => Self::Released,
            reply => unreachable!("{reply:?} in the model"),
        }
    }

    fn answer(self) -> Answer {
        Answer::Replied(match self {
            Self::Granted(number) => Reply::Granted(number.into()),
            Self::Held => Reply::Held {
                expires_in: None,
                fingerprint: None,
            },
            Self::At(number) => Reply::At(number.into()),
            Self::Lost => Reply::Lost,
            Self::Released => Reply::Released,
        })
    }
}

fn small(number: u64) -> u8 {
    u8::try_from(number).expect("numbers of a model are small")
}

/// A request of one acquisition, as the nodes of a model are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ask {
    Acquire {
        proposal: u8,
        ttl: u8,
    },
    Confirm {
        token: u8,
        ttl: u8,
    },
    /// The release of what is not shared.
    Release,
}

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

/// All nodes: one function from a store and a request to a store and an answer.
#[derive(Debug)]
pub(crate) struct Nodes {
    pub(crate) words: Arc<Words>,
    variant: Variant,
    owners: Vec<OwnerToken>,
    /// Per client the names of its keys.
    names: Vec<Arc<[KeyNames]>>,
    /// Per client the names of its keys one by one.
    single: Vec<Vec<Arc<[KeyNames]>>>,
    stores: RwLock<Interner<Store, ()>>,
    asked: Memo<(u32, u8, Ask, u8), (u32, Heard)>,
    executed: Memo<(u32, u8, u8, u8), (u32, leases::Heard)>,
    vanished: Memo<(u32, usize, u8), u32>,
}

impl Nodes {
    /// Nodes for clients that lock these sets of keys, each given by its numbers.
    pub(crate) fn new(variant: Variant, sets: &[Vec<u8>]) -> Self {
        let name = |keys: &[u8]| -> Arc<[KeyNames]> {
            let keys: LockKeys = keys.iter().map(|key| format!("key{key}")).collect();
            let namespace = Namespace::default();
            let names = namespace.names(&keys, |_| [0; 32]).expect("plain names");
            let names = names.into_iter().map(|name| namespace.with_shared(name));
            names.collect()
        };
        let owners = (0..sets.len()).map(|client| {
            OwnerToken::from_random([u8::try_from(client).expect("few clients"); 16])
        });
        Self {
            words: Words::new(),
            variant,
            owners: owners.collect(),
            names: sets.iter().map(|set| name(set)).collect(),
            single: sets
                .iter()
                .map(|set| set.iter().map(|key| name(&[*key])).collect())
                .collect(),
            stores: Interner::new(),
            asked: Memo::new(),
            executed: Memo::new(),
            vanished: Memo::new(),
        }
    }

    /// A node that remembers nothing.
    pub(crate) fn empty(&self) -> u32 {
        self.intern(Store::new())
    }

    /// Carries out a request of `client` at a node, at `now`.
    pub(crate) fn ask(&self, store: u32, client: u8, ask: Ask, now: u8) -> (u32, Heard) {
        self.asked.get_or((store, client, ask, now), || {
            let mut node = self.get(store);
            let op = op(ask);
            let reply = self.apply(&mut node, usize::from(client), op, ticks(now));
            (self.intern(node), Heard::of(reply))
        })
    }

    /// Carries out a request of `client`, by its number, at a node, at `now`.
    pub(crate) fn execute(
        &self,
        store: u32,
        client: usize,
        op: u8,
        now: u8,
    ) -> (u32, leases::Heard) {
        let number = u8::try_from(client).expect("few clients");
        self.executed.get_or((store, number, op, now), || {
            let mut node = self.get(store);
            let reply = self.apply(&mut node, client, self.words.op(op), ticks(now));
            (self.intern(node), self.words.hear(reply))
        })
    }

    /// Lets the lock of `client` on the `key`th of its keys vanish from a node; the fence stays.
    pub(crate) fn vanish(&self, store: u32, client: usize, key: u8) -> u32 {
        self.vanished.get_or((store, client, key), || {
            let mut node = self.get(store);
            let names = &self.single[client][usize::from(key)];
            self.send(&mut node, client, names, Op::Release, ticks(0));
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
        stores.values[id as usize].0.clone()
    }

    fn intern(&self, store: Store) -> u32 {
        self.stores.write().expect("no panic").id(store, ())
    }
}

fn acquire(proposal: Option<u64>, ttl: Duration) -> Op {
    Op::Acquire {
        proposal,
        ttl,
        retention: RETENTION,
    }
}

fn op(ask: Ask) -> Op {
    match ask {
        Ask::Acquire { proposal, ttl } => acquire(Some(proposal.into()), ticks(ttl)),
        Ask::Confirm { token, ttl } => Op::Confirm {
            token: Some(token.into()),
            ttl: ticks(ttl),
            retention: RETENTION,
        },
        Ask::Release => Op::Release,
    }
}

/// A tick of a model is long, so that the drift of clocks is less than one.
pub(crate) fn ticks(ticks: u8) -> Duration {
    Duration::from_secs(u64::from(ticks))
}

/// One thing that a round is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Told {
    pub(crate) node: u8,
    /// 0 for the `ACQUIRE`, else the number of the second phase; of no account to an extension.
    pub(crate) phase: u8,
    pub(crate) heard: Heard,
}

/// What follows from what a round was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Wait,
    Granted(u8),
    Confirm(u8),
    Extended,
    /// The round is over without success, which obliges its client to nothing that safety needs.
    Over,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Round {
    /// With the target of the second phase.
    Acquire(AcquireRound, u8),
    /// With the token.
    Extend(ExtendRound, u8),
}

/// All rounds: one function from a round and an answer to a round and a step.
#[derive(Debug)]
pub(crate) struct Rounds {
    variant: Variant,
    quorum: Quorum,
    /// With what each was told to become what it is, since it began as the other.
    rounds: RwLock<Interner<Round, (Option<u8>, Vec<Told>)>>,
    told: Memo<(u32, Told), (u32, Step)>,
    unconfirmed: Memo<u32, u8>,
    moved: Memo<(u32, u32), u32>,
}

impl Rounds {
    pub(crate) fn new(variant: Variant, nodes: usize) -> Self {
        Self {
            variant,
            quorum: Quorum::new(nodes).expect("at least one node"),
            rounds: Interner::new(),
            told: Memo::new(),
            unconfirmed: Memo::new(),
            moved: Memo::new(),
        }
    }

    /// A round that has just sent `ACQUIRE`, or the extension of a lock with this token.
    pub(crate) fn begin(&self, extends: Option<u8>) -> u32 {
        let round = match extends {
            None => Round::Acquire(AcquireRound::new(self.quorum), 0),
            Some(token) => Round::Extend(ExtendRound::new(self.quorum, token.into()), token),
        };
        let note = (extends, Vec::new());
        self.rounds.write().expect("no panic").id(round, note)
    }

    /// Tells a round one answer.
    pub(crate) fn tell(&self, round: u32, told: Told) -> (u32, Step) {
        self.told.get_or((round, told), || {
            let (mut next, (began, mut log)) =
                self.rounds.read().expect("no panic").values[round as usize].clone();
            let step = self.step(&mut next, told);
            log.push(told);
            let id = self
                .rounds
                .write()
                .expect("no panic")
                .id(next, (began, log));
            (id, step)
        })
    }

    /// The nodes that the second phase goes to, as bits.
    pub(crate) fn unconfirmed(&self, round: u32) -> u8 {
        self.unconfirmed.get_or(round, || {
            match &self.rounds.read().expect("no panic").values[round as usize].0 {
                Round::Acquire(round, _) => round.unconfirmed().fold(0, |bits, n| bits | 1 << n),
                Round::Extend(..) => 0,
            }
        })
    }

    /// The number of the second phase that is under way.
    pub(crate) fn phase(&self, round: u32) -> u8 {
        match &self.rounds.read().expect("no panic").values[round as usize].0 {
            Round::Acquire(round, _) => round.step(),
            Round::Extend(..) => 0,
        }
    }

    /// The round that this one would be if node `order[i]` were node `i`.
    pub(crate) fn moved(&self, round: u32, order: &[u8]) -> u32 {
        let packed = order
            .iter()
            .fold(0, |sum, node| sum << 4 | u32::from(*node));
        self.moved.get_or((round, packed), || {
            let (began, log) = self.rounds.read().expect("no panic").values[round as usize]
                .1
                .clone();
            log.iter().fold(self.begin(began), |round, told| {
                let node = order.iter().position(|node| *node == told.node);
                let node = u8::try_from(node.expect("every node moves")).expect("few nodes");
                self.tell(round, Told { node, ..*told }).0
            })
        })
    }

    /// Every way in which hearing some of these answers, in some order, makes a round act: what
    /// it is told, the round afterwards, and what it then does.
    ///
    /// Until a round acts, the answers it has read make no difference, so nothing is lost by letting clients
    /// hear answers only when that makes them act. A round that is over is forgotten.
    pub(crate) fn decisions(&self, round: u32, answers: &[Told]) -> Vec<(Vec<Told>, Step)> {
        let mut seen = vec![round];
        let mut open = vec![(round, Vec::new())];
        let mut outcomes: Vec<(Option<u32>, Step)> = Vec::new();
        let mut found = Vec::new();
        while let Some((round, log)) = open.pop() {
            for told in answers {
                let again = |old: &Told| old.node == told.node && old.phase == told.phase;
                if log.iter().any(again) {
                    continue;
                }
                let (next, step) = self.tell(round, *told);
                let longer = || [log.as_slice(), &[*told]].concat();
                match step {
                    Step::Wait if !seen.contains(&next) => {
                        seen.push(next);
                        open.push((next, longer()));
                    }
                    Step::Wait | Step::Over => {}
                    Step::Granted(_) | Step::Extended | Step::Confirm(_) => {
                        let outcome = (matches!(step, Step::Confirm(_)).then_some(next), step);
                        if !outcomes.contains(&outcome) {
                            outcomes.push(outcome);
                            found.push((longer(), step));
                        }
                    }
                }
            }
        }
        found
    }

    fn step(&self, round: &mut Round, told: Told) -> Step {
        let node = usize::from(told.node);
        match round {
            Round::Acquire(round, target) => {
                let step = if told.phase == 0 {
                    round.on_acquire(node, &told.heard.answer())
                } else {
                    let heard = match told.heard {
                        Heard::At(_) if self.variant == Variant::CountsEveryOk => {
                            Heard::At(*target)
                        }
                        heard => heard,
                    };
                    round.on_confirm(node, told.phase, &heard.answer())
                };
                match step {
                    AcquireStep::Wait => Step::Wait,
                    AcquireStep::Granted(token) => Step::Granted(small(token)),
                    AcquireStep::Confirm(token) if self.variant == Variant::NoWriteBack => {
                        Step::Granted(small(token))
                    }
                    AcquireStep::Confirm(token) => {
                        *target = small(token);
                        Step::Confirm(*target)
                    }
                    AcquireStep::Refused(_) => Step::Over,
                }
            }
            Round::Extend(round, token) => {
                let heard = match told.heard {
                    Heard::At(_) if self.variant == Variant::ExtendsByKey => Heard::At(*token),
                    heard => heard,
                };
                match round.on_confirm(node, &heard.answer()) {
                    ExtendStep::Wait => Step::Wait,
                    ExtendStep::Extended => Step::Extended,
                    ExtendStep::Lost | ExtendStep::Missed { .. } => Step::Over,
                }
            }
        }
    }
}

/// One request of one client to one node, and its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Call {
    /// Nothing is under way, and no client waits for an answer.
    #[default]
    None,
    /// The node may carry it out, now or later or never.
    Sent,
    /// Like `Sent`, but the answer will not be read.
    Deaf,
    /// The answer is under way.
    Ran(Heard),
}

impl Call {
    /// The answer will not be read.
    pub(crate) fn deafen(&mut self) {
        *self = match self {
            Self::Sent | Self::Deaf => Self::Deaf,
            Self::None | Self::Ran(_) => Self::None,
        };
    }

    /// The node carried the request out.
    pub(crate) fn run(&mut self, heard: Heard) {
        *self = match self {
            Self::Sent => Self::Ran(heard),
            _ => Self::None,
        };
    }
}
