//! The table of operations: what each is as a Redis command.
//!
//! An operation has a row for each command that it may be. A row names the script, the keys and the arguments behind
//! it, the replies, and the script by which several requests share a call. [`encode`](crate::node::redis::encode) and
//! [`decode`](crate::node::redis::decode) interpret it, and [`load_all`] loads what it names, so nothing else lists
//! operations. What depends on no server stands beside the operations: see [`Op::class`].

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use deadpool_redis::redis::{Pipeline, Script};

use self::Argument::{
    Channels, Count, IntentRetention, Notify, Number, NumberOrZero, Owner, Payload, Retention,
    Slots, Time, Word,
};
use self::KeyForm::{Intended, One, Recorded, Several, SeveralSlots, Slot};
use self::KeyPart::{AllSlots, Done, Fence, Intent, Lock, NumberedFence, Readers, Writer};
use self::ReplyForm::{
    Absent, Amnesia, Confirmed, Foretold, Granted, Held, HeldBy, HeldShared, HeldSlot, Lost,
    NotDone, NotHeld, NotSet, Overflow, Released, Revoked, Seen, Set, SharedConfirmed,
    SharedGranted, Stored, TooLate, Whole,
};
use self::Verb::{Eval, Plain};
use crate::protocol::KeyNames;
use crate::protocol::message::{Command, Op, SharedOp};

/// One row of the table: an operation as one Redis command.
#[derive(Debug)]
pub(crate) struct Operation {
    /// Its name in metrics.
    pub(crate) name: &'static str,
    pub(super) verb: Verb,
    pub(super) keys: &'static [KeyPart],
    /// The arguments. A request for a vote has the generation behind the keys and behind these.
    pub(super) arguments: &'static [Argument],
    /// The replies of a server that is no error.
    pub(super) replies: &'static [ReplyForm],
    /// How several requests on one key each share a call.
    pub(super) shared: Option<SharedCall>,
}

/// How a command begins.
#[derive(Debug)]
pub(super) enum Verb {
    Plain(&'static str),
    /// The call of a script.
    Eval(Lua),
}

/// A call for several requests. Its arguments are those that all requests have in common, and then the own ones of
/// each.
#[derive(Debug)]
pub(super) struct SharedCall {
    pub(super) script: Lua,
    /// How many of the first arguments are a request's own.
    pub(super) own: usize,
    /// The arguments that must be equal. One that is left out is sent empty.
    pub(super) common: Range<usize>,
    /// Whether the script always compares the generation.
    pub(super) is_guarded: bool,
}

/// A Lua script, which commands name by its SHA-1 hash.
#[derive(Debug)]
pub(super) struct Lua {
    code: &'static str,
    hash: OnceLock<String>,
}

/// The keys of a request.
#[derive(Debug, Clone, Copy)]
enum KeyForm {
    /// One key without records.
    One,
    Several,
    /// A slot of one key.
    Slot,
    /// A slot of each of several keys.
    SeveralSlots,
    /// One key with records.
    Recorded,
    /// One key with records and intents.
    Intended,
}

/// Those of the keys beside each lock that a command names, in the order of the locks.
#[derive(Debug, Clone, Copy)]
pub(super) enum KeyPart {
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
}

/// An argument of a command.
#[derive(Debug, Clone, Copy)]
pub(super) enum Argument {
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

/// A reply to a command, as the header of its script describes it.
#[derive(Debug, Clone, Copy)]
pub(super) enum ReplyForm {
    Set,
    NotSet,
    Granted,
    SharedGranted,
    Held,
    HeldBy,
    HeldShared,
    HeldSlot,
    Overflow,
    Amnesia,
    Stored,
    Foretold,
    Confirmed,
    SharedConfirmed,
    Lost,
    NotHeld,
    Released,
    NotDone,
    Whole,
    Absent,
    TooLate,
    Revoked,
    Seen,
}

macro_rules! lua {
    ($($file:literal),+) => {
        Lua {
            code: concat!($(include_str!(concat!("scripts/", $file, ".lua"))),+),
            hash: OnceLock::new(),
        }
    };
}

/// Defines the rows, each for the operations, keys and plain requests of its pattern; the first that fits is taken.
macro_rules! operations {
    (@shared) => { None };
    (@shared $shared:expr) => { Some($shared) };
    ($($row:ident: $pattern:pat => $name:literal, $verb:expr, $keys:expr, $arguments:expr, $replies:expr $(, $shared:expr)?;)+) => {
        $(pub(super) static $row: Operation = Operation {
            name: $name,
            verb: $verb,
            keys: &$keys,
            arguments: &$arguments,
            replies: &$replies,
            shared: operations!(@shared $($shared)?),
        };)+

        static TABLE: &[&Operation] = &[$(&$row),+];

        impl Operation {
            /// Returns the row of a command, which `is_plain` if it asks for nothing that needs a script.
            fn find(op: &Op, form: KeyForm, is_plain: bool) -> &'static Self {
                match (op, form, is_plain) {
                    $($pattern => &$row,)+
                }
            }
        }
    };
}

operations! {
    ACQUIRE_ONCE: (Op::Acquire { .. }, Recorded | Intended, _) => "acquire", Eval(lua!("once", "acquire_once")),
        [Lock, Fence, Done, Intent], [Owner, NumberOrZero, Time, Retention, IntentRetention],
        [Granted, HeldBy, HeldShared, Overflow, Amnesia, Stored, Foretold];
    // The plain command of the Redlock description, which needs no script.
    SET: (Op::Acquire { proposal: None, .. }, One, true) => "acquire", Plain("SET"),
        [Lock], [Owner, Word("NX"), Word("PX"), Time],
        [Set, NotSet];
    ACQUIRE: (Op::Acquire { proposal: Some(_), .. }, One, _) => "acquire", Eval(lua!("acquire")),
        [Lock, Fence], [Owner, Number, Time, Retention],
        [Granted, Held, HeldShared, Overflow, Amnesia],
        SharedCall { script: lua!("batch", "acquire_batch"), own: 2, common: 2..4, is_guarded: false };
    ACQUIRE_UNFENCED: (Op::Acquire { .. }, One, _) => "acquire", Eval(lua!("acquire_all")),
        [Lock], [Owner, Number, Time, Retention, Count, Slots],
        [Granted, Held, HeldShared, Amnesia],
        SharedCall { script: lua!("acquire_batch_unfenced"), own: 1, common: 2..3, is_guarded: true };
    ACQUIRE_ALL: (Op::Acquire { .. }, _, _) => "acquire", Eval(lua!("acquire_all")),
        [Lock, NumberedFence, AllSlots], [Owner, Number, Time, Retention, Count, Slots],
        [Granted, Held, HeldShared, HeldSlot, Overflow, Amnesia];
    CONFIRM_ONCE: (Op::Confirm { .. }, Recorded | Intended, _) => "confirm", Eval(lua!("once", "confirm_once")),
        [Lock, Fence, Done], [Owner, NumberOrZero, Time, Retention],
        [Confirmed, Lost, Amnesia, Stored];
    CONFIRM: (Op::Confirm { token: Some(_), .. }, One | Slot, _) => "confirm", Eval(lua!("confirm")),
        [Lock, Fence], [Owner, Number, Time, Retention],
        [Confirmed, Lost, Amnesia],
        SharedCall { script: lua!("batch", "confirm_batch"), own: 2, common: 2..4, is_guarded: false };
    CONFIRM_ALL: (Op::Confirm { .. }, _, _) => "confirm", Eval(lua!("confirm_all")),
        [Lock, NumberedFence], [Owner, Number, Time, Retention, Count],
        [Confirmed, Lost, Amnesia];
    RELEASE_ONCE: (Op::Release, Intended, _) => "release", Eval(lua!("notify", "release_once")),
        [Lock, Intent], [Owner, Notify],
        [NotHeld, Released];
    RELEASE: (Op::Release | Op::ReleaseExecuted, One | Recorded | Intended, _) => "release", Eval(lua!("notify", "release")),
        [Lock], [Owner, Notify],
        [NotHeld, Released],
        SharedCall { script: lua!("release_batch"), own: 1, common: 1..2, is_guarded: false };
    RELEASE_ALL: (Op::Release | Op::ReleaseExecuted, Several, _) => "release", Eval(lua!("notify", "release_all")),
        [Lock], [Owner, Notify],
        [NotHeld, Released];
    // Of slots too, whose releases have a channel of their own.
    RELEASE_AFTER: (Op::Release | Op::ReleaseExecuted | Op::ReleaseAfter { .. }, _, _) => "release", Eval(lua!("notify", "release_after")),
        [Lock], [Owner, Time, Channels],
        [NotHeld, Released];
    ACQUIRE_SHARED: (Op::Shared(SharedOp::Acquire { .. }), _, _) => "acquire_shared", Eval(lua!("shared", "acquire_shared")),
        [Lock, Readers, Writer], [Owner, Time, Count],
        [SharedGranted, Held, Amnesia];
    CONFIRM_SHARED: (Op::Shared(SharedOp::Confirm { .. }), _, _) => "confirm_shared", Eval(lua!("shared", "confirm_shared")),
        [Lock, Readers], [Owner, Time, Count],
        [SharedConfirmed, Lost, Amnesia];
    RELEASE_SHARED: (Op::Shared(SharedOp::Release), _, _) => "release_shared", Eval(lua!("shared", "notify", "release_shared")),
        [Lock, Readers], [Owner, Notify],
        [NotHeld, Released];
    ANNOUNCE: (Op::Shared(SharedOp::Announce { .. }), _, _) => "announce", Eval(lua!("shared", "announce")),
        [Lock, Writer], [Owner, Time],
        [Released];
    WITHDRAW: (Op::Shared(SharedOp::Withdraw), _, _) => "withdraw", Eval(lua!("withdraw")),
        [Writer], [Owner],
        [NotHeld, Released];
    RECORD: (Op::Record { .. }, _, _) => "record", Eval(lua!("notify", "record")),
        [Lock, Fence, Done, Intent], [Owner, Payload, Time, Notify],
        [Lost, Stored];
    TOP_UP: (Op::TopUp { .. }, _, _) => "top_up", Eval(lua!("top_up")),
        [Done, Intent], [Payload, Time],
        [Stored];
    LOOK: (Op::Look, _, _) => "look", Eval(lua!("once", "look")),
        [Done], [],
        [NotDone, Stored];
    // Not a script, which would copy the record twice more while it blocks the server.
    FETCH: (Op::Fetch, _, _) => "fetch", Plain("GET"),
        [Done], [],
        [Whole, Absent];
    INSPECT: (Op::Inspect, _, _) => "inspect", Eval(lua!("inspect")),
        [Lock, Readers, Fence, Done], [],
        [Seen];
    REVOKE: (Op::Revoke { .. }, _, _) => "revoke", Eval(lua!("notify", "revoke")),
        [Lock, Readers], [Payload, Time, Notify],
        [TooLate, Revoked];
}

/// A health check, which is no operation on keys.
pub(super) static PING: Operation = Operation {
    name: "ping",
    verb: Plain("PING"),
    keys: &[],
    arguments: &[],
    replies: &[],
    shared: None,
};

/// Reads a server's generation, and starts a new one if the server process has none.
pub(super) static ADMIT: Lua = lua!("admit");

impl Operation {
    /// Returns the row of a command. `is_guarded` says whether servers compare the generation.
    pub(crate) fn of(command: &Command, notifies: bool, is_guarded: bool) -> &'static Self {
        let form = match &*command.names {
            [name] => match &name.record {
                Some(record) if record.intent.is_some() => Intended,
                Some(_) => Recorded,
                None if name.slots.is_some() => Slot,
                None => One,
            },
            [name, ..] if name.slots.is_some() => SeveralSlots,
            _ => Several,
        };
        Self::find(&command.op, form, !is_guarded && !notifies)
    }
}

impl Lua {
    pub(super) fn hash(&self) -> &str {
        let hash = || Script::new(self.code).get_hash().to_owned();
        self.hash.get_or_init(hash)
    }
}

impl KeyPart {
    /// Returns the keys of one lock that this names.
    pub(super) fn of<'a>(self, name: &'a KeyNames, op: &Op) -> &'a [Arc<[u8]>] {
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
        };
        one.map_or(&[], std::slice::from_ref)
    }
}

/// Returns the pipeline that loads all scripts, so that commands can name them by hash. Also used after a server has
/// forgotten them (`SCRIPT FLUSH`).
pub(super) fn load_all() -> Pipeline {
    let rows = TABLE.iter().flat_map(|row| {
        let single = match &row.verb {
            Eval(script) => Some(script),
            Plain(_) => None,
        };
        single
            .into_iter()
            .chain(row.shared.as_ref().map(|shared| &shared.script))
    });
    let mut scripts: Vec<_> = rows.chain([&ADMIT]).map(|script| script.code).collect();
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
