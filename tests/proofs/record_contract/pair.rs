//! The real node and the reference node side by side.

use std::ops::{Deref, DerefMut};

use tower_redlock::protocol::admission::Generation;
use tower_redlock::protocol::message::{Command, Reply};

use crate::node_contract;
use crate::record_contract::wire::{send, start_node};

/// The two nodes side by side, with the scripts for recorded keys.
pub(crate) struct Pair(node_contract::Pair);

impl Deref for Pair {
    type Target = node_contract::Pair;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Pair {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self(node_contract::Pair::of(start_node()))
    }

    /// Asks both; panics if they do not answer the same.
    #[track_caller]
    pub(crate) fn ask(&mut self, command: &Command, what: &str) -> Reply {
        let now = self.now();
        let ours = self.store.apply(command, now);
        self.compare(command, None, ours, what)
    }

    /// Asks both in the name of a client that was told a generation.
    #[track_caller]
    pub(crate) fn ask_in(&mut self, known: &Generation, command: &Command, what: &str) -> Reply {
        let now = self.now();
        let ours = self.store.apply_in(known, command, now);
        self.compare(command, Some(known), ours, what)
    }

    #[track_caller]
    fn compare(
        &mut self,
        command: &Command,
        known: Option<&Generation>,
        ours: Reply,
        what: &str,
    ) -> Reply {
        let theirs = send(&mut self.node, command, known).unwrap();
        assert!(
            are_same(&ours, &theirs),
            "{what}: {command:?}\nreference: {ours:?}\nscript: {theirs:?}"
        );
        ours
    }
}

fn are_same(ours: &Reply, theirs: &Reply) -> bool {
    match (ours, theirs) {
        (
            Reply::Done {
                record: our,
                expires_in: ours,
            },
            Reply::Done {
                record: their,
                expires_in: theirs,
            },
        ) => our == their && ours.abs_diff(*theirs) < node_contract::TOLERANCE,
        _ => node_contract::are_same(1, ours, theirs),
    }
}
