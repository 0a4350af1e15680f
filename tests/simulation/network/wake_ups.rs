//! How the simulated nodes tell of releases: on connections of their own, which are worse than the others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tower_redlock::test_util::SimSubscriber;

use crate::network::{Event, RETRY, State};
use crate::plan::{WakeUpPlan, happens, ms, up_to};

/// How long it takes at most until a process sees that it hears nothing any more.
const KEEPALIVE: Duration = ms(1_000);

/// All connections on which releases are heard of.
#[derive(Debug)]
pub(crate) struct WakeUps {
    /// Its own, so that the rest of a seed stays what it is.
    rng: Rng,
    plan: WakeUpPlan,
    next_connection: u64,
    /// By process and node.
    links: BTreeMap<(usize, usize), EarLink>,
    /// By node and lock, who subscribed, as the node knows it: also whom it does not know to be gone.
    audiences: BTreeMap<(usize, Arc<[u8]>), BTreeSet<Subscriber>>,
    /// How many messages arrived, and how many did not.
    pub(crate) heard: usize,
    pub(crate) missed: usize,
}

/// A process and its connection.
type Subscriber = (usize, u64);

/// What one process has with one node.
#[derive(Debug, Default)]
struct EarLink {
    open: Option<u64>,
    opening: bool,
    wanted: BTreeMap<Arc<[u8]>, SimSubscriber>,
    /// When the last request on this connection arrives: the next does not overtake it.
    arrives: Duration,
}

/// Something that arrives on such a connection.
#[derive(Debug, Clone)]
pub(crate) struct EarMessage {
    process: usize,
    node: usize,
    connection: u64,
    what: What,
}

#[derive(Debug, Clone)]
enum What {
    Subscribe(Arc<[u8]>),
    Unsubscribe(Arc<[u8]>),
    Subscribed(Arc<[u8]>),
    Released(Arc<[u8]>, usize),
    /// The process sees that the connection is gone.
    Gone,
}

impl WakeUps {
    pub(crate) fn new(plan: &WakeUpPlan, rng: Rng) -> Self {
        Self {
            rng,
            plan: plan.clone(),
            next_connection: 1,
            links: BTreeMap::new(),
            audiences: BTreeMap::new(),
            heard: 0,
            missed: 0,
        }
    }

    fn delay(&mut self) -> Duration {
        up_to(&mut self.rng, self.plan.delay)
    }

    fn link(&mut self, process: usize, node: usize) -> &mut EarLink {
        self.links.entry((process, node)).or_default()
    }
}

impl State {
    pub(crate) fn listen(
        &mut self,
        (process, node): (usize, usize),
        lock: &Arc<[u8]>,
        listener: SimSubscriber,
        now: Duration,
    ) {
        if !self.processes[process].alive {
            return;
        }
        let link = self.wake_ups.link(process, node);
        link.wanted.insert(Arc::clone(lock), listener);
        match link.open {
            Some(_) => self.ask(process, node, now, What::Subscribe(Arc::clone(lock))),
            None if !std::mem::replace(&mut link.opening, true) => {
                let delay = self.wake_ups.delay();
                self.at(now + delay, Event::OpenEar { process, node });
            }
            None => {}
        }
    }

    pub(crate) fn hush(&mut self, process: usize, node: usize, lock: &Arc<[u8]>, now: Duration) {
        if self.processes[process].alive {
            self.wake_ups.link(process, node).wanted.remove(lock);
            self.ask(process, node, now, What::Unsubscribe(Arc::clone(lock)));
        }
    }

    /// Tells all who listen at a node of a release, and returns how many that are.
    pub(super) fn tell(&mut self, node: usize, lock: &Arc<[u8]>) -> usize {
        let audience = self.wake_ups.audiences.get(&(node, Arc::clone(lock)));
        let audience = audience.cloned().unwrap_or_default();
        let listeners = audience.len();
        for (process, connection) in audience {
            let WakeUps { rng, plan, .. } = &mut self.wake_ups;
            let message = EarMessage {
                process,
                node,
                connection,
                what: What::Released(Arc::clone(lock), listeners),
            };
            let (lost, breaks) = (happens(rng, plan.lost), happens(rng, plan.breaks));
            // Each with a delay of its own: they overtake each other.
            let copies = 1 + usize::from(happens(rng, plan.repeated));
            for _ in 0..if lost { 0 } else { copies } {
                let delay = self.wake_ups.delay();
                self.after(delay, Event::Ear(message.clone()));
            }
            self.wake_ups.missed += usize::from(lost);
            if breaks {
                self.break_ear(process, node);
            }
        }
        listeners
    }

    pub(super) fn open_ear(&mut self, process: usize, node: usize) {
        if self.is_away(process, || Event::OpenEar { process, node }) {
            return;
        }
        let (now, reached) = (self.now, self.reaches(process, node));
        let connection = self.wake_ups.next_connection;
        let link = self.wake_ups.link(process, node);
        let wanted: Vec<_> = link.wanted.keys().cloned().collect();
        link.opening = !wanted.is_empty() && !reached;
        if link.opening {
            self.after(RETRY, Event::OpenEar { process, node });
        } else if !wanted.is_empty() {
            link.open = Some(connection);
            link.arrives = now;
            self.wake_ups.next_connection += 1;
            for lock in wanted {
                self.ask(process, node, now, What::Subscribe(lock));
            }
        }
    }

    pub(super) fn on_ear(&mut self, message: &EarMessage) {
        let &EarMessage {
            process,
            node,
            connection,
            ref what,
        } = message;
        let reached = self.reaches(process, node);
        match what {
            What::Subscribe(_) | What::Unsubscribe(_) if !reached => self.break_ear(process, node),
            What::Subscribe(lock) => {
                let audience = (node, Arc::clone(lock));
                let audience = self.wake_ups.audiences.entry(audience).or_default();
                audience.insert((process, connection));
                let (delay, what) = (self.wake_ups.delay(), What::Subscribed(Arc::clone(lock)));
                let message = EarMessage {
                    process,
                    node,
                    connection,
                    what,
                };
                self.after(delay, Event::Ear(message));
            }
            What::Unsubscribe(lock) => {
                let audience = self.wake_ups.audiences.get_mut(&(node, Arc::clone(lock)));
                audience.map(|audience| audience.remove(&(process, connection)));
            }
            What::Subscribed(_) | What::Released(..) | What::Gone => {
                if !self.is_away(process, || Event::Ear(message.clone())) {
                    self.hear(message, reached);
                }
            }
        }
    }

    fn hear(&mut self, message: &EarMessage, reached: bool) {
        let (process, node) = (message.process, message.node);
        let link = self.wake_ups.link(process, node);
        if link.open != Some(message.connection) {
            return;
        }
        match &message.what {
            What::Gone => {
                link.open = None;
                for listener in link.wanted.values() {
                    listener.set_subscribed(false);
                }
                link.opening = true;
                self.after(RETRY, Event::OpenEar { process, node });
            }
            _ if !reached => {
                self.wake_ups.missed += 1;
                self.break_ear(process, node);
            }
            What::Subscribed(lock) => {
                if let Some(listener) = link.wanted.get(lock) {
                    listener.set_subscribed(true);
                }
            }
            What::Released(lock, listeners) => {
                if let Some(listener) = link.wanted.get(lock) {
                    listener.notify(*listeners);
                    self.wake_ups.heard += 1;
                }
            }
            What::Subscribe(_) | What::Unsubscribe(_) => {}
        }
    }

    /// A connection breaks: the node forgets it, which the process sees later.
    pub(super) fn break_ear(&mut self, process: usize, node: usize) {
        let Some(connection) = self.wake_ups.link(process, node).open else {
            return;
        };
        for ((at, _), audience) in &mut self.wake_ups.audiences {
            if *at == node {
                audience.remove(&(process, connection));
            }
        }
        let seen_after = up_to(&mut self.wake_ups.rng, KEEPALIVE);
        let message = EarMessage {
            process,
            node,
            connection,
            what: What::Gone,
        };
        self.after(seen_after, Event::Ear(message));
    }

    /// Ends all that a killed process hears; the nodes do not see it, and go on counting it.
    pub(super) fn kill_ears(&mut self, process: usize) {
        self.wake_ups.links.retain(|(of, _), _| *of != process);
    }

    /// Returns for how many locks a process listens, by its own account.
    pub(crate) fn listens_for(&self, process: usize) -> usize {
        let links = self.wake_ups.links.iter();
        let its = links.filter(|((of, _), _)| *of == process);
        its.map(|(_, link)| link.wanted.len()).sum()
    }

    fn ask(&mut self, process: usize, node: usize, now: Duration, what: What) {
        let delay = self.wake_ups.delay();
        let link = self.wake_ups.link(process, node);
        if let Some(connection) = link.open {
            let arrives = (now + delay).max(link.arrives);
            link.arrives = arrives;
            let message = EarMessage {
                process,
                node,
                connection,
                what,
            };
            self.at(arrives, Event::Ear(message));
        }
    }
}
