//! How large a model is, what may go wrong in it, what is done wrong on purpose, and what is asked of it.

use std::num::NonZero;

use tower_redlock::protocol::lease::Access;

/// What is done wrong on purpose; all else is shared with the run of the shipped protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Nothing: the protocol as it is shipped.
    #[default]
    Shipped,
    /// T1: the second phase counts every node that still has the key, whatever its fence.
    CountsEveryOk,
    /// T2: the highest number of a majority is the token at once, without a second phase.
    NoWriteBack,
    /// T4: an extension counts every node that still has the key, whatever its fence.
    ExtendsByKey,
    /// T10: a node raises the fences of the newly locked keys of a set only.
    RaisesNewFencesOnly,
    /// T11: a node's `CONFIRM` sets the expiry even if that shortens the lock.
    ConfirmShortens,
    /// T12: answers to an older extension are counted for a newer one.
    CountsOldExtension,
    /// A majority that answered after the ttl is as good as one that answered in time.
    IgnoresValidity,
    /// The validity of a lock counts from when the majority was read.
    EndFromReply,
    /// T33: a client that has released begins again as the same owner.
    ReusesOwner,
    /// T13: the node does not compare the generation that the client was admitted with.
    NoCompare,
    /// T14: the age of a node counts, for each client, from when that client noticed.
    AgeFromNotice,
    /// T15: a node votes as soon as its generation is old enough, whatever process made it and
    /// however young the one that runs.
    NoUptimeRule,
    /// T16: what a node said on one connection goes for the next one, too.
    CachesAdmission,
    /// T18: the stamp of a generation is read in a step of its own before it is set.
    StampOutside,
    /// T19: a generation goes for every process that has it.
    GenerationOfAnyProcess,
    /// A client of two groups holds the lock as soon as it has its first group, and asks the second only then.
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
    /// T5, T6: the record of one node is told to an attempt as that of all.
    ReplaysMinority,
    /// That one node recorded is told as that all have.
    AnswersAfterMinority,
    /// T7: a node keeps a record also after it granted the key to another owner.
    RecordsWithoutOwnerCheck,
    /// A `RECORD` after a `LOOK` is written everywhere, as a `TOPUP` would be.
    RecordsAgainWithoutOwnerCheck,
    /// The executor sends `TOPUP` before a majority has recorded.
    TopsUpEarly,
    /// The executor goes before it has recorded, and says that it had no effect.
    ReleasesWithoutRecord,
    /// At most once: the executor goes, and says that it did not begin.
    TakesIntentBack,
    /// A client is told that a node holds the key for another owner where the node has a record.
    IgnoresRecords,
    /// A client that was granted the key hears nothing until it begins to execute.
    DeafOnceGranted,
}

/// The groups that a client may lock a key in. A key moves from the first to the second.
pub(crate) const GROUPS: usize = 2;

/// How a node loses its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// As by `FLUSHALL`: all is gone, while the process and its connections live on.
    Flush,
    /// Another process, without data.
    Restart,
    /// Another process, with data from before all locks: the generation is there.
    Rollback,
    /// The data of another node, as a replica gets it, while process and connections live on.
    Copy,
}

/// How a node that lost its memory is kept from voting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Guard {
    /// Every client knows at once.
    #[default]
    Noticed,
    /// The node itself stays out, as with a delayed restart.
    Delayed,
    /// Clients read the node's generation when they connect, and send it with every request.
    Compared,
}

/// Which numbers clients propose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Proposals {
    /// None: the locks have no token.
    #[default]
    None,
    /// Any from 1 to this.
    UpTo(u8),
    /// The tick, as wall clocks do, or up to so many more.
    Clock(u8),
}

/// A client, which makes one attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Role {
    pub(crate) access: Access,
    pub(crate) keys: &'static [u8],
    pub(crate) ttl: u8,
    /// The groups that the client locks its keys in, in this order.
    pub(crate) groups: &'static [usize],
}

impl Role {
    /// An acquisition of these keys.
    pub(crate) const fn of(keys: &'static [u8]) -> Self {
        Self {
            access: Access::Exclusive,
            keys,
            ttl: 2,
            groups: &[0],
        }
    }

    pub(crate) const WRITER: Self = Self::of(&[0]);
    pub(crate) const READER: Self = Self {
        access: Access::Shared,
        ..Self::WRITER
    };

    pub(crate) const fn for_ticks(self, ttl: u8) -> Self {
        Self { ttl, ..self }
    }
}

/// What may happen besides, or may be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum May {
    /// Clients give up waiting for single answers and act on what they have.
    GiveUp,
    /// Holders write to a storage that checks tokens.
    Store,
    /// Clients release, or give up, at any time.
    Release,
    /// Lives are whole.
    Live,
    /// They go on until they are settled: answers to releases are heard.
    Settle,
    /// The clients are requests whose outcome is recorded; the last of them only repairs for another.
    Execute,
    /// Another lease repairs for one that executed and could not record.
    Repair,
    /// No lock vanishes by itself: all nodes are healthy, and every lease is renewed.
    KeepLocks,
    /// A record that is decided is sent to more nodes.
    TopUp,
    /// Nodes keep intents, so that at most one executes.
    Intend,
    /// Beginning to execute is a step of its own, before which a client goes on hearing answers.
    Wait,
    /// A client begins so late that its lease asks all nodes once more before.
    BeginLate,
    /// Clients go at any time, also between the beginning and the outcome, which are then steps of their own.
    Leave,
    /// Outcomes are so large that nodes answer with their heads, and the rest is read, or cannot be.
    BeLarge,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Spec {
    pub(crate) variant: Variant,
    pub(crate) clients: Vec<Role>,
    pub(crate) proposals: Proposals,
    /// How many ticks there are. Without any, a lock may vanish at any moment.
    pub(crate) horizon: u8,
    /// How many `ACQUIRE`s are carried out once more.
    pub(crate) duplicates: u8,
    /// How many extensions are begun, by any client.
    pub(crate) extensions: u8,
    /// The ttl of each extension of the first client, in order.
    pub(crate) extends: &'static [u8],
    /// How often a node loses its memory, and in which ways.
    pub(crate) faults: u8,
    pub(crate) kinds: &'static [Fault],
    /// How often the clock of a node jumps one tick ahead.
    pub(crate) jumps: u8,
    /// How long a node that lost its memory stays out; 0 for no guard.
    pub(crate) window: u8,
    pub(crate) guard: Guard,
    pub(crate) may: Vec<May>,
    /// How many of the nodes belong to the first group, if not all; the others belong to the second.
    pub(crate) present: Option<usize>,
    /// The fences that earlier holders left in the two groups.
    pub(crate) fences: [u8; GROUPS],
    /// How long after its beginning a lock in a group may be extended.
    pub(crate) max_hold: u8,
    /// For how long clients of the second group alone wait after those of the first alone began for the last time;
    /// otherwise all may begin at any time.
    pub(crate) wait: Option<u8>,
    /// How many nodes must have a record for it to count as decided, if that is more than a majority.
    pub(crate) copies: usize,
    /// What is to hold in every state.
    pub(crate) promises: &'static [&'static str],
    /// What is to happen in some state.
    pub(crate) reaches: Vec<&'static str>,
    /// How many states are explored, counting those met again, if not all.
    pub(crate) bound: Option<NonZero<usize>>,
}

impl Spec {
    pub(crate) fn of(clients: &[Role], proposals: Proposals) -> Self {
        Self {
            clients: clients.to_vec(),
            proposals,
            kinds: &[Fault::Flush],
            ..Self::default()
        }
    }

    pub(crate) fn may(mut self, also: impl IntoIterator<Item = May>) -> Self {
        self.may.extend(also);
        self
    }

    pub(crate) fn reaches(mut self, also: impl IntoIterator<Item = &'static str>) -> Self {
        self.reaches.extend(also);
        self
    }

    pub(crate) fn has(&self, what: May) -> bool {
        self.may.contains(&what)
    }

    /// Explores the nearest of its states only.
    pub(crate) fn within(self, states: usize) -> Self {
        self.with(|it| it.bound = NonZero::new(states))
    }

    /// The same with a change.
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn is_timed(&self) -> bool {
        self.horizon > 0
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.proposals != Proposals::None
    }

    /// Whether the key moves from one group to another.
    pub(crate) fn moves(&self) -> bool {
        self.present.is_some()
    }

    /// Whether nodes have generations that clients ask for.
    pub(crate) fn compares(&self) -> bool {
        self.guard == Guard::Compared && self.window > 0
    }

    /// Whether what makes no difference any more is forgotten while time passes.
    pub(crate) fn is_lossy(&self) -> bool {
        self.has(May::Release) && !self.has(May::Live)
    }
}
