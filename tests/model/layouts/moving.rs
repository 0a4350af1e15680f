//! The timed model of a key that moves from one group of nodes to another.
//!
//! The clients belong to processes at different steps of the move. Each acquires one lock, by a shipped lease in each of
//! the groups that its process knows of, and may give up or release at any time. Its requests run late or never. A
//! request that changes nothing at its node and does not help its client is not carried out, which is as if it were
//! lost.

use std::ops::Range;
use std::sync::Arc;

use stateright::{Model, Property};
use tower_redlock::protocol::lease::{Access, Event, Lease};
use tower_redlock::protocol::message::Reply;

use crate::layouts::bounds::{Bounds, CLIENTS, GROUPS, PRESENT};
use crate::leases::{self, Call, Heard, Leases, Step, Told, sorting};
use crate::space::{Nodes, RETENTION, Variant, acquire, ticks};

/// The most requests of one lease: `ACQUIRE`, three `CONFIRM`s, an extension, the raise, the release.
pub(super) const CALLS: usize = 7;

/// The present layout ended so long ago that clients of the next one may begin.
pub(super) const LONG_AGO: u8 = u8::MAX;

/// A key in two groups of nodes, which are `NODES` together.
#[derive(Debug)]
pub(crate) struct Moving<const NODES: usize> {
    pub(super) bounds: Bounds,
    pub(super) nodes: Nodes,
    pub(super) leases: [Leases; GROUPS],
    /// A request that only shows whether a client has the lock.
    probe: u8,
    held: Heard,
    lost: Heard,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State<const NODES: usize> {
    pub(super) now: u8,
    /// Those of the present group, and then those of the next one.
    pub(super) nodes: [Column; NODES],
    pub(super) clients: [Client; CLIENTS],
    /// Since when no client of the present layout begins any more; 0 if they still do.
    pub(super) ended: u8,
    pub(super) extensions: u8,
    pub(super) repeats: u8,
    /// The highest token that a holder had in each group.
    pub(super) highest: [u8; GROUPS],
    /// A holder had no higher token than one before it: in a group of its own, or in any.
    pub(super) is_behind_its_group: bool,
    pub(super) is_behind_any: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Column {
    pub(super) store: u32,
    pub(super) calls: [[Call; CALLS]; CLIENTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Client {
    pub(super) stage: Stage,
    /// Its lock in each group.
    pub(super) locks: [Lock; GROUPS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    #[default]
    Idle,
    Locking,
    Holding,
    /// It has released, or given up.
    Gone,
    /// It has given up because its second group refused it.
    Refused,
}

/// The lock of a client in one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Lock {
    pub(super) lease: leases::Client<CALLS>,
    pub(super) began: u8,
    /// 0 until it is granted.
    pub(super) token: u8,
    /// The tick at which it is no more to be relied on, or would not be if it were granted.
    pub(super) until: u8,
    /// The token that it is being raised to.
    pub(super) raised: u8,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Tick,
    /// No client of the present layout begins any more.
    EndOld,
    /// A client begins in a group, and its clock is ahead by so much.
    Begin(usize, usize, u8),
    /// An `ACQUIRE` to a node is sent again.
    Repeat(usize, usize),
    /// A node carries out one of the requests of a client.
    Run(usize, usize, usize),
    /// A client reads answers of a group.
    Decide(usize, usize, Arc<Step>),
    /// A client raises a group to a token.
    Raise(usize, usize, u8),
    Extend(usize, usize),
    /// A client releases the lock, or gives up.
    Release(usize),
}

impl<const NODES: usize> Moving<NODES> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        // One more than the clients: the last holder before them.
        let nodes = Nodes::new(Variant::Shipped, &vec![vec![0]; CLIENTS + 1]);
        let words = &nodes.words;
        let leases = |nodes| Leases::new(words, nodes);
        let probe = Access::Exclusive.confirm(Some(1), ticks(1), RETENTION);
        Self {
            leases: [leases(bounds.present), leases(NODES - bounds.present)],
            probe: words.number(&probe),
            held: words.hear(Reply::Held {
                expires_in: None,
                fingerprint: None,
            }),
            lost: words.hear(Reply::Lost),
            nodes,
            bounds,
        }
    }

    /// The nodes of a group.
    pub(super) fn members(&self, group: usize) -> Range<usize> {
        match group {
            PRESENT => 0..self.bounds.present,
            _ => self.bounds.present..NODES,
        }
    }

    fn group_of(&self, node: usize) -> usize {
        usize::from(node >= self.bounds.present)
    }

    /// Whether a client has the lock at a node.
    pub(super) fn has(&self, store: u32, client: usize, now: u8) -> bool {
        let (_, heard) = self.nodes.execute(store, client, self.probe, now);
        heard != self.lost
    }

    /// What a node does with a call, and what the client hears.
    fn run(&self, state: &State<NODES>, client: usize, node: usize, call: usize) -> (u32, Heard) {
        let lock = &state.clients[client].locks[self.group_of(node)];
        let store = state.nodes[node].store;
        let op = lock.lease.asked[call];
        self.nodes.execute(store, client, op, state.now)
    }

    /// Whether an answer may make a lease act. A single node decides by a grant only.
    fn helps(&self, group: usize, lease: u32, heard: Heard) -> bool {
        let is_alone = self.members(group).len() == 1;
        let is_no = heard == self.held || heard == self.lost;
        !is_no || !is_alone && self.leases[group].of(lease, Lease::is_acquiring)
    }

    /// Whether a single node refuses a client, which reads that at once or never.
    fn is_refused(&self, group: usize, lease: u32, heard: Heard) -> bool {
        let is_alone = self.members(group).len() == 1;
        is_alone && heard == self.held && self.leases[group].of(lease, Lease::is_acquiring)
    }

    /// What the answers that have arrived may make the lease of a client in a group do.
    pub(super) fn decisions(
        &self,
        state: &State<NODES>,
        client: usize,
        group: usize,
    ) -> Arc<[Arc<Step>]> {
        let lock = &state.clients[client].locks[group];
        let mut answers = Vec::new();
        for (node, column) in (0..).zip(&state.nodes[self.members(group)]) {
            for (number, call) in (1..).zip(&column.calls[client]) {
                if let Call::Ran(heard) = *call {
                    answers.push(Told {
                        node,
                        number,
                        heard,
                    });
                }
            }
        }
        self.leases[group].decisions(lock.lease.lease, answers, state.now)
    }

    fn of_client(&self, state: &State<NODES>, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        let skew = self.bounds.skew;
        let (group, most_ahead) = match me.stage {
            Stage::Idle if self.may_begin(state, client) => {
                (self.groups(client).first().copied(), skew)
            }
            Stage::Locking => {
                let is_by_clock = self.bounds.rule.proposes_its_clock();
                let skew = if is_by_clock { skew } else { 0 };
                (self.next_group(state, client), skew)
            }
            _ => (None, 0),
        };
        if let Some(group) = group {
            actions.extend((0..=most_ahead).map(|ahead| Action::Begin(client, group, ahead)));
        }
        if !matches!(me.stage, Stage::Locking | Stage::Holding) {
            return;
        }
        if me.stage == Stage::Locking
            && let Some((group, token)) = self.to_raise(state, client)
            && me.locks[group].raised == 0
        {
            actions.push(Action::Raise(client, group, token));
        }
        actions.push(Action::Release(client));
        for (group, lock) in me.locks.iter().enumerate() {
            if lock.lease.lease == 0 {
                continue;
            }
            let found = self.decisions(state, client, group);
            let found = found.iter().map(Arc::clone);
            actions.extend(found.map(|step| Action::Decide(client, group, step)));
            let is_young = lock.token > 0 && state.now < lock.began + self.bounds.max_hold;
            let extends = |lease: &Lease| lease.is_extending();
            if state.extensions > 0 && is_young && !self.leases[group].of(lock.lease.lease, extends)
            {
                actions.push(Action::Extend(client, group));
            }
        }
    }

    fn of_requests(&self, state: &State<NODES>, client: usize, actions: &mut Vec<Action>) {
        for (node, column) in state.nodes.iter().enumerate() {
            let group = self.group_of(node);
            // Of equal nodes, one is enough.
            if node > self.members(group).start && state.nodes[node - 1] == *column {
                continue;
            }
            let lease = &state.clients[client].locks[group].lease;
            let calls = &column.calls[client];
            if state.repeats > 0 && lease.asked[0] > 0 && !calls[0].may_run() {
                actions.push(Action::Repeat(client, node));
            }
            for (call, made) in calls.iter().enumerate() {
                if !made.may_run() {
                    continue;
                }
                // What changes nothing and does not help its client might as well be lost.
                let (store, heard) = self.run(state, client, node, call);
                let matters = || {
                    self.helps(group, lease.lease, heard)
                        || self.is_refused(group, lease.lease, heard)
                };
                if store != column.store || *made == Call::Sent && matters() {
                    actions.push(Action::Run(client, node, call));
                }
            }
        }
    }

    fn carry_out(&self, state: &mut State<NODES>, client: usize, node: usize, call: usize) {
        let group = self.group_of(node);
        let (store, heard) = self.run(state, client, node, call);
        let leases::Client { lease, .. } = state.clients[client].locks[group].lease;
        let column = &mut state.nodes[node];
        column.store = store;
        let made = &mut column.calls[client][call];
        let is_read = *made == Call::Sent;
        made.run(heard);
        if is_read && self.is_refused(group, lease, heard) {
            let node = node - self.members(group).start;
            let told = Told {
                node: u8::try_from(node).expect("few nodes"),
                number: u8::try_from(call + 1).expect("few requests"),
                heard,
            };
            let step = self.leases[group].tell(lease, told, state.now);
            let step = self.leases[group].after(&step, vec![told]);
            self.take(state, client, group, &step);
        } else if is_read && !self.helps(group, lease, heard) {
            *made = Call::None;
        }
    }

    /// The same state without what makes no difference any more, and with the nodes of each group in order.
    fn canonical(&self, mut state: State<NODES>) -> State<NODES> {
        for client in 0..CLIENTS {
            if self.is_late(&state, client) {
                // It can only release it, now or later.
                self.give_up(&mut state, client, Stage::Gone);
            }
            self.forget(&mut state, client);
        }
        if let Some(wait) = self.bounds.wait
            && state.ended > 0
            && state.now >= state.ended.saturating_add(wait)
        {
            state.ended = LONG_AGO;
        }
        for group in 0..GROUPS {
            let columns = &mut state.nodes[self.members(group)];
            if let Some(order) = sorting(columns) {
                columns.sort();
                for client in &mut state.clients {
                    let lease = &mut client.locks[group].lease.lease;
                    *lease = self.leases[group].moved(*lease, &order);
                }
            }
        }
        state
    }

    /// Drops requests that find no lock of their client, if no other request can bring it one, and what no node is
    /// asked for any more.
    fn forget(&self, state: &mut State<NODES>, client: usize) {
        let mut pending = [[false; CALLS]; GROUPS];
        for node in 0..NODES {
            let group = self.group_of(node);
            let made = state.nodes[node].calls[client];
            let may_repeat =
                state.repeats > 0 && state.clients[client].locks[group].lease.asked[0] > 0;
            pending[group][0] |= may_repeat;
            for (call, made) in made.iter().enumerate() {
                let is_vain = || {
                    let (store, _) = self.run(state, client, node, call);
                    let is_kept = self.has(state.nodes[node].store, client, state.now);
                    !may_repeat
                        && !state.nodes[node].calls[client][0].may_run()
                        && store == state.nodes[node].store
                        && (*made == Call::Standing || !is_kept)
                };
                if matches!(made, Call::Deaf | Call::Standing) && call > 0 && is_vain() {
                    state.nodes[node].calls[client][call] = Call::None;
                }
                pending[group][call] |= state.nodes[node].calls[client][call].may_run();
            }
        }
        for (lock, pending) in state.clients[client].locks.iter_mut().zip(pending) {
            for (op, pending) in lock.lease.asked.iter_mut().zip(pending) {
                if !pending {
                    *op = 0;
                }
            }
            if lock.token > 0 && state.extensions == 0 {
                lock.began = 0;
            }
        }
    }
}

impl<const NODES: usize> Model for Moving<NODES> {
    type State = State<NODES>;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        let nodes = std::array::from_fn(|node| {
            let proposal = self.bounds.fences[self.group_of(node)];
            let mut store = self.nodes.empty();
            if proposal > 0 {
                let acquire = acquire(Some(proposal.into()), ticks(1));
                let acquire = self.nodes.words.number(&acquire);
                (store, _) = self.nodes.execute(store, CLIENTS, acquire, 0);
                store = self.nodes.vanish(store, CLIENTS, 0);
            }
            Column {
                store,
                ..Column::default()
            }
        });
        vec![State {
            now: 1,
            nodes,
            clients: [Client::default(); CLIENTS],
            ended: 0,
            extensions: self.bounds.extensions,
            repeats: self.bounds.repeats,
            highest: [0; GROUPS],
            is_behind_its_group: false,
            is_behind_any: false,
        }]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Action>) {
        if state.now <= self.bounds.horizon {
            actions.push(Action::Tick);
        }
        if self.bounds.wait.is_some() && state.ended == 0 {
            actions.push(Action::EndOld);
        }
        for client in 0..CLIENTS {
            self.of_client(state, client, actions);
            self.of_requests(state, client, actions);
        }
    }

    fn next_state(&self, last: &Self::State, action: Action) -> Option<Self::State> {
        let mut state = *last;
        match action {
            Action::Tick => state.now += 1,
            Action::EndOld => state.ended = state.now,
            Action::Begin(client, group, ahead) => self.begin(&mut state, client, group, ahead),
            Action::Repeat(client, node) => {
                state.repeats -= 1;
                let group = self.group_of(node);
                let lease = state.clients[client].locks[group].lease.lease;
                let is_awaited = lease > 0 && self.leases[group].of(lease, Lease::is_acquiring);
                let made = &mut state.nodes[node].calls[client][0];
                *made = if is_awaited { Call::Sent } else { Call::Deaf };
            }
            Action::Run(client, node, call) => self.carry_out(&mut state, client, node, call),
            Action::Decide(client, group, step) => self.take(&mut state, client, group, &step),
            Action::Raise(client, group, token) => self.raise(&mut state, client, group, token),
            Action::Extend(client, group) => {
                state.extensions -= 1;
                self.extend(&mut state, client, group, None);
            }
            Action::Release(client) => self.give_up(&mut state, client, Stage::Gone),
        }
        Some(self.canonical(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        self.promises()
    }
}

/// The end of the validity that an event tells.
pub(super) fn valid_until(event: &Event) -> Option<u8> {
    match event {
        Event::Granted { valid_until, .. } | Event::Extended { valid_until, .. } => {
            Some(leases::tick_after(*valid_until))
        }
        _ => None,
    }
}
