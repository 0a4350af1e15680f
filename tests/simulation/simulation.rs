//! One simulation, from its seed to what is wrong with what came of it.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace};

use crate::history::{Counts, History};
use crate::network::Network;
use crate::plan::{Fault, MAX_TTL, NODE_TIMEOUT, Plan, ms};
use crate::process::Process;

/// How far time goes on at most before everybody must be done.
const LONGEST: Duration = Duration::from_secs(120);

/// How much longer than its ttl a lock may live by another's clock.
const SLACK: Duration = ms(20);

pub(crate) struct Outcome {
    pub(crate) story: String,
    pub(crate) counts: Counts,
    pub(crate) faults: usize,
    pub(crate) violations: Vec<String>,
}

struct Simulation {
    network: Arc<Network>,
    history: History,
    processes: Vec<Process>,
    /// How far time has come.
    now: Duration,
    /// When which process stood still, with the instant in which it goes on.
    pauses: Vec<(usize, Duration, Duration)>,
    keys: Vec<KeyNames>,
}

pub(crate) fn simulate(seed: u64) -> Outcome {
    let plan = Plan::from_seed(seed);
    let mut rng = Rng::with_seed(seed ^ 0x5eed);
    let network = Network::new(&plan, rng.fork());
    let history = History::default();
    let processes = (0..plan.processes.len())
        .map(|index| Process::new(&plan, index, &network, &history, &mut rng));
    let keys: LockKeys = ["x", "y"].into_iter().collect();
    let keys = Namespace::default().names(&keys, |_| [0; 32]);
    let mut simulation = Simulation {
        processes: processes.collect(),
        network,
        history,
        now: Duration::ZERO,
        pauses: pauses(&plan),
        keys: keys.expect("the keys are short"),
    };
    simulation
        .history
        .say(Duration::ZERO, format_args!("{plan:#?}"));
    simulation.work();
    simulation.wind_up();
    let Simulation {
        network,
        history,
        pauses,
        ..
    } = simulation;
    Outcome {
        violations: history.violations(plan.clocks_are_steady(), &pauses),
        counts: history.counts(),
        faults: network.state().faults,
        story: history.text(),
    }
}

impl Simulation {
    /// Lets all users do what they want.
    fn work(&mut self) {
        while !self
            .processes
            .iter_mut()
            .all(|process| !process.is_alive() || process.is_done())
        {
            if self.now > LONGEST {
                self.history
                    .wrong("the users do not come to an end".to_owned());
                return;
            }
            self.go_on(self.now + ms(50));
        }
    }

    /// Ends everything in order, and looks at what is left.
    fn wind_up(&mut self) {
        self.network.state().heal();
        let connected = self.now + ms(2_500);
        self.go_on(connected);
        for process in &mut self.processes {
            process.start_drain();
        }
        let mut drained = vec![None; self.processes.len()];
        let last = self.now + ms(6_000);
        while self.now < last {
            for (process, drained) in self.processes.iter_mut().zip(&mut drained) {
                if drained.is_none() {
                    *drained = process.drained();
                }
            }
            let over = |(process, drained): (&Process, &Option<_>)| {
                !process.is_alive() || drained.is_some()
            };
            if self.processes.iter().zip(&drained).all(over) {
                break;
            }
            self.go_on(self.now + ms(10));
        }
        // What was sent has arrived by now.
        self.go_on(self.now + 2 * NODE_TIMEOUT);
        for (index, process) in self.processes.iter().enumerate() {
            if !process.is_alive() {
                continue;
            }
            let Some(drained) = &drained[index] else {
                self.history
                    .wrong(format!("process {index} does not drain"));
                continue;
            };
            if process.tasks() > 0 {
                let tasks = process.tasks();
                self.history
                    .wrong(format!("process {index} has {tasks} tasks left"));
            }
            for (node, _) in self.held_by(index) {
                let name = format!("wired-{node}");
                let told = drained.unconfirmed.iter().any(|left| *left.node == *name);
                if !told {
                    self.history
                        .wrong(format!("process {index} left a lock on node {node}"));
                }
            }
        }
        while !self.network.state().is_quiet() && self.now < 2 * LONGEST {
            self.go_on(self.now + ms(50));
        }
        self.go_on(self.now + MAX_TTL + SLACK);
        let left = self.network.state().locks();
        if left > 0 {
            self.history.wrong(format!("{left} locks never expire"));
        }
    }

    fn held_by(&self, process: usize) -> Vec<(usize, usize)> {
        let mut held = self.network.state().held(&self.keys);
        held.retain(|(_, holder)| *holder == process);
        held
    }

    /// Lets time go on, everywhere and in order.
    fn go_on(&mut self, until: Duration) {
        loop {
            let next = self.network.state().next_event_at();
            let next = next.map_or(until, |next| next.min(until));
            if !self.catch_up(next) {
                // Somebody sent something, which may arrive earlier than all else.
                continue;
            }
            self.now = next;
            self.network.state().now = next;
            if self
                .network
                .state()
                .next_event_at()
                .is_none_or(|at| at > until)
            {
                return;
            }
            self.network.state().step();
            self.end_the_killed();
        }
    }

    /// Lets every process come as far as `instant`; false as soon as one has sent something.
    fn catch_up(&mut self, instant: Duration) -> bool {
        for (index, process) in self.processes.iter_mut().enumerate() {
            let paused_until = self.network.state().paused_until(index);
            if !process.is_alive() || process.now >= instant || paused_until > instant {
                continue;
            }
            if paused_until > process.now {
                process.skip_to(paused_until);
            } else {
                process.run_until(instant);
            }
            if process.now < instant {
                return false;
            }
        }
        true
    }

    fn end_the_killed(&mut self) {
        for (index, process) in self.processes.iter_mut().enumerate() {
            if process.is_alive() && !self.network.state().is_alive(index) {
                process.kill();
            }
        }
    }
}

/// Returns when which process stands still.
fn pauses(plan: &Plan) -> Vec<(usize, Duration, Duration)> {
    let mut pauses: Vec<_> = plan
        .faults
        .iter()
        .filter_map(|(at, fault)| match fault {
            Fault::Pause { process, lasts } => Some((*process, *at, *at + *lasts)),
            _ => None,
        })
        .collect();
    pauses.sort_unstable_by_key(|(_, from, _)| *from);
    pauses
}
