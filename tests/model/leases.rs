//! Numbers in the place of the shipped leases, and of what passes between them and the nodes.
//!
//! Nothing of the protocol is written down here. A [`Lease`] is pure data with inputs and outputs, so a model may keep
//! each of its values once, name it by a number, and remember what the shipped code did when it was first told
//! something. The clients of the models are such leases; a model says only what may happen to them, and when.
//!
//! A node that is silent is told of as [`Heard::FAILED`], one by one, which is more than the timer of a driver does. So
//! the node timeout is longer than any model takes; [`Input::TimedOut`] is left to renew a lock, and to lose it.

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use tower_redlock::protocol::Quorum;
use tower_redlock::protocol::acquire::Refusal;
use tower_redlock::protocol::lease::{Event, Input, Lease, LeaseRequest, LeaseSpec};
use tower_redlock::protocol::message::{Answer, Op, Reply};
use tower_redlock::protocol::round::VoteStep;

use crate::space::{Seen, ticks};

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
    ops: Seen<Option<Op>, ()>,
    answers: Seen<Answer, ()>,
}

impl Words {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            ops: Seen::of(None, ()),
            answers: Seen::of(Answer::Failed, ()),
        })
    }

    pub(crate) fn number(&self, op: &Op) -> u8 {
        small(self.ops.id(Some(op.clone()), ()))
    }

    pub(crate) fn op(&self, number: u8) -> Op {
        let op = self.ops.see(number.into(), |op, ()| op.clone());
        op.expect("a request")
    }

    /// The answer of a node, without what takes no part in safety.
    pub(crate) fn hear(&self, mut reply: Reply) -> Heard {
        if let Reply::Held { expires_in, .. } | Reply::HeldShared { expires_in } = &mut reply {
            *expires_in = None;
        }
        Heard(small(self.answers.id(Answer::Replied(reply), ())))
    }

    pub(crate) fn answer(&self, heard: Heard) -> Answer {
        self.answers
            .see(heard.0.into(), |answer, ()| answer.clone())
    }
}

/// The same number; a model has few of everything.
pub(crate) fn small(number: impl TryInto<u8>) -> u8 {
    number.try_into().ok().expect("a model has small numbers")
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

    /// The lease was told this.
    pub(crate) fn read(&mut self, heard: Heard) {
        match heard {
            Heard::FAILED => self.deafen(),
            heard => *self = Self::Read(heard),
        }
    }

    /// The node will not carry it out any more.
    pub(crate) fn get_lost(&mut self) {
        if self.may_run() {
            self.run(Heard::FAILED);
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

impl Told {
    pub(crate) fn new(node: usize, number: impl TryInto<u8>, heard: Heard) -> Self {
        let (node, number) = (small(node), small(number));
        Self {
            node,
            number,
            heard,
        }
    }

    /// Which call it answers.
    pub(crate) fn call(&self) -> usize {
        usize::from(self.number) - 1
    }
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

pub(crate) type Steps = Arc<[Arc<Step>]>;

/// How a lease came to be what it is, when that was seen first, and when that was.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Origin {
    Begun(LeaseSpec, u8),
    Told(u32, Input, u8),
}

/// All leases: one function from a lease, an input and a time to a lease, a request and events. No lease has number 0.
#[derive(Debug)]
pub(crate) struct Leases {
    pub(crate) words: Arc<Words>,
    quorum: Quorum,
    leases: Seen<Option<Lease>, Option<Origin>>,
    steps: Seen<Origin, Arc<Step>>,
    decided: Seen<(u32, Vec<Told>, u8, bool), Steps>,
    moved: Seen<(u32, Vec<u8>), u32>,
}

impl Leases {
    pub(crate) fn new(words: &Arc<Words>, nodes: usize) -> Self {
        Self {
            words: Arc::clone(words),
            quorum: Quorum::new(nodes).expect("at least one node"),
            leases: Seen::of(None, None),
            steps: Seen::new(),
            decided: Seen::new(),
            moved: Seen::new(),
        }
    }

    /// A lease that has just asked all nodes for the lock.
    pub(crate) fn begin(&self, spec: LeaseSpec, now: u8) -> Arc<Step> {
        self.step(Origin::Begun(spec, now))
    }

    /// What a lease does with an input at `now`.
    pub(crate) fn handle(&self, lease: u32, input: Input, now: u8) -> Arc<Step> {
        self.step(Origin::Told(lease, input, now))
    }

    fn step(&self, origin: Origin) -> Arc<Step> {
        self.steps.get_or(origin, |origin| {
            let patience = |_| Duration::ZERO;
            let mut lease = match origin.clone() {
                Origin::Begun(spec, now) => Lease::new(spec, self.quorum, ticks(now), patience),
                Origin::Told(lease, input, now) => {
                    let before = self.of(lease, Lease::clone);
                    let (mut lease, now) = (before.clone(), ticks(now));
                    lease.handle(input.clone(), now);
                    let is_known = lease == before || histories::allows(&before, &input, now);
                    assert!(
                        is_known,
                        "traces may not have this step: {before:?} {input:?}"
                    );
                    lease
                }
            };
            let request = lease.poll_request();
            assert!(lease.poll_request().is_none(), "one request at a time");
            let events = iter::from_fn(|| lease.poll_event()).map(simplified);
            let op = request.as_ref().map(|it| self.words.number(&it.op));
            Arc::new(Step {
                read: Vec::new(),
                answers: Vec::new(),
                events: events.collect(),
                lease: self.leases.id(Some(lease), Some(origin.clone())),
                op: op.unwrap_or_default(),
                request,
            })
        })
    }

    /// What a lease says of itself.
    pub(crate) fn of<T>(&self, lease: u32, says: impl FnOnce(&Lease) -> T) -> T {
        let see = |lease: &Option<Lease>, _: &_| lease.as_ref().map(says);
        self.leases.see(lease, see).expect("a lease")
    }

    /// Whether there is a lease that says so.
    pub(crate) fn is(&self, lease: u32, says: impl FnOnce(&Lease) -> bool) -> bool {
        lease != 0 && self.of(lease, says)
    }

    pub(crate) fn tell(&self, lease: u32, told: Told, now: u8) -> Arc<Step> {
        let input = Input::Answered {
            node: told.node.into(),
            number: told.number.into(),
            answer: self.words.answer(told.heard),
        };
        self.handle(lease, input, now)
    }

    /// Every way in which reading some of these answers, in some order, makes a lease act; of an execution, which may begin
    /// at once when it is granted the key, or read on before, if it `begins`.
    ///
    /// Until a lease acts, the answers it has read make no difference, so nothing is lost by letting clients read
    /// answers only when that makes them act.
    pub(crate) fn decisions(&self, lease: u32, answers: Vec<Told>, now: u8, begins: bool) -> Steps {
        let key = (lease, answers, now, begins);
        self.decided.get_or(key, |&(lease, ref answers, ..)| {
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
                let may_begin = begins && self.is(lease, Lease::is_holding);
                let begin = || (self.handle(lease, Input::Begin, now), read.clone());
                let begun = may_begin.then(begin);
                for (step, read) in unread.map(hear).chain(begun) {
                    let goes_on = match step.events[..] {
                        [] => step.request.is_none(),
                        [Event::Granted { .. }] => step.request.is_none() && begins,
                        _ => false,
                    };
                    let did = |step: &Step| (step.lease, step.request.clone(), step.events.clone());
                    let is_new = found.iter().all(|old| did(old) != did(&step));
                    if !goes_on && is_new {
                        found.push(self.after(&step, read));
                    } else if goes_on && !seen.contains(&step.lease) {
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
        let key = (lease, order.to_vec());
        self.moved.get_or(key, |_| match self.origin(lease) {
            None | Some(Origin::Begun(..)) => lease,
            Some(Origin::Told(before, mut input, now)) => {
                if let Input::Answered { node, .. } = &mut input {
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
            None => lease,
            Some(Origin::Begun(spec, _)) => self.begin(spec, now).lease,
            Some(Origin::Told(before, input, _)) => {
                self.handle(self.hastened(before, now), input, now).lease
            }
        }
    }

    fn origin(&self, lease: u32) -> Option<Origin> {
        self.leases.see(lease, |_, origin| origin.clone())
    }
}

/// The same without what differs between answers that lead to the same.
fn simplified(mut event: Event) -> Event {
    match &mut event {
        Event::Granted { acknowledged, .. } => *acknowledged = 0,
        Event::NotExtended { reached, silent } => (*reached, *silent) = Default::default(),
        Event::Released(VoteStep::Missed { reached }) => *reached = 0,
        Event::Refused(Refusal::Contended(contention)) => {
            (contention.is_split, contention.is_shared) = (false, false);
        }
        Event::Refused(Refusal::Unavailable { voted, unanswered }) => {
            (*voted, *unanswered) = Default::default();
        }
        _ => {}
    }
    event
}

/// The first tick at which what is valid until then is not valid any more.
pub(crate) fn tick_after(valid_until: Duration) -> u8 {
    let whole = small(valid_until.as_secs());
    whole + u8::from(valid_until.subsec_nanos() > 0)
}
