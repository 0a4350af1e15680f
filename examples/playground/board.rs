//! What the page shows of the nodes: their condition, the holder of the account's lock, and its fence.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use tower_redlock::protocol::Namespace;
use tower_redlock::{LockKey, LockKeys, NodeState};

use crate::events::{Feed, lock};
use crate::{ACCOUNT, NODES, SERVERS};

/// The nodes of one instance, as the page shows them.
#[derive(Debug)]
pub(crate) struct Board {
    feed: Feed,
    nodes: Mutex<Vec<Row>>,
    /// The name of the account's lock on the nodes.
    pub(crate) account: Arc<[u8]>,
}

#[derive(Debug, Default)]
struct Row {
    power: Power,
    delay: Duration,
    /// The servers that it is cut off from.
    cut_off: [bool; SERVERS.len()],
    quarantined_until: Option<Instant>,
    /// Whether no server has reached it since its start.
    is_starting: bool,
    holder: Option<Holder>,
    fence: Option<u64>,
}

#[derive(Debug)]
struct Holder {
    server: usize,
    owner: String,
    expires: Instant,
}

/// Whether a node runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Power {
    #[default]
    Up,
    /// It is stopped, and answers when it continues.
    Hung,
    Down,
}

/// Whether requests of a client reach a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    Open,
    /// Requests are lost without an answer for now.
    Silent,
    /// There is no connection.
    Broken(&'static str),
}

impl Board {
    pub(crate) fn new(feed: Feed) -> Arc<Self> {
        let keys = LockKeys::from(LockKey::from(ACCOUNT));
        // A short key is named in clear, without a digest.
        let names = Namespace::default().names(&keys, |_| [0; 32]);
        let account = names
            .ok()
            .and_then(|names| Some(names.first()?.lock.clone()));
        Arc::new(Self {
            feed,
            nodes: Mutex::new((0..NODES).map(|_| Row::default()).collect()),
            account: account.unwrap_or_else(|| Arc::from([])),
        })
    }

    pub(crate) fn power(&self, node: usize) -> Power {
        lock(&self.nodes)[node].power
    }

    pub(crate) fn set_power(&self, node: usize, power: Power) {
        lock(&self.nodes)[node].power = power;
    }

    pub(crate) fn delay(&self, node: usize) -> Duration {
        lock(&self.nodes)[node].delay
    }

    pub(crate) fn set_delay(&self, node: usize, delay: Duration) {
        lock(&self.nodes)[node].delay = delay;
    }

    pub(crate) fn cut(&self, node: usize, server: usize, is_cut: bool) {
        lock(&self.nodes)[node].cut_off[server] = is_cut;
    }

    /// Returns whether requests of a server reach a node.
    pub(crate) fn reach(&self, node: usize, server: usize) -> Reach {
        let row = &lock(&self.nodes)[node];
        match row.power {
            Power::Down => Reach::Broken("it was killed"),
            Power::Hung => Reach::Silent,
            Power::Up if row.cut_off[server] => Reach::Broken("it is cut off"),
            Power::Up => Reach::Open,
        }
    }

    /// Returns the nodes that all servers reach, and that are not quarantined.
    pub(crate) fn voters(&self) -> usize {
        let nodes = lock(&self.nodes);
        let now = Instant::now();
        let votes = |row: &&Row| {
            let is_quarantined = row.quarantined_until.is_some_and(|until| until >= now);
            row.power == Power::Up && !row.is_starting && !is_quarantined
        };
        nodes.iter().filter(votes).count()
    }

    /// Shows what the servers know of a node.
    pub(crate) fn observed(&self, node: usize, state: &NodeState) {
        let row = &mut lock(&self.nodes)[node];
        row.is_starting &= matches!(state, NodeState::Unreachable { .. });
        match state {
            NodeState::Quarantined { left } => row.quarantined_until = Some(Instant::now() + *left),
            NodeState::Up => row.quarantined_until = None,
            // A server that is only connecting knows nothing of a quarantine.
            _ => {}
        }
    }

    /// Shows that a node has just started, until a server reaches it.
    pub(crate) fn started(&self, node: usize) {
        let row = &mut lock(&self.nodes)[node];
        row.power = Power::Up;
        row.is_starting = true;
    }

    pub(crate) fn is_quarantined(&self, node: usize) -> bool {
        let until = lock(&self.nodes)[node].quarantined_until;
        until.is_some_and(|until| until > Instant::now())
    }

    /// Shows that a node granted the account's lock, or confirmed it.
    pub(crate) fn granted(
        &self,
        node: usize,
        server: usize,
        owner: &str,
        ttl: Duration,
        fence: u64,
    ) {
        let row = &mut lock(&self.nodes)[node];
        row.holder = Some(Holder {
            server,
            owner: owner.to_owned(),
            expires: Instant::now() + ttl,
        });
        if fence > 0 {
            row.fence = Some(fence);
        }
    }

    /// Returns whether a node has the account's lock, as far as the page knows.
    pub(crate) fn is_held(&self, node: usize) -> bool {
        let now = Instant::now();
        let holder = &lock(&self.nodes)[node].holder;
        holder.as_ref().is_some_and(|holder| holder.expires > now)
    }

    /// Shows that the account's lock is free at a node, if this owner had it.
    pub(crate) fn released(&self, node: usize, owner: &str) {
        let row = &mut lock(&self.nodes)[node];
        if row
            .holder
            .as_ref()
            .is_some_and(|holder| holder.owner == owner)
        {
            row.holder = None;
        }
    }

    /// Shows that a node has lost its memory.
    pub(crate) fn forgot(&self, node: usize) {
        let row = &mut lock(&self.nodes)[node];
        row.holder = None;
        row.fence = None;
    }

    /// Shows one answer on its way from a node to a server.
    pub(crate) fn vote(
        &self,
        server: usize,
        node: usize,
        kind: &str,
        answer: &str,
        took: Duration,
    ) {
        let vote = json!({
            "ms": took.as_millis(), "server": SERVERS[server], "node": node, "kind": kind, "answer": answer,
        });
        self.feed.send("vote", vote);
    }

    pub(crate) fn view(&self) -> Value {
        let now = Instant::now();
        let nodes = lock(&self.nodes);
        nodes
            .iter()
            .enumerate()
            .map(|(index, row)| row.view(index, now))
            .collect()
    }
}

impl Row {
    fn view(&self, index: usize, now: Instant) -> Value {
        let left = |until: Instant| until.saturating_duration_since(now).as_millis();
        let quarantine = self.quarantined_until.filter(|until| *until > now);
        let state = match (self.power, quarantine) {
            (Power::Down, _) => "down",
            (Power::Up, _) if self.is_starting => "down",
            (Power::Hung, _) => "hung",
            (Power::Up, Some(_)) => "quarantined",
            (Power::Up, None) => "up",
        };
        let cut_off = SERVERS.iter().zip(self.cut_off);
        let cut_off: Vec<_> = cut_off
            .filter(|(_, cut)| *cut)
            .map(|(name, _)| name)
            .collect();
        let holder = self.holder.as_ref().filter(|holder| holder.expires > now);
        let is_known = self.power != Power::Down;
        json!({
            "name": format!("node {}", index + 1),
            "state": state,
            "left_ms": quarantine.map(left),
            "delay_ms": self.delay.as_millis(),
            "cut_off": cut_off,
            "holder": holder.filter(|_| is_known).map(|holder| {
                json!({"server": SERVERS[holder.server], "left_ms": left(holder.expires)})
            }),
            "fence": self.fence.filter(|_| is_known).map(|fence| fence.to_string()),
        })
    }
}
