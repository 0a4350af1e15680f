//! One simulation, from its seed to what is wrong with what came of it.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use histories::{Hold, Miss};
use tower_redlock::protocol::{KeyNames, LockKey, LockKeys, Namespace};

use crate::history::History;
use crate::network::Network;
use crate::orders::Ledger;
use crate::plan::{Fault, MAX_TTL, Plan, ms};
use crate::process::Process;
use crate::resize::{Resize, Step};
use crate::tally::Tally;

/// How far time goes on at most before everybody must be done.
const LONGEST: Duration = Duration::from_secs(120);

/// How far time goes on at once.
const STEP: Duration = ms(200);

/// How much longer than its ttl a lock may live by another's clock.
const SLACK: Duration = ms(20);

/// How long it takes besides to have a lock that is free: attempts, releases, and those who leave it to
/// others.
const IDLE: Duration = ms(100);

pub(crate) struct Outcome {
    pub(crate) story: String,
    pub(crate) operations: (Vec<Hold>, Vec<Miss>),
    /// Whether validity proves who held a lock, which it does as long as no clock jumps.
    pub(crate) is_exclusive: bool,
    pub(crate) counts: Tally,
    pub(crate) orders: Tally,
    pub(crate) violations: Vec<String>,
    /// What happened to the leases of the keys that the first violation names.
    pub(crate) traces: String,
}

impl Outcome {
    pub(crate) fn write_history(&self, name: &str, seed: u64) {
        let (holds, misses) = &self.operations;
        let name = format!("{name}_{seed}.jsonl");
        histories::write(&name, holds, misses, self.is_exclusive);
    }
}

struct Simulation {
    network: Arc<Network>,
    history: History,
    processes: Vec<Process>,
    /// How far time has come.
    now: Duration,
    /// How the groups change, and when the last process that knew only the old ones has ended.
    resize: Option<(Resize, Option<Duration>)>,
    /// When which process stood still, with the instant in which it goes on.
    pauses: Vec<(usize, Duration, Duration)>,
    keys: Arc<[KeyNames]>,
}

pub(crate) fn simulate(seed: u64, plan: &Plan) -> Outcome {
    let mut rng = Rng::with_seed(seed ^ 0x5eed);
    let network = Network::new(plan, rng.fork());
    let history = History::default();
    let ledger = Ledger::default();
    let processes = (0..plan.processes.len())
        .map(|index| Process::new(plan, index, &network, &history, &ledger, &mut rng));
    let keys: LockKeys = ["x", "y"].into_iter().collect();
    let keys = Namespace::default().names(&keys, |_| [0; 32]);
    let mut simulation = Simulation {
        processes: processes.collect(),
        network,
        history,
        now: Duration::ZERO,
        pauses: pauses(plan),
        resize: plan.resize.clone().map(|resize| (resize, None)),
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
        processes,
        ..
    } = simulation;
    let state = network.state();
    let idle = plan.is_calm().then(|| plan.longest_poll() + IDLE);
    let mut violations =
        history.violations(plan.clocks_are_steady(), &pauses, idle, plan.attempts());
    violations.extend(ledger.violations(plan));
    violations.extend(state.orders.wrong.iter().cloned());
    let (mut counts, mut orders) = (history.counts(), ledger.counts());
    for (_, trace) in processes.iter().flat_map(|process| process.traces.all()) {
        let (unlike, is_granted) = histories::not_of_the_model(&trace);
        violations.extend(unlike);
        counts.add("lives", usize::from(is_granted));
    }
    // Locks that were shared while another shared one of their keys.
    counts.add("shared at once", history.shared_at_once());
    counts.add("faults", state.faults);
    // Of the messages that tell of releases.
    counts.add("heard", state.wake_ups.heard);
    counts.add("missed", state.wake_ups.missed);
    // Attempts that were told of a record after they were granted the key.
    orders.add("told late", state.orders.told_late);
    let traces = violations.first().map(|first| traces(&processes, first));
    Outcome {
        violations,
        traces: traces.unwrap_or_default(),
        orders,
        counts,
        operations: history.operations(),
        is_exclusive: plan.clocks_are_steady(),
        story: history.text(),
    }
}

/// Returns the traces of the keys that a violation names; of all, if it names none.
fn traces(processes: &[Process], violation: &str) -> String {
    let is_named = |key: &LockKey| violation.contains(&format!("{key:?}"));
    let mut text = String::new();
    for is_all in [false, true] {
        for (index, process) in processes.iter().enumerate() {
            for (keys, trace) in process.traces.all() {
                if is_all || keys.as_slice().iter().any(is_named) {
                    text += &format!("process {index}, {keys:?}\n{trace}\n");
                }
            }
        }
        if !text.is_empty() {
            break;
        }
    }
    text
}

impl Simulation {
    /// Lets all users do what they want, and every process end when its users have.
    fn work(&mut self) {
        let mut working: Vec<usize> = (0..self.processes.len()).collect();
        while !working.is_empty() {
            if self.now > LONGEST {
                self.history
                    .wrong(format!("processes {working:?} do not end"));
                return;
            }
            working.retain(|index| self.is_working(*index));
            self.begin_the_new(&working);
            self.go_on(self.now + STEP);
        }
    }

    /// Lets the processes that know only the new groups begin, when they may.
    fn begin_the_new(&mut self, working: &[usize]) {
        let Some((resize, ended)) = &mut self.resize else {
            return;
        };
        let is = |index: usize, step| resize.steps[index] == step;
        if !working.iter().any(|index| is(*index, Step::Old)) {
            ended.get_or_insert(self.now);
        }
        let ended = if resize.waits { *ended } else { Some(self.now) };
        if ended.is_some_and(|ended| resize.begins(ended) <= self.now) {
            let new = self.processes.iter().enumerate();
            let new = new.filter(|(index, _)| is(*index, Step::New));
            new.for_each(|(_, process)| process.begin());
        }
    }

    /// Drains a process once it is done, and looks at what is left when it is drained.
    fn is_working(&mut self, index: usize) -> bool {
        let process = &mut self.processes[index];
        if !process.is_alive() {
            return false;
        }
        if process.is_done() {
            process.start_drain();
        }
        let Some(drained) = process.drained() else {
            return true;
        };
        self.history
            .say(self.now, format_args!("process {index}: {drained:?}"));
        let listens = self.network.state().listens_for(index);
        if listens > 0 {
            let what = format!("process {index} is drained and listens for {listens} locks");
            self.history.wrong(what);
        }
        for node in self.held_by(index) {
            let name = format!("sim-{node}");
            let unconfirmed = drained.unconfirmed.iter().map(|left| &left.node);
            if !unconfirmed
                .chain(&drained.lagging_nodes)
                .any(|node| **node == *name)
            {
                let what = format!("process {index} left a lock on node {node}");
                self.history.wrong(what);
            }
        }
        false
    }

    /// Looks at what is left when the network is well and time has gone on.
    fn wind_up(&mut self) {
        self.network.state().heal();
        while !self.network.state().is_quiet() && self.now < 2 * LONGEST {
            self.go_on(self.now + STEP);
        }
        // A process that stands still goes on before, and what wakes its locks ends.
        let pauses = self.pauses.iter().map(|(.., until)| *until);
        let awake = self.now.max(pauses.max().unwrap_or_default());
        self.go_on(awake + MAX_TTL + SLACK);
        for closed in self.network.state().closed_for_nothing() {
            self.history.wrong(closed);
        }
        let left = self.network.state().locks();
        if left > 0 {
            self.history.wrong(format!("{left} locks never expire"));
        }
        for (index, process) in self.processes.iter().enumerate() {
            let tasks = process.tasks();
            if tasks > 0 {
                self.history
                    .wrong(format!("process {index} has {tasks} tasks left"));
            }
        }
    }

    /// Returns the nodes on which a process has locks.
    fn held_by(&self, process: usize) -> Vec<usize> {
        let held = self.network.state().held(&self.keys).into_iter();
        let held = held.filter(|(_, holder)| *holder == process);
        held.map(|(node, _)| node).collect()
    }

    /// Lets time go on, everywhere and in order.
    fn go_on(&mut self, until: Duration) {
        loop {
            let next = self.network.state().next_event_at();
            let next = next.map_or(until, |next| next.min(until));
            if !self.catch_up(next) {
                // A process sent something, which may arrive earlier than all else.
                continue;
            }
            self.now = next;
            let mut state = self.network.state();
            state.now = next;
            if state.next_event_at().is_none_or(|at| at > until) {
                return;
            }
            state.step();
            drop(state);
            self.end_the_killed();
        }
    }

    /// Lets every process come as far as `instant`; false as soon as one has sent something.
    fn catch_up(&mut self, instant: Duration) -> bool {
        for (index, process) in self.processes.iter_mut().enumerate() {
            if !process.is_alive() || process.now >= instant {
                continue;
            }
            let paused_until = self.network.state().paused_until(index);
            if paused_until > instant {
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
