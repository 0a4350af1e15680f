//! The timed model of a key that moves from one group of nodes to another.
//!
//! The clients belong to processes at different steps of the move. Each acquires one lock, in the groups that its process
//! knows of, and may give up or release at any time. Its requests run late or never. A request that changes nothing at its
//! node and does not help its client is not carried out, which is as if it were lost.

use stateright::{Model, Property};

use crate::layouts::bounds::{Bounds, CLIENTS, GROUPS};
use crate::layouts::state::{ACQUIRE, Action, Client, Column, Phase, Stage, State, may_run};
use crate::space::{Ask, Call, Nodes, Rounds, Variant};

/// A key in two groups of nodes, which are `NODES` together.
#[derive(Debug)]
pub(crate) struct Moving<const NODES: usize> {
    pub(super) bounds: Bounds,
    pub(super) nodes: Nodes,
    pub(super) rounds: [Rounds; GROUPS],
}

impl<const NODES: usize> Moving<NODES> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let rounds = |nodes| Rounds::new(Variant::Shipped, nodes);
        Self {
            // One more than the clients: the last holder before them.
            nodes: Nodes::new(Variant::Shipped, &vec![vec![0]; CLIENTS + 1]),
            rounds: [rounds(bounds.present), rounds(NODES - bounds.present)],
            bounds,
        }
    }

    fn of_client(&self, state: &State<NODES>, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        let is_by_clock = self.bounds.rule.proposes_its_clock();
        let (group, most_ahead) = match me.stage {
            Stage::Idle if self.may_begin(state, client) => {
                (self.groups(client).first().copied(), self.bounds.skew)
            }
            Stage::Locking if is_by_clock => (self.next_group(state, client), self.bounds.skew),
            Stage::Locking => (self.next_group(state, client), 0),
            _ => (None, 0),
        };
        if let Some(group) = group {
            actions.extend((0..=most_ahead).map(|ahead| Action::Begin {
                client,
                group,
                ahead,
            }));
        }
        if me.stage == Stage::Locking
            && let Some((group, token)) = self.to_raise(state, client)
            && me.leases[group].phase != Phase::Raising
        {
            actions.push(Action::Raise {
                client,
                group,
                token,
            });
        }
        if matches!(me.stage, Stage::Locking | Stage::Holding | Stage::Late) {
            let is_refused = self.is_refused(state, client);
            actions.push(Action::Release { client, is_refused });
        }
        for (group, lease) in me.leases.iter().enumerate() {
            if lease.is_in_round() {
                let found = self.decisions(state, client, group);
                actions.extend(found.into_iter().map(|(told, step)| Action::Decide {
                    client,
                    group,
                    told,
                    step,
                }));
            }
            let is_young = state.now < lease.began + self.bounds.max_hold;
            if state.extensions > 0 && lease.phase == Phase::Had && is_young {
                actions.push(Action::Extend { client, group });
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
            let calls = &column.calls[client];
            let is_sent = state.clients[client].leases[group].proposal > 0;
            if state.repeats > 0 && is_sent && !may_run(calls[ACQUIRE]) {
                actions.push(Action::Repeat { client, node });
            }
            for (call, made) in calls.iter().enumerate() {
                if !may_run(*made) {
                    continue;
                }
                // What changes nothing and does not help its client might as well be lost.
                let (store, heard) = self.run(state, client, node, call);
                let helps = *made == Call::Sent && self.helps(group, call, heard);
                if store != column.store || helps {
                    actions.push(Action::Run { client, node, call });
                }
            }
        }
    }
}

impl<const NODES: usize> Model for Moving<NODES> {
    type State = State<NODES>;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        let earlier = number(CLIENTS);
        let nodes = std::array::from_fn(|node| {
            let (proposal, ttl) = (self.bounds.fences[self.group_of(node)], 1);
            let mut store = self.nodes.empty();
            if proposal > 0 {
                (store, _) = self
                    .nodes
                    .ask(store, earlier, Ask::Acquire { proposal, ttl }, 0);
                store = self.nodes.vanish(store, earlier.into(), 0);
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
            Action::Begin {
                client,
                group,
                ahead,
            } => self.begin(&mut state, client, group, ahead),
            Action::Repeat { client, node } => {
                state.repeats -= 1;
                let lease = &state.clients[client].leases[self.group_of(node)];
                let is_awaited = lease.phase == Phase::Acquiring;
                let made = &mut state.nodes[node].calls[client][ACQUIRE];
                *made = if is_awaited { Call::Sent } else { Call::Deaf };
            }
            Action::Run { client, node, call } => {
                let (store, heard) = self.run(last, client, node, call);
                let column = &mut state.nodes[node];
                column.store = store;
                let made = &mut column.calls[client][call];
                made.run(heard);
                if !self.helps(self.group_of(node), call, heard) {
                    *made = Call::None;
                }
            }
            Action::Decide {
                client,
                group,
                told,
                ..
            } => self.decide(&mut state, client, group, &told),
            Action::Raise {
                client,
                group,
                token,
            } => self.raise(&mut state, client, group, token),
            Action::Extend { client, group } => self.extend(&mut state, client, group),
            Action::Release { client, is_refused } => self.release(&mut state, client, is_refused),
        }
        Some(self.canonical(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        self.promises()
    }
}

pub(super) fn number(index: usize) -> u8 {
    u8::try_from(index).expect("numbers of a model are small")
}
