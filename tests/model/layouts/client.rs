//! What a client does in the model of layouts in change: it locks the key in its groups, and holds or leaves it.

use tower_redlock::protocol::lease::{Effect, Event, Input, Lease, LeaseSpec};
use tower_redlock::protocol::validity;

use crate::layouts::bounds::{GROUPS, Rule, Step};
use crate::layouts::moving::{LONG_AGO, Lock, Moving, Stage, State, valid_until};
use crate::leases::{self, Call, Heard, Told, spec};
use crate::space::{acquire, ticks};

impl<const NODES: usize> Moving<NODES> {
    pub(super) fn groups(&self, client: usize) -> &'static [usize] {
        self.bounds.steps[client].groups()
    }

    /// The groups without which a client does not rely on its lock.
    fn counted(&self, client: usize) -> &'static [usize] {
        let groups = self.groups(client);
        let last = groups.len().saturating_sub(1);
        match self.bounds.rule {
            Rule::CountsFirstGroup => &groups[..groups.len().min(1)],
            Rule::ForgetsFirstValidity => &groups[last..],
            _ => groups,
        }
    }

    /// Whether a client relies on its lock.
    pub(super) fn is_valid(&self, state: &State<NODES>, client: usize) -> bool {
        let me = &state.clients[client];
        let mut counted = self.counted(client).iter();
        me.stage == Stage::Holding && counted.all(|group| state.now < me.locks[*group].until)
    }

    /// Whether the lock of a client is not valid any more, or will not be.
    pub(super) fn is_late(&self, state: &State<NODES>, client: usize) -> bool {
        let me = &state.clients[client];
        let is_late = |group: &usize| {
            let lock = &me.locks[*group];
            let counts = lock.token == 0 || self.counted(client).contains(group);
            lock.lease.lease > 0 && counts && state.now >= lock.until
        };
        let is_live = matches!(me.stage, Stage::Locking | Stage::Holding);
        is_live && self.groups(client).iter().any(is_late)
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
        let earlier = me.locks.iter().map(|lock| lock.token).max();
        let is_by_clock = self.bounds.rule.proposes_its_clock();
        let proposal = earlier.filter(|token| *token > 0 && !is_by_clock);
        if me.stage == Stage::Idle {
            me.stage = Stage::Locking;
        }
        let (ttl, now) = (self.bounds.ttl, state.now);
        let is_late = |at: &u8| validity::remaining(ticks(ttl), ticks(at - now)).is_none();
        me.locks[group] = Lock {
            began: now,
            until: (now..).find(is_late).expect("every lock ends"),
            ..Lock::default()
        };
        let spec = LeaseSpec {
            is_partial: self.groups(client).len() > 1,
            // A lease only passes its proposal on, so all are told the same one, and the request has the other.
            ..spec(ttl, Some(1))
        };
        let step = self.leases[group].begin(&spec, now);
        self.take(state, client, group, &step);
        let proposal = proposal.unwrap_or(now + ahead);
        let acquire = acquire(Some(proposal.into()), ticks(ttl));
        let acquire = self.nodes.words.number(&acquire);
        state.clients[client].locks[group].lease.asked[0] = acquire;
    }

    /// Goes on as the lease of a client in a group says.
    pub(super) fn take(
        &self,
        state: &mut State<NODES>,
        client: usize,
        group: usize,
        step: &leases::Step,
    ) {
        let columns = &mut state.nodes[self.members(group)];
        let links = columns.iter_mut().map(|column| &mut column.calls[client]);
        let me = &mut state.clients[client];
        self.leases[group].follow(step, &mut me.locks[group].lease, links);
        let mut gone = None;
        for event in &step.events {
            let lock = &mut me.locks[group];
            lock.until = valid_until(event).unwrap_or(lock.until);
            match event {
                Event::Granted { number, .. } => {
                    lock.token = u8::try_from(*number).expect("numbers of a model are small");
                }
                Event::Extended { .. } if lock.raised > 0 => {
                    lock.token = std::mem::take(&mut lock.raised);
                }
                Event::NotExtended { .. } if lock.raised > 0 => gone = Some(Stage::Gone),
                Event::Lost(_) | Event::TooLate { .. } => gone = Some(Stage::Gone),
                Event::Refused(_) => {
                    let is_second = me.locks.iter().any(|lock| lock.token > 0);
                    gone = Some(if is_second {
                        Stage::Refused
                    } else {
                        Stage::Gone
                    });
                }
                _ => {}
            }
        }
        match gone {
            Some(stage) => self.give_up(state, client, stage),
            None if state.clients[client].stage == Stage::Locking => {
                self.hold_if_complete(state, client);
            }
            None => {}
        }
    }

    /// The group that a client locks next, as soon as it has all before.
    pub(super) fn next_group(&self, state: &State<NODES>, client: usize) -> Option<usize> {
        let locks = &state.clients[client].locks;
        let mut groups = self.groups(client).iter();
        let next = groups.find(|group| locks[**group].token == 0)?;
        (locks[*next].lease.lease == 0).then_some(*next)
    }

    /// The group that a client has to raise, and the token, once it has all groups.
    pub(super) fn to_raise(&self, state: &State<NODES>, client: usize) -> Option<(usize, u8)> {
        let locks = &state.clients[client].locks;
        let groups = self.groups(client);
        let token = locks[*groups.last()?].token;
        let is_complete = groups.iter().all(|group| locks[*group].token > 0);
        let is_lower = |group: &&usize| locks[**group].token < token;
        let lower = *groups.iter().find(is_lower)?;
        (self.bounds.rule.raises() && is_complete).then_some((lower, token))
    }

    /// Begins to raise a group to this token. An extension that is under way there is not waited for.
    pub(super) fn raise(&self, state: &mut State<NODES>, client: usize, group: usize, token: u8) {
        for node in (0..).take(self.members(group).len()) {
            let lease = state.clients[client].locks[group].lease.lease;
            if self.leases[group].of(lease, Lease::is_extending) {
                let number = self.leases[group].of(lease, Lease::number);
                let told = Told {
                    node,
                    number: u8::try_from(number).expect("few requests"),
                    heard: Heard::FAILED,
                };
                let step = self.leases[group].tell(lease, told, state.now);
                self.take(state, client, group, &step);
            }
        }
        state.clients[client].locks[group].raised = token;
        self.extend(state, client, group, Some(token));
    }

    /// Begins an extension in one group.
    pub(super) fn extend(
        &self,
        state: &mut State<NODES>,
        client: usize,
        group: usize,
        token: Option<u8>,
    ) {
        let lease = state.clients[client].locks[group].lease.lease;
        let token = token.map(u64::from);
        let input = Input::Extend { ttl: None, token };
        let step = self.leases[group].handle(lease, input, state.now);
        self.take(state, client, group, &step);
    }

    /// Releases the lock in all groups, or gives it up before it is there.
    pub(super) fn give_up(&self, state: &mut State<NODES>, client: usize, stage: Stage) {
        let keeps = self.bounds.rule == Rule::KeepsFirstGroup && stage == Stage::Refused;
        for group in 0..GROUPS {
            let lock = &mut state.clients[client].locks[group];
            let lease = lock.lease.lease;
            if lease > 0 && !(keeps && lock.token > 0) {
                let input = match self.leases[group].of(lease, Lease::is_acquiring) {
                    true => Input::Abandoned,
                    false => Input::Dropped {
                        publishes: false,
                        effect: Effect::default(),
                    },
                };
                let step = self.leases[group].handle(lease, input, state.now);
                let columns = &mut state.nodes[self.members(group)];
                let links = columns.iter_mut().map(|column| &mut column.calls[client]);
                self.leases[group].follow(&step, &mut lock.lease, links);
            }
            for column in &mut state.nodes[self.members(group)] {
                for call in &mut column.calls[client] {
                    match call {
                        // Only the answers to a release still count.
                        Call::Sent if !keeps => *call = Call::Standing,
                        call => call.deafen(),
                    }
                }
            }
            *lock = Lock {
                lease: leases::Client {
                    lease: 0,
                    ..lock.lease
                },
                ..Lock::default()
            };
        }
        state.clients[client].stage = stage;
    }

    /// Begins to hold the lock once all that it takes is there.
    fn hold_if_complete(&self, state: &mut State<NODES>, client: usize) {
        let (rule, groups) = (self.bounds.rule, self.groups(client));
        let locks = state.clients[client].locks;
        if rule == Rule::CountsFirstGroup {
            if locks[groups[0]].token == 0 {
                return;
            }
            state.clients[client].stage = Stage::Holding;
            for group in &groups[1..] {
                self.begin(state, client, *group, 0);
            }
        } else if self.next_group(state, client).is_some()
            || groups.iter().any(|group| locks[*group].token == 0)
            || self.to_raise(state, client).is_some()
        {
            return;
        }
        let highest = groups.iter().map(|group| locks[*group].token).max();
        let token = match rule {
            Rule::RaisesAlone => highest.unwrap_or_default(),
            _ => locks[groups[0]].token,
        };
        state.clients[client].stage = Stage::Holding;
        let is_behind = |highest: &u8| token <= *highest;
        state.is_behind_any |= state.highest.iter().any(is_behind);
        for group in groups {
            let highest = &mut state.highest[*group];
            state.is_behind_its_group |= is_behind(highest);
            *highest = token.max(*highest);
            if state.extensions == 0 {
                // From now on it can only be released.
                let lease = &mut state.clients[client].locks[*group].lease.lease;
                *lease = self.leases[*group].hastened(*lease, 0);
            }
        }
    }
}
