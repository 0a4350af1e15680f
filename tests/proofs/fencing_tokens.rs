//! Fencing tokens of several clients are unique and ordered when messages are lost, late and doubled.

#![allow(
    clippy::needless_pass_by_value,
    reason = "an answer reads best where it is given"
)]

use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use support::{Random, ms, secs};
use tower_redlock::protocol::acquire::{AcquireRound, AcquireStep};
use tower_redlock::protocol::message::{Answer, Command, Op, Reply};
use tower_redlock::protocol::round::{ExtendRound, ExtendStep};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, OwnerToken, Store, validity};

use crate::round_cases::{asked, cases, quorum};

const TTL: Duration = ms(1_000);

const RETENTION: Duration = secs(3_600);

/// What a request belongs to; answers are counted nowhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Acquire,
    Confirm(u8),
    Extend(usize),
    Release,
}

#[derive(Debug, Clone)]
struct Request {
    client: usize,
    attempt: usize,
    purpose: Purpose,
    node: usize,
    command: Command,
}

#[derive(Debug, Clone)]
struct Response {
    request: Request,
    reply: Reply,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Acquiring(AcquireRound),
    Holding {
        token: u64,
        until: Duration,
        extension: Option<Extension>,
    },
}

#[derive(Debug)]
struct Extension {
    round: ExtendRound,
    sent: Duration,
    /// Tells it from older ones, whose answers vouch for an older expiry.
    number: usize,
}

/// One client, in its current attempt.
#[derive(Debug)]
struct Client {
    attempt: usize,
    /// Index of its set of keys.
    keys: usize,
    names: Arc<[KeyNames]>,
    owner: OwnerToken,
    /// When it sent its first request, on the clock and in the order of events.
    started: Duration,
    began: usize,
    phase: Phase,
}

/// An acquisition that got a token.
#[derive(Debug, Clone, Copy)]
struct Completed {
    keys: usize,
    token: u64,
    began: usize,
    completed: usize,
}

/// What a schedule came across; to know that the schedules are worth something.
#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    tokens: usize,
    second_phases: usize,
    third_phases: usize,
    extensions: usize,
    losses: usize,
    too_late: usize,
}

/// Clients and nodes, and everything that is under way between them.
struct World {
    sets: Vec<LockKeys>,
    nodes: Vec<Store>,
    clients: Vec<Client>,
    requests: Vec<Request>,
    responses: Vec<Response>,
    now: Duration,
    event: usize,
    attempts: usize,
    completed: Vec<Completed>,
    seen: Seen,
}

impl World {
    fn new(nodes: usize, clients: usize, sets: &[&[&str]]) -> Self {
        let sets = sets.iter().map(|set| set.iter().copied().collect());
        let client = |_| Client {
            attempt: 0,
            keys: 0,
            names: Arc::new([]),
            owner: OwnerToken::from_random([0; 16]),
            started: Duration::ZERO,
            began: 0,
            phase: Phase::Idle,
        };
        Self {
            sets: sets.collect(),
            nodes: vec![Store::new(); nodes],
            clients: (0..clients).map(client).collect(),
            requests: Vec::new(),
            responses: Vec::new(),
            now: secs(1),
            event: 0,
            attempts: 0,
            completed: Vec::new(),
            seen: Seen::default(),
        }
    }

    /// Lets one thing happen.
    fn happen(&mut self, what: u8, pick: u16) -> Result<(), TestCaseError> {
        self.event += 1;
        let index = usize::from(pick);
        match what % 32 {
            0..=9 => {
                if let Some(request) = take(&mut self.requests, index) {
                    self.deliver(&request);
                }
            }
            // Doubled: it arrives now and once more some time later.
            10..=11 => {
                if let Some(request) = take(&mut self.requests, index) {
                    self.requests.push(request.clone());
                    self.deliver(&request);
                }
            }
            12 => drop(take(&mut self.requests, index)),
            13..=22 => {
                if let Some(response) = take(&mut self.responses, index) {
                    self.receive(&response);
                }
            }
            23 => drop(take(&mut self.responses, index)),
            24..=28 => self.act(index % self.clients.len(), pick),
            29 => self.lose_patience(index % self.clients.len()),
            _ => self.now += TTL / 16 * u32::from(pick % 12),
        }
        self.check_exclusion()
    }

    fn deliver(&mut self, request: &Request) {
        let reply = self.nodes[request.node].apply(&request.command, self.now);
        let request = request.clone();
        self.responses.push(Response { request, reply });
    }

    fn send(&mut self, id: usize, nodes: &[usize], purpose: Purpose, op: Op) {
        let client = &self.clients[id];
        for node in nodes {
            self.requests.push(Request {
                client: id,
                attempt: client.attempt,
                purpose,
                node: *node,
                command: Command {
                    names: Arc::clone(&client.names),
                    owner: client.owner.clone(),
                    op: op.clone(),
                },
            });
        }
    }

    fn all_nodes(&self) -> Vec<usize> {
        (0..self.nodes.len()).collect()
    }

    /// The client does what it likes to: begin, extend, or release.
    fn act(&mut self, id: usize, pick: u16) {
        match &self.clients[id].phase {
            Phase::Idle => self.begin(id, pick),
            Phase::Acquiring(_) => {}
            Phase::Holding {
                token,
                until,
                extension,
            } => {
                let token = *token;
                if extension.is_none() && *until > self.now && pick & 8 == 0 {
                    self.extend(id, token);
                } else {
                    let nodes = self.all_nodes();
                    self.release(id, &nodes);
                }
            }
        }
    }

    fn begin(&mut self, id: usize, pick: u16) {
        self.attempts += 1;
        let attempts = u8::try_from(self.attempts).expect("schedules are short");
        let keys = usize::from(pick / 16) % self.sets.len();
        let names = Namespace::default().names(&self.sets[keys], |_| [0; 32]);
        let quorum = quorum(self.nodes.len());
        self.clients[id] = Client {
            attempt: self.attempts,
            keys,
            names: names.expect("good keys"),
            owner: OwnerToken::from_random([attempts; 16]),
            started: self.now,
            began: self.event,
            phase: Phase::Acquiring(AcquireRound::new(quorum, None)),
        };
        // Clocks that disagree: proposals somewhat below and above what has been granted, so that
        // the nodes' numbers differ often.
        let tokens = self.completed.iter().map(|done| done.token);
        let top = tokens.max().unwrap_or(3);
        let op = Op::Acquire {
            proposal: Some((top + u64::from(pick / 64 % 32)).saturating_sub(24)),
            ttl: TTL,
            retention: RETENTION,
        };
        let nodes = self.all_nodes();
        self.send(id, &nodes, Purpose::Acquire, op);
    }

    fn confirm(token: u64) -> Op {
        Op::Confirm {
            token: Some(token),
            ttl: TTL,
            retention: RETENTION,
        }
    }

    fn extend(&mut self, id: usize, token: u64) {
        let (nodes, number) = (self.all_nodes(), self.event);
        let round = ExtendRound::new(quorum(nodes.len()), token);
        if let Phase::Holding { extension, .. } = &mut self.clients[id].phase {
            *extension = Some(Extension {
                round,
                sent: self.now,
                number,
            });
            self.send(id, &nodes, Purpose::Extend(number), Self::confirm(token));
        }
    }

    fn release(&mut self, id: usize, nodes: &[usize]) {
        self.send(id, nodes, Purpose::Release, Op::Release);
        self.clients[id].phase = Phase::Idle;
    }

    fn receive(&mut self, response: &Response) {
        let request = &response.request;
        let id = request.client;
        if self.clients[id].attempt != request.attempt {
            return;
        }
        let answer = Answer::Replied(response.reply.clone());
        self.answer(id, request.node, request.purpose, answer);
    }

    fn answer(&mut self, id: usize, node: usize, purpose: Purpose, answer: Answer) {
        match (&mut self.clients[id].phase, purpose) {
            (Phase::Acquiring(round), Purpose::Acquire) => {
                let step = round.on_acquire(node, &answer);
                self.follow(id, step);
            }
            (Phase::Acquiring(round), Purpose::Confirm(number)) => {
                let step = round.on_confirm(node, number, &answer);
                self.follow(id, step);
            }
            (
                Phase::Holding {
                    until, extension, ..
                },
                Purpose::Extend(number),
            ) => {
                let current = extension.as_mut().filter(|it| it.number == number);
                let Some(Extension { round, sent, .. }) = current else {
                    return;
                };
                match round.on_confirm(node, &answer) {
                    ExtendStep::Wait => {}
                    ExtendStep::Extended => {
                        let lifetime = validity::lifetime(TTL).expect("longer than the drift");
                        // An extension of a lock that has ended is none.
                        if *until > self.now {
                            *until = (*until).max(*sent + lifetime);
                            self.seen.extensions += 1;
                        }
                        *extension = None;
                    }
                    ExtendStep::Lost => {
                        self.seen.losses += 1;
                        let nodes = self.all_nodes();
                        self.release(id, &nodes);
                    }
                    ExtendStep::Missed { .. } => *extension = None,
                }
            }
            _ => {}
        }
    }

    fn follow(&mut self, id: usize, step: AcquireStep) {
        let client = &mut self.clients[id];
        let Phase::Acquiring(round) = &client.phase else {
            return;
        };
        match step {
            AcquireStep::Wait => {}
            AcquireStep::Repair(_) | AcquireStep::Decided(_) => panic!("no node has a record"),
            AcquireStep::Confirm(target) => {
                let (nodes, step) = (asked(round), round.step());
                self.seen.second_phases += usize::from(step == 1);
                self.seen.third_phases += usize::from(step == 2);
                self.send(id, &nodes, Purpose::Confirm(step), Self::confirm(target));
            }
            AcquireStep::Granted(token) => {
                self.seen.tokens += 1;
                self.completed.push(Completed {
                    keys: client.keys,
                    token,
                    began: client.began,
                    completed: self.event,
                });
                if let Some(left) = validity::remaining(TTL, self.now - client.started) {
                    let until = self.now + left;
                    client.phase = Phase::Holding {
                        token,
                        until,
                        extension: None,
                    };
                } else {
                    self.seen.too_late += 1;
                    let nodes = self.all_nodes();
                    self.release(id, &nodes);
                }
            }
            AcquireStep::Refused(_) => {
                // A node that said no to the only request of this attempt has nothing to release.
                let held = |node: &usize| !round.refused().contains(*node);
                let nodes: Vec<usize> = (0..self.nodes.len()).filter(held).collect();
                self.release(id, &nodes);
            }
        }
    }

    /// The client takes the silent nodes for failed.
    fn lose_patience(&mut self, id: usize) {
        let (purpose, silent): (Purpose, Vec<usize>) = match &self.clients[id].phase {
            Phase::Acquiring(round) => {
                let purpose = match round.step() {
                    0 => Purpose::Acquire,
                    step => Purpose::Confirm(step),
                };
                (purpose, round.silent().iter().collect())
            }
            Phase::Holding {
                extension: Some(extension),
                ..
            } => (
                Purpose::Extend(extension.number),
                extension.round.silent().iter().collect(),
            ),
            Phase::Idle | Phase::Holding { .. } => return,
        };
        for node in silent {
            self.answer(id, node, purpose, Answer::Failed);
        }
    }

    fn overlap(&self, one: usize, other: usize) -> bool {
        let keys = self.sets[one].as_slice();
        let others = self.sets[other].as_slice();
        others.iter().any(|key| keys.contains(key))
    }

    /// With clocks that run equally fast, no two clients rely on the same key at the same time.
    fn check_exclusion(&self) -> Result<(), TestCaseError> {
        let valid = |client: &&Client| match client.phase {
            Phase::Holding { until, .. } => until > self.now,
            Phase::Idle | Phase::Acquiring(_) => false,
        };
        let holders: Vec<&Client> = self.clients.iter().filter(valid).collect();
        for (index, one) in holders.iter().enumerate() {
            for other in &holders[..index] {
                let clash = self.overlap(one.keys, other.keys);
                prop_assert!(!clash, "{:?} and {:?} at {:?}", one, other, self.now);
            }
        }
        Ok(())
    }

    /// Holds also for acquisitions whose majority came too late to be worth anything: tokens are
    /// unique and ordered without any clock.
    fn check_tokens(&self) -> Result<(), TestCaseError> {
        for (index, b) in self.completed.iter().enumerate() {
            for a in &self.completed[..index] {
                if self.overlap(a.keys, b.keys) {
                    prop_assert_ne!(a.token, b.token, "{:?} {:?}", a, b);
                    let ordered = b.began <= a.completed || b.token > a.token;
                    prop_assert!(ordered, "{:?} {:?}", a, b);
                }
            }
        }
        Ok(())
    }
}

fn take<T>(from: &mut Vec<T>, index: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(index % from.len()))
}

const ONE_KEY: &[&[&str]] = &[&["k"]];

/// Sets of different sizes: raising the fences of only some keys of a set shows with these alone.
const UNEQUAL_SETS: &[&[&str]] = &[&["x", "y"], &["x"], &["y"]];

fn run(
    nodes: usize,
    clients: usize,
    sets: &[&[&str]],
    schedule: &[(u8, u16)],
) -> Result<Seen, TestCaseError> {
    let mut world = World::new(nodes, clients, sets);
    for (what, pick) in schedule {
        world.happen(*what, *pick)?;
    }
    world.check_tokens()?;
    Ok(world.seen)
}

fn schedules() -> impl Strategy<Value = Vec<(u8, u16)>> {
    vec(any::<(u8, u16)>(), 100..500)
}

proptest! {
    #![proptest_config(cases(600))]

    #[test]
    fn fencing_tokens_of_one_key_are_unique_and_grow_in_real_time_order(
        nodes in 1_usize..=5,
        clients in 2_usize..=4,
        schedule in schedules(),
    ) {
        run(nodes, clients, ONE_KEY, &schedule)?;
    }

    #[test]
    fn fencing_tokens_of_overlapping_sets_are_unique_and_grow_in_real_time_order(
        nodes in 1_usize..=5,
        clients in 2_usize..=4,
        schedule in schedules(),
    ) {
        run(nodes, clients, UNEQUAL_SETS, &schedule)?;
    }
}

/// The properties above are worth as much as what the random schedules come across.
#[test]
fn random_schedules_cover_second_phases_extensions_and_losses() {
    for sets in [ONE_KEY, UNEQUAL_SETS] {
        let mut sum = Seen::default();
        let mut random = Random(1);
        for round in 0..1_000_usize {
            let any = |_| {
                let [a, b, c, ..] = random.next_number().to_be_bytes();
                (a, u16::from_be_bytes([b, c]))
            };
            let schedule: Vec<(u8, u16)> = (0..400).map(any).collect();
            let seen = run(1 + round % 5, 2 + round % 3, sets, &schedule).expect("no violation");
            sum.tokens += seen.tokens;
            sum.second_phases += seen.second_phases;
            sum.third_phases += seen.third_phases;
            sum.extensions += seen.extensions;
            sum.losses += seen.losses;
            sum.too_late += seen.too_late;
        }
        assert!(sum.tokens > 500, "{sum:?}");
        assert!(sum.second_phases > 50 && sum.third_phases > 0, "{sum:?}");
        assert!(sum.extensions > 10, "{sum:?}");
        assert!(sum.losses > 5 && sum.too_late > 5, "{sum:?}");
    }
}
