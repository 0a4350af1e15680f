//! One state for all that make no difference, in the model of layouts in change.

use crate::layouts::bounds::{CLIENTS, GROUPS};
use crate::layouts::moving::Moving;
use crate::layouts::state::{
    ACQUIRE, CALLS, CONFIRM, Column, EXTEND, LONG_AGO, Phase, RAISE, RELEASE, Stage, State, may_run,
};
use crate::space::Call;

impl<const NODES: usize> Moving<NODES> {
    /// The same state without what makes no difference any more, and with the nodes of each group in order.
    pub(super) fn canonical(&self, mut state: State<NODES>) -> State<NODES> {
        for client in 0..CLIENTS {
            self.forget_what_is_late(&mut state, client);
            for node in 0..NODES {
                self.drop_in_vain(&mut state, client, node);
            }
            self.forget_what_was_sent(&mut state, client);
        }
        if let Some(wait) = self.bounds.wait
            && state.ended > 0
            && state.now >= state.ended.saturating_add(wait)
        {
            state.ended = LONG_AGO;
        }
        for group in 0..GROUPS {
            self.sort(&mut state, group);
        }
        state
    }

    fn sort(&self, state: &mut State<NODES>, group: usize) {
        let columns = &mut state.nodes[self.members(group)];
        if columns.is_sorted() {
            return;
        }
        let mut order: Vec<u8> = (0..).take(columns.len()).collect();
        order.sort_by_key(|node| columns[usize::from(*node)]);
        let sorted = order.iter().map(|node| columns[usize::from(*node)]);
        let sorted: Vec<Column> = sorted.collect();
        columns.copy_from_slice(&sorted);
        for client in &mut state.clients {
            let lease = &mut client.leases[group];
            if lease.is_in_round() {
                lease.round = self.rounds[group].moved(lease.round, &order);
            }
        }
    }

    /// A client whose lock is not valid any more, and will not be, can only release it.
    fn forget_what_is_late(&self, state: &mut State<NODES>, client: usize) {
        let me = state.clients[client];
        let counted = self.counted(client);
        let is_late = |group: &usize| {
            let lease = &me.leases[*group];
            match lease.phase {
                Phase::None => false,
                Phase::Acquiring => state.now >= self.until(lease.began),
                Phase::Had | Phase::Extending | Phase::Raising => {
                    counted.contains(group) && state.now >= lease.until
                }
            }
        };
        let is_live = matches!(me.stage, Stage::Locking | Stage::Holding);
        if is_live && self.groups(client).iter().any(is_late) {
            self.leave(state, client, Stage::Late);
        }
    }

    /// Drops requests that find no lock of their client, if no other request can bring it one.
    fn drop_in_vain(&self, state: &mut State<NODES>, client: usize, node: usize) {
        let made = state.nodes[node].calls[client][ACQUIRE];
        let proposal = state.clients[client].leases[self.group_of(node)].proposal;
        let may_repeat = state.repeats > 0 && proposal > 0;
        if may_run(made) || may_repeat {
            return;
        }
        for call in CONFIRM..CALLS {
            if state.nodes[node].calls[client][call] == Call::Deaf {
                let (store, _) = self.run(state, client, node, call);
                let is_lost = call == RELEASE || !self.has(store, client, state.now);
                if store == state.nodes[node].store && is_lost {
                    state.nodes[node].calls[client][call] = Call::None;
                }
            }
        }
    }

    /// Forgets what requests said that no node can carry out any more, and when a lock began that is not extended.
    fn forget_what_was_sent(&self, state: &mut State<NODES>, client: usize) {
        for group in 0..GROUPS {
            let nodes = &state.nodes[self.members(group)];
            let is_over = |call: usize| {
                let mut calls = nodes.iter().map(|column| column.calls[client][call]);
                !calls.any(may_run)
            };
            let lease = &mut state.clients[client].leases[group];
            if is_over(ACQUIRE) && state.repeats == 0 {
                lease.proposal = 0;
            }
            for (call, target) in (CONFIRM..).zip(&mut lease.targets) {
                if is_over(call) {
                    *target = 0;
                }
            }
            if is_over(EXTEND) {
                lease.extended = 0;
            }
            if is_over(RAISE) && lease.phase != Phase::Raising {
                lease.raised = 0;
            }
            if lease.is_had() && state.extensions == 0 {
                lease.began = 0;
            }
            if !matches!(lease.phase, Phase::Raising | Phase::Extending) {
                lease.extended_at = 0;
            }
            if !lease.is_in_round() {
                lease.round = 0;
            }
        }
    }
}
