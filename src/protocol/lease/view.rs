//! What a driver may ask a lease.

use std::time::Duration;

use crate::protocol::lease::io::ACQUIRE;
use crate::protocol::lease::io::Awaited;
use crate::protocol::lease::life::{Lease, TICK};
use crate::protocol::lease::stages::{LifeStage, Purpose};
use crate::protocol::quorum::NodeSet;
use crate::protocol::round::ReleaseRound;

impl Lease {
    /// Returns when to handle [`Input::TimedOut`], if nothing else happens before.
    ///
    /// [`Input::TimedOut`]: crate::protocol::lease::Input::TimedOut
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Duration> {
        match &self.stage {
            LifeStage::Acquiring(acquiring) => acquiring.next_due(),
            LifeStage::Holding(holding) => {
                let lost_at = holding.valid_until.saturating_sub(TICK);
                let lost_at = holding.lost.is_none().then_some(lost_at);
                let extending = holding.extending.as_ref();
                let due = extending.map(|extending| extending.began + self.spec.node_timeout);
                let renew_at = holding.renew_at.filter(|_| due.is_none());
                [lost_at, due, renew_at].into_iter().flatten().min()
            }
            LifeStage::Recording(recording) => recording.poll_timeout(),
            LifeStage::Releasing(releasing) => (!releasing.is_settled).then_some(releasing.due),
        }
    }

    /// Returns how many answers may decide what happens next; `None` if none can.
    #[must_use]
    pub fn awaited(&self) -> Option<Awaited> {
        let decisive = |number, silent: usize| Awaited {
            number,
            answers: (self.quorum.decisive() + silent).saturating_sub(self.quorum.nodes()),
        };
        match &self.stage {
            LifeStage::Acquiring(acquiring) => {
                let unanswered = || acquiring.round.acquiring().unanswered().count();
                Some(match acquiring.silence() {
                    ACQUIRE => decisive(ACQUIRE, unanswered()),
                    // A late grant may be of exactly the number that is being confirmed.
                    _ => decisive(0, 0),
                })
            }
            LifeStage::Recording(recording) => recording.awaited(self.quorum),
            LifeStage::Holding(holding) => {
                let extending = holding.extending.as_ref()?;
                Some(decisive(extending.number, extending.round.silent().len()))
            }
            LifeStage::Releasing(releasing) => {
                let (number, silent) = (releasing.number, releasing.round.silent().len());
                match (releasing.is_settled, releasing.is_awaited) {
                    (true, _) => None,
                    (false, true) => Some(decisive(number, silent)),
                    (false, false) => Some(Awaited {
                        number,
                        answers: silent,
                    }),
                }
            }
        }
    }

    /// Returns the number of the last request.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns whether answers to this request still count.
    #[must_use]
    pub fn counts(&self, number: u32) -> bool {
        match &self.stage {
            LifeStage::Acquiring(acquiring) => acquiring.counts(number),
            LifeStage::Holding(holding) => {
                let is_pending = matches!(holding.purpose, Purpose::Pending(_));
                is_pending || holding.extending.is_some() && number == self.number
            }
            LifeStage::Recording(recording) => recording.number() == number,
            LifeStage::Releasing(releasing) => number == releasing.number,
        }
    }

    /// Returns whether the lock is neither granted nor given up.
    #[must_use]
    pub fn is_acquiring(&self) -> bool {
        matches!(self.stage, LifeStage::Acquiring(_))
    }

    /// Returns whether an extension is under way.
    #[must_use]
    pub fn is_extending(&self) -> bool {
        matches!(&self.stage, LifeStage::Holding(holding) if holding.extending.is_some())
    }

    /// Returns the nodes that have not answered the release; none before it has begun.
    #[must_use]
    pub fn unanswered(&self) -> NodeSet {
        match &self.stage {
            LifeStage::Releasing(releasing) => releasing.round.silent(),
            _ => NodeSet::default(),
        }
    }

    /// Returns the nodes that may still have the lock.
    #[must_use]
    pub fn may_hold(&self) -> NodeSet {
        match &self.stage {
            LifeStage::Releasing(releasing) => releasing.round.unreleased(),
            _ => self.may_hold,
        }
    }

    /// Returns whether it is granted, and neither released nor about to record.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        matches!(self.stage, LifeStage::Holding(_))
    }

    /// Returns whether nothing is executed under the lock that might be.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.spec.once.is_some() && !self.is_begun
    }

    /// Returns whether nothing is left to do.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        matches!(&self.stage, LifeStage::Releasing(releasing) if releasing.is_settled)
    }

    /// Returns whether the release has begun.
    #[must_use]
    pub fn is_releasing(&self) -> bool {
        matches!(self.stage, LifeStage::Releasing(_))
    }

    /// Ends the lease. Returns the number of its release and the answers to it; of a lease that is not releasing, none.
    #[must_use]
    pub fn into_release(self) -> (u32, ReleaseRound) {
        match self.stage {
            LifeStage::Releasing(releasing) => (releasing.number, releasing.round),
            _ => {
                let round = ReleaseRound::new(self.quorum, self.may_hold);
                (self.number + 1, round)
            }
        }
    }

    /// Returns when every node has certainly forgotten the lock.
    #[must_use]
    pub fn gone_at(&self) -> Duration {
        self.gone_at
    }
}
