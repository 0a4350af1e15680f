//! Requests for one key whose outcome is recorded.
//!
//! What a lease asks for once it is decided, `TOPUP` and the release, may run at any later moment, and again. Another
//! lease of a fresh owner, which never executes, repairs for one that asks for it, as the driver has it. A request that is
//! undecided or refused comes again as any other request does, with an owner of its own.
//!
//! Three more reductions. A node that has a record answers with it whatever it is asked; once that is seen to be so, what
//! else the node has is forgotten. Between the grant and the beginning, it makes no difference what a client has read; so
//! that is one step, unless [`May::Wait`] asks for two: then a client that may execute hears one answer after the
//! other until it begins. And a release that does no more than an expiry would is left to the expiry. Extensions but that
//! of a late beginning are left out: they change neither who was granted the key last nor what is recorded.

use std::sync::Arc;

use tower_redlock::protocol::lease::{Decided, Effect, Event, Input, Lease, LeaseRequest};
use tower_redlock::protocol::message::{Op, Reply};

use crate::leases::{Call, Heard, Step, Told, small};
use crate::requests::{executed, of_answer};
use crate::space::RETENTION;
use crate::spec::{May, Proposals, Variant};
use crate::world::promises::Broken;
use crate::world::{Deed, I2, I2_DECIDED, I4, KEPT, KNOWN, Stage, State, World};

/// How long a node may take, in ticks. Only what takes longer counts in the time of a lease.
pub(super) const NODE_TIMEOUT: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Ending {
    Recorded,
    /// As the owner that it was, after a look that found its record at a minority.
    RecordedAgain,
    Replayed,
    Repaired,
    /// It executed, and answered what another recorded.
    FoundAnother,
    /// It executed, could not record, and found that a majority has its record all the same.
    FoundItsOwn,
    /// It executed, and answered that with the remark that it is not recorded.
    NotRecorded,
    Undecided,
    Conflicting,
    Unknown,
    Refused,
    /// It went without an outcome.
    Left,
    /// It executed, and went because that had no effect.
    LeftWithoutEffect,
}

/// What a lease asked for last, of what tells endings apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Asked {
    #[default]
    Lock,
    Record,
    Look,
    RecordAgain,
}

/// What a client knows and has done, apart from its lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Execution {
    asked: Asked,
    pub(super) ending: Option<Ending>,
    /// Whose outcome its caller was told, if that was recorded.
    pub(super) answer: Option<u8>,
    /// Whose outcome is to be read from a node.
    reads: Option<u8>,
    pub(super) executed: bool,
    /// It began late, and lives later than the others.
    pub(super) is_late: bool,
    /// It might have begun to execute, as a step of its own.
    pub(super) granted: bool,
    /// Another lease repairs for it.
    is_repaired: bool,
    /// What it breaks if it executes.
    breaks: Broken,
    /// A lock of it vanished before it was decided, at a node without a record.
    pub(super) broken: bool,
}

impl Execution {
    pub(super) fn is_decided(&self) -> bool {
        self.ending.is_some() && (!self.executed || self.answer.is_some())
    }
}

impl<const N: usize, const C: usize, const K: usize> State<N, C, K> {
    pub(super) fn new_execution(&self) -> Execution {
        let mut new = Execution::default();
        let is_answered = self.executions().any(|other| other.answer.is_some());
        new.breaks.note(I2, is_answered);
        new.breaks.note(I2_DECIDED, self.is_decided);
        new
    }

    /// Each call of a client.
    pub(super) fn calls(&mut self, client: usize) -> impl Iterator<Item = &mut Call> {
        let nodes = self.nodes.iter_mut();
        nodes.flat_map(move |node| &mut node.links[client].calls)
    }

    /// Has a request that nothing follows from run whenever its nodes like, or lets it get lost.
    fn stand(&mut self, me: usize, call: usize, may_run: bool) {
        for node in &mut self.nodes {
            let call = &mut node.links[me].calls[call];
            let stands = may_run && *call == Call::Sent;
            *call = if stands { Call::Standing } else { Call::None };
        }
    }
}

impl<const N: usize, const C: usize, const K: usize> World<N, C, K> {
    /// The request for what only a wrong variant asks for.
    const WRONG: usize = K - 1;

    /// The client that repairs for one that executed and could not record.
    pub(super) fn repairer(&self) -> usize {
        self.spec.clients.len() - 1
    }

    pub(super) fn only_repairs(&self, client: usize) -> bool {
        self.spec.has(May::Execute) && client == self.repairer()
    }

    pub(super) fn on_execution(&self, state: &mut State<N, C, K>, me: usize, event: &Event) {
        let execution = &mut state.clients[me].execution;
        match event {
            Event::Granted { .. } => execution.granted = true,
            Event::Refused(_) => execution.ending = Some(Ending::Refused),
            Event::Unread(stored) => execution.reads = Some(executed(stored)),
            Event::Lost(_) => self.leave(state, me, Effect::NotBegun),
            Event::TooLate { .. } => unreachable!("locks are valid for long"),
            Event::Extended { .. }
            | Event::NotExtended { .. }
            | Event::Released(_)
            | Event::Settled => {}
            Event::Begun => self.execute(state, me),
            Event::Decided(decided) => {
                execution.ending = Some(match decided {
                    Decided::Recorded(record) => {
                        execution.answer = Some(executed(record));
                        match execution.asked {
                            Asked::Lock => Ending::Replayed,
                            _ => Ending::Repaired,
                        }
                    }
                    Decided::Undecided => Ending::Undecided,
                    Decided::Conflicting => Ending::Conflicting,
                    Decided::Unknown => Ending::Unknown,
                    Decided::OtherRequest => unreachable!("all ask for the same"),
                });
                let unknown = execution.ending == Some(Ending::Unknown);
                let too_late = unknown && execution.breaks.has(I2_DECIDED);
                state.broken.note(KNOWN, too_late);
                if self.only_repairs(me) {
                    let first = state.executions().position(|me| me.is_repaired);
                    let first = first.expect("the one that asked for it");
                    state.clients[first].execution.is_repaired = false;
                    let repaired = Input::Repaired(decided.clone());
                    self.handle(state, first, 0, repaired);
                }
            }
            Event::Recorded(record) => {
                execution.answer = record.as_ref().map(executed);
                let is_own = execution.answer.map(usize::from) == Some(me);
                execution.ending = Some(match execution.asked {
                    _ if execution.answer.is_none() => Ending::NotRecorded,
                    _ if !is_own => Ending::FoundAnother,
                    Asked::Look => Ending::FoundItsOwn,
                    Asked::RecordAgain => Ending::RecordedAgain,
                    _ => Ending::Recorded,
                });
            }
            Event::Unrepaired => {
                let repairer = self.repairer();
                let is_idle = state.clients[repairer].stage == Stage::Idle;
                if self.spec.has(May::Repair) && is_idle {
                    execution.is_repaired = true;
                    let Proposals::UpTo(most) = self.spec.proposals else {
                        unreachable!("executions have tokens");
                    };
                    self.begin(state, repairer, 0, most);
                } else {
                    let repaired = Input::Repaired(Decided::Undecided);
                    self.handle(state, me, 0, repaired);
                }
            }
        }
    }

    fn execute(&self, state: &mut State<N, C, K>, me: usize) {
        let execution = &mut state.clients[me].execution;
        execution.breaks.note(I4, self.only_repairs(me));
        execution.executed = true;
        state.broken.0 |= execution.breaks.0;
        if !self.spec.has(May::Leave) {
            self.record(state, me);
        }
    }

    pub(super) fn record(&self, state: &mut State<N, C, K>, me: usize) {
        let record = Input::Record {
            record: self.nodes.record(small(me)),
            retention: RETENTION,
        };
        self.handle(state, me, 0, record);
    }

    /// What is to be read of a record is read, or cannot be.
    pub(super) fn read(&self, state: &mut State<N, C, K>, me: usize, is_found: bool) {
        let read = state.clients[me].execution.reads.take();
        let read = read.filter(|_| is_found).map(|of| self.nodes.record(of));
        self.handle(state, me, 0, Input::Read(read));
    }

    pub(super) fn leave(&self, state: &mut State<N, C, K>, me: usize, effect: Effect) {
        let client = &mut state.clients[me];
        let is_without =
            effect == Effect::WithoutEffect && self.spec.variant != Variant::ReleasesWithoutRecord;
        client.execution.executed &= !is_without;
        client.execution.ending = Some(match is_without {
            true => Ending::LeftWithoutEffect,
            false => Ending::Left,
        });
        self.drop_lease(state, me, 0, effect);
    }

    pub(super) fn on_request(&self, state: &mut State<N, C, K>, me: usize, request: &LeaseRequest) {
        let call = request.number as usize - 1;
        let variant = self.spec.variant;
        let client = &mut state.clients[me];
        let asked = &mut client.asked[0];
        let execution = &mut client.execution;
        match &request.op {
            Op::Record { record, .. } => {
                let again = execution.asked == Asked::Look;
                execution.asked = if again {
                    Asked::RecordAgain
                } else {
                    Asked::Record
                };
                let top_up = self.nodes.top_up(executed(record));
                let top_up = self.nodes.words.number(&top_up);
                if variant == Variant::RecordsWithoutOwnerCheck
                    || again && variant == Variant::RecordsAgainWithoutOwnerCheck
                {
                    asked[call] = top_up;
                }
                if variant == Variant::TopsUpEarly {
                    asked[Self::WRONG] = top_up;
                    for node in &mut state.nodes {
                        node.links[me].calls[Self::WRONG] = Call::Standing;
                    }
                }
            }
            Op::Look => execution.asked = Asked::Look,
            Op::TopUp { record, .. } => {
                // However long it took.
                let top_up = self.nodes.top_up(executed(record));
                asked[call] = self.nodes.words.number(&top_up);
                state.stand(me, call, self.spec.has(May::TopUp));
            }
            Op::Release | Op::ReleaseExecuted => {
                let is_unrecorded = execution.executed && execution.answer.is_none();
                state.broken.note(KEPT, is_unrecorded);
                let expires = !self.spec.has(May::KeepLocks) && execution.is_decided();
                let more = self.spec.has(May::Intend) && request.op == Op::Release;
                state.stand(me, call, more || !expires);
            }
            _ => {}
        }
    }

    /// Lets the time pass that a decided lease waits for its nodes. One that hears more of them asks fewer for something,
    /// which is as if those requests got lost.
    pub(super) fn settle(&self, state: &mut State<N, C, K>, me: usize) {
        if state.clients[me].execution.ending.is_none() {
            return;
        }
        let mut now = state.clock(me);
        while self.leases[0].is(state.lease(me, 0), |lease| !lease.is_settled()) {
            now += 1;
            let record = state.clients[me].execution.reads.take();
            let read = record.map(|of| Input::Read(Some(self.nodes.record(of))));
            let input = read.unwrap_or(Input::TimedOut);
            let step = self.leases[0].handle(state.lease(me, 0), input, now);
            self.follow(state, me, 0, &step);
        }
        if std::mem::take(&mut state.clients[me].locks[0].lease) != 0 {
            state.calls(me).for_each(Call::deafen);
        }
    }

    /// An answer that a client may be told, as a wrong variant has it.
    pub(super) fn as_variant(&self, state: &State<N, C, K>, me: usize, told: Told) -> Vec<Told> {
        let everywhere = || (0..).take(N).map(|node| Told { node, ..told }).collect();
        let record = || self.record_in(told.heard);
        let acquires = || self.leases[0].is(state.lease(me, 0), Lease::is_acquiring);
        match self.spec.variant {
            Variant::IgnoresRecords if record().is_some() => {
                let reply = match told.number {
                    1 => Reply::Held {
                        expires_in: None,
                        shown: None,
                    },
                    _ => Reply::Lost,
                };
                let heard = self.nodes.words.hear(reply);
                vec![Told { heard, ..told }]
            }
            Variant::ReplaysMinority if record().is_some() && acquires() => everywhere(),
            Variant::AnswersAfterMinority
                if record().map(usize::from) == Some(me) && !acquires() =>
            {
                everywhere()
            }
            _ => vec![told],
        }
    }

    /// Whose record an answer has.
    fn record_in(&self, heard: Heard) -> Option<u8> {
        of_answer(&self.nodes.words.answer(heard))
    }

    /// What a client with a lease may do.
    pub(super) fn of_execution(&self, state: &State<N, C, K>, client: usize) -> Vec<Deed> {
        let mut deeds = Vec::new();
        let me = &state.clients[client];
        let execution = &me.execution;
        let lease = me.locks[0].lease;
        let (holds, is_unused, extends) = self.leases[0].of(lease, |lease| {
            (lease.is_holding(), lease.is_unused(), lease.is_extending())
        });
        let answers = self.answers(state, client, 0);
        let now = state.clock(client);
        if holds && is_unused {
            for told in answers {
                let step = self.leases[0].tell(lease, told, now);
                deeds.push(Deed::Decide(0, self.leases[0].after(&step, vec![told])));
            }
            if !extends {
                let ways = [false, true].into_iter();
                let ways = ways.take(1 + usize::from(self.spec.has(May::BeginLate)));
                let ways = ways.filter(|is_late| *is_late || !execution.is_late);
                deeds.extend(ways.map(Deed::Start));
            }
        } else if !holds {
            let begins = !self.spec.has(May::Wait);
            let found = self.leases[0].decisions(lease, answers, now, begins);
            let found = self.without_equals(&found, lease).into_iter();
            deeds.extend(found.map(|step| Deed::Decide(0, step)));
        }
        if let Some(of) = execution.reads {
            let ways = [false, true].into_iter();
            let ways = ways.filter(|is_found| !is_found || self.copies(state, of) > 0);
            deeds.extend(ways.map(Deed::Read));
        }
        if !self.spec.has(May::Leave) || execution.ending.is_some() || self.only_repairs(client) {
            return deeds;
        }
        let acquires = self.leases[0].of(lease, Lease::is_acquiring);
        let executes = holds && !is_unused;
        let effects: &[Effect] = match (executes, self.spec.variant) {
            _ if !holds && !acquires => &[],
            (true, Variant::TakesIntentBack) => &[Effect::NotBegun],
            (true, _) => &[Effect::Unknown, Effect::WithoutEffect],
            (false, _) => &[Effect::Unknown],
        };
        deeds.extend(effects.iter().copied().map(Deed::Leave));
        if executes {
            deeds.push(Deed::Record);
        }
        deeds
    }

    /// Where a lease begins something new, what it has read by then says only which nodes it need not release, or may
    /// still be read. So the least will do.
    fn without_equals(&self, found: &[Arc<Step>], before: u32) -> Vec<Arc<Step>> {
        let mut steps = found.to_vec();
        let acquires = self.leases[0].of(before, Lease::is_acquiring);
        steps.sort_by_key(|step| step.read.len());
        let mut kept: Vec<Arc<Step>> = Vec::new();
        for step in steps {
            let op = step.request.as_ref().map(|request| &request.op);
            let is_new = match op {
                Some(Op::Confirm { .. }) => false,
                Some(Op::Record { .. }) => !acquires,
                _ => true,
            };
            let is_same = |old: &Arc<Step>| old.op == step.op && old.events == step.events;
            if !is_new || !kept.iter().any(is_same) {
                kept.push(step);
            }
        }
        kept
    }

    /// A client reads answers, or a timer ends.
    pub(super) fn decide(&self, state: &mut State<N, C, K>, me: usize, group: usize, step: &Step) {
        let is_deaf = self.spec.variant == Variant::DeafOnceGranted
            && self.leases[group].is(state.lease(me, group), Lease::is_holding);
        let nodes = &mut state.nodes[self.members(group)];
        for told in &step.read {
            let call = &mut nodes[usize::from(told.node)].links[me].calls[told.call()];
            // What the node said, also if a wrong variant has it told otherwise.
            if let Call::Ran(heard) = *call {
                let is_told = told.heard != Heard::FAILED && self.record_in(heard).is_some();
                state.clients[me].execution.breaks.note(I4, is_told);
            }
            if is_deaf {
                call.deafen();
            }
        }
        if !is_deaf {
            self.take(state, me, group, step);
        }
    }

    /// Forgets what is known for the sake of an execution that is over.
    pub(super) fn forget_execution(&self, state: &mut State<N, C, K>, client: usize) {
        let me = &mut state.clients[client];
        let execution = &mut me.execution;
        if me.locks[0].lease == 0 {
            execution.asked = Asked::default();
            execution.is_late = false;
            execution.broken &= execution.executed;
        }
        let is_open = execution.ending.is_none() && !execution.executed;
        if !is_open || self.only_repairs(client) {
            execution.breaks = Broken::default();
        }
    }

    pub(super) fn copies(&self, state: &State<N, C, K>, of: u8) -> usize {
        let has = |store: &u32| self.nodes.kept(*store).record == Some(of);
        state.stores().filter(has).count()
    }

    /// How many nodes have a record, per client.
    pub(super) fn all_copies(&self, state: &State<N, C, K>) -> impl Iterator<Item = usize> {
        let clients = (0_u8..).take(self.repairer());
        clients.map(|of| self.copies(state, of))
    }

    pub(super) fn is_decided(&self, state: &State<N, C, K>) -> bool {
        let enough = (N / 2 + 1).max(self.spec.copies);
        self.all_copies(state).any(|copies| copies >= enough)
    }

    /// Whether a node may lose its memory: of executions, once a record is decided.
    pub(super) fn may_forget(&self, state: &State<N, C, K>) -> bool {
        !self.spec.has(May::Execute) || self.is_decided(state)
    }
}
