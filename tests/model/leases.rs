//! Numbers in the place of the shipped leases, and of what passes between them and the nodes.
//!
//! Nothing of the protocol is written down here. A [`Lease`] is pure data with inputs and outputs, so a model may keep
//! each of its values once, name it by a number, and remember what the shipped code did when it was first told
//! something. The clients of the models are such leases; a model says only what may happen to them, and when.
//!
//! A node that is silent is told of as [`Heard::FAILED`], one by one, which is more than the timer of a driver does. So
//! the node timeout is longer than any model takes; [`Input::TimedOut`] is left to renew a lock, and to lose it.

use std::sync::{Arc, RwLock};
use std::time::Duration;

use tower_redlock::protocol::lease::{Event, Input, Lease, LeaseRequest, LeaseSpec};
use tower_redlock::protocol::message::{Answer, Op, Reply};
use tower_redlock::protocol::{NodeSet, Quorum};

use crate::space::{Interner, Memo, RETENTION, ticks};

/// A lease as it acquires a lock alone, in order to tell what a model changes.
pub(crate) fn spec(ttl: u8, proposal: Option<u8>) -> LeaseSpec {
    LeaseSpec {
        access: tower_redlock::protocol::lease::Access::Exclusive,
        ttl: ticks(ttl),
        proposal: proposal.map(u64::from),
        retention: RETENTION,
        node_timeout: RETENTION,
        renews: false,
        is_partial: false,
        max_hold: None,
        hold_at_least: None,
        once: None,
    }
}

/// An answer, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Heard(u8);

impl Heard {
    /// The node gave no answer, or will not.
    pub(crate) const FAILED: Self = Self(0);
}

/// Requests and answers by their numbers, of which 0 is that of no request.
#[derive(Debug)]
pub(crate) struct Words {
    ops: RwLock<Interner<Option<Op>, ()>>,
    answers: RwLock<Interner<Answer, ()>>,
}

impl Words {
    pub(crate) fn new() -> Arc<Self> {
        let (ops, answers) = (Interner::new(), Interner::new());
        ops.write().expect("no panic").id(None, ());
        answers.write().expect("no panic").id(Answer::Failed, ());
        Arc::new(Self { ops, answers })
    }

    pub(crate) fn number(&self, op: &Op) -> u8 {
        small(self.ops.write().expect("no panic").id(Some(op.clone()), ()))
    }

    pub(crate) fn op(&self, number: u8) -> Op {
        let ops = self.ops.read().expect("no panic");
        ops.value(number.into()).clone().expect("a request")
    }

    /// The answer of a node, without what takes no part in safety.
    pub(crate) fn hear(&self, reply: Reply) -> Heard {
        let answer = Answer::Replied(match reply {
            Reply::Held { fingerprint, .. } => Reply::Held {
                expires_in: None,
                fingerprint,
            },
            Reply::HeldShared { .. } => Reply::HeldShared { expires_in: None },
            reply => reply,
        });
        Heard(small(
            self.answers.write().expect("no panic").id(answer, ()),
        ))
    }

    /// What the node said, if it did.
    pub(crate) fn reply(&self, heard: Heard) -> Option<Reply> {
        match self.answer(heard) {
            Answer::Replied(reply) => Some(reply),
            Answer::Failed => None,
        }
    }

    pub(crate) fn answer(&self, heard: Heard) -> Answer {
        let answers = self.answers.read().expect("no panic");
        answers.value(heard.0.into()).clone()
    }
}

fn small(number: u32) -> u8 {
    u8::try_from(number).expect("a model has few requests and answers")
}

/// One request of one client to one node, and its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Call {
    /// Nothing is under way, and no client waits for an answer.
    #[default]
    None,
    /// The node may carry it out, now or later or never.
    Sent,
    /// Like `Sent`, but the answer will not be read.
    Deaf,
    /// The answer is under way.
    Ran(Heard),
    /// The lease was told the answer, and has not decided yet.
    Read(Heard),
    /// The node may carry it out at any time, and again; no answer will be read.
    Standing,
}

impl Call {
    pub(crate) fn may_run(self) -> bool {
        matches!(self, Self::Sent | Self::Deaf | Self::Standing)
    }

    /// Whether the node may carry it out, and no answer will be read.
    pub(crate) fn is_deaf(self) -> bool {
        matches!(self, Self::Deaf | Self::Standing)
    }

    /// The answer will not be read.
    pub(crate) fn deafen(&mut self) {
        *self = match self {
            Self::Sent | Self::Deaf => Self::Deaf,
            Self::Standing => Self::Standing,
            Self::None | Self::Ran(_) | Self::Read(_) => Self::None,
        };
    }

    /// No answer will be read, and what would be may be carried out again.
    pub(crate) fn stand(&mut self) {
        match self {
            Self::Sent => *self = Self::Standing,
            call => call.deafen(),
        }
    }

    /// The node carried the request out.
    pub(crate) fn run(&mut self, heard: Heard) {
        *self = match self {
            Self::Sent => Self::Ran(heard),
            Self::Standing => Self::Standing,
            _ => Self::None,
        };
    }
}

/// One thing that a lease is told: what a node said to the request of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Told {
    pub(crate) node: u8,
    pub(crate) number: u8,
    pub(crate) heard: Heard,
}

/// What an input led to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Step {
    /// The answers that were read for it, and what they say.
    pub(crate) read: Vec<Told>,
    answers: Vec<Answer>,
    /// The lease afterwards.
    pub(crate) lease: u32,
    pub(crate) request: Option<LeaseRequest>,
    /// What it asks for, by its number.
    pub(crate) op: u8,
    /// What it tells, without what differs between answers that lead to the same.
    pub(crate) events: Vec<Event>,
}

impl Step {
    /// Whether the lease did something.
    pub(crate) fn acts(&self) -> bool {
        self.request.is_some() || !self.events.is_empty()
    }

    /// Whether the lease only got its lock.
    fn grants(&self) -> bool {
        self.request.is_none() && matches!(self.events[..], [Event::Granted { .. }])
    }
}

/// How a lease came to be what it is, when that was seen first.
#[derive(Clone, Debug)]
enum Origin {
    Begun(LeaseSpec),
    Told(u32, Input, u8),
}

/// All leases: one function from a lease, an input and a time to a lease, a request and events. No lease has number 0.
#[derive(Debug)]
pub(crate) struct Leases {
    pub(crate) words: Arc<Words>,
    quorum: Quorum,
    leases: RwLock<Interner<Option<Lease>, Option<Origin>>>,
    begun: Memo<(LeaseSpec, u8), Arc<Step>>,
    handled: Memo<(u32, Input, u8), Arc<Step>>,
    decided: Memo<(u32, Vec<Told>, u8, bool), Arc<[Arc<Step>]>>,
    moved: Memo<(u32, Vec<u8>), u32>,
}

impl Leases {
    pub(crate) fn new(words: &Arc<Words>, nodes: usize) -> Self {
        let leases = Interner::new();
        leases.write().expect("no panic").id(None, None);
        Self {
            words: Arc::clone(words),
            quorum: Quorum::new(nodes).expect("at least one node"),
            leases,
            begun: Memo::new(),
            handled: Memo::new(),
            decided: Memo::new(),
            moved: Memo::new(),
        }
    }

    /// A lease that has just asked all nodes for the lock.
    pub(crate) fn begin(&self, spec: &LeaseSpec, now: u8) -> Arc<Step> {
        self.begun.get_or((spec.clone(), now), || {
            let lease = Lease::new(spec.clone(), self.quorum, ticks(now), |_| Duration::ZERO);
            self.step(lease, Origin::Begun(spec.clone()))
        })
    }

    /// What a lease does with an input at `now`.
    pub(crate) fn handle(&self, lease: u32, input: Input, now: u8) -> Arc<Step> {
        let key = (lease, input, now);
        self.handled.get_or_make(key, |(lease, input, now)| {
            let mut next = self.of(*lease, Lease::clone);
            next.handle(input.clone(), ticks(*now));
            self.step(next, Origin::Told(*lease, input.clone(), *now))
        })
    }

    /// What a lease says of itself.
    pub(crate) fn of<T>(&self, lease: u32, says: impl FnOnce(&Lease) -> T) -> T {
        let leases = self.leases.read().expect("no panic");
        says(leases.value(lease).as_ref().expect("a lease"))
    }

    /// Whether its time to do something without an answer has come.
    pub(crate) fn is_due(&self, lease: u32, now: u8) -> bool {
        let due = self.of(lease, Lease::poll_timeout);
        due.is_some_and(|due| due <= ticks(now))
    }

    pub(crate) fn tell(&self, lease: u32, told: Told, now: u8) -> Arc<Step> {
        let input = Input::Answered {
            node: told.node.into(),
            number: told.number.into(),
            answer: self.words.answer(told.heard),
        };
        self.handle(lease, input, now)
    }

    /// Every way in which reading some of these answers, in some order, makes a lease act.
    ///
    /// Until a lease acts, the answers it has read make no difference, so nothing is lost by letting clients read
    /// answers only when that makes them act.
    pub(crate) fn decisions(&self, lease: u32, answers: Vec<Told>, now: u8) -> Arc<[Arc<Step>]> {
        self.search(lease, answers, now, false)
    }

    /// The same of an execution that begins at once when it is granted the key, or reads on before.
    pub(crate) fn beginnings(&self, lease: u32, answers: Vec<Told>, now: u8) -> Arc<[Arc<Step>]> {
        self.search(lease, answers, now, true)
    }

    fn search(&self, lease: u32, answers: Vec<Told>, now: u8, begins: bool) -> Arc<[Arc<Step>]> {
        let key = (lease, answers, now, begins);
        self.decided.get_or_make(key, |&(lease, ref answers, ..)| {
            let mut seen = vec![lease];
            let mut open = vec![(lease, Vec::new())];
            let mut found: Vec<Arc<Step>> = Vec::new();
            while let Some((lease, read)) = open.pop() {
                let is_unread = |told: &&Told| {
                    let again = |old: &Told| old.node == told.node && old.number == told.number;
                    !read.iter().any(again)
                };
                let unread = answers.iter().filter(is_unread);
                let hear = |told: &Told| {
                    let read = [read.as_slice(), &[*told]].concat();
                    (self.tell(lease, *told, now), read)
                };
                let may_begin = begins && self.of(lease, |lease| lease.is_holding());
                let begin = || (self.handle(lease, BEGIN, now), read.clone());
                let begun = may_begin.then(begin);
                for (step, read) in unread.map(hear).chain(begun) {
                    let acts = step.acts() && !(begins && step.grants());
                    let is_new = |old: &Arc<Step>| {
                        (old.lease, &old.request, &old.events)
                            != (step.lease, &step.request, &step.events)
                    };
                    if acts && found.iter().all(is_new) {
                        found.push(self.after(&step, read));
                    } else if !acts && !seen.contains(&step.lease) {
                        seen.push(step.lease);
                        open.push((step.lease, read));
                    }
                }
            }
            found.into()
        })
    }

    /// A step, with what was read for it.
    pub(crate) fn after(&self, step: &Step, read: Vec<Told>) -> Arc<Step> {
        let answers = read.iter().map(|told| self.words.answer(told.heard));
        Arc::new(Step {
            answers: answers.collect(),
            read,
            ..step.clone()
        })
    }

    /// The lease that this one would be if node `order[i]` were node `i`.
    pub(crate) fn moved(&self, lease: u32, order: &[u8]) -> u32 {
        if lease == 0 {
            return 0;
        }
        self.moved
            .get_or((lease, order.to_vec()), || match self.origin(lease) {
                Origin::Begun(..) => lease,
                Origin::Told(before, mut input, now) => {
                    if let Input::Answered { node, .. } | Input::NeverSent { node, .. } = &mut input
                    {
                        let place = order.iter().position(|old| usize::from(*old) == *node);
                        *node = place.expect("every node moves");
                    }
                    self.handle(self.moved(before, order), input, now).lease
                }
            })
    }

    /// The lease that this one would be if all that it was told had happened just now.
    pub(crate) fn hastened(&self, lease: u32, now: u8) -> u32 {
        match self.origin(lease) {
            Origin::Begun(spec) => self.begin(&spec, now).lease,
            Origin::Told(before, input, _) => {
                self.handle(self.hastened(before, now), input, now).lease
            }
        }
    }

    /// Goes on as a step says: with the lease, with what it has read, and with what it asks for.
    ///
    /// What does not count any more is not read. What was read stays until the lease has decided, because it tells
    /// nodes apart.
    pub(crate) fn follow<'a, const REQUESTS: usize>(
        &self,
        step: &Step,
        client: &mut Client<REQUESTS>,
        links: impl Iterator<Item = &'a mut [Call; REQUESTS]>,
    ) {
        client.lease = step.lease;
        if let Some(request) = &step.request {
            client.asked[request.number as usize - 1] = step.op;
        }
        let counts = self.of(step.lease, |lease| {
            std::array::from_fn::<bool, REQUESTS, _>(|call| {
                lease.counts(u32::try_from(call + 1).expect("few requests"))
            })
        });
        for (node, calls) in links.enumerate() {
            for told in step
                .read
                .iter()
                .filter(|told| usize::from(told.node) == node)
            {
                let call = &mut calls[usize::from(told.number) - 1];
                if told.heard == Heard::FAILED {
                    call.deafen();
                } else {
                    *call = Call::Read(told.heard);
                }
            }
            for (call, counts) in calls.iter_mut().zip(counts) {
                let is_kept = counts || step.events.is_empty() && matches!(call, Call::Read(_));
                if !is_kept {
                    call.deafen();
                }
            }
            if let Some(request) = &step.request
                && request.nodes.contains(node)
            {
                calls[request.number as usize - 1] = Call::Sent;
            }
        }
    }

    fn origin(&self, lease: u32) -> Origin {
        let leases = self.leases.read().expect("no panic");
        leases.note(lease).clone().expect("a lease")
    }

    fn step(&self, mut lease: Lease, origin: Origin) -> Arc<Step> {
        let request = lease.poll_request();
        assert!(lease.poll_request().is_none(), "one request at a time");
        let mut events = Vec::new();
        while let Some(event) = lease.poll_event() {
            events.push(simplified(event));
        }
        let mut leases = self.leases.write().expect("no panic");
        Arc::new(Step {
            read: Vec::new(),
            answers: Vec::new(),
            lease: leases.id(Some(lease), Some(origin)),
            op: request
                .as_ref()
                .map_or(0, |request| self.words.number(&request.op)),
            request,
            events,
        })
    }
}

/// A client that executes begins.
pub(crate) const BEGIN: Input = Input::Begin;

fn simplified(event: Event) -> Event {
    match event {
        Event::Granted {
            number,
            valid_until,
            ..
        } => Event::Granted {
            number,
            acknowledged: 0,
            valid_until,
        },
        Event::Refused(mut refusal) => {
            (refusal.is_split, refusal.is_shared) = (false, false);
            (refusal.voted, refusal.unanswered) = (NodeSet::default(), NodeSet::default());
            Event::Refused(refusal)
        }
        Event::NotExtended { .. } => Event::NotExtended {
            reached: 0,
            silent: NodeSet::default(),
        },
        event => event,
    }
}

/// A lease, and what it asked for, by the numbers of its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Client<const REQUESTS: usize> {
    /// 0 before it begins, and when nothing matters any more that it might do.
    pub(crate) lease: u32,
    pub(crate) asked: [u8; REQUESTS],
}

impl<const REQUESTS: usize> Default for Client<REQUESTS> {
    fn default() -> Self {
        Self {
            lease: 0,
            asked: [0; REQUESTS],
        }
    }
}

/// A wrong variant still hears what does not count any more: but for what was just sent, the calls are as before.
pub(crate) fn keep_old_answers<'a, const REQUESTS: usize>(
    links: impl Iterator<Item = &'a mut [Call; REQUESTS]>,
    before: impl Iterator<Item = [Call; REQUESTS]>,
) {
    for (calls, before) in links.zip(before) {
        let calls = calls.iter_mut().zip(before);
        calls
            .filter(|(call, _)| **call != Call::Sent)
            .for_each(|(call, old)| *call = old);
    }
}

/// The first tick at which what is valid until then is not valid any more.
pub(crate) fn tick_after(valid_until: Duration) -> u8 {
    let whole = u8::try_from(valid_until.as_secs()).expect("few ticks");
    whole + u8::from(valid_until.subsec_nanos() > 0)
}

/// The order in which these nodes are sorted, if they are not: which one comes to each place.
pub(crate) fn sorting<T: Ord>(nodes: &[T]) -> Option<Vec<u8>> {
    if nodes.is_sorted() {
        return None;
    }
    let mut order: Vec<u8> = (0_u8..).zip(nodes).map(|(node, _)| node).collect();
    order.sort_by_key(|node| &nodes[usize::from(*node)]);
    Some(order)
}
