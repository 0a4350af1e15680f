//! Rounds: state machines that take the votes of the nodes and return decisions.
//!
//! A round knows no clock and sends nothing. It takes each answer and returns the next step. Its driver
//! sends the requests, and reports a node that stays silent for too long as [`Answer::Failed`].

use std::time::Duration;

use crate::protocol::message::Reply;
use crate::protocol::quorum::{Quorum, which};

/// One node's answer to one request, as a round takes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The node answered the request.
    Replied(Reply),
    /// The node gave no vote: it was not reached, did not answer in time, or answered with an error.
    Failed,
}

/// The number of second phases before an attempt is given up.
const MAX_STEPS: u8 = 3;

/// The acquisition of a lock: `ACQUIRE` at all nodes, and `CONFIRM` where the numbers differ.
///
/// The rule that makes tokens unique is the *exact acknowledgement*: a token is `t` if and only if
/// a majority of the nodes answered exactly `t`. If a round counted "at least `t`", an early
/// majority and a later grant could get the same number.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AcquireRound {
    majority: usize,
    /// 0 during `ACQUIRE`, then the number of the current second phase.
    step: u8,
    /// The token that the current second phase tries to establish.
    target: u64,
    /// The highest number in any answer.
    highest: u64,
    /// Whether readers hold the lock at some node.
    is_shared: bool,
    /// The free slots that nodes named with their refusals.
    free: Vec<u64>,
    nodes: Vec<Standing>,
}

/// The state of one node in an acquisition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Standing {
    acquired: Acquired,
    /// The answer to the `CONFIRM` of the current step; answers to earlier steps are dropped.
    confirmed: Confirmed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Acquired {
    Silent,
    Granted(u64),
    Held(Option<Duration>),
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Confirmed {
    NotAsked,
    Silent,
    At(u64),
    Lost,
    Failed,
}

/// The next step, after the answers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AcquireStep {
    /// Undecided: wait for more answers.
    Wait,
    /// Granted: a majority answered exactly this number, which is the token. Final.
    Granted(u64),
    /// Send `CONFIRM` with this token to the nodes of [`AcquireRound::unconfirmed`].
    Confirm(u64),
    /// This round cannot acquire the lock. Final.
    Refused(Refusal),
}

/// The reason of a failed acquisition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Refusal {
    /// The state of the lock, as far as it is known.
    pub kind: RefusalKind,
    /// Whether some node granted it: then no contender may have won, and even a caller that does not wait
    /// should retry at once.
    pub is_split: bool,
    /// Whether readers hold it at some node, so that a caller that waits should keep new ones out.
    pub is_shared: bool,
    /// The slots that are free at a majority of the nodes that refused this one, one bit for each.
    pub free: u64,
    /// The number of nodes with a vote.
    pub reached: usize,
}

/// The two meanings of a failed acquisition, which must never be mistaken for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    /// A majority of the nodes answered, and other owners hold too many of them.
    Contended {
        /// The time until enough nodes are free, if they reported it and the holders do not renew.
        expires_in: Option<Duration>,
    },
    /// A majority of the nodes cannot be reached; nothing is known about the lock.
    Unavailable,
}

impl AcquireRound {
    /// Creates a round whose `ACQUIRE` was sent to every node.
    #[must_use]
    pub fn new(quorum: Quorum) -> Self {
        let standing = Standing {
            acquired: Acquired::Silent,
            confirmed: Confirmed::NotAsked,
        };
        Self {
            majority: quorum.majority(),
            step: 0,
            target: 0,
            highest: 0,
            is_shared: false,
            free: Vec::new(),
            nodes: vec![standing; quorum.nodes()],
        }
    }

    /// Returns the number of the current second phase; 0 before the first.
    #[must_use]
    pub fn step(&self) -> u8 {
        self.step
    }

    /// Takes the answer of `node` to the `ACQUIRE`.
    pub fn on_acquire(&mut self, node: usize, answer: &Answer) -> AcquireStep {
        let acquired = &mut self.nodes[node].acquired;
        if *acquired != Acquired::Silent {
            return AcquireStep::Wait;
        }
        *acquired = match *answer {
            Answer::Replied(Reply::Granted(number)) => {
                self.highest = self.highest.max(number);
                Acquired::Granted(number)
            }
            Answer::Replied(Reply::Held { expires_in, .. }) => Acquired::Held(expires_in),
            Answer::Replied(Reply::HeldShared { expires_in }) => {
                self.is_shared = true;
                Acquired::Held(expires_in)
            }
            Answer::Replied(Reply::HeldSlot { expires_in, free }) => {
                self.free.push(free);
                Acquired::Held(expires_in)
            }
            // No grant either; the round that keeps records interprets it.
            Answer::Replied(Reply::Done { .. } | Reply::Intended) => Acquired::Held(None),
            Answer::Replied(_) | Answer::Failed => Acquired::Failed,
        };
        self.decide()
    }

    /// Takes the answer of `node` to the `CONFIRM` of second phase `step`.
    ///
    /// An answer to an earlier phase does not count.
    pub fn on_confirm(&mut self, node: usize, step: u8, answer: &Answer) -> AcquireStep {
        let confirmed = &mut self.nodes[node].confirmed;
        if step != self.step || *confirmed != Confirmed::Silent {
            return AcquireStep::Wait;
        }
        *confirmed = match *answer {
            // A node that executed the request answers with the target or a higher number.
            Answer::Replied(Reply::At(number)) if number >= self.target => {
                self.highest = self.highest.max(number);
                Confirmed::At(number)
            }
            Answer::Replied(Reply::Lost) => Confirmed::Lost,
            Answer::Replied(_) | Answer::Failed => Confirmed::Failed,
        };
        self.decide()
    }

    /// Returns the targets of the `CONFIRM` of the current step: all nodes that did not answer
    /// exactly the target, including silent nodes, without nodes that refused or failed.
    pub fn unconfirmed(&self) -> impl Iterator<Item = usize> + '_ {
        which(&self.nodes, |node| node.confirmed == Confirmed::Silent)
    }

    /// Returns how many nodes have answered exactly `token` so far.
    #[must_use]
    pub fn acknowledged(&self, token: u64) -> usize {
        self.count(|node| node.is_exactly(token))
    }

    /// Returns the nodes that have not answered the current step.
    pub fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        which(&self.nodes, Standing::is_silent)
    }

    /// Returns the nodes that have not answered the `ACQUIRE`.
    pub fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        which(&self.nodes, |node| node.acquired == Acquired::Silent)
    }

    /// Returns whether `node` gave a vote, for this attempt or for another owner.
    #[must_use]
    pub fn has_voted(&self, node: usize) -> bool {
        self.nodes[node].has_voted()
    }

    /// Returns whether `node` granted the lock to this attempt.
    #[must_use]
    pub fn is_granted_by(&self, node: usize) -> bool {
        matches!(self.nodes[node].acquired, Acquired::Granted(_))
    }

    /// Returns whether `node` cannot hold the lock for this attempt: it answered the only `ACQUIRE` of this
    /// attempt with another holder.
    #[must_use]
    pub fn is_refused_by(&self, node: usize) -> bool {
        matches!(self.nodes[node].acquired, Acquired::Held(_))
    }

    fn decide(&mut self) -> AcquireStep {
        if self.step == 0 {
            let granted = self.count(|node| matches!(node.acquired, Acquired::Granted(_)));
            if granted < self.majority {
                return self.refuse_if_impossible(self.count(Standing::may_yet_grant));
            }
            return match self.agreed() {
                Some(token) => AcquireStep::Granted(token),
                None => self.start_step(),
            };
        }
        let exact = self.count(|node| node.is_exactly(self.target));
        if exact >= self.majority {
            return AcquireStep::Granted(self.target);
        }
        let outstanding = self.count(|node| node.is_silent() && !node.is_exactly(self.target));
        if exact + outstanding >= self.majority {
            return AcquireStep::Wait;
        }
        // No majority can answer this target any more; a higher one may succeed.
        let candidates = self.count(Standing::may_yet_grant);
        if candidates >= self.majority && self.step < MAX_STEPS && self.highest > self.target {
            return self.start_step();
        }
        let possible = if self.step < MAX_STEPS { candidates } else { 0 };
        self.refuse_if_impossible(possible)
    }

    /// Returns the number that a majority answered to `ACQUIRE`, if any.
    fn agreed(&self) -> Option<u64> {
        self.nodes.iter().find_map(|node| {
            let Acquired::Granted(number) = node.acquired else {
                return None;
            };
            let same = self.count(|node| node.acquired == Acquired::Granted(number));
            (same >= self.majority).then_some(number)
        })
    }

    fn start_step(&mut self) -> AcquireStep {
        self.step += 1;
        self.target = self.highest;
        for node in &mut self.nodes {
            node.confirmed = match node.acquired {
                // A lost key does not return to this owner.
                _ if node.confirmed == Confirmed::Lost => Confirmed::Lost,
                Acquired::Granted(number) if number == self.target => Confirmed::NotAsked,
                Acquired::Granted(_) | Acquired::Silent => Confirmed::Silent,
                Acquired::Held(_) | Acquired::Failed => Confirmed::NotAsked,
            };
        }
        AcquireStep::Confirm(self.target)
    }

    /// Refuses as soon as success is impossible *and* the reason is known.
    fn refuse_if_impossible(&self, possible: usize) -> AcquireStep {
        if possible >= self.majority {
            return AcquireStep::Wait;
        }
        let reached = self.count(Standing::has_voted);
        let silent = self.count(|node| node.acquired == Acquired::Silent);
        let kind = if reached >= self.majority {
            RefusalKind::Contended {
                expires_in: self.expires_in(),
            }
        } else if reached + silent < self.majority {
            RefusalKind::Unavailable
        } else {
            return AcquireStep::Wait;
        };
        AcquireStep::Refused(Refusal {
            kind,
            is_split: self
                .nodes
                .iter()
                .any(|node| matches!(node.acquired, Acquired::Granted(_))),
            is_shared: self.is_shared,
            free: self.free_slots(),
            reached,
        })
    }

    fn free_slots(&self) -> u64 {
        let is_free = |slot: &u32| {
            let saying_so = self.free.iter().filter(|free| **free >> slot & 1 == 1);
            2 * saying_so.count() > self.free.len()
        };
        let slots = (0..u64::BITS).filter(|_| !self.free.is_empty());
        slots.filter(is_free).fold(0, |free, slot| free | 1 << slot)
    }

    /// Returns the time until a majority is free, if the holders do not renew.
    fn expires_in(&self) -> Option<Duration> {
        let mut held: Vec<Option<Duration>> = self
            .nodes
            .iter()
            .filter_map(|node| match node.acquired {
                Acquired::Held(expires_in) => Some(expires_in),
                _ => None,
            })
            .collect();
        let others = self.nodes.len() - held.len();
        let needed = self.majority.saturating_sub(others).max(1);
        // A key that never expires sorts last, not first.
        held.sort_unstable_by_key(|left| left.unwrap_or(Duration::MAX));
        held.get(needed - 1).copied().flatten()
    }

    fn count(&self, matches: impl Fn(&Standing) -> bool) -> usize {
        self.nodes.iter().filter(|node| matches(node)).count()
    }
}

impl Standing {
    /// Returns whether the node may still acknowledge a number for this attempt.
    fn may_yet_grant(&self) -> bool {
        matches!(self.acquired, Acquired::Silent | Acquired::Granted(_))
            && !matches!(self.confirmed, Confirmed::Lost | Confirmed::Failed)
    }

    fn is_exactly(&self, target: u64) -> bool {
        let granted = self.acquired == Acquired::Granted(target);
        (granted && self.confirmed != Confirmed::Lost) || self.confirmed == Confirmed::At(target)
    }

    fn is_silent(&self) -> bool {
        match (self.acquired, self.confirmed) {
            // The round does not wait for such a node.
            (Acquired::Held(_) | Acquired::Failed, _) => false,
            (acquired, Confirmed::NotAsked) => acquired == Acquired::Silent,
            (_, confirmed) => confirmed == Confirmed::Silent,
        }
    }

    /// Returns whether the node's answer is a vote.
    fn has_voted(&self) -> bool {
        matches!(self.acquired, Acquired::Granted(_) | Acquired::Held(_))
            || matches!(self.confirmed, Confirmed::At(_) | Confirmed::Lost)
    }
}

/// The extension of a held lock: `CONFIRM` with its token at all nodes.
///
/// Every extension has a round of its own: an answer to an older extension must not count for a
/// newer one, because it may confirm an older expiry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ExtendRound {
    majority: usize,
    token: u64,
    exact: usize,
    gone: usize,
    silent: Vec<bool>,
}

/// The next step of an extension, after the answers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExtendStep {
    /// Undecided: wait for more answers.
    Wait,
    /// A majority answered exactly the token: the lock is extended. Final.
    Extended,
    /// A majority answered that the lock no longer belongs to this owner. Final.
    Lost,
    /// Neither can happen any more: the old validity continues. Final for this round.
    Missed {
        /// The number of nodes that answered.
        reached: usize,
    },
}

impl ExtendRound {
    /// Creates a round whose `CONFIRM` with `token`, 0 without fencing, was sent to every node.
    #[must_use]
    pub fn new(quorum: Quorum, token: u64) -> Self {
        Self {
            majority: quorum.majority(),
            token,
            exact: 0,
            gone: 0,
            silent: vec![true; quorum.nodes()],
        }
    }

    /// Takes the answer of `node`.
    pub fn on_confirm(&mut self, node: usize, answer: &Answer) -> ExtendStep {
        if !std::mem::replace(&mut self.silent[node], false) {
            return ExtendStep::Wait;
        }
        match *answer {
            Answer::Replied(Reply::At(number)) if number == self.token => self.exact += 1,
            // A record has replaced the lock.
            Answer::Replied(Reply::At(_) | Reply::Lost | Reply::Done { .. }) => self.gone += 1,
            Answer::Replied(_) | Answer::Failed => {}
        }
        let silent = self.silent().count();
        if self.exact >= self.majority {
            ExtendStep::Extended
        } else if self.gone >= self.majority {
            ExtendStep::Lost
        } else if self.exact.max(self.gone) + silent < self.majority {
            ExtendStep::Missed {
                reached: self.exact + self.gone,
            }
        } else {
            ExtendStep::Wait
        }
    }

    /// Returns the nodes that have not answered.
    pub fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        which(&self.silent, |silent| *silent)
    }
}

/// The release of a lock: `RELEASE` at every node that may hold it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ReleaseRound {
    majority: usize,
    nodes: Vec<Releasing>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Releasing {
    Silent,
    Released,
    /// It held nothing for this owner.
    Gone,
    Failed,
}

/// The next step of a release, after the answers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseStep {
    /// Undecided: wait for more answers.
    Wait,
    /// A majority no longer holds the lock for this owner: other owners can acquire it.
    Freed,
    /// A majority did not hold it for this owner before either.
    Lost,
    /// No majority can confirm the release; the lock ends by its ttl.
    Unconfirmed,
}

impl ReleaseRound {
    /// Creates a round whose `RELEASE` was sent to every node.
    #[must_use]
    pub fn new(quorum: Quorum) -> Self {
        Self {
            majority: quorum.majority(),
            nodes: vec![Releasing::Silent; quorum.nodes()],
        }
    }

    /// Takes the answer of `node`; report a node that needs no request as released.
    pub fn on_release(&mut self, node: usize, answer: &Answer) -> ReleaseStep {
        // Also after a failure: the release of an overdue node goes on.
        if matches!(self.nodes[node], Releasing::Silent | Releasing::Failed) {
            self.nodes[node] = match answer {
                Answer::Replied(Reply::Released) => Releasing::Released,
                Answer::Replied(Reply::Lost) => Releasing::Gone,
                Answer::Replied(_) | Answer::Failed => Releasing::Failed,
            };
        }
        self.step()
    }

    /// Returns the step after the answers so far.
    #[must_use]
    pub fn step(&self) -> ReleaseStep {
        let (released, silent) = (self.released(), self.silent().count());
        let gone = self.which(|node| node == Releasing::Gone).count();
        if gone >= self.majority {
            ReleaseStep::Lost
        } else if released >= self.majority && gone + silent < self.majority {
            ReleaseStep::Freed
        } else if released + silent < self.majority {
            ReleaseStep::Unconfirmed
        } else {
            ReleaseStep::Wait
        }
    }

    /// Returns the nodes that have not answered.
    pub fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        self.which(|node| node == Releasing::Silent)
    }

    /// Returns the nodes that may still hold the lock for this owner.
    pub fn unreleased(&self) -> impl Iterator<Item = usize> + '_ {
        self.which(|node| matches!(node, Releasing::Silent | Releasing::Failed))
    }

    /// Returns the number of nodes that have confirmed the release.
    #[must_use]
    pub fn released(&self) -> usize {
        self.nodes.len() - self.unreleased().count()
    }

    fn which(&self, matches: impl Fn(Releasing) -> bool) -> impl Iterator<Item = usize> {
        which(&self.nodes, move |node| matches(*node))
    }
}
