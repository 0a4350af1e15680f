//! How large a model of requests is, and what is asked of it.

use crate::records::promises::{I1, I2, I2_DECIDED, I3, I4, KEPT};

/// What is done wrong on purpose; all else is shared with the run of the shipped protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Nothing: the protocol as it is shipped.
    Shipped,
    /// T5, T6: the record of one node is told to an attempt as that of all.
    ReplaysMinority,
    /// That one node recorded is told as that all have.
    AnswersAfterMinority,
    /// T7: a node keeps a record also after it granted the key to another owner.
    RecordsWithoutOwnerCheck,
    /// The executor sends `TOPUP` before a majority has recorded.
    TopsUpEarly,
    /// The executor goes before it has recorded, and says that it had no effect.
    ReleasesWithoutRecord,
    /// A client is told that a node holds the key for another owner where the node has a record.
    IgnoresRecords,
    /// A client that was granted the key hears nothing until it begins to execute.
    DeafOnceGranted,
    /// A `RECORD` after a `LOOK` is written everywhere, as a `TOPUP` would be.
    RecordsAgainWithoutOwnerCheck,
    /// At most once: the executor goes, and says that it did not begin.
    TakesIntentBack,
}

/// How large a model is.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) variant: Variant,
    pub(crate) requests: usize,
    /// A request proposes any number from 1 to this.
    pub(crate) proposals: u8,
    /// How many `ACQUIRE`s are carried out once more.
    pub(crate) duplicates: u8,
    /// Whether another lease repairs for one that executed and could not record.
    pub(crate) retry: bool,
    /// Whether no lock vanishes by itself: all nodes are healthy, and every lease is renewed.
    pub(crate) calm: bool,
    /// Whether a record that is decided is sent to more nodes.
    pub(crate) top_up: bool,
    /// Whether nodes keep intents, so that at most one executes.
    pub(crate) intents: bool,
    /// Whether clients give up waiting for single answers and act on what they have.
    pub(crate) timeouts: bool,
    /// Whether beginning to execute is a step of its own, before which a client goes on hearing answers.
    pub(crate) begins: bool,
    /// Whether a client may begin so late that its lease asks all nodes once more before.
    pub(crate) late: bool,
    /// Whether clients may go at any time, also between the beginning and the outcome, which are then steps of their own.
    pub(crate) leaves: bool,
    /// Whether outcomes are so large that nodes answer with their heads, and the rest is read, or cannot be.
    pub(crate) large: bool,
    /// How many nodes lose their memory, once a record is decided.
    pub(crate) wipes: u8,
    /// How many nodes must have a record for it to count as decided, if that is more than a majority.
    pub(crate) copies: usize,
    /// What is to hold in every state.
    pub(crate) promises: &'static [&'static str],
    /// What is to happen in some state.
    pub(crate) reaches: &'static [&'static str],
}

impl Bounds {
    pub(crate) fn of(requests: usize, proposals: u8) -> Self {
        Self {
            variant: Variant::Shipped,
            requests,
            proposals,
            duplicates: 0,
            retry: false,
            calm: false,
            top_up: false,
            intents: false,
            timeouts: false,
            begins: false,
            late: false,
            leaves: false,
            large: false,
            wipes: 0,
            copies: 0,
            promises: &[I1, I2, I2_DECIDED, I3, I4, KEPT],
            reaches: &[],
        }
    }
}
