//! What the network knows of requests whose outcome is recorded: what their clients were told, which of
//! them executed, and what must not be done then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{ExecutionId, KeyNames, OwnerToken};

use crate::network::{Event, State};
use crate::plan::happens;

/// The name of a lock.
type Name = Arc<[u8]>;

/// All keys whose outcome is recorded.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    /// The number of nodes in a group.
    group: usize,
    /// How each key is named on the nodes, by the names of its lock.
    names: BTreeMap<Name, KeyNames>,
    /// What every attempt was answered.
    heard: BTreeMap<OwnerToken, Heard>,
    /// Every attempt that executed, and the keys of all of them.
    executions: BTreeMap<OwnerToken, Execution>,
    executed: BTreeSet<Name>,
    /// What every attempt is for.
    locks: BTreeMap<OwnerToken, Name>,
    /// By key and execution, the nodes that have had its record.
    recorded: BTreeMap<(Name, ExecutionId), BTreeSet<usize>>,
    /// Keys of which a client that executed was told a record.
    told: BTreeSet<Name>,
    /// Keys that a process asked for that was killed: nothing can take its intents back.
    abandoned: BTreeSet<Name>,
    /// Attempts that a majority granted the key to, and which were then told of a record.
    pub(crate) told_late: usize,
    /// What was seen to be wrong.
    pub(crate) wrong: Vec<String>,
}

#[derive(Debug, Default)]
struct Heard {
    granted: BTreeSet<usize>,
    recorded: bool,
}

#[derive(Debug)]
struct Execution {
    number: usize,
    /// The user said that it had no effect, so that it may be given back.
    had_no_effect: bool,
}

/// Executing.
impl State {
    /// A process begins to execute the request with this key.
    pub(crate) fn on_execution(&mut self, process: usize, number: usize, key: &str) -> OwnerToken {
        let owner = self.latest_attempt_for(process, key);
        let owner = owner.expect("an attempt comes before an execution");
        let heard = self.orders.heard.get(&owner);
        if heard.is_some_and(|heard| heard.recorded) {
            let wrong =
                format!("execution {number} of {key} begins beside a record that it was told of");
            self.orders.wrong.push(wrong);
        }
        let execution = Execution {
            number,
            had_no_effect: false,
        };
        self.orders.executions.insert(owner.clone(), execution);
        self.orders
            .executed
            .extend(self.orders.locks.get(&owner).cloned());
        owner
    }

    /// An execution is going to end in a way that the user says had no effect.
    pub(crate) fn on_no_effect(&mut self, owner: &OwnerToken) {
        if let Some(execution) = self.orders.executions.get_mut(owner) {
            execution.had_no_effect = true;
        }
    }

    /// Whether a client that executed a request with this key was told that a node has a record.
    pub(crate) fn was_told(&self, key: &str) -> bool {
        self.orders.told.iter().any(|lock| names(lock, key))
    }

    /// Nothing passes between a process and some nodes for a while.
    pub(crate) fn cut_off(
        &mut self,
        process: usize,
        nodes: &[usize],
        lasts: Duration,
        now: Duration,
    ) {
        for node in nodes {
            let link = self.link(process, *node);
            link.cut_until = link.cut_until.max(now + lasts);
        }
    }

    /// Breaks the connections of a process to some nodes, as it sees at once.
    pub(crate) fn break_connections(&mut self, process: usize, nodes: &[usize], now: Duration) {
        for node in nodes {
            let (process, node) = (process, *node);
            let broken = self.link(process, node).open;
            // What is on its way arrives all the same, or does not.
            if broken.is_some() && happens(&mut self.rng, 500) {
                self.events.retain(|_, event| match event {
                    Event::Request(request) => Some(request.to.connection) != broken,
                    _ => true,
                });
            }
            self.give_up(process, node);
            self.at(now, Event::Open { process, node });
        }
    }

    fn latest_attempt_for(&self, process: usize, key: &str) -> Option<OwnerToken> {
        let is_its = |locks: &[Name]| locks.first().is_some_and(|lock| names(lock, key));
        let mut latest = self.latest.iter();
        let found = latest.find(|((of, locks, _), _)| *of == process && is_its(locks));
        found.map(|(_, owner)| owner.clone())
    }
}

/// What passes.
impl State {
    /// A process sends a request.
    pub(super) fn note_order(&mut self, command: &Command) {
        let Some(names) = recorded_key(command) else {
            return;
        };
        let orders = &mut self.orders;
        orders.names.insert(Arc::clone(&names.lock), names.clone());
        orders
            .locks
            .insert(command.owner.clone(), Arc::clone(&names.lock));
        let releases = matches!(command.op, Op::Release | Op::ReleaseExecuted);
        let execution = orders.executions.get(&command.owner);
        if let Some(execution) = execution.filter(|execution| releases && !execution.had_no_effect)
            && !orders.is_decided(&names.lock)
        {
            let number = execution.number;
            orders.wrong.push(format!(
                "the lock of execution {number} is released, and no majority has a record"
            ));
        }
    }

    /// A node has carried out a request.
    pub(super) fn note_record(&mut self, node: usize, command: &Command, reply: &Reply) {
        if let (Some(names), Reply::Done { record, .. }) = (recorded_key(command), reply) {
            let which = (Arc::clone(&names.lock), record.execution());
            self.orders.recorded.entry(which).or_default().insert(node);
        }
    }

    /// A client gets an answer.
    pub(super) fn note_heard(&mut self, node: usize, command: &Command, reply: &Reply) {
        if recorded_key(command).is_none() {
            return;
        }
        let orders = &mut self.orders;
        let majority = orders.group / 2 + 1;
        let executed = orders.executions.contains_key(&command.owner);
        let heard = orders.heard.entry(command.owner.clone()).or_default();
        match reply {
            Reply::Granted(_) => drop(heard.granted.insert(node)),
            Reply::Done { .. } if executed => {
                orders
                    .told
                    .extend(orders.locks.get(&command.owner).cloned());
            }
            Reply::Done { .. } => {
                let late = !heard.recorded && heard.granted.len() >= majority;
                orders.told_late += usize::from(late);
                heard.recorded = true;
            }
            _ => {}
        }
    }

    pub(super) fn note_killed(&mut self, process: usize) {
        let latest = self.latest.keys().filter(|(of, ..)| *of == process);
        let names = latest.filter_map(|(_, names, _)| names.first().cloned());
        self.orders.abandoned.extend(names);
    }

    /// Returns the keys for which nothing was executed, and which a node closes all the same.
    pub(crate) fn closed_for_nothing(&self) -> Vec<String> {
        let orders = &self.orders;
        let mut closed = Vec::new();
        for (lock, names) in &orders.names {
            let recorded = orders.recorded.keys().any(|(of, _)| of == lock);
            let left_behind = orders.abandoned.contains(lock) || orders.executed.contains(lock);
            if recorded || left_behind {
                continue;
            }
            for (index, node) in self.nodes.iter().enumerate() {
                // A request that came behind its own release left it.
                let mut overtaken = self.overtaken.iter();
                let overtaken = overtaken
                    .any(|(at, owner)| *at == index && orders.locks.get(owner) == Some(lock));
                let probe = Command {
                    names: [names.clone()].into(),
                    owner: OwnerToken::from_random([0xff; 16]),
                    op: Op::Acquire {
                        proposal: Some(1),
                        ttl: Duration::from_secs(1),
                        retention: Duration::from_secs(1),
                    },
                };
                let reply = node.store.clone().apply(&probe, node.clock(self.now));
                if reply == Reply::Intended && !overtaken {
                    closed.push(format!(
                        "{} is closed on node {index}, and nothing was executed",
                        lock.escape_ascii()
                    ));
                }
            }
        }
        closed
    }
}

impl Orders {
    pub(super) fn new(group: usize) -> Self {
        Self {
            group,
            ..Self::default()
        }
    }

    /// Whether a majority of the nodes of some group has the same record.
    fn is_decided(&self, lock: &Name) -> bool {
        let mut of_lock = self.recorded.iter().filter(|((of, _), _)| of == lock);
        of_lock.any(|(_, at)| {
            let mut groups: BTreeMap<usize, usize> = BTreeMap::new();
            for node in at {
                *groups.entry(node / self.group).or_default() += 1;
            }
            groups.values().any(|count| *count > self.group / 2)
        })
    }
}

/// Whether a lock is that of this idempotency key.
fn names(lock: &Name, key: &str) -> bool {
    lock.windows(key.len()).any(|part| part == key.as_bytes())
}

fn recorded_key(command: &Command) -> Option<&KeyNames> {
    let first = command.names.first();
    first.filter(|names| names.record.is_some())
}
