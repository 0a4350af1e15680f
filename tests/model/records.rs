//! The asynchronous model of requests for one key whose outcome is recorded.
//!
//! As in `asynchronous`, a lock may vanish at any node at any moment, requests run late or never,
//! answers are read late or never, and clients stop for ever. Besides: a client that may execute does so at
//! any later moment or never, and sends its `RECORD`s then; who was answered may send `TOPUP` with
//! that to any node, at any later moment; who executed without a record looks, and may acquire once
//! more to repair, and executes in no case.
//!
//! The reductions are those of `asynchronous`, and two more. A node that has a record answers with
//! it whatever it is asked; once that is seen to be so, what else the node has is forgotten. And
//! between being told that it may execute and executing, it makes no difference what a client has read; so
//! that is one step, unless [`Bounds::begins`] asks for two: then a client that may execute hears one
//! answer after the other until it begins, and it is noted what it was told. Extensions are left out: they change neither who was granted the key last nor
//! what is recorded.

use stateright::{Model, Property};

pub(crate) use crate::records::bounds::Bounds;
use crate::requests::{
    AGAIN, ATTEMPTS, Ask, CALLS, Call, Heard, Kind, LOOK, Nodes, PHASES, RECORD, REQUESTS, RETRY,
    Rounds, Step, Told, Variant,
};

mod bounds;
pub(crate) mod promises;

/// What passes between one attempt and one node, by the numbers of the phases.
type Calls = [Call; CALLS];

/// One node, and everything that is under way to and from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Column {
    store: u32,
    attempts: [Calls; ATTEMPTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Stage {
    #[default]
    Idle,
    Acquiring,
    /// It may execute, and has not begun.
    Granted,
    Recording,
    Looking,
    /// It executed, and writes what a minority has to more nodes, as the owner that it was.
    Repairing,
    Ended(Ending),
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
    /// It executed, and acquires once more to repair.
    Retries,
    Undecided,
    Conflicting,
    Unknown,
    Refused,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Attempt {
    stage: Stage,
    proposal: u8,
    round: u32,
    /// What each second phase confirms.
    targets: [u8; PHASES],
    /// Whose outcome its `RECORD` has.
    record: Option<u8>,
    /// The same of the one after its `LOOK`.
    again: Option<u8>,
    /// Whose outcome its caller was told, if that was recorded.
    answer: Option<u8>,
    executed: bool,
    /// It might have begun to execute, as a step of its own.
    granted: bool,
    /// It was told of a record.
    told: bool,
    /// A lock of it vanished before it was decided, at a node without a record.
    broken: bool,
    after_an_answer: bool,
    after_a_decision: bool,
}

impl Attempt {
    fn may_let_go(&self) -> bool {
        matches!(self.stage, Stage::Ended(_)) && (!self.executed || self.answer.is_some())
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
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Begin {
        attempt: u8,
        proposal: u8,
    },
    Run {
        attempt: u8,
        node: u8,
        phase: u8,
    },
    Duplicate {
        attempt: u8,
        node: u8,
        replaces_answer: bool,
    },
    Vanish {
        attempt: u8,
        node: u8,
    },
    Release {
        attempt: u8,
        node: u8,
    },
    TopUp {
        attempt: u8,
        node: u8,
    },
    /// A client that may execute begins to.
    Start {
        attempt: u8,
    },
    Decide {
        attempt: u8,
        told: Vec<Told>,
        step: Step,
    },
    Wipe {
        node: u8,
    },
}

#[derive(Debug)]
pub(crate) struct Records<const N: usize> {
    bounds: Bounds,
    nodes: Nodes,
    rounds: Rounds,
}

impl<const N: usize> Records<N> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self {
            nodes: Nodes::new(bounds.variant, bounds.intents),
            rounds: Rounds::new(bounds.variant, N),
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

    fn ask(state: &State<N>, attempt: u8, phase: u8) -> Ask {
        let me = &state.attempts[usize::from(attempt)];
        match phase {
            0 => Ask::Acquire(me.proposal),
            RECORD => Ask::Record(me.record.expect("it was sent")),
            LOOK => Ask::Look,
            AGAIN => Ask::RecordAgain(me.again.expect("it was sent")),
            phase => Ask::Confirm(me.targets[usize::from(phase) - 1]),
        }
    }

    fn begin(&self, state: &mut State<N>, attempt: usize, proposal: u8) {
        let answered = state.attempts.iter().any(|other| other.answer.is_some());
        state.attempts[attempt] = Attempt {
            stage: Stage::Acquiring,
            proposal,
            round: self.rounds.begin(Kind::Once),
            after_an_answer: answered,
            after_a_decision: state.decided,
            ..Attempt::default()
        };
        send(state, attempt, 0, ALL);
    }

    /// Every way in which reading answers leads `attempt` to do something.
    fn decisions(&self, state: &State<N>, attempt: u8, actions: &mut Vec<Action>) {
        let me = &state.attempts[usize::from(attempt)];
        let current = self.rounds.phase(me.round);
        let mut answers = Vec::new();
        for (node, column) in (0_u8..).zip(&state.nodes) {
            for (phase, call) in (0_u8..).zip(&column.attempts[usize::from(attempt)]) {
                if let Call::Ran(heard) = *call {
                    answers.push(Told { node, phase, heard });
                }
                let waited_for = phase <= current || phase >= RECORD;
                let late = matches!(call, Call::Sent | Call::Ran(_)) && waited_for;
                if late && self.bounds.timeouts {
                    let heard = Heard::Failed;
                    answers.push(Told { node, phase, heard });
                }
            }
        }
        let found = self.rounds.decisions(me.round, &answers);
        actions.extend(found.into_iter().map(|(told, step)| Action::Decide {
            attempt,
            told,
            step,
        }));
    }

    /// Every answer that a client may hear that has not begun.
    fn hearings(&self, state: &State<N>, attempt: u8, actions: &mut Vec<Action>) {
        let me = &state.attempts[usize::from(attempt)];
        for (node, column) in (0_u8..).zip(&state.nodes) {
            for (phase, call) in (0_u8..).zip(&column.attempts[usize::from(attempt)]) {
                if let Call::Ran(heard) = *call {
                    let told = vec![Told { node, phase, heard }];
                    let (_, step) = self.rounds.tell_all(me.round, &told);
                    actions.push(Action::Decide {
                        attempt,
                        told,
                        step,
                    });
                }
            }
        }
    }

    fn execute(&self, state: &mut State<N>, number: u8) {
        let me = usize::from(number);
        let attempt = &mut state.attempts[me];
        state.executed_after_an_answer |= attempt.after_an_answer;
        state.executed_after_a_decision |= attempt.after_a_decision;
        state.executed_though_told |= attempt.told;
        attempt.executed = true;
        attempt.stage = Stage::Recording;
        attempt.round = self.rounds.begin(Kind::Record(number));
        attempt.record = Some(number);
        deafen(state, me);
        send(state, me, RECORD, ALL);
    }

    fn decide(&self, state: &mut State<N>, number: u8, log: &[Told]) {
        let me = usize::from(number);
        let granted = state.attempts[me].stage == Stage::Granted;
        if granted && self.bounds.variant == Variant::DeafOnceGranted {
            for told in log {
                let is_done = matches!(told.heard, Heard::Done(_));
                state.attempts[me].told |= is_done;
                let calls = &mut state.nodes[usize::from(told.node)].attempts[me];
                calls[usize::from(told.phase)].deafen();
            }
            return;
        }
        let (round, step) = self.rounds.tell_all(state.attempts[me].round, log);
        for told in log {
            let calls = &mut state.nodes[usize::from(told.node)].attempts[me];
            let call = &mut calls[usize::from(told.phase)];
            call.deafen();
        }
        match step {
            Step::Wait if granted => {
                state.attempts[me].round = round;
                // A record keeps it from beginning; an answer to an earlier phase does not.
                if log.iter().any(|told| matches!(told.heard, Heard::Done(_))) {
                    state.attempts[me].stage = Stage::Acquiring;
                }
            }
            Step::Wait => {}
            Step::Confirm(target) => {
                state.attempts[me].round = round;
                let phase = self.rounds.phase(round);
                state.attempts[me].targets[usize::from(phase) - 1] = target;
                send(state, me, phase, self.rounds.asked_next(round, false));
            }
            Step::Repair(of) => {
                state.attempts[me].round = round;
                state.attempts[me].record = Some(of);
                send(state, me, RECORD, self.rounds.asked_next(round, true));
            }
            Step::Execute(_) if me == RETRY => end(state, me, Ending::NotRecorded, None),
            Step::Execute(told) => {
                state.attempts[me].told |= told;
                if self.bounds.begins {
                    state.attempts[me].round = round;
                    state.attempts[me].stage = Stage::Granted;
                    state.attempts[me].granted = true;
                } else {
                    self.execute(state, number);
                }
            }
            Step::Replay(of) => {
                let ending = match state.attempts[me].record {
                    Some(_) => Ending::Repaired,
                    None => Ending::Replayed,
                };
                end(state, me, ending, Some(of));
            }
            Step::Undecided => end(state, me, Ending::Undecided, None),
            Step::Conflicting => end(state, me, Ending::Conflicting, None),
            Step::Unknown => {
                state.unknown_after_a_decision |= state.attempts[me].after_a_decision;
                end(state, me, Ending::Unknown, None);
            }
            Step::Refused => end(state, me, Ending::Refused, None),
            Step::Recorded if state.attempts[me].stage == Stage::Repairing => {
                let of = state.attempts[me].again.expect("it was sent");
                let ending = match of == number {
                    true => Ending::RecordedAgain,
                    false => Ending::FoundAnother,
                };
                end(state, me, ending, Some(of));
            }
            Step::Recorded => end(state, me, Ending::Recorded, Some(number)),
            Step::Missed if state.attempts[me].stage == Stage::Repairing => {
                if state.attempts[RETRY].stage == Stage::Idle {
                    end(state, me, Ending::Retries, None);
                    self.begin(state, RETRY, self.bounds.proposals);
                } else {
                    end(state, me, Ending::NotRecorded, None);
                }
            }
            Step::Missed => {
                state.attempts[me].stage = Stage::Looking;
                state.attempts[me].round = self.rounds.begin(Kind::Look(number));
                deafen(state, me);
                send(state, me, LOOK, ALL);
            }
            Step::Found(of) if of == number => end(state, me, Ending::FoundItsOwn, Some(of)),
            Step::Found(of) => end(state, me, Ending::FoundAnother, Some(of)),
            Step::Minority(of) if self.bounds.retry => {
                state.attempts[me].stage = Stage::Repairing;
                state.attempts[me].round = self.rounds.begin(Kind::Record(of));
                state.attempts[me].again = Some(of);
                deafen(state, me);
                send(state, me, AGAIN, ALL);
            }
            Step::Minority(_) | Step::Nothing => end(state, me, Ending::NotRecorded, None),
        }
    }

    /// Forgets what cannot matter any more: requests that will never change anything, and what is
    /// known for their sake only.
    fn tidy(&self, state: &mut State<N>) {
        for number in self.attempts() {
            let me = usize::from(number);
            let mut pending = [false; CALLS];
            pending[0] = state.duplicates > 0;
            for node in 0..N {
                let column = state.nodes[node];
                let calls = column.attempts[me];
                // What is recorded stays, and then nothing else is done.
                let recorded = state.wipes == 0 && self.nodes.recorded(column.store).is_some();
                // Without another grant, a key that is gone stays gone, for any last owner
                // stays that, and a fence never falls.
                let acquires = matches!(calls[0], Call::Sent | Call::Deaf);
                let granted_again = acquires || state.duplicates > 0;
                for (phase, call) in (0_u8..).zip(&calls) {
                    let slot = usize::from(phase);
                    let matters = match call {
                        Call::None | Call::Ran(_) => false,
                        Call::Sent => true,
                        Call::Deaf if recorded || phase == LOOK => false,
                        Call::Deaf if phase == 0 || granted_again => true,
                        Call::Deaf => {
                            let ask = Self::ask(state, number, phase);
                            self.nodes.ask(column.store, number, ask).0 != column.store
                        }
                    };
                    pending[slot] |= matters;
                    if *call == Call::Deaf && !matters {
                        state.nodes[node].attempts[me][slot] = Call::None;
                    }
                }
            }
            let attempt = &mut state.attempts[me];
            if !pending[0] {
                attempt.proposal = 0;
            }
            for (target, pending) in attempt.targets.iter_mut().zip(&pending[1..]) {
                if !pending {
                    *target = 0;
                }
            }
            if let Stage::Ended(_) = attempt.stage {
                if !pending[usize::from(RECORD)] {
                    attempt.record = None;
                }
                if !pending[usize::from(AGAIN)] {
                    attempt.again = None;
                }
                attempt.broken &= attempt.executed;
            }
            let may_execute = matches!(attempt.stage, Stage::Acquiring | Stage::Granted);
            let may_execute = may_execute && me != RETRY;
            attempt.told &= may_execute;
            attempt.after_an_answer &= may_execute;
            attempt.after_a_decision &= may_execute;
        }
    }

    /// Sorts the nodes, and with them what the rounds know of them.
    fn sorted(&self, mut state: State<N>) -> State<N> {
        state.decided |= self.most_copies(&state) >= self.decided_by();
        self.tidy(&mut state);
        if state.nodes.is_sorted() {
            return state;
        }
        let mut order = [0_u8; N];
        for (place, node) in order.iter_mut().zip(0..) {
            *place = node;
        }
        order.sort_by_key(|node| state.nodes[usize::from(*node)]);
        state.nodes = order.map(|node| state.nodes[usize::from(node)]);
        for attempt in &mut state.attempts {
            if !matches!(attempt.stage, Stage::Idle | Stage::Ended(_)) {
                attempt.round = self.rounds.moved(attempt.round, &order);
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
        self.rounds.majority().max(self.bounds.copies)
    }

    /// What nodes may do for `attempt`.
    fn requests(&self, state: &State<N>, attempt: u8, actions: &mut Vec<Action>) {
        let me = &state.attempts[usize::from(attempt)];
        for (node, column) in (0_u8..).zip(&state.nodes) {
            // Of nodes that are alike, one will do.
            if node > 0 && state.nodes[usize::from(node) - 1] == *column {
                continue;
            }
            let changed = |ask| {
                let store = self.nodes.ask(column.store, attempt, ask).0;
                (store != column.store).then_some(store)
            };
            let calls = &column.attempts[usize::from(attempt)];
            for (phase, call) in (0_u8..).zip(calls) {
                // What changes nothing and is not listened to need not be carried out.
                let matters = match call {
                    Call::Sent => true,
                    Call::Deaf => changed(Self::ask(state, attempt, phase)).is_some(),
                    Call::None | Call::Ran(_) => false,
                };
                if matters {
                    actions.push(Action::Run {
                        attempt,
                        node,
                        phase,
                    });
                }
            }
            if state.duplicates > 0 && !matches!(calls[0], Call::Sent | Call::Deaf) {
                let (store, heard) =
                    self.nodes
                        .ask(column.store, attempt, Ask::Acquire(me.proposal));
                let replaces = matches!(calls[0], Call::Ran(old) if old != heard);
                for replaces_answer in [false, true] {
                    if (!replaces_answer && store != column.store) || (replaces_answer && replaces)
                    {
                        actions.push(Action::Duplicate {
                            attempt,
                            node,
                            replaces_answer,
                        });
                    }
                }
            }
            let vanished = changed(Ask::Vanish);
            if vanished.is_some() && !self.bounds.calm {
                actions.push(Action::Vanish { attempt, node });
            }
            let carelessly = me.executed
                && matches!(
                    self.bounds.variant,
                    Variant::ReleasesWithoutRecord | Variant::TakesIntentBack
                );
            let released = changed(Ask::Release);
            // A release does more than an expiry if it takes the intent back, too.
            let differs = released.is_some() && (released != vanished || carelessly);
            if differs && (me.may_let_go() || carelessly) {
                actions.push(Action::Release { attempt, node });
            }
            let tops_up = match me.answer {
                Some(_) => self.bounds.top_up,
                None => me.executed && self.bounds.variant == Variant::TopsUpEarly,
            };
            if tops_up && changed(Ask::TopUp(me.answer.unwrap_or(attempt))).is_some() {
                actions.push(Action::TopUp { attempt, node });
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
        }]
    }

    fn actions(&self, state: &State<N>, actions: &mut Vec<Action>) {
        let mut may_begin = true;
        for attempt in self.attempts() {
            match state.attempts[usize::from(attempt)].stage {
                Stage::Idle => {
                    if may_begin && usize::from(attempt) != RETRY {
                        let proposals = 1..=self.bounds.proposals;
                        let begin = |proposal| Action::Begin { attempt, proposal };
                        actions.extend(proposals.map(begin));
                    }
                    may_begin = false;
                    continue;
                }
                Stage::Acquiring | Stage::Recording | Stage::Looking | Stage::Repairing => {
                    self.decisions(state, attempt, actions);
                }
                Stage::Granted => {
                    self.hearings(state, attempt, actions);
                    actions.push(Action::Start { attempt });
                }
                Stage::Ended(_) => {}
            }
            self.requests(state, attempt, actions);
        }
        if state.wipes > 0 && self.most_copies(state) >= self.decided_by() {
            actions.extend(
                (0_u8..)
                    .zip(&state.nodes)
                    .map(|(node, _)| Action::Wipe { node }),
            );
        }
    }

    fn next_state(&self, last: &State<N>, action: Action) -> Option<State<N>> {
        let mut state = *last;
        let asked = |node: u8, attempt: u8, ask| {
            let column = &last.nodes[usize::from(node)];
            self.nodes.ask(column.store, attempt, ask)
        };
        match action {
            Action::Begin { attempt, proposal } => {
                self.begin(&mut state, usize::from(attempt), proposal);
            }
            Action::Run {
                attempt,
                node,
                phase,
            } => {
                let column = &mut state.nodes[usize::from(node)];
                let (store, heard) = asked(node, attempt, Self::ask(last, attempt, phase));
                column.store = store;
                let call = &mut column.attempts[usize::from(attempt)][usize::from(phase)];
                *call = match call {
                    Call::Sent => Call::Ran(heard),
                    _ => Call::None,
                };
            }
            Action::Duplicate {
                attempt,
                node,
                replaces_answer,
            } => {
                state.duplicates -= 1;
                let column = &mut state.nodes[usize::from(node)];
                let (store, heard) = asked(node, attempt, Self::ask(last, attempt, 0));
                column.store = store;
                if replaces_answer {
                    column.attempts[usize::from(attempt)][0] = Call::Ran(heard);
                }
            }
            Action::Vanish { attempt, node } => {
                state.nodes[usize::from(node)].store = asked(node, attempt, Ask::Vanish).0;
                let me = &mut state.attempts[usize::from(attempt)];
                me.broken |= !me.may_let_go();
            }
            Action::Release { attempt, node } => {
                state.nodes[usize::from(node)].store = asked(node, attempt, Ask::Release).0;
            }
            Action::TopUp { attempt, node } => {
                let of = last.attempts[usize::from(attempt)].answer;
                let ask = Ask::TopUp(of.unwrap_or(attempt));
                state.nodes[usize::from(node)].store = asked(node, attempt, ask).0;
            }
            Action::Start { attempt } => self.execute(&mut state, attempt),
            Action::Decide { attempt, told, .. } => self.decide(&mut state, attempt, &told),
            Action::Wipe { node } => {
                state.wipes -= 1;
                state.nodes[usize::from(node)].store = self.nodes.empty();
            }
        }
        Some(self.sorted(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let promised = self.bounds.promises.iter().map(|name| Self::promised(name));
        let reached = self.bounds.reaches.iter().map(|name| Self::reached(name));
        promised.chain(reached).collect()
    }
}

fn end<const N: usize>(state: &mut State<N>, attempt: usize, ending: Ending, answer: Option<u8>) {
    let me = &mut state.attempts[attempt];
    me.stage = Stage::Ended(ending);
    me.round = 0;
    me.answer = answer;
    deafen(state, attempt);
}

/// Sends a request to these nodes.
fn send<const N: usize>(state: &mut State<N>, attempt: usize, phase: u8, nodes: u8) {
    for (node, column) in state.nodes.iter_mut().enumerate() {
        if nodes >> node & 1 == 1 {
            column.attempts[attempt][usize::from(phase)] = Call::Sent;
        }
    }
}

/// The answers to the requests sent so far will not be read.
fn deafen<const N: usize>(state: &mut State<N>, attempt: usize) {
    for column in &mut state.nodes {
        for call in &mut column.attempts[attempt] {
            call.deafen();
        }
    }
}

/// All nodes, as bits.
const ALL: u8 = u8::MAX;
