//! What the model of layouts in change checks.

use stateright::Property;

use crate::layouts::bounds::{CLIENTS, Step};
use crate::layouts::moving::Moving;
use crate::layouts::state::{Lease, Phase, Stage, State};

pub(crate) const EXCLUSION: &str = "two clients never hold the lock at once";
pub(crate) const ORDER: &str = "each holder has a higher token than all before it in its groups";
pub(crate) const CLOCK_ORDER: &str = "each holder has a higher token than all before it";

pub(crate) const RAISED: &str = "a group is raised to the token of the other";
pub(crate) const REFUSED: &str = "a client that its second group refuses releases the first";
pub(crate) const EXTENDED: &str = "an extension prolongs";

const OLD_HOLDS: &str = "a client of the present layout holds the lock";
const BOTH_HOLDS: &str = "a client of both layouts holds the lock";
const NEW_HOLDS: &str = "a client of the next layout holds the lock";
const REVERSED_HOLDS: &str = "a client that locks the next group first holds the lock";

impl<const NODES: usize> Moving<NODES> {
    /// What must hold, and what must happen in some order of events.
    pub(super) fn promises(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(EXCLUSION, |model: &Self, state: &State<NODES>| {
                let valid = (0..CLIENTS).filter(|client| model.is_valid(state, *client));
                valid.count() < 2
            }),
            Property::always(ORDER, |_, state: &State<NODES>| !state.is_behind_its_group),
            Property::always(CLOCK_ORDER, |model: &Self, state: &State<NODES>| {
                model.bounds.has_unequal_clocks || !state.is_behind_any
            }),
            Property::sometimes(RAISED, |model: &Self, state: &State<NODES>| {
                model.succeeds(state, Phase::Raising, |lease| lease.raised > lease.token)
            }),
            Property::sometimes(REFUSED, |model: &Self, state: &State<NODES>| {
                let is_free = |client: usize| {
                    let mut nodes = state.nodes.iter();
                    !nodes.any(|column| model.has(column.store, client, state.now))
                };
                // Its lock in the first group would still be there.
                let refused = |client: &usize| state.clients[*client].stage == Stage::Refused;
                state.now <= model.bounds.ttl && (0..CLIENTS).filter(refused).any(is_free)
            }),
            Property::sometimes(EXTENDED, |model: &Self, state: &State<NODES>| {
                model.succeeds(state, Phase::Extending, |lease| {
                    model.until(lease.extended_at) > lease.until
                })
            }),
            Property::sometimes(OLD_HOLDS, |model: &Self, state| {
                model.holds(state, Step::Old)
            }),
            Property::sometimes(BOTH_HOLDS, |model: &Self, state| {
                model.holds(state, Step::Both)
            }),
            Property::sometimes(NEW_HOLDS, |model: &Self, state| {
                model.holds(state, Step::New)
            }),
            Property::sometimes(REVERSED_HOLDS, |model: &Self, state| {
                model.holds(state, Step::Reversed)
            }),
        ];
        let holds = self.bounds.steps.map(|step| match step {
            Step::Absent => ORDER,
            Step::Old => OLD_HOLDS,
            Step::Both => BOTH_HOLDS,
            Step::New => NEW_HOLDS,
            Step::Reversed => REVERSED_HOLDS,
        });
        properties.retain(|property| {
            let name = &property.name;
            [EXCLUSION, ORDER, CLOCK_ORDER].contains(name)
                || holds.contains(name)
                || self.bounds.reaches.contains(name)
        });
        properties
    }

    /// Whether an extension or a raise of such a lock is about to succeed.
    fn succeeds(
        &self,
        state: &State<NODES>,
        phase: Phase,
        is_such: impl Fn(&Lease) -> bool,
    ) -> bool {
        (0..CLIENTS).any(|client| {
            let leases = state.clients[client].leases.iter().enumerate();
            let mut leases = leases.filter(|(_, lease)| lease.phase == phase && is_such(lease));
            leases.any(|(group, _)| !self.decisions(state, client, group).is_empty())
        })
    }

    fn holds(&self, state: &State<NODES>, step: Step) -> bool {
        let mut clients = (0..CLIENTS).filter(|client| self.bounds.steps[*client] == step);
        clients.any(|client| self.is_valid(state, client))
    }
}
