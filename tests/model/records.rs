//! The asynchronous model of requests for one key whose outcome is recorded.
//!
//! Each attempt is a shipped lease. As in `asynchronous`, a lock may vanish at any node at any moment, requests run late
//! or never, answers are read late or never, and clients stop for ever. Besides: what a lease asks for once it is
//! decided, `TOPUP` and the release, may run at any later moment, and again. Another lease of a fresh owner, which never
//! executes, repairs for one that asks for it, as the driver has it. A request that is undecided or refused comes again
//! as any other request does, with an owner of its own.
//!
//! The reductions are those of `asynchronous`, and three more. A node that has a record answers with it whatever it is
//! asked; once that is seen to be so, what else the node has is forgotten. Between the grant and the beginning, it makes
//! no difference what a client has read; so that is one step, unless [`Bounds::begins`] asks for two: then a client that
//! may execute hears one answer after the other until it begins. And a release that does no more than an expiry would
//! is left to the expiry. Extensions but that of a late beginning are left out: they change neither who was granted the
//! key last nor what is recorded.

use std::sync::Arc;

use stateright::{Model, Property};
use tower_redlock::protocol::Quorum;
use tower_redlock::protocol::lease::{Decided, Effect, Event, Input, Lease};
use tower_redlock::protocol::message::{Op, Reply};
use tower_redlock::protocol::round::Answer;

use crate::leases::{BEGIN, Call, Client, Heard, Leases, Step, Told, Words, sorting};
pub(crate) use crate::records::bounds::{Bounds, Variant};
use crate::requests::{
    ATTEMPTS, NODE_TIMEOUT, Nodes, REQUESTS, RETRY, acquire, attempt, executed, of_reply,
};

mod bounds;
pub(crate) mod promises;

/// The most requests of one lease: `ACQUIRE`, three `CONFIRM`s, one before a late beginning, `RECORD`, `LOOK`, `RECORD`
/// again, `TOPUP`, the release.
const CALLS: usize = 10;

/// The request for what only a wrong variant asks for.
const WRONG: usize = CALLS - 1;

/// One node, and everything that is under way to and from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Column {
    store: u32,
    attempts: [[Call; CALLS]; ATTEMPTS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Ending {
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Attempt {
    client: Client<CALLS>,
    asked: Asked,
    ending: Option<Ending>,
    /// Whose outcome its caller was told, if that was recorded.
    answer: Option<u8>,
    /// Whose outcome is to be read from a node.
    reads: Option<u8>,
    executed: bool,
    /// It began late, and lives later than the others.
    is_late: bool,
    /// It might have begun to execute, as a step of its own.
    granted: bool,
    /// Another lease repairs for it.
    is_repaired: bool,
    /// It was told of a record.
    told: bool,
    /// A lock of it vanished before it was decided, at a node without a record.
    broken: bool,
    after_an_answer: bool,
    after_a_decision: bool,
}

impl Attempt {
    fn is_idle(&self) -> bool {
        self.client.lease == 0 && self.ending.is_none()
    }

    fn is_decided(&self) -> bool {
        self.ending.is_some() && (!self.executed || self.answer.is_some())
    }

    /// The ticks of its clock; only what takes longer than a node may take counts.
    fn now(&self) -> u8 {
        if self.is_late { 2 * NODE_TIMEOUT } else { 0 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State<const N: usize> {
    nodes: [Column; N],
    attempts: [Attempt; ATTEMPTS],
    duplicates: u8,
    wipes: u8,
    /// A record was decided.
    decided: bool,
    executed_after_an_answer: bool,
    executed_after_a_decision: bool,
    executed_though_told: bool,
    unknown_after_a_decision: bool,
    released_unrecorded: bool,
}

/// What happens: to a node, or to an attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Wipe(u8),
    Of(u8, Deed),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Deed {
    /// It begins, with this proposal.
    Begin(u8),
    /// A node carries out one of its requests.
    Run {
        node: u8,
        call: u8,
    },
    Duplicate {
        node: u8,
        replaces_answer: bool,
    },
    /// Its lock at a node vanishes.
    Vanish(u8),
    /// Its client reads answers.
    Decide(Arc<Step>),
    /// Its client, which may execute, begins to.
    Start {
        is_late: bool,
    },
    Record,
    /// Its client goes.
    Leave(Effect),
    /// What is to be read is read, or cannot be.
    Read {
        is_found: bool,
    },
}

#[derive(Debug)]
pub(crate) struct Records<const N: usize> {
    bounds: Bounds,
    nodes: Nodes,
    leases: Leases,
    /// What a lock that vanishes is like: the lock goes, what else is there stays.
    vanish: u8,
}

impl<const N: usize> Records<N> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let words = Words::new();
        Self {
            nodes: Nodes::new(&words, bounds.intents, bounds.large),
            leases: Leases::new(&words, N),
            vanish: words.number(&Op::ReleaseExecuted),
            bounds,
        }
    }

    /// The numbers of the attempts that this model may make.
    fn attempts(&self) -> impl Iterator<Item = u8> {
        let requests = self.bounds.requests;
        (0_u8..)
            .zip(0..ATTEMPTS)
            .filter(move |(_, attempt)| *attempt < requests || *attempt == RETRY)
            .map(|(number, _)| number)
    }

    fn begin(&self, state: &mut State<N>, me: usize, proposal: u8) {
        let answered = state.attempts.iter().any(|other| other.answer.is_some());
        state.attempts[me] = Attempt {
            after_an_answer: answered,
            after_a_decision: state.decided,
            ..Attempt::default()
        };
        // A lease only passes its proposal on, so all are told the same one, and the request has the other.
        let step = self.leases.begin(&attempt(me != RETRY), 0);
        self.take(state, me, &step);
        let acquire = self.leases.words.number(&acquire(proposal.into()));
        state.attempts[me].client.asked[0] = acquire;
    }

    fn handle(&self, state: &mut State<N>, me: usize, input: Input) {
        let Attempt { client, .. } = state.attempts[me];
        let step = self
            .leases
            .handle(client.lease, input, state.attempts[me].now());
        self.take(state, me, &step);
    }

    /// Goes on as the lease of an attempt says.
    fn take(&self, state: &mut State<N>, me: usize, step: &Step) {
        self.follow(state, me, step);
        if state.attempts[me].ending.is_some() {
            self.settle(state, me);
        }
    }

    fn follow(&self, state: &mut State<N>, me: usize, step: &Step) {
        let links = state.nodes.iter_mut().map(|node| &mut node.attempts[me]);
        self.leases
            .follow(step, &mut state.attempts[me].client, links);
        for event in &step.events {
            self.on_event(state, me, event);
        }
        if let Some(request) = &step.request {
            self.on_request(state, me, &request.op, request.number as usize - 1);
        }
    }

    fn on_event(&self, state: &mut State<N>, me: usize, event: &Event) {
        match event {
            Event::Granted { .. } => state.attempts[me].granted = true,
            Event::Refused(_) => state.attempts[me].ending = Some(Ending::Refused),
            Event::Unread(stored) => state.attempts[me].reads = Some(executed(stored)),
            Event::Lost(_) => self.leave(state, me, Effect::NotBegun),
            Event::TooLate { .. } => unreachable!("locks are valid for long"),
            Event::Extended { .. }
            | Event::NotExtended { .. }
            | Event::Released(_)
            | Event::Settled => {}
            Event::Begun => self.execute(state, me),
            Event::Decided(decided) => {
                let attempt = &mut state.attempts[me];
                attempt.ending = Some(match decided {
                    Decided::Recorded(record) => {
                        attempt.answer = Some(executed(record));
                        match attempt.asked {
                            Asked::Lock => Ending::Replayed,
                            _ => Ending::Repaired,
                        }
                    }
                    Decided::Undecided => Ending::Undecided,
                    Decided::Conflicting => Ending::Conflicting,
                    Decided::Unknown => Ending::Unknown,
                    Decided::OtherRequest => unreachable!("all ask for the same"),
                });
                let unknown = attempt.ending == Some(Ending::Unknown);
                state.unknown_after_a_decision |= unknown && attempt.after_a_decision;
                if me == RETRY {
                    let mut attempts = state.attempts.iter();
                    let first = attempts.position(|attempt| attempt.is_repaired);
                    let first = first.expect("the one that asked for it");
                    state.attempts[first].is_repaired = false;
                    self.handle(state, first, Input::Repaired(decided.clone()));
                }
            }
            Event::Recorded(record) => {
                let attempt = &mut state.attempts[me];
                attempt.answer = record.as_ref().map(executed);
                let own = u8::try_from(me).expect("few attempts");
                attempt.ending = Some(match (attempt.answer, attempt.asked) {
                    (None, _) => Ending::NotRecorded,
                    (Some(of), _) if of != own => Ending::FoundAnother,
                    (Some(_), Asked::Look) => Ending::FoundItsOwn,
                    (Some(_), Asked::RecordAgain) => Ending::RecordedAgain,
                    (Some(_), _) => Ending::Recorded,
                });
            }
            Event::Unrepaired if self.bounds.retry && state.attempts[RETRY].is_idle() => {
                state.attempts[me].is_repaired = true;
                self.begin(state, RETRY, self.bounds.proposals);
            }
            Event::Unrepaired => {
                self.handle(state, me, Input::Repaired(Decided::Undecided));
            }
        }
    }

    fn execute(&self, state: &mut State<N>, me: usize) {
        let attempt = &mut state.attempts[me];
        state.executed_after_an_answer |= attempt.after_an_answer;
        state.executed_after_a_decision |= attempt.after_a_decision;
        state.executed_though_told |= attempt.told || me == RETRY;
        attempt.executed = true;
        if !self.bounds.leaves {
            self.record(state, me);
        }
    }

    fn record(&self, state: &mut State<N>, me: usize) {
        let of = u8::try_from(me).expect("few attempts");
        self.handle(state, me, self.nodes.outcome(of));
    }

    fn leave(&self, state: &mut State<N>, me: usize, effect: Effect) {
        let attempt = &mut state.attempts[me];
        let lies = matches!(
            self.bounds.variant,
            Variant::ReleasesWithoutRecord | Variant::TakesIntentBack
        );
        let is_without = effect == Effect::WithoutEffect && !lies;
        attempt.executed &= !is_without;
        attempt.ending = Some(match is_without {
            true => Ending::LeftWithoutEffect,
            false => Ending::Left,
        });
        let lease = attempt.client.lease;
        let input = match self.leases.of(lease, Lease::is_acquiring) {
            true => Input::Abandoned,
            false => Input::Dropped {
                publishes: false,
                effect,
            },
        };
        self.handle(state, me, input);
    }

    fn on_request(&self, state: &mut State<N>, me: usize, op: &Op, call: usize) {
        let variant = self.bounds.variant;
        let attempt = &mut state.attempts[me];
        match op {
            Op::Record { record, .. } => {
                let again = attempt.asked == Asked::Look;
                attempt.asked = match again {
                    true => Asked::RecordAgain,
                    false => Asked::Record,
                };
                let top_up = self.nodes.top_up(executed(record));
                let top_up = self.leases.words.number(&top_up);
                if variant == Variant::RecordsWithoutOwnerCheck
                    || again && variant == Variant::RecordsAgainWithoutOwnerCheck
                {
                    attempt.client.asked[call] = top_up;
                }
                if variant == Variant::TopsUpEarly {
                    attempt.client.asked[WRONG] = top_up;
                    for node in &mut state.nodes {
                        node.attempts[me][WRONG] = Call::Standing;
                    }
                }
            }
            Op::Look => attempt.asked = Asked::Look,
            Op::TopUp { record, .. } => {
                // However long it took.
                let top_up = self.nodes.top_up(executed(record));
                attempt.client.asked[call] = self.leases.words.number(&top_up);
                stand(state, me, call, self.bounds.top_up);
            }
            Op::Release | Op::ReleaseExecuted => {
                state.released_unrecorded |= attempt.executed && attempt.answer.is_none();
                let expires = !self.bounds.calm && attempt.is_decided();
                let more = self.bounds.intents && *op == Op::Release;
                stand(state, me, call, more || !expires);
            }
            _ => {}
        }
    }

    /// Lets the time pass that a decided lease waits for its nodes. One that hears more of them asks fewer for something,
    /// which is as if those requests got lost.
    fn settle(&self, state: &mut State<N>, me: usize) {
        let mut now = state.attempts[me].now();
        loop {
            let Client { lease, .. } = state.attempts[me].client;
            if lease == 0 {
                return;
            }
            if self.leases.of(lease, Lease::is_settled) {
                break;
            }
            now += 1;
            let record = state.attempts[me].reads.take();
            let read = record.map(|of| Input::Read(Some(self.nodes.record(of))));
            let input = read.unwrap_or(Input::TimedOut);
            let step = self.leases.handle(lease, input, now);
            self.follow(state, me, &step);
        }
        state.attempts[me].client.lease = 0;
        for node in &mut state.nodes {
            node.attempts[me].iter_mut().for_each(Call::deafen);
        }
    }

    /// What a client may be told, as a wrong variant has it.
    fn answers(&self, state: &State<N>, number: u8) -> Vec<Told> {
        let me = &state.attempts[usize::from(number)];
        let counts = self.leases.of(me.client.lease, |lease| {
            std::array::from_fn::<_, CALLS, _>(|call| lease.counts(number_of(call).into()))
        });
        let mut answers = Vec::new();
        for (node, column) in (0_u8..).zip(&state.nodes) {
            let calls = column.attempts[usize::from(number)].iter().enumerate();
            for (index, call) in calls.filter(|(index, _)| counts[*index]) {
                let told = |heard| Told {
                    node,
                    number: number_of(index),
                    heard,
                };
                if let Call::Ran(heard) = *call {
                    self.as_variant(me, number, told(heard), &mut answers);
                }
                if self.bounds.timeouts && matches!(call, Call::Sent | Call::Ran(_)) {
                    answers.push(told(Heard::FAILED));
                }
            }
        }
        answers
    }

    fn as_variant(&self, me: &Attempt, of: u8, told: Told, answers: &mut Vec<Told>) {
        let record = self.record_in(told.heard);
        let acquires = self.leases.of(me.client.lease, Lease::is_acquiring);
        let words = &self.leases.words;
        match self.bounds.variant {
            Variant::IgnoresRecords if record.is_some() => {
                let reply = match told.number {
                    1 => Reply::Held {
                        expires_in: None,
                        fingerprint: None,
                    },
                    _ => Reply::Lost,
                };
                let heard = words.hear(reply);
                answers.push(Told { heard, ..told });
            }
            Variant::ReplaysMinority if record.is_some() && acquires => {
                answers.extend((0_u8..).take(N).map(|node| Told { node, ..told }));
            }
            Variant::AnswersAfterMinority if record == Some(of) && !acquires => {
                answers.extend((0_u8..).take(N).map(|node| Told { node, ..told }));
            }
            _ => answers.push(told),
        }
    }

    /// Whose record an answer has.
    fn record_in(&self, heard: Heard) -> Option<u8> {
        match self.leases.words.answer(heard) {
            Answer::Replied(reply) => of_reply(&reply),
            Answer::Failed => None,
        }
    }

    /// What a client with a lease may do.
    fn of_client(&self, state: &State<N>, number: u8, actions: &mut Vec<Action>) {
        let me = &state.attempts[usize::from(number)];
        let mut act = |deed| actions.push(Action::Of(number, deed));
        let (holds, is_unused, extends) = self.leases.of(me.client.lease, |lease| {
            (lease.is_holding(), lease.is_unused(), lease.is_extending())
        });
        let answers = self.answers(state, number);
        let (lease, now) = (me.client.lease, me.now());
        if holds && is_unused {
            for told in answers {
                let step = self.leases.tell(lease, told, now);
                let step = self.leases.after(&step, vec![told]);
                act(Deed::Decide(step));
            }
            if !extends {
                let late = [false, true]
                    .into_iter()
                    .take(1 + usize::from(self.bounds.late));
                let late = late.filter(|is_late| *is_late || !me.is_late);
                late.for_each(|is_late| act(Deed::Start { is_late }));
            }
        } else if !holds {
            let found = match self.bounds.begins {
                true => self.leases.decisions(lease, answers, now),
                false => self.leases.beginnings(lease, answers, now),
            };
            let found = self.without_equals(&found, lease).into_iter();
            found.for_each(|step| act(Deed::Decide(step)));
        }
        if let Some(of) = me.reads {
            let copy = |column: &Column| self.nodes.recorded(column.store) == Some(of);
            let found = [false, true].into_iter();
            let found = found.filter(|is_found| !is_found || state.nodes.iter().any(copy));
            found.for_each(|is_found| act(Deed::Read { is_found }));
        }
        if !self.bounds.leaves || me.ending.is_some() || usize::from(number) == RETRY {
            return;
        }
        let effects: &[Effect] = match (holds && !is_unused, self.bounds.variant) {
            _ if self
                .leases
                .of(lease, |lease| !holds && !lease.is_acquiring()) =>
            {
                &[]
            }
            (true, Variant::TakesIntentBack) => &[Effect::NotBegun],
            (true, _) => &[Effect::Unknown, Effect::WithoutEffect],
            (false, _) => &[Effect::Unknown],
        };
        effects.iter().for_each(|effect| act(Deed::Leave(*effect)));
        if holds && !is_unused {
            act(Deed::Record);
        }
    }

    /// Where a lease begins something new, what it has read by then says only which nodes it need not release, or may
    /// still be read. So the least will do.
    fn without_equals(&self, found: &[Arc<Step>], before: u32) -> Vec<Arc<Step>> {
        let mut steps = found.to_vec();
        let acquires = self.leases.of(before, Lease::is_acquiring);
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

    fn perform(&self, state: &mut State<N>, number: u8, deed: Deed) {
        let me = usize::from(number);
        let attempt = &mut state.attempts[me];
        let ask = |column: &mut Column, op| {
            let (store, heard) = self.nodes.ask(column.store, number, op);
            column.store = store;
            heard
        };
        match deed {
            Deed::Begin(proposal) => self.begin(state, me, proposal),
            Deed::Run { node, call } => {
                let column = &mut state.nodes[usize::from(node)];
                let heard = ask(column, attempt.client.asked[usize::from(call)]);
                column.attempts[me][usize::from(call)].run(heard);
            }
            Deed::Duplicate {
                node,
                replaces_answer,
            } => {
                state.duplicates -= 1;
                let column = &mut state.nodes[usize::from(node)];
                let heard = ask(column, attempt.client.asked[0]);
                if replaces_answer {
                    column.attempts[me][0] = Call::Ran(heard);
                }
            }
            Deed::Vanish(node) => {
                ask(&mut state.nodes[usize::from(node)], self.vanish);
                attempt.broken |= !attempt.is_decided();
            }
            Deed::Decide(step) => {
                for told in &step.read {
                    let calls = &state.nodes[usize::from(told.node)].attempts[me];
                    // What the node said, also if a wrong variant has it told otherwise.
                    if let Call::Ran(heard) = calls[usize::from(told.number) - 1] {
                        attempt.told |=
                            told.heard != Heard::FAILED && self.record_in(heard).is_some();
                    }
                }
                let is_deaf = self.bounds.variant == Variant::DeafOnceGranted;
                if is_deaf && self.leases.of(attempt.client.lease, Lease::is_holding) {
                    for told in &step.read {
                        let calls = &mut state.nodes[usize::from(told.node)].attempts[me];
                        calls[usize::from(told.number) - 1].deafen();
                    }
                } else {
                    self.take(state, me, &step);
                }
            }
            Deed::Start { is_late } => {
                attempt.is_late |= is_late;
                self.handle(state, me, BEGIN);
            }
            Deed::Record => self.record(state, me),
            Deed::Leave(effect) => self.leave(state, me, effect),
            Deed::Read { is_found } => {
                let read = attempt.reads.take().filter(|_| is_found);
                let read = Input::Read(read.map(|of| self.nodes.record(of)));
                self.handle(state, me, read);
            }
        }
    }

    /// Forgets what cannot matter any more: requests that will never change anything, and what is
    /// known for their sake only.
    fn tidy(&self, state: &mut State<N>) {
        for number in self.attempts() {
            let me = usize::from(number);
            let mut pending = [false; CALLS];
            pending[0] = state.duplicates > 0;
            let asked = state.attempts[me].client.asked;
            for column in &mut state.nodes {
                // What is recorded stays, and then nothing else is done.
                let has_record = self.nodes.recorded(column.store).is_some();
                let recorded = has_record && state.wipes == 0;
                let calls = &mut column.attempts[me];
                // Without another grant, a key that is gone stays gone, for any last owner
                // stays that, and a fence never falls.
                let acquires = matches!(calls[0], Call::Sent | Call::Deaf);
                let granted_again = acquires || state.duplicates > 0;
                for (call, op) in (0..).zip(asked) {
                    let matters = match calls[call] {
                        Call::None | Call::Ran(_) | Call::Read(_) => false,
                        Call::Sent => true,
                        Call::Deaf if recorded => false,
                        Call::Standing if has_record => false,
                        Call::Deaf if call == 0 || granted_again => true,
                        Call::Standing if granted_again || state.wipes > 0 => true,
                        Call::Deaf | Call::Standing => {
                            self.nodes.ask(column.store, number, op).0 != column.store
                        }
                    };
                    pending[call] |= matters;
                    if !matters && calls[call].may_run() {
                        calls[call] = Call::None;
                    }
                }
            }
            let attempt = &mut state.attempts[me];
            for (op, pending) in attempt.client.asked.iter_mut().zip(pending) {
                if !pending {
                    *op = 0;
                }
            }
            if attempt.client.lease == 0 {
                attempt.asked = Asked::default();
                attempt.is_late = false;
                attempt.broken &= attempt.executed;
            }
            let may_execute = attempt.ending.is_none() && !attempt.executed && me != RETRY;
            attempt.told &= may_execute;
            attempt.after_an_answer &= may_execute;
            attempt.after_a_decision &= may_execute;
        }
    }

    /// Sorts the nodes, and with them what the leases know of them.
    fn sorted(&self, mut state: State<N>) -> State<N> {
        state.decided |= self.most_copies(&state) >= self.decided_by();
        self.tidy(&mut state);
        if let Some(order) = sorting(&state.nodes) {
            state.nodes.sort();
            for attempt in &mut state.attempts {
                attempt.client.lease = self.leases.moved(attempt.client.lease, &order);
            }
        }
        state
    }

    fn copies(&self, state: &State<N>, of: u8) -> usize {
        let recorded = state.nodes.iter();
        recorded
            .filter(|column| self.nodes.recorded(column.store) == Some(of))
            .count()
    }

    fn most_copies(&self, state: &State<N>) -> usize {
        let copies = (0_u8..).take(REQUESTS).map(|of| self.copies(state, of));
        copies.max().unwrap_or(0)
    }

    fn decided_by(&self) -> usize {
        let quorum = Quorum::new(N).expect("at least one node");
        quorum.majority().max(self.bounds.copies)
    }

    /// What nodes may do for `attempt`.
    fn of_nodes(&self, state: &State<N>, attempt: u8, actions: &mut Vec<Action>) {
        let Client { asked, .. } = state.attempts[usize::from(attempt)].client;
        let mut act = |deed| actions.push(Action::Of(attempt, deed));
        for (node, column) in (0_u8..).zip(&state.nodes) {
            // Of nodes that are alike, one will do.
            if node > 0 && state.nodes[usize::from(node) - 1] == *column {
                continue;
            }
            let changes = |op| self.nodes.ask(column.store, attempt, op).0 != column.store;
            let calls = &column.attempts[usize::from(attempt)];
            for (call, made) in (0_u8..).zip(calls) {
                // What changes nothing and is not listened to need not be carried out.
                let matters = *made == Call::Sent;
                if matters || made.may_run() && changes(asked[usize::from(call)]) {
                    act(Deed::Run { node, call });
                }
            }
            if state.duplicates > 0 && asked[0] > 0 && !calls[0].may_run() {
                let (store, heard) = self.nodes.ask(column.store, attempt, asked[0]);
                let replaces = matches!(calls[0], Call::Ran(old) if old != heard);
                for replaces_answer in [false, true] {
                    if (!replaces_answer && store != column.store) || (replaces_answer && replaces)
                    {
                        act(Deed::Duplicate {
                            node,
                            replaces_answer,
                        });
                    }
                }
            }
            if !self.bounds.calm && changes(self.vanish) {
                act(Deed::Vanish(node));
            }
        }
    }
}

impl<const N: usize> Model for Records<N> {
    type State = State<N>;
    type Action = Action;

    fn init_states(&self) -> Vec<State<N>> {
        let column = Column {
            store: self.nodes.empty(),
            ..Column::default()
        };
        vec![State {
            nodes: [column; N],
            attempts: [Attempt::default(); ATTEMPTS],
            duplicates: self.bounds.duplicates,
            wipes: self.bounds.wipes,
            decided: false,
            executed_after_an_answer: false,
            executed_after_a_decision: false,
            executed_though_told: false,
            unknown_after_a_decision: false,
            released_unrecorded: false,
        }]
    }

    fn actions(&self, state: &State<N>, actions: &mut Vec<Action>) {
        let mut may_begin = true;
        for attempt in self.attempts() {
            let me = &state.attempts[usize::from(attempt)];
            if me.is_idle() {
                if may_begin && usize::from(attempt) != RETRY {
                    let proposals = 1..=self.bounds.proposals;
                    let begin = |proposal| Action::Of(attempt, Deed::Begin(proposal));
                    actions.extend(proposals.map(begin));
                }
                may_begin = false;
                continue;
            }
            if me.client.lease > 0 {
                self.of_client(state, attempt, actions);
            }
            self.of_nodes(state, attempt, actions);
        }
        if state.wipes > 0 && self.most_copies(state) >= self.decided_by() {
            let nodes = (0_u8..).zip(&state.nodes);
            actions.extend(nodes.map(|(node, _)| Action::Wipe(node)));
        }
    }

    fn next_state(&self, last: &State<N>, action: Action) -> Option<State<N>> {
        let mut state = *last;
        match action {
            Action::Wipe(node) => {
                state.wipes -= 1;
                state.nodes[usize::from(node)].store = self.nodes.empty();
            }
            Action::Of(number, deed) => self.perform(&mut state, number, deed),
        }
        Some(self.sorted(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let promised = self.bounds.promises.iter().map(|name| Self::promised(name));
        let reached = self.bounds.reaches.iter().map(|name| Self::reached(name));
        promised.chain(reached).collect()
    }
}

fn number_of(call: usize) -> u8 {
    u8::try_from(call + 1).expect("few requests")
}

/// Has a request that nothing follows from run whenever its nodes like, or lets it get lost.
fn stand<const N: usize>(state: &mut State<N>, me: usize, call: usize, may_run: bool) {
    for node in &mut state.nodes {
        let call = &mut node.attempts[me][call];
        *call = match call {
            Call::Sent if may_run => Call::Standing,
            _ => Call::None,
        };
    }
}
