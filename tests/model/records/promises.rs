//! What must hold in every state of the model of requests, and what must happen in some.

use stateright::Property;
use tower_redlock::protocol::message::Op;

use crate::records::{Attempt, Ending, Records, State};
use crate::requests::{REQUESTS, RETRY};

/// The properties that must always hold.
pub(crate) const I1: &str = "I1 all who are answered are answered the same";
pub(crate) const I2: &str = "I2 no request that began after an answer executes";
pub(crate) const I2_DECIDED: &str = "I2' no request that began after a record was decided executes";
pub(crate) const I3: &str = "I3 two execute only if a lock of one broke before it was decided";
pub(crate) const I4: &str = "I4 no request executes that was told of a record";
pub(crate) const KEPT: &str = "no execution releases its key before its outcome is recorded";
pub(crate) const ONCE: &str = "at most one executes";
pub(crate) const KNOWN: &str =
    "no request that began after a record was decided is told that its outcome is unknown";
pub(crate) const SETTLED: &str = "no node has an intent beside a record";

/// What a run is to reach, so that it is not green for lack of what it is about.
pub(crate) const TWICE: &str = "two execute after a lock broke";
pub(crate) const REPLAY: &str = "a record is replayed";
pub(crate) const REPAIR: &str = "a record is repaired and replayed";
pub(crate) const CONFLICT: &str = "two records are kept at different nodes";
pub(crate) const FOUND_ANOTHER: &str = "a look finds what another recorded";
pub(crate) const FOUND_ITS_OWN: &str = "a look finds what was recorded unheard";
pub(crate) const NOT_RECORDED: &str = "an outcome is answered without a record";
pub(crate) const RETRIED: &str = "one that executed repairs";
pub(crate) const RECORDED_AGAIN: &str = "one that executed records in a second try";
pub(crate) const UNDECIDED: &str = "a record is undecided";
pub(crate) const UNKNOWN: &str = "an outcome is unknown";
pub(crate) const CONFIRMED: &str = "one executes after a second phase";
pub(crate) const EVERYWHERE: &str = "all nodes have a record";
pub(crate) const REFRAINED: &str = "one that might have begun hears of a record and replays it";
pub(crate) const WITHOUT_EFFECT: &str = "one goes without effect, and another executes";
pub(crate) const UNFINISHED: &str = "one goes without an outcome, and keeps its key";
pub(crate) const LATE: &str = "one asks all nodes once more, and executes";
pub(crate) const FORGOTTEN: &str = "one is answered after a node forgot";

impl<const N: usize> Records<N> {
    pub(super) fn promised(name: &'static str) -> Property<Self> {
        let condition: fn(&Self, &State<N>) -> bool = match name {
            I1 => |_, state| {
                let mut answers = state.attempts.iter().filter_map(|me| me.answer);
                let first = answers.next();
                answers.all(|answer| Some(answer) == first)
            },
            I2 => |_, state| !state.executed_after_an_answer,
            I2_DECIDED => |_, state| !state.executed_after_a_decision,
            I3 => |_, state| {
                let unbroken = |me: &&Attempt| me.executed && !me.broken;
                state.attempts.iter().filter(unbroken).count() <= 1
            },
            I4 => |_, state| !state.executed_though_told,
            KEPT => |_, state| !state.released_unrecorded,
            ONCE => |_, state| executions(state) <= 1,
            KNOWN => |_, state| !state.unknown_after_a_decision,
            SETTLED => |model, state| {
                let mut nodes = state.nodes.iter();
                !nodes.any(|column| model.nodes.has_intent_beside_record(column.store))
            },
            name => unreachable!("no promise is called {name}"),
        };
        Property::always(name, condition)
    }

    pub(super) fn reached(name: &'static str) -> Property<Self> {
        let condition: fn(&Self, &State<N>) -> bool = match name {
            REPLAY => |_, state| ended(state, Ending::Replayed),
            REPAIR => |_, state| ended(state, Ending::Repaired),
            FOUND_ANOTHER => |_, state| ended(state, Ending::FoundAnother),
            FOUND_ITS_OWN => |_, state| ended(state, Ending::FoundItsOwn),
            NOT_RECORDED => |_, state| ended(state, Ending::NotRecorded),
            UNDECIDED => |_, state| ended(state, Ending::Undecided),
            UNKNOWN => |_, state| ended(state, Ending::Unknown),
            RETRIED => |_, state| state.attempts[RETRY].answer.is_some(),
            RECORDED_AGAIN => |_, state| ended(state, Ending::RecordedAgain),
            TWICE => |_, state| executions(state) >= 2,
            CONFIRMED => |model, state| {
                let mut executing = state.attempts.iter().filter(|me| me.executed);
                let words = &model.leases.words;
                let confirms = |op| op > 0 && matches!(words.op(op), Op::Confirm { .. });
                executing.any(|me| confirms(me.client.asked[1]))
            },
            CONFLICT => |model, state| {
                let kept = (0_u8..).take(REQUESTS).map(|of| model.copies(state, of));
                kept.filter(|copies| *copies > 0).count() >= 2
            },
            EVERYWHERE => |model, state| model.most_copies(state) == N,
            REFRAINED => |_, state| {
                let mut attempts = state.attempts.iter();
                attempts.any(|me| me.granted && me.answer.is_some() && !me.executed)
            },
            WITHOUT_EFFECT => |_, state| {
                let has_gone = |me: &Attempt| me.ending == Some(Ending::LeftWithoutEffect);
                state.attempts.iter().any(has_gone) && executions(state) > 0
            },
            UNFINISHED => |_, state| {
                let mut executed = state.attempts.iter().filter(|me| me.executed);
                executed.any(|me| me.ending == Some(Ending::Left))
            },
            LATE => |_, state| {
                let mut executed = state.attempts.iter().filter(|me| me.executed);
                executed.any(|me| me.is_late)
            },
            FORGOTTEN => |model, state| {
                let answered = |me: &Attempt| me.answer.is_some();
                let forgot = state.wipes < model.bounds.wipes;
                forgot && state.attempts.iter().filter(|me| answered(me)).count() >= 2
            },
            name => unreachable!("nothing is called {name}"),
        };
        Property::sometimes(name, condition)
    }
}

fn executions<const N: usize>(state: &State<N>) -> usize {
    state.attempts.iter().filter(|me| me.executed).count()
}

fn ended<const N: usize>(state: &State<N>, ending: Ending) -> bool {
    let mut attempts = state.attempts.iter();
    attempts.any(|me| me.ending == Some(ending))
}
