//! What must hold in every state of a model, and what must happen in some.

use stateright::Property;
use tower_redlock::protocol::lease::{Access, Event};
use tower_redlock::protocol::message::Op;

use crate::leases::{Call, tick_after};
use crate::spec::May;
use crate::world::guard::OLD;
use crate::world::once::{Ending, Execution};
use crate::world::{Client, Column, Lock, START, Stage, State, World};

pub(crate) const F1: &str = "F1 tokens are unique";
pub(crate) const F2: &str = "F2 tokens increase in real-time order";
pub(crate) const F3: &str = "F3 the storage applies no older write after a newer";
pub(crate) const F4: &str = "F4 an extension proves that no higher token completed before it";
pub(crate) const EXCLUSION: &str = "no two are valid at once, but for readers";
pub(crate) const LOSS: &str = "what is lost or over is not extended";
pub(crate) const ASKED: &str = "what is lost or released is not asked for";
pub(crate) const FREE: &str = "a node without a holder grants the key";
pub(crate) const GONE: &str = "a reader that released cannot extend";
pub(crate) const LEFT: &str =
    "a lease that has released leaves no lock where its requests have run";
pub(crate) const SETTLED: &str = "a lease that is settled knows where its lock may be left";

pub(crate) const ORDER: &str = "each holder has a higher token than all before it in its groups";
pub(crate) const CLOCK_ORDER: &str = "each holder has a higher token than all before it";
pub(crate) const I1: &str = "I1 all who are answered are answered the same";
pub(crate) const I2: &str = "I2 no request that began after an answer executes";
pub(crate) const I2_DECIDED: &str = "I2' no request that began after a record was decided executes";
pub(crate) const I3: &str = "I3 two execute only if a lock of one broke before it was decided";
pub(crate) const I4: &str = "I4 no request executes that was told of a record";
pub(crate) const KEPT: &str = "no execution releases its key before its outcome is recorded";
pub(crate) const ONCE: &str = "at most one executes";
pub(crate) const KNOWN: &str =
    "no request that began after a record was decided is told that its outcome is unknown";
pub(crate) const NO_INTENT: &str = "no node has an intent beside a record";

pub(crate) const ALL_COMPLETE: &str = "all acquisitions complete";
pub(crate) const LATER: &str = "a later acquisition completes";
pub(crate) const SECOND_PHASE: &str = "an acquisition completes in its second phase";
pub(crate) const EXTENDED: &str = "an extension succeeds";
pub(crate) const PROLONGED: &str = "the last extension, or a renewal, prolongs";
pub(crate) const VOTES_AGAIN: &str = "a node that lost its memory votes again";
pub(crate) const READERS: &str = "two readers are valid at once";
pub(crate) const WRITER: &str = "a writer is valid before the end that a released reader had";
pub(crate) const REVOKED: &str = "a revoked lock is released";
pub(crate) const RAISED: &str = "a group is raised to the token of the other";
pub(crate) const REFUSED: &str = "a client that its second group refuses releases the first";
pub(crate) const KEPT_ON: &str = "an extension in a group prolongs";
pub(crate) const OLD_HOLDS: &str = "a client of the present layout holds the lock";
pub(crate) const BOTH_HOLDS: &str = "a client of both layouts holds the lock";
pub(crate) const NEW_HOLDS: &str = "a client of the next layout holds the lock";
pub(crate) const REVERSED_HOLDS: &str = "a client that locks the next group first holds the lock";
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

impl<const N: usize, const C: usize, const K: usize> World<N, C, K> {
    pub(super) fn promised(name: &'static str) -> Property<Self> {
        let condition: fn(&Self, &State<N, C, K>) -> bool = match name {
            F1 => |model, state| {
                model.pairs(state, |a, b| {
                    let token = |client: usize| state.clients[client].locks[0].token;
                    model.rivals[a] >> b & 1 == 0 || token(a) != token(b)
                })
            },
            F2 => |model, state| model.is_ordered(state, |me| me.after),
            F3 => |_, state| !state.storage.reordered,
            F4 => |model, state| {
                model.is_ordered(state, |me| match me.stage {
                    Stage::Extended => me.extended_after,
                    _ => 0,
                })
            },
            EXCLUSION => |model, state| {
                let valid = || model.clients().filter(|me| model.is_valid(state, *me));
                let reads = |me: usize| model.spec.clients[me].access == Access::Shared;
                valid().count() < 2 || valid().all(reads)
            },
            LOSS => |_, state| !state.extended_too_late,
            ASKED => |_, state| !state.asked_too_late,
            FREE => |model, state| {
                let mut nodes = state.nodes.iter();
                !nodes.any(|column| model.is_orphaned(column.store, state.now))
            },
            GONE => |model, state| {
                let reads = |me: &usize| model.spec.clients[*me].access == Access::Shared;
                let mut readers = model.clients().filter(reads);
                !readers.any(|me| model.leaves(state, me))
            },
            LEFT => |model, state| !model.clients().any(|me| model.leaves(state, me)),
            SETTLED => |_, state| !state.settled_too_early,
            ORDER => |_, state| !state.moved.is_behind_its_group,
            CLOCK_ORDER => |_, state| !state.moved.is_behind_any,
            I1 => |_, state| {
                let mut answers = executions(state).filter_map(|me| me.answer);
                let first = answers.next();
                answers.all(|answer| Some(answer) == first)
            },
            I2 => |_, state| !state.executed.after_an_answer,
            I2_DECIDED => |_, state| !state.executed.after_a_decision,
            I3 => |_, state| {
                let unbroken = executions(state).filter(|me| me.executed && !me.broken);
                unbroken.count() <= 1
            },
            I4 => |_, state| !state.executed.though_told,
            KEPT => |_, state| !state.executed.released_unrecorded,
            ONCE => |_, state| executed(state).count() <= 1,
            KNOWN => |_, state| !state.executed.unknown_after_a_decision,
            NO_INTENT => |model, state| {
                let mut stores = state.nodes.iter().map(|column| column.store);
                !stores.any(|store| model.nodes.kept(store).and_intent)
            },
            name => unreachable!("no promise is called {name}"),
        };
        Property::always(name, condition)
    }

    pub(super) fn reached(name: &'static str) -> Property<Self> {
        let condition: fn(&Self, &State<N, C, K>) -> bool = match name {
            ALL_COMPLETE => |model, state| {
                let mut clients = model.clients();
                clients.all(|client| state.clients[client].stage >= Stage::Holding)
            },
            LATER => |_, state| completes(state, |me| me.after != 0),
            SECOND_PHASE => |model, state| {
                let is_first = state.extensions == model.spec.extensions;
                is_first && completes(state, |me| me.locks[0].of.asked[1] != 0)
            },
            EXTENDED => |_, state| completes(state, |me| me.stage == Stage::Extended),
            PROLONGED => |model, state| {
                let me = &state.clients[0];
                let is_last = usize::from(me.extensions) == model.spec.extends.len();
                let ends = me.locks[0].began + model.spec.clients[0].ttl;
                is_last && me.stage == Stage::Holding && me.locks[0].until > ends
            },
            VOTES_AGAIN => |_, state| {
                let mut links = state.nodes.iter().flat_map(|node| &node.links);
                links.any(|link| link.sent[0] > OLD.id && matches!(link.calls[0], Call::Read(_)))
            },
            READERS => |model, state| {
                let reads = |me: &usize| model.spec.clients[*me].access == Access::Shared;
                let readers = model.clients().filter(reads);
                readers.filter(|me| model.is_valid(state, *me)).count() > 1
            },
            WRITER => |model, state| {
                let reads = |me: usize| model.spec.clients[me].access == Access::Shared;
                let writes = |me| !reads(me) && model.is_valid(state, me);
                let left = |me| reads(me) && state.clients[me].stage == Stage::Gone;
                let is_early = state.now <= START + 1;
                is_early && model.clients().any(writes) && model.clients().any(left)
            },
            REVOKED => |_, state| {
                let me = &state.clients[0];
                me.is_revoked && me.stage == Stage::Gone && me.locks[0].of.lease == 0
            },
            RAISED => |model, state| model.succeeds(state, |lock, _| lock.raised > lock.token),
            KEPT_ON => |model, state| {
                model.succeeds(state, |lock, until| lock.raised == 0 && until > lock.until)
            },
            REFUSED => |model, state| {
                let has = |store, me| model.has(store, me, state.now);
                let is_free = |me| !state.nodes.iter().any(|column| has(column.store, me));
                let refused = |me: &usize| state.clients[*me].stage == Stage::Refused;
                // Its lock in the first group would still be there.
                state.now < START + 2 && model.clients().filter(refused).any(is_free)
            },
            OLD_HOLDS => |model, state| model.a_holder_has(state, &[0]),
            BOTH_HOLDS => |model, state| model.a_holder_has(state, &[0, 1]),
            NEW_HOLDS => |model, state| model.a_holder_has(state, &[1]),
            REVERSED_HOLDS => |model, state| model.a_holder_has(state, &[1, 0]),
            REPLAY => |_, state| ended(state, Ending::Replayed),
            REPAIR => |_, state| ended(state, Ending::Repaired),
            FOUND_ANOTHER => |_, state| ended(state, Ending::FoundAnother),
            FOUND_ITS_OWN => |_, state| ended(state, Ending::FoundItsOwn),
            NOT_RECORDED => |_, state| ended(state, Ending::NotRecorded),
            UNDECIDED => |_, state| ended(state, Ending::Undecided),
            UNKNOWN => |_, state| ended(state, Ending::Unknown),
            RECORDED_AGAIN => |_, state| ended(state, Ending::RecordedAgain),
            RETRIED => |model, state| {
                let repairer = &state.clients[model.repairer()];
                repairer.execution.answer.is_some()
            },
            TWICE => |_, state| executed(state).count() >= 2,
            CONFIRMED => |model, state| {
                let words = &model.nodes.words;
                let confirms = |op| op > 0 && matches!(words.op(op), Op::Confirm { .. });
                let mut clients = state.clients.iter();
                clients.any(|me| me.execution.executed && confirms(me.locks[0].of.asked[1]))
            },
            CONFLICT => |model, state| {
                let kept = model.all_copies(state).filter(|copies| *copies > 0);
                kept.count() >= 2
            },
            EVERYWHERE => |model, state| model.all_copies(state).any(|copies| copies == N),
            REFRAINED => |_, state| {
                let mut all = executions(state);
                all.any(|me| me.granted && me.answer.is_some() && !me.executed)
            },
            WITHOUT_EFFECT => {
                |_, state| ended(state, Ending::LeftWithoutEffect) && executed(state).count() > 0
            }
            UNFINISHED => |_, state| executed(state).any(|me| me.ending == Some(Ending::Left)),
            LATE => |_, state| executed(state).any(|me| me.is_late),
            FORGOTTEN => |model, state| {
                let answered = executions(state).filter(|me| me.answer.is_some());
                state.faults < model.spec.faults && answered.count() >= 2
            },
            name => unreachable!("nothing is called {name}"),
        };
        Property::sometimes(name, condition)
    }

    /// Whether something holds of every two acquisitions that completed.
    fn pairs(&self, state: &State<N, C, K>, holds: impl Fn(usize, usize) -> bool) -> bool {
        let completed = |client: &usize| state.clients[*client].stage >= Stage::Holding;
        let complete = || self.clients().filter(completed);
        complete().all(|a| complete().all(|b| a == b || holds(a, b)))
    }

    /// Whether each token is higher than those of the acquisitions that it came after.
    fn is_ordered(&self, state: &State<N, C, K>, after: impl Fn(&Client<K>) -> u8) -> bool {
        let token = |client: usize| state.clients[client].locks[0].token;
        self.pairs(state, |a, b| {
            after(&state.clients[a]) >> b & 1 == 0 || token(b) < token(a)
        })
    }

    /// Whether a node has a lock that no client has.
    fn is_orphaned(&self, store: u32, now: u8) -> bool {
        self.orphaned.get_or((store, now), || {
            let is_held = self.nodes.held(store, now) > 0;
            is_held && !self.clients().any(|client| self.has(store, client, now))
        })
    }

    /// Whether a client that has released has a lock somewhere. Of one whose requests run in any order, a late `ACQUIRE`
    /// may bring it back, and a late extension may not.
    fn leaves(&self, state: &State<N, C, K>, client: usize) -> bool {
        let me = &state.clients[client];
        let asked = me.locks[0].of.asked;
        let may_keep = |(call, made): (usize, &Call)| {
            if self.spec.moves() {
                return *made == Call::Standing;
            }
            let is_extension = call > 0 && asked[call] != 0 && !self.is_release(asked[call]);
            made.may_run() && (self.spec.has(May::Live) || !is_extension)
        };
        let is_left = |column: &Column<C, K>| {
            let mut calls = column.links[client].calls.iter().enumerate();
            !calls.any(may_keep) && self.has(column.store, client, state.now)
        };
        let has_gone = matches!(me.stage, Stage::Gone | Stage::Refused);
        has_gone && self.spec.has(May::Release) && state.nodes.iter().any(is_left)
    }

    /// Whether an extension or a raise of such a lock, until then, is about to succeed.
    fn succeeds(&self, state: &State<N, C, K>, is_such: impl Fn(&Lock<K>, u8) -> bool) -> bool {
        self.clients().any(|client| {
            let locks = state.clients[client].locks.iter().enumerate();
            let mut held = locks.filter(|(_, lock)| lock.token > 0 && lock.of.lease > 0);
            held.any(|(group, lock)| {
                let steps = self.decisions(state, client, group);
                let mut events = steps.iter().flat_map(|step| &step.events);
                events.any(|event| match event {
                    Event::Extended { valid_until, .. } => is_such(lock, tick_after(*valid_until)),
                    _ => false,
                })
            })
        })
    }

    fn a_holder_has(&self, state: &State<N, C, K>, groups: &[usize]) -> bool {
        let mut clients = self.clients();
        clients.any(|me| self.spec.clients[me].groups == groups && self.is_valid(state, me))
    }
}

/// Whether an acquisition that completed is such.
fn completes<const N: usize, const C: usize, const K: usize>(
    state: &State<N, C, K>,
    is_such: impl Fn(&Client<K>) -> bool,
) -> bool {
    let mut complete = state.clients.iter();
    complete.any(|me| me.stage >= Stage::Holding && is_such(me))
}

fn executions<const N: usize, const C: usize, const K: usize>(
    state: &State<N, C, K>,
) -> impl Iterator<Item = &Execution> {
    state.clients.iter().map(|client| &client.execution)
}

fn executed<const N: usize, const C: usize, const K: usize>(
    state: &State<N, C, K>,
) -> impl Iterator<Item = &Execution> {
    executions(state).filter(|me| me.executed)
}

fn ended<const N: usize, const C: usize, const K: usize>(
    state: &State<N, C, K>,
    ending: Ending,
) -> bool {
    executions(state).any(|me| me.ending == Some(ending))
}
