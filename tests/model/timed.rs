//! The timed model: ticks, so that validity, expiry and the age of a node's memory mean something.
//!
//! All clocks show the same tick; everything else is as asynchronous as in the other model, but
//! locks vanish only by their ttl, or with the whole memory of a node. Clients propose the tick at
//! which they begin, as wall clocks do.
//!
//! The guard is a node's *generation*: made, with the node's own time as its stamp, by the first
//! client that finds none, or one that another process made; read by every client on every new
//! connection; sent with every request, and compared by the node. A client asks no node whose
//! generation or whose process is younger than [`Bounds::guard`].
//! How long a node stays out is decided by the rules as shipped, [`Admissions`], of a client that has
//! never seen the node before: of their second line, what a client saw itself, nothing is assumed.

use std::time::Duration;

use stateright::{Model, Property};
use tower_redlock::protocol::admission::{self, Admissions, Introduction};
use tower_redlock::protocol::{OwnerToken, validity};

use crate::space::{Ask, Call, Heard, Nodes, Rounds, Step, Told, Variant, ticks};

const CLIENTS: usize = 2;
const NODES: usize = 3;
const PHASES: usize = 3;
const EXTENSIONS: usize = 2;

/// The first of the calls that are extensions.
const EXTEND: u8 = 4;

/// The generation that all nodes have had for ever.
const OLD: Generation = Generation {
    id: 1,
    stamp: 0,
    foreign: false,
};

/// Ages are counted from this tick; the old generation is older than any guard asks.
const START: u8 = 8;

/// How large a model is.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) variant: Variant,
    /// The ttl of each acquisition.
    pub(crate) ttls: [u8; CLIENTS],
    /// The ttl of each extension of the first acquisition, in order.
    pub(crate) extensions: Vec<u8>,
    /// How many ticks there are.
    pub(crate) horizon: u8,
    /// How often a node loses its memory, and in which ways.
    pub(crate) faults: u8,
    pub(crate) kinds: &'static [Fault],
    /// How often the clock of a node jumps one tick ahead.
    pub(crate) steps: u8,
    /// How long a node that lost its memory stays out; 0 for no guard.
    pub(crate) guard: u8,
    /// The node itself stays out so long, as with a delayed restart; there are no generations.
    pub(crate) delayed_restart: bool,
}

/// How a node loses its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// As by `FLUSHALL`: all is gone, while the process and its connections live on.
    Flush,
    /// Another process, without data.
    Restart,
    /// Another process, with data from before all locks: the generation is there.
    Rollback,
    /// The data of another node, as a replica gets it, while process and connections live on.
    Copy,
}

/// Which memory a node has: a number, 0 for none yet, and since when by the node's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Generation {
    id: u8,
    stamp: u8,
    /// Another process than the one that runs now made it.
    foreign: bool,
}

/// What passes between one client and one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Link {
    /// The generation that the client was told when it connected; 0 without a connection.
    known: u8,
    /// The tick from which on it asks the node for its vote; 0 if that was at once.
    from: u8,
    calls: [Call; 1 + PHASES + EXTENSIONS],
    /// The generation that went with each call.
    sent: [u8; 1 + PHASES + EXTENSIONS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Column {
    store: u32,
    generation: Generation,
    /// How many generations there were.
    made: u8,
    /// When the process began, and how far its clock is ahead.
    started: u8,
    ahead: u8,
    links: [Link; CLIENTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Stage {
    #[default]
    Away,
    /// Read the nodes' time in a step of its own, which only a wrong guard does.
    Looked,
    Connected,
    Acquiring,
    Complete,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    stage: Stage,
    /// When it looked at the nodes' time, or when its acquisition began.
    began: u8,
    round: u32,
    targets: [u8; PHASES],
    token: u8,
    /// The tick at which the lock is no more to be relied on.
    until: u8,
    /// The other acquisition had completed when this one began.
    after: bool,
    /// How many extensions were begun, and when each was.
    extensions: u8,
    extended_at: [u8; EXTENSIONS],
    /// Its last extension is under way; succeeded, if it is not and there was one.
    extending: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    now: u8,
    nodes: [Column; NODES],
    clients: [Client; CLIENTS],
    faults: u8,
    steps: u8,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Tick,
    Look {
        client: u8,
    },
    Connect {
        client: u8,
    },
    Reconnect {
        client: u8,
        node: u8,
    },
    Begin {
        client: u8,
    },
    Run {
        client: u8,
        node: u8,
        phase: u8,
    },
    Decide {
        client: u8,
        told: Vec<Told>,
        step: Step,
    },
    Extend {
        client: u8,
    },
    Lose {
        node: u8,
        fault: Fault,
        /// Whose copy the node becomes.
        source: u8,
    },
    Step {
        node: u8,
    },
}

#[derive(Debug)]
pub(crate) struct Timed {
    bounds: Bounds,
    nodes: Nodes,
    rounds: Rounds,
}

/// The property that only time can give.
pub(crate) const EXCLUSION: &str = "two acquisitions are never valid at once";
pub(crate) const UNIQUE: &str = "tokens are unique";
pub(crate) const ORDER: &str = "tokens increase in real-time order";

impl Column {
    /// Whether an age of this node is still counted.
    fn is_young(&self) -> bool {
        self.generation.stamp > 0 || self.started > 0
    }
}

impl Timed {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self {
            nodes: Nodes::new(bounds.variant, &vec![vec![0]; CLIENTS]),
            rounds: Rounds::new(bounds.variant, NODES),
            bounds,
        }
    }

    /// The first tick at which a lock with this ttl, begun at `began`, is no more valid.
    fn until(began: u8, ttl: u8) -> u8 {
        let valid = |now: &u8| validity::remaining(ticks(ttl), ticks(now - began)).is_none();
        (began..).find(valid).expect("every lock ends")
    }

    fn ask(&self, state: &State, client: u8, phase: u8) -> Ask {
        let me = &state.clients[usize::from(client)];
        let ttl = self.bounds.ttls[usize::from(client)];
        match phase {
            0 => Ask::Acquire {
                proposal: me.began - START + 1,
                ttl,
            },
            EXTEND.. => Ask::Confirm {
                token: me.token,
                ttl: self.bounds.extensions[usize::from(phase - EXTEND)],
            },
            _ => Ask::Confirm {
                token: me.targets[usize::from(phase) - 1],
                ttl,
            },
        }
    }

    /// What a node does with a call, and what the client hears.
    fn run(&self, state: &State, client: u8, node: u8, phase: u8) -> (u32, Heard) {
        let column = &state.nodes[usize::from(node)];
        let sent = column.links[usize::from(client)].sent[usize::from(phase)];
        let compares = self.generations() && self.bounds.variant != Variant::NoCompare;
        if compares && sent != column.generation.id {
            return (column.store, Heard::Failed);
        }
        let ask = self.ask(state, client, phase);
        self.nodes.ask(column.store, client, ask, state.now)
    }

    /// Sends one call to one node, unless there is no connection or its memory is too young.
    fn send(state: &mut State, client: usize, node: usize, phase: u8) -> bool {
        let link = &mut state.nodes[node].links[client];
        let may_vote = link.known != 0 && state.now >= link.from;
        if may_vote {
            link.calls[usize::from(phase)] = Call::Sent;
            link.sent[usize::from(phase)] = link.known;
        }
        may_vote
    }

    /// Whether nodes have generations.
    fn generations(&self) -> bool {
        self.bounds.guard > 0 && !self.bounds.delayed_restart
    }

    /// A client connects to a node and reads its generation, which it makes if there is none.
    ///
    /// The stamp is the node's own time, unless the client had read that before.
    fn admit(&self, column: &mut Column, client: usize, now: u8, looked: Option<u8>) {
        let variant = self.bounds.variant;
        let clock = now + column.ahead;
        let unbound = matches!(
            variant,
            Variant::NoUptimeRule | Variant::GenerationOfAnyProcess
        );
        let found = column.generation.id != 0 && (unbound || !column.generation.foreign);
        if !found {
            column.made += 1;
            column.generation = Generation {
                id: column.made,
                stamp: looked.unwrap_or(clock),
                foreign: false,
            };
        }
        let age = |since: u8| Duration::from_secs(u64::from(clock.saturating_sub(since)));
        let link = &mut column.links[client];
        let noticed = link.known != 0 || !found;
        let left = match variant {
            // It knows nothing of what it did not notice itself.
            Variant::AgeFromNotice if noticed && column.generation.id != OLD.id => {
                self.bounds.guard
            }
            Variant::AgeFromNotice => 0,
            Variant::NoUptimeRule => self.left(age(column.generation.stamp), Duration::MAX),
            // A process that tells its uptime in whole seconds may tell almost one too many.
            _ => {
                let uptime = age(column.started) + Duration::from_secs(1);
                self.left(age(column.generation.stamp), uptime)
            }
        };
        link.known = column.generation.id;
        link.from = if left == 0 { 0 } else { now + left };
    }

    /// Returns how long a node with a memory and a process of these ages stays out, by the rules as
    /// shipped, of a client that has never seen it before. A tick is a second.
    fn left(&self, age: Duration, uptime: Duration) -> u8 {
        let generation = admission::Generation::new(
            &OwnerToken::from_random([0; 16]),
            Duration::ZERO,
            "process",
        );
        let said = Introduction {
            run_id: "process".into(),
            replication_id: "data".into(),
            uptime,
            generation,
            now: age,
        };
        let window = Duration::from_secs(self.bounds.guard.into());
        let left = Admissions::new(window).admit(&"node".into(), said, Duration::ZERO);
        u8::try_from(left.as_secs()).expect("a window is a few ticks")
    }

    fn lose(&self, state: &mut State, node: u8, fault: Fault, source: u8) {
        let now = state.now;
        let source = state.nodes[usize::from(source)];
        let column = &mut state.nodes[usize::from(node)];
        column.store = match fault {
            Fault::Copy => source.store,
            Fault::Flush | Fault::Restart | Fault::Rollback => self.nodes.empty(),
        };
        if matches!(fault, Fault::Restart | Fault::Rollback) {
            column.started = now + column.ahead;
        }
        if !self.generations() {
            return;
        }
        match fault {
            Fault::Flush | Fault::Restart => column.generation = Generation::default(),
            Fault::Rollback => column.generation.foreign = column.generation.id != 0,
            Fault::Copy if source.generation.id == 0 => column.generation = Generation::default(),
            // To this node's clients it is one that they have never seen.
            Fault::Copy => {
                column.made += 1;
                column.generation = Generation {
                    id: column.made,
                    stamp: source.generation.stamp,
                    foreign: true,
                };
            }
        }
        if matches!(fault, Fault::Restart | Fault::Rollback) {
            for link in &mut column.links {
                if self.bounds.variant != Variant::CachesAdmission {
                    (link.known, link.from) = (0, 0);
                }
                for call in &mut link.calls {
                    *call = match *call {
                        Call::Sent => Call::Ran(Heard::Failed),
                        Call::Deaf => Call::None,
                        other => other,
                    };
                }
            }
        }
    }

    fn answers(&self, state: &State, client: u8) -> Vec<Told> {
        let me = &state.clients[usize::from(client)];
        let last = EXTEND + me.extensions.saturating_sub(1);
        let mut answers = Vec::new();
        for (node, column) in (0_u8..).zip(&state.nodes) {
            for (phase, call) in (0_u8..).zip(&column.links[usize::from(client)].calls) {
                let Call::Ran(heard) = *call else {
                    continue;
                };
                // An older extension was given up; who drives the rounds drops its answers.
                let counted = phase < EXTEND
                    || phase == last
                    || self.bounds.variant == Variant::CountsOldExtension;
                if counted {
                    answers.push(Told { node, phase, heard });
                }
            }
        }
        answers
    }

    fn decide(&self, state: &mut State, client: u8, log: &[Told]) {
        let me = usize::from(client);
        let mut round = state.clients[me].round;
        let mut step = Step::Wait;
        for told in log {
            (round, step) = self.rounds.tell(round, *told);
            let link = &mut state.nodes[usize::from(told.node)].links[me];
            link.calls[usize::from(told.phase)].read(told.heard);
        }
        let now = state.now;
        let ttl = self.bounds.ttls[me];
        match step {
            Step::Confirm(target) => {
                let phase = self.rounds.phase(round);
                state.clients[me].round = round;
                state.clients[me].targets[usize::from(phase) - 1] = target;
                let nodes = self.rounds.unconfirmed(round);
                for node in (0..NODES).filter(|node| nodes >> node & 1 == 1) {
                    Self::send(state, me, node, phase);
                }
            }
            Step::Granted(token) => {
                let client = &mut state.clients[me];
                client.stage = Stage::Complete;
                client.token = token;
                client.until = Self::until(client.began, ttl);
                client.round = 0;
                Self::deafen(state, me);
            }
            Step::Extended => {
                let client = &mut state.clients[me];
                let last = usize::from(client.extensions) - 1;
                let end = Self::until(client.extended_at[last], self.bounds.extensions[last]);
                // A lock whose validity is over is lost, whatever is answered then.
                if now < client.until {
                    client.until = client.until.max(end);
                }
                client.extending = false;
                client.round = 0;
                Self::deafen(state, me);
            }
            Step::Wait | Step::Over => {}
        }
    }

    fn deafen(state: &mut State, client: usize) {
        for column in &mut state.nodes {
            for call in &mut column.links[client].calls {
                call.deafen();
            }
        }
    }

    /// Forgets what cannot matter any more: ages that suffice, quarantines that are over, and
    /// the generations of calls that are over, but for what a property asks.
    fn tidy(&self, state: &mut State) {
        let now = state.now;
        for column in &mut state.nodes {
            let old = now + column.ahead - self.bounds.guard;
            for since in [&mut column.generation.stamp, &mut column.started] {
                if *since <= old {
                    *since = 0;
                }
            }
            if !column.is_young() {
                column.ahead = 0;
            }
            for link in &mut column.links {
                if link.from <= now {
                    link.from = 0;
                }
                for (phase, call) in link.calls.iter().enumerate() {
                    let over = match call {
                        Call::None => true,
                        Call::Ran(_) | Call::Read(_) => phase > 0,
                        Call::Sent | Call::Deaf => false,
                    };
                    if over {
                        link.sent[phase] = 0;
                    }
                }
            }
        }
    }

    fn sorted(&self, mut state: State) -> State {
        self.tidy(&mut state);
        if state.nodes.is_sorted() {
            return state;
        }
        let mut order = [0, 1, 2];
        order.sort_by_key(|node| state.nodes[usize::from(*node)]);
        state.nodes = order.map(|node| state.nodes[usize::from(node)]);
        for client in &mut state.clients {
            if client.stage == Stage::Acquiring || client.extending {
                client.round = self.rounds.moved(client.round, &order);
            }
        }
        state
    }

    fn requests(&self, state: &State, client: u8, actions: &mut Vec<Action>) {
        for (node, column) in (0_u8..).zip(&state.nodes) {
            let link = &column.links[usize::from(client)];
            if node > 0 && state.nodes[usize::from(node) - 1] == *column {
                continue;
            }
            if self.bounds.delayed_restart && state.now - column.started < self.bounds.guard {
                continue;
            }
            for (phase, call) in (0_u8..).zip(&link.calls) {
                let ran = || self.run(state, client, node, phase);
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
            }
            let away = matches!(
                state.clients[usize::from(client)].stage,
                Stage::Away | Stage::Looked
            );
            let stale = link.known != column.generation.id;
            // Looking again before the time is of use only if the node's clock jumped.
            let early = link.from > state.now && column.ahead > 0;
            if self.generations() && !away && (stale || early) {
                actions.push(Action::Reconnect { client, node });
            }
        }
    }
}

impl Model for Timed {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        // Without generations there is nothing to learn by connecting.
        let connected = !self.generations();
        let link = Link {
            known: if connected { OLD.id } else { 0 },
            ..Link::default()
        };
        let client = Client {
            stage: if connected {
                Stage::Connected
            } else {
                Stage::Away
            },
            ..Client::default()
        };
        let column = Column {
            store: self.nodes.empty(),
            generation: OLD,
            made: OLD.id,
            started: 0,
            ahead: 0,
            links: [link; CLIENTS],
        };
        vec![State {
            now: START,
            nodes: [column; NODES],
            clients: [client; CLIENTS],
            faults: self.bounds.faults,
            steps: self.bounds.steps,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < START + self.bounds.horizon {
            actions.push(Action::Tick);
        }
        for (client, me) in (0_u8..).zip(&state.clients) {
            let first = client == 0 || state.clients[0].stage >= Stage::Acquiring;
            match me.stage {
                Stage::Away if self.bounds.variant == Variant::StampOutside => {
                    actions.push(Action::Look { client });
                }
                Stage::Away | Stage::Looked => actions.push(Action::Connect { client }),
                Stage::Connected if first => actions.push(Action::Begin { client }),
                Stage::Acquiring => {
                    let in_time =
                        state.now < Self::until(me.began, self.bounds.ttls[usize::from(client)]);
                    let found = self
                        .rounds
                        .decisions(me.round, &self.answers(state, client));
                    actions.extend(
                        found
                            .into_iter()
                            .filter(|(_, step)| {
                                in_time
                                    || self.bounds.variant == Variant::IgnoresValidity
                                    || !matches!(step, Step::Granted(_))
                            })
                            .map(|(told, step)| Action::Decide { client, told, step }),
                    );
                }
                Stage::Complete if me.extending => {
                    let found = self
                        .rounds
                        .decisions(me.round, &self.answers(state, client));
                    let act = |(told, step)| Action::Decide { client, told, step };
                    actions.extend(found.into_iter().map(act));
                }
                Stage::Connected | Stage::Complete => {}
            }
            let extends = client == 0
                && me.stage == Stage::Complete
                && usize::from(me.extensions) < self.bounds.extensions.len()
                && state.now < me.until;
            if extends {
                actions.push(Action::Extend { client });
            }
            self.requests(state, client, actions);
        }
        for (node, column) in (0..).zip(&state.nodes) {
            // To what is old enough, and to a stamp that is not made yet, a jump is nothing.
            if state.steps > 0 && column.is_young() {
                actions.push(Action::Step { node });
            }
            for &fault in self.bounds.kinds {
                let sources = (0..).take(NODES);
                let sources = sources.filter(|source| (fault == Fault::Copy) == (*source != node));
                let lose = |source| Action::Lose {
                    node,
                    fault,
                    source,
                };
                if state.faults > 0 {
                    actions.extend(sources.map(lose));
                }
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = *last;
        let now = state.now;
        match action {
            Action::Tick => state.now += 1,
            Action::Look { client } => {
                let me = &mut state.clients[usize::from(client)];
                me.stage = Stage::Looked;
                me.began = now;
            }
            Action::Connect { client } => {
                let me = usize::from(client);
                let looked = state.clients[me].stage == Stage::Looked;
                let looked = looked.then_some(state.clients[me].began);
                for column in &mut state.nodes {
                    self.admit(column, me, now, looked);
                }
                state.clients[me].stage = Stage::Connected;
                state.clients[me].began = 0;
            }
            Action::Reconnect { client, node } => {
                let column = &mut state.nodes[usize::from(node)];
                self.admit(column, usize::from(client), now, None);
            }
            Action::Begin { client } => {
                let me = usize::from(client);
                let mut round = self.rounds.begin(None);
                for (index, node) in (0..NODES).zip(0_u8..) {
                    if !Self::send(&mut state, me, index, 0) {
                        let heard = Heard::Failed;
                        (round, _) = self.rounds.tell(
                            round,
                            Told {
                                node,
                                phase: 0,
                                heard,
                            },
                        );
                    }
                }
                state.clients[me] = Client {
                    stage: Stage::Acquiring,
                    began: now,
                    round,
                    after: last.clients[1 - me].stage == Stage::Complete,
                    ..Client::default()
                };
            }
            Action::Run {
                client,
                node,
                phase,
            } => {
                let (store, heard) = self.run(last, client, node, phase);
                let column = &mut state.nodes[usize::from(node)];
                column.store = store;
                column.links[usize::from(client)].calls[usize::from(phase)].run(heard);
            }
            Action::Decide { client, told, .. } => self.decide(&mut state, client, &told),
            Action::Extend { client } => {
                let me = usize::from(client);
                let number = state.clients[me].extensions;
                if self.bounds.variant != Variant::CountsOldExtension {
                    Self::deafen(&mut state, me);
                }
                let client = &mut state.clients[me];
                client.extended_at[usize::from(number)] = now;
                client.extensions += 1;
                client.extending = true;
                client.round = self.rounds.begin(Some(client.token));
                for node in 0..NODES {
                    Self::send(&mut state, me, node, EXTEND + number);
                }
            }
            Action::Lose {
                node,
                fault,
                source,
            } => {
                state.faults -= 1;
                self.lose(&mut state, node, fault, source);
            }
            Action::Step { node } => {
                state.steps -= 1;
                state.nodes[usize::from(node)].ahead += 1;
            }
        }
        Some(self.sorted(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(EXCLUSION, |_, state: &State| {
                !state.clients.iter().all(|client| state.now < client.until)
            }),
            Property::always(UNIQUE, |_, state: &State| {
                let [a, b] = &state.clients;
                !Self::both(state) || a.token != b.token
            }),
            Property::always(ORDER, |_, state: &State| {
                let [a, b] = &state.clients;
                !Self::both(state)
                    || (!b.after || a.token < b.token) && (!a.after || b.token < a.token)
            }),
            Property::sometimes("all acquisitions complete", |_, state| Self::both(state)),
        ];
        if !self.bounds.extensions.is_empty() {
            properties.push(Property::sometimes(
                "the last extension succeeds and prolongs",
                |model: &Self, state: &State| {
                    let client = &state.clients[0];
                    let all = usize::from(client.extensions) == model.bounds.extensions.len();
                    let plain = Self::until(client.began.max(START), model.bounds.ttls[0]);
                    all && !client.extending && client.until > plain
                },
            ));
        }
        if self.bounds.faults > 0 && self.generations() {
            properties.push(Property::sometimes(
                "a node that lost its memory votes again",
                |_, state: &State| {
                    state.nodes.iter().any(|node| {
                        let votes = |link: &Link| {
                            link.sent[0] > OLD.id && matches!(link.calls[0], Call::Read(_))
                        };
                        node.links.iter().any(votes)
                    })
                },
            ));
        }
        properties
    }
}

impl Timed {
    fn both(state: &State) -> bool {
        let mut clients = state.clients.iter();
        clients.all(|client| client.stage == Stage::Complete)
    }
}
