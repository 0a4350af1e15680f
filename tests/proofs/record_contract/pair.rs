//! The real node and the reference node side by side.

use std::time::Duration;

use support::{ScriptNode, secs};
use tokio::time::Instant;
use tower_redlock::protocol::Store;
use tower_redlock::protocol::admission::Generation;
use tower_redlock::protocol::message::{Command, Reply};

use crate::record_contract::wire::{ROLES, name_of, send, start_node};

/// The two nodes side by side. Time passes on both by as much as a test says.
pub(crate) struct Pair {
    pub(crate) node: ScriptNode,
    pub(crate) store: Store,
    began: Instant,
    passed: Duration,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self {
            node: start_node(),
            store: Store::new(),
            began: Instant::now(),
            passed: Duration::ZERO,
        }
    }

    pub(crate) fn forget(&mut self) {
        self.node.call(&["FLUSHALL"]);
        self.store = Store::new();
    }

    /// Lets a time pass that is a multiple of [`STEP`]: on the server, every key comes nearer to its end.
    pub(crate) fn pass(&mut self, time: Duration) {
        for role in ROLES {
            let name = name_of(role);
            let left = self.node.call(&["PTTL", &name]).as_int().unwrap();
            let time = i64::try_from(time.as_millis()).unwrap();
            match left {
                -2 => continue,
                left if left <= time => self.node.call(&["DEL", &name]),
                left => self
                    .node
                    .call(&["PEXPIRE", &name, &(left - time).to_string()]),
            };
        }
        self.passed += time;
    }

    /// Asks both; panics if they do not answer the same.
    #[track_caller]
    pub(crate) fn ask(&mut self, command: &Command, what: &str) -> Reply {
        let ours = self.store.apply(command, self.now());
        self.compare(command, None, ours, what)
    }

    /// Asks both in the name of a client that was told a generation.
    #[track_caller]
    pub(crate) fn ask_in(&mut self, known: &Generation, command: &Command, what: &str) -> Reply {
        let ours = self.store.apply_in(known, command, self.now());
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

    fn now(&self) -> Duration {
        self.began.elapsed() + self.passed
    }
}

fn are_same(ours: &Reply, theirs: &Reply) -> bool {
    match (ours.clone(), theirs.clone()) {
        (
            Reply::Held {
                expires_in: Some(ours),
                shown: our,
            },
            Reply::Held {
                expires_in: Some(theirs),
                shown: their,
            },
        ) => our == their && ours.abs_diff(theirs) < TOLERANCE,
        (
            Reply::Done {
                record: our,
                expires_in: ours,
            },
            Reply::Done {
                record: their,
                expires_in: theirs,
            },
        ) => our == their && ours.abs_diff(theirs) < TOLERANCE,
        (ours, theirs) => ours == theirs,
    }
}

/// Well below the step of all times, and well above what a busy machine takes.
const TOLERANCE: Duration = secs(20);
