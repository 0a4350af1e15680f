//! The groups of nodes of a lock service, and which of them a key is locked in.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::sync::watch;

use crate::lock::cluster::Cluster;
use crate::lock::error::LockError;
use crate::lock::queue::{LocalQueue, WaiterCap};
use crate::lock::registry::Registry;
use crate::lock::settings::Settings;
use crate::node::Mutex;
use crate::protocol::lease::Stored;
use crate::protocol::{LockKey, LockKeys, Placement};

/// A group of nodes, whose majority decides on the keys that belong to it, and the callers of this process.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) name: Arc<str>,
    /// The same as a label of spans and metrics, if there are several groups.
    pub(crate) label: Option<Arc<str>>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) queue: Arc<LocalQueue>,
    /// The reads of large values under way, by key and head. All callers that want the same value share one.
    pub(crate) reads: Mutex<HashMap<(LockKey, Stored), ReadReceiver>>,
}

/// Gets the outcome of a read, which is closed if it ends without one.
pub(crate) type ReadReceiver = watch::Receiver<Option<Result<Stored, LockError>>>;

/// The groups of nodes, and the placement of keys on them.
///
/// While a lock service [moves](crate::RedlockBuilder::moving_to) to another layout, some keys belong to a group of each:
/// they are locked in both. Processes that know one of the layouts only exclude these processes there.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The groups of both layouts, each once: first those of the current one, in the order of its placement.
    pub(crate) groups: Vec<Arc<Group>>,
    current: Placement,
    next: Option<(Placement, Vec<Arc<Group>>)>,
}

/// The keys that are locked in one group.
#[derive(Debug, Clone)]
pub(crate) struct GroupKeys<'a> {
    pub(crate) group: &'a Arc<Group>,
    pub(crate) keys: LockKeys,
}

impl Layout {
    /// Creates a layout of the first `current` of these groups, and that which it moves to, if it does.
    pub(crate) fn new(
        groups: Vec<Arc<Group>>,
        current: usize,
        next: Option<Vec<Arc<Group>>>,
    ) -> Self {
        let name = |group: &Arc<Group>| Arc::clone(&group.name);
        let placement = |groups: &[Arc<Group>]| Placement::new(groups.iter().map(name));
        Self {
            current: placement(&groups[..current]),
            next: next.map(|next| (placement(&next), next)),
            groups,
        }
    }

    /// Returns the group of a key.
    pub(crate) fn group_of(&self, key: &LockKey) -> &Arc<Group> {
        &self.groups[self.current.group_of(key)]
    }

    /// Returns the group that a key moves to, if it moves.
    pub(crate) fn next_group_of(&self, key: &LockKey) -> Option<&Arc<Group>> {
        let (placement, groups) = self.next.as_ref()?;
        let next = &groups[placement.group_of(key)];
        (!Arc::ptr_eq(next, self.group_of(key))).then_some(next)
    }

    /// Returns the group in which keys are locked; `None` if there are several.
    pub(crate) fn only_group(&self, keys: &LockKeys) -> Option<&Arc<Group>> {
        let mut keys = keys.as_slice().iter();
        // No keys are refused as such in any group.
        let first = keys.clone().next().map(|key| self.group_of(key));
        let first = first.unwrap_or(&self.groups[0]);
        let is_there = |key: &LockKey| {
            Arc::ptr_eq(self.group_of(key), first) && self.next_group_of(key).is_none()
        };
        keys.all(is_there).then_some(first)
    }

    /// Splits keys by the group in which they are locked: first in the current layout, then in the next one if they move;
    /// within a layout, in the order of the names of the groups.
    pub(crate) fn by_group(&self, keys: &LockKeys) -> Vec<GroupKeys<'_>> {
        // All processes with these layouts lock in the order of this map, whichever order their keys came in.
        let mut by_group: BTreeMap<(bool, &str), (&Arc<Group>, Vec<&LockKey>)> = BTreeMap::new();
        for key in keys.as_slice() {
            for (is_next, group) in self.groups_of(key) {
                let entry = by_group.entry((is_next, &*group.name));
                entry.or_insert_with(|| (group, Vec::new())).1.push(key);
            }
        }
        let by_group = by_group.into_values().map(|(group, keys)| GroupKeys {
            group,
            keys: keys.into_iter().collect(),
        });
        by_group.collect()
    }

    /// Returns whether a caller that holds some keys may wait for others, so that no callers wait for each other in a
    /// circle: if everything that it asks for comes after everything that it holds.
    pub(crate) fn comes_after<'k>(
        &self,
        wanted: &LockKeys,
        held: impl Iterator<Item = &'k LockKey>,
    ) -> bool {
        // In a single group, the order of the locks is that of their keys, which are sorted.
        if self.groups.len() == 1 {
            return held.max() < wanted.as_slice().first();
        }
        let mut wanted = wanted.as_slice().iter().flat_map(|key| self.positions(key));
        let last_held = held.flat_map(|key| self.positions(key)).max();
        wanted.all(|wanted| last_held < Some(wanted))
    }

    /// Returns the groups in which a key is locked, each with whether it is that of the next layout.
    fn groups_of(&self, key: &LockKey) -> impl Iterator<Item = (bool, &Arc<Group>)> + use<'_> {
        let next = self.next_group_of(key).map(|next| (true, next));
        [(false, self.group_of(key))].into_iter().chain(next)
    }

    /// Returns the places of a key in the order of all locks.
    fn positions<'k>(&'k self, key: &'k LockKey) -> impl Iterator<Item = (&'k str, &'k LockKey)> {
        let groups = self.groups_of(key);
        groups.map(move |(_, group)| (&*group.name, key))
    }
}

impl GroupKeys<'_> {
    /// Returns whether a caller may wait for these keys while it holds others, in the order of all locks.
    pub(crate) fn comes_after(&self, held: &[Self]) -> bool {
        let ends = held
            .iter()
            .map(|held| (&held.group.name, held.keys.as_slice().last()));
        let begins = (&self.group.name, self.keys.as_slice().first());
        ends.max().is_none_or(|end| end < begins)
    }
}

/// A lock service: the settings, the groups of nodes, and the lease tasks.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) settings: Arc<Settings>,
    pub(crate) layout: Layout,
    pub(crate) registry: Arc<Registry>,
    /// The cap on all calls that wait.
    pub(crate) cap: Option<Arc<WaiterCap>>,
}

impl Drop for Core {
    fn drop(&mut self) {
        // Otherwise the task that wakes locks would stay until one that is gone was due.
        self.registry.sooner.notify_one();
    }
}
