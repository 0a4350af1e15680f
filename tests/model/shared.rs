//! The timed model of readers and writers: ticks, so that validity, expiry and release mean something.
//!
//! Each client makes one attempt, as a reader or as a writer. Writers are unfenced, because readers have no number;
//! tokens are the matter of the other models. A client may give up or release at any time, and its requests run late,
//! twice or never. A node may lose its memory; it then refuses votes for as long as the restart guard says.
//!
//! A request that changes nothing at its node and does not help its client is not carried out, which is as if it were
//! lost. This and a few rules like it keep three clients within some millions of states; each asks the shipped code
//! whether a step makes a difference.
//!
//! With [`Bounds::lives`], these rules are off, and the lives of the leases are whole: the first renews its lock, and may
//! be revoked; each timer may be late; refusals are heard; clients give up waiting for single answers; and with
//! [`Bounds::settles`], answers to releases are heard until the lease is settled. The requests of a client to a node run
//! in their order there, as on a lane, but for those that are lost before one that runs.

use std::sync::Arc;

use stateright::{Model, Property};
use tower_redlock::protocol::lease::{Access, Effect, Event, Input, Lease, LeaseSpec};
use tower_redlock::protocol::message::{Op, Reply, SharedOp};

use crate::leases::{self, Call, Heard, Leases, Step, Told, keep_old_answers, sorting, tick_after};
use crate::space::{Memo, Nodes, RETENTION, Variant, ticks};
use crate::{FAR_MORE, breaks, holds, holds_within};

const CLIENTS: usize = 3;
const NODES: usize = 3;

/// The most requests of a client: an `ACQUIRE`, three extensions and a release.
const REQUESTS: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Reader,
    Writer,
    Absent,
}

/// How large a model is.
#[derive(Clone, Debug)]
struct Bounds {
    variant: Variant,
    roles: [Role; CLIENTS],
    ttls: [u8; CLIENTS],
    /// The ttl of each extension of the first client, in order; two at most.
    extensions: Vec<u8>,
    horizon: u8,
    /// How often an `ACQUIRE` is sent a second time.
    retries: u8,
    /// How often a node loses its memory.
    wipes: u8,
    /// How long a node that lost its memory stays out.
    guard: u8,
    /// Whether lives are whole.
    lives: bool,
    /// Whether they go on until they are settled: answers to releases are heard.
    settles: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Column {
    store: u32,
    /// The number of its memory, which every request for a vote names.
    memory: u8,
    /// The tick from which on it votes; 0 if it has lost no memory of late.
    votes_from: u8,
    links: [Link; CLIENTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Link {
    calls: [Call; REQUESTS],
    /// The memory that each call named.
    named: [u8; REQUESTS],
    /// The `ACQUIRE` that was sent a second time, and the memory that it named.
    retry: Call,
    retry_named: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Stage {
    #[default]
    Idle,
    Acquiring,
    Holding,
    /// Its lock is no more to be relied on, or would not be if it still came.
    Late,
    /// It has released, or given up, or was refused.
    Gone,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    stage: Stage,
    began: u8,
    of: leases::Client<REQUESTS>,
    /// The tick at which its lock is no more to be relied on.
    until: u8,
    extensions: u8,
    /// In whole lives: it was revoked.
    is_revoked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    now: u8,
    nodes: [Column; NODES],
    clients: [Client; CLIENTS],
    retries: u8,
    wipes: u8,
    /// A lock was extended that was lost, or over.
    extended_too_late: bool,
    /// A lease that had lost or released its lock asked for it.
    asked_too_late: bool,
    /// A lease had no node left that may hold the key, and one did.
    settled_too_early: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Action {
    Tick,
    Begin {
        client: usize,
    },
    Retry {
        client: usize,
        node: usize,
    },
    RunRetry {
        client: usize,
        node: usize,
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
    Extend,
    Revoke,
    Release {
        client: usize,
    },
    Wipe {
        node: usize,
    },
}

#[derive(Debug)]
struct Shared {
    bounds: Bounds,
    nodes: Nodes,
    leases: Leases,
    orphaned: Memo<(u32, u8), bool>,
}

const EXCLUSION: &str = "nobody is valid beside a valid writer";

const FREE: &str = "a node without a holder grants the key";

const GONE: &str = "a reader that released cannot extend";

const LOSS: &str = "what is lost or over is not extended";

const ASKED: &str = "what is lost or released is not asked for";

const SETTLED: &str = "a lease that is settled knows where its lock may be left";

const LEFT: &str = "a lease that has released leaves no lock where its requests have run";

impl Bounds {
    fn of(roles: [Role; CLIENTS]) -> Self {
        Self {
            variant: Variant::Shipped,
            roles,
            ttls: [2; CLIENTS],
            extensions: Vec::new(),
            horizon: 4,
            retries: 0,
            wipes: 0,
            guard: 0,
            lives: false,
            settles: false,
        }
    }
}

impl Shared {
    fn new(bounds: Bounds) -> Self {
        let nodes = Nodes::new(bounds.variant, &vec![vec![0]; CLIENTS]);
        Self {
            leases: Leases::new(&nodes.words, NODES),
            nodes,
            orphaned: Memo::new(),
            bounds,
        }
    }

    fn access(&self, client: usize) -> Access {
        match self.bounds.roles[client] {
            Role::Reader => Access::Shared,
            _ => Access::Exclusive,
        }
    }

    fn spec(&self, client: usize) -> LeaseSpec {
        LeaseSpec {
            access: self.access(client),
            renews: self.bounds.lives && client == 0,
            ..leases::spec(self.bounds.ttls[client], None)
        }
    }

    fn is_valid(state: &State, client: usize) -> bool {
        let client = &state.clients[client];
        client.stage == Stage::Holding && state.now < client.until
    }

    fn is_release(&self, op: u8) -> bool {
        let op = self.nodes.words.op(op);
        matches!(op, Op::Release | Op::Shared(SharedOp::Release))
    }

    /// What a node does with a request that named this memory, and what the client hears.
    fn execute(
        &self,
        state: &State,
        client: usize,
        node: usize,
        op: u8,
        named: u8,
    ) -> (u32, Heard) {
        let column = &state.nodes[node];
        let compares = self.bounds.variant != Variant::NoCompare;
        if compares && named != column.memory && !self.is_release(op) {
            return (column.store, Heard::FAILED);
        }
        self.nodes.execute(column.store, client, op, state.now)
    }

    fn run(&self, state: &State, client: usize, node: usize, call: usize) -> (u32, Heard) {
        let op = state.clients[client].of.asked[call];
        let named = state.nodes[node].links[client].named[call];
        self.execute(state, client, node, op, named)
    }

    fn run_retry(&self, state: &State, client: usize, node: usize) -> (u32, Heard) {
        let op = state.clients[client].of.asked[0];
        let named = state.nodes[node].links[client].retry_named;
        self.execute(state, client, node, op, named)
    }

    /// Whether a client reads an answer: what does not help it to the lock is as good as lost.
    fn reads(&self, heard: Heard) -> bool {
        let reply = || self.nodes.words.reply(heard);
        self.bounds.lives || matches!(reply(), Some(Reply::Granted(_) | Reply::At(_)))
    }

    /// Whether a client has the lock at a node.
    fn has(&self, store: u32, client: usize, now: u8) -> bool {
        if self.bounds.roles[client] == Role::Absent {
            return false;
        }
        let confirm = self.access(client).confirm(None, ticks(1), RETENTION);
        let op = self.nodes.words.number(&confirm);
        let (_, heard) = self.nodes.execute(store, client, op, now);
        matches!(self.nodes.words.reply(heard), Some(Reply::At(_)))
    }

    /// Whether a node has a lock that no client has.
    fn is_orphaned(&self, store: u32, now: u8) -> bool {
        self.orphaned.get_or((store, now), || {
            let is_held = self.nodes.held(store, now) > 0;
            is_held && !(0..CLIENTS).any(|client| self.has(store, client, now))
        })
    }

    /// Whether a client that has released has the lock at a node. Of one whose requests run in any order, a late
    /// `ACQUIRE` may bring it back, and a late extension may not.
    fn is_left(&self, state: &State, client: usize, column: &Column) -> bool {
        let asked = state.clients[client].of.asked;
        let link = &column.links[client];
        let is_extension =
            |call: usize| call > 0 && asked[call] != 0 && !self.is_release(asked[call]);
        let is_done = |call: usize| {
            let may_run = link.calls[call].may_run();
            !may_run || !self.bounds.lives && is_extension(call)
        };
        state.clients[client].stage == Stage::Gone
            && (0..REQUESTS).all(is_done)
            && !link.retry.may_run()
            && self.has(column.store, client, state.now)
    }

    fn leaves_nothing(&self, state: &State, roles: &[Role]) -> bool {
        let is = |client: &usize| roles.contains(&self.bounds.roles[*client]);
        let left = |client| {
            let mut nodes = state.nodes.iter();
            nodes.any(|column| self.is_left(state, client, column))
        };
        !(0..CLIENTS).filter(is).any(left)
    }

    fn decisions(&self, state: &State, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        if me.of.lease == 0 {
            return;
        }
        let mut lease = me.of.lease;
        let extends = self.leases.of(lease, Lease::is_extending);
        let last = self.leases.of(lease, Lease::number);
        let last = u8::try_from(last).expect("few requests");
        let mut answers = Vec::new();
        for (node, column) in (0_u8..).zip(&state.nodes) {
            let link = &column.links[client];
            for (number, call) in (1_u8..).zip(&link.calls) {
                // Only a wrong variant has any of an older extension.
                let number = if extends && number > 1 { last } else { number };
                if let Call::Ran(heard) = *call {
                    answers.push(Told {
                        node,
                        number,
                        heard,
                    });
                }
                // Of the current request only: what does not count is not listened to.
                let gives_up = extends && number == last || self.bounds.lives;
                if gives_up && matches!(call, Call::Sent | Call::Ran(_)) {
                    let heard = Heard::FAILED;
                    answers.push(Told {
                        node,
                        number,
                        heard,
                    });
                }
            }
            if let Call::Ran(heard) = link.retry {
                let number = 1;
                answers.push(Told {
                    node,
                    number,
                    heard,
                });
            }
        }
        if self.bounds.variant == Variant::EndFromReply {
            lease = self.leases.hastened(lease, state.now);
        }
        let mut steps = self.leases.decisions(lease, answers, state.now).to_vec();
        if self.bounds.lives && self.leases.is_due(lease, state.now) {
            let step = self.leases.handle(lease, Input::TimedOut, state.now);
            steps.push(step);
        }
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
        fn of(client: usize) -> impl FnMut(&mut Column) -> &mut [Call; REQUESTS] {
            move |column| &mut column.links[client].calls
        }
        let links = state.nodes.iter_mut().map(of(client));
        self.leases.follow(step, &mut me.of, links);
        if self.bounds.variant == Variant::CountsOldExtension && me.stage == Stage::Holding {
            let before = before.iter().map(|column| column.links[client].calls);
            keep_old_answers(state.nodes.iter_mut().map(of(client)), before);
        }
        for event in &step.events {
            match event {
                Event::Granted { valid_until, .. } => {
                    me.stage = Stage::Holding;
                    me.until = tick_after(*valid_until);
                }
                Event::Extended { valid_until, .. } => {
                    state.extended_too_late |= me.stage != Stage::Holding || me.until <= now;
                    me.until = tick_after(*valid_until);
                }
                Event::Lost(_) => {
                    me.stage = Stage::Late;
                    me.until = 0;
                }
                Event::Refused(_) | Event::TooLate { .. } => me.stage = Stage::Gone,
                Event::NotExtended { .. } | Event::Released(_) | Event::Settled => {}
                event => unreachable!("{event:?}"),
            }
        }
        let is_settled = self.leases.of(step.lease, Lease::is_settled);
        let is_free = self
            .leases
            .of(step.lease, |lease| lease.may_hold().is_empty());
        if is_settled && is_free {
            let nodes = state.nodes.iter();
            let mut stores = nodes.map(|column| column.store);
            state.settled_too_early |= stores.any(|store| self.has(store, client, now));
        }
        let goes_on = self.bounds.settles && !is_settled;
        if me.stage == Stage::Gone && !goes_on {
            me.of.lease = 0;
        }
        if me.of.lease == 0 || !self.leases.of(me.of.lease, |lease| lease.counts(1)) {
            for column in &mut state.nodes {
                column.links[client].retry.deafen();
            }
        }
        let Some(request) = &step.request else {
            return;
        };
        let is_release = self.is_release(step.op);
        state.asked_too_late |= !is_release && matches!(me.stage, Stage::Late | Stage::Gone);
        let number = request.number;
        let call = number as usize - 1;
        let mut never = Vec::new();
        for node in request.nodes.iter() {
            let column = &mut state.nodes[node];
            let link = &mut column.links[client];
            link.named[call] = column.memory;
            if is_release && !self.bounds.settles {
                link.calls[call].deafen();
            } else if !is_release && column.votes_from > now {
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

    /// The same state without what makes no difference any more, and with the nodes in order.
    fn canonical(&self, mut state: State) -> State {
        for client in 0..CLIENTS {
            if !self.bounds.lives {
                self.forget_what_is_late(&mut state, client);
                for node in 0..NODES {
                    self.drop_in_vain(&mut state, client, node);
                }
            }
            let me = &mut state.clients[client];
            let links = || state.nodes.iter().map(|column| &column.links[client]);
            for (call, asked) in me.of.asked.iter_mut().enumerate() {
                let may_repeat = call == 0 && state.retries > 0;
                let is_repeated = |link: &Link| call == 0 && link.retry.may_run();
                let may_run = links().any(|link| link.calls[call].may_run() || is_repeated(link));
                *asked *= u8::from(may_run || may_repeat);
            }
        }
        let now = state.now;
        for column in &mut state.nodes {
            if column.votes_from <= now {
                column.votes_from = 0;
            }
            for link in &mut column.links {
                for (call, named) in link.calls.iter().zip(&mut link.named) {
                    *named *= u8::from(call.may_run());
                }
                link.retry_named *= u8::from(link.retry.may_run());
            }
        }
        if let Some(order) = sorting(&state.nodes) {
            let nodes = state.nodes;
            state.nodes = std::array::from_fn(|place| nodes[usize::from(order[place])]);
            for client in &mut state.clients {
                client.of.lease = self.leases.moved(client.of.lease, &order);
            }
        }
        state
    }

    /// A client whose lock is not valid any more, and will not be, can only release it.
    fn forget_what_is_late(&self, state: &mut State, client: usize) {
        let now = state.now;
        let me = &mut state.clients[client];
        let is_late = match me.stage {
            Stage::Acquiring => {
                let ends = me.began + self.bounds.ttls[client];
                now >= ends && self.bounds.variant != Variant::EndFromReply
            }
            Stage::Holding => now >= me.until,
            Stage::Idle | Stage::Late | Stage::Gone => false,
        };
        if is_late {
            if me.stage == Stage::Holding {
                let step = self.leases.handle(me.of.lease, Input::TimedOut, now);
                self.follow(state, client, &step);
            }
            let me = &mut state.clients[client];
            (me.stage, me.began, me.until, me.extensions) = (Stage::Late, 0, 0, 0);
            for column in &mut state.nodes {
                let link = &mut column.links[client];
                link.calls.iter_mut().for_each(Call::deafen);
                link.retry.deafen();
            }
        } else if me.stage == Stage::Holding && self.bounds.extensions.is_empty() {
            me.began = 0;
        }
    }

    /// Drops requests that find no lock of their client, if no other request can bring it one.
    fn drop_in_vain(&self, state: &mut State, client: usize, node: usize) {
        let link = &state.nodes[node].links[client];
        let may_repeat = link.retry.may_run() || state.retries > 0 && link.retry == Call::None;
        let may_begin = self.bounds.variant == Variant::ReusesOwner;
        if link.calls[0].may_run() || may_repeat || may_begin {
            return;
        }
        for call in 1..REQUESTS {
            if state.nodes[node].links[client].calls[call] == Call::Deaf {
                let store = state.nodes[node].store;
                let is_release = self.is_release(state.clients[client].of.asked[call]);
                let is_lost = is_release || !self.has(store, client, state.now);
                if is_lost && self.run(state, client, node, call).0 == store {
                    state.nodes[node].links[client].calls[call] = Call::None;
                }
            }
        }
    }

    fn of_client(&self, state: &State, client: usize, actions: &mut Vec<Action>) {
        let me = &state.clients[client];
        match me.stage {
            Stage::Idle if self.bounds.roles[client] != Role::Absent => {
                actions.push(Action::Begin { client });
            }
            Stage::Acquiring | Stage::Holding | Stage::Late => {
                actions.push(Action::Release { client });
            }
            Stage::Gone if self.bounds.variant == Variant::ReusesOwner => {
                actions.push(Action::Begin { client });
            }
            Stage::Idle | Stage::Gone => {}
        }
        if self.bounds.lives || matches!(me.stage, Stage::Acquiring | Stage::Holding) {
            self.decisions(state, client, actions);
        }
        let is_first = client == 0 && me.stage == Stage::Holding;
        if is_first && self.bounds.lives {
            actions.push(Action::Revoke);
        }
        let extends = is_first
            && usize::from(me.extensions) < self.bounds.extensions.len()
            && Self::is_valid(state, client)
            && !self.leases.of(me.of.lease, Lease::is_extending);
        if extends {
            actions.push(Action::Extend);
        }
        for (node, column) in state.nodes.iter().enumerate() {
            // Of equal nodes, one is enough.
            if node > 0 && state.nodes[node - 1] == *column {
                continue;
            }
            let link = &column.links[client];
            if state.retries > 0 && me.stage != Stage::Idle && link.retry == Call::None {
                actions.push(Action::Retry { client, node });
            }
            // What changes nothing and does not help its client might as well be lost.
            let matters = |made: Call, (store, heard): (u32, Heard)| {
                store != column.store || made == Call::Sent && self.reads(heard)
            };
            for (call, made) in link.calls.iter().enumerate() {
                if made.may_run() && matters(*made, self.run(state, client, node, call)) {
                    actions.push(Action::Run { client, node, call });
                }
            }
            if link.retry.may_run() && matters(link.retry, self.run_retry(state, client, node)) {
                actions.push(Action::RunRetry { client, node });
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
            extended_too_late: false,
            asked_too_late: false,
            settled_too_early: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now <= self.bounds.horizon {
            actions.push(Action::Tick);
        }
        for client in 0..CLIENTS {
            // Clients of one role with one ttl are equal: they begin in their order. The first may extend.
            let first = usize::from(!self.bounds.extensions.is_empty() || self.bounds.lives);
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
            actions.extend((0..NODES).map(|node| Action::Wipe { node }));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = *last;
        let now = state.now;
        match action {
            Action::Tick => state.now += 1,
            Action::Begin { client } => {
                let me = &mut state.clients[client];
                me.stage = Stage::Acquiring;
                me.began = now;
                let step = self.leases.begin(&self.spec(client), now);
                self.follow(&mut state, client, &step);
            }
            Action::Retry { client, node } => {
                state.retries -= 1;
                let column = &mut state.nodes[node];
                let link = &mut column.links[client];
                if column.votes_from <= now {
                    (link.retry, link.retry_named) = (Call::Sent, column.memory);
                }
                if state.clients[client].stage != Stage::Acquiring {
                    link.retry.deafen();
                }
            }
            Action::RunRetry { client, node } => {
                let (store, heard) = self.run_retry(last, client, node);
                let column = &mut state.nodes[node];
                column.store = store;
                let made = &mut column.links[client].retry;
                made.run(heard);
                if !self.reads(heard) {
                    *made = Call::None;
                }
            }
            Action::Run { client, node, call } => {
                let (store, heard) = self.run(last, client, node, call);
                let column = &mut state.nodes[node];
                column.store = store;
                let calls = &mut column.links[client].calls;
                calls[call].run(heard);
                if !self.reads(heard) {
                    calls[call] = Call::None;
                }
                if self.bounds.lives {
                    let lost = calls[..call].iter_mut().filter(|call| call.may_run());
                    lost.for_each(|call| call.run(Heard::FAILED));
                }
            }
            Action::Decide { client, step } => self.follow(&mut state, client, &step),
            Action::Extend => {
                let me = &mut state.clients[0];
                let ttl = self.bounds.extensions[usize::from(me.extensions)];
                me.extensions += 1;
                let (ttl, token) = (Some(ticks(ttl)), None);
                let input = Input::Extend { ttl, token };
                let step = self.leases.handle(me.of.lease, input, now);
                self.follow(&mut state, 0, &step);
            }
            Action::Revoke => {
                state.clients[0].is_revoked = true;
                let lease = state.clients[0].of.lease;
                let step = self.leases.handle(lease, Input::Revoked, now);
                self.follow(&mut state, 0, &step);
            }
            Action::Release { client } => {
                let me = &mut state.clients[client];
                let is_acquiring = self.leases.of(me.of.lease, Lease::is_acquiring);
                let (publishes, effect) = (false, Effect::Unknown);
                let input = match is_acquiring {
                    true => Input::Abandoned,
                    false => Input::Dropped { publishes, effect },
                };
                *me = Client {
                    stage: Stage::Gone,
                    of: me.of,
                    is_revoked: me.is_revoked,
                    ..Client::default()
                };
                let step = self.leases.handle(me.of.lease, input, now);
                self.follow(&mut state, client, &step);
            }
            Action::Wipe { node } => {
                state.wipes -= 1;
                let column = &mut state.nodes[node];
                column.store = self.nodes.empty();
                column.memory += 1;
                column.votes_from = now + self.bounds.guard;
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
            Property::always(LOSS, |_, state: &State| !state.extended_too_late),
            Property::always(ASKED, |_, state: &State| !state.asked_too_late),
        ];
        if self.bounds.lives {
            properties.extend([
                Property::always(SETTLED, |_, state: &State| !state.settled_too_early),
                Property::always(LEFT, |model: &Self, state: &State| {
                    model.leaves_nothing(state, &[Role::Reader, Role::Writer])
                }),
                Property::sometimes("a renewal prolongs", |model: &Self, state: &State| {
                    let me = &state.clients[0];
                    me.stage == Stage::Holding && me.until > me.began + model.bounds.ttls[0]
                }),
                Property::sometimes("a revoked lock is released", |_, state: &State| {
                    let me = &state.clients[0];
                    me.is_revoked && me.stage == Stage::Gone && me.of.lease == 0
                }),
            ]);
        } else if self.bounds.retries == 0 {
            // What is repeated late may bring a reader back, until its ttl is over.
            properties.push(Property::always(GONE, |model: &Self, state: &State| {
                model.leaves_nothing(state, &[Role::Reader])
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
                    me.stage == Stage::Holding && me.until > me.began + model.bounds.ttls[0]
                },
            ));
        }
        properties
    }
}

const WRITER_AND_READERS: [Role; 3] = [Role::Reader, Role::Reader, Role::Writer];
const READER_AND_WRITERS: [Role; 3] = [Role::Reader, Role::Writer, Role::Writer];
const READER_AND_WRITER: [Role; 3] = [Role::Reader, Role::Writer, Role::Absent];
const WRITERS: [Role; 3] = [Role::Writer, Role::Writer, Role::Absent];

fn sharing(roles: [Role; 3], change: impl FnOnce(&mut Bounds)) -> Shared {
    let mut bounds = Bounds::of(roles);
    change(&mut bounds);
    Shared::new(bounds)
}

/// A change of what is shared breaks its promise.
fn breaks_sharing(name: &str, change: impl FnOnce(&mut Bounds)) {
    breaks(name, sharing(READER_AND_WRITER, change), &[EXCLUSION]);
}

/// The first client extends by these, and there are so many ticks.
fn extending(extensions: &[u8], horizon: u8) -> impl Fn(&mut Bounds) {
    move |bounds| {
        bounds.extensions = extensions.to_vec();
        bounds.horizon = horizon;
    }
}

/// A node forgets, and one stays out for so long; a reader may extend.
fn forgetful(guard: u8, extensions: &[u8]) -> impl Fn(&mut Bounds) {
    move |bounds| {
        bounds.wipes = 1;
        bounds.guard = guard;
        bounds.extensions = extensions.to_vec();
    }
}

/// An `ACQUIRE` is sent twice, and there are so many ticks.
fn repeating(horizon: u8) -> impl Fn(&mut Bounds) {
    move |bounds| {
        bounds.retries = 1;
        bounds.horizon = horizon;
    }
}

#[test]
fn readers_share_and_exclude_writers() {
    let short = |bounds: &mut Bounds| bounds.horizon = 3;
    let name = "shared: 1 writer, 2 readers";
    holds(name, sharing(WRITER_AND_READERS, short));
    let name = "shared: 2 writers, 1 reader";
    holds(name, sharing(READER_AND_WRITERS, short));
    let name = "shared: readers of ttl 3 and 1, 1 writer";
    let ttls = |bounds: &mut Bounds| {
        bounds.horizon = 2;
        bounds.ttls = [3, 1, 2];
    };
    holds(name, sharing(WRITER_AND_READERS, ttls));
}

#[test]
fn repeated_requests_and_extensions_of_readers_exclude_writers() {
    let name = "shared: 1 writer, 1 reader, a repeated ACQUIRE";
    holds(name, sharing(READER_AND_WRITER, repeating(4)));
    let name = "shared: 1 writer, 1 reader that extends by 3 and 1";
    holds(name, sharing(READER_AND_WRITER, extending(&[3, 1], 5)));
    let name = "shared: 1 writer, 1 reader that extends by 3, a repeated ACQUIRE";
    let both = |bounds: &mut Bounds| {
        extending(&[3], 3)(bounds);
        bounds.retries = 1;
    };
    holds(name, sharing(READER_AND_WRITER, both));
    let name = "shared: 1 writer, 2 readers, one extends by 3";
    holds(name, sharing(WRITER_AND_READERS, extending(&[3], 2)));
}

#[test]
fn restart_guard_protects_readers() {
    let name = "shared: 1 writer, 1 reader, a node forgets";
    holds(name, sharing(READER_AND_WRITER, forgetful(2, &[])));
    let name = "shared: 1 writer, 1 reader that extends by 3, a node forgets";
    holds(name, sharing(READER_AND_WRITER, forgetful(3, &[3])));
}

/// Whole lives.
fn living(ttls: [u8; 3], horizon: u8) -> impl Fn(&mut Bounds) {
    move |bounds| {
        bounds.lives = true;
        bounds.settles = bounds.roles[1..] == [Role::Absent; 2];
        (bounds.ttls, bounds.horizon) = (ttls, horizon);
    }
}

#[test]
fn whole_lives_end_without_a_lock_and_ask_for_none_that_is_over() {
    let alone = [Role::Writer, Role::Absent, Role::Absent];
    let name = "lives: a writer that renews, until it is settled";
    holds(name, sharing(alone, living([2; 3], 3)));
    let alone = [Role::Reader, Role::Absent, Role::Absent];
    let name = "lives: a reader that renews, until it is settled";
    holds(name, sharing(alone, living([2; 3], 3)));
    let name = "lives: a writer that renews, another";
    holds(name, sharing(WRITERS, living([3, 2, 2], 3)));
    let name = "lives: a reader that renews, a writer";
    holds(name, sharing(READER_AND_WRITER, living([2; 3], 3)));
}

#[test]
fn wrong_rules_let_a_writer_in_beside_a_reader() {
    let variant = |variant, extensions: &[u8]| {
        let extensions = extensions.to_vec();
        move |bounds: &mut Bounds| {
            bounds.variant = variant;
            bounds.extensions = extensions;
        }
    };
    let name = "shared: the restart guard is a tick short";
    breaks_sharing(name, forgetful(1, &[]));
    let name = "shared: the restart guard is shorter than an extension";
    breaks_sharing(name, forgetful(2, &[3]));
    breaks_sharing("T34 no compare", |bounds| {
        forgetful(2, &[])(bounds);
        bounds.variant = Variant::NoCompare;
    });
    let name = "T32 old extension";
    breaks_sharing(name, variant(Variant::CountsOldExtension, &[1, 3]));
    let name = "shared: the end counts from the reply";
    breaks_sharing(name, variant(Variant::EndFromReply, &[]));
    let name = "T33 an owner comes again";
    breaks_sharing(name, variant(Variant::ReusesOwner, &[]));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_readers_and_writers_hold_too_when_asked_for() {
    let name = "shared: 1 writer, 2 readers, longer";
    holds_within(FAR_MORE, name, sharing(WRITER_AND_READERS, |_| {}));
    let name = "shared: 1 writer, 2 readers, a repeated ACQUIRE";
    holds_within(FAR_MORE, name, sharing(WRITER_AND_READERS, repeating(3)));
    let name = "shared: 1 writer, 2 readers, one extends by 3, longer";
    let extends = extending(&[3], 3);
    holds_within(FAR_MORE, name, sharing(WRITER_AND_READERS, extends));
    let name = "shared: 1 writer, 2 readers, a node forgets";
    let wiped = |bounds: &mut Bounds| {
        forgetful(2, &[])(bounds);
        bounds.horizon = 3;
    };
    holds_within(FAR_MORE, name, sharing(WRITER_AND_READERS, wiped));
}
