//! The timed model: ticks, so that validity, expiry and the age of a node's memory mean something.
//!
//! All clocks show the same tick; everything else is as asynchronous as in the other model, but
//! locks vanish only by their ttl, or with the whole memory of a node. Clients propose the tick at
//! which they begin, as wall clocks do.
//!
//! The guard is a node's *generation*: made, with the node's own time as its stamp, by the first
//! client that finds none; read by every client when it connects; sent with every request, and
//! compared by the node. A client asks no node whose generation is younger than [`Bounds::guard`].
//! The guard as shipped speaks to servers, so what stands here is its rule and not its code.

use stateright::{Model, Property};
use tower_redlock::protocol::validity;

use crate::space::{Ask, Call, Heard, Nodes, Rounds, Step, Told, Variant, ticks};

const CLIENTS: usize = 2;
const NODES: usize = 3;
const PHASES: usize = 3;
const EXTENSIONS: usize = 2;

/// The first of the calls that are extensions.
const EXTEND: u8 = 4;

/// The generation that all nodes have had for ever.
const OLD: Generation = Generation { id: 1, stamp: 0 };

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
    /// How many nodes lose their memory.
    pub(crate) wipes: u8,
    /// How long a node that lost its memory stays out; 0 for no guard.
    pub(crate) guard: u8,
    /// The node itself stays out so long, as with a delayed restart; there are no generations.
    pub(crate) delayed_restart: bool,
}

/// Which memory a node has: a number, 0 for none yet, and since when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Generation {
    id: u8,
    stamp: u8,
}

/// What passes between one client and one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Link {
    /// What the client was told when it connected; it counts the age from the stamp.
    known: Generation,
    calls: [Call; 1 + PHASES + EXTENSIONS],
    /// The generation that went with each call.
    sent: [u8; 1 + PHASES + EXTENSIONS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Column {
    store: u32,
    generation: Generation,
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
    wipes: u8,
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
    Wipe {
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
        let generations = self.bounds.guard > 0 && !self.bounds.delayed_restart;
        let compares = generations && self.bounds.variant != Variant::NoCompare;
        if compares && sent != column.generation.id {
            return (column.store, Heard::Failed);
        }
        let ask = self.ask(state, client, phase);
        self.nodes.ask(column.store, client, ask, state.now)
    }

    /// Sends one call to one node, unless its memory is too young.
    fn send(&self, state: &mut State, client: usize, node: usize, phase: u8) -> bool {
        let link = &mut state.nodes[node].links[client];
        let old_enough =
            self.bounds.delayed_restart || state.now - link.known.stamp >= self.bounds.guard;
        if old_enough {
            link.calls[usize::from(phase)] = Call::Sent;
            link.sent[usize::from(phase)] = link.known.id;
        }
        old_enough
    }

    /// A client connects to a node and reads its generation, which it makes if there is none.
    fn admit(&self, column: &mut Column, client: usize, now: u8, stamp: u8) {
        let found = column.generation.id != 0;
        if !found {
            column.generation = Generation { id: 2, stamp };
        }
        let known = &mut column.links[client].known;
        let noticed = known.id != 0 || !found;
        *known = column.generation;
        if self.bounds.variant == Variant::AgeFromNotice {
            // It knows nothing of what it did not notice itself.
            known.stamp = if noticed && known.id != OLD.id {
                now
            } else {
                0
            };
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
                    self.send(state, me, node, phase);
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
                // Whoever's validity is over is lost, whatever is answered then.
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

    fn sorted(&self, mut state: State) -> State {
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
            if self.bounds.delayed_restart
                && state.now - column.generation.stamp < self.bounds.guard
            {
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
            let stale = link.known.id != 0 && link.known.id != column.generation.id;
            if stale && self.bounds.guard > 0 && !self.bounds.delayed_restart {
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
        let connected = self.bounds.guard == 0 || self.bounds.delayed_restart;
        let link = Link {
            known: if connected {
                OLD
            } else {
                Generation::default()
            },
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
            links: [link; CLIENTS],
        };
        vec![State {
            now: START,
            nodes: [column; NODES],
            clients: [client; CLIENTS],
            wipes: self.bounds.wipes,
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
        if state.wipes > 0 {
            actions.extend((0..).take(NODES).map(|node| Action::Wipe { node }));
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
                let stamp = if looked { state.clients[me].began } else { now };
                for column in &mut state.nodes {
                    self.admit(column, me, now, stamp);
                }
                state.clients[me].stage = Stage::Connected;
                state.clients[me].began = 0;
            }
            Action::Reconnect { client, node } => {
                let column = &mut state.nodes[usize::from(node)];
                self.admit(column, usize::from(client), now, now);
            }
            Action::Begin { client } => {
                let me = usize::from(client);
                let mut round = self.rounds.begin(None);
                for (index, node) in (0..NODES).zip(0_u8..) {
                    if !self.send(&mut state, me, index, 0) {
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
                    self.send(&mut state, me, node, EXTEND + number);
                }
            }
            Action::Wipe { node } => {
                state.wipes -= 1;
                let column = &mut state.nodes[usize::from(node)];
                column.store = self.nodes.empty();
                column.generation = match self.bounds.delayed_restart {
                    true => Generation { stamp: now, ..OLD },
                    false => Generation::default(),
                };
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
        if self.bounds.wipes > 0 && self.bounds.guard > 0 && !self.bounds.delayed_restart {
            properties.push(Property::sometimes(
                "a node that lost its memory votes again",
                |_, state: &State| {
                    state.nodes.iter().any(|node| {
                        let votes = |link: &Link| {
                            link.sent[0] == 2 && matches!(link.calls[0], Call::Read(_))
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
