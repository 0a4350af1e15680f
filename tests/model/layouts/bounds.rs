//! How large a model of layouts in change is, and what is wrong in it on purpose.

pub(crate) const CLIENTS: usize = 3;

/// The group that a key moves from, and the one that it moves to.
pub(crate) const PRESENT: usize = 0;
pub(crate) const NEXT: usize = 1;
pub(crate) const GROUPS: usize = 2;

/// What the process of a client knows of the layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// There is no such client.
    Absent,
    /// The present layout only.
    Old,
    /// Both layouts.
    Both,
    /// The next layout only.
    New,
    /// Both layouts, and the client locks the next group first.
    Reversed,
}

/// What a client does wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Nothing: a client locks all its groups one after the other, and proposes the token of the first to the second. If
    /// the second has a higher one, it raises the first to that. Then it holds the lock.
    Shipped,
    /// It holds the lock as soon as it has its first group, and asks the second only then.
    CountsFirstGroup,
    /// Its lock is as good as that in its last group.
    ForgetsFirstValidity,
    /// It raises nothing. Its token is that of the first group.
    NeverRaises,
    /// It has the higher token, and the first group does not learn of it.
    RaisesAlone,
    /// It proposes its own clock to each group.
    ProposesItsClock,
    /// It proposes its own clock to each group, and raises nothing.
    KeepsTokensApart,
    /// If its second group refuses it, it does not release the first.
    KeepsFirstGroup,
}

/// How large a model is.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) rule: Rule,
    pub(crate) steps: [Step; CLIENTS],
    /// How many of the nodes belong to the present group; the others belong to the next one.
    pub(crate) present: usize,
    pub(crate) ttl: u8,
    pub(crate) horizon: u8,
    /// By how many ticks the clocks of clients differ. Each proposes the tick at which it begins, or up to so many more.
    pub(crate) skew: u8,
    /// The fences that earlier holders left in the two groups.
    pub(crate) fences: [u8; GROUPS],
    /// How often a client extends its lock in one group.
    pub(crate) extensions: u8,
    /// How long after its beginning a lock may be extended.
    pub(crate) max_hold: u8,
    /// How often an `ACQUIRE` is sent a second time.
    pub(crate) repeats: u8,
    /// For how long clients of the next layout wait after clients of the present one began for the last time; otherwise
    /// all may begin at any time.
    pub(crate) wait: Option<u8>,
    /// Whether clocks differ by more than the wait makes up for. Tokens then need an order only between holders that have
    /// a group in common, or that holders between them connect.
    pub(crate) has_unequal_clocks: bool,
    /// What must happen in some order of events, beside that clients of all steps hold the lock.
    pub(crate) reaches: &'static [&'static str],
}

impl Step {
    /// The groups that a client locks, in this order.
    pub(crate) fn groups(self) -> &'static [usize] {
        match self {
            Self::Absent => &[],
            Self::Old => &[PRESENT],
            Self::Both => &[PRESENT, NEXT],
            Self::New => &[NEXT],
            Self::Reversed => &[NEXT, PRESENT],
        }
    }
}

impl Rule {
    /// Whether a client raises the group with the lower token.
    pub(crate) fn raises(self) -> bool {
        matches!(
            self,
            Self::Shipped | Self::ForgetsFirstValidity | Self::ProposesItsClock
        )
    }

    /// Whether a client proposes its clock also to its second group.
    pub(crate) fn proposes_its_clock(self) -> bool {
        matches!(self, Self::ProposesItsClock | Self::KeepsTokensApart)
    }
}

impl Bounds {
    /// One node in each group, and locks for two ticks.
    pub(crate) fn of(steps: [Step; CLIENTS]) -> Self {
        Self {
            rule: Rule::Shipped,
            steps,
            present: 1,
            ttl: 2,
            horizon: 4,
            skew: 1,
            fences: [0; GROUPS],
            extensions: 0,
            max_hold: 0,
            repeats: 0,
            wait: None,
            has_unequal_clocks: false,
            reaches: &[],
        }
    }
}
