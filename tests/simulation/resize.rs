//! Changes of the groups: which process knows which of them, and when it may begin.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tower_redlock::test_util::SimNetwork;
use tower_redlock::{NodeGroup, Redlock, RedlockBuilder};

use crate::plan::WINDOW;

/// The nodes of a group.
pub(crate) const NODES: usize = 3;

/// How long the processes of the new groups wait after the last one that knew only the old groups has ended. Exclusion
/// needs the longest ttl. This is longer by more than wall clocks are apart, because tokens rely on them where no process
/// locked a key in both groups.
const PAUSE: Duration = WINDOW;

/// In how many groups a process locks two keys, at most.
pub(crate) const STAGES: u32 = 4;

/// A change of the groups.
#[derive(Debug, Clone)]
pub(crate) struct Resize {
    /// The names of all groups; those of the old layout first if it grows.
    names: Vec<String>,
    old: usize,
    new: usize,
    /// What each process knows.
    pub(crate) steps: Vec<Step>,
    /// Whether processes of the new groups wait for the end of those that know only the old ones.
    pub(crate) waits: bool,
}

/// What a process knows of the groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Old,
    Both,
    New,
}

impl Resize {
    /// Draws a change between one and three groups, with two processes that know both, and at least one of each other
    /// kind.
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let changes = [(1, 2), (2, 3), (1, 3), (2, 1), (3, 2), (3, 1)];
        let (old, new) = changes[rng.usize(..changes.len())];
        let salt = rng.u16(..);
        Self {
            names: (0..3).map(|group| format!("{salt}-{group}")).collect(),
            old,
            new,
            steps: vec![Step::Old, Step::Both, Step::Both, Step::New],
            waits: true,
        }
    }

    /// Returns the number of nodes of all groups.
    pub(crate) fn nodes(&self) -> usize {
        NODES * self.old.max(self.new)
    }

    /// Adds the groups that a process knows.
    pub(crate) fn groups(&self, step: Step, network: &Arc<dyn SimNetwork>) -> RedlockBuilder {
        let groups = |count: usize| (0..count).map(|number| self.group(number, network));
        let first = match step {
            Step::Old | Step::Both => self.old,
            Step::New => self.new,
        };
        let builder = groups(first).fold(Redlock::builder(), RedlockBuilder::node_group);
        match step {
            Step::Both => builder.moving_to(groups(self.new)),
            Step::Old | Step::New => builder,
        }
    }

    fn group(&self, number: usize, network: &Arc<dyn SimNetwork>) -> NodeGroup {
        let nodes: Range<usize> = NODES * number..NODES * (number + 1);
        let group = NodeGroup::new().name(self.names[number].clone());
        group.simulated(nodes, Arc::clone(network))
    }

    /// Returns when the processes of the new groups may begin, after the end of those that know only the old ones.
    pub(crate) fn begins(&self, ended: Duration) -> Duration {
        if self.waits {
            ended + PAUSE
        } else {
            Duration::ZERO
        }
    }
}
