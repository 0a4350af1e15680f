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

use std::sync::Arc;
use std::time::Duration;

use stateright::{Model, Property};
use tower_redlock::protocol::OwnerToken;
use tower_redlock::protocol::admission::{self, Admissions, Introduction};
use tower_redlock::protocol::lease::{Event, Input, Lease};

use crate::leases::{
    self, Call, Heard, Leases, Step, Told, keep_old_answers, sorting, spec, tick_after,
};
use crate::space::{Nodes, Variant, ticks};
use crate::{FAR_MORE, breaks, holds, holds_within};

const CLIENTS: usize = 2;
const NODES: usize = 3;

/// The most requests of a client: an `ACQUIRE`, three second phases and two extensions.
const REQUESTS: usize = 6;

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
struct Bounds {
    variant: Variant,
    /// The ttl of each acquisition.
    ttls: [u8; CLIENTS],
    /// The ttl of each extension of the first acquisition, in order.
    extensions: Vec<u8>,
    /// How many ticks there are.
    horizon: u8,
    /// How often a node loses its memory, and in which ways.
    faults: u8,
    kinds: &'static [Fault],
    /// How often the clock of a node jumps one tick ahead.
    steps: u8,
    /// How long a node that lost its memory stays out; 0 for no guard.
    guard: u8,
    /// The node itself stays out so long, as with a delayed restart; there are no generations.
    delayed_restart: bool,
}

/// How a node loses its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
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
    calls: [Call; REQUESTS],
    /// The generation that went with each call.
    sent: [u8; REQUESTS],
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
    /// It has not got the lock, and stops there.
    Refused,
    Complete,
    /// It was told that its lock is lost.
    Lost,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    stage: Stage,
    /// When it looked at the nodes' time, or when its acquisition began.
    began: u8,
    of: leases::Client<REQUESTS>,
    token: u8,
    /// The tick at which the lock is no more to be relied on.
    until: u8,
    /// The other acquisition had completed when this one began.
    after: bool,
    /// How many extensions were begun.
    extensions: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    now: u8,
    nodes: [Column; NODES],
    clients: [Client; CLIENTS],
    faults: u8,
    steps: u8,
    /// A lock was extended that was lost, or over.
    extended_too_late: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Action {
    Tick,
    Look {
        client: usize,
    },
    Connect {
        client: usize,
    },
    Reconnect {
        client: usize,
        node: usize,
    },
    Begin {
        client: usize,
    },
    Run {
        client: usize,
        node: usize,
        call: usize,
    },
    Decide {
        client: usize,
        step: Arc<Step>,
    },
    Extend {
        client: usize,
    },
    Lose {
        node: usize,
        fault: Fault,
        /// Whose copy the node becomes.
        source: usize,
    },
    Step {
        node: usize,
    },
}

#[derive(Debug)]
struct Timed {
    bounds: Bounds,
    nodes: Nodes,
    leases: Leases,
}

/// The property that only time can give.
const EXCLUSION: &str = "two acquisitions are never valid at once";
const UNIQUE: &str = "tokens are unique";
const ORDER: &str = "tokens increase in real-time order";
const LOSS: &str = "what is lost or over is not extended";

impl Column {
    /// Whether an age of this node is still counted.
    fn is_young(&self) -> bool {
        self.generation.stamp > 0 || self.started > 0
    }
}

impl Timed {
    fn new(bounds: Bounds) -> Self {
        let nodes = Nodes::new(bounds.variant, &vec![vec![0]; CLIENTS]);
        Self {
            leases: Leases::new(&nodes.words, NODES),
            nodes,
            bounds,
        }
    }

    /// What a node does with a call, and what the client hears.
    fn run(&self, state: &State, client: usize, node: usize, call: usize) -> (u32, Heard) {
        let column = &state.nodes[node];
        let compares = self.generations() && self.bounds.variant != Variant::NoCompare;
        if compares && column.links[client].sent[call] != column.generation.id {
            return (column.store, Heard::FAILED);
        }
        let op = state.clients[client].of.asked[call];
        self.nodes.execute(column.store, client, op, state.now)
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

    fn lose(&self, state: &mut State, node: usize, fault: Fault, source: usize) {
        let now = state.now;
        let source = state.nodes[source];
        let column = &mut state.nodes[node];
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
                        Call::Sent => Call::Ran(Heard::FAILED),
                        Call::Deaf => Call::None,
                        other => other,
                    };
                }
            }
        }
    }

    /// Every way in which reading answers, or the time, leads `client` to do something.
    fn decisions(&self, state: &State, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        let lease = me.of.lease;
        if lease == 0 {
            return;
        }
        let extends = self.leases.of(lease, Lease::is_extending);
        let last = self.leases.of(lease, Lease::number);
        let mut answers = Vec::new();
        for (node, column) in (0_u8..).zip(&state.nodes) {
            for (number, call) in (1_u8..).zip(&column.links[client].calls) {
                let mut tell = |number, heard| {
                    answers.push(Told {
                        node,
                        number,
                        heard,
                    })
                };
                match *call {
                    // Only a wrong variant has any of an older request.
                    Call::Ran(heard) if extends => {
                        tell(u8::try_from(last).expect("few requests"), heard);
                    }
                    Call::Ran(heard) => tell(number, heard),
                    _ => {}
                }
                let is_silent = matches!(call, Call::Sent | Call::Ran(_));
                if extends && is_silent && u32::from(number) == last {
                    tell(number, Heard::FAILED);
                }
            }
        }
        let now = match self.bounds.variant {
            Variant::IgnoresValidity => me.began,
            _ => state.now,
        };
        let mut steps = self.leases.decisions(lease, answers, now).to_vec();
        if me.stage >= Stage::Complete && self.leases.is_due(lease, now) {
            steps.push(self.leases.handle(lease, Input::TimedOut, now));
        }
        // Who is refused stops at any moment.
        let is_stop = |event: &Event| matches!(event, Event::Refused(_) | Event::TooLate { .. });
        steps.retain(|step| !step.events.iter().any(is_stop));
        actions.extend(
            steps
                .into_iter()
                .map(|step| Action::Decide { client, step }),
        );
    }

    fn follow(&self, state: &mut State, client: usize, step: &Step) {
        let now = state.now;
        let before = state.nodes;
        let me = &mut state.clients[client];
        let links = state.nodes.iter_mut();
        let calls = links.map(|column| &mut column.links[client].calls);
        self.leases.follow(step, &mut me.of, calls);
        if self.bounds.variant == Variant::CountsOldExtension && me.stage == Stage::Complete {
            let links = state.nodes.iter_mut();
            let calls = links.map(|column| &mut column.links[client].calls);
            let before = before.iter().map(|column| column.links[client].calls);
            keep_old_answers(calls, before);
        }
        for event in &step.events {
            match event {
                Event::Granted {
                    number,
                    valid_until,
                    ..
                } => {
                    me.stage = Stage::Complete;
                    me.token = u8::try_from(*number).expect("numbers of a model are small");
                    me.until = tick_after(*valid_until);
                }
                Event::Extended { valid_until, .. } => {
                    state.extended_too_late |= me.stage == Stage::Lost || me.until <= now;
                    me.until = tick_after(*valid_until);
                }
                Event::NotExtended { .. } => {}
                Event::Lost(_) => {
                    me.stage = Stage::Lost;
                    me.until = 0;
                }
                Event::Refused(_) => {
                    me.stage = Stage::Refused;
                    me.of.lease = 0;
                }
                event => unreachable!("{event:?}"),
            }
        }
        let (Some(request), true) = (&step.request, me.stage != Stage::Refused) else {
            return;
        };
        let number = request.number;
        let call = number as usize - 1;
        let mut never = Vec::new();
        for node in request.nodes.iter() {
            let link = &mut state.nodes[node].links[client];
            // It asks no node without a connection, or whose memory is too young.
            if link.known != 0 && now >= link.from {
                link.sent[call] = link.known;
            } else {
                link.calls[call] = Call::None;
                never.push(node);
            }
        }
        for node in never {
            let lease = state.clients[client].of.lease;
            if lease != 0 {
                let input = Input::NeverSent { node, number };
                let step = self.leases.handle(lease, input, now);
                self.follow(state, client, &step);
            }
        }
    }

    /// Forgets what cannot matter any more: ages that suffice, quarantines that are over, the
    /// generations of calls that are over, but for what a property asks, and leases that will do nothing.
    fn tidy(&self, state: &mut State) {
        let now = state.now;
        let extensions = self.bounds.extensions.len();
        for (client, me) in state.clients.iter_mut().enumerate() {
            let extends = || me.of.lease != 0 && self.leases.of(me.of.lease, Lease::is_extending);
            let may_extend = client == 0 && usize::from(me.extensions) < extensions;
            let is_over = match me.stage {
                Stage::Complete => !may_extend && !extends(),
                Stage::Lost => !extends(),
                _ => false,
            };
            if is_over {
                me.of.lease = 0;
            }
            if me.stage > Stage::Acquiring {
                for (call, asked) in me.of.asked.iter_mut().enumerate() {
                    let links = state.nodes.iter().map(|column| &column.links[client]);
                    let mut calls = links.map(|link| link.calls[call]);
                    *asked *= u8::from(calls.any(Call::may_run));
                }
                if extensions == 0 && self.bounds.variant != Variant::IgnoresValidity {
                    me.began = 0;
                }
            }
        }
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
                        Call::Sent | Call::Deaf | Call::Standing => false,
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
        if let Some(order) = sorting(&state.nodes) {
            let nodes = state.nodes;
            state.nodes = std::array::from_fn(|place| nodes[usize::from(order[place])]);
            for client in &mut state.clients {
                client.of.lease = self.leases.moved(client.of.lease, &order);
            }
        }
        state
    }

    fn requests(&self, state: &State, client: usize, actions: &mut Vec<Action>) {
        for (node, column) in state.nodes.iter().enumerate() {
            let link = &column.links[client];
            if node > 0 && state.nodes[node - 1] == *column {
                continue;
            }
            if self.bounds.delayed_restart && state.now - column.started < self.bounds.guard {
                continue;
            }
            for (call, made) in link.calls.iter().enumerate() {
                let changes = || self.run(state, client, node, call).0 != column.store;
                if *made == Call::Sent || *made == Call::Deaf && changes() {
                    actions.push(Action::Run { client, node, call });
                }
            }
            let away = matches!(state.clients[client].stage, Stage::Away | Stage::Looked);
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
            extended_too_late: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < START + self.bounds.horizon {
            actions.push(Action::Tick);
        }
        for (client, me) in state.clients.iter().enumerate() {
            let first = client == 0 || state.clients[0].stage >= Stage::Acquiring;
            match me.stage {
                Stage::Away if self.bounds.variant == Variant::StampOutside => {
                    actions.push(Action::Look { client });
                }
                Stage::Away | Stage::Looked => actions.push(Action::Connect { client }),
                Stage::Connected if first => actions.push(Action::Begin { client }),
                _ => self.decisions(state, client, actions),
            }
            let extends = client == 0
                && me.stage == Stage::Complete
                && usize::from(me.extensions) < self.bounds.extensions.len()
                && state.now < me.until
                && !self.leases.of(me.of.lease, Lease::is_extending);
            if extends {
                actions.push(Action::Extend { client });
            }
            self.requests(state, client, actions);
        }
        for (node, column) in state.nodes.iter().enumerate() {
            // To what is old enough, and to a stamp that is not made yet, a jump is nothing.
            if state.steps > 0 && column.is_young() {
                actions.push(Action::Step { node });
            }
            for &fault in self.bounds.kinds {
                let sources = 0..NODES;
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
                let me = &mut state.clients[client];
                me.stage = Stage::Looked;
                me.began = now;
            }
            Action::Connect { client } => {
                let me = &mut state.clients[client];
                let looked = (me.stage == Stage::Looked).then_some(me.began);
                me.stage = Stage::Connected;
                me.began = 0;
                for column in &mut state.nodes {
                    self.admit(column, client, now, looked);
                }
            }
            Action::Reconnect { client, node } => {
                self.admit(&mut state.nodes[node], client, now, None);
            }
            Action::Begin { client } => {
                let other = last.clients[1 - client].stage;
                let me = &mut state.clients[client];
                me.stage = Stage::Acquiring;
                me.began = now;
                me.after = other >= Stage::Complete;
                let spec = spec(self.bounds.ttls[client], Some(now - START + 1));
                let step = self.leases.begin(&spec, now);
                self.follow(&mut state, client, &step);
            }
            Action::Run { client, node, call } => {
                let (store, heard) = self.run(last, client, node, call);
                let column = &mut state.nodes[node];
                column.store = store;
                column.links[client].calls[call].run(heard);
            }
            Action::Decide { client, step } => self.follow(&mut state, client, &step),
            Action::Extend { client } => {
                let me = &mut state.clients[client];
                let ttl = self.bounds.extensions[usize::from(me.extensions)];
                me.extensions += 1;
                let (ttl, token) = (Some(ticks(ttl)), None);
                let input = Input::Extend { ttl, token };
                let step = self.leases.handle(me.of.lease, input, now);
                self.follow(&mut state, client, &step);
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
                state.nodes[node].ahead += 1;
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
            Property::always(LOSS, |_, state: &State| !state.extended_too_late),
            Property::sometimes("all acquisitions complete", |_, state| Self::both(state)),
        ];
        if !self.bounds.extensions.is_empty() {
            properties.push(Property::sometimes(
                "the last extension succeeds and prolongs",
                |model: &Self, state: &State| {
                    let client = &state.clients[0];
                    let all = usize::from(client.extensions) == model.bounds.extensions.len();
                    all && client.until > client.began.max(START) + model.bounds.ttls[0]
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
        clients.all(|client| client.stage >= Stage::Complete)
    }
}

/// Two acquisitions with a ttl of two ticks.
fn plain() -> Bounds {
    Bounds {
        variant: Variant::Shipped,
        ttls: [2, 2],
        extensions: Vec::new(),
        horizon: 4,
        faults: 0,
        kinds: &[],
        steps: 0,
        guard: 0,
        delayed_restart: false,
    }
}

/// The first acquisition has this ttl, and is extended by these.
fn extending(ttl: u8, extensions: &[u8]) -> Bounds {
    Bounds {
        ttls: [ttl, 2],
        extensions: extensions.to_vec(),
        ..plain()
    }
}

/// One node loses its memory in one of these ways, and clients ask it no more for as long as a ttl.
fn guarded(kinds: &'static [Fault]) -> Bounds {
    Bounds {
        faults: 1,
        kinds,
        guard: 2,
        ..plain()
    }
}

/// One node loses its memory, and the clock of one jumps ahead.
fn stepping(guard: u8) -> Bounds {
    Bounds {
        steps: 1,
        guard,
        ..guarded(&[Fault::Flush])
    }
}

/// The node itself stays out for so long, as with a delayed restart.
fn delayed(guard: u8) -> Bounds {
    Bounds {
        delayed_restart: true,
        guard,
        ..guarded(&[Fault::Restart])
    }
}

#[test]
fn valid_locks_exclude_each_other_also_after_extensions() {
    holds("timed", Timed::new(plain()));
    let longer = extending(2, &[2, 3]);
    holds("timed, extensions longer and longer", Timed::new(longer));
    let shorter = extending(3, &[2]);
    holds("timed, a shorter extension", Timed::new(shorter));
}

#[test]
fn restart_guard_of_one_ttl_covers_every_way_in_which_a_node_loses_its_memory() {
    for (name, kinds) in [
        ("guard", &[Fault::Flush]),
        ("guard, restart", &[Fault::Restart]),
        ("guard, restart with old data", &[Fault::Rollback]),
    ] {
        holds(name, Timed::new(guarded(kinds)));
    }
    let name = "guard, copy of another node";
    holds_within(4_000_000, name, Timed::new(guarded(&[Fault::Copy])));
    let name = "guard longer by the clock step";
    holds_within(6_000_000, name, Timed::new(stepping(3)));
}

#[test]
fn restart_delayed_by_one_ttl_covers_lost_memory_if_validity_is_checked() {
    holds("delayed restart", Timed::new(delayed(2)));
    let late = Bounds {
        variant: Variant::IgnoresValidity,
        horizon: 5,
        ..delayed(3)
    };
    for (name, bounds) in [
        ("delayed restart too short", delayed(1)),
        ("delayed restart without validity", late),
    ] {
        breaks(name, Timed::new(bounds), &[UNIQUE, ORDER]);
    }
}

#[test]
fn wrong_rules_of_time_and_memory_give_two_valid_holders() {
    let short = Bounds {
        guard: 1,
        ..guarded(&[Fault::Flush])
    };
    breaks("guard too short", Timed::new(short), &[EXCLUSION]);
    breaks("T17 clock step", Timed::new(stepping(2)), &[EXCLUSION]);
    let (flush, rollback) = (|| guarded(&[Fault::Flush]), || guarded(&[Fault::Rollback]));
    for (name, variant, bounds) in [
        (
            "T11 CONFIRM shortens",
            Variant::ConfirmShortens,
            extending(3, &[2]),
        ),
        (
            "T12 old extension",
            Variant::CountsOldExtension,
            extending(2, &[2, 3]),
        ),
        ("T13 no compare", Variant::NoCompare, flush()),
        ("T14 age from notice", Variant::AgeFromNotice, flush()),
        ("T15 no uptime rule", Variant::NoUptimeRule, rollback()),
        ("T16 cached admission", Variant::CachesAdmission, rollback()),
        ("T18 stamp outside", Variant::StampOutside, flush()),
        (
            "T19 generation of a copy",
            Variant::GenerationOfAnyProcess,
            guarded(&[Fault::Copy]),
        ),
    ] {
        let bounds = Bounds { variant, ..bounds };
        breaks(name, Timed::new(bounds), &[EXCLUSION]);
    }
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_the_guard_hold_too_when_asked_for() {
    let twice = Bounds {
        faults: 2,
        ..guarded(&[Fault::Flush, Fault::Restart, Fault::Rollback])
    };
    for (name, bounds) in [
        ("guard, copy of another node", guarded(&[Fault::Copy])),
        ("guard longer by the clock step", stepping(3)),
        ("guard, 2 of flush, restart, restart with old data", twice),
    ] {
        holds_within(FAR_MORE, name, Timed::new(bounds));
    }
}
