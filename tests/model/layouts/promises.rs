//! What the model of layouts in change checks.

use stateright::Property;
use tower_redlock::protocol::lease::Event;

use crate::layouts::bounds::{CLIENTS, Step};
use crate::layouts::moving::{Lock, Moving, Stage, State, valid_until};
use crate::leases::Call;

pub(crate) const EXCLUSION: &str = "two clients never hold the lock at once";
pub(crate) const ORDER: &str = "each holder has a higher token than all before it in its groups";
pub(crate) const LEFT: &str = "where a client that has gone has a lock, its release is under way";
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
            Property::always(LEFT, |model: &Self, state: &State<NODES>| {
                // A request that is repeated may come after the release.
                model.bounds.repeats > 0 || !(0..CLIENTS).any(|client| model.leaves(state, client))
            }),
            Property::sometimes(RAISED, |model: &Self, state: &State<NODES>| {
                model.succeeds(state, |lock, _| lock.raised > lock.token)
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
                model.succeeds(state, |lock, until| lock.raised == 0 && until > lock.until)
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
            [EXCLUSION, ORDER, CLOCK_ORDER, LEFT].contains(name)
                || holds.contains(name)
                || self.bounds.reaches.contains(name)
        });
        properties
    }

    /// Whether an extension or a raise of such a lock, until then, is about to succeed.
    fn succeeds(&self, state: &State<NODES>, is_such: impl Fn(&Lock, u8) -> bool) -> bool {
        (0..CLIENTS).any(|client| {
            let locks = state.clients[client].locks.iter().enumerate();
            let mut held = locks.filter(|(_, lock)| lock.token > 0 && lock.lease.lease > 0);
            held.any(|(group, lock)| {
                let steps = self.decisions(state, client, group);
                let mut events = steps.iter().flat_map(|step| &step.events);
                events.any(|event| {
                    let extends = matches!(event, Event::Extended { .. });
                    extends && valid_until(event).is_some_and(|until| is_such(lock, until))
                })
            })
        })
    }

    /// Whether a client that has gone has a lock somewhere that it does not release.
    fn leaves(&self, state: &State<NODES>, client: usize) -> bool {
        let me = &state.clients[client];
        let has_gone = matches!(me.stage, Stage::Gone | Stage::Refused);
        has_gone
            && state.nodes.iter().any(|column| {
                let releases = column.calls[client].contains(&Call::Standing);
                !releases && self.has(column.store, client, state.now)
            })
    }

    fn holds(&self, state: &State<NODES>, step: Step) -> bool {
        let mut clients = (0..CLIENTS).filter(|client| self.bounds.steps[*client] == step);
        clients.any(|client| self.is_valid(state, client))
    }
}
