//! The asynchronous model: no time at all, so a lock may vanish at any moment.
//!
//! A lock key may vanish at any node at any moment, which covers expiry, jumping clocks, and every
//! early, late or reordered `RELEASE`; requests run late or never, `ACQUIRE` more than once;
//! answers are read late or never; clients stop for ever, by never being scheduled again. So a client that is refused,
//! or whose extension fails, stops there.
//!
//! Three reductions keep this small, and lose nothing. Acquisitions begin in the order of their
//! numbers. A client reads answers only at the moment at which they decide something: until then
//! it makes no difference whether it had read them. And nodes are interchangeable, so those of a state
//! are sorted; in a trace, the number of a node may therefore change from step to step.

use std::sync::Arc;

use stateright::{Model, Property};
use tower_redlock::protocol::lease::{Event, Input};
use tower_redlock::protocol::message::{Op, Reply};

use crate::leases::{self, Call, Heard, Leases, Step, Told, sorting, spec};
use crate::space::{Nodes, Variant};
use crate::{FAR_MORE, breaks, holds, holds_within};

/// The most acquisitions that a model has.
const CLIENTS: usize = 3;

/// The most keys that a model has.
const KEYS: usize = 2;

/// The most requests of a client: an `ACQUIRE`, three second phases and an extension.
const REQUESTS: usize = 5;

/// Any ttl will do, since no time passes.
const TTL: u8 = 1;

const NOW: u8 = 0;

/// How large a model is.
#[derive(Clone, Debug)]
struct Bounds {
    variant: Variant,
    /// The keys of each acquisition.
    sets: Vec<Vec<u8>>,
    /// An acquisition proposes any number from 1 to this.
    proposals: u8,
    /// How many `ACQUIRE`s are carried out once more.
    duplicates: u8,
    /// How many extensions are begun.
    extensions: u8,
    /// How many nodes lose their memory.
    wipes: u8,
    /// Whether clients give up waiting for single answers and act on what they have.
    timeouts: bool,
    /// Whether holders write to a storage that checks tokens.
    storage: bool,
}

impl Bounds {
    /// `clients` acquisitions of the same key.
    fn one_key(clients: usize, proposals: u8) -> Self {
        Self::of_sets(&vec![&[0][..]; clients], proposals)
    }

    fn of_sets(sets: &[&[u8]], proposals: u8) -> Self {
        Self {
            variant: Variant::Shipped,
            sets: sets.iter().map(|set| set.to_vec()).collect(),
            proposals,
            duplicates: 0,
            extensions: 0,
            wipes: 0,
            timeouts: false,
            storage: false,
        }
    }
}

/// One node, and everything that is under way to and from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Column {
    store: u32,
    links: [[Call; REQUESTS]; CLIENTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Stage {
    #[default]
    Idle,
    Acquiring,
    Complete,
    Extending,
    Extended,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    stage: Stage,
    of: leases::Client<REQUESTS>,
    token: u8,
    /// The acquisitions that had completed when this one began, as bits; of those that share a
    /// key with it.
    after: u8,
    /// The same for its extension.
    extended_after: u8,
}

/// A storage that accepts no token lower than the highest it has seen, for each key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Storage {
    highest: [u8; KEYS],
    /// Whose writes were accepted, as bits.
    wrote: [u8; KEYS],
    /// A write was accepted after that of a newer acquisition.
    reordered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State<const N: usize> {
    nodes: [Column; N],
    clients: [Client; CLIENTS],
    storage: Storage,
    duplicates: u8,
    extensions: u8,
    wipes: u8,
}

#[derive(Clone, Debug, PartialEq)]
enum Action {
    Begin {
        client: usize,
        proposal: u8,
    },
    Run {
        client: usize,
        node: usize,
        call: usize,
    },
    Duplicate {
        client: usize,
        node: usize,
        replaces_answer: bool,
    },
    Vanish {
        client: usize,
        node: usize,
        key: u8,
    },
    Decide {
        client: usize,
        step: Arc<Step>,
    },
    Extend {
        client: usize,
    },
    Write {
        client: usize,
        key: u8,
    },
    Wipe {
        node: usize,
    },
}

#[derive(Debug)]
struct Async<const N: usize> {
    bounds: Bounds,
    nodes: Nodes,
    leases: Leases,
    /// Per client those that share a key with it, itself left out, as bits.
    rivals: Vec<u8>,
}

const F1: &str = "F1 tokens are unique";
const F2: &str = "F2 tokens increase in real-time order";
const F3: &str = "F3 the storage applies no older write after a newer";
const F4: &str = "F4 an extension proves that no higher token completed before it";

impl<const N: usize> Async<N> {
    fn new(bounds: Bounds) -> Self {
        let rivals = bounds.sets.iter().enumerate().map(|(me, mine)| {
            let others = bounds.sets.iter().enumerate();
            others
                .filter(|(other, theirs)| *other != me && theirs.iter().any(|k| mine.contains(k)))
                .fold(0, |bits, (other, _)| bits | 1 << other)
        });
        let nodes = Nodes::new(bounds.variant, &bounds.sets);
        Self {
            leases: Leases::new(&nodes.words, N),
            nodes,
            rivals: rivals.collect(),
            bounds,
        }
    }

    fn count(&self) -> usize {
        self.bounds.sets.len()
    }

    fn completed(&self, state: &State<N>, client: usize) -> u8 {
        let clients = state.clients.iter().enumerate();
        self.rivals[client]
            & clients
                .filter(|(_, other)| other.stage >= Stage::Complete)
                .fold(0, |bits, (other, _)| bits | 1 << other)
    }

    fn run(&self, state: &State<N>, client: usize, node: usize, call: usize) -> (u32, Heard) {
        let op = state.clients[client].of.asked[call];
        let store = state.nodes[node].store;
        self.nodes.execute(store, client, op, NOW)
    }

    /// Every way in which reading answers leads `client` to do something.
    fn decisions(&self, state: &State<N>, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        let mut answers = Vec::new();
        for (node, column) in (0_u8..).zip(&state.nodes) {
            for (number, call) in (1_u8..).zip(&column.links[client]) {
                if let Call::Ran(heard) = *call {
                    let heard = self.vouched(me, number, heard);
                    answers.push(Told {
                        node,
                        number,
                        heard,
                    });
                }
                let late = matches!(call, Call::Sent | Call::Ran(_));
                if late && self.bounds.timeouts && me.stage == Stage::Acquiring {
                    let heard = Heard::FAILED;
                    answers.push(Told {
                        node,
                        number,
                        heard,
                    });
                }
            }
        }
        for step in self.leases.decisions(me.of.lease, answers, NOW).iter() {
            let step = self.confirmed_by_itself(Arc::clone(step));
            let goes_on =
                |event: &Event| matches!(event, Event::Granted { .. } | Event::Extended { .. });
            if step.events.iter().all(goes_on) {
                actions.push(Action::Decide { client, step });
            }
        }
    }

    /// The answer to a request, or what a wrong variant takes it for.
    fn vouched(&self, me: &Client, number: u8, heard: Heard) -> Heard {
        let counts_every_ok = match self.bounds.variant {
            Variant::CountsEveryOk => true,
            Variant::ExtendsByKey => me.stage == Stage::Extending,
            _ => false,
        };
        let words = &self.nodes.words;
        let asked = || words.op(me.of.asked[usize::from(number) - 1]);
        match words.reply(heard) {
            Some(Reply::At(_)) if counts_every_ok => match asked() {
                Op::Confirm {
                    token: Some(token), ..
                } => words.hear(Reply::At(token)),
                _ => heard,
            },
            _ => heard,
        }
    }

    /// A wrong variant takes the highest number of a majority as confirmed, and asks no node.
    fn confirmed_by_itself(&self, step: Arc<Step>) -> Arc<Step> {
        let Some(request) = &step.request else {
            return step;
        };
        let Op::Confirm {
            token: Some(token), ..
        } = request.op
        else {
            return step;
        };
        if self.bounds.variant != Variant::NoWriteBack {
            return step;
        }
        let heard = self.nodes.words.hear(Reply::At(token));
        let nodes = request.nodes.iter().map(|node| Told {
            node: u8::try_from(node).expect("few nodes"),
            number: u8::try_from(request.number).expect("few requests"),
            heard,
        });
        let tell = |step: Arc<Step>, told| match step.events.is_empty() {
            true => self.leases.tell(step.lease, told, NOW),
            false => step,
        };
        nodes.fold(Arc::clone(&step), tell)
    }

    fn follow(&self, state: &mut State<N>, client: usize, step: &Step) {
        let me = &mut state.clients[client];
        let links = state.nodes.iter_mut();
        let links = links.map(|column| &mut column.links[client]);
        self.leases.follow(step, &mut me.of, links);
        for event in &step.events {
            match event {
                Event::Granted { number, .. } => {
                    me.stage = Stage::Complete;
                    me.token = u8::try_from(*number).expect("numbers of a model are small");
                }
                Event::Extended { .. } => me.stage = Stage::Extended,
                event => unreachable!("{event:?}"),
            }
        }
    }

    fn write(storage: &mut Storage, clients: &[Client], client: usize, key: u8) -> bool {
        let key = usize::from(key);
        let me = &clients[client];
        if me.token < storage.highest[key] {
            return false;
        }
        let before = *storage;
        for (other, rival) in clients.iter().enumerate() {
            let wrote = other != client && storage.wrote[key] >> other & 1 == 1;
            // Either it began after this one had completed, or their order is undefined.
            let newer = rival.after >> client & 1 == 1 || rival.token == me.token;
            storage.reordered |= wrote && newer;
        }
        storage.highest[key] = me.token;
        storage.wrote[key] |= 1 << client;
        *storage != before
    }

    /// Forgets what cannot matter any more: requests that will never change anything, what is
    /// known for their sake only, and leases that will not be told anything.
    fn tidy(&self, state: &mut State<N>) {
        for client in 0..self.count() {
            let mut pending = [false; REQUESTS];
            pending[0] = state.duplicates > 0;
            for node in 0..N {
                let calls = state.nodes[node].links[client];
                // Without another grant, a key that is gone stays gone, and a fence never falls.
                let granted_again = state.duplicates > 0 || calls[0].may_run();
                for (call, made) in calls.iter().enumerate() {
                    let in_vain = *made == Call::Deaf
                        && !granted_again
                        && self.run(state, client, node, call).0 == state.nodes[node].store;
                    if in_vain {
                        state.nodes[node].links[client][call] = Call::None;
                    }
                    pending[call] |=
                        matches!(made, Call::Sent | Call::Deaf | Call::Ran(_)) && !in_vain;
                }
            }
            let me = &mut state.clients[client];
            let is_over = match me.stage {
                Stage::Complete => state.extensions == 0,
                stage => stage == Stage::Extended,
            };
            if is_over {
                me.of.lease = 0;
            }
            if me.stage >= Stage::Complete {
                for (asked, pending) in me.of.asked.iter_mut().zip(pending) {
                    *asked *= u8::from(pending);
                }
            }
        }
    }

    /// Sorts the nodes, and with them what the leases know of them.
    fn sorted(&self, mut state: State<N>) -> State<N> {
        self.tidy(&mut state);
        if let Some(order) = sorting(&state.nodes) {
            let nodes = state.nodes;
            state.nodes = std::array::from_fn(|place| nodes[usize::from(order[place])]);
            for client in &mut state.clients {
                client.of.lease = self.leases.moved(client.of.lease, &order);
            }
        }
        state
    }

    fn requests(&self, state: &State<N>, client: usize, actions: &mut Vec<Action>) {
        for (node, column) in state.nodes.iter().enumerate() {
            // Of nodes that are alike, one will do.
            if node > 0 && state.nodes[node - 1] == *column {
                continue;
            }
            for (call, made) in column.links[client].iter().enumerate() {
                let ran = || self.run(state, client, node, call);
                // What changes nothing and is not listened to need not be carried out.
                let matters = *made == Call::Sent || *made == Call::Deaf && ran().0 != column.store;
                if matters {
                    actions.push(Action::Run { client, node, call });
                }
                if call == 0 && !made.may_run() && state.duplicates > 0 {
                    let (store, heard) = ran();
                    let replaces_answer = matches!(made, Call::Ran(old) if *old != heard);
                    let ways = [(false, store != column.store), (true, replaces_answer)];
                    for (replaces_answer, _) in ways.into_iter().filter(|(_, matters)| *matters) {
                        actions.push(Action::Duplicate {
                            client,
                            node,
                            replaces_answer,
                        });
                    }
                }
            }
            for key in (0_u8..).take(self.bounds.sets[client].len()) {
                if self.nodes.vanish(column.store, client, key) != column.store {
                    actions.push(Action::Vanish { client, node, key });
                }
            }
        }
    }
}

impl<const N: usize> Model for Async<N> {
    type State = State<N>;
    type Action = Action;

    fn init_states(&self) -> Vec<State<N>> {
        let column = Column {
            store: self.nodes.empty(),
            ..Column::default()
        };
        vec![State {
            nodes: [column; N],
            clients: [Client::default(); CLIENTS],
            storage: Storage::default(),
            duplicates: self.bounds.duplicates,
            extensions: self.bounds.extensions,
            wipes: self.bounds.wipes,
        }]
    }

    fn actions(&self, state: &State<N>, actions: &mut Vec<Action>) {
        let mut may_begin = true;
        for (client, me) in state.clients.iter().enumerate().take(self.count()) {
            match me.stage {
                Stage::Idle if may_begin => {
                    may_begin = false;
                    let proposals = 1..=self.bounds.proposals;
                    actions.extend(proposals.map(|proposal| Action::Begin { client, proposal }));
                }
                Stage::Acquiring | Stage::Extending => self.decisions(state, client, actions),
                Stage::Complete if state.extensions > 0 => actions.push(Action::Extend { client }),
                Stage::Idle | Stage::Complete | Stage::Extended => {}
            }
            if me.stage != Stage::Idle {
                self.requests(state, client, actions);
            }
            if self.bounds.storage && me.stage >= Stage::Complete {
                for &key in &self.bounds.sets[client] {
                    let mut storage = state.storage;
                    if Self::write(&mut storage, &state.clients, client, key) {
                        actions.push(Action::Write { client, key });
                    }
                }
            }
        }
        if state.wipes > 0 {
            actions.extend((0..N).map(|node| Action::Wipe { node }));
        }
    }

    fn next_state(&self, last: &State<N>, action: Action) -> Option<State<N>> {
        let mut state = *last;
        match action {
            Action::Begin { client, proposal } => {
                state.clients[client].stage = Stage::Acquiring;
                state.clients[client].after = self.completed(last, client);
                let step = self.leases.begin(&spec(TTL, Some(proposal)), NOW);
                self.follow(&mut state, client, &step);
            }
            Action::Run { client, node, call } => {
                let (store, heard) = self.run(last, client, node, call);
                state.nodes[node].store = store;
                state.nodes[node].links[client][call].run(heard);
            }
            Action::Duplicate {
                client,
                node,
                replaces_answer,
            } => {
                state.duplicates -= 1;
                let (store, heard) = self.run(last, client, node, 0);
                state.nodes[node].store = store;
                if replaces_answer {
                    state.nodes[node].links[client][0] = Call::Ran(heard);
                }
            }
            Action::Vanish { client, node, key } => {
                let column = &mut state.nodes[node];
                column.store = self.nodes.vanish(column.store, client, key);
            }
            Action::Decide { client, step } => self.follow(&mut state, client, &step),
            Action::Extend { client } => {
                state.extensions -= 1;
                let (ttl, token) = (None, None);
                let me = &mut state.clients[client];
                me.stage = Stage::Extending;
                me.extended_after = self.completed(last, client);
                let input = Input::Extend { ttl, token };
                let step = self.leases.handle(me.of.lease, input, NOW);
                self.follow(&mut state, client, &step);
            }
            Action::Write { client, key } => {
                Self::write(&mut state.storage, &last.clients, client, key);
            }
            Action::Wipe { node } => {
                state.wipes -= 1;
                state.nodes[node].store = self.nodes.empty();
            }
        }
        Some(self.sorted(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(F1, |model: &Self, state: &State<N>| {
                model.pairs(state, |model, a, _, b| {
                    model.rivals[a] >> b.0 & 1 == 0 || b.1.token != state.clients[a].token
                })
            }),
            Property::always(F2, |model: &Self, state: &State<N>| {
                model.pairs(state, |_, _, a, b| {
                    a.after >> b.0 & 1 == 0 || b.1.token < a.token
                })
            }),
            Property::sometimes(
                "all acquisitions complete",
                |model: &Self, state: &State<N>| {
                    let mut clients = state.clients.iter().take(model.count());
                    clients.all(|client| client.stage >= Stage::Complete)
                },
            ),
            Property::sometimes("a later acquisition completes", |_, state: &State<N>| {
                let mut clients = state.clients.iter();
                clients.any(|client| client.stage >= Stage::Complete && client.after != 0)
            }),
        ];
        if self.bounds.variant != Variant::NoWriteBack && self.count() > 1 {
            properties.push(Property::sometimes(
                "an acquisition completes in its second phase",
                |model: &Self, state: &State<N>| {
                    let is_first = state.extensions == model.bounds.extensions;
                    let mut clients = state.clients.iter();
                    let is_second = |me: &Client| me.of.asked[1] != 0;
                    is_first && clients.any(|me| me.stage >= Stage::Complete && is_second(me))
                },
            ));
        }
        if self.bounds.storage {
            properties.push(Property::always(F3, |_, state: &State<N>| {
                !state.storage.reordered
            }));
        }
        if self.bounds.extensions > 0 {
            properties.push(Property::always(F4, |model: &Self, state: &State<N>| {
                model.pairs(state, |_, _, a, b| {
                    a.stage != Stage::Extended
                        || a.extended_after >> b.0 & 1 == 0
                        || b.1.token < a.token
                })
            }));
            properties.push(Property::sometimes(
                "an extension succeeds",
                |_, state: &State<N>| {
                    let mut clients = state.clients.iter();
                    clients.any(|client| client.stage == Stage::Extended)
                },
            ));
        }
        properties
    }
}

impl<const N: usize> Async<N> {
    /// Whether something holds of every two acquisitions that completed.
    fn pairs(
        &self,
        state: &State<N>,
        holds: impl Fn(&Self, usize, &Client, (usize, &Client)) -> bool,
    ) -> bool {
        let complete = || {
            let clients = state.clients.iter().enumerate();
            clients.filter(|(_, client)| client.stage >= Stage::Complete)
        };
        complete().all(|(a, first)| {
            complete().all(|(b, second)| a == b || holds(self, a, first, (b, second)))
        })
    }
}

/// {x,y}, {x} and {y}.
const SETS: [&[u8]; 3] = [&[0, 1], &[0], &[1]];

fn all<const N: usize>(runs: &[(&str, Bounds)]) {
    for (name, bounds) in runs {
        holds(name, Async::<N>::new(bounds.clone()));
    }
}

fn within<const N: usize>(states: usize, name: &str, bounds: Bounds) {
    holds_within(states, name, Async::<N>::new(bounds));
}

#[test]
fn tokens_of_two_acquisitions_are_unique_and_ordered_and_protect_a_storage() {
    let waits = |proposals| Bounds {
        timeouts: true,
        ..Bounds::one_key(2, proposals)
    };
    let stores = Bounds {
        storage: true,
        ..waits(2)
    };
    all::<3>(&[
        ("2 acquisitions of 1..2, storage", stores),
        ("2 acquisitions of 1..3", waits(3)),
    ]);
}

#[test]
fn repeated_acquire_keeps_tokens_unique_and_ordered() {
    let bounds = Bounds {
        duplicates: 1,
        ..Bounds::one_key(2, 2)
    };
    all::<3>(&[("2 acquisitions of 1..2, a duplicate", bounds)]);
}

#[test]
fn tokens_of_three_acquisitions_are_unique_and_ordered() {
    let name = "3 acquisitions, equal proposals";
    within::<3>(6_000_000, name, Bounds::one_key(3, 1));
}

#[test]
fn tokens_of_unequal_sets_are_unique_and_ordered_for_each_key() {
    let of = |proposals| Bounds::of_sets(&SETS[..2], proposals);
    let stores = Bounds {
        storage: true,
        ..of(2)
    };
    let repeats = Bounds {
        duplicates: 1,
        ..of(1)
    };
    let extends = Bounds {
        extensions: 1,
        ..of(1)
    };
    all::<3>(&[
        ("{x,y} {x} of 1..2, storage", stores),
        ("{x,y} {x}, equal proposals, a duplicate", repeats),
        ("{x,y} {x}, equal proposals, an extension", extends),
    ]);
    let name = "{x,y} {x} {y}, equal proposals";
    within::<3>(4_000_000, name, Bounds::of_sets(&SETS, 1));
}

#[test]
fn extension_proves_that_no_higher_token_completed_before_it() {
    let bounds = Bounds {
        extensions: 1,
        ..Bounds::one_key(2, 2)
    };
    all::<3>(&[("2 acquisitions of 1..2, an extension", bounds)]);
}

#[test]
fn tokens_from_five_nodes_are_unique_and_ordered() {
    let name = "5 nodes, 2 acquisitions, equal proposals";
    within::<5>(4_000_000, name, Bounds::one_key(2, 1));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_three_acquisitions_hold_too_when_asked_for() {
    let name = "3 acquisitions, equal proposals";
    within::<3>(FAR_MORE, name, Bounds::one_key(3, 1));
    let name = "3 acquisitions of 1..2";
    within::<3>(FAR_MORE, name, Bounds::one_key(3, 2));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_repeated_acquires_hold_too_when_asked_for() {
    let bounds = Bounds {
        duplicates: 2,
        storage: true,
        ..Bounds::one_key(2, 3)
    };
    let name = "2 acquisitions of 1..3, 2 duplicates, storage";
    within::<3>(FAR_MORE, name, bounds);
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_unequal_sets_hold_too_when_asked_for() {
    let name = "{x,y} {x} {y}, equal proposals";
    within::<3>(FAR_MORE, name, Bounds::of_sets(&SETS, 1));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_five_nodes_hold_too_when_asked_for() {
    let name = "5 nodes, 2 acquisitions of 1..2";
    within::<5>(FAR_MORE, name, Bounds::one_key(2, 2));
}

#[test]
fn wrong_rules_for_tokens_are_found() {
    let of = |variant, bounds: Bounds| Bounds { variant, ..bounds };
    let lost = Bounds {
        wipes: 1,
        storage: true,
        ..Bounds::one_key(2, 1)
    };
    let by_key = Bounds {
        extensions: 1,
        ..Bounds::one_key(2, 2)
    };
    let new_fences = Bounds {
        duplicates: 1,
        ..Bounds::of_sets(&SETS[..2], 2)
    };
    let counted = of(Variant::CountsEveryOk, Bounds::one_key(2, 2));
    let highest = of(Variant::NoWriteBack, Bounds::one_key(3, 1));
    let wrong: [(&str, Bounds, &[&'static str]); 6] = [
        ("T1 every OK counts", counted, &[F1]),
        ("T2 no write-back", highest, &[F2]),
        ("T3 lost memory, tokens", lost.clone(), &[F1]),
        ("T3 lost memory, storage", lost, &[F3]),
        (
            "T4 extension by key",
            of(Variant::ExtendsByKey, by_key),
            &[F4],
        ),
        (
            "T10 new fences only",
            of(Variant::RaisesNewFencesOnly, new_fences),
            &[F1, F2],
        ),
    ];
    for (name, bounds, properties) in wrong {
        breaks(name, Async::<3>::new(bounds), properties);
    }
}
