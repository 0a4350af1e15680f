//! How large a model of requests is, and what is asked of it.

use crate::records::promises::{I1, I2, I2_DECIDED, I3, I4};
use crate::requests::Variant;

/// How large a model is.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) variant: Variant,
    pub(crate) requests: usize,
    /// A request proposes any number from 1 to this.
    pub(crate) proposals: u8,
    /// How many `ACQUIRE`s are carried out once more.
    pub(crate) duplicates: u8,
    /// Whether one that executed and finds a record at a minority sends it to more nodes: under the old owner
    /// value first, and with a fresh one only if that misses the majority.
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
            wipes: 0,
            copies: 0,
            promises: &[I1, I2, I2_DECIDED, I3, I4],
            reaches: &[],
        }
    }
}
