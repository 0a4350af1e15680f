//! The one world of all models: nodes, leases, what passes between them, and time.
//!
//! Whatever a [`Spec`] allows happens in every order: requests run late or never, `ACQUIRE` more than once; answers are
//! read late or never; clients stop for ever, by never being scheduled again. Without time, a lock key may vanish at any
//! node at any moment, which covers expiry, jumping clocks, and every early, late or reordered `RELEASE`; a client that
//! is refused, or whose extension fails, stops there. With time, all clocks show the same tick, and locks vanish by their
//! ttl, by a release, or with the whole memory of a node.
//!
//! Three reductions keep this small, and lose nothing. Equal acquisitions begin in the order of their numbers. A client
//! reads answers only at the moment at which they decide something: until then it makes no difference whether it had read
//! them. And nodes are interchangeable, so those of a state are sorted; in a trace, the number of a node may therefore
//! change from step to step. What can make no difference any more is forgotten; each such rule asks the shipped code.
//!
//! Where clients release at any time, a request that changes nothing at its node and does not help its client is not
//! carried out, which is as if it were lost. In *whole lives*, these rules are off: the first client renews its lock, and
//! may be revoked; each timer may be late; refusals are heard; clients give up waiting for single answers; and with
//! [`Spec::settles`], answers to releases are heard until the lease is settled. The requests of a client to a node run
//! in their order there, as on a lane, but for those that are lost before one that runs.

use std::ops::Range;
use std::sync::Arc;

use stateright::{Model, Property};
use tower_redlock::protocol::lease::{Effect, Event, Input, Lease, LeaseRequest, LeaseSpec};
use tower_redlock::protocol::message::{Op, Reply};

use crate::leases::{
    self, BEGIN, Call, Heard, Leases, Step, Told, keep_old_answers, sorting, tick_after,
};
use crate::space::{Memo, Nodes, RETENTION, acquire, ticks};
use crate::spec::{Fault, GROUPS, May, Proposals, Spec, Variant};
use crate::world::guard::{Generation, OLD};
use crate::world::moving::Moved;
use crate::world::once::{Executed, Execution, NODE_TIMEOUT};

mod guard;
mod moving;
mod once;
mod promises;

pub(crate) use promises::*;

/// The first tick. Ages are counted from it; what is as old as it is older than any guard asks.
const START: u8 = 8;

/// What passes between one client and one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Link<const K: usize> {
    /// The generation that the client was told when it connected; 0 without a connection.
    known: u8,
    /// The tick from which on it asks the node for its vote; 0 if that was at once.
    from: u8,
    calls: [Call; K],
    /// The generation that went with each call.
    sent: [u8; K],
}

/// One node, and everything that is under way to and from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Column<const C: usize, const K: usize> {
    store: u32,
    generation: Generation,
    /// How many generations there were.
    made: u8,
    /// When the process began, and how far its clock is ahead.
    started: u8,
    ahead: u8,
    links: [Link<K>; C],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Stage {
    /// It has no connections yet.
    Away,
    /// It read the nodes' time in a step of its own, which only a wrong guard does.
    Looked,
    #[default]
    Idle,
    Acquiring,
    /// It has not got the lock, and stops there.
    Refused,
    /// It has released, or given up.
    Gone,
    Holding,
    /// Without time, it extends once.
    Extending,
    Extended,
    /// Its lock is no more to be relied on, or would not be if it still came.
    Lost,
}

/// The lock of a client in one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Lock<const K: usize> {
    of: leases::Client<K>,
    began: u8,
    token: u8,
    /// The tick at which it is no more to be relied on, or would not be if it were granted.
    until: u8,
    /// The token that it is being raised to.
    raised: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Client<const K: usize> {
    stage: Stage,
    locks: [Lock<K>; GROUPS],
    /// The rivals that had completed when this one began, as bits, and when its extension did.
    after: u8,
    extended_after: u8,
    /// How many extensions were begun.
    extensions: u8,
    is_revoked: bool,
    execution: Execution,
}

/// A storage that accepts no token lower than the highest it has seen, for each key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Storage {
    highest: [u8; 2],
    /// Whose writes were accepted, as bits.
    wrote: [u8; 2],
    /// A write was accepted after that of a newer acquisition.
    reordered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State<const N: usize, const C: usize, const K: usize> {
    now: u8,
    nodes: [Column<C, K>; N],
    clients: [Client<K>; C],
    storage: Storage,
    duplicates: u8,
    extensions: u8,
    faults: u8,
    jumps: u8,
    /// A lock was extended that was lost, or over.
    extended_too_late: bool,
    /// A lease that had lost or released its lock asked for it.
    asked_too_late: bool,
    /// A lease had no node left that may hold the key, and one did.
    settled_too_early: bool,
    moved: Moved,
    executed: Executed,
}

impl<const N: usize, const C: usize, const K: usize> State<N, C, K> {
    /// The time of a client's lease.
    fn clock(&self, client: usize) -> u8 {
        match self.clients[client].execution.is_late {
            true => 2 * NODE_TIMEOUT,
            false => self.now,
        }
    }
}

/// What happens: time passes, to a node, or to a client.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Tick,
    /// No client of the first group alone begins any more.
    EndOld,
    /// The clock of a node jumps.
    Jump(usize),
    /// A node loses its memory, and may become a copy of another one.
    Lose(usize, Fault, usize),
    Of(usize, Deed),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Deed {
    /// It reads the nodes' time.
    Look,
    Connect,
    Reconnect(usize),
    /// It begins in a group, with this proposal.
    Begin(usize, u8),
    /// A node carries out one of its requests.
    Run(usize, usize),
    /// A node carries its `ACQUIRE` out again, which may replace the answer.
    Duplicate(usize, bool),
    /// Its lock on a key vanishes from a node.
    Vanish(usize, u8),
    /// It reads answers of a group, or a timer ends.
    Decide(usize, Arc<Step>),
    Extend(usize),
    /// It raises a group to a token.
    Raise(usize, u8),
    Revoke,
    /// It releases the lock, or gives up.
    Release,
    /// It writes to the storage of a key.
    Write(u8),
    /// It may execute, and begins to, perhaps late.
    Start(bool),
    Record,
    /// It goes without a record.
    Leave(Effect),
    /// What is to be read of a record is read, or cannot be.
    Read(bool),
}

#[derive(Debug)]
pub(crate) struct World<const N: usize, const C: usize, const K: usize> {
    spec: Spec,
    nodes: Nodes,
    leases: [Leases; GROUPS],
    /// Per client those that share a key with it, itself left out, as bits.
    rivals: Vec<u8>,
    orphaned: Memo<(u32, u8), bool>,
}

impl<const N: usize, const C: usize, const K: usize> World<N, C, K> {
    pub(crate) fn new(spec: Spec) -> Self {
        let rivals = spec.clients.iter().enumerate().map(|(me, mine)| {
            let others = spec.clients.iter().enumerate();
            let meets = |other: &[u8]| other.iter().any(|key| mine.keys.contains(key));
            let orders = spec.is_fenced() && !spec.moves() && !spec.has(May::Execute);
            others
                .filter(|(other, theirs)| orders && *other != me && meets(theirs.keys))
                .fold(0, |bits, (other, _)| bits | 1 << other)
        });
        let nodes = Nodes::new(&spec);
        let present = spec.present.unwrap_or(N);
        let leases = |nodes_of: usize| Leases::new(&nodes.words, nodes_of.max(1));
        Self {
            leases: [leases(present), leases(N - present)],
            rivals: rivals.collect(),
            orphaned: Memo::new(),
            nodes,
            spec,
        }
    }

    /// The nodes of a group.
    fn members(&self, group: usize) -> Range<usize> {
        let present = self.spec.present.unwrap_or(N);
        match group {
            0 => 0..present,
            _ => present..N,
        }
    }

    fn group_of(&self, node: usize) -> usize {
        usize::from(!self.members(0).contains(&node))
    }

    fn clients(&self) -> Range<usize> {
        0..self.spec.clients.len()
    }

    fn completed(&self, state: &State<N, C, K>, client: usize) -> u8 {
        let clients = state.clients.iter().enumerate();
        self.rivals[client]
            & clients
                .filter(|(_, other)| other.stage >= Stage::Holding)
                .fold(0, |bits, (other, _)| bits | 1 << other)
    }

    fn is_valid(&self, state: &State<N, C, K>, client: usize) -> bool {
        let me = &state.clients[client];
        let mut counted = self.counted(client).iter();
        me.stage == Stage::Holding && counted.all(|group| state.now < me.locks[*group].until)
    }

    fn is_release(&self, op: u8) -> bool {
        self.nodes.words.op(op).is_release()
    }

    /// What a node does with a call, and what the client hears.
    fn run(&self, state: &State<N, C, K>, client: usize, node: usize, call: usize) -> (u32, Heard) {
        let column = &state.nodes[node];
        let me = &state.clients[client];
        let op = me.locks[self.group_of(node)].of.asked[call];
        let compares = self.spec.window > 0 && self.spec.variant != Variant::NoCompare;
        let is_foreign = column.links[client].sent[call] != column.generation.id;
        if compares && is_foreign && !(self.spec.has(May::Release) && self.is_release(op)) {
            return (column.store, Heard::FAILED);
        }
        let (store, heard) = self.nodes.execute(column.store, client, op, state.now);
        let counts_every_ok = match self.spec.variant {
            Variant::CountsEveryOk => true,
            Variant::ExtendsByKey => me.stage == Stage::Extending,
            _ => false,
        };
        let words = &self.nodes.words;
        let heard = match (counts_every_ok, words.reply(heard)) {
            (true, Some(Reply::At(_))) => match words.op(op) {
                Op::Confirm {
                    token: Some(token), ..
                } => words.hear(Reply::At(token)),
                _ => heard,
            },
            _ => heard,
        };
        (store, heard)
    }

    /// Whether a client reads an answer: what does not help it to the lock is as good as lost. A refusal may help to a
    /// second phase, but that of a node that is alone in its group.
    fn reads(&self, state: &State<N, C, K>, client: usize, node: usize, heard: Heard) -> bool {
        let reply = || self.nodes.words.reply(heard);
        !self.spec.is_lossy()
            || matches!(reply(), Some(Reply::Granted(_) | Reply::At(_)))
            || self.spec.is_fenced()
                && self.is_acquiring(state, client, node)
                && !self.is_alone(node)
    }

    /// Whether a node that is alone in its group refuses a client, which reads that at once or never.
    fn is_refused(&self, state: &State<N, C, K>, client: usize, node: usize, heard: Heard) -> bool {
        let reply = || self.nodes.words.reply(heard);
        self.spec.moves()
            && self.is_alone(node)
            && matches!(reply(), Some(Reply::Held { .. }))
            && self.is_acquiring(state, client, node)
    }

    fn is_alone(&self, node: usize) -> bool {
        self.members(self.group_of(node)).len() == 1
    }

    fn is_acquiring(&self, state: &State<N, C, K>, client: usize, node: usize) -> bool {
        let group = self.group_of(node);
        let lease = state.clients[client].locks[group].of.lease;
        lease != 0 && self.leases[group].of(lease, Lease::is_acquiring)
    }

    /// Whether a client has the lock at a node.
    fn has(&self, store: u32, client: usize, now: u8) -> bool {
        let token = self.spec.is_fenced().then_some(1);
        let access = self.spec.clients[client].access;
        let op = access.confirm(token, ticks(1), RETENTION);
        let op = self.nodes.words.number(&op);
        let (_, heard) = self.nodes.execute(store, client, op, now);
        matches!(self.nodes.words.reply(heard), Some(Reply::At(_)))
    }

    fn begin(&self, state: &mut State<N, C, K>, client: usize, group: usize, proposal: u8) {
        let role = &self.spec.clients[client];
        let after = self.completed(state, client);
        let me = &mut state.clients[client];
        if me.stage != Stage::Holding {
            me.stage = Stage::Acquiring;
        }
        me.after = after;
        me.locks[group].began = state.now;
        me.locks[group].until = state.now + role.ttl;
        // A lease only passes its proposal on, so all may be told the same one, and the request has the other.
        let is_told = !self.spec.moves() && !self.spec.has(May::Execute);
        let told = if is_told { proposal } else { 1 };
        let spec = LeaseSpec {
            access: role.access,
            renews: self.spec.has(May::Live) && client == 0,
            is_partial: role.groups.len() > 1,
            ..leases::spec(role.ttl, self.spec.is_fenced().then_some(told))
        };
        let spec = self.as_execution(state, client, spec);
        let step = self.leases[group].begin(&spec, state.now);
        self.take(state, client, group, &step);
        if told != proposal {
            let acquire = acquire(Some(proposal.into()), spec.ttl);
            let acquire = self.nodes.words.number(&acquire);
            state.clients[client].locks[group].of.asked[0] = acquire;
        }
    }

    fn handle(&self, state: &mut State<N, C, K>, client: usize, group: usize, input: Input) {
        let lease = state.clients[client].locks[group].of.lease;
        let now = state.clock(client);
        let step = self.leases[group].handle(lease, input, now);
        self.take(state, client, group, &step);
    }

    /// The answers of a group that a client may read.
    fn answers(&self, state: &State<N, C, K>, client: usize, group: usize) -> Vec<Told> {
        let leases = &self.leases[group];
        let lease = state.clients[client].locks[group].of.lease;
        let extends = leases.of(lease, Lease::is_extending);
        let last = u8::try_from(leases.of(lease, Lease::number)).expect("few requests");
        // Of the current request only: what does not count is not listened to.
        let executes = self.spec.has(May::Execute);
        let gives_up = match extends && !executes {
            true => self.spec.is_timed() && !self.spec.moves(),
            false => self.spec.has(May::GiveUp),
        };
        let mut answers = Vec::new();
        for (node, column) in (0_u8..).zip(&state.nodes[self.members(group)]) {
            for (number, call) in (1_u8..).zip(&column.links[client].calls) {
                if executes && !leases.of(lease, |lease| lease.counts(number.into())) {
                    continue;
                }
                let is_old = extends && number > 1;
                let counts_old = self.spec.variant == Variant::CountsOldExtension;
                let number = if is_old && counts_old { last } else { number };
                let told = |heard| Told {
                    node,
                    number,
                    heard,
                };
                if let Call::Ran(heard) = *call {
                    self.as_variant(state, client, told(heard), &mut answers);
                }
                if gives_up && matches!(call, Call::Sent | Call::Ran(_)) {
                    answers.push(told(Heard::FAILED));
                }
            }
        }
        answers
    }

    /// Every way in which reading answers, or the time, leads a client to do something.
    fn decisions(&self, state: &State<N, C, K>, client: usize, group: usize) -> Vec<Arc<Step>> {
        let (me, leases) = (&state.clients[client], &self.leases[group]);
        let lock = &me.locks[group];
        let now = match self.spec.variant {
            Variant::IgnoresValidity => lock.began,
            _ => state.now,
        };
        let lease = match self.spec.variant {
            Variant::EndFromReply => leases.hastened(lock.of.lease, now),
            _ => lock.of.lease,
        };
        let answers = self.answers(state, client, group);
        let mut steps = leases.decisions(lease, answers, now).to_vec();
        let has_timer =
            self.spec.has(May::Live) || !self.spec.has(May::Release) && me.stage >= Stage::Holding;
        if has_timer && leases.is_due(lease, now) {
            steps.push(leases.handle(lease, Input::TimedOut, now));
        }
        if self.spec.variant == Variant::NoWriteBack {
            steps = steps
                .into_iter()
                .map(|step| self.confirmed_by_itself(step))
                .collect();
        }
        // Who does not release stops at any moment, refused or not.
        let is_stop = |event: &Event| match event {
            Event::Refused(_) | Event::TooLate { .. } => true,
            Event::NotExtended { .. } | Event::Lost(_) => !self.spec.is_timed(),
            _ => false,
        };
        steps.retain(|step| self.spec.has(May::Release) || !step.events.iter().any(is_stop));
        steps
    }

    /// A wrong variant takes the highest number of a majority as confirmed, and asks no node.
    fn confirmed_by_itself(&self, step: Arc<Step>) -> Arc<Step> {
        let Some(request) = &step.request else {
            return step;
        };
        let Op::Confirm {
            token: Some(token), ..
        } = request.op
        else {
            return step;
        };
        let heard = self.nodes.words.hear(Reply::At(token));
        let tell = |step: Arc<Step>, node| {
            let told = Told {
                node: u8::try_from(node).expect("few nodes"),
                number: u8::try_from(request.number).expect("few requests"),
                heard,
            };
            match step.events.is_empty() {
                true => self.leases[0].tell(step.lease, told, 0),
                false => step,
            }
        };
        request.nodes.iter().fold(Arc::clone(&step), tell)
    }

    /// Goes on as the lease of a client in a group says, until it waits for something.
    fn take(&self, state: &mut State<N, C, K>, client: usize, group: usize, step: &Step) {
        self.follow(state, client, group, step);
        self.settle(state, client);
    }

    fn follow(&self, state: &mut State<N, C, K>, client: usize, group: usize, step: &Step) {
        let before = (self.spec.variant == Variant::CountsOldExtension).then_some(state.nodes);
        let me = &mut state.clients[client];
        let columns = &mut state.nodes[self.members(group)];
        let links = columns
            .iter_mut()
            .map(|column| &mut column.links[client].calls);
        self.leases[group].follow(step, &mut me.locks[group].of, links);
        if let Some(before) = before
            && me.stage == Stage::Holding
        {
            let links = columns
                .iter_mut()
                .map(|column| &mut column.links[client].calls);
            let before = before.iter().map(|column| column.links[client].calls);
            keep_old_answers(links, before);
        }
        for event in &step.events {
            self.on_event(state, client, group, event);
        }
        let is_settled = self.leases[group].of(step.lease, Lease::is_settled);
        let holds_none = |lease: &Lease| lease.may_hold().is_empty();
        if self.spec.has(May::Live) && is_settled && self.leases[group].of(step.lease, holds_none) {
            let mut stores = state.nodes.iter().map(|column| column.store);
            state.settled_too_early |= stores.any(|store| self.has(store, client, state.now));
        }
        let me = &mut state.clients[client];
        let goes_on = self.spec.has(May::Settle) && !is_settled;
        if me.stage == Stage::Refused || me.stage == Stage::Gone && !goes_on {
            me.locks[group].of.lease = 0;
        }
        if let Some(request) = &step.request
            && (self.spec.has(May::Release) || me.stage != Stage::Refused)
        {
            self.send(state, client, group, step.op, request);
        }
    }

    fn on_event(&self, state: &mut State<N, C, K>, client: usize, group: usize, event: &Event) {
        if self.spec.has(May::Execute) {
            return self.on_execution(state, client, event);
        }
        let me = &mut state.clients[client];
        let lock = &mut me.locks[group];
        match event {
            Event::Granted {
                number,
                valid_until,
                ..
            } => {
                lock.token = u8::try_from(*number).expect("numbers of a model are small");
                lock.until = tick_after(*valid_until);
                self.hold_if_complete(state, client);
            }
            Event::Extended { valid_until, .. } => {
                let is_over = matches!(me.stage, Stage::Lost | Stage::Gone);
                state.extended_too_late |= is_over || lock.until <= state.now;
                lock.until = tick_after(*valid_until);
                if lock.raised > 0 {
                    lock.token = std::mem::take(&mut lock.raised);
                }
                match me.stage {
                    Stage::Extending => me.stage = Stage::Extended,
                    Stage::Acquiring => self.hold_if_complete(state, client),
                    _ => {}
                }
            }
            Event::NotExtended { .. } if lock.raised == 0 => {}
            Event::Lost(_) if !self.spec.moves() => {
                me.stage = Stage::Lost;
                lock.until = 0;
            }
            Event::Refused(_) | Event::TooLate { .. } if !self.spec.moves() => {
                me.stage = match self.spec.has(May::Release) {
                    true => Stage::Gone,
                    false => Stage::Refused,
                };
                lock.until = 0;
            }
            Event::Refused(_) if me.locks.iter().any(|lock| lock.token > 0) => {
                self.give_up(state, client, Stage::Refused);
            }
            Event::NotExtended { .. }
            | Event::Lost(_)
            | Event::Refused(_)
            | Event::TooLate { .. } => self.give_up(state, client, Stage::Gone),
            Event::Released(_) | Event::Settled => {}
            event => unreachable!("{event:?}"),
        }
    }

    /// Sends a request to those nodes that are asked for their vote; the lease hears which those are not.
    fn send(
        &self,
        state: &mut State<N, C, K>,
        client: usize,
        group: usize,
        op: u8,
        request: &LeaseRequest,
    ) {
        if self.spec.has(May::Execute) {
            return self.on_request(state, client, request);
        }
        let is_release = self.is_release(op);
        let is_over = matches!(state.clients[client].stage, Stage::Lost | Stage::Gone);
        state.asked_too_late |= !is_release && is_over;
        let number = request.number;
        let call = number as usize - 1;
        let mut never = Vec::new();
        for node in request.nodes.iter() {
            let link = &mut state.nodes[self.members(group).start + node].links[client];
            link.sent[call] = link.known;
            if is_release && self.spec.moves() {
                link.calls[call].stand();
            } else if is_release && !self.spec.has(May::Settle) {
                link.calls[call].deafen();
            } else if !is_release && (link.known == 0 || state.now < link.from) {
                link.calls[call] = Call::None;
                never.push(node);
            }
        }
        for node in never {
            if state.clients[client].locks[group].of.lease != 0 {
                self.handle(state, client, group, Input::NeverSent { node, number });
            }
        }
    }

    /// Releases the lock in all groups, or gives it up before it is there.
    fn give_up(&self, state: &mut State<N, C, K>, client: usize, stage: Stage) {
        let keeps = self.spec.variant == Variant::KeepsFirstGroup && stage == Stage::Refused;
        let Client {
            locks, is_revoked, ..
        } = state.clients[client];
        state.clients[client] = Client {
            stage,
            is_revoked,
            locks: locks.map(|Lock { of, .. }| Lock {
                of,
                ..Lock::default()
            }),
            ..Client::default()
        };
        for (group, lock) in locks.iter().enumerate() {
            if lock.of.lease == 0 {
                continue;
            }
            let is_acquiring = self.leases[group].of(lock.of.lease, Lease::is_acquiring);
            let (publishes, effect) = (false, Effect::Unknown);
            let input = match is_acquiring {
                true => Input::Abandoned,
                false => Input::Dropped { publishes, effect },
            };
            if keeps && lock.token > 0 {
                state.clients[client].locks[group].of.lease = 0;
            } else {
                self.handle(state, client, group, input);
            }
        }
        for column in state.nodes.iter_mut().filter(|_| self.spec.moves()) {
            let calls = column.links[client].calls.iter_mut();
            // Only the answers to a release still count.
            calls.for_each(|call| match keeps {
                true => call.deafen(),
                false => call.stand(),
            });
        }
    }

    fn write(storage: &mut Storage, clients: &[Client<K>], client: usize, key: u8) -> bool {
        let key = usize::from(key);
        let token = |client: &Client<K>| client.locks[0].token;
        let mine = token(&clients[client]);
        if mine < storage.highest[key] {
            return false;
        }
        let before = *storage;
        for (other, rival) in clients.iter().enumerate() {
            let wrote = other != client && storage.wrote[key] >> other & 1 == 1;
            // Either it began after this one had completed, or their order is undefined.
            let newer = rival.after >> client & 1 == 1 || token(rival) == mine;
            storage.reordered |= wrote && newer;
        }
        storage.highest[key] = mine;
        storage.wrote[key] |= 1 << client;
        *storage != before
    }

    /// The same state without what makes no difference any more, and with the nodes of each group in order.
    fn canonical(&self, mut state: State<N, C, K>) -> State<N, C, K> {
        self.note_decision(&mut state);
        for client in self.clients() {
            if self.spec.is_lossy() {
                self.forget_what_is_late(&mut state, client);
            }
            self.forget_calls(&mut state, client);
            self.forget_lease(&mut state, client);
            self.forget_execution(&mut state, client);
        }
        self.forget_ages(&mut state);
        self.forget_wait(&mut state);
        for group in 0..GROUPS {
            let columns = &mut state.nodes[self.members(group)];
            if let Some(order) = sorting(columns) {
                columns.sort();
                for client in &mut state.clients {
                    let lease = &mut client.locks[group].of.lease;
                    *lease = self.leases[group].moved(*lease, &order);
                }
            }
        }
        state
    }

    /// Whether the lock of a client is not valid any more, or will not be.
    fn is_late(&self, state: &State<N, C, K>, client: usize) -> bool {
        let me = &state.clients[client];
        let is_late = |group: &usize| {
            let lock = &me.locks[*group];
            let counts = lock.token == 0 || self.counted(client).contains(group);
            lock.of.lease > 0 && counts && state.now >= lock.until
        };
        let is_live = match me.stage {
            Stage::Acquiring => self.spec.variant != Variant::EndFromReply,
            stage => stage == Stage::Holding,
        };
        is_live && self.spec.clients[client].groups.iter().any(is_late)
    }

    /// A client whose lock is not valid any more, and will not be, can only release it.
    fn forget_what_is_late(&self, state: &mut State<N, C, K>, client: usize) {
        if !self.is_late(state, client) {
            return;
        }
        if self.spec.moves() {
            // Now or later.
            self.give_up(state, client, Stage::Gone);
            return;
        }
        if state.clients[client].stage == Stage::Holding {
            self.handle(state, client, 0, Input::TimedOut);
        }
        let me = &mut state.clients[client];
        me.stage = Stage::Lost;
        me.extensions = 0;
        let of = me.locks[0].of;
        me.locks[0] = Lock {
            of,
            ..Lock::default()
        };
        for column in &mut state.nodes {
            let calls = &mut column.links[client].calls;
            calls.iter_mut().for_each(Call::deafen);
        }
    }

    /// Drops requests that will never change anything, and what no node is asked for any more.
    fn forget_calls(&self, state: &mut State<N, C, K>, client: usize) {
        let forgets = self.spec.is_lossy() || !self.spec.is_timed();
        let mut pending = [[false; K]; GROUPS];
        for node in 0..N {
            let calls = state.nodes[node].links[client].calls;
            let pending = &mut pending[self.group_of(node)];
            for (call, (made, pending)) in calls.iter().zip(pending).enumerate() {
                if forgets && made.is_deaf() && !self.matters(state, client, node, call) {
                    state.nodes[node].links[client].calls[call] = Call::None;
                } else {
                    *pending |= made.may_run();
                }
            }
        }
        for (lock, pending) in state.clients[client].locks.iter_mut().zip(pending) {
            for (call, (asked, pending)) in lock.of.asked.iter_mut().zip(pending).enumerate() {
                let is_repeated = call == 0 && state.duplicates > 0;
                *asked *= u8::from(pending || is_repeated);
            }
        }
    }

    /// Whether a request may change something, now or later, although no client waits for it. Without another grant, a
    /// key that is gone stays gone, and a fence never falls.
    fn matters(&self, state: &State<N, C, K>, client: usize, node: usize, call: usize) -> bool {
        let column = &state.nodes[node];
        let is_standing = column.links[client].calls[call] == Call::Standing;
        // What is recorded stays, and then nothing else is done.
        if self.nodes.kept(column.store).record.is_some() && (is_standing || state.faults == 0) {
            return false;
        }
        let granted_again = is_standing && state.faults > 0
            || column.links[client].calls[0].may_run()
            || state.duplicates > 0
            || self.spec.variant == Variant::ReusesOwner;
        let is_later = || {
            let op = state.clients[client].locks[self.group_of(node)].of.asked[call];
            self.spec.is_timed()
                && !self.is_release(op)
                && self.has(column.store, client, state.now)
        };
        granted_again || self.run(state, client, node, call).0 != column.store || is_later()
    }

    /// Forgets leases that will not be told anything, and when a lock began, but for what a property asks.
    fn forget_lease(&self, state: &mut State<N, C, K>, client: usize) {
        let me = &mut state.clients[client];
        if self.spec.moves() {
            let granted = me.locks.iter_mut().filter(|lock| lock.token > 0);
            granted.for_each(|lock| lock.began *= u8::from(state.extensions > 0));
            return;
        }
        let lock = &mut me.locks[0];
        let keeps = !self.spec.extends.is_empty()
            || self.spec.has(May::Live)
            || self.spec.variant == Variant::IgnoresValidity;
        let is_done = me.stage > Stage::Acquiring && me.stage != Stage::Gone;
        if is_done && !keeps && !self.spec.moves() {
            lock.began = 0;
        }
        let may_extend = state.extensions > 0
            || client == 0 && usize::from(me.extensions) < self.spec.extends.len();
        let lease = lock.of.lease;
        let extends = || lease != 0 && self.leases[0].of(lease, Lease::is_extending);
        let is_over = match me.stage {
            Stage::Holding => !may_extend && !extends(),
            Stage::Lost => !extends(),
            stage => stage == Stage::Extended,
        };
        if is_over && !self.spec.has(May::Release) {
            lock.of.lease = 0;
        }
    }

    /// Whether a client may begin now.
    fn may_begin(&self, state: &State<N, C, K>, client: usize) -> bool {
        let spec = &self.spec;
        // The first may extend.
        let is_unlike = spec.has(May::Release) && (!spec.extends.is_empty() || spec.has(May::Live));
        let before = client.checked_sub(1);
        let before = before.filter(|before| {
            let is_alike = spec.clients[*before] == spec.clients[client];
            !spec.has(May::Release) || is_alike && *before >= usize::from(is_unlike)
        });
        let waits = before.is_some_and(|before| state.clients[before].stage < Stage::Acquiring);
        !waits && self.is_admitted(state, client) && !self.only_repairs(client)
    }

    fn may_extend(&self, state: &State<N, C, K>, client: usize, group: usize) -> bool {
        let (me, spec) = (&state.clients[client], &self.spec);
        let lock = &me.locks[group];
        let extends = || self.leases[group].of(lock.of.lease, Lease::is_extending);
        if client == 0 && usize::from(me.extensions) < spec.extends.len() {
            return self.is_valid(state, client) && !extends();
        }
        let is_young = lock.token > 0 && state.now < lock.began + spec.max_hold;
        let may_extend = match spec.moves() {
            true => is_young && !extends(),
            false => me.stage == Stage::Holding,
        };
        state.extensions > 0 && may_extend
    }

    /// The group that a client may ask next, and what it may propose there.
    fn beginnings(&self, state: &State<N, C, K>, client: usize) -> Vec<(usize, u8)> {
        let me = &state.clients[client];
        let comes_again = self.spec.variant == Variant::ReusesOwner;
        let is_first = match me.stage {
            Stage::Idle => self.may_begin(state, client),
            Stage::Gone => comes_again,
            stage => stage == Stage::Acquiring && self.spec.moves(),
        };
        let next = self.next_group(state, client).filter(|_| is_first);
        let Some(group) = next else {
            return Vec::new();
        };
        let earlier = me.locks.iter().map(|lock| lock.token).max();
        let earlier = earlier.filter(|_| !self.spec.variant.proposes_its_clock());
        let now = state.now - START + 1;
        let proposals = match (earlier, self.spec.proposals) {
            (Some(token @ 1..), _) => token..=token,
            (_, Proposals::None) => 0..=0,
            (_, Proposals::UpTo(most)) => 1..=most,
            (_, Proposals::Clock(skew)) => now..=now + skew,
        };
        proposals.map(|proposal| (group, proposal)).collect()
    }

    fn of_client(&self, state: &State<N, C, K>, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        let mut act = |deed| actions.push(Action::Of(client, deed));
        match me.stage {
            Stage::Away if self.spec.variant == Variant::StampOutside => act(Deed::Look),
            Stage::Away | Stage::Looked => act(Deed::Connect),
            _ => {
                let begins = self.beginnings(state, client).into_iter();
                begins.for_each(|(group, proposal)| act(Deed::Begin(group, proposal)));
            }
        }
        let is_live = matches!(me.stage, Stage::Acquiring | Stage::Holding | Stage::Lost);
        if is_live && self.spec.has(May::Release) {
            if let Some((group, token)) = self.to_raise(state, client)
                && me.stage == Stage::Acquiring
                && me.locks[group].raised == 0
            {
                act(Deed::Raise(group, token));
            }
            act(Deed::Release);
        }
        if self.spec.has(May::Execute) && me.locks[0].of.lease != 0 {
            self.of_execution(state, client, &mut act);
        }
        for group in 0..GROUPS {
            if me.locks[group].of.lease != 0 && !self.spec.has(May::Execute) {
                let found = self.decisions(state, client, group).into_iter();
                found.for_each(|step| act(Deed::Decide(group, step)));
                if self.may_extend(state, client, group) {
                    act(Deed::Extend(group));
                }
            }
        }
        if self.spec.has(May::Live) && client == 0 && me.stage == Stage::Holding {
            act(Deed::Revoke);
        }
        if me.stage >= Stage::Idle {
            self.of_nodes(state, client, actions);
        }
        if self.spec.has(May::Store) && me.stage >= Stage::Holding {
            for &key in self.spec.clients[client].keys {
                let mut storage = state.storage;
                if Self::write(&mut storage, &state.clients, client, key) {
                    actions.push(Action::Of(client, Deed::Write(key)));
                }
            }
        }
    }

    /// What nodes may do for a client.
    fn of_nodes(&self, state: &State<N, C, K>, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        let mut act = |deed| actions.push(Action::Of(client, deed));
        for (node, column) in state.nodes.iter().enumerate() {
            // Of nodes that are alike, one will do.
            let is_first = self.members(self.group_of(node)).start == node;
            if !is_first && state.nodes[node - 1] == *column || self.is_out(state, node) {
                continue;
            }
            let calls = &column.links[client].calls;
            let hears = |heard| {
                self.reads(state, client, node, heard)
                    || self.is_refused(state, client, node, heard)
            };
            for (call, made) in calls.iter().enumerate() {
                let ran = || self.run(state, client, node, call);
                // What changes nothing and is not listened to, or as good as that, need not be carried out.
                let is_heard = || *made == Call::Sent && hears(ran().1);
                if made.may_run() && (is_heard() || ran().0 != column.store) {
                    act(Deed::Run(node, call));
                }
                let is_begun = me.locks[self.group_of(node)].of.asked[call] > 0;
                if call == 0 && is_begun && !made.may_run() && state.duplicates > 0 {
                    let (store, heard) = ran();
                    let replaces = match *made {
                        Call::Ran(old) => old != heard,
                        Call::None => self.awaits(state, client, node) && hears(heard),
                        _ => false,
                    };
                    for (replaces, _) in [(false, store != column.store), (true, replaces)]
                        .into_iter()
                        .filter(|(_, matters)| *matters)
                    {
                        act(Deed::Duplicate(node, replaces));
                    }
                }
            }
            if !self.spec.is_timed() && !self.spec.has(May::KeepLocks) {
                for key in (0_u8..).take(self.spec.clients[client].keys.len()) {
                    if self.nodes.vanish(column.store, client, key) != column.store {
                        act(Deed::Vanish(node, key));
                    }
                }
            }
            if self.may_reconnect(state, client, node) {
                act(Deed::Reconnect(node));
            }
        }
    }

    /// Whether a client that read no answer of a node may still read one to its `ACQUIRE`.
    fn awaits(&self, state: &State<N, C, K>, client: usize, node: usize) -> bool {
        let group = self.group_of(node);
        let lease = state.clients[client].locks[group].of.lease;
        self.spec.is_lossy() && lease != 0 && self.leases[group].of(lease, |lease| lease.counts(1))
    }

    fn carry_out(&self, state: &mut State<N, C, K>, client: usize, node: usize, call: usize) {
        let (store, heard) = self.run(state, client, node, call);
        let reads = self.reads(state, client, node, heard);
        let is_refused = self.is_refused(state, client, node, heard);
        let column = &mut state.nodes[node];
        column.store = store;
        let calls = &mut column.links[client].calls;
        let is_sent = calls[call] == Call::Sent;
        calls[call].run(heard);
        if self.spec.has(May::Live) {
            let lost = calls[..call].iter_mut().filter(|call| call.may_run());
            lost.for_each(|call| call.run(Heard::FAILED));
        }
        if is_sent && is_refused {
            let group = self.group_of(node);
            let told = Told {
                node: u8::try_from(node - self.members(group).start).expect("few nodes"),
                number: u8::try_from(call + 1).expect("few requests"),
                heard,
            };
            let leases = &self.leases[group];
            let lease = state.clients[client].locks[group].of.lease;
            let step = leases.after(&leases.tell(lease, told, state.now), vec![told]);
            self.follow(state, client, group, &step);
        } else if is_sent && !reads {
            calls[call] = Call::None;
        }
    }

    fn perform(&self, state: &mut State<N, C, K>, client: usize, deed: Deed) {
        let me = &mut state.clients[client];
        match deed {
            Deed::Look => {
                me.stage = Stage::Looked;
                me.locks[0].began = state.now;
            }
            Deed::Connect => self.connect(state, client),
            Deed::Reconnect(node) => self.admit(&mut state.nodes[node], client, state.now, None),
            Deed::Begin(group, proposal) => self.begin(state, client, group, proposal),
            Deed::Run(node, call) => self.carry_out(state, client, node, call),
            Deed::Duplicate(node, replaces_answer) => {
                state.duplicates -= 1;
                if replaces_answer {
                    state.nodes[node].links[client].calls[0] = Call::Sent;
                    self.carry_out(state, client, node, 0);
                } else {
                    state.nodes[node].store = self.run(state, client, node, 0).0;
                }
            }
            Deed::Vanish(node, key) => {
                let store = &mut state.nodes[node].store;
                *store = self.nodes.vanish(*store, client, key);
                me.execution.broken |= self.spec.has(May::Execute) && !me.execution.is_decided();
            }
            Deed::Decide(group, step) => self.decide(state, client, group, &step),
            Deed::Extend(group) => {
                let ttl = self.spec.extends.get(usize::from(me.extensions));
                if ttl.is_some() {
                    me.extensions += 1;
                } else {
                    state.extensions -= 1;
                }
                if !self.spec.is_timed() {
                    let after = self.completed(state, client);
                    let me = &mut state.clients[client];
                    (me.stage, me.extended_after) = (Stage::Extending, after);
                }
                let (ttl, token) = (ttl.map(|ttl| ticks(*ttl)), None);
                self.handle(state, client, group, Input::Extend { ttl, token });
            }
            Deed::Raise(group, token) => self.raise(state, client, group, token),
            Deed::Revoke => {
                me.is_revoked = true;
                self.handle(state, client, 0, Input::Revoked);
            }
            Deed::Release => self.give_up(state, client, Stage::Gone),
            Deed::Write(key) => {
                Self::write(&mut state.storage, &state.clients, client, key);
            }
            Deed::Start(is_late) => {
                me.execution.is_late |= is_late;
                self.handle(state, client, 0, BEGIN);
            }
            Deed::Record => self.record(state, client),
            Deed::Leave(effect) => self.leave(state, client, effect),
            Deed::Read(is_found) => self.read(state, client, is_found),
        }
    }
}

impl<const N: usize, const C: usize, const K: usize> Model for World<N, C, K> {
    type State = State<N, C, K>;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        // Where clients ask for no generation, there is nothing to learn by connecting.
        let (stage, known) = match self.spec.compares() {
            true => (Stage::Away, 0),
            false => (Stage::Idle, OLD.id),
        };
        let link = Link {
            known,
            from: 0,
            calls: [Call::None; K],
            sent: [0; K],
        };
        let nodes = std::array::from_fn(|node| Column {
            store: self.left_by_the_last_holder(self.group_of(node)),
            generation: OLD,
            made: OLD.id,
            started: 0,
            ahead: 0,
            links: [link; C],
        });
        let client = Client {
            stage,
            ..Client::default()
        };
        vec![State {
            now: if self.spec.is_timed() { START } else { 0 },
            nodes,
            clients: [client; C],
            storage: Storage::default(),
            duplicates: self.spec.duplicates,
            extensions: self.spec.extensions,
            faults: self.spec.faults,
            jumps: self.spec.jumps,
            extended_too_late: false,
            asked_too_late: false,
            settled_too_early: false,
            moved: Moved::default(),
            executed: Executed::default(),
        }]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Action>) {
        if self.spec.is_timed() && state.now < START + self.spec.horizon {
            actions.push(Action::Tick);
        }
        if self.spec.wait.is_some() && state.moved.ended == 0 {
            actions.push(Action::EndOld);
        }
        for client in self.clients() {
            self.of_client(state, client, actions);
        }
        self.of_memories(state, actions);
    }

    fn next_state(&self, last: &Self::State, action: Action) -> Option<Self::State> {
        let mut state = *last;
        match action {
            Action::Tick => state.now += 1,
            Action::EndOld => state.moved.ended = state.now,
            Action::Jump(node) => {
                state.jumps -= 1;
                state.nodes[node].ahead += 1;
            }
            Action::Lose(node, fault, source) => self.lose(&mut state, node, fault, source),
            Action::Of(client, deed) => self.perform(&mut state, client, deed),
        }
        Some(self.canonical(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let promised = self.spec.promises.iter().map(|name| Self::promised(name));
        let reached = self.spec.reaches.iter().map(|name| Self::reached(name));
        promised.chain(reached).collect()
    }
}
