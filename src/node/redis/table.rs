//! The table of operations: what each is as a Redis command.
//!
//! An operation has a row for each command that it may be. A row names the script, the keys and the arguments behind
//! it, and the script by which several requests share a call. [`encode`](crate::node::redis::encode) interprets it, and
//! [`load_all`] loads what it names; [`decode`](crate::node::redis::decode) reads the replies. What depends on no
//! server stands beside the operations: see [`Op::is_vote`].

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use deadpool_redis::redis::{Pipeline, Script};

use self::Part::{
    AllSlots, Channels, Count, Done, Fence, Intent, IntentRetention, Lock, Notify, Number,
    NumberOrZero, NumberedFence, Owner, Payload, Readers, Retention, Slots, Time, Word, Writer,
};
use self::Verb::Plain;
use crate::protocol::message::{Command, Op, SharedOp};
use crate::protocol::{KeyNames, RecordNames};

/// One row of the table: an operation as one Redis command.
#[derive(Debug)]
pub(crate) struct Operation {
    /// Its name in metrics.
    pub(crate) name: &'static str,
    pub(super) verb: Verb,
    pub(super) keys: &'static [Part],
    /// The arguments. A request for a vote has the generation behind the keys and behind these.
    pub(super) arguments: &'static [Part],
    /// How several requests on one key each share a call.
    pub(super) shared: Option<SharedCall>,
}

/// How a command begins.
#[derive(Debug)]
pub(super) enum Verb {
    Plain(&'static str),
    /// A script, which commands name by its SHA-1 hash.
    Lua {
        code: &'static str,
        hash: OnceLock<String>,
    },
}

/// A call for several requests. Its arguments are those that all requests have in common, and then the own ones of
/// each.
#[derive(Debug)]
pub(super) struct SharedCall {
    pub(super) script: Verb,
    /// How many of the first arguments are a request's own.
    pub(super) own: usize,
    /// The arguments that must be equal. One that is left out is sent empty.
    pub(super) common: Range<usize>,
    /// Whether the script always compares the generation.
    pub(super) is_guarded: bool,
}

/// A part of a command.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    /// The lock of each key; and so are the next ones those beside each lock, in the order of the locks.
    Lock,
    Fence,
    /// The fence, if fencing is on.
    NumberedFence,
    /// The locks of all slots.
    AllSlots,
    Readers,
    Writer,
    Done,
    Intent,
    Word(&'static str),
    Owner,
    /// The fencing number; empty without fencing.
    Number,
    NumberOrZero,
    /// How long what it writes lasts, or until when it may be executed.
    Time,
    /// How long the fence lasts.
    Retention,
    /// Empty without intents.
    IntentRetention,
    /// The number of locks.
    Count,
    /// The number of slots of each key.
    Slots,
    /// The record, or the mark of a holder.
    Payload,
    /// 1 to notify the subscribers, else left out.
    Notify,
    /// The channel of each lock to notify the subscribers, else left out.
    Channels,
}

macro_rules! lua {
    ($($file:literal),+) => {
        Verb::Lua {
            code: concat!($(include_str!(concat!("scripts/", $file, ".lua"))),+),
            hash: OnceLock::new(),
        }
    };
}

/// Defines the rows, each for the operations, names and plain requests of its pattern; the first that fits is taken.
macro_rules! operations {
    (@shared) => { None };
    (@shared $shared:expr) => { Some($shared) };
    ($($row:ident: $pattern:pat => $name:literal, $verb:expr, $keys:expr, $arguments:expr $(, $shared:expr)?;)+) => {
        $(pub(super) static $row: Operation = Operation {
            name: $name,
            verb: $verb,
            keys: &$keys,
            arguments: &$arguments,
            shared: operations!(@shared $($shared)?),
        };)+

        static TABLE: &[&Operation] = &[$(&$row),+];

        impl Operation {
            /// Returns the row of a command. `is_guarded` says whether servers compare the generation.
            pub(crate) fn of(command: &Command, notifies: bool, is_guarded: bool) -> &'static Self {
                // Whether it asks for nothing that needs a script.
                let is_plain = !is_guarded && !notifies;
                match (&command.op, &*command.names, is_plain) {
                    $($pattern => &$row,)+
                }
            }
        }
    };
}

operations! {
    ACQUIRE_ONCE: (Op::Acquire { .. }, [KeyNames { record: Some(_), .. }], _) =>
        "acquire", lua!("once", "acquire_once"),
        [Lock, Fence, Done, Intent], [Owner, NumberOrZero, Time, Retention, IntentRetention];
    // The plain command of the Redlock description, which needs no script.
    SET: (Op::Acquire { proposal: None, .. }, [KeyNames { slots: None, .. }], true) =>
        "acquire", Plain("SET"),
        [Lock], [Owner, Word("NX"), Word("PX"), Time];
    ACQUIRE: (Op::Acquire { proposal: Some(_), .. }, [KeyNames { slots: None, .. }], _) =>
        "acquire", lua!("acquire"),
        [Lock, Fence], [Owner, Number, Time, Retention],
        SharedCall { script: lua!("batch", "acquire_batch"), own: 2, common: 2..4, is_guarded: false };
    ACQUIRE_UNFENCED: (Op::Acquire { .. }, [KeyNames { slots: None, .. }], _) =>
        "acquire", lua!("acquire_all"),
        [Lock], [Owner, Number, Time, Retention, Count, Slots],
        SharedCall { script: lua!("acquire_batch_unfenced"), own: 1, common: 2..3, is_guarded: true };
    ACQUIRE_ALL: (Op::Acquire { .. }, _, _) => "acquire", lua!("acquire_all"),
        [Lock, NumberedFence, AllSlots], [Owner, Number, Time, Retention, Count, Slots];
    CONFIRM_ONCE: (Op::Confirm { .. }, [KeyNames { record: Some(_), .. }], _) =>
        "confirm", lua!("once", "confirm_once"),
        [Lock, Fence, Done], [Owner, NumberOrZero, Time, Retention];
    CONFIRM: (Op::Confirm { token: Some(_), .. }, [_], _) => "confirm", lua!("confirm"),
        [Lock, Fence], [Owner, Number, Time, Retention],
        SharedCall { script: lua!("batch", "confirm_batch"), own: 2, common: 2..4, is_guarded: false };
    CONFIRM_ALL: (Op::Confirm { .. }, _, _) => "confirm", lua!("confirm_all"),
        [Lock, NumberedFence], [Owner, Number, Time, Retention, Count];
    RELEASE_ONCE: (Op::Release, [KeyNames { record: Some(RecordNames { intent: Some(_), .. }), .. }], _) =>
        "release", lua!("notify", "release_once"),
        [Lock, Intent], [Owner, Notify];
    RELEASE: (Op::Release | Op::ReleaseExecuted, [KeyNames { slots: None, .. }], _) =>
        "release", lua!("notify", "release"),
        [Lock], [Owner, Notify],
        SharedCall { script: lua!("release_batch"), own: 1, common: 1..2, is_guarded: false };
    RELEASE_ALL: (Op::Release | Op::ReleaseExecuted, [KeyNames { slots: None, .. }, ..], _) =>
        "release", lua!("notify", "release_all"),
        [Lock], [Owner, Notify];
    // Of slots too, whose releases have a channel of their own.
    RELEASE_AFTER: (Op::Release | Op::ReleaseExecuted | Op::ReleaseAfter { .. }, _, _) =>
        "release", lua!("notify", "release_after"),
        [Lock], [Owner, Time, Channels];
    ACQUIRE_SHARED: (Op::Shared(SharedOp::Acquire { .. }), _, _) =>
        "acquire_shared", lua!("shared", "acquire_shared"),
        [Lock, Readers, Writer], [Owner, Time, Count];
    CONFIRM_SHARED: (Op::Shared(SharedOp::Confirm { .. }), _, _) =>
        "confirm_shared", lua!("shared", "confirm_shared"),
        [Lock, Readers], [Owner, Time, Count];
    RELEASE_SHARED: (Op::Shared(SharedOp::Release), _, _) =>
        "release_shared", lua!("shared", "notify", "release_shared"),
        [Lock, Readers], [Owner, Notify];
    ANNOUNCE: (Op::Shared(SharedOp::Announce { .. }), _, _) => "announce", lua!("shared", "announce"),
        [Lock, Writer], [Owner, Time];
    WITHDRAW: (Op::Shared(SharedOp::Withdraw), _, _) => "withdraw", lua!("withdraw"),
        [Writer], [Owner];
    RECORD: (Op::Record { .. }, _, _) => "record", lua!("notify", "record"),
        [Lock, Fence, Done, Intent], [Owner, Payload, Time, Notify];
    TOP_UP: (Op::TopUp { .. }, _, _) => "top_up", lua!("top_up"),
        [Done, Intent], [Payload, Time];
    LOOK: (Op::Look, _, _) => "look", lua!("once", "look"),
        [Done], [];
    // Not a script, which would copy the record twice more while it blocks the server.
    FETCH: (Op::Fetch, _, _) => "fetch", Plain("GET"),
        [Done], [];
    INSPECT: (Op::Inspect, _, _) => "inspect", lua!("inspect"),
        [Lock, Readers, Fence, Done], [];
    REVOKE: (Op::Revoke { .. }, _, _) => "revoke", lua!("notify", "revoke"),
        [Lock, Readers], [Payload, Time, Notify];
}

/// A health check, which is no operation on keys.
pub(super) static PING: Operation = Operation {
    name: "ping",
    verb: Plain("PING"),
    keys: &[],
    arguments: &[],
    shared: None,
};

/// Reads a server's generation, and starts a new one if the server process has none.
pub(super) static ADMIT: Verb = lua!("admit");

impl Verb {
    /// Returns the command, or the hash of the script.
    pub(super) fn word(&self) -> &str {
        match self {
            Plain(command) => command,
            Self::Lua { code, hash } => {
                hash.get_or_init(|| Script::new(code).get_hash().to_owned())
            }
        }
    }
}

impl Part {
    /// Returns the keys of one lock that this names.
    pub(super) fn keys<'a>(self, name: &'a KeyNames, op: &Op) -> &'a [Arc<[u8]>] {
        let record = name.record.as_ref();
        let one = match self {
            Lock => Some(&name.lock),
            Fence => Some(&name.fence),
            NumberedFence => number(op).map(|_| &name.fence),
            AllSlots => return name.slots.as_ref().map_or(&[], |slots| &slots.locks),
            Readers => name.shared.as_ref().map(|shared| &shared.readers),
            Writer => name.shared.as_ref().map(|shared| &shared.writer),
            Done => record.map(|record| &record.done),
            Intent => record.and_then(|record| Some(&record.intent.as_ref()?.name)),
            _ => None,
        };
        one.map_or(&[], std::slice::from_ref)
    }
}

/// Returns the pipeline that loads all scripts, so that commands can name them by hash. Also used after a server has
/// forgotten them (`SCRIPT FLUSH`).
pub(super) fn load_all() -> Pipeline {
    let of_row = |row: &'static &Operation| {
        let shared = row.shared.as_ref().map(|shared| &shared.script);
        [Some(&row.verb), shared].into_iter().flatten()
    };
    let verbs = TABLE.iter().flat_map(of_row).chain([&ADMIT]);
    let mut scripts: Vec<_> = verbs
        .filter_map(|verb| match verb {
            Verb::Lua { code, .. } => Some(*code),
            Plain(_) => None,
        })
        .collect();
    // Two rows may have one script.
    scripts.sort_unstable();
    scripts.dedup();
    let mut pipeline = Pipeline::new();
    for code in scripts {
        pipeline.cmd("SCRIPT").arg("LOAD").arg(code).ignore();
    }
    pipeline
}

/// Returns the number that an operation asks for, which a server that grants or confirms it has afterwards.
pub(super) fn number(op: &Op) -> Option<u64> {
    match op {
        Op::Acquire { proposal, .. } => *proposal,
        Op::Confirm { token, .. } => *token,
        _ => None,
    }
}
