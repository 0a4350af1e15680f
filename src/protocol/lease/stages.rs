//! The stages of a lease, and what each remembers.

use std::time::Duration;

use crate::protocol::lease::Loss;
use crate::protocol::quorum::{NodeSet, Quorum};
use crate::protocol::round::{AcquireRound, AcquireStep, Answer, ExtendRound, ReleaseRound};

/// The number of the `ACQUIRE`, the first request.
pub(super) const ACQUIRE: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum LifeStage {
    Acquiring(Acquiring),
    Holding(Holding),
    Releasing(Releasing),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Holding {
    pub(super) token: Option<u64>,
    pub(super) valid_until: Duration,
    pub(super) lost: Option<Loss>,
    pub(super) delivered_at: Option<Duration>,
    /// When to renew the lock next; `None` if it is not, or no longer, renewed.
    pub(super) renew_at: Option<Duration>,
    pub(super) extending: Option<Extending>,
}

/// An extension under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Extending {
    pub(super) round: ExtendRound,
    pub(super) number: u32,
    /// The time before its request.
    pub(super) began: Duration,
    pub(super) ttl: Duration,
    pub(super) token: Option<u64>,
    /// Whether a holder asked for it.
    pub(super) is_asked: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Releasing {
    pub(super) round: ReleaseRound,
    pub(super) number: u32,
    /// When the silent nodes count as failed.
    pub(super) due: Duration,
    /// Whether a holder waits for the outcome.
    pub(super) is_awaited: bool,
    pub(super) is_settled: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Acquiring {
    pub(super) round: AcquireRound,
    /// The number of the current `CONFIRM`.
    pub(super) confirm: Option<u32>,
    /// Until when the nodes may answer the `ACQUIRE`.
    due: Duration,
    /// The nodes that are not connected yet, which may until these later times.
    connecting: Vec<(usize, Duration)>,
}

impl Acquiring {
    /// Creates the attempt whose nodes have until `due` and their patience to answer.
    pub(super) fn new(quorum: Quorum, due: Duration, patience: impl Fn(usize) -> Duration) -> Self {
        let nodes = (0..quorum.nodes()).map(|node| (node, due + patience(node)));
        Self {
            round: AcquireRound::new(quorum),
            confirm: None,
            due,
            connecting: nodes.filter(|(_, until)| *until > due).collect(),
        }
    }

    pub(super) fn on_answer(&mut self, node: usize, number: u32, answer: &Answer) -> AcquireStep {
        if number == ACQUIRE {
            self.round.on_acquire(node, answer)
        } else if Some(number) == self.confirm {
            self.round.on_confirm(node, self.round.step(), answer)
        } else {
            AcquireStep::Wait
        }
    }

    /// Returns until when a node may answer the `ACQUIRE`.
    fn due(&self, node: usize) -> Duration {
        let mut connecting = self.connecting.iter();
        let connecting = connecting.find(|(number, _)| *number == node);
        connecting.map_or(self.due, |(_, until)| *until)
    }

    /// Returns until when the nodes may answer a `CONFIRM`: all phases together have the longest time of the first one.
    fn last_due(&self) -> Duration {
        let connecting = self.connecting.iter().map(|(_, until)| *until);
        connecting.max().unwrap_or(self.due)
    }

    /// Returns when the next silent node is overdue.
    pub(super) fn next_due(&self) -> Option<Duration> {
        match self.confirm {
            Some(_) => Some(self.last_due()),
            None => self.round.silent().map(|node| self.due(node)).min(),
        }
    }

    /// Returns the overdue nodes.
    pub(super) fn overdue(&self, now: Duration) -> NodeSet {
        let is_late = |node: &usize| match self.confirm {
            Some(_) => self.last_due() <= now,
            None => self.due(*node) <= now,
        };
        self.round.silent().filter(is_late).collect()
    }
}
