//! Rounds: votes of the nodes in, decision out.
//!
//! A round knows no clock and sends nothing. It is told each answer, and says after each what
//! follows; whoever drives it sends the requests and decides when silence has lasted too long,
//! which it reports as [`Answer::Failed`].

use std::time::Duration;

use crate::protocol::message::Reply;
use crate::protocol::quorum::Quorum;

/// One node's answer to one request, as the rounds see it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The node answered the request.
    Replied(Reply),
    /// The node gave no vote: it was not reached, stayed silent too long, or answered an error.
    Failed,
}

/// How often the second phase is repeated before the attempt is given up.
const MAX_STEPS: u8 = 3;

/// The acquisition of a lock: `ACQUIRE` at all nodes, and `CONFIRM` where the numbers differ.
///
/// The rule that makes tokens unique is the *exact acknowledgement*: a token is `t` if and only if
/// a majority of the nodes answered exactly `t`. Counting "at least `t`" would let an early
/// majority and a later grant end up with the same number.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AcquireRound {
    majority: usize,
    /// 0 while acquiring, then the number of the second phase that is under way.
    step: u8,
    /// The token that the current second phase tries to establish.
    target: u64,
    /// The highest number any node answered.
    highest: u64,
    nodes: Vec<Standing>,
}

/// Where one node stands in an acquisition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Standing {
    acquired: Acquired,
    /// The answer to the `CONFIRM` of the current step; of an earlier step nothing is kept.
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

/// What follows from the answers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AcquireStep {
    /// Nothing is decided; wait for more answers.
    Wait,
    /// A majority answered exactly this number: it is the token. Final.
    Granted(u64),
    /// Send `CONFIRM` with this token to the nodes of [`AcquireRound::unconfirmed`].
    Confirm(u64),
    /// The lock cannot be had in this round. Final.
    Refused(Refusal),
}

/// Why an acquisition failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Refusal {
    /// What is known about the lock.
    pub kind: RefusalKind,
    /// Whether some node granted it: then nobody may have won, and trying again at once is worth
    /// it even for a caller that does not wait.
    pub is_split: bool,
    /// How many nodes gave an answer that counts.
    pub reached: usize,
}

/// The two things that a failed acquisition can mean; they must never be mistaken for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    /// A majority of the nodes answered, and others have too many of them.
    Contended {
        /// When enough nodes will be free again, if they said so and nobody renews.
        expires_in: Option<Duration>,
    },
    /// A majority of the nodes cannot be reached; nothing is known about the lock.
    Unavailable,
}

impl AcquireRound {
    /// A round in which every node has just been sent `ACQUIRE`.
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
            nodes: vec![standing; quorum.nodes()],
        }
    }

    /// Returns the number of the second phase that is under way; 0 while there is none.
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
            // No grant either; what follows from it is for the round that keeps records to say.
            Answer::Replied(Reply::Done { .. } | Reply::Intended) => Acquired::Held(None),
            Answer::Replied(_) | Answer::Failed => Acquired::Failed,
        };
        self.decide()
    }

    /// Takes the answer of `node` to the `CONFIRM` of second phase `step`.
    ///
    /// An answer to an earlier phase is not counted, whatever it says.
    pub fn on_confirm(&mut self, node: usize, step: u8, answer: &Answer) -> AcquireStep {
        let confirmed = &mut self.nodes[node].confirmed;
        if step != self.step || *confirmed != Confirmed::Silent {
            return AcquireStep::Wait;
        }
        *confirmed = match *answer {
            // Below the target is not the answer of a node that carried the request out.
            Answer::Replied(Reply::At(number)) if number >= self.target => {
                self.highest = self.highest.max(number);
                Confirmed::At(number)
            }
            Answer::Replied(Reply::Lost) => Confirmed::Lost,
            Answer::Replied(_) | Answer::Failed => Confirmed::Failed,
        };
        self.decide()
    }

    /// Returns the nodes that the `CONFIRM` of the current step goes to: all that did not answer
    /// exactly the target, the silent ones included, but none that refused or was not reached.
    pub fn unconfirmed(&self) -> impl Iterator<Item = usize> + '_ {
        self.nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| node.confirmed == Confirmed::Silent)
            .map(|(index, _)| index)
    }

    /// Returns how many nodes have answered exactly `token` so far.
    #[must_use]
    pub fn acknowledged(&self, token: u64) -> usize {
        self.count(|node| node.is_exactly(token))
    }

    /// Returns the nodes from which an answer to the current step is still outstanding.
    pub fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        self.nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| node.is_silent())
            .map(|(index, _)| index)
    }

    /// Returns the nodes that have not answered the `ACQUIRE`.
    pub fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        self.nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| node.acquired == Acquired::Silent)
            .map(|(index, _)| index)
    }

    /// Returns whether `node` granted the lock to this attempt.
    #[must_use]
    pub fn is_granted_by(&self, node: usize) -> bool {
        matches!(self.nodes[node].acquired, Acquired::Granted(_))
    }

    /// Returns whether `node` certainly does not hold the lock for this attempt: it answered
    /// that somebody else does, to the only `ACQUIRE` of this attempt.
    #[must_use]
    pub fn is_refused_by(&self, node: usize) -> bool {
        matches!(self.nodes[node].acquired, Acquired::Held(_))
    }

    fn decide(&mut self) -> AcquireStep {
        if self.step == 0 {
            if let Some(token) = self.agreed() {
                return AcquireStep::Granted(token);
            }
            let granted = self.count(|node| matches!(node.acquired, Acquired::Granted(_)));
            if granted >= self.majority {
                return self.start_step();
            }
            return self.refuse_if_impossible(self.count(Standing::may_yet_grant));
        }
        let exact = self.count(|node| node.is_exactly(self.target));
        if exact >= self.majority {
            return AcquireStep::Granted(self.target);
        }
        let outstanding = self.count(|node| node.is_silent() && !node.is_exactly(self.target));
        if exact + outstanding >= self.majority {
            return AcquireStep::Wait;
        }
        // This target cannot be reached any more; a higher one may.
        let candidates = self.count(Standing::may_yet_grant);
        if candidates >= self.majority && self.step < MAX_STEPS && self.highest > self.target {
            return self.start_step();
        }
        let possible = if self.step < MAX_STEPS { candidates } else { 0 };
        self.refuse_if_impossible(possible)
    }

    /// Returns the number that a majority answered to `ACQUIRE`, if there is one.
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
                // A key that is gone does not come back for this owner.
                _ if node.confirmed == Confirmed::Lost => Confirmed::Lost,
                Acquired::Granted(number) if number == self.target => Confirmed::NotAsked,
                Acquired::Granted(_) | Acquired::Silent => Confirmed::Silent,
                Acquired::Held(_) | Acquired::Failed => Confirmed::NotAsked,
            };
        }
        AcquireStep::Confirm(self.target)
    }

    /// Refuses once success is impossible *and* the reason is known.
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
            reached,
        })
    }

    /// Returns after what time a majority is free, if the holders do nothing.
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
    /// Whether the node may still end up acknowledging a number to this attempt.
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
            // Such a node is not waited for.
            (Acquired::Held(_) | Acquired::Failed, _) => false,
            (acquired, Confirmed::NotAsked) => acquired == Acquired::Silent,
            (_, confirmed) => confirmed == Confirmed::Silent,
        }
    }

    /// Whether the node gave an answer that says something about the lock.
    fn has_voted(&self) -> bool {
        matches!(self.acquired, Acquired::Granted(_) | Acquired::Held(_))
            || matches!(self.confirmed, Confirmed::At(_) | Confirmed::Lost)
    }
}

/// The extension of a held lock: `CONFIRM` with its token at all nodes.
///
/// Every extension has a round of its own: an answer to an older one must not be counted for a
/// newer one, because it may vouch for an older expiry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ExtendRound {
    majority: usize,
    token: u64,
    exact: usize,
    gone: usize,
    silent: Vec<bool>,
}

/// What follows from the answers to an extension so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExtendStep {
    /// Nothing is decided; wait for more answers.
    Wait,
    /// A majority answered exactly the token: the lock lives longer. Final.
    Extended,
    /// A majority answered that the lock is not this owner's any more. Final.
    Lost,
    /// Neither can happen any more: the old validity runs on. Final for this round.
    Missed {
        /// How many nodes gave an answer.
        reached: usize,
    },
}

impl ExtendRound {
    /// A round in which every node has just been sent `CONFIRM` with `token`, 0 without fencing.
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
            // What was recorded is over.
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
        self.silent
            .iter()
            .enumerate()
            .filter(|(_, silent)| **silent)
            .map(|(index, _)| index)
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
    Failed,
}

/// What follows from the answers to a release so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseStep {
    /// Nothing is decided; wait for more answers.
    Wait,
    /// A majority does not hold the lock for this owner any more: others can have it.
    Freed,
    /// A majority can not be reached; the lock ends by its ttl.
    Unconfirmed,
}

impl ReleaseRound {
    /// A round in which every node has just been sent `RELEASE`.
    #[must_use]
    pub fn new(quorum: Quorum) -> Self {
        Self {
            majority: quorum.majority(),
            nodes: vec![Releasing::Silent; quorum.nodes()],
        }
    }

    /// Takes the answer of `node`; a node that need not be asked counts as having released.
    pub fn on_release(&mut self, node: usize, answer: &Answer) -> ReleaseStep {
        if self.nodes[node] == Releasing::Silent {
            self.nodes[node] = match answer {
                Answer::Replied(Reply::Released) => Releasing::Released,
                Answer::Replied(_) | Answer::Failed => Releasing::Failed,
            };
        }
        self.step()
    }

    /// Returns what follows from the answers so far.
    #[must_use]
    pub fn step(&self) -> ReleaseStep {
        let released = self.released();
        if released >= self.majority {
            ReleaseStep::Freed
        } else if released + self.silent().count() < self.majority {
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
        self.which(|node| node != Releasing::Released)
    }

    /// Returns how many nodes have confirmed the release.
    #[must_use]
    pub fn released(&self) -> usize {
        self.which(|node| node == Releasing::Released).count()
    }

    fn which(&self, matches: impl Fn(Releasing) -> bool) -> impl Iterator<Item = usize> {
        self.nodes
            .iter()
            .enumerate()
            .filter(move |(_, node)| matches(**node))
            .map(|(index, _)| index)
    }
}
