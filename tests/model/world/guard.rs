//! Nodes that lose their memory, and the restart guard.
//!
//! The guard is a node's *generation*: made, with the node's own time as its stamp, by the first
//! client that finds none, or one that another process made; read by every client on every new
//! connection; sent with every request, and compared by the node. A client asks no node whose
//! generation or whose process is younger than [`Spec::window`](crate::spec::Spec::window).
//! How long a node stays out is decided by the rules as shipped, [`Admissions`], of a client that has
//! never seen the node before: of their second line, what a client saw itself, nothing is assumed.

use std::time::Duration;

use tower_redlock::protocol::OwnerToken;
use tower_redlock::protocol::admission::{self, Admissions, Introduction};

use crate::leases::{Call, small};
use crate::space::EMPTY;
use crate::spec::{Fault, Guard, Variant};
use crate::world::{Action, Column, Stage, State, World};

/// Which memory a node has: a number, 0 for none yet, and since when by the node's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Generation {
    pub(super) id: u8,
    stamp: u8,
    /// Another process than the one that runs now made it.
    foreign: bool,
}

/// The generation that all nodes have had for ever.
pub(super) const OLD: Generation = Generation {
    id: 1,
    stamp: 0,
    foreign: false,
};

impl<const C: usize, const K: usize> Column<C, K> {
    /// Whether an age of this node is still counted.
    fn is_young(&self) -> bool {
        self.generation.stamp > 0 || self.started > 0
    }

    fn renew(&mut self, stamp: u8, foreign: bool) {
        self.made += 1;
        self.generation = Generation {
            id: self.made,
            stamp,
            foreign,
        };
    }
}

impl<const N: usize, const C: usize, const K: usize> World<N, C, K> {
    pub(super) fn connect(&self, state: &mut State<N, C, K>, client: usize) {
        let me = &mut state.clients[client];
        let looked = (me.stage == Stage::Looked).then_some(me.locks[0].began);
        (me.stage, me.locks[0].began) = (Stage::Idle, 0);
        for column in &mut state.nodes {
            self.admit(column, client, state.now, looked);
        }
    }

    /// A client connects to a node and reads its generation, which it makes if there is none.
    ///
    /// The stamp is the node's own time, unless the client had read that before.
    pub(super) fn admit(&self, node: &mut Column<C, K>, me: usize, now: u8, looked: Option<u8>) {
        let variant = self.spec.variant;
        let clock = now + node.ahead;
        let unbound = [Variant::NoUptimeRule, Variant::GenerationOfAnyProcess].contains(&variant);
        let found = node.generation.id != 0 && (unbound || !node.generation.foreign);
        if !found {
            node.renew(looked.unwrap_or(clock), false);
        }
        let age = |since: u8| Duration::from_secs(u64::from(clock.saturating_sub(since)));
        let link = &mut node.links[me];
        let noticed = link.known != 0 || !found;
        let stamped = age(node.generation.stamp);
        let left = match variant {
            // It knows nothing of what it did not notice itself.
            Variant::AgeFromNotice if noticed && node.generation.id != OLD.id => self.spec.window,
            Variant::AgeFromNotice => 0,
            Variant::NoUptimeRule => self.left(stamped, Duration::MAX),
            // A process that tells its uptime in whole seconds may tell almost one too many.
            _ => self.left(stamped, age(node.started) + Duration::from_secs(1)),
        };
        link.known = node.generation.id;
        link.from = if left == 0 { 0 } else { now + left };
    }

    /// Returns how long a node with a memory and a process of these ages stays out, by the rules as
    /// shipped, of a client that has never seen it before. A tick is a second.
    fn left(&self, age: Duration, uptime: Duration) -> u8 {
        let maker = OwnerToken::from_random([0; 16]);
        let generation = admission::Generation::new(&maker, Duration::ZERO, "process");
        let said = Introduction {
            run_id: "process".into(),
            replication_id: "data".into(),
            uptime,
            generation,
            now: age,
        };
        let window = Duration::from_secs(self.spec.window.into());
        let left = Admissions::new(window).admit(&"node".into(), said, Duration::ZERO);
        small(left.as_secs())
    }

    pub(super) fn lose(&self, state: &mut State<N, C, K>, node: usize, fault: Fault, of: usize) {
        state.faults -= 1;
        let now = state.now;
        let source = state.nodes[of];
        let column = &mut state.nodes[node];
        column.store = match fault {
            Fault::Copy => source.store,
            Fault::Flush | Fault::Restart | Fault::Rollback => EMPTY,
        };
        let is_restarted = matches!(fault, Fault::Restart | Fault::Rollback);
        if is_restarted {
            column.started = now + column.ahead;
        }
        match (self.spec.guard, fault) {
            (Guard::Delayed, _) => return,
            _ if self.spec.window == 0 => return,
            (Guard::Noticed, _) => {
                column.renew(0, false);
                for link in &mut column.links {
                    (link.known, link.from) = (column.made, now + self.spec.window);
                }
            }
            (_, Fault::Rollback) => column.generation.foreign = column.generation.id != 0,
            // To this node's clients it is one that they have never seen.
            (_, Fault::Copy) if source.generation.id != 0 => {
                column.renew(source.generation.stamp, true);
            }
            _ => column.generation = Generation::default(),
        }
        for link in column.links.iter_mut().filter(|_| is_restarted) {
            if self.spec.variant != Variant::CachesAdmission {
                (link.known, link.from) = (0, 0);
            }
            link.calls.iter_mut().for_each(Call::get_lost);
        }
    }

    /// Whether a node carries out nothing yet after a restart.
    pub(super) fn is_out(&self, state: &State<N, C, K>, node: usize) -> bool {
        let started = state.nodes[node].started;
        self.spec.guard == Guard::Delayed && state.now - started < self.spec.window
    }

    pub(super) fn may_reconnect(&self, state: &State<N, C, K>, client: usize, node: usize) -> bool {
        let column = &state.nodes[node];
        let link = &column.links[client];
        let is_stale = link.known != column.generation.id;
        // Looking again before the time is of use only if the node's clock jumped.
        let is_early = link.from > state.now && column.ahead > 0;
        self.spec.compares() && (is_stale || is_early)
    }

    /// What may happen to the memories and the clocks of nodes.
    pub(super) fn of_memories(&self, state: &State<N, C, K>, actions: &mut Vec<Action>) {
        let may_lose = state.faults > 0 && self.may_forget(state);
        for (node, column) in state.nodes.iter().enumerate() {
            // To what is old enough, and to a stamp that is not made yet, a jump is nothing.
            if state.jumps > 0 && column.is_young() {
                actions.push(Action::Jump(node));
            }
            for &fault in self.spec.kinds {
                let is_source = |source: &usize| (fault == Fault::Copy) == (*source != node);
                let sources = (0..N).filter(|source| may_lose && is_source(source));
                actions.extend(sources.map(|source| Action::Lose(node, fault, source)));
            }
        }
    }

    /// Forgets ages that suffice, quarantines that are over, and the generations of calls that are over, but for what a
    /// property asks.
    pub(super) fn forget_ages(&self, state: &mut State<N, C, K>) {
        let now = state.now;
        for column in &mut state.nodes {
            let old = now + column.ahead - self.spec.window;
            for since in [&mut column.generation.stamp, &mut column.started] {
                *since *= u8::from(*since > old);
            }
            column.ahead *= u8::from(column.is_young());
            for link in &mut column.links {
                link.from *= u8::from(link.from > now);
                for (number, call) in link.calls.iter().enumerate() {
                    let tells = self.spec.compares() && number == 0 && *call != Call::None;
                    link.sent[number] *= u8::from(call.may_run() || tells);
                }
            }
        }
    }
}
