//! What a client does in the model of layouts in change: it locks the key in its groups, and holds or leaves it.

use tower_redlock::protocol::validity;

use crate::layouts::bounds::{GROUPS, Rule, Step};
use crate::layouts::moving::Moving;
use crate::layouts::state::{
    ACQUIRE, CONFIRM, EXTEND, LONG_AGO, Lease, Phase, RAISE, RELEASE, Stage, State,
};
use crate::space::{self, Call, Told, ticks};

impl<const NODES: usize> Moving<NODES> {
    pub(super) fn groups(&self, client: usize) -> &'static [usize] {
        self.bounds.steps[client].groups()
    }

    /// The groups without which a client does not rely on its lock.
    pub(super) fn counted(&self, client: usize) -> &'static [usize] {
        let groups = self.groups(client);
        let last = groups.len().saturating_sub(1);
        match self.bounds.rule {
            Rule::CountsFirstGroup => &groups[..groups.len().min(1)],
            Rule::ForgetsFirstValidity => &groups[last..],
            _ => groups,
        }
    }

    /// The first tick at which a lock that was begun then is no more valid.
    pub(super) fn until(&self, began: u8) -> u8 {
        let ttl = ticks(self.bounds.ttl);
        let valid = |now: &u8| validity::remaining(ttl, ticks(now - began)).is_none();
        (began..).find(valid).expect("every lock ends")
    }

    /// Whether a client relies on its lock.
    pub(super) fn is_valid(&self, state: &State<NODES>, client: usize) -> bool {
        let me = &state.clients[client];
        let mut counted = self.counted(client).iter();
        me.stage == Stage::Holding && counted.all(|group| state.now < me.leases[*group].until)
    }

    /// Whether a client may begin now.
    pub(super) fn may_begin(&self, state: &State<NODES>, client: usize) -> bool {
        let steps = &self.bounds.steps;
        // Clients of one step are equal: they begin in their order.
        let before = (0..client)
            .rev()
            .find(|other| steps[*other] == steps[client]);
        if before.is_some_and(|before| state.clients[before].stage == Stage::Idle) {
            return false;
        }
        match steps[client] {
            Step::Absent => false,
            Step::Old => state.ended == 0,
            Step::New => self.bounds.wait.is_none() || state.ended == LONG_AGO,
            Step::Both | Step::Reversed => true,
        }
    }

    /// Begins the acquisition in a group.
    pub(super) fn begin(&self, state: &mut State<NODES>, client: usize, group: usize, ahead: u8) {
        let me = &mut state.clients[client];
        let earlier = me.leases.iter().map(|lease| lease.token).max();
        let is_by_clock = self.bounds.rule.proposes_its_clock();
        let proposal = earlier.filter(|token| *token > 0 && !is_by_clock);
        me.stage = me.stage.max(Stage::Locking);
        me.leases[group] = Lease {
            phase: Phase::Acquiring,
            began: state.now,
            round: self.rounds[group].begin(None),
            proposal: proposal.unwrap_or(state.now + ahead),
            ..Lease::default()
        };
        self.send(state, client, group, ACQUIRE);
    }

    /// Takes the answers that make a round act.
    pub(super) fn decide(
        &self,
        state: &mut State<NODES>,
        client: usize,
        group: usize,
        log: &[Told],
    ) {
        let mut lease = state.clients[client].leases[group];
        let mut step = space::Step::Wait;
        let first = self.members(group).start;
        for told in log {
            (lease.round, step) = self.rounds[group].tell(lease.round, *told);
            if lease.phase == Phase::Acquiring {
                let column = &mut state.nodes[first + usize::from(told.node)];
                column.calls[client][usize::from(told.phase)] = Call::None;
            }
        }
        match step {
            space::Step::Confirm(target) => {
                let phase = usize::from(self.rounds[group].phase(lease.round));
                lease.targets[phase - CONFIRM] = target;
                state.clients[client].leases[group] = lease;
                let nodes = self.rounds[group].unconfirmed(lease.round);
                for node in self.members(group) {
                    let calls = &mut state.nodes[node].calls[client];
                    // Answers to an earlier phase do not count.
                    calls[CONFIRM..phase].iter_mut().for_each(Call::deafen);
                    if nodes >> (node - first) & 1 == 1 {
                        calls[phase] = Call::Sent;
                    }
                }
                return;
            }
            space::Step::Granted(token) => {
                lease.token = token;
                lease.until = self.until(lease.began);
            }
            space::Step::Extended => {
                let end = self.until(lease.extended_at);
                // A lock whose validity is over is lost, whatever is answered then.
                if state.now < lease.until {
                    lease.until = lease.until.max(end);
                }
                if lease.phase == Phase::Raising {
                    lease.token = lease.raised;
                }
            }
            space::Step::Wait | space::Step::Over => return,
        }
        lease.phase = Phase::Had;
        state.clients[client].leases[group] = lease;
        self.deafen(state, client, group);
        if state.clients[client].stage == Stage::Locking {
            self.hold_if_complete(state, client);
        }
    }

    /// The group that a client locks next, as soon as it has all before.
    pub(super) fn next_group(&self, state: &State<NODES>, client: usize) -> Option<usize> {
        let leases = &state.clients[client].leases;
        let mut groups = self.groups(client).iter();
        let next = groups.find(|group| !leases[**group].is_had())?;
        (leases[*next].phase == Phase::None).then_some(*next)
    }

    /// The group that a client has to raise, and the token, once it has all groups.
    pub(super) fn to_raise(&self, state: &State<NODES>, client: usize) -> Option<(usize, u8)> {
        let leases = &state.clients[client].leases;
        let groups = self.groups(client);
        let token = leases[*groups.last()?].token;
        let is_complete = groups.iter().all(|group| leases[*group].is_had());
        let is_lower = |group: &&usize| leases[**group].token < token;
        let lower = *groups.iter().find(is_lower)?;
        (self.bounds.rule.raises() && is_complete).then_some((lower, token))
    }

    /// Begins to raise a group to this token. An extension that is under way there is given up.
    pub(super) fn raise(&self, state: &mut State<NODES>, client: usize, group: usize, token: u8) {
        self.deafen(state, client, group);
        let lease = &mut state.clients[client].leases[group];
        lease.phase = Phase::Raising;
        lease.raised = token;
        lease.extended_at = state.now;
        lease.round = self.rounds[group].begin(Some(token));
        self.send(state, client, group, RAISE);
    }

    /// Begins an extension in one group.
    pub(super) fn extend(&self, state: &mut State<NODES>, client: usize, group: usize) {
        state.extensions -= 1;
        let lease = &mut state.clients[client].leases[group];
        lease.phase = Phase::Extending;
        lease.extended = lease.token;
        lease.extended_at = state.now;
        lease.round = self.rounds[group].begin(Some(lease.token));
        self.send(state, client, group, EXTEND);
    }

    /// Releases the lock in all groups, or gives it up before it is there.
    pub(super) fn release(&self, state: &mut State<NODES>, client: usize, is_refused: bool) {
        let stage = if is_refused {
            Stage::Refused
        } else {
            Stage::Gone
        };
        self.leave(state, client, stage);
        for group in self.groups(client) {
            self.send(state, client, *group, RELEASE);
            self.deafen(state, client, *group);
        }
    }

    /// Ends what a client has under way, and its reliance on its lock.
    pub(super) fn leave(&self, state: &mut State<NODES>, client: usize, stage: Stage) {
        let me = &mut state.clients[client];
        me.stage = stage;
        for lease in &mut me.leases {
            // What was sent may still run.
            *lease = Lease {
                proposal: lease.proposal,
                targets: lease.targets,
                extended: lease.extended,
                raised: lease.raised,
                ..Lease::default()
            };
        }
        for group in 0..GROUPS {
            self.deafen(state, client, group);
        }
    }

    /// Begins to hold the lock once all that it takes is there.
    fn hold_if_complete(&self, state: &mut State<NODES>, client: usize) {
        let (rule, groups) = (self.bounds.rule, self.groups(client));
        let leases = state.clients[client].leases;
        if rule == Rule::CountsFirstGroup {
            for group in &groups[1..] {
                self.begin(state, client, *group, 0);
                state.clients[client].leases[*group].phase = Phase::None;
                self.deafen(state, client, *group);
            }
        } else if self.next_group(state, client).is_some()
            || groups.iter().any(|group| !leases[*group].is_had())
            || self.to_raise(state, client).is_some()
        {
            return;
        }
        let highest = groups.iter().map(|group| leases[*group].token).max();
        let token = match rule {
            Rule::RaisesAlone => highest.unwrap_or_default(),
            _ => leases[groups[0]].token,
        };
        state.clients[client].stage = Stage::Holding;
        let is_behind = |highest: &u8| token <= *highest;
        state.is_behind_any |= state.highest.iter().any(is_behind);
        for group in groups {
            let highest = &mut state.highest[*group];
            state.is_behind_its_group |= is_behind(highest);
            *highest = token.max(*highest);
        }
    }
}
