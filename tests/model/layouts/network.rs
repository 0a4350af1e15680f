//! What passes between the clients and the nodes of the model of layouts in change.

use std::ops::Range;

use crate::layouts::bounds::PRESENT;
use crate::layouts::moving::{Moving, number};
use crate::layouts::state::{ACQUIRE, CONFIRM, EXTEND, Phase, RAISE, RELEASE, State};
use crate::space::{self, Ask, Call, Heard, Told};

impl<const NODES: usize> Moving<NODES> {
    /// The nodes of a group.
    pub(super) fn members(&self, group: usize) -> Range<usize> {
        match group {
            PRESENT => 0..self.bounds.present,
            _ => self.bounds.present..NODES,
        }
    }

    pub(super) fn group_of(&self, node: usize) -> usize {
        usize::from(node >= self.bounds.present)
    }

    /// What a node does with a call, and what the client hears.
    pub(super) fn run(
        &self,
        state: &State<NODES>,
        client: usize,
        node: usize,
        call: usize,
    ) -> (u32, Heard) {
        let ask = self.ask(state, client, self.group_of(node), call);
        let store = state.nodes[node].store;
        self.nodes.ask(store, number(client), ask, state.now)
    }

    /// Whether an answer may make a round act. A single node decides by a grant only.
    pub(super) fn helps(&self, group: usize, call: usize, heard: Heard) -> bool {
        let is_acquisition = call < RAISE;
        let is_alone = self.members(group).len() == 1;
        match heard {
            Heard::Granted(_) | Heard::At(_) => true,
            Heard::Held | Heard::Lost => is_acquisition && !is_alone,
            Heard::Released | Heard::Failed => false,
        }
    }

    /// Whether a client has the lock at a node.
    pub(super) fn has(&self, store: u32, client: usize, now: u8) -> bool {
        let ask = Ask::Confirm { token: 1, ttl: 1 };
        let (_, heard) = self.nodes.ask(store, number(client), ask, now);
        matches!(heard, Heard::At(_))
    }

    pub(super) fn send(&self, state: &mut State<NODES>, client: usize, group: usize, call: usize) {
        for node in self.members(group) {
            state.nodes[node].calls[client][call] = Call::Sent;
        }
    }

    /// Gives up what is under way in a group.
    pub(super) fn deafen(&self, state: &mut State<NODES>, client: usize, group: usize) {
        for node in self.members(group) {
            for call in &mut state.nodes[node].calls[client] {
                call.deafen();
            }
        }
    }

    /// The answers that have arrived for the round of a client in a group.
    pub(super) fn answers(&self, state: &State<NODES>, client: usize, group: usize) -> Vec<Told> {
        let calls = match state.clients[client].leases[group].phase {
            Phase::Acquiring => ACQUIRE..RAISE,
            Phase::Raising => RAISE..RAISE + 1,
            Phase::Extending => EXTEND..EXTEND + 1,
            Phase::None | Phase::Had => 0..0,
        };
        let mut answers = Vec::new();
        for (node, index) in (0_u8..).zip(self.members(group)) {
            for call in calls.clone() {
                if let Call::Ran(heard) = state.nodes[index].calls[client][call] {
                    let phase = if call < RAISE { number(call) } else { 0 };
                    answers.push(Told { node, phase, heard });
                }
            }
        }
        answers
    }

    pub(super) fn decisions(
        &self,
        state: &State<NODES>,
        client: usize,
        group: usize,
    ) -> Vec<(Vec<Told>, space::Step)> {
        let round = state.clients[client].leases[group].round;
        let answers = self.answers(state, client, group);
        self.rounds[group].decisions(round, &answers)
    }

    /// Whether a client knows, or would know if its requests ran now, that its second group refuses it.
    pub(super) fn is_refused(&self, state: &State<NODES>, client: usize) -> bool {
        let [_, group] = *self.groups(client) else {
            return false;
        };
        let lease = &state.clients[client].leases[group];
        if lease.phase != Phase::Acquiring {
            return false;
        }
        let mut answers = self.answers(state, client, group);
        for (node, index) in (0_u8..).zip(self.members(group)) {
            if state.nodes[index].calls[client][ACQUIRE] == Call::Sent {
                let (phase, (_, heard)) = (0, self.run(state, client, index, ACQUIRE));
                answers.push(Told { node, phase, heard });
            }
        }
        let rounds = &self.rounds[group];
        let mut round = lease.round;
        answers.into_iter().any(|told| {
            let (next, step) = rounds.tell(round, told);
            round = next;
            step == space::Step::Over
        })
    }

    fn ask(&self, state: &State<NODES>, client: usize, group: usize, call: usize) -> Ask {
        let lease = &state.clients[client].leases[group];
        let ttl = self.bounds.ttl;
        let token = match call {
            ACQUIRE => {
                let proposal = lease.proposal;
                return Ask::Acquire { proposal, ttl };
            }
            RELEASE => return Ask::Release,
            EXTEND => lease.extended,
            RAISE => lease.raised,
            phase => lease.targets[phase - CONFIRM],
        };
        Ask::Confirm { token, ttl }
    }
}
