//! What must hold in every state of a model, and what must happen in some.

use stateright::Property;
use tower_redlock::protocol::lease::{Access, Event};
use tower_redlock::protocol::message::Op;

use crate::leases::{Call, tick_after};
use crate::spec::May;
use crate::world::guard::OLD;
use crate::world::once::{Ending, Execution};
use crate::world::{Client, Column, Lock, START, Stage, State, World};

/// Names properties of one kind, and finds them by their names.
macro_rules! properties {
    // What concerns a step is noted when it is broken.
    (@ $name:ident) => { |_, state| !state.broken.has($name) };
    (@ $name:ident $condition:expr) => { $condition };
    ($kind:ident { $($name:ident, $text:literal $(: $condition:expr)?;)* }) => {
        $(pub(crate) const $name: &str = $text;)*

        impl<const N: usize, const C: usize, const K: usize> World<N, C, K> {
            pub(super) fn $kind(name: &'static str) -> Property<Self> {
                let condition: fn(&Self, &State<N, C, K>) -> bool = match name {
                    $($name => properties!(@ $name $($condition)?),)*
                    name => unreachable!("no property is called {name}"),
                };
                Property::$kind(name, condition)
            }
        }
    };
}

/// Of the promises that concern a step, those that were broken on the way, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Broken(pub(super) u16);

impl Broken {
    const NOTED: [&str; 10] = [
        LOSS, ASKED, SETTLED, BY_GROUP, ORDER, I2, I2_DECIDED, I4, KEPT, KNOWN,
    ];

    fn bit(promise: &str) -> u16 {
        let mut noted = Self::NOTED.iter();
        let place = noted.position(|noted| *noted == promise);
        1 << place.expect("a promise that is noted")
    }

    pub(super) fn note(&mut self, promise: &str, is_broken: bool) {
        if is_broken {
            self.0 |= Self::bit(promise);
        }
    }

    pub(super) fn has(self, promise: &str) -> bool {
        self.0 & Self::bit(promise) != 0
    }
}

properties!(always {
    F1, "F1 tokens are unique": |it, state| {
        let token = |client: usize| state.clients[client].locks[0].token;
        it.pairs(state, |a, b| it.rivals[a] >> b & 1 == 0 || token(a) != token(b))
    };
    F2, "F2 tokens increase in real-time order": |it, state| it.is_ordered(state, |me| me.after);
    F3, "F3 the storage applies no older write after a newer": |_, state| !state.storage.reordered;
    F4, "F4 an extension proves that no higher token completed before it": |it, state| {
        let extended = |me: &Client<K>| me.stage == Stage::Extended;
        it.is_ordered(state, |me| u8::from(extended(me)) * me.extended_after)
    };
    EXCLUSION, "no two are valid at once, but for readers": |it, state| {
        let valid = || it.clients().filter(|me| it.is_valid(state, *me));
        valid().count() < 2 || valid().all(|me| it.reads_only(me))
    };
    LOSS, "what is lost or over is not extended";
    ASKED, "what is lost or released is not asked for";
    FREE, "a node without a holder grants the key": |it, state| {
        !state.stores().any(|store| it.is_orphaned(store, state.now))
    };
    GONE, "a reader that released cannot extend": |it, state| {
        !it.clients().any(|me| it.reads_only(me) && it.leaves(state, me))
    };
    LEFT, "a lease that has released leaves no lock where its requests have run": |it, state| {
        !it.clients().any(|me| it.leaves(state, me))
    };
    SETTLED, "a lease that is settled knows where its lock may be left";
    BY_GROUP, "each holder has a higher token than all before it in its groups";
    ORDER, "each holder has a higher token than all before it";
    I1, "I1 all who are answered are answered the same": |_, state| {
        let mut answers = state.executions().filter_map(|me| me.answer);
        let first = answers.next();
        answers.all(|answer| Some(answer) == first)
    };
    I2, "I2 no request that began after an answer executes";
    I2_DECIDED, "I2' no request that began after a record was decided executes";
    I3, "I3 two execute only if a lock of one broke before it was decided": |_, state| {
        state.executed().filter(|me| !me.broken).count() <= 1
    };
    I4, "I4 no request executes that was told of a record";
    KEPT, "no execution releases its key before its outcome is recorded";
    ONCE, "at most one executes": |_, state| state.executed().count() <= 1;
    KNOWN, "no request that began after a record was decided is told that its outcome is unknown";
    NO_INTENT, "no node has an intent beside a record": |it, state| {
        !state.stores().any(|store| it.nodes.kept(store).and_intent)
    };
});

properties!(sometimes {
    ALL_COMPLETE, "all acquisitions complete": |it, state| {
        let mut clients = state.clients[it.clients()].iter();
        clients.all(|me| me.stage >= Stage::Holding)
    };
    LATER, "a later acquisition completes": |_, state| state.completes(|me| me.after != 0);
    SECOND_PHASE, "an acquisition completes in its second phase": |it, state| {
        let is_first = state.extensions == it.spec.extensions;
        is_first && state.completes(|me| me.asked[0][1] != 0)
    };
    EXTENDED, "an extension succeeds": |_, state| state.completes(|me| me.stage == Stage::Extended);
    PROLONGED, "the last extension, or a renewal, prolongs": |it, state| {
        let me = &state.clients[0];
        let is_last = usize::from(me.extensions) == it.spec.extends.len();
        let ends = me.locks[0].began + it.spec.clients[0].ttl;
        is_last && me.stage == Stage::Holding && me.locks[0].until > ends
    };
    VOTES_AGAIN, "a node that lost its memory votes again": |_, state| {
        let mut links = state.nodes.iter().flat_map(|node| &node.links);
        links.any(|link| link.sent[0] > OLD.id && matches!(link.calls[0], Call::Read(_)))
    };
    READERS, "two readers are valid at once": |it, state| {
        let valid = |me: &usize| it.reads_only(*me) && it.is_valid(state, *me);
        it.clients().filter(valid).count() > 1
    };
    WRITER, "a writer is valid before the end that a released reader had": |it, state| {
        let writes = |me| !it.reads_only(me) && it.is_valid(state, me);
        let left = |me| it.reads_only(me) && state.clients[me].stage == Stage::Gone;
        let is_early = state.now <= START + 1;
        is_early && it.clients().any(writes) && it.clients().any(left)
    };
    REVOKED, "a revoked lock is released": |_, state| {
        let me = &state.clients[0];
        me.is_revoked && me.stage == Stage::Gone && me.locks[0].lease == 0
    };
    RAISED, "a group is raised to the token of the other": |it, state| {
        it.succeeds(state, |lock, _| lock.raised > lock.token)
    };
    KEPT_ON, "an extension in a group prolongs": |it, state| {
        it.succeeds(state, |lock, until| lock.raised == 0 && until > lock.until)
    };
    REFUSED, "a client that its second group refuses releases the first": |it, state| {
        let is_free = |me| !state.stores().any(|store| it.has(store, me, state.now));
        let refused = |me: usize| state.clients[me].stage == Stage::Refused;
        // Its lock in the first group would still be there.
        state.now < START + 2 && it.clients().any(|me| refused(me) && is_free(me))
    };
    OLD_HOLDS, "a client of the present layout holds the lock": |it, state| it.holder(state, &[0]);
    BOTH_HOLDS, "a client of both layouts holds the lock": |it, state| it.holder(state, &[0, 1]);
    NEW_HOLDS, "a client of the next layout holds the lock": |it, state| it.holder(state, &[1]);
    REVERSED_HOLDS, "a client that locks the next group first holds the lock": |it, state| {
        it.holder(state, &[1, 0])
    };
    REPLAY, "a record is replayed": |_, state| state.ended(Ending::Replayed);
    REPAIR, "a record is repaired and replayed": |_, state| state.ended(Ending::Repaired);
    FOUND_ANOTHER, "a look finds what another recorded": |_, state| {
        state.ended(Ending::FoundAnother)
    };
    FOUND_ITS_OWN, "a look finds what was recorded unheard": |_, state| {
        state.ended(Ending::FoundItsOwn)
    };
    NOT_RECORDED, "an outcome is answered without a record": |_, state| {
        state.ended(Ending::NotRecorded)
    };
    UNDECIDED, "a record is undecided": |_, state| state.ended(Ending::Undecided);
    UNKNOWN, "an outcome is unknown": |_, state| state.ended(Ending::Unknown);
    RECORDED_AGAIN, "one that executed records in a second try": |_, state| {
        state.ended(Ending::RecordedAgain)
    };
    RETRIED, "one that executed repairs": |it, state| {
        state.clients[it.repairer()].execution.answer.is_some()
    };
    TWICE, "two execute after a lock broke": |_, state| state.executed().count() >= 2;
    CONFIRMED, "one executes after a second phase": |it, state| {
        let words = &it.nodes.words;
        let confirms = |op| op > 0 && matches!(words.op(op), Op::Confirm { .. });
        let mut clients = state.clients.iter();
        clients.any(|me| me.execution.executed && confirms(me.asked[0][1]))
    };
    CONFLICT, "two records are kept at different nodes": |it, state| {
        it.all_copies(state).filter(|copies| *copies > 0).count() >= 2
    };
    EVERYWHERE, "all nodes have a record": |it, state| {
        it.all_copies(state).any(|copies| copies == N)
    };
    REFRAINED, "one that might have begun hears of a record and replays it": |_, state| {
        let mut all = state.executions();
        all.any(|me| me.granted && me.answer.is_some() && !me.executed)
    };
    WITHOUT_EFFECT, "one goes without effect, and another executes": |_, state| {
        state.ended(Ending::LeftWithoutEffect) && state.executed().count() > 0
    };
    UNFINISHED, "one goes without an outcome, and keeps its key": |_, state| {
        state.executed().any(|me| me.ending == Some(Ending::Left))
    };
    LATE, "one asks all nodes once more, and executes": |_, state| {
        state.executed().any(|me| me.is_late)
    };
    FORGOTTEN, "one is answered after a node forgot": |it, state| {
        let answered = state.executions().filter(|me| me.answer.is_some());
        state.faults < it.spec.faults && answered.count() >= 2
    };
});

impl<const N: usize, const C: usize, const K: usize> State<N, C, K> {
    pub(super) fn stores(&self) -> impl Iterator<Item = u32> {
        self.nodes.iter().map(|column| column.store)
    }

    /// Whether an acquisition that completed is such.
    fn completes(&self, is_such: impl Fn(&Client<K>) -> bool) -> bool {
        let mut clients = self.clients.iter();
        clients.any(|me| me.stage >= Stage::Holding && is_such(me))
    }

    pub(super) fn executions(&self) -> impl Iterator<Item = &Execution> {
        self.clients.iter().map(|client| &client.execution)
    }

    fn executed(&self) -> impl Iterator<Item = &Execution> {
        self.executions().filter(|me| me.executed)
    }

    fn ended(&self, ending: Ending) -> bool {
        self.executions().any(|me| me.ending == Some(ending))
    }
}

impl<const N: usize, const C: usize, const K: usize> World<N, C, K> {
    fn reads_only(&self, client: usize) -> bool {
        self.spec.clients[client].access == Access::Shared
    }

    /// Whether something holds of every two acquisitions that completed.
    fn pairs(&self, state: &State<N, C, K>, holds: impl Fn(usize, usize) -> bool) -> bool {
        let completed = |me: &usize| state.clients[*me].stage >= Stage::Holding;
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
        self.orphaned.get_or((store, now), |_| {
            let is_held = self.nodes.held(store, now) > 0;
            is_held && !self.clients().any(|client| self.has(store, client, now))
        })
    }

    /// Whether a client that has released has a lock somewhere. Of one whose requests run in any order, a late `ACQUIRE`
    /// may bring it back, and a late extension may not.
    fn leaves(&self, state: &State<N, C, K>, client: usize) -> bool {
        let me = &state.clients[client];
        let asked = me.asked[0];
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
    fn succeeds(&self, state: &State<N, C, K>, is_such: impl Fn(&Lock, u8) -> bool) -> bool {
        self.clients().any(|client| {
            let locks = state.clients[client].locks.iter().enumerate();
            let mut held = locks.filter(|(_, lock)| lock.token > 0 && lock.lease > 0);
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

    fn holder(&self, state: &State<N, C, K>, groups: &[usize]) -> bool {
        let mut clients = self.clients();
        clients.any(|me| self.spec.clients[me].groups == groups && self.is_valid(state, me))
    }
}
