//! Rounds: state machines that take the votes of the nodes and return decisions.
//!
//! A round knows no clock and sends nothing. It takes each answer and returns the next step. Its driver
//! sends the requests, and reports a node that stays silent for too long as [`Answer::Failed`].

use std::time::Duration;

use crate::protocol::message::Reply;
use crate::protocol::quorum::{NodeSet, Quorum, which};

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
    Held {
        expires_in: Option<Duration>,
        /// The free slots, if the node named them.
        free: Option<u64>,
    },
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
    /// The nodes that gave a vote, for this attempt or for another owner.
    pub voted: NodeSet,
    /// The nodes that had not answered the `ACQUIRE` when the others decided.
    pub unanswered: NodeSet,
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
        let held = |expires_in| Acquired::Held {
            expires_in,
            free: None,
        };
        *acquired = match *answer {
            Answer::Replied(Reply::Granted(number)) => {
                self.highest = self.highest.max(number);
                Acquired::Granted(number)
            }
            Answer::Replied(Reply::Held { expires_in, .. }) => held(expires_in),
            Answer::Replied(Reply::HeldShared { expires_in }) => {
                self.is_shared = true;
                held(expires_in)
            }
            Answer::Replied(Reply::HeldSlot { expires_in, free }) => Acquired::Held {
                expires_in,
                free: Some(free),
            },
            // No grant either; the round that keeps records interprets it.
            Answer::Replied(Reply::Done { .. } | Reply::Intended) => held(None),
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
        matches!(self.nodes[node].acquired, Acquired::Held { .. })
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
                Acquired::Held { .. } | Acquired::Failed => Confirmed::NotAsked,
            };
        }
        AcquireStep::Confirm(self.target)
    }

    /// Refuses as soon as success is impossible *and* the reason is known.
    fn refuse_if_impossible(&self, possible: usize) -> AcquireStep {
        if possible >= self.majority {
            return AcquireStep::Wait;
        }
        let voted: NodeSet = which(&self.nodes, Standing::has_voted).collect();
        let unanswered: NodeSet = self.unanswered().collect();
        let kind = if voted.len() >= self.majority {
            RefusalKind::Contended {
                expires_in: self.expires_in(),
            }
        } else if voted.len() + unanswered.len() < self.majority {
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
            voted,
            unanswered,
        })
    }

    /// Returns the slots that a majority of the nodes that named free slots named.
    fn free_slots(&self) -> u64 {
        let named = || self.nodes.iter().filter_map(Standing::free);
        let is_free = |slot: &u32| {
            let naming_it = named().filter(|free| free >> slot & 1 == 1);
            2 * naming_it.count() > named().count()
        };
        let slots = (0..u64::BITS).filter(|_| named().next().is_some());
        slots.filter(is_free).fold(0, |free, slot| free | 1 << slot)
    }

    /// Returns the time until a majority is free, if the holders do not renew.
    fn expires_in(&self) -> Option<Duration> {
        // A key that never expires comes last, not first.
        let held = || self.nodes.iter().filter_map(Standing::held_for);
        let others = self.nodes.len() - held().count();
        let needed = self.majority.saturating_sub(others).max(1);
        let is_enough = |left: &Duration| held().filter(|other| other <= left).count() >= needed;
        let left = held().filter(is_enough).min();
        left.filter(|left| *left < Duration::MAX)
    }

    fn count(&self, matches: impl Fn(&Standing) -> bool) -> usize {
        self.nodes.iter().filter(|node| matches(node)).count()
    }
}

impl Standing {
    /// Returns how long another owner holds the node, at most for ever.
    fn held_for(&self) -> Option<Duration> {
        match self.acquired {
            Acquired::Held { expires_in, .. } => Some(expires_in.unwrap_or(Duration::MAX)),
            _ => None,
        }
    }

    /// Returns the free slots, if the node named them.
    fn free(&self) -> Option<u64> {
        match self.acquired {
            Acquired::Held { free, .. } => free,
            _ => None,
        }
    }

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
            (Acquired::Held { .. } | Acquired::Failed, _) => false,
            (acquired, Confirmed::NotAsked) => acquired == Acquired::Silent,
            (_, confirmed) => confirmed == Confirmed::Silent,
        }
    }

    /// Returns whether the node's answer is a vote.
    fn has_voted(&self) -> bool {
        matches!(self.acquired, Acquired::Granted(_) | Acquired::Held { .. })
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
    silent: NodeSet,
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
            silent: NodeSet::all(quorum),
        }
    }

    /// Takes the answer of `node`.
    pub fn on_confirm(&mut self, node: usize, answer: &Answer) -> ExtendStep {
        if !self.silent.remove(node) {
            return ExtendStep::Wait;
        }
        match *answer {
            Answer::Replied(Reply::At(number)) if number == self.token => self.exact += 1,
            // A record has replaced the lock.
            Answer::Replied(Reply::At(_) | Reply::Lost | Reply::Done { .. }) => self.gone += 1,
            Answer::Replied(_) | Answer::Failed => {}
        }
        let silent = self.silent.len();
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
    #[must_use]
    pub fn silent(&self) -> NodeSet {
        self.silent
    }
}

/// The release of a lock: `RELEASE` at every node that may hold it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ReleaseRound {
    quorum: Quorum,
    /// The nodes that have not answered.
    silent: NodeSet,
    /// The nodes that are silent or have failed.
    unreleased: NodeSet,
    /// The nodes that held nothing for this owner.
    gone: NodeSet,
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
    /// Creates a round whose `RELEASE` was sent to these nodes. The others need none.
    #[must_use]
    pub fn new(quorum: Quorum, nodes: NodeSet) -> Self {
        Self {
            quorum,
            silent: nodes,
            unreleased: nodes,
            gone: NodeSet::default(),
        }
    }

    /// Takes the answer of `node`.
    pub fn on_release(&mut self, node: usize, answer: &Answer) -> ReleaseStep {
        self.silent.remove(node);
        match answer {
            // Also after a failure: the release of an overdue node goes on.
            Answer::Replied(Reply::Released) => {
                self.unreleased.remove(node);
            }
            Answer::Replied(Reply::Lost) if self.unreleased.remove(node) => {
                self.gone.insert(node);
            }
            Answer::Replied(_) | Answer::Failed => {}
        }
        self.step()
    }

    /// Returns the step after the answers so far.
    #[must_use]
    pub fn step(&self) -> ReleaseStep {
        let majority = self.quorum.majority();
        let (released, silent, gone) = (self.released(), self.silent.len(), self.gone.len());
        if gone >= majority {
            ReleaseStep::Lost
        } else if released >= majority && gone + silent < majority {
            ReleaseStep::Freed
        } else if released + silent < majority {
            ReleaseStep::Unconfirmed
        } else {
            ReleaseStep::Wait
        }
    }

    /// Returns the nodes that have not answered.
    #[must_use]
    pub fn silent(&self) -> NodeSet {
        self.silent
    }

    /// Returns the nodes that may still hold the lock for this owner.
    #[must_use]
    pub fn unreleased(&self) -> NodeSet {
        self.unreleased
    }

    /// Returns the number of nodes that have confirmed the release.
    #[must_use]
    pub fn released(&self) -> usize {
        self.quorum.nodes() - self.unreleased.len()
    }
}
