//! Numbers in the place of the shipped nodes and rounds of requests whose outcome is recorded.
//!
//! As in `space`, nothing of the protocol is written down here: the values are [`Store`]s,
//! [`OnceRound`]s, [`RecordRound`]s and [`LookRound`]s.

use std::sync::{Arc, RwLock};
use std::time::Duration;

use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::once::{
    LookRound, LookStep, OnceRound, OnceStep, RecordRound, RecordStep,
};
use tower_redlock::protocol::round::Answer;
use tower_redlock::protocol::{
    ExecutionId, Fingerprint, KeyNames, Namespace, OwnerToken, Quorum, Record, Store,
};

use crate::space::{Interner, Memo};

/// The most requests that a model has; one more attempt is for the one that repairs after executing.
pub(crate) const REQUESTS: usize = 3;

/// The attempt of a request that executed and could not record: it may repair, and never executes.
pub(crate) const RETRY: usize = REQUESTS;

/// The most attempts that a model has.
pub(crate) const ATTEMPTS: usize = REQUESTS + 1;

/// The most second phases of a round.
pub(crate) const PHASES: usize = 3;

/// The call that is a `RECORD`: the one after all second phases.
pub(crate) const RECORD: u8 = 4;

/// The call that is a `LOOK`.
pub(crate) const LOOK: u8 = 5;

/// The call that is a `RECORD` after that.
pub(crate) const AGAIN: u8 = 6;

/// How many calls pass between one attempt and one node.
pub(crate) const CALLS: usize = 7;

/// More than any number that a node of a model grants.
const MOST_TOKENS: u8 = 8;

/// Nothing is forgotten within the time of a model, for none passes.
const RETENTION: Duration = Duration::from_secs(1_000_000);

/// The owner that asks for the key after a record has ended: none of the attempts.
const AFTERWARDS: u8 = 0xff;

/// What is done wrong on purpose; all else is shared with the run of the shipped protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Nothing: the protocol as it is shipped.
    Shipped,
    /// T5, T6: any record that is seen is replayed at once, also from one node.
    ReplaysMinority,
    /// One node that recorded is enough to answer.
    AnswersAfterMinority,
    /// T7: a node keeps a record also after it granted the key to another owner.
    RecordsWithoutOwnerCheck,
    /// The executor sends `TOPUP` before a majority has recorded.
    TopsUpEarly,
    /// The executor releases the lock before a majority has recorded.
    ReleasesWithoutRecord,
    /// A record that was seen does not keep from executing.
    IgnoresRecords,
    /// A client that was granted the key ignores all answers until it begins to execute.
    DeafOnceGranted,
    /// A `RECORD` after a `LOOK` is written everywhere, as a `TOPUP` would be.
    RecordsAgainWithoutOwnerCheck,
    /// At most once: the executor withdraws the intent together with the lock.
    TakesIntentBack,
}

/// What a client hears from a node; replies without what takes no part in safety.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Heard {
    Granted(u8),
    Held,
    At(u8),
    Lost,
    /// The record of the execution of this request.
    Done(u8),
    /// Its head.
    Head(u8),
    NotDone,
    Intended,
    Failed,
}

/// A request of one attempt, as the nodes of a model are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ask {
    Acquire(u8),
    Confirm(u8),
    Record(u8),
    /// After a `LOOK`.
    RecordAgain(u8),
    TopUp(u8),
    Look,
    Release,
    /// As a release does, and as an expiry would: the lock goes, what else is there stays.
    Vanish,
}

/// One request of one attempt to one node, and its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Call {
    /// Nothing is under way.
    #[default]
    None,
    /// The node may carry it out, now or later or never.
    Sent,
    /// Like `Sent`, but the answer will not be read.
    Deaf,
    /// The answer is under way.
    Ran(Heard),
}

impl Call {
    /// The answer will not be read.
    pub(crate) fn deafen(&mut self) {
        *self = match self {
            Self::Sent | Self::Deaf => Self::Deaf,
            Self::None | Self::Ran(_) => Self::None,
        };
    }
}

/// What a node has of executions that are decided.
#[derive(Clone, Copy, Debug)]
struct Kept {
    /// Whose record.
    record: Option<u8>,
    /// Whether it also has an intent, which refuses the key when the record has ended.
    and_intent: bool,
}

/// All nodes: one function from a store and a request to a store and an answer.
#[derive(Debug)]
pub(crate) struct Nodes {
    variant: Variant,
    names: Arc<[KeyNames]>,
    stores: RwLock<Interner<Store, Kept>>,
    asked: Memo<(u32, u8, Ask), (u32, Heard)>,
}

impl Nodes {
    pub(crate) fn new(variant: Variant, intents: bool) -> Self {
        // Longer than any record, as an intent is.
        let intents = intents.then_some(RETENTION * 2);
        let names = Namespace::default().names_with_record(&"key".into(), intents, |_| [0; 32]);
        Self {
            variant,
            names: [names.expect("a plain name")].into(),
            stores: Interner::new(),
            asked: Memo::new(),
        }
    }

    /// A node that remembers nothing.
    pub(crate) fn empty(&self) -> u32 {
        self.intern(Store::new())
    }

    /// Whose record the node has.
    pub(crate) fn recorded(&self, store: u32) -> Option<u8> {
        self.stores.read().expect("no panic").note(store).record
    }

    /// Whether the node would refuse the key after the end of its record.
    pub(crate) fn has_intent_beside_record(&self, store: u32) -> bool {
        self.stores.read().expect("no panic").note(store).and_intent
    }

    /// Carries out a request of `attempt` at a node.
    pub(crate) fn ask(&self, store: u32, attempt: u8, ask: Ask) -> (u32, Heard) {
        self.asked.get_or((store, attempt, ask), || {
            let mut node = self.stores.read().expect("no panic").value(store).clone();
            let heard = self.apply(&mut node, attempt, ask);
            (self.intern(node), heard)
        })
    }

    fn apply(&self, node: &mut Store, attempt: u8, ask: Ask) -> Heard {
        let op = match ask {
            Ask::Acquire(proposal) => Op::Acquire {
                proposal: Some(proposal.into()),
                ttl: Duration::from_secs(1),
                retention: RETENTION,
            },
            Ask::Confirm(token) => Op::Confirm {
                token: Some(token.into()),
                ttl: Duration::from_secs(1),
                retention: RETENTION,
            },
            Ask::Record(of) if self.variant == Variant::RecordsWithoutOwnerCheck => {
                return self.record_anyway(node, attempt, of);
            }
            Ask::RecordAgain(of) if self.variant == Variant::RecordsAgainWithoutOwnerCheck => {
                return self.record_anyway(node, attempt, of);
            }
            Ask::Record(of) | Ask::RecordAgain(of) => Op::Record {
                record: record(of),
                retention: RETENTION,
            },
            Ask::TopUp(of) => Op::TopUp {
                record: record(of),
                retention: RETENTION,
            },
            Ask::Look => Op::Look,
            Ask::Release => Op::Release,
            Ask::Vanish => Op::ReleaseExecuted,
        };
        heard(&self.send(node, attempt, op))
    }

    fn record_anyway(&self, node: &mut Store, attempt: u8, of: u8) -> Heard {
        self.send(node, attempt, Op::Release);
        self.apply(node, attempt, Ask::TopUp(of))
    }

    fn send(&self, node: &mut Store, attempt: u8, op: Op) -> Reply {
        self.send_at(node, attempt, op, Duration::ZERO)
    }

    fn send_at(&self, node: &mut Store, attempt: u8, op: Op, now: Duration) -> Reply {
        let command = Command {
            names: Arc::clone(&self.names),
            owner: OwnerToken::with_fingerprint([attempt; 16], fingerprint()),
            op,
        };
        node.apply(&command, now)
    }

    /// A node with a record answers that whatever it is asked, so what else it has is not told apart.
    fn intern(&self, mut node: Store) -> u32 {
        let recorded = match self.apply(&mut node, 0, Ask::Look) {
            Heard::Done(of) => Some(of),
            _ => None,
        };
        if let Some(of) = recorded.filter(|of| self.answers_only(&node, *of)) {
            node = Store::new();
            self.apply(&mut node, 0, Ask::TopUp(of));
        }
        let kept = Kept {
            record: recorded,
            and_intent: recorded.is_some() && self.refuses_afterwards(&node),
        };
        self.stores.write().expect("no panic").id(node, kept)
    }

    fn refuses_afterwards(&self, node: &Store) -> bool {
        let acquire = Op::Acquire {
            proposal: Some(1),
            ttl: Duration::from_secs(1),
            retention: RETENTION,
        };
        let reply = self.send_at(&mut node.clone(), AFTERWARDS, acquire, RETENTION);
        reply == Reply::Intended
    }

    /// The node itself is asked: one that forgets its record, does more than answer it, or has an intent
    /// beside it, stays as it is.
    fn answers_only(&self, node: &Store, of: u8) -> bool {
        if self.refuses_afterwards(node) {
            return false;
        }
        let numbers = || 1..=MOST_TOKENS;
        let asks = numbers()
            .map(Ask::Acquire)
            .chain(numbers().map(Ask::Confirm));
        let others = || (0_u8..).take(REQUESTS);
        let asks = asks
            .chain(others().map(Ask::Record))
            .chain(others().map(Ask::TopUp));
        let asks: Vec<Ask> = asks.chain([Ask::Release, Ask::Vanish]).collect();
        (0_u8..).take(ATTEMPTS).all(|attempt| {
            asks.iter().all(|ask| {
                let mut after = node.clone();
                let heard = self.apply(&mut after, attempt, *ask);
                let answers = match ask {
                    Ask::Release | Ask::Vanish => true,
                    _ => matches!(heard, Heard::Done(it) | Heard::Head(it) if it == of),
                };
                answers && self.apply(&mut after, attempt, Ask::Look) == Heard::Done(of)
            })
        })
    }
}

/// One thing that a round is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Told {
    pub(crate) node: u8,
    /// 0 for the `ACQUIRE`, then the numbers of the second phases, [`RECORD`], [`LOOK`] and [`AGAIN`].
    pub(crate) phase: u8,
    pub(crate) heard: Heard,
}

/// What follows from what a round was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Wait,
    Confirm(u8),
    /// With whether the round had been told of a record.
    Execute(bool),
    Repair(u8),
    Replay(u8),
    Undecided,
    Conflicting,
    Unknown,
    Refused,
    Recorded,
    Missed,
    Found(u8),
    /// With whose record goes out to more nodes.
    Minority(u8),
    Nothing,
}

/// What a round is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Once,
    /// With whose execution is recorded.
    Record(u8),
    /// With whose record is preferred.
    Look(u8),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Round {
    /// With whether it was told of a record.
    Once(OnceRound, bool),
    Record(RecordRound, u8),
    Look(LookRound, u8),
}

/// All rounds: one function from a round and an answer to a round and a step.
#[derive(Debug)]
pub(crate) struct Rounds {
    variant: Variant,
    quorum: Quorum,
    /// With what each was told to become what it is, since it began as the other.
    rounds: RwLock<Interner<Round, (Kind, Vec<Told>)>>,
    told: Memo<(u32, Told), (u32, Step)>,
    moved: Memo<(u32, u32), u32>,
}

impl Rounds {
    pub(crate) fn new(variant: Variant, nodes: usize) -> Self {
        Self {
            variant,
            quorum: Quorum::new(nodes).expect("at least one node"),
            rounds: Interner::new(),
            told: Memo::new(),
            moved: Memo::new(),
        }
    }

    pub(crate) fn majority(&self) -> usize {
        self.quorum.majority()
    }

    pub(crate) fn begin(&self, kind: Kind) -> u32 {
        let round = match kind {
            Kind::Once => Round::Once(OnceRound::new(self.quorum, fingerprint()), false),
            Kind::Record(of) => Round::Record(RecordRound::new(self.quorum, execution(of)), of),
            Kind::Look(own) => Round::Look(LookRound::new(self.quorum), own),
        };
        let note = (kind, Vec::new());
        self.rounds.write().expect("no panic").id(round, note)
    }

    /// Tells a round one answer.
    fn tell(&self, round: u32, told: Told) -> (u32, Step) {
        self.told.get_or((round, told), || {
            let (mut next, (kind, mut log)) = {
                let rounds = self.rounds.read().expect("no panic");
                (rounds.value(round).clone(), rounds.note(round).clone())
            };
            let step = self.step(&mut next, told);
            log.push(told);
            let mut rounds = self.rounds.write().expect("no panic");
            (rounds.id(next, (kind, log)), step)
        })
    }

    /// Tells a round these answers, one after the other.
    pub(crate) fn tell_all(&self, round: u32, log: &[Told]) -> (u32, Step) {
        let start = (round, Step::Wait);
        log.iter()
            .fold(start, |(round, _), told| self.tell(round, *told))
    }

    /// The nodes that the `CONFIRM` or, once that is repaired, the `RECORD` goes to, as bits.
    pub(crate) fn asked_next(&self, round: u32, repair: bool) -> u8 {
        let bits = |nodes: &mut dyn Iterator<Item = usize>| nodes.fold(0, |all, n| all | 1 << n);
        match self.rounds.read().expect("no panic").value(round) {
            Round::Once(round, _) if repair => bits(&mut round.repairers()),
            Round::Once(round, _) => bits(&mut round.unconfirmed()),
            Round::Record(..) | Round::Look(..) => 0,
        }
    }

    /// The number of the second phase that is under way.
    pub(crate) fn phase(&self, round: u32) -> u8 {
        match self.rounds.read().expect("no panic").value(round) {
            Round::Once(round, _) => round.step(),
            Round::Record(..) | Round::Look(..) => 0,
        }
    }

    /// The round that this one would be if node `order[i]` were node `i`.
    pub(crate) fn moved(&self, round: u32, order: &[u8]) -> u32 {
        let packed = order
            .iter()
            .fold(0, |sum, node| sum << 4 | u32::from(*node));
        self.moved.get_or((round, packed), || {
            let (kind, log) = self.rounds.read().expect("no panic").note(round).clone();
            log.iter().fold(self.begin(kind), |round, told| {
                let node = order.iter().position(|node| *node == told.node);
                let node = u8::try_from(node.expect("every node moves")).expect("few nodes");
                self.tell(round, Told { node, ..*told }).0
            })
        })
    }

    /// Every way in which hearing some of these answers, in some order, makes a round act.
    ///
    /// As in `space`; and a client that may execute either does, or goes on to read answers.
    pub(crate) fn decisions(&self, round: u32, answers: &[Told]) -> Vec<(Vec<Told>, Step)> {
        let mut seen = vec![round];
        let mut open = vec![(round, Vec::new())];
        let mut outcomes: Vec<(Option<u32>, Step)> = Vec::new();
        let mut found = Vec::new();
        while let Some((round, log)) = open.pop() {
            for told in answers {
                let again = |old: &Told| old.node == told.node && old.phase == told.phase;
                if log.iter().any(again) {
                    continue;
                }
                let (next, step) = self.tell(round, *told);
                let longer = || [log.as_slice(), &[*told]].concat();
                if matches!(step, Step::Wait | Step::Execute(_)) && !seen.contains(&next) {
                    seen.push(next);
                    open.push((next, longer()));
                }
                let goes_on = matches!(step, Step::Confirm(_) | Step::Repair(_));
                let outcome = (goes_on.then_some(next), step);
                if step != Step::Wait && !outcomes.contains(&outcome) {
                    outcomes.push(outcome);
                    found.push((longer(), step));
                }
            }
        }
        found
    }

    fn step(&self, round: &mut Round, told: Told) -> Step {
        let node = usize::from(told.node);
        match round {
            Round::Once(round, told_of_record) => {
                let mut heard = told.heard;
                if let Heard::Done(of) = heard {
                    *told_of_record = true;
                    match self.variant {
                        Variant::ReplaysMinority => return Step::Replay(of),
                        Variant::IgnoresRecords if told.phase == 0 => heard = Heard::Held,
                        Variant::IgnoresRecords => heard = Heard::Lost,
                        _ => {}
                    }
                }
                let step = match told.phase {
                    0 => round.on_acquire(node, &answer(heard)),
                    RECORD => round.on_record(node, &answer(heard)),
                    phase => round.on_confirm(node, phase, &answer(heard)),
                };
                match step {
                    OnceStep::Wait => Step::Wait,
                    OnceStep::Confirm(token) => Step::Confirm(small(token)),
                    OnceStep::Execute(_) => Step::Execute(*told_of_record),
                    OnceStep::Repair(record) => Step::Repair(executed(&record)),
                    OnceStep::Replay(record) => Step::Replay(executed(&record)),
                    OnceStep::Undecided => Step::Undecided,
                    OnceStep::Conflicting => Step::Conflicting,
                    OnceStep::Unknown => Step::Unknown,
                    OnceStep::Refused(_) => Step::Refused,
                    OnceStep::OtherRequest => unreachable!("all ask for the same"),
                }
            }
            Round::Record(round, of) => {
                let own = told.heard == Heard::Head(*of);
                match round.on_record(node, &answer(told.heard)) {
                    _ if own && self.variant == Variant::AnswersAfterMinority => Step::Recorded,
                    RecordStep::Wait => Step::Wait,
                    RecordStep::Recorded => Step::Recorded,
                    RecordStep::Missed => Step::Missed,
                }
            }
            Round::Look(round, own) => match round.on_look(node, &answer(told.heard)) {
                LookStep::Wait => Step::Wait,
                LookStep::Found(record) => Step::Found(executed(&record)),
                LookStep::Minority => {
                    let leading = round.leading(execution(*own));
                    Step::Minority(executed(leading.expect("a minority has one")))
                }
                LookStep::Nothing => Step::Nothing,
            },
        }
    }
}

fn heard(reply: &Reply) -> Heard {
    match reply {
        Reply::Granted(number) => Heard::Granted(small(*number)),
        Reply::Held { .. } => Heard::Held,
        Reply::At(number) => Heard::At(small(*number)),
        Reply::Lost => Heard::Lost,
        Reply::Done { record, .. } if record.is_whole() => Heard::Done(executed(record)),
        Reply::Done { record, .. } => Heard::Head(executed(record)),
        // Of a release nothing follows.
        Reply::NotDone | Reply::Released => Heard::NotDone,
        Reply::Intended => Heard::Intended,
        reply => unreachable!("{reply:?} in the model"),
    }
}

fn answer(heard: Heard) -> Answer {
    let done = |record| Reply::Done {
        record,
        expires_in: RETENTION,
    };
    Answer::Replied(match heard {
        Heard::Granted(number) => Reply::Granted(number.into()),
        Heard::Held => Reply::Held {
            expires_in: None,
            fingerprint: Some(fingerprint()),
        },
        Heard::At(number) => Reply::At(number.into()),
        Heard::Lost => Reply::Lost,
        Heard::Done(of) => done(record(of)),
        Heard::Head(of) => {
            let record = record(of);
            let head = record.as_bytes()[..Record::HEAD].into();
            done(Record::from_bytes(head).expect("a head"))
        }
        Heard::NotDone => Reply::NotDone,
        Heard::Intended => Reply::Intended,
        Heard::Failed => return Answer::Failed,
    })
}

fn execution(of: u8) -> ExecutionId {
    ExecutionId::from_random([of; 16])
}

fn fingerprint() -> Fingerprint {
    Fingerprint::from_digest([0; 32])
}

fn record(of: u8) -> Record {
    Record::new(execution(of), fingerprint(), [of; 32], &[of])
}

/// Of which request this is the outcome.
fn executed(record: &Record) -> u8 {
    record.digest()[0]
}

fn small(number: u64) -> u8 {
    u8::try_from(number).expect("numbers of a model are small")
}
