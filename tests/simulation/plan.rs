//! Plans: what a simulation consists of and what is going to happen in it, drawn from its seed.

use std::time::Duration;

use fastrand::Rng;

use crate::resize::{NODES, Resize, STAGES, Step};

/// The longest ttl that any lock is asked for with.
pub(crate) const MAX_TTL: Duration = ms(1_000);
/// How long a node that lost its memory stays out.
pub(crate) const WINDOW: Duration = ms(3_000);
pub(crate) const NODE_TIMEOUT: Duration = ms(50);
/// How far wall clocks are apart at most: less than `WINDOW - MAX_TTL`.
const MAX_SKEW: Duration = ms(1_500);
/// How far a node's clock steps at most: with the skew still less than `WINDOW - MAX_TTL`.
const MAX_STEP: Duration = ms(400);
/// How much faster or slower than a client's a node's clock runs at most, in millionths.
const MAX_DRIFT: i64 = 9_000;

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// One simulation.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) nodes: Vec<NodePlan>,
    pub(crate) processes: Vec<ProcessPlan>,
    pub(crate) network: NetworkPlan,
    pub(crate) wake_ups: WakeUpPlan,
    /// What goes wrong when, in no order.
    pub(crate) faults: Vec<(Duration, Fault)>,
    /// Whether customers break nothing but connections.
    pub(crate) healthy: bool,
    /// Whether users share half of their locks with others.
    pub(crate) shares: bool,
    /// How the groups of nodes change, if there are several.
    pub(crate) resize: Option<Resize>,
}

#[derive(Debug, Clone)]
pub(crate) struct NodePlan {
    /// By how many millionths its clock is too fast.
    pub(crate) drift: i64,
}

#[derive(Debug, Clone)]
pub(crate) struct ProcessPlan {
    /// When it is started: one that comes late has never seen the nodes before.
    pub(crate) starts: Duration,
    /// How far its wall clock is ahead.
    pub(crate) skew: Duration,
    /// Whether it renews its locks.
    pub(crate) renews: bool,
    /// How many locks each of its users asks for.
    pub(crate) users: Vec<usize>,
    /// How many orders each of its customers sends, which are to be executed once.
    pub(crate) customers: Vec<usize>,
    /// How long it goes without asking at most while it listens.
    pub(crate) poll_interval: Duration,
}

/// How bad the network is: in how many of a thousand messages what happens.
#[derive(Debug, Clone)]
pub(crate) struct NetworkPlan {
    pub(crate) delay: Duration,
    pub(crate) slow: u32,
    pub(crate) slow_delay: Duration,
    pub(crate) lost: u32,
    pub(crate) repeated: u32,
    /// Whether a record that was not answered goes out again on the next connection, as in the shipped
    /// lanes. If not, the client that executed finds out by looking.
    pub(crate) records_again: bool,
}

/// How bad the telling of releases is: in how many of a thousand messages what happens. No node waits for
/// it, so it may be worse than the rest.
#[derive(Debug, Clone)]
pub(crate) struct WakeUpPlan {
    pub(crate) delay: Duration,
    pub(crate) lost: u32,
    pub(crate) repeated: u32,
    /// Where the connection breaks.
    pub(crate) breaks: u32,
}

#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// A node goes down, with or without its memory.
    Crash {
        node: usize,
        keeps: bool,
        down_for: Duration,
    },
    /// Nodes forget everything and go on.
    Flush { nodes: Vec<usize> },
    /// The clocks of nodes step forward: locks expire early.
    Step { nodes: Vec<usize>, by: Duration },
    /// Nothing passes between a process and some nodes.
    Partition {
        process: usize,
        nodes: Vec<usize>,
        lasts: Duration,
    },
    /// A connection breaks; what is on its way may still arrive.
    Break { process: usize, node: usize },
    /// A process stands still while time goes on.
    Pause { process: usize, lasts: Duration },
    /// A process ends without a word.
    Kill { process: usize },
}

impl Plan {
    pub(crate) fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let nodes: Vec<_> = (0..[5, 3, 3, 4][usize::from(rng.u8(..4))])
            .map(|_| NodePlan {
                drift: rng.i64(-MAX_DRIFT..=MAX_DRIFT),
            })
            .collect();
        let mut processes: Vec<_> = (0..rng.usize(2..=3))
            .map(|_| ProcessPlan {
                starts: Duration::ZERO,
                skew: up_to(&mut rng, MAX_SKEW),
                renews: rng.u8(..3) > 0,
                users: (0..rng.usize(1..=2)).map(|_| rng.usize(3..=8)).collect(),
                customers: Vec::new(),
                poll_interval: Duration::ZERO,
            })
            .collect();
        let network = NetworkPlan::draw(&mut rng);
        let mut faults: Vec<_> = match rng.u8(..8) {
            // What must hold without any is more than what holds with them.
            0 => Vec::new(),
            _ => (0..rng.usize(1..=8))
                .map(|_| {
                    let at = up_to(&mut rng, ms(5_000));
                    (at, Fault::draw(&mut rng, nodes.len(), processes.len()))
                })
                .collect(),
        };
        keep_one_step(&mut faults);
        // A late request comes at the most dangerous instant, if there is one.
        let flush = |fault: &&(Duration, Fault)| matches!(fault.1, Fault::Flush { .. });
        let flushed = faults.iter().find(flush).map(|(at, _)| *at);
        for process in processes.iter_mut().skip(1) {
            if rng.bool() {
                let early = up_to(&mut rng, ms(500));
                process.starts = flushed.unwrap_or_default() + early;
            }
        }
        let wake_ups = WakeUpPlan::draw(&mut rng);
        for process in &mut processes {
            process.poll_interval = ms(rng.u64(50..=250));
        }
        Self {
            nodes,
            processes,
            network,
            wake_ups,
            faults,
            healthy: false,
            shares: false,
            resize: None,
        }
    }

    /// Users, half of whom share, while processes change to other groups of nodes.
    pub(crate) fn of_resize(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed ^ 0x0005_1235);
        let resize = Resize::draw(&mut rng);
        let mut plan = Self::from_seed(seed);
        plan.shares = rng.bool();
        let process = plan.processes[0].clone();
        plan.processes.resize(resize.steps.len(), process);
        for process in &mut plan.processes {
            process.starts = Duration::ZERO;
            process.skew = up_to(&mut rng, MAX_SKEW);
        }
        let node = plan.nodes[0].clone();
        plan.nodes.resize(resize.nodes(), node);
        for (_, fault) in &mut plan.faults {
            *fault = Fault::draw(&mut rng, plan.nodes.len(), plan.processes.len());
        }
        keep_one_step(&mut plan.faults);
        plan.resize = Some(resize);
        plan
    }

    /// The same without the rule: processes know the old groups or the new ones, and none knows both.
    pub(crate) fn of_reckless_resize(seed: u64) -> Self {
        let mut plan = Self::of_resize(seed).calmed();
        plan.shares = false;
        if let Some(resize) = &mut plan.resize {
            resize.waits = false;
            resize.steps = vec![Step::Old, Step::Old, Step::New, Step::New];
        }
        plan
    }

    /// The same with nothing going wrong but that releases are not told of.
    pub(crate) fn calmed(mut self) -> Self {
        self.faults.clear();
        self.network = NetworkPlan {
            delay: self.network.delay,
            slow: 0,
            slow_delay: self.network.delay,
            lost: 0,
            repeated: 0,
            records_again: true,
        };
        self
    }

    /// The same with readers among the users.
    pub(crate) fn of_readers(seed: u64) -> Self {
        Self {
            shares: true,
            ..Self::from_seed(seed)
        }
    }

    /// Customers in the place of users, and nodes that keep their memory and their clocks: without that,
    /// records and locks promise less.
    pub(crate) fn of_orders(seed: u64) -> Self {
        let mut plan = Self::from_seed(seed);
        plan.keep_memories();
        plan
    }

    /// Puts customers in the place of users, and lets nodes keep their memory and their clocks.
    fn keep_memories(&mut self) {
        for process in &mut self.processes {
            process.customers = std::mem::take(&mut process.users);
        }
        self.faults.retain_mut(|(_, fault)| match fault {
            Fault::Flush { .. } | Fault::Step { .. } => false,
            Fault::Crash { keeps, .. } => {
                *keeps = true;
                true
            }
            _ => true,
        });
    }

    /// Customers, while processes change to other groups of nodes. Those of the old and the new layout do not meet: an
    /// outcome counts in its layout only.
    pub(crate) fn of_resized_orders(seed: u64) -> Self {
        let mut plan = Self::of_resize(seed);
        plan.shares = false;
        plan.keep_memories();
        if let Some(resize) = &mut plan.resize {
            resize.waits = false;
            resize.steps = match seed.is_multiple_of(2) {
                true => vec![Step::Old, Step::Both, Step::Both, Step::Old],
                false => vec![Step::Both, Step::New, Step::New, Step::Both],
            };
        }
        plan
    }

    /// Customers, and nothing that goes wrong but that connections break: leases do not.
    pub(crate) fn of_orders_over_breaking_connections(seed: u64) -> Self {
        let mut plan = Self::of_orders(seed).calmed();
        plan.healthy = true;
        plan.network.records_again = seed.is_multiple_of(2);
        for process in &mut plan.processes {
            process.renews = true;
        }
        plan
    }

    /// Whether nothing stands between a free lock and a request for it, so that no request waits
    /// while no lock is held.
    ///
    /// A lost message silences its connection and delays the releases on it. An acquisition that a node
    /// carries out again behind its release locks the node until the ttl ends. No process holds such a
    /// lock, and none can release it; two of them are a majority of three nodes.
    pub(crate) fn is_calm(&self) -> bool {
        let NetworkPlan {
            slow,
            lost,
            repeated,
            ..
        } = self.network;
        self.faults.is_empty() && [slow, lost, repeated] == [0; 3]
    }

    /// Returns how long any process goes without asking while it waits. One that is not told asks like one
    /// that was never to be.
    pub(crate) fn longest_poll(&self) -> Duration {
        let polls = self.processes.iter().map(|process| process.poll_interval);
        polls.max().unwrap_or_default().max(ms(250))
    }

    /// Returns the number of nodes in a group.
    pub(crate) fn group(&self) -> usize {
        self.resize.as_ref().map_or(self.nodes.len(), |_| NODES)
    }

    /// Returns how many attempts a lock takes, at most: one in each group, and one to raise tokens, or to release what
    /// it has when a group refuses.
    pub(crate) fn attempts(&self) -> u32 {
        self.resize.as_ref().map_or(1, |_| STAGES + 1)
    }

    /// Whether the clocks run so that two holders must never both be within their validity.
    pub(crate) fn clocks_are_steady(&self) -> bool {
        let step = |fault: &(Duration, Fault)| matches!(fault.1, Fault::Step { .. });
        !self.faults.iter().any(step)
    }
}

impl NetworkPlan {
    fn draw(rng: &mut Rng) -> Self {
        let delay = ms(rng.u64(1..=8));
        let perfect = Self {
            delay,
            slow: 0,
            slow_delay: delay,
            lost: 0,
            repeated: 0,
            records_again: true,
        };
        match rng.u8(..4) {
            0 => perfect,
            1 => Self {
                slow: rng.u32(20..=300),
                slow_delay: ms(rng.u64(20..=60)),
                ..perfect
            },
            _ => Self {
                slow: rng.u32(0..=200),
                slow_delay: ms(rng.u64(20..=700)),
                lost: rng.u32(0..=20),
                repeated: rng.u32(0..=50),
                ..perfect
            },
        }
    }
}

impl WakeUpPlan {
    fn draw(rng: &mut Rng) -> Self {
        let perfect = Self {
            delay: ms(rng.u64(1..=8)),
            lost: 0,
            repeated: 0,
            breaks: 0,
        };
        match rng.u8(..4) {
            0 => perfect,
            1 => Self {
                lost: 1_000,
                ..perfect
            },
            _ => Self {
                delay: ms(rng.u64(1..=300)),
                lost: rng.u32(0..=500),
                repeated: rng.u32(0..=200),
                breaks: rng.u32(0..=100),
            },
        }
    }
}

impl Fault {
    fn draw(rng: &mut Rng, nodes: usize, processes: usize) -> Self {
        let (node, process) = (rng.usize(..nodes), rng.usize(..processes));
        match rng.u8(..16) {
            0 | 1 => Self::Crash {
                node,
                keeps: rng.bool(),
                down_for: up_to(rng, ms(1_500)),
            },
            2..=4 => {
                let flushed = rng.usize(1..=nodes);
                Self::Flush {
                    nodes: rng.choose_multiple(0..nodes, flushed),
                }
            }
            5 => {
                let stepped = rng.usize(1..=nodes);
                Self::Step {
                    nodes: rng.choose_multiple(0..nodes, stepped),
                    by: up_to(rng, MAX_STEP),
                }
            }
            6..=9 => {
                let cut_off = rng.usize(1..=nodes);
                Self::Partition {
                    process,
                    nodes: rng.choose_multiple(0..nodes, cut_off),
                    lasts: up_to(rng, ms(2_500)),
                }
            }
            10 | 11 => Self::Break { process, node },
            12..=14 => Self::Pause {
                process,
                lasts: up_to(rng, ms(2_500)),
            },
            _ => Self::Kill { process },
        }
    }
}

/// Leaves the first step of clocks: more than one could add up to more than a guard may bear.
fn keep_one_step(faults: &mut Vec<(Duration, Fault)>) {
    let mut stepped = false;
    faults.retain(|(_, fault)| {
        let steps = matches!(fault, Fault::Step { .. });
        !(steps && std::mem::replace(&mut stepped, true))
    });
}

/// Draws a duration of whole milliseconds: simulated time has no smaller unit.
pub(crate) fn up_to(rng: &mut Rng, longest: Duration) -> Duration {
    let longest = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX);
    ms(rng.u64(1..=longest.max(1)))
}

/// Draws whether something happens that does in so many of a thousand cases.
pub(crate) fn happens(rng: &mut Rng, per_mille: u32) -> bool {
    rng.u32(..1_000) < per_mille
}
