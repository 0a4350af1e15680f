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
//! [`May::Settle`], answers to releases are heard until the lease is settled. The requests of a client to a node run
//! in their order there, as on a lane, but for those that are lost before one that runs.

use std::ops::Range;
use std::sync::Arc;

use stateright::{Model, Property};
use tower_redlock::protocol::lease::{Effect, Event, Input, Lease, LeaseSpec};
use tower_redlock::protocol::message::{Answer, Op, Reply};

use crate::leases::{Call, Heard, Leases, Step, Told, small, tick_after};
use crate::requests;
use crate::space::{Nodes, RETENTION, Seen, acquire, ticks};
use crate::spec::{Fault, GROUPS, May, Proposals, Spec, Variant};
use crate::world::guard::{Generation, OLD};
use crate::world::moving::Moved;
use crate::world::once::{Execution, NODE_TIMEOUT};

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
struct Lock {
    /// 0 before it begins, and when nothing matters any more that it might do.
    lease: u32,
    began: u8,
    token: u8,
    /// The tick at which it is no more to be relied on, or would not be if it were granted.
    until: u8,
    /// The token that it is being raised to.
    raised: u8,
}

impl Lock {
    fn of(lease: u32) -> Self {
        Self {
            lease,
            ..Self::default()
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Client<const K: usize> {
    stage: Stage,
    locks: [Lock; GROUPS],
    /// What it asked for in each group, by the numbers of its requests.
    asked: [[u8; K]; GROUPS],
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
    broken: Broken,
    moved: Moved,
    /// A record was decided.
    is_decided: bool,
}

impl<const N: usize, const C: usize, const K: usize> State<N, C, K> {
    fn lease(&self, client: usize, group: usize) -> u32 {
        self.clients[client].locks[group].lease
    }

    /// The time of a client's lease.
    fn clock(&self, client: usize) -> u8 {
        let is_late = self.clients[client].execution.is_late;
        if is_late { 2 * NODE_TIMEOUT } else { self.now }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Reading {
    Never,
    Later,
    AtOnce,
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
    orphaned: Seen<(u32, u8), bool>,
}

impl<const N: usize, const C: usize, const K: usize> World<N, C, K> {
    pub(crate) fn new(spec: Spec) -> Self {
        let orders = spec.is_fenced() && !spec.moves() && !spec.has(May::Execute);
        let roles = || spec.clients.iter().enumerate();
        let rivals = roles().map(|(me, mine)| {
            let meets = |keys: &[u8]| keys.iter().any(|key| mine.keys.contains(key));
            bits(roles().map(|(other, theirs)| orders && other != me && meets(theirs.keys)))
        });
        let nodes = Nodes::new(&spec);
        let present = spec.present.unwrap_or(N);
        let leases = [present, (N - present).max(1)];
        Self {
            leases: leases.map(|nodes_of| Leases::new(&nodes.words, nodes_of)),
            rivals: rivals.collect(),
            orphaned: Seen::new(),
            nodes,
            spec,
        }
    }

    /// The nodes of a group.
    fn members(&self, group: usize) -> Range<usize> {
        let present = self.spec.present.unwrap_or(N);
        if group == 0 { 0..present } else { present..N }
    }

    fn group_of(&self, node: usize) -> usize {
        usize::from(!self.members(0).contains(&node))
    }

    fn clients(&self) -> Range<usize> {
        0..self.spec.clients.len()
    }

    fn completed(&self, state: &State<N, C, K>, client: usize) -> u8 {
        let complete = |other: &Client<K>| other.stage >= Stage::Holding;
        self.rivals[client] & bits(state.clients.iter().map(complete))
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
        let op = me.asked[self.group_of(node)][call];
        let compares = self.spec.window > 0 && self.spec.variant != Variant::NoCompare;
        let is_foreign = column.links[client].sent[call] != column.generation.id;
        if compares && is_foreign && !(self.spec.has(May::Release) && self.is_release(op)) {
            return (column.store, Heard::FAILED);
        }
        let (store, heard) = self.nodes.execute(column.store, client, op, state.now);
        let counts_every_ok = self.spec.variant == Variant::CountsEveryOk
            || self.spec.variant == Variant::ExtendsByKey && me.stage == Stage::Extending;
        let words = &self.nodes.words;
        if counts_every_ok
            && let Answer::Replied(Reply::At(_)) = words.answer(heard)
            && let Op::Confirm { token, .. } = words.op(op)
            && let Some(token) = token
        {
            return (store, words.hear(Reply::At(token)));
        }
        (store, heard)
    }

    /// When a client reads an answer: what does not help it to the lock is as good as lost. A refusal may help to a second
    /// phase, but that of a node that is alone in its group, which is read at once or never.
    fn reading(&self, state: &State<N, C, K>, client: usize, node: usize, heard: Heard) -> Reading {
        let group = self.group_of(node);
        let is_alone = self.members(group).len() == 1;
        let acquires = || self.leases[group].is(state.lease(client, group), Lease::is_acquiring);
        if !self.spec.is_lossy() {
            return Reading::Later;
        }
        match self.nodes.words.answer(heard) {
            Answer::Replied(Reply::Granted(_) | Reply::At(_)) => Reading::Later,
            Answer::Replied(Reply::Held { .. }) if self.spec.moves() && is_alone && acquires() => {
                Reading::AtOnce
            }
            _ if self.spec.is_fenced() && !is_alone && acquires() => Reading::Later,
            _ => Reading::Never,
        }
    }

    /// Whether a client has the lock at a node.
    fn has(&self, store: u32, client: usize, now: u8) -> bool {
        let token = self.spec.is_fenced().then_some(1);
        let access = self.spec.clients[client].access;
        let op = access.confirm(token, ticks(1), RETENTION);
        let op = self.nodes.words.number(&op);
        let (_, heard) = self.nodes.execute(store, client, op, now);
        let answer = self.nodes.words.answer(heard);
        matches!(answer, Answer::Replied(Reply::At(_)))
    }

    fn begin(&self, state: &mut State<N, C, K>, client: usize, group: usize, proposal: u8) {
        let role = &self.spec.clients[client];
        let (after, execution) = (self.completed(state, client), state.new_execution());
        let me = &mut state.clients[client];
        me.execution = execution;
        if me.stage != Stage::Holding {
            me.stage = Stage::Acquiring;
        }
        me.after = after;
        me.locks[group].began = state.now;
        me.locks[group].until = state.now + role.ttl;

        // A lease only passes its proposal on, so all may be told the same one, and the request has the other.
        let executes = self.spec.has(May::Execute);
        let is_told = !self.spec.moves() && !executes;
        let told = if is_told { proposal } else { 1 };
        let spec = LeaseSpec {
            access: role.access,
            ttl: ticks(role.ttl),
            proposal: self.spec.is_fenced().then_some(told.into()),
            retention: RETENTION,
            node_timeout: if executes {
                ticks(NODE_TIMEOUT)
            } else {
                RETENTION
            },
            renews: self.spec.has(May::Live) && client == 0,
            is_partial: role.groups.len() > 1,
            max_hold: None,
            hold_at_least: None,
            once: executes.then(|| requests::once(!self.only_repairs(client))),
        };
        let step = self.leases[group].begin(spec, state.now);
        self.take(state, client, group, &step);
        if told != proposal {
            let acquire = acquire(Some(proposal.into()), ticks(role.ttl));
            let acquire = self.nodes.words.number(&acquire);
            state.clients[client].asked[group][0] = acquire;
        }
    }

    fn handle(&self, state: &mut State<N, C, K>, client: usize, group: usize, input: Input) {
        let lease = state.lease(client, group);
        let step = self.leases[group].handle(lease, input, state.clock(client));
        self.take(state, client, group, &step);
    }

    /// Tells a client that a request was not sent to a node.
    fn never_sent(
        &self,
        state: &mut State<N, C, K>,
        client: usize,
        group: usize,
        (node, number): (usize, u32),
    ) {
        let answer = Answer::NeverSent;
        let input = Input::Answered {
            node,
            number,
            answer,
        };
        self.handle(state, client, group, input);
    }

    /// The answers of a group that a client may read.
    fn answers(&self, state: &State<N, C, K>, client: usize, group: usize) -> Vec<Told> {
        let leases = &self.leases[group];
        let lease = state.lease(client, group);
        let extends = leases.of(lease, Lease::is_extending);
        let last = leases.of(lease, Lease::number);
        // Of the current request only: what does not count is not listened to.
        let executes = self.spec.has(May::Execute);
        let gives_up = match extends && !executes {
            true => self.spec.is_timed() && !self.spec.moves(),
            false => self.spec.has(May::GiveUp),
        };
        let counts_old = extends && self.spec.variant == Variant::CountsOldExtension;
        let mut answers = Vec::new();
        for (node, column) in state.nodes[self.members(group)].iter().enumerate() {
            for (number, call) in (1..).zip(&column.links[client].calls) {
                if executes && !leases.of(lease, |lease| lease.counts(number)) {
                    continue;
                }
                let is_old = counts_old && number > 1;
                let number = if is_old { last } else { number };
                let told = |heard| Told::new(node, number, heard);
                if let Call::Ran(heard) = *call {
                    answers.extend(self.as_variant(state, client, told(heard)));
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
            Variant::EndFromReply => leases.hastened(lock.lease, now),
            _ => lock.lease,
        };
        let answers = self.answers(state, client, group);
        let mut steps = leases.decisions(lease, answers, now, false).to_vec();
        let (lives, releases) = (self.spec.has(May::Live), self.spec.has(May::Release));
        let has_timer = lives || !releases && me.stage >= Stage::Holding;
        let due = leases.of(lease, Lease::poll_timeout);
        if has_timer && due.is_some_and(|due| due <= ticks(now)) {
            steps.push(leases.handle(lease, Input::TimedOut, now));
        }
        if self.spec.variant == Variant::NoWriteBack {
            let confirmed = |step| self.confirmed_by_itself(step);
            steps = steps.into_iter().map(confirmed).collect();
        }
        // Who does not release stops at any moment, refused or not.
        let is_stop = |event: &Event| match event {
            Event::Refused(_) | Event::TooLate { .. } => true,
            Event::NotExtended { .. } | Event::Lost(_) => !self.spec.is_timed(),
            _ => false,
        };
        steps.retain(|step| releases || !step.events.iter().any(is_stop));
        steps
    }

    /// A wrong variant takes the highest number of a majority as confirmed, and asks no node.
    fn confirmed_by_itself(&self, step: Arc<Step>) -> Arc<Step> {
        if let Some(request) = &step.request
            && let Op::Confirm { token, .. } = request.op
            && let Some(token) = token
        {
            let heard = self.nodes.words.hear(Reply::At(token));
            let told = |node| Told::new(node, request.number, heard);
            let tell = |step: Arc<Step>, node| match step.events.is_empty() {
                true => self.leases[0].tell(step.lease, told(node), 0),
                false => step,
            };
            return request.nodes.iter().fold(Arc::clone(&step), tell);
        }
        step
    }

    /// Goes on as the lease of a client in a group says, until it waits for something.
    fn take(&self, state: &mut State<N, C, K>, client: usize, group: usize, step: &Step) {
        self.follow(state, client, group, step);
        self.settle(state, client);
    }

    /// Goes on as a step says: with the lease, with what it has read, and with what it asks for.
    ///
    /// What does not count any more is not read. What was read stays until the lease has decided, because it tells
    /// nodes apart.
    fn follow(&self, state: &mut State<N, C, K>, client: usize, group: usize, step: &Step) {
        let (leases, me) = (&self.leases[group], &mut state.clients[client]);
        let nodes = &mut state.nodes[self.members(group)];
        me.locks[group].lease = step.lease;
        // A wrong variant still hears what does not count any more.
        let forgets =
            self.spec.variant != Variant::CountsOldExtension || me.stage != Stage::Holding;
        if forgets {
            for told in &step.read {
                let calls = &mut nodes[usize::from(told.node)].links[client].calls;
                calls[told.call()].read(told.heard);
            }
            leases.of(step.lease, |lease| {
                for node in nodes.iter_mut() {
                    for (number, call) in (1..).zip(&mut node.links[client].calls) {
                        let is_read = step.events.is_empty() && matches!(call, Call::Read(_));
                        if !is_read && !lease.counts(number) {
                            call.deafen();
                        }
                    }
                }
            });
        }
        if let Some(request) = &step.request {
            let call = request.number as usize - 1;
            me.asked[group][call] = step.op;
            for node in request.nodes.iter() {
                nodes[node].links[client].calls[call] = Call::Sent;
            }
        }
        for event in &step.events {
            self.on_event(state, client, group, event);
        }
        let is_settled = leases.of(step.lease, Lease::is_settled);
        let holds_none = |lease: &Lease| lease.may_hold().is_empty();
        if self.spec.has(May::Live) && is_settled && leases.of(step.lease, holds_none) {
            let has = |store| self.has(store, client, state.now);
            let is_left = state.stores().any(has);
            state.broken.note(SETTLED, is_left);
        }
        let me = &mut state.clients[client];
        let goes_on = self.spec.has(May::Settle) && !is_settled;
        if me.stage == Stage::Refused || me.stage == Stage::Gone && !goes_on {
            me.locks[group].lease = 0;
        }
        if self.spec.has(May::Release) || me.stage != Stage::Refused {
            self.send(state, client, group, step);
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
                lock.token = small(*number);
                lock.until = tick_after(*valid_until);
                self.hold_if_complete(state, client);
            }
            Event::Extended { valid_until, .. } => {
                let is_gone = matches!(me.stage, Stage::Lost | Stage::Gone);
                state.broken.note(LOSS, is_gone || lock.until <= state.now);
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
            Event::Lost(_) if !self.spec.moves() => (me.stage, lock.until) = (Stage::Lost, 0),
            Event::Refused(_) | Event::TooLate { .. } if !self.spec.moves() => {
                let goes = self.spec.has(May::Release);
                me.stage = if goes { Stage::Gone } else { Stage::Refused };
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
    fn send(&self, state: &mut State<N, C, K>, client: usize, group: usize, step: &Step) {
        let Some(request) = &step.request else {
            return;
        };
        if self.spec.has(May::Execute) {
            return self.on_request(state, client, request);
        }
        let is_release = self.is_release(step.op);
        let is_over = matches!(state.clients[client].stage, Stage::Lost | Stage::Gone);
        state.broken.note(ASKED, !is_release && is_over);
        let (number, now) = (request.number, state.now);
        let call = number as usize - 1;
        let nodes = &mut state.nodes[self.members(group)];
        let mut never = request.nodes;
        for node in request.nodes.iter() {
            let link = &mut nodes[node].links[client];
            let is_asked = is_release || link.known != 0 && now >= link.from;
            link.sent[call] = link.known;
            if !is_asked {
                link.calls[call] = Call::None;
                continue;
            }
            never.remove(node);
            if is_release && self.spec.moves() {
                link.calls[call].stand();
            } else if is_release && !self.spec.has(May::Settle) {
                link.calls[call].deafen();
            }
        }
        for node in never.iter() {
            if state.clients[client].locks[group].lease != 0 {
                self.never_sent(state, client, group, (node, number));
            }
        }
    }

    /// Releases the lock in all groups, or gives it up before it is there.
    fn give_up(&self, state: &mut State<N, C, K>, client: usize, stage: Stage) {
        let keeps = self.spec.variant == Variant::KeepsFirstGroup && stage == Stage::Refused;
        let me = &mut state.clients[client];
        let locks = me.locks;
        (me.stage, me.after, me.extended_after, me.extensions) = (stage, 0, 0, 0);
        me.locks = locks.map(|Lock { lease, .. }| Lock::of(lease));
        for (group, lock) in locks.iter().enumerate().filter(|(_, lock)| lock.lease != 0) {
            if keeps && lock.token > 0 {
                state.clients[client].locks[group].lease = 0;
            } else {
                self.drop_lease(state, client, group, Effect::Unknown);
            }
        }
        if self.spec.moves() {
            // Only the answers to a release still count.
            let forget = if keeps { Call::deafen } else { Call::stand };
            state.calls(client).for_each(forget);
        }
    }

    /// The caller goes.
    fn drop_lease(&self, state: &mut State<N, C, K>, client: usize, group: usize, effect: Effect) {
        let publishes = false;
        self.handle(state, client, group, Input::Dropped { publishes, effect });
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
        state.is_decided |= self.spec.has(May::Execute) && self.is_decided(&state);
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
            if !columns.is_sorted() {
                let mut order: Vec<u8> = (0_u8..).take(columns.len()).collect();
                order.sort_by_key(|node| columns[usize::from(*node)]);
                columns.sort();
                for client in &mut state.clients {
                    let lease = &mut client.locks[group].lease;
                    *lease = self.leases[group].moved(*lease, &order);
                }
            }
        }
        state
    }

    /// A client whose lock is not valid any more, and will not be, can only release it.
    fn forget_what_is_late(&self, state: &mut State<N, C, K>, client: usize) {
        let me = &state.clients[client];
        let is_late = |group: &usize| {
            let lock = &me.locks[*group];
            let counts = lock.token == 0 || self.counted(client).contains(group);
            lock.lease > 0 && counts && state.now >= lock.until
        };
        let is_live = match me.stage {
            Stage::Acquiring => self.spec.variant != Variant::EndFromReply,
            stage => stage == Stage::Holding,
        };
        if !is_live || !self.spec.clients[client].groups.iter().any(is_late) {
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
        (me.stage, me.extensions) = (Stage::Lost, 0);
        me.locks[0] = Lock::of(me.locks[0].lease);
        state.calls(client).for_each(Call::deafen);
    }

    /// Drops requests that will never change anything, and what no node is asked for any more.
    fn forget_calls(&self, state: &mut State<N, C, K>, client: usize) {
        let forgets = self.spec.is_lossy() || !self.spec.is_timed();
        for (node, call) in (0..N).flat_map(|node| (0..K).map(move |call| (node, call))) {
            let made = state.nodes[node].links[client].calls[call];
            if forgets && made.is_deaf() && !self.matters(state, client, node, call) {
                state.nodes[node].links[client].calls[call] = Call::None;
            }
        }
        for (group, asked) in state.clients[client].asked.iter_mut().enumerate() {
            let nodes = &state.nodes[self.members(group)];
            for (call, asked) in asked.iter_mut().enumerate() {
                let may_run = |node: &Column<C, K>| node.links[client].calls[call].may_run();
                let is_repeated = call == 0 && state.duplicates > 0;
                *asked *= u8::from(is_repeated || nodes.iter().any(may_run));
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
            let op = state.clients[client].asked[self.group_of(node)][call];
            self.spec.is_timed()
                && !self.is_release(op)
                && self.has(column.store, client, state.now)
        };
        granted_again || self.run(state, client, node, call).0 != column.store || is_later()
    }

    /// Forgets leases that will not be told anything, and when a lock began, but for what a property asks.
    fn forget_lease(&self, state: &mut State<N, C, K>, client: usize) {
        let extends = self.leases[0].is(state.lease(client, 0), Lease::is_extending);
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
        lock.began *= u8::from(keeps || !is_done);
        let may_extend = state.extensions > 0
            || client == 0 && usize::from(me.extensions) < self.spec.extends.len();
        let is_over = match me.stage {
            Stage::Holding => !may_extend && !extends,
            Stage::Lost => !extends,
            stage => stage == Stage::Extended,
        };
        if is_over && !self.spec.has(May::Release) {
            lock.lease = 0;
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
        let extends = || self.leases[group].is(state.lease(client, group), Lease::is_extending);
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

    /// How a client may begin in the next group.
    fn beginnings(&self, state: &State<N, C, K>, client: usize) -> Vec<Deed> {
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
        let proposes_its_clock = matches!(
            self.spec.variant,
            Variant::ProposesItsClock | Variant::KeepsTokensApart
        );
        let earlier = earlier.filter(|_| !proposes_its_clock);
        let now = state.now - START + 1;
        let proposals = match (earlier, self.spec.proposals) {
            (Some(token @ 1..), _) => token..=token,
            (_, Proposals::None) => 0..=0,
            (_, Proposals::UpTo(most)) => 1..=most,
            (_, Proposals::Clock(skew)) => now..=now + skew,
        };
        proposals
            .map(|proposal| Deed::Begin(group, proposal))
            .collect()
    }

    fn of_client(&self, state: &State<N, C, K>, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        let mut act = |deed| actions.push(Action::Of(client, deed));
        match me.stage {
            Stage::Away if self.spec.variant == Variant::StampOutside => act(Deed::Look),
            Stage::Away | Stage::Looked => act(Deed::Connect),
            _ => self
                .beginnings(state, client)
                .into_iter()
                .for_each(&mut act),
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
        if self.spec.has(May::Execute) && me.locks[0].lease != 0 {
            self.of_execution(state, client)
                .into_iter()
                .for_each(&mut act);
        }
        for group in 0..GROUPS {
            if me.locks[group].lease != 0 && !self.spec.has(May::Execute) {
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
            let group = self.group_of(node);
            let is_first = self.members(group).start == node;
            if !is_first && state.nodes[node - 1] == *column || self.is_out(state, node) {
                continue;
            }
            let calls = &column.links[client].calls;
            let hears = |heard| self.reading(state, client, node, heard) != Reading::Never;
            // One that read no answer of the node may still read one to its `ACQUIRE`.
            let awaits = || {
                self.spec.is_lossy()
                    && self.leases[group].is(state.lease(client, group), |lease| lease.counts(1))
            };
            for (call, made) in calls.iter().enumerate() {
                let ran = || self.run(state, client, node, call);
                // What changes nothing and is not listened to, or as good as that, need not be carried out.
                let is_heard = || *made == Call::Sent && hears(ran().1);
                if made.may_run() && (is_heard() || ran().0 != column.store) {
                    act(Deed::Run(node, call));
                }
                let is_begun = me.asked[group][call] > 0;
                if call == 0 && is_begun && !made.may_run() && state.duplicates > 0 {
                    let (store, heard) = ran();
                    let replaces = match *made {
                        Call::Ran(old) => old != heard,
                        Call::None => awaits() && hears(heard),
                        _ => false,
                    };
                    for (replaces, matters) in [(false, store != column.store), (true, replaces)] {
                        if matters {
                            act(Deed::Duplicate(node, replaces));
                        }
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

    fn carry_out(&self, state: &mut State<N, C, K>, client: usize, node: usize, call: usize) {
        let (store, heard) = self.run(state, client, node, call);
        let reading = self.reading(state, client, node, heard);
        let column = &mut state.nodes[node];
        column.store = store;
        let calls = &mut column.links[client].calls;
        let is_sent = calls[call] == Call::Sent;
        calls[call].run(heard);
        if self.spec.has(May::Live) {
            calls[..call].iter_mut().for_each(Call::get_lost);
        }
        if is_sent && reading == Reading::AtOnce {
            calls[call] = Call::Read(heard);
            let group = self.group_of(node);
            let told = Told::new(node - self.members(group).start, call + 1, heard);
            let lease = state.lease(client, group);
            let step = self.leases[group].tell(lease, told, state.now);
            self.take(state, client, group, &step);
        } else if is_sent && reading == Reading::Never {
            calls[call] = Call::None;
        }
    }

    fn perform(&self, state: &mut State<N, C, K>, client: usize, deed: Deed) {
        let me = &mut state.clients[client];
        match deed {
            Deed::Look => (me.stage, me.locks[0].began) = (Stage::Looked, state.now),
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
                self.handle(state, client, 0, Input::Begin);
            }
            Deed::Record => self.record(state, client),
            Deed::Leave(effect) => self.leave(state, client, effect),
            Deed::Read(is_found) => self.read(state, client, is_found),
        }
    }
}

/// Those of which it is true, as bits.
fn bits(are: impl Iterator<Item = bool>) -> u8 {
    are.enumerate()
        .fold(0, |bits, (number, is)| bits | u8::from(is) << number)
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
            locks: [Lock::default(); GROUPS],
            asked: [[0; K]; GROUPS],
            after: 0,
            extended_after: 0,
            extensions: 0,
            is_revoked: false,
            execution: Execution::default(),
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
            broken: Broken::default(),
            moved: Moved::default(),
            is_decided: false,
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
        let promised = self.spec.promises.iter().copied().map(Self::always);
        let reached = self.spec.reaches.iter().copied().map(Self::sometimes);
        promised.chain(reached).collect()
    }
}
