//! The network: nodes, connections to them, and everything that is on its way, by simulated time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use tokio::sync::Notify;
use tokio::time::Instant;
use tower_redlock::NodeFailure;
use tower_redlock::protocol::admission::{Admissions, Generation, Introduction};
use tower_redlock::protocol::message::{Command, Op, Reply, SharedOp};
use tower_redlock::protocol::{KeyNames, OwnerToken, Store};
use tower_redlock::test_util::{SimNetwork, SimRequest, SimSubscriber};

use crate::network::orders::Orders;
use crate::network::wake_ups::{EarMessage, WakeUps};
use crate::plan::{Fault, NODE_TIMEOUT, NetworkPlan, Plan, WINDOW, happens, ms, up_to};

mod orders;
mod wake_ups;

/// How long an attempt to connect takes to be repeated.
const RETRY: Duration = ms(150);
/// What the clocks of nodes show at the beginning: they and their memory are old.
const NODE_EPOCH: Duration = Duration::from_secs(1_000_000);

/// The network as all of its users share it.
#[derive(Debug)]
pub(crate) struct Network(Mutex<State>);

/// Everything there is, at one instant.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) now: Duration,
    rng: Rng,
    pub(crate) plan: NetworkPlan,
    /// What is going to happen, in order.
    events: BTreeMap<(Duration, u64), Event>,
    next_event: u64,
    next_message: u64,
    nodes: Vec<Node>,
    processes: Vec<Process>,
    /// Every attempt whose first request was sent.
    attempts: BTreeMap<OwnerToken, Attempt>,
    /// The last attempt of a process for the same locks, to share them or not.
    latest: BTreeMap<(usize, Vec<Arc<[u8]>>, bool), OwnerToken>,
    /// What the attempts to share locks are for.
    readers: BTreeMap<OwnerToken, Arc<[KeyNames]>>,
    /// Attempts that a request was carried out for behind their release, or later than the checks look
    /// for it: such a lock stays until it expires, which no client can prevent.
    overtaken: BTreeSet<(usize, OwnerToken)>,
    pub(crate) wake_ups: WakeUps,
    pub(crate) orders: Orders,
    /// How many faults had an effect.
    pub(crate) faults: usize,
}

/// Which process began an attempt, and when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt {
    pub(crate) process: usize,
    pub(crate) began: Duration,
}

#[derive(Debug)]
struct Node {
    name: Arc<str>,
    store: Store,
    up: bool,
    /// The number of the server process, and when by its own clock it was started.
    run: u32,
    started: Duration,
    drift: i64,
    stepped: Duration,
}

#[derive(Debug)]
struct Process {
    admissions: Admissions,
    links: Vec<Link>,
    paused_until: Duration,
    alive: bool,
    /// When its clock began, once it has sent something.
    epoch: Option<Instant>,
}

/// What one process has with one node.
#[derive(Debug, Default)]
struct Link {
    /// The connection in use, and the one that is being opened, if any, by their numbers.
    open: Option<u64>,
    opening: Option<u64>,
    generation: Option<Generation>,
    quarantined_until: Option<Duration>,
    /// When the last request on this connection arrives: the next does not overtake it.
    arrives: Duration,
    /// Nothing passes any more, and neither end has noticed yet.
    dead: bool,
    /// Nothing passes before this instant.
    cut_until: Duration,
    unanswered: BTreeMap<u64, SimRequest>,
    /// What waits for a connection: releases, and what is asked of records.
    parked: VecDeque<SimRequest>,
}

#[derive(Debug)]
enum Event {
    Request(Request),
    /// An answer, to a release that was to be told of with the number of those who were told.
    Answer(To, Reply, Option<usize>),
    /// Whether an answer is overdue.
    Look(To),
    Open {
        process: usize,
        node: usize,
    },
    /// A connection for wake-ups is opened.
    OpenEar {
        process: usize,
        node: usize,
    },
    Ear(EarMessage),
    Introduced(Opening),
    Admitted(Opening, Box<Introduction>),
    Fault(Fault),
    Restart {
        node: usize,
    },
}

/// A message that belongs to a request, on one connection.
#[derive(Debug, Clone, Copy)]
struct To {
    process: usize,
    node: usize,
    connection: u64,
    message: u64,
}

#[derive(Debug, Clone)]
struct Request {
    to: To,
    sent: Duration,
    command: Command,
    generation: Generation,
    /// Whether those who listen are told of what it releases.
    tells: bool,
    /// Carried out once more than it was sent; no request waits for the answer.
    repeated: bool,
}

#[derive(Debug, Clone, Copy)]
struct Opening {
    process: usize,
    node: usize,
    connection: u64,
    /// The run of the server process that the connection is to, once that is known.
    run: u32,
    uptime: Duration,
}

/// One process's end of the network.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) network: Arc<Network>,
    pub(crate) process: usize,
    pub(crate) epoch: Instant,
    /// Told when the process has sent something.
    pub(crate) sent: Arc<Notify>,
}

impl SimNetwork for Line {
    fn carry(&self, node: usize, parcel: SimRequest) {
        let now = self.now();
        let mut state = self.network.state();
        state.processes[self.process].epoch = Some(self.epoch);
        state.send(self.process, node, parcel, now);
        drop(state);
        self.sent.notify_one();
    }

    fn subscribe(&self, node: usize, lock: &Arc<[u8]>, listener: SimSubscriber) {
        let now = self.now();
        let mut state = self.network.state();
        state.listen((self.process, node), lock, listener, now);
        self.sent.notify_one();
    }

    fn unsubscribe(&self, node: usize, lock: &Arc<[u8]>) {
        let now = self.now();
        self.network.state().hush(self.process, node, lock, now);
        self.sent.notify_one();
    }
}

impl Line {
    fn now(&self) -> Duration {
        Instant::now().saturating_duration_since(self.epoch)
    }
}

impl Network {
    pub(crate) fn new(plan: &Plan, rng: Rng) -> Arc<Self> {
        let nodes = plan.nodes.iter().enumerate().map(|(index, node)| Node {
            name: format!("node-{index}").into(),
            store: Store::new(),
            up: true,
            run: 0,
            started: Duration::ZERO,
            drift: node.drift,
            stepped: Duration::ZERO,
        });
        let processes = plan.processes.iter().map(|_| Process {
            admissions: Admissions::new(WINDOW),
            links: plan.nodes.iter().map(|_| Link::default()).collect(),
            paused_until: Duration::ZERO,
            alive: true,
            epoch: None,
        });
        let mut state = State {
            now: Duration::ZERO,
            wake_ups: WakeUps::new(&plan.wake_ups, Rng::with_seed(rng.clone().u64(..))),
            rng,
            plan: plan.network.clone(),
            events: BTreeMap::new(),
            next_event: 0,
            next_message: 1,
            nodes: nodes.collect(),
            processes: processes.collect(),
            attempts: BTreeMap::new(),
            latest: BTreeMap::new(),
            readers: BTreeMap::new(),
            overtaken: BTreeSet::new(),
            orders: Orders::new(plan.group()),
            faults: 0,
        };
        for (index, node) in state.nodes.iter_mut().enumerate() {
            // Since long ago, so that a simulation need not begin with waiting.
            let random = OwnerToken::from_random([u8::try_from(index).unwrap_or(0); 16]);
            node.store
                .admit(&random, &node.run_id(index), Duration::ZERO);
        }
        for (process, its) in plan.processes.iter().enumerate() {
            for node in 0..plan.nodes.len() {
                state.at(its.starts, Event::Open { process, node });
            }
        }
        for (at, fault) in &plan.faults {
            state.at(*at, Event::Fault(fault.clone()));
        }
        Arc::new(Self(Mutex::new(state)))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    /// Whether a request waits for its answer, on the connection in use.
    fn misses(&self, to: &To) -> bool {
        self.open == Some(to.connection) && self.unanswered.contains_key(&to.message)
    }
}

/// What happens when.
impl State {
    /// Returns when the next event happens. It need not be looked after an answer that has come.
    pub(crate) fn next_event_at(&mut self) -> Option<Duration> {
        loop {
            let next = self.events.first_entry()?;
            if let Event::Look(to) = next.get()
                && !self.processes[to.process].links[to.node].misses(to)
            {
                next.remove();
            } else {
                return Some(next.key().0);
            }
        }
    }

    /// Makes the next event happen. Time must have come as far everywhere.
    pub(crate) fn step(&mut self) {
        let Some(((at, _), event)) = self.events.pop_first() else {
            return;
        };
        self.now = at;
        match event {
            Event::Request(request) => self.on_request(request),
            Event::Answer(to, reply, told) => self.on_answer(to, reply, told),
            Event::Look(to) => self.on_look(to),
            Event::Open { process, node } => self.on_open(process, node),
            Event::OpenEar { process, node } => self.open_ear(process, node),
            Event::Ear(message) => self.on_ear(&message),
            Event::Introduced(opening) => self.on_introduced(opening),
            Event::Admitted(opening, said) => self.on_admitted(opening, *said),
            Event::Fault(fault) => self.on_fault(fault),
            Event::Restart { node } => self.on_restart(node),
        }
    }

    fn at(&mut self, at: Duration, event: Event) {
        self.events.insert((at, self.next_event), event);
        self.next_event += 1;
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    /// Puts off what a paused process would have to do; returns whether it is paused or gone.
    fn is_away(&mut self, process: usize, event: impl FnOnce() -> Event) -> bool {
        let Process {
            paused_until,
            alive,
            ..
        } = self.processes[process];
        if alive && paused_until > self.now {
            self.at(paused_until, event());
        }
        !alive || paused_until > self.now
    }

    /// Draws how long a message takes.
    fn delay(&mut self) -> Duration {
        let slow = happens(&mut self.rng, self.plan.slow);
        let longest = if slow {
            self.plan.slow_delay
        } else {
            self.plan.delay
        };
        up_to(&mut self.rng, longest)
    }
}

/// Requests and answers.
impl State {
    fn send(&mut self, process: usize, node: usize, parcel: SimRequest, now: Duration) {
        if !self.processes[process].alive {
            return;
        }
        self.note_order(parcel.command());
        if let Some(failure) = self.failure(process, node, now).filter(|_| locks(&parcel)) {
            return parcel.answer(Err(failure));
        }
        if self.link(process, node).open.is_some() {
            self.transmit(process, node, parcel, now);
        } else {
            self.link(process, node).parked.push_back(parcel);
        }
    }

    /// Returns why a request that may lock something would not be sent.
    fn failure(&self, process: usize, node: usize, now: Duration) -> Option<NodeFailure> {
        let name = &self.nodes[node].name;
        let link = &self.processes[process].links[node];
        if link.open.is_none() || link.opening.is_some() && link.dead {
            return Some(NodeFailure::Unreachable {
                node: Arc::clone(name),
                why: "no connection".into(),
            });
        }
        let until = link.quarantined_until?;
        Some(NodeFailure::Quarantined {
            node: Arc::clone(name),
            left: until.saturating_sub(now),
        })
    }

    fn transmit(&mut self, process: usize, node: usize, parcel: SimRequest, now: Duration) {
        let (command, tells) = (parcel.command().clone(), parcel.notifies());
        let message = self.next_message;
        self.next_message += 1;
        let delay = self.delay();
        let lost = happens(&mut self.rng, self.plan.lost);
        let repeated = happens(&mut self.rng, self.plan.repeated);
        let repeated_after = up_to(&mut self.rng, ms(1_500));
        let link = self.link(process, node);
        let (Some(connection), Some(generation)) = (link.open, link.generation.clone()) else {
            return;
        };
        if command.op == Op::Ping {
            return parcel.answer(Ok(Reply::Released));
        }
        // On a connection, a lost message is lost with all that follow it.
        link.dead |= lost;
        let arrives = (now + delay).max(link.arrives);
        link.arrives = arrives;
        link.unanswered.insert(message, parcel);
        let dead = link.dead;
        if let Op::Acquire { .. } | Op::Shared(SharedOp::Acquire { .. }) = command.op {
            self.note_attempt(process, &command, now);
        }
        let to = To {
            process,
            node,
            connection,
            message,
        };
        let request = Request {
            to,
            sent: now,
            command,
            generation,
            tells,
            repeated: false,
        };
        if !dead {
            if repeated {
                let mut again = request.clone();
                again.repeated = true;
                self.at(arrives + repeated_after, Event::Request(again));
            }
            self.at(arrives, Event::Request(request));
        }
        self.at(now + 2 * NODE_TIMEOUT, Event::Look(to));
    }

    /// Puts off a request, and all behind it on its connection: they arrive in the order in which they
    /// were sent.
    fn hold_back(&mut self, request: Request, until: Duration) {
        let To {
            process,
            node,
            connection,
            ..
        } = request.to;
        let behind = self.events.iter().filter_map(|(at, event)| match event {
            Event::Request(other) => {
                let is_behind = other.to.connection == connection && !other.repeated;
                is_behind.then_some(*at)
            }
            _ => None,
        });
        let behind: Vec<_> = behind.collect();
        let mut requests = vec![request];
        for at in behind {
            if let Some(Event::Request(other)) = self.events.remove(&at) {
                requests.push(other);
            }
        }
        requests.sort_unstable_by_key(|request| request.to.message);
        let link = self.link(process, node);
        link.arrives = link.arrives.max(until);
        let arrives = link.arrives;
        for request in requests {
            self.at(arrives, Event::Request(request));
        }
    }

    fn note_attempt(&mut self, process: usize, command: &Command, began: Duration) {
        let attempt = Attempt { process, began };
        self.attempts
            .entry(command.owner.clone())
            .or_insert(attempt);
        let is_shared = matches!(command.op, Op::Shared(_));
        if is_shared {
            let names = Arc::clone(&command.names);
            self.readers.insert(command.owner.clone(), names);
        }
        let key = (process, lock_names(&command.names), is_shared);
        self.latest.insert(key, command.owner.clone());
    }

    fn on_request(&mut self, request: Request) {
        let To {
            process,
            node,
            connection,
            ..
        } = request.to;
        let in_use = self.processes[process].links[node].open == Some(connection);
        let cut_until = self.processes[process].links[node].cut_until;
        if cut_until > self.now {
            // It is sent again and again until it gets through, or its connection is given up.
            if in_use && !request.repeated {
                self.hold_back(request, cut_until);
            }
            return;
        }
        if !self.nodes[node].up {
            return;
        }
        let now = self.nodes[node].clock(self.now);
        let Request {
            to,
            sent,
            command,
            generation,
            tells,
            repeated,
        } = request;
        let held = self.nodes[node].held_by(&command, now);
        let reply = self.nodes[node].store.apply_in(&generation, &command, now);
        // Readers may be left.
        let given_back = held.into_iter();
        let given_back = given_back.filter(|name| self.nodes[node].store.is_free(name, now));
        let given_back: Vec<_> = given_back.map(|name| Arc::clone(&name.lock)).collect();
        self.note_record(node, &command, &reply);
        let stale = !in_use || repeated;
        // A client expects that a request is not on its way for longer than the lock lives.
        let late = match command.op {
            Op::Acquire { ttl, .. }
            | Op::Confirm { ttl, .. }
            | Op::Shared(SharedOp::Acquire { ttl } | SharedOp::Confirm { ttl }) => {
                self.now > sent + ttl
            }
            _ => false,
        };
        if (stale || late) && matches!(reply, Reply::Granted(_) | Reply::At(_)) {
            self.overtaken.insert((node, command.owner));
        }
        let told = tells.then(|| given_back.iter().map(|lock| self.tell(node, lock)).max());
        if stale {
            return;
        }
        let delay = self.delay();
        self.after(delay, Event::Answer(to, reply, told.flatten()));
    }

    fn on_answer(&mut self, to: To, reply: Reply, told: Option<usize>) {
        if self.is_away(to.process, || Event::Answer(to, reply.clone(), told)) {
            return;
        }
        let name = Arc::clone(&self.nodes[to.node].name);
        let now = self.now;
        let link = self.link(to.process, to.node);
        if link.open != Some(to.connection) || link.dead {
            return;
        }
        if link.cut_until > now {
            let at = link.cut_until;
            return self.at(at, Event::Answer(to, reply, told));
        }
        let Some(mut parcel) = link.unanswered.remove(&to.message) else {
            return;
        };
        if let Some(listeners) = told {
            parcel.set_subscribers(listeners);
        }
        self.note_heard(to.node, parcel.command(), &reply);
        let link = self.link(to.process, to.node);
        if reply == Reply::Amnesia {
            link.quarantined_until = Some(now + WINDOW);
            parcel.answer(Err(NodeFailure::Quarantined {
                node: name,
                left: WINDOW,
            }));
            self.start_opening(to.process, to.node);
        } else {
            parcel.answer(Ok(reply));
        }
    }

    /// A connection on which an answer is overdue is replaced, as soon as another can be had.
    fn on_look(&mut self, to: To) {
        if self.is_away(to.process, || Event::Look(to)) {
            return;
        }
        if self.link(to.process, to.node).misses(&to) {
            self.start_opening(to.process, to.node);
        }
    }
}

/// Connections.
impl State {
    fn start_opening(&mut self, process: usize, node: usize) {
        if self.link(process, node).opening.is_none() {
            self.on_open(process, node);
        }
    }

    fn on_open(&mut self, process: usize, node: usize) {
        if self.is_away(process, || Event::Open { process, node }) {
            return;
        }
        let connection = self.next_message;
        self.next_message += 1;
        self.link(process, node).opening = Some(connection);
        let opening = Opening {
            process,
            node,
            connection,
            run: self.nodes[node].run,
            uptime: Duration::ZERO,
        };
        let delay = self.delay();
        self.after(delay, Event::Introduced(opening));
    }

    /// The node tells who it is, and then, on the same connection, which memory it has.
    fn on_introduced(&mut self, mut opening: Opening) {
        let Opening { process, node, .. } = opening;
        let reached = self.reaches(process, node);
        let now = self.now;
        let node = &self.nodes[node];
        if !reached || node.run != opening.run {
            return self.retry(opening);
        }
        let uptime = node.clock(now).saturating_sub(node.started);
        opening.uptime = Duration::from_secs(uptime.as_secs());
        let delay = self.delay() + self.delay();
        let random = OwnerToken::from_random(self.rng.u128(..).to_le_bytes());
        let node = &mut self.nodes[opening.node];
        // Carried out now and told later: the request is behind the first on one connection.
        let told = node.clock(now);
        let run_id = node.run_id(opening.node);
        let said = Introduction {
            run_id: run_id.as_str().into(),
            replication_id: format!("{run_id} data").into(),
            uptime: opening.uptime,
            generation: node.store.admit(&random, &run_id, told),
            now: told,
        };
        self.after(delay, Event::Admitted(opening, Box::new(said)));
    }

    fn on_admitted(&mut self, opening: Opening, said: Introduction) {
        let Opening { process, node, .. } = opening;
        if self.is_away(process, || Event::Admitted(opening, Box::new(said.clone()))) {
            return;
        }
        if !self.reaches(process, node) || self.nodes[node].run != opening.run {
            return self.retry(opening);
        }
        if self.link(process, node).opening != Some(opening.connection) {
            return;
        }
        let (now, name) = (self.now, Arc::clone(&self.nodes[node].name));
        let generation = said.generation.clone();
        let left = self.processes[process].admissions.admit(&name, said, now);
        self.give_up(process, node);
        let link = self.link(process, node);
        *link = Link {
            open: Some(opening.connection),
            generation: Some(generation),
            quarantined_until: Some(now + left).filter(|_| !left.is_zero()),
            cut_until: link.cut_until,
            parked: std::mem::take(&mut link.parked),
            ..Link::default()
        };
        if !left.is_zero() {
            self.after(left, Event::Open { process, node });
        }
        let epoch = self.processes[process].epoch;
        for parcel in std::mem::take(&mut self.link(process, node).parked) {
            // As a lane does: what is of no use any more is not sent again.
            if epoch.is_none_or(|epoch| parcel.is_wanted(epoch + now)) {
                self.transmit(process, node, parcel, now);
            } else {
                parcel.answer(Err(NodeFailure::Disconnected {
                    node: Arc::clone(&name),
                    why: "it came too late".into(),
                }));
            }
        }
    }

    fn retry(&mut self, opening: Opening) {
        let Opening { process, node, .. } = opening;
        if self.link(process, node).opening == Some(opening.connection) {
            self.after(RETRY, Event::Open { process, node });
        }
    }

    fn reaches(&self, process: usize, node: usize) -> bool {
        self.nodes[node].up && self.processes[process].links[node].cut_until <= self.now
    }

    /// Gives a connection up. Releases that were not answered wait for the next, and records as planned.
    fn give_up(&mut self, process: usize, node: usize) {
        let name = Arc::clone(&self.nodes[node].name);
        let link = self.link(process, node);
        link.open = None;
        let (again, others): (Vec<_>, Vec<_>) = std::mem::take(&mut link.unanswered)
            .into_values()
            .partition(|parcel| self.is_sent_again(parcel));
        let link = self.link(process, node);
        for parcel in again.into_iter().rev() {
            link.parked.push_front(parcel);
        }
        for parcel in others {
            parcel.answer(Err(NodeFailure::Disconnected {
                node: Arc::clone(&name),
                why: "the connection is gone".into(),
            }));
        }
    }

    /// Whether it goes out again on the next connection.
    fn is_sent_again(&self, parcel: &SimRequest) -> bool {
        let op = &parcel.command().op;
        let is_record = matches!(op, Op::Record { .. } | Op::TopUp { .. });
        op.is_release() || is_record && self.plan.records_again
    }

    fn link(&mut self, process: usize, node: usize) -> &mut Link {
        &mut self.processes[process].links[node]
    }
}

/// Faults.
impl State {
    fn on_fault(&mut self, fault: Fault) {
        self.faults += 1;
        match fault {
            Fault::Crash {
                node,
                keeps,
                down_for,
            } => {
                if !self.nodes[node].up {
                    return;
                }
                self.nodes[node].up = false;
                if !keeps {
                    self.nodes[node].store = Store::new();
                }
                for process in 0..self.processes.len() {
                    self.on_break(process, node);
                }
                self.after(down_for, Event::Restart { node });
            }
            Fault::Flush { nodes } => {
                for node in nodes {
                    self.nodes[node].store = Store::new();
                }
            }
            Fault::Step { nodes, by } => {
                for node in nodes {
                    self.nodes[node].stepped += by;
                }
            }
            Fault::Partition {
                process,
                nodes,
                lasts,
            } => {
                let until = self.now + lasts;
                for node in nodes {
                    let link = self.link(process, node);
                    link.cut_until = link.cut_until.max(until);
                }
            }
            Fault::Break { process, node } => self.on_break(process, node),
            Fault::Pause { process, lasts } => {
                let until = self.now + lasts;
                let process = &mut self.processes[process];
                process.paused_until = process.paused_until.max(until);
            }
            Fault::Kill { process } => self.kill(process),
        }
    }

    /// A connection breaks: at once for its process, or it falls silent.
    fn on_break(&mut self, process: usize, node: usize) {
        self.break_ear(process, node);
        if happens(&mut self.rng, 300) || self.processes[process].paused_until > self.now {
            self.link(process, node).dead = true;
            return;
        }
        self.give_up(process, node);
        self.start_opening(process, node);
    }

    fn on_restart(&mut self, node: usize) {
        let now = self.now;
        let node = &mut self.nodes[node];
        node.up = true;
        node.run += 1;
        node.started = node.clock(now);
    }

    pub(crate) fn kill(&mut self, process: usize) {
        self.kill_ears(process);
        self.note_killed(process);
        let process = &mut self.processes[process];
        process.alive = false;
        for link in &mut process.links {
            link.parked.clear();
            link.unanswered.clear();
        }
    }

    pub(crate) fn is_alive(&self, process: usize) -> bool {
        self.processes[process].alive
    }

    pub(crate) fn paused_until(&self, process: usize) -> Duration {
        self.processes[process].paused_until
    }

    /// Ends all faults and makes the network a good one.
    pub(crate) fn heal(&mut self) {
        self.plan = NetworkPlan {
            delay: ms(2),
            slow: 0,
            slow_delay: ms(2),
            lost: 0,
            repeated: 0,
            records_again: true,
        };
        let now = self.now;
        for process in &mut self.processes {
            for link in &mut process.links {
                link.cut_until = link.cut_until.min(now);
            }
        }
        self.events
            .retain(|_, event| !matches!(event, Event::Fault(_)));
    }

    /// Whether nothing is on its way any more.
    pub(crate) fn is_quiet(&self) -> bool {
        let on_its_way = |event: &Event| {
            matches!(
                event,
                Event::Request(_) | Event::Answer(..) | Event::Restart { .. }
            )
        };
        // What waits for the connection of a process that stands still goes out in the end.
        let living = self.processes.iter().filter(|process| process.alive);
        let mut links = living.flat_map(|process| &process.links);
        let waits = links.any(|link| !link.parked.is_empty());
        !waits && !self.events.values().any(on_its_way)
    }
}

/// What the checker asks.
impl State {
    /// Returns the last attempt of a process to lock these keys. If they are in several groups, there is one for each,
    /// and this is the first of them: when the last one begins, the servers' clocks may have ended the others.
    pub(crate) fn latest_attempt(
        &self,
        process: usize,
        names: &[KeyNames],
        is_shared: bool,
    ) -> Option<Attempt> {
        let all = lock_names(names);
        let of_key = |name| {
            let of_lock = self.latest.iter().filter(|((by, locked, shared), _)| {
                let is_of_lock = locked.contains(name) && locked.iter().all(|it| all.contains(it));
                *by == process && *shared == is_shared && is_of_lock
            });
            let attempts = of_lock.filter_map(|(_, owner)| self.attempts.get(owner).copied());
            attempts.max_by_key(|attempt| attempt.began)
        };
        let attempts = all.iter().filter_map(of_key);
        attempts.min_by_key(|attempt| attempt.began)
    }

    /// Returns the locks that are held, as nodes and the processes that hold them there, without
    /// those that came into being behind their own release.
    pub(crate) fn held(&self, keys: &[KeyNames]) -> Vec<(usize, usize)> {
        let mut held = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            for key in keys {
                let Some(owner) = node.store.holder(key, node.clock(self.now)) else {
                    continue;
                };
                if !self.overtaken.contains(&(index, owner.clone()))
                    && let Some(attempt) = self.attempts.get(owner)
                {
                    held.push((index, attempt.process));
                }
            }
            for (owner, names) in &self.readers {
                if node.is_read_by(owner, names, self.now)
                    && !self.overtaken.contains(&(index, owner.clone()))
                {
                    held.push((index, self.attempts[owner].process));
                }
            }
        }
        held
    }

    /// Returns how many locks there are on all nodes.
    pub(crate) fn locks(&self) -> usize {
        let locks = |node: &Node| node.store.held(node.clock(self.now));
        self.nodes.iter().map(locks).sum()
    }
}

impl Node {
    /// Returns what the node's clock shows.
    fn clock(&self, now: Duration) -> Duration {
        let micros = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
        let drifted = micros + micros / 1_000 * self.drift / 1_000;
        NODE_EPOCH + Duration::from_micros(drifted.unsigned_abs()) + self.stepped
    }

    /// Returns those of a command's locks that are its owner's, and those that are shared if it shares them.
    fn held_by<'a>(&self, command: &'a Command, now: Duration) -> Vec<&'a KeyNames> {
        let shares = matches!(command.op, Op::Shared(_));
        let names = command.names.iter();
        let held = names.filter(|name| match self.store.holder(name, now) {
            Some(owner) => *owner == command.owner,
            None => shares && !self.store.is_free(name, now),
        });
        held.collect()
    }

    /// Whether an owner shares these locks: whether it could extend them.
    fn is_read_by(&self, owner: &OwnerToken, names: &Arc<[KeyNames]>, now: Duration) -> bool {
        let extends = Command {
            names: Arc::clone(names),
            owner: owner.clone(),
            op: Op::Shared(SharedOp::Confirm { ttl: ms(1) }),
        };
        let reply = self.store.clone().apply(&extends, self.clock(now));
        reply == Reply::At(0)
    }

    fn run_id(&self, index: usize) -> String {
        format!("run-{index}-{}", self.run)
    }
}

fn lock_names(names: &[KeyNames]) -> Vec<Arc<[u8]>> {
    names.iter().map(|name| Arc::clone(&name.lock)).collect()
}

/// Whether it may lock something, so that it does not wait for a connection.
fn locks(parcel: &SimRequest) -> bool {
    matches!(
        parcel.command().op,
        Op::Ping
            | Op::Acquire { .. }
            | Op::Confirm { .. }
            | Op::Shared(SharedOp::Acquire { .. } | SharedOp::Confirm { .. })
    )
}
