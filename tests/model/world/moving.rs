//! A key that moves from one group of nodes to another.
//!
//! The clients belong to processes at different steps of the move. Each acquires one lock, by a shipped lease in each of
//! the groups that its process knows of: it locks them one after the other, and proposes the token of the first to the
//! second. If the second has a higher one, it raises the first to that. Then it holds the lock.

use tower_redlock::protocol::lease::{Input, Lease};

use crate::space::{EMPTY, acquire, ticks};
use crate::spec::{GROUPS, Variant};
use crate::world::{BY_GROUP, ORDER, Stage, State, World};

/// The clients of the first group alone ended so long ago that those of the second alone may begin.
const LONG_AGO: u8 = u8::MAX;

/// What happened to a key that moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Moved {
    /// Since when no client of the first group alone begins any more; 0 if they still do.
    pub(super) ended: u8,
    /// The highest token that a holder had in each group.
    highest: [u8; GROUPS],
}

impl<const N: usize, const C: usize, const K: usize> World<N, C, K> {
    /// A node whose fence is that of the last holder.
    pub(super) fn left_by_the_last_holder(&self, group: usize) -> u32 {
        let proposal = self.spec.fences[group];
        if proposal == 0 {
            return EMPTY;
        }
        let acquire = acquire(Some(proposal.into()), ticks(1));
        let acquire = self.nodes.words.number(&acquire);
        let holder = self.clients().len();
        let (store, _) = self.nodes.execute(EMPTY, holder, acquire, 0);
        self.nodes.vanish(store, holder, 0)
    }

    fn groups(&self, client: usize) -> &'static [usize] {
        self.spec.clients[client].groups
    }

    /// The groups without which a client does not rely on its lock.
    pub(super) fn counted(&self, client: usize) -> &'static [usize] {
        let groups = self.groups(client);
        match self.spec.variant {
            Variant::CountsFirstGroup => &groups[..1],
            Variant::ForgetsFirstValidity => &groups[groups.len() - 1..],
            _ => groups,
        }
    }

    /// Whether the step of the move at which it is lets a client begin.
    pub(super) fn is_admitted(&self, state: &State<N, C, K>, client: usize) -> bool {
        match (self.spec.wait, self.groups(client)) {
            (Some(_), [0]) => state.moved.ended == 0,
            (Some(_), [1]) => state.moved.ended == LONG_AGO,
            _ => true,
        }
    }

    pub(super) fn forget_wait(&self, state: &mut State<N, C, K>) {
        let ended = state.moved.ended;
        let is_over = |wait| ended > 0 && state.now >= ended.saturating_add(wait);
        if self.spec.wait.is_some_and(is_over) {
            state.moved.ended = LONG_AGO;
        }
    }

    /// The group that a client locks next, as soon as it has all before.
    pub(super) fn next_group(&self, state: &State<N, C, K>, client: usize) -> Option<usize> {
        let locks = &state.clients[client].locks;
        let mut groups = self.groups(client).iter();
        let next = groups.find(|group| locks[**group].token == 0)?;
        (locks[*next].lease == 0).then_some(*next)
    }

    /// The group that a client has to raise, and the token, once it has all groups.
    pub(super) fn to_raise(&self, state: &State<N, C, K>, client: usize) -> Option<(usize, u8)> {
        let locks = &state.clients[client].locks;
        let groups = self.groups(client);
        let token = locks[*groups.last()?].token;
        let is_complete = groups.iter().all(|group| locks[*group].token > 0);
        let is_lower = |group: &&usize| locks[**group].token < token;
        let lower = *groups.iter().find(is_lower)?;
        let raises = !matches!(
            self.spec.variant,
            Variant::CountsFirstGroup
                | Variant::NeverRaises
                | Variant::RaisesAlone
                | Variant::KeepsTokensApart
                | Variant::KeepsFirstGroup
        );
        (raises && is_complete).then_some((lower, token))
    }

    /// Begins to raise a group to this token. An extension that is under way there is not waited for.
    pub(super) fn raise(&self, state: &mut State<N, C, K>, client: usize, group: usize, token: u8) {
        for node in 0..self.members(group).len() {
            let (leases, lease) = (&self.leases[group], state.lease(client, group));
            if leases.is(lease, Lease::is_extending) {
                let number = leases.of(lease, Lease::number);
                self.never_sent(state, client, group, (node, number));
            }
        }
        state.clients[client].locks[group].raised = token;
        let (ttl, token) = (None, Some(u64::from(token)));
        self.handle(state, client, group, Input::Extend { ttl, token });
    }

    /// Begins to hold the lock once all that it takes is there.
    pub(super) fn hold_if_complete(&self, state: &mut State<N, C, K>, client: usize) {
        let (variant, groups) = (self.spec.variant, self.groups(client));
        let me = &mut state.clients[client];
        let locks = me.locks;
        if me.stage == Stage::Holding || !self.spec.moves() {
            me.stage = Stage::Holding;
            return;
        }
        if variant == Variant::CountsFirstGroup {
            state.clients[client].stage = Stage::Holding;
            for group in &groups[1..] {
                self.begin(state, client, *group, locks[groups[0]].token);
            }
        } else if groups.iter().any(|group| locks[*group].token == 0)
            || self.to_raise(state, client).is_some()
        {
            return;
        }
        let highest = groups.iter().map(|group| locks[*group].token).max();
        let token = match variant {
            Variant::RaisesAlone => highest.unwrap_or_default(),
            _ => locks[groups[0]].token,
        };
        state.clients[client].stage = Stage::Holding;
        let is_behind = |highest: &u8| token <= *highest;
        let is_behind_any = state.moved.highest.iter().any(is_behind);
        state.broken.note(ORDER, is_behind_any);
        for group in groups {
            let highest = &mut state.moved.highest[*group];
            state.broken.note(BY_GROUP, is_behind(highest));
            *highest = token.max(*highest);
            if state.extensions == 0 {
                // From now on it can only be released.
                let lease = &mut state.clients[client].locks[*group].lease;
                *lease = self.leases[*group].hastened(*lease, 0);
            }
        }
    }
}
