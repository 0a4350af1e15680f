//! Callers of one key, reference nodes, and a clock that is moved by hand.

use std::array;
use std::collections::VecDeque;
use std::sync::Arc;

pub(super) use crate::protocol::lease::life::LifeStage;
pub(super) use crate::protocol::lease::*;
pub(super) use crate::protocol::message::{Answer, Op};
pub(super) use crate::protocol::quorum::{NodeSet, Quorum};
pub(super) use crate::protocol::round::VoteStep;
pub(super) use crate::protocol::validity;

use crate::protocol::message::Command;
use crate::protocol::{KeyNames, LockKey, Namespace, OwnerToken, Store};

pub(super) const NODES: usize = 3;
pub(super) const TTL: Duration = ms(900);
pub(super) const NODE_TIMEOUT: Duration = ms(50);
pub(super) const START: Duration = ms(1_000);

pub(super) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(super) fn spec(proposal: u64) -> LeaseSpec {
    LeaseSpec {
        access: Access::Exclusive,
        ttl: TTL,
        proposal: Some(proposal),
        retention: ms(60_000),
        node_timeout: NODE_TIMEOUT,
        renews: true,
        is_partial: false,
        max_hold: None,
        hold_at_least: None,
        once: None,
    }
}

pub(super) fn dropped(publishes: bool) -> Input {
    let effect = Effect::default();
    Input::Dropped { publishes, effect }
}

/// Callers of one key, the nodes, and what is on its way between them.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) now: Duration,
    pub(super) names: Arc<[KeyNames]>,
    pub(super) nodes: [Store; NODES],
    pub(super) callers: Vec<Caller>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Caller {
    pub(super) owner: OwnerToken,
    pub(super) lease: Lease,
    pub(super) links: [Link; NODES],
    /// How many requests had their nodes publish a release.
    pub(super) published: usize,
    pub(super) events: Vec<Event>,
}

/// What is on its way between a caller and a node, in order.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Link {
    pub(super) requests: VecDeque<(u32, Op)>,
    pub(super) answers: VecDeque<(u32, Answer)>,
}

impl World {
    pub(super) fn new() -> Self {
        let names = Namespace::default().names(&LockKey::from("k").into(), |_| [0; 32]);
        Self {
            now: START,
            names: names.unwrap(),
            nodes: array::from_fn(|_| Store::new()),
            callers: Vec::new(),
        }
    }

    /// Returns a world whose nodes keep the outcomes of executions.
    pub(super) fn executing() -> Self {
        let names = Namespace::default();
        let names = names.names_with_record(&LockKey::from("k"), None, |_| [0; 32]);
        Self {
            names: [names.unwrap()].into(),
            ..Self::new()
        }
    }

    /// Tells the first caller the answer of a node.
    pub(super) fn tell(&mut self, node: usize, number: u32, answer: Answer) {
        let told = Input::Answered {
            node,
            number,
            answer,
        };
        self.handle(0, told);
    }

    /// Returns a world with one caller, who asks for the lock.
    pub(super) fn of(spec: LeaseSpec) -> Self {
        let mut world = Self::new();
        world.call(spec);
        world
    }

    pub(super) fn call(&mut self, spec: LeaseSpec) -> usize {
        let number = self.callers.len();
        let quorum = Quorum::new(NODES).unwrap();
        let random = [u8::try_from(number).unwrap(); 16];
        self.callers.push(Caller {
            owner: spec.owner(random, None),
            lease: Lease::new(spec, quorum, self.now, |_| Duration::ZERO),
            links: array::from_fn(|_| Link::default()),
            published: 0,
            events: Vec::new(),
        });
        self.callers[number].drain();
        number
    }

    pub(super) fn handle(&mut self, caller: usize, input: Input) {
        self.callers[caller].lease.handle(input, self.now);
        self.callers[caller].drain();
    }

    /// Has a node execute the next request of a caller.
    pub(super) fn execute(&mut self, caller: usize, node: usize) {
        let Caller { owner, links, .. } = &mut self.callers[caller];
        let (number, op) = links[node].requests.pop_front().expect("a request");
        let command = Command {
            names: Arc::clone(&self.names),
            owner: owner.clone(),
            op,
        };
        let reply = self.nodes[node].apply(&command, self.now);
        links[node]
            .answers
            .push_back((number, Answer::Replied(reply)));
    }

    /// Has a caller take the next answer of a node.
    pub(super) fn answer(&mut self, caller: usize, node: usize) {
        let answer = self.callers[caller].links[node].answers.pop_front();
        let (number, answer) = answer.expect("an answer");
        self.handle(
            caller,
            Input::Answered {
                node,
                number,
                answer,
            },
        );
    }

    /// Returns what the world may be after the next message between a caller and a node.
    pub(super) fn after_messages(&self, caller: usize) -> Vec<Self> {
        let mut next = Vec::new();
        for (node, link) in self.callers[caller].links.iter().enumerate() {
            let mut after = |step: fn(&mut Self, usize, usize)| {
                let mut world = self.clone();
                step(&mut world, caller, node);
                world.finish(caller);
                next.push(world);
            };
            if !link.requests.is_empty() {
                after(Self::execute);
            }
            if !link.answers.is_empty() {
                after(Self::answer);
            }
        }
        next
    }

    /// Has a caller whose life is decided take the answers that it has.
    pub(super) fn finish(&mut self, caller: usize) {
        for node in 0..NODES {
            while self.callers[caller].is_decided()
                && !self.callers[caller].links[node].answers.is_empty()
            {
                self.answer(caller, node);
            }
        }
    }

    /// Has some nodes execute the next request of a caller, and answer it.
    pub(super) fn serve(&mut self, caller: usize, nodes: &[usize]) {
        for node in nodes {
            self.execute(caller, *node);
            self.answer(caller, *node);
        }
    }

    /// Lets time pass until the caller has something to do, and no longer than until this time.
    pub(super) fn pass(&mut self, until: Duration) {
        while let Some(at) = self.callers[0]
            .lease
            .poll_timeout()
            .filter(|at| *at <= until)
        {
            self.now = self.now.max(at);
            self.handle(0, Input::TimedOut);
        }
        self.now = until;
    }

    pub(super) fn events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.callers[0].events)
    }

    /// Returns how many requests of a caller are on the way to each node.
    pub(super) fn asked(&self, caller: usize) -> [usize; NODES] {
        let links = self.callers[caller].links.each_ref();
        links.map(|link| link.requests.len())
    }

    pub(super) fn holders(&self) -> usize {
        let nodes = self.nodes.iter();
        nodes
            .filter(|node| node.holder(&self.names[0], self.now).is_some())
            .count()
    }
}

impl Caller {
    pub(super) fn drain(&mut self) {
        while let Some(request) = self.lease.poll_request() {
            self.published += usize::from(request.publishes);
            for node in request.nodes.iter() {
                let request = (request.number, request.op.clone());
                self.links[node].requests.push_back(request);
            }
        }
        self.events
            .extend(std::iter::from_fn(|| self.lease.poll_event()));
    }

    fn is_decided(&self) -> bool {
        let is_told = || {
            let mut events = self.events.iter();
            events.any(|event| {
                matches!(
                    event,
                    Event::Decided(_) | Event::Recorded(_) | Event::Unrepaired
                )
            })
        };
        match self.lease.stage {
            LifeStage::Releasing { .. } => true,
            LifeStage::Recording(_) => is_told(),
            LifeStage::Acquiring(_) | LifeStage::Holding(_) => false,
        }
    }

    pub(super) fn number(&self) -> Option<u64> {
        self.events.iter().find_map(|event| match event {
            Event::Granted { number, .. } => Some(*number),
            _ => None,
        })
    }
}

/// Returns a world whose caller holds the lock since the start.
pub(super) fn held(spec: LeaseSpec) -> World {
    let mut world = World::of(spec);
    world.serve(0, &[0, 1, 2]);
    assert_eq!(world.events(), [granted_at_once()]);
    world
}

/// The grant of the number 7 by two nodes, of a caller that asked at the start.
pub(super) fn granted_at_once() -> Event {
    Event::Granted {
        number: 7,
        acknowledged: 2,
        valid_until: START + validity::lifetime(TTL).unwrap(),
    }
}
