//! The timed model of readers and writers: ticks, so that validity, expiry and release mean something.
//!
//! Each client makes one attempt, as a reader or as a writer. Writers are unfenced, because readers have no number;
//! tokens are the matter of the other models. A client may give up or release at any time, and its requests run late,
//! twice or never. A node may lose its memory; it then refuses votes for as long as the restart guard says.
//!
//! A request that changes nothing at its node and does not help its client is not carried out, which is as if it were
//! lost. This and a few rules like it keep three clients within some millions of states; each asks the shipped code
//! whether a step makes a difference.

use stateright::{Model, Property};
use tower_redlock::protocol::validity;

use crate::space::{Ask, Call, Heard, Memo, Nodes, Rounds, SharedAsk, Step, Told, Variant, ticks};

const CLIENTS: usize = 3;
const NODES: usize = 3;

/// The requests of one client to one node.
const ACQUIRE: usize = 0;
const RETRY: usize = 1;
const EXTEND: usize = 2;
const RELEASE: usize = 4;
const CALLS: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Reader,
    Writer,
    Absent,
}

/// How large a model is.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) variant: Variant,
    pub(crate) roles: [Role; CLIENTS],
    pub(crate) ttls: [u8; CLIENTS],
    /// The ttl of each extension of the first client, in order; two at most.
    pub(crate) extensions: Vec<u8>,
    pub(crate) horizon: u8,
    /// How often an `ACQUIRE` is sent a second time.
    pub(crate) retries: u8,
    /// How often a node loses its memory.
    pub(crate) wipes: u8,
    /// How long a node that lost its memory stays out.
    pub(crate) guard: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Column {
    store: u32,
    /// The number of its memory, which every request for a vote names.
    memory: u8,
    /// The tick from which on it votes; 0 if it has lost no memory of late.
    votes_from: u8,
    calls: [[Call; CALLS]; CLIENTS],
    /// The memory that each call named.
    named: [[u8; CALLS]; CLIENTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Stage {
    #[default]
    Idle,
    Acquiring,
    Holding,
    /// Its lock is no more to be relied on, or would not be if it still came.
    Late,
    /// It has released, or given up.
    Gone,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    stage: Stage,
    began: u8,
    round: u32,
    /// The tick at which its lock is no more to be relied on.
    until: u8,
    extensions: u8,
    extended_at: u8,
    is_extending: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    now: u8,
    nodes: [Column; NODES],
    clients: [Client; CLIENTS],
    retries: u8,
    wipes: u8,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Tick,
    Begin {
        client: u8,
    },
    Retry {
        client: u8,
        node: u8,
    },
    Run {
        client: u8,
        node: u8,
        call: u8,
    },
    Decide {
        client: u8,
        told: Vec<Told>,
        step: Step,
    },
    Extend,
    Release {
        client: u8,
    },
    Wipe {
        node: u8,
    },
}

#[derive(Debug)]
pub(crate) struct Shared {
    bounds: Bounds,
    nodes: Nodes,
    rounds: Rounds,
    helping: Memo<Heard, bool>,
    orphaned: Memo<(u32, u8), bool>,
}

pub(crate) const EXCLUSION: &str = "nobody is valid beside a valid writer";

const FREE: &str = "a node without a holder grants the key";

const GONE: &str = "a reader that released cannot extend";

impl Bounds {
    pub(crate) fn of(roles: [Role; CLIENTS]) -> Self {
        Self {
            variant: Variant::Shipped,
            roles,
            ttls: [2; CLIENTS],
            extensions: Vec::new(),
            horizon: 4,
            retries: 0,
            wipes: 0,
            guard: 0,
        }
    }
}

impl Shared {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self {
            nodes: Nodes::new(bounds.variant, &vec![vec![0]; CLIENTS]),
            rounds: Rounds::new(bounds.variant, NODES),
            helping: Memo::new(),
            orphaned: Memo::new(),
            bounds,
        }
    }

    /// The first tick at which a lock with this ttl, begun at `began`, is no more valid.
    fn until(began: u8, ttl: u8) -> u8 {
        let valid = |now: &u8| validity::remaining(ticks(ttl), ticks(now - began)).is_none();
        (began..).find(valid).expect("every lock ends")
    }

    fn is_valid(state: &State, client: usize) -> bool {
        let client = &state.clients[client];
        client.stage == Stage::Holding && state.now < client.until
    }

    fn ask(&self, client: usize, call: usize) -> Ask {
        let ttl = self.bounds.ttls[client];
        match (self.bounds.roles[client], call) {
            (Role::Writer, ACQUIRE | RETRY) => Ask::Exclude { ttl },
            (Role::Writer, RELEASE) => Ask::Release,
            (Role::Reader, ACQUIRE | RETRY) => Ask::Shared(SharedAsk::Acquire { ttl }),
            (Role::Reader, RELEASE) => Ask::Shared(SharedAsk::Release),
            (Role::Reader, extension) => Ask::Shared(SharedAsk::Confirm {
                ttl: self.bounds.extensions[extension - EXTEND],
            }),
            (role, call) => unreachable!("{role:?} sends no {call}"),
        }
    }

    /// What a node does with a call, and what the client hears.
    fn run(&self, state: &State, client: usize, node: usize, call: usize) -> (u32, Heard) {
        let column = &state.nodes[node];
        let is_vote = call != RELEASE;
        let compares = self.bounds.variant != Variant::NoCompare;
        if is_vote && compares && column.named[client][call] != column.memory {
            return (column.store, Heard::Failed);
        }
        let number = u8::try_from(client).expect("few clients");
        self.nodes
            .ask(column.store, number, self.ask(client, call), state.now)
    }

    /// Whether two nodes that answer this and one that grants are a majority for any round.
    fn helps(&self, heard: Heard) -> bool {
        self.helping.get_or(heard, || {
            [(None, Heard::Granted(0)), (Some(0), Heard::At(0))]
                .into_iter()
                .any(|(extends, other)| {
                    let answers = [(0, heard), (1, heard), (2, other)];
                    let phase = 0;
                    let told = answers.map(|(node, heard)| Told { node, phase, heard });
                    let round = self.rounds.begin(extends);
                    !self.rounds.decisions(round, &told).is_empty()
                })
        })
    }

    /// Whether a client has the lock at a node.
    fn has(&self, store: u32, client: usize, now: u8) -> bool {
        let ask = match self.bounds.roles[client] {
            Role::Reader => Ask::Shared(SharedAsk::Confirm { ttl: 1 }),
            Role::Writer => Ask::Confirm { token: 1, ttl: 1 },
            Role::Absent => return false,
        };
        let number = u8::try_from(client).expect("few clients");
        let (_, heard) = self.nodes.ask(store, number, ask, now);
        matches!(heard, Heard::At(_))
    }

    /// Whether a node has a lock that no client has.
    fn is_orphaned(&self, store: u32, now: u8) -> bool {
        self.orphaned.get_or((store, now), || {
            let is_held = self.nodes.held(store, now) > 0;
            is_held && !(0..CLIENTS).any(|client| self.has(store, client, now))
        })
    }

    /// Whether a released reader has the lock at a node that has carried out all that it will.
    fn came_back(&self, state: &State, client: usize, column: &Column) -> bool {
        let is_done = |call| column.calls[client][call] == Call::None;
        self.bounds.roles[client] == Role::Reader
            && state.clients[client].stage == Stage::Gone
            && [ACQUIRE, RETRY, RELEASE].into_iter().all(is_done)
            && self.has(column.store, client, state.now)
    }

    /// Sends a call to a node, unless the node may not vote.
    fn send(state: &mut State, client: usize, node: usize, call: usize) -> bool {
        let column = &mut state.nodes[node];
        let is_admitted = call == RELEASE || column.votes_from <= state.now;
        if is_admitted {
            column.calls[client][call] = Call::Sent;
            column.named[client][call] = column.memory;
        }
        is_admitted
    }

    fn answers(&self, state: &State, client: usize) -> Vec<Told> {
        let me = &state.clients[client];
        let mut answers = Vec::new();
        for (node, column) in (0_u8..).zip(&state.nodes) {
            for (call, made) in column.calls[client].iter().enumerate() {
                let Call::Ran(heard) = *made else {
                    continue;
                };
                let is_read = if me.is_extending {
                    let last = EXTEND + usize::from(me.extensions) - 1;
                    call == last
                        || (EXTEND..last).contains(&call)
                            && self.bounds.variant == Variant::CountsOldExtension
                } else {
                    me.stage == Stage::Acquiring && call <= RETRY
                };
                if is_read {
                    let phase = 0;
                    answers.push(Told { node, phase, heard });
                }
            }
        }
        answers
    }

    fn deafen(state: &mut State, client: usize) {
        for column in &mut state.nodes {
            for call in &mut column.calls[client] {
                call.deafen();
            }
        }
    }

    fn decide(&self, state: &mut State, client: usize, log: &[Told]) {
        let mut round = state.clients[client].round;
        let mut step = Step::Wait;
        for told in log {
            (round, step) = self.rounds.tell(round, *told);
        }
        let (now, ttl) = (state.now, self.bounds.ttls[client]);
        let is_wrong = self.bounds.variant == Variant::EndFromReply;
        let me = &mut state.clients[client];
        match step {
            Step::Granted(_) => {
                me.stage = Stage::Holding;
                me.until = Self::until(if is_wrong { now } else { me.began }, ttl);
            }
            Step::Extended => {
                let number = usize::from(me.extensions) - 1;
                let began = if is_wrong { now } else { me.extended_at };
                let end = Self::until(began, self.bounds.extensions[number]);
                // A lock whose validity is over is lost, whatever is answered then.
                if now < me.until {
                    me.until = me.until.max(end);
                }
                me.is_extending = false;
            }
            Step::Wait | Step::Over | Step::Confirm(_) => return,
        }
        me.round = 0;
        Self::deafen(state, client);
    }

    /// The same state without what makes no difference any more, and with the nodes in order.
    fn canonical(&self, mut state: State) -> State {
        for client in 0..CLIENTS {
            self.forget_what_is_late(&mut state, client);
            for node in 0..NODES {
                self.drop_in_vain(&mut state, client, node);
            }
        }
        let now = state.now;
        for column in &mut state.nodes {
            if column.votes_from <= now {
                column.votes_from = 0;
            }
            for (calls, named) in column.calls.iter().zip(&mut column.named) {
                for (call, named) in calls.iter().zip(named) {
                    if !matches!(call, Call::Sent | Call::Deaf) {
                        *named = 0;
                    }
                }
            }
        }
        if state.nodes.is_sorted() {
            return state;
        }
        let mut order = [0, 1, 2];
        order.sort_by_key(|node| state.nodes[usize::from(*node)]);
        state.nodes = order.map(|node| state.nodes[usize::from(node)]);
        for client in &mut state.clients {
            if client.stage == Stage::Acquiring || client.is_extending {
                client.round = self.rounds.moved(client.round, &order);
            }
        }
        state
    }

    /// A client whose lock is not valid any more, and will not be, can only release it.
    fn forget_what_is_late(&self, state: &mut State, client: usize) {
        let me = &mut state.clients[client];
        let is_late = match me.stage {
            Stage::Acquiring => {
                let ends = Self::until(me.began, self.bounds.ttls[client]);
                state.now >= ends && self.bounds.variant != Variant::EndFromReply
            }
            Stage::Holding => state.now >= me.until,
            Stage::Idle | Stage::Late | Stage::Gone => false,
        };
        if is_late {
            *me = Client {
                stage: Stage::Late,
                ..Client::default()
            };
            Self::deafen(state, client);
        } else if me.stage == Stage::Holding && self.bounds.extensions.is_empty() {
            me.began = 0;
        }
    }

    /// Drops requests that find no lock of their client, if no other request can bring it one.
    fn drop_in_vain(&self, state: &mut State, client: usize, node: usize) {
        let calls = &state.nodes[node].calls[client];
        let may_run = |call: usize| matches!(calls[call], Call::Sent | Call::Deaf);
        let may_repeat = state.retries > 0 && calls[RETRY] == Call::None;
        let may_begin = self.bounds.variant == Variant::ReusesOwner;
        if may_run(ACQUIRE) || may_run(RETRY) || may_repeat || may_begin {
            return;
        }
        for call in EXTEND..CALLS {
            if state.nodes[node].calls[client][call] == Call::Deaf {
                let (store, _) = self.run(state, client, node, call);
                let is_lost = call == RELEASE || !self.has(store, client, state.now);
                if store == state.nodes[node].store && is_lost {
                    state.nodes[node].calls[client][call] = Call::None;
                }
            }
        }
    }

    fn of_client(&self, state: &State, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        let number = u8::try_from(client).expect("few clients");
        match me.stage {
            Stage::Idle if self.bounds.roles[client] != Role::Absent => {
                actions.push(Action::Begin { client: number });
            }
            Stage::Acquiring | Stage::Holding | Stage::Late => {
                actions.push(Action::Release { client: number });
            }
            Stage::Gone if self.bounds.variant == Variant::ReusesOwner => {
                actions.push(Action::Begin { client: number });
            }
            Stage::Idle | Stage::Gone => {}
        }
        if me.stage == Stage::Acquiring || me.is_extending {
            let found = self
                .rounds
                .decisions(me.round, &self.answers(state, client));
            for (told, step) in found {
                actions.push(Action::Decide {
                    client: number,
                    told,
                    step,
                });
            }
        }
        let extends = client == 0
            && usize::from(me.extensions) < self.bounds.extensions.len()
            && Self::is_valid(state, client);
        if extends {
            actions.push(Action::Extend);
        }
        for (node, column) in (0_u8..).zip(&state.nodes) {
            // Of equal nodes, one is enough.
            if node > 0 && state.nodes[usize::from(node) - 1] == *column {
                continue;
            }
            let calls = &column.calls[client];
            if state.retries > 0 && me.stage != Stage::Idle && calls[RETRY] == Call::None {
                actions.push(Action::Retry {
                    client: number,
                    node,
                });
            }
            for (call, made) in calls.iter().enumerate() {
                if !matches!(made, Call::Sent | Call::Deaf) {
                    continue;
                }
                // What changes nothing and does not help its client might as well be lost.
                let (store, heard) = self.run(state, client, usize::from(node), call);
                if store != column.store || *made == Call::Sent && self.helps(heard) {
                    actions.push(Action::Run {
                        client: number,
                        node,
                        call: u8::try_from(call).expect("few calls"),
                    });
                }
            }
        }
    }
}

impl Model for Shared {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let column = Column {
            store: self.nodes.empty(),
            memory: 1,
            ..Column::default()
        };
        vec![State {
            now: 1,
            nodes: [column; NODES],
            clients: [Client::default(); CLIENTS],
            retries: self.bounds.retries,
            wipes: self.bounds.wipes,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now <= self.bounds.horizon {
            actions.push(Action::Tick);
        }
        for client in 0..CLIENTS {
            // Clients of one role with one ttl are equal: they begin in their order. The first may extend.
            let first = usize::from(!self.bounds.extensions.is_empty());
            let before = client.checked_sub(1).filter(|before| {
                let (roles, ttls) = (&self.bounds.roles, &self.bounds.ttls);
                *before >= first && roles[*before] == roles[client] && ttls[*before] == ttls[client]
            });
            let waits = before.is_some_and(|before| state.clients[before].stage == Stage::Idle);
            if !waits {
                self.of_client(state, client, actions);
            }
        }
        if state.wipes > 0 {
            for node in 0..NODES {
                let node = u8::try_from(node).expect("few nodes");
                actions.push(Action::Wipe { node });
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = *last;
        match action {
            Action::Tick => state.now += 1,
            Action::Begin { client } => {
                let me = usize::from(client);
                let mut round = self.rounds.begin(None);
                for (index, node) in (0..NODES).zip(0_u8..) {
                    if !Self::send(&mut state, me, index, ACQUIRE) {
                        let (phase, heard) = (0, Heard::Failed);
                        (round, _) = self.rounds.tell(round, Told { node, phase, heard });
                    }
                }
                state.clients[me] = Client {
                    stage: Stage::Acquiring,
                    began: state.now,
                    round,
                    ..Client::default()
                };
            }
            Action::Retry { client, node } => {
                state.retries -= 1;
                Self::send(&mut state, client.into(), node.into(), RETRY);
                if state.clients[usize::from(client)].stage != Stage::Acquiring {
                    let column = &mut state.nodes[usize::from(node)];
                    column.calls[usize::from(client)][RETRY].deafen();
                }
            }
            Action::Run { client, node, call } => {
                let (client, node, call) = (client.into(), usize::from(node), usize::from(call));
                let (store, heard) = self.run(last, client, node, call);
                let column = &mut state.nodes[node];
                column.store = store;
                let made: &mut Call = &mut column.calls[client][call];
                made.run(heard);
                if call == RELEASE || !self.helps(heard) {
                    *made = Call::None;
                }
            }
            Action::Decide { client, told, .. } => self.decide(&mut state, client.into(), &told),
            Action::Extend => {
                if self.bounds.variant != Variant::CountsOldExtension {
                    Self::deafen(&mut state, 0);
                }
                let me = &mut state.clients[0];
                let number = usize::from(me.extensions);
                me.extensions += 1;
                me.extended_at = state.now;
                me.is_extending = true;
                me.round = self.rounds.begin(Some(0));
                for node in 0..NODES {
                    Self::send(&mut state, 0, node, EXTEND + number);
                }
            }
            Action::Release { client } => {
                let me = usize::from(client);
                Self::deafen(&mut state, me);
                state.clients[me] = Client {
                    stage: Stage::Gone,
                    ..Client::default()
                };
                for node in 0..NODES {
                    Self::send(&mut state, me, node, RELEASE);
                    state.nodes[node].calls[me][RELEASE].deafen();
                }
            }
            Action::Wipe { node } => {
                state.wipes -= 1;
                let column = &mut state.nodes[usize::from(node)];
                column.store = self.nodes.empty();
                column.memory += 1;
                column.votes_from = state.now + self.bounds.guard;
            }
        }
        Some(self.canonical(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(EXCLUSION, |model: &Self, state: &State| {
                let valid = |client: &usize| Self::is_valid(state, *client);
                let mut writers = (0..CLIENTS)
                    .filter(valid)
                    .filter(|client| model.bounds.roles[*client] == Role::Writer);
                writers.next().is_none() || (0..CLIENTS).filter(valid).count() == 1
            }),
            Property::always(FREE, |model: &Self, state: &State| {
                let mut nodes = state.nodes.iter();
                !nodes.any(|column| model.is_orphaned(column.store, state.now))
            }),
        ];
        // What is repeated late may bring a reader back, until its ttl is over.
        if self.bounds.retries == 0 {
            properties.push(Property::always(GONE, |model: &Self, state: &State| {
                let mut nodes = state.nodes.iter();
                !nodes.any(|node| (0..CLIENTS).any(|client| model.came_back(state, client, node)))
            }));
        }
        let roles = &self.bounds.roles;
        let count = |role| roles.iter().filter(|other| **other == role).count();
        if count(Role::Reader) > 1 {
            properties.push(Property::sometimes(
                "two readers are valid at once",
                |model: &Self, state: &State| {
                    let valid = (0..CLIENTS).filter(|client| Self::is_valid(state, *client));
                    let readers =
                        valid.filter(|client| model.bounds.roles[*client] == Role::Reader);
                    readers.count() > 1
                },
            ));
        }
        if count(Role::Reader) > 0 && count(Role::Writer) > 0 {
            properties.push(Property::sometimes(
                "a writer is valid before the end that a released reader had",
                |model: &Self, state: &State| {
                    let is = |client: usize, role| model.bounds.roles[client] == role;
                    let writes = (0..CLIENTS)
                        .any(|client| is(client, Role::Writer) && Self::is_valid(state, client));
                    let left = (0..CLIENTS).any(|client| {
                        is(client, Role::Reader) && state.clients[client].stage == Stage::Gone
                    });
                    writes && left && state.now <= 2
                },
            ));
        }
        if !self.bounds.extensions.is_empty() {
            properties.push(Property::sometimes(
                "an extension prolongs",
                |model: &Self, state: &State| {
                    let me = &state.clients[0];
                    let plain = Self::until(me.began, model.bounds.ttls[0]);
                    me.stage == Stage::Holding && !me.is_extending && me.until > plain
                },
            ));
        }
        properties
    }
}
