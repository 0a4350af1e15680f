//! The asynchronous model: no time at all, so a lock may vanish at any moment.
//!
//! A lock key may vanish at any node at any moment, which covers expiry, jumping clocks, and every
//! early, late or reordered `RELEASE`; requests run late or never, `ACQUIRE` more than once;
//! answers are read late or never; clients stop for ever, by never being scheduled again.
//!
//! Three reductions keep this small, and lose nothing. Acquisitions begin in the order of their
//! numbers. A client reads answers only at the moment at which they decide something: until then
//! it makes no difference whether it had read them. And nodes are interchangeable, so those of a state
//! are sorted; in a trace, the number of a node may therefore change from step to step.

use stateright::{Model, Property};

use crate::space::{Ask, Call, Heard, Nodes, Rounds, Step, Told, Variant};

/// The most acquisitions that a model has.
const CLIENTS: usize = 3;

/// The most keys that a model has.
const KEYS: usize = 2;

/// The most second phases of a round.
const PHASES: usize = 3;

/// The call that is the extension: the one after all second phases.
const EXTEND: u8 = 4;

/// Any ttl will do, since no time passes.
const TTL: u8 = 1;

/// How large a model is.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) variant: Variant,
    /// The keys of each acquisition.
    pub(crate) sets: Vec<Vec<u8>>,
    /// An acquisition proposes any number from 1 to this.
    pub(crate) proposals: u8,
    /// How many `ACQUIRE`s are carried out once more.
    pub(crate) duplicates: u8,
    /// How many extensions are begun.
    pub(crate) extensions: u8,
    /// How many nodes lose their memory.
    pub(crate) wipes: u8,
    /// Whether clients give up waiting for single answers and act on what they have.
    pub(crate) timeouts: bool,
    /// Whether holders write to a storage that checks tokens.
    pub(crate) storage: bool,
}

impl Bounds {
    /// `clients` acquisitions of the same key.
    pub(crate) fn one_key(clients: usize, proposals: u8) -> Self {
        Self::of_sets(vec![vec![0]; clients], proposals)
    }

    pub(crate) fn of_sets(sets: Vec<Vec<u8>>, proposals: u8) -> Self {
        Self {
            variant: Variant::Shipped,
            sets,
            proposals,
            duplicates: 0,
            extensions: 0,
            wipes: 0,
            timeouts: false,
            storage: false,
        }
    }
}

/// What passes between one client and one node; the phases are those of the rounds, and the last
/// is the extension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Calls([Call; PHASES + 2]);

/// One node, and everything that is under way to and from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Column {
    store: u32,
    clients: [Calls; CLIENTS],
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
    proposal: u8,
    round: u32,
    /// What each second phase confirms.
    targets: [u8; PHASES],
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
pub(crate) struct State<const N: usize> {
    nodes: [Column; N],
    clients: [Client; CLIENTS],
    storage: Storage,
    duplicates: u8,
    extensions: u8,
    wipes: u8,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Begin {
        client: u8,
        proposal: u8,
    },
    Run {
        client: u8,
        node: u8,
        phase: u8,
    },
    Duplicate {
        client: u8,
        node: u8,
        replaces_answer: bool,
    },
    Vanish {
        client: u8,
        node: u8,
        key: u8,
    },
    Decide {
        client: u8,
        told: Vec<Told>,
        step: Step,
    },
    Extend {
        client: u8,
    },
    Write {
        client: u8,
        key: u8,
    },
    Wipe {
        node: u8,
    },
}

#[derive(Debug)]
pub(crate) struct Async<const N: usize> {
    bounds: Bounds,
    nodes: Nodes,
    rounds: Rounds,
    /// Per client those that share a key with it, itself left out, as bits.
    rivals: Vec<u8>,
}

/// The properties that must always hold.
pub(crate) const F1: &str = "F1 tokens are unique";
pub(crate) const F2: &str = "F2 tokens increase in real-time order";
pub(crate) const F3: &str = "F3 the storage applies no older write after a newer";
pub(crate) const F4: &str = "F4 an extension proves that no higher token completed before it";

impl<const N: usize> Async<N> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let rivals = bounds.sets.iter().enumerate().map(|(me, mine)| {
            let others = bounds.sets.iter().enumerate();
            others
                .filter(|(other, theirs)| *other != me && theirs.iter().any(|k| mine.contains(k)))
                .fold(0, |bits, (other, _)| bits | 1 << other)
        });
        Self {
            nodes: Nodes::new(bounds.variant, &bounds.sets),
            rounds: Rounds::new(bounds.variant, N),
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

    fn ask(state: &State<N>, client: u8, phase: u8) -> Ask {
        let me = &state.clients[usize::from(client)];
        let token = match phase {
            0 => {
                return Ask::Acquire {
                    proposal: me.proposal,
                    ttl: TTL,
                };
            }
            EXTEND => me.token,
            phase => me.targets[usize::from(phase) - 1],
        };
        Ask::Confirm { token, ttl: TTL }
    }

    /// Every way in which reading answers leads `client` to do something.
    fn decisions(&self, state: &State<N>, client: u8, actions: &mut Vec<Action>) {
        let me = &state.clients[usize::from(client)];
        let current = self.rounds.phase(me.round);
        let mut answers = Vec::new();
        for (node, column) in (0_u8..).zip(&state.nodes) {
            for (phase, call) in (0_u8..).zip(&column.clients[usize::from(client)].0) {
                if let Call::Ran(heard) = *call {
                    answers.push(Told { node, phase, heard });
                }
                let late = matches!(call, Call::Sent | Call::Ran(_)) && phase <= current;
                if late && self.bounds.timeouts && me.stage == Stage::Acquiring {
                    let heard = Heard::Failed;
                    answers.push(Told { node, phase, heard });
                }
            }
        }
        let found = self.rounds.decisions(me.round, &answers);
        actions.extend(
            found
                .into_iter()
                .map(|(told, step)| Action::Decide { client, told, step }),
        );
    }

    fn decide(&self, state: &mut State<N>, client: u8, log: &[Told]) {
        let me = usize::from(client);
        let mut round = state.clients[me].round;
        let mut step = Step::Wait;
        for told in log {
            (round, step) = self.rounds.tell(round, *told);
            let calls = &mut state.nodes[usize::from(told.node)].clients[me].0;
            calls[usize::from(told.phase)].read(told.heard);
        }
        let client = &mut state.clients[me];
        match step {
            Step::Confirm(target) => {
                client.round = round;
                let phase = self.rounds.phase(round);
                client.targets[usize::from(phase) - 1] = target;
                let nodes = self.rounds.unconfirmed(round);
                for node in (0..N).filter(|node| nodes >> node & 1 == 1) {
                    state.nodes[node].clients[me].0[usize::from(phase)] = Call::Sent;
                }
            }
            Step::Granted(token) => {
                client.stage = Stage::Complete;
                client.token = token;
                client.round = 0;
                Self::deafen(state, me);
            }
            Step::Extended => {
                client.stage = Stage::Extended;
                client.round = 0;
                Self::deafen(state, me);
            }
            Step::Wait | Step::Over => {}
        }
    }

    fn deafen(state: &mut State<N>, client: usize) {
        for column in &mut state.nodes {
            for call in &mut column.clients[client].0 {
                call.deafen();
            }
        }
    }

    fn write(storage: &mut Storage, clients: &[Client], client: u8, key: u8) -> bool {
        let key = usize::from(key);
        let me = &clients[usize::from(client)];
        if me.token < storage.highest[key] {
            return false;
        }
        let before = *storage;
        for (other, rival) in clients.iter().enumerate() {
            let wrote = other != usize::from(client) && storage.wrote[key] >> other & 1 == 1;
            // Either it began after this one had completed, or their order is undefined.
            let newer = rival.after >> client & 1 == 1 || rival.token == me.token;
            storage.reordered |= wrote && newer;
        }
        storage.highest[key] = me.token;
        storage.wrote[key] |= 1 << client;
        *storage != before
    }

    /// Forgets what cannot matter any more: requests that will never change anything, and what is
    /// known for their sake only.
    fn tidy(&self, state: &mut State<N>) {
        for client in (0..self.count()).zip(0_u8..) {
            let (me, number) = client;
            if state.clients[me].stage < Stage::Complete {
                continue;
            }
            let mut pending = [false; 1 + PHASES];
            pending[0] = state.duplicates > 0;
            for node in 0..N {
                let column = state.nodes[node];
                let calls = column.clients[me].0;
                // Without another grant, a key that is gone stays gone, and a fence never falls.
                let granted_again = state.duplicates > 0 || calls[0] == Call::Deaf;
                pending[0] |= calls[0] == Call::Deaf;
                for (phase, call) in (1..=PHASES).zip(1_u8..) {
                    if calls[phase] != Call::Deaf {
                        continue;
                    }
                    let ask = Self::ask(state, number, call);
                    let changes = self.nodes.ask(column.store, number, ask, 0).0 != column.store;
                    if changes || granted_again {
                        pending[phase] = true;
                    } else {
                        state.nodes[node].clients[me].0[phase] = Call::None;
                    }
                }
            }
            let client = &mut state.clients[me];
            if !pending[0] {
                client.proposal = 0;
            }
            for (target, pending) in client.targets.iter_mut().zip(&pending[1..]) {
                if !pending {
                    *target = 0;
                }
            }
        }
    }

    /// Sorts the nodes, and with them what the rounds know of them.
    fn sorted(&self, mut state: State<N>) -> State<N> {
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
        for client in &mut state.clients {
            if matches!(client.stage, Stage::Acquiring | Stage::Extending) {
                client.round = self.rounds.moved(client.round, &order);
            }
        }
        state
    }

    fn requests(&self, state: &State<N>, client: u8, actions: &mut Vec<Action>) {
        let me = usize::from(client);
        for (node, column) in (0_u8..).zip(&state.nodes) {
            // Of nodes that are alike, one will do.
            if node > 0 && state.nodes[usize::from(node) - 1] == *column {
                continue;
            }
            for (phase, call) in (0_u8..).zip(&column.clients[me].0) {
                let ran = || {
                    let ask = Self::ask(state, client, phase);
                    self.nodes.ask(column.store, client, ask, 0)
                };
                // What changes nothing and is not listened to need not be carried out.
                let matters = match call {
                    Call::Sent => true,
                    Call::Deaf => ran().0 != column.store,
                    Call::None | Call::Ran(_) | Call::Read(_) => false,
                };
                if matters {
                    actions.push(Action::Run {
                        client,
                        node,
                        phase,
                    });
                }
                let twice = phase == 0 && !matches!(call, Call::Sent | Call::Deaf);
                if twice && state.duplicates > 0 {
                    let (store, heard) = ran();
                    if store != column.store {
                        let replaces_answer = false;
                        actions.push(Action::Duplicate {
                            client,
                            node,
                            replaces_answer,
                        });
                    }
                    if matches!(call, Call::Ran(old) if *old != heard) {
                        let replaces_answer = true;
                        actions.push(Action::Duplicate {
                            client,
                            node,
                            replaces_answer,
                        });
                    }
                }
            }
            for key in (0_u8..).take(self.bounds.sets[me].len()) {
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
        for (client, me) in (0_u8..).zip(&state.clients).take(self.count()) {
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
                for &key in &self.bounds.sets[usize::from(client)] {
                    let mut storage = state.storage;
                    if Self::write(&mut storage, &state.clients, client, key) {
                        actions.push(Action::Write { client, key });
                    }
                }
            }
        }
        if state.wipes > 0 {
            actions.extend((0..N).map(|node| Action::Wipe {
                node: u8::try_from(node).unwrap_or(u8::MAX),
            }));
        }
    }

    fn next_state(&self, last: &State<N>, action: Action) -> Option<State<N>> {
        let mut state = *last;
        match action {
            Action::Begin { client, proposal } => {
                let me = usize::from(client);
                state.clients[me] = Client {
                    stage: Stage::Acquiring,
                    proposal,
                    round: self.rounds.begin(None),
                    after: self.completed(last, me),
                    ..Client::default()
                };
                for column in &mut state.nodes {
                    column.clients[me].0[0] = Call::Sent;
                }
            }
            Action::Run {
                client,
                node,
                phase,
            } => {
                let ask = Self::ask(last, client, phase);
                let column = &mut state.nodes[usize::from(node)];
                let (store, heard) = self.nodes.ask(column.store, client, ask, 0);
                column.store = store;
                column.clients[usize::from(client)].0[usize::from(phase)].run(heard);
            }
            Action::Duplicate {
                client,
                node,
                replaces_answer,
            } => {
                state.duplicates -= 1;
                let ask = Self::ask(last, client, 0);
                let column = &mut state.nodes[usize::from(node)];
                let (store, heard) = self.nodes.ask(column.store, client, ask, 0);
                column.store = store;
                if replaces_answer {
                    column.clients[usize::from(client)].0[0] = Call::Ran(heard);
                }
            }
            Action::Vanish { client, node, key } => {
                let column = &mut state.nodes[usize::from(node)];
                column.store = self.nodes.vanish(column.store, client, key);
            }
            Action::Decide { client, told, .. } => self.decide(&mut state, client, &told),
            Action::Extend { client } => {
                state.extensions -= 1;
                let me = usize::from(client);
                let completed = self.completed(last, me);
                let client = &mut state.clients[me];
                client.stage = Stage::Extending;
                client.round = self.rounds.begin(Some(client.token));
                client.extended_after = completed;
                for column in &mut state.nodes {
                    column.clients[me].0[usize::from(EXTEND)] = Call::Sent;
                }
            }
            Action::Write { client, key } => {
                Self::write(&mut state.storage, &last.clients, client, key);
            }
            Action::Wipe { node } => {
                state.wipes -= 1;
                state.nodes[usize::from(node)].store = self.nodes.empty();
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
                |_, state: &State<N>| {
                    let mut clients = state.clients.iter();
                    clients.any(|client| client.stage >= Stage::Complete && client.targets[0] != 0)
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
