//! The table of operations: what each is as a Redis command, and as it goes over the wire.
//!
//! An operation has a row for each command that it may be. A row names the script, the keys and the arguments behind
//! it, and the script by which several requests share a call. [`EncodedCommand`] and [`encode_call_into`] interpret it, and
//! [`load_all`] loads what it names; [`decode`](crate::node::redis::decode) reads the replies. What depends on no server
//! stands beside the operations: see [`Op::is_vote`].
//!
//! # Implementation details
//!
//! A command is encoded once and shared by all nodes of the attempt. Only the generation differs between the nodes; it
//! is written with the command.
//!
//! A server takes much longer for many script calls than for one that does the work of all. Requests whose row has a
//! [`SharedCall`] can therefore share a call: each is granted or refused on its own, as if it had been sent alone. The
//! scripts read all keys by one `MGET` before the first write, so no key may come twice in a call. A call for a single
//! request would take longer than its own script, which is used instead.

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use deadpool_redis::redis::{Pipeline, Script};
use smallvec::SmallVec;

use self::Part::{
    AllSlots, Channels, Count, Done, Fence, Intent, IntentRetention, Lock, Notify, Number,
    NumberOrZero, NumberedFence, Owner, Payload, Position, Readers, Retention, Slots, Time, Word,
    Writer,
};
use self::Verb::Plain;
use crate::protocol::KeyNames;
use crate::protocol::message::{Command, Op, SharedOp};

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
    /// A script and its SHA-1 hash, by which commands name it; and the same for servers in cluster mode.
    Lua(LazyLock<[(String, String); 2]>),
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
    /// The record, the mark of a holder, or a pattern of names.
    Payload,
    /// Where a scan goes on.
    Position,
    /// 1 to notify the subscribers, else left out.
    Notify,
    /// The channel of each lock to notify the subscribers, else left out.
    Channels,
}

macro_rules! lua {
    ($($file:literal),+) => {
        Verb::Lua(LazyLock::new(|| {
            scripts(concat!($(include_str!(concat!("scripts/", $file, ".lua"))),+))
        }))
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
        "confirm", lua!("once", "unrecorded", "confirm"),
        [Lock, Fence, Done], [Owner, NumberOrZero, Time, Retention];
    CONFIRM: (Op::Confirm { token: Some(_), .. }, [_], _) => "confirm", lua!("confirm"),
        [Lock, Fence], [Owner, Number, Time, Retention],
        SharedCall { script: lua!("batch", "confirm_batch"), own: 2, common: 2..4, is_guarded: false };
    CONFIRM_ALL: (Op::Confirm { .. }, _, _) => "confirm", lua!("confirm_all"),
        [Lock, NumberedFence], [Owner, Number, Time, Retention, Count];
    RELEASE_ONCE: (Op::Release, [KeyNames { intent: Some(_), .. }], _) =>
        "release", lua!("notify", "release_once"),
        [Lock, Intent], [Owner, Notify];
    RELEASE: (Op::Release | Op::ReleaseExecuted, [KeyNames { slots: None, .. }], _) =>
        "release", lua!("notify", "release"),
        [Lock], [Owner, Notify],
        SharedCall { script: lua!("release_batch"), own: 1, common: 1..2, is_guarded: false };
    // Of several keys, and of slots, whose releases have a channel of their own.
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
    // So many keys take a server about as long as the script of a lock, however many it has.
    SCAN: (Op::Scan { .. }, _, _) => "scan", Plain("SCAN"),
        [], [Position, Word("MATCH"), Payload, Word("COUNT"), Word("50"), Word("TYPE"), Word("string")];
    REVOKE: (Op::Revoke { .. }, _, _) => "revoke", lua!("notify", "revoke"),
        [Lock, Readers], [Payload, Time, Notify];
    PING: (Op::Ping, _, _) => "ping", Plain("PING"),
        [], [];
}

/// Reads a server's generation, and starts a new one if the server process has none.
pub(super) static ADMIT: Verb = lua!("admit");

impl Verb {
    /// Returns the command, or the hash of the script.
    pub(super) fn word(&self, in_cluster_mode: bool) -> &str {
        match self {
            Plain(command) => command,
            Self::Lua(scripts) => &scripts[usize::from(in_cluster_mode)].1,
        }
    }
}

/// Returns a script and its hash as servers load it, and as those in cluster mode do.
fn scripts(code: &str) -> [(String, String); 2] {
    ["", CLUSTER_MODE].map(|before| {
        let code = [before, code].concat();
        let hash = Script::new(&code).get_hash().to_owned();
        (code, hash)
    })
}

/// Returns the pipeline that loads all scripts, so that commands can name them by hash. Also used after a server has
/// forgotten them (`SCRIPT FLUSH`).
pub(super) fn load_all(in_cluster_mode: bool) -> Pipeline {
    let shared = TABLE.iter().filter_map(|row| row.shared.as_ref());
    let scripts = TABLE.iter().map(|row| &row.verb);
    let scripts = scripts.chain(shared.map(|call| &call.script));
    let mut pipeline = Pipeline::new();
    for script in scripts.chain([&ADMIT]) {
        if let Verb::Lua(scripts) = script {
            let (code, _) = &scripts[usize::from(in_cluster_mode)];
            pipeline.cmd("SCRIPT").arg("LOAD").arg(code).ignore();
        }
    }
    pipeline
}

/// What requests on a connection have beside their commands: the generation that a request for a vote names, so that it
/// counts only in the memory that was admitted; and where scripts find their keys.
#[derive(Debug, Default)]
#[allow(unreachable_pub, unnameable_types, reason = "a fuzz target gets it")]
pub struct GenerationCheck {
    /// The key of the generation, if the restart guard is on.
    pub(super) key: Option<Arc<[u8]>>,
    /// The generation of the server on this connection. Without the restart guard, it only has the run id of the process, if
    /// the server tells that, and is not sent.
    pub(super) generation: Option<Arc<str>>,
    /// Whether the server is in cluster mode, where a call with keys of several hash slots is refused: the keys of a script
    /// are then arguments, which `cluster_mode.lua` reads.
    pub(super) in_cluster_mode: bool,
}

/// A command as it goes over the wire, but for its beginning and the generation.
#[derive(Debug)]
pub(crate) struct EncodedCommand {
    pub(crate) operation: &'static Operation,
    /// The hash of its lock's name, which tells whether two commands may be on one key; `None` for several keys.
    pub(super) key_hash: Option<u64>,
    asks_for_vote: bool,
    /// The numbers of its keys and of its arguments.
    counts: (usize, usize),
    /// The keys, and behind them the arguments.
    bytes: SmallVec<[u8; BYTES]>,
    /// Its own arguments in a shared call, behind its keys.
    pub(super) own: Range<usize>,
    /// The arguments that all commands of a shared call have in common.
    common: Range<usize>,
}

impl EncodedCommand {
    pub(crate) fn new(command: &Command, notifies: bool, check: &GenerationCheck) -> Self {
        let Command { names, op, .. } = command;
        let operation = Operation::of(command, notifies, check.key.is_some());
        let (mut keys, mut arguments, mut ends) = (0, 0, [0; MAX_ARGUMENTS + 1]);
        let bytes = WRITTEN.with_borrow_mut(|bytes| {
            bytes.clear();
            for part in operation.keys {
                keys += part.put(command, notifies, bytes);
            }
            ends[0] = bytes.len();
            for (argument, place) in operation.arguments.iter().zip(1..) {
                arguments += argument.put(command, notifies, bytes);
                ends[place] = bytes.len();
            }
            match bytes.len() {
                ..=4096 => SmallVec::from_slice(bytes),
                // A large record takes the buffer along, which else would keep its size.
                _ => SmallVec::from_vec(std::mem::take(bytes).into()),
            }
        });
        let mut hasher = DefaultHasher::new();
        let shared = operation.shared.as_ref();
        let place = |arguments: Range<usize>| ends[arguments.start]..ends[arguments.end];
        Self {
            operation,
            key_hash: match &**names {
                [name] => {
                    hasher.write(&name.lock);
                    Some(hasher.finish())
                }
                _ => None,
            },
            asks_for_vote: op.is_vote(),
            counts: (keys, arguments),
            bytes,
            own: place(0..shared.map_or(0, |call| call.own)),
            common: place(shared.map_or(0..0, |call| call.common.clone())),
        }
    }

    /// Returns whether the command can share a call with others like it.
    pub(super) fn is_shareable(&self, check: &GenerationCheck) -> bool {
        let shared = self.operation.shared.as_ref();
        let is_compared = check.key.is_some() && check.generation.is_some();
        shared.is_some_and(|call| !call.is_guarded || is_compared)
    }

    /// Returns whether two commands that can share calls can share the same one.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        std::ptr::eq(self.operation, other.operation) && self.common() == other.common()
    }

    fn common(&self) -> &[u8] {
        &self.bytes[self.common.clone()]
    }
}

/// Appends the call for some commands, which are alike if there are several, to `output`.
pub(super) fn encode_call_into<'a>(
    commands: impl ExactSizeIterator<Item = &'a EncodedCommand> + Clone,
    check: &GenerationCheck,
    output: &mut BytesMut,
) {
    let count = commands.len();
    let Some(first) = commands.clone().next() else {
        return;
    };
    let of_vote = first.asks_for_vote;
    let key = check.key.as_deref().filter(|_| of_vote);
    let generation = key.and(check.generation.as_deref());
    let keys = count * first.counts.0 + usize::from(key.is_some());
    let shared = first.operation.shared.as_ref().filter(|_| count > 1);
    let (verb, arguments) = match shared {
        Some(call) => (&call.script, call.common.len() + count * call.own),
        None => (&first.operation.verb, first.counts.1),
    };
    // A script for several requests is always given one, which may be empty.
    let generation = match shared {
        Some(_) if of_vote => Some(generation.unwrap_or_default()),
        _ => generation,
    };
    let arguments = arguments + usize::from(generation.is_some());
    // A script is called by a command, and told which of the words behind it are keys.
    let is_script = matches!(verb, Verb::Lua(_));
    let undeclared = is_script && check.in_cluster_mode;
    let words = if is_script { 3 } else { 1 } + usize::from(undeclared);
    put_length(output, b'*', keys + arguments + words);
    if is_script {
        put_argument(output, b"EVALSHA");
    }
    put_argument(output, verb.word(undeclared).as_bytes());
    if undeclared {
        put_number(output, 0);
    }
    if is_script {
        put_number(output, keys as u64);
    }
    for command in commands.clone() {
        output.extend_from_slice(&command.bytes[..command.own.start]);
    }
    if let Some(key) = key {
        put_argument(output, key);
    }
    match shared.map(|_| first.common()) {
        None => output.extend_from_slice(&first.bytes[first.own.start..]),
        Some(b"") => put_argument(output, b""),
        Some(common) => output.extend_from_slice(common),
    }
    if let Some(generation) = generation {
        put_argument(output, generation.as_bytes());
    }
    for command in commands.filter(|_| shared.is_some()) {
        output.extend_from_slice(&command.bytes[command.own.clone()]);
    }
}

impl Part {
    /// Returns the keys of one lock that this names, but for the fence.
    fn keys(self, name: &KeyNames) -> &[Arc<[u8]>] {
        let one = match self {
            Lock => Some(&name.lock),
            AllSlots => return name.slots.as_ref().map_or(&[], |slots| &slots.locks),
            Readers => name.shared.as_ref().map(|shared| &shared.readers),
            Writer => name.shared.as_ref().map(|shared| &shared.writer),
            Done => name.record.as_ref(),
            Intent => name.intent.as_ref().map(|intent| &intent.name),
            _ => None,
        };
        one.map_or(&[], std::slice::from_ref)
    }

    /// Appends the part, and returns how many keys or arguments it is.
    fn put(self, command: &Command, notifies: bool, output: &mut BytesMut) -> usize {
        let Command { names, owner, op } = command;
        let slots = || names.first().and_then(|name| name.slots.as_deref());
        match self {
            Self::Word(word) => put_argument(output, word.as_bytes()),
            Self::Owner => {
                let (digits, shown) = (owner.digits(), owner.shown_value());
                put_parts(output, &[digits.as_flattened(), shown.as_bytes()]);
            }
            Self::Number => match number(op) {
                Some(number) => put_number(output, number),
                None => put_argument(output, b""),
            },
            Self::NumberOrZero => put_number(output, number(op).unwrap_or(0)),
            Self::Time => put_millis(output, times(op).0),
            Self::Retention => put_millis(output, times(op).1),
            Self::IntentRetention => match names.first().and_then(KeyNames::intent_retention) {
                Some(retention) => put_millis(output, retention),
                None => put_argument(output, b""),
            },
            Self::Count => put_number(output, names.len() as u64),
            Self::Slots => put_number(output, slots().map_or(0, |slots| slots.locks.len() as u64)),
            Self::Payload => put_argument(output, payload(op)),
            Self::Position => match op {
                Op::Scan { position, .. } if !position.is_empty() => put_argument(output, position),
                _ => put_number(output, 0),
            },
            Self::Notify if notifies => put_argument(output, b"1"),
            Self::Channels if notifies => {
                let channels = names.iter().map(KeyNames::channel);
                return put_all(output, channels);
            }
            Self::NumberedFence if number(op).is_none() => return 0,
            Self::Notify | Self::Channels => return 0,
            Self::Fence | Self::NumberedFence => {
                let fences = names.iter().map(KeyNames::parts_of_fence);
                return fences.map(|parts| put_parts(output, &parts)).count();
            }
            key => {
                let keys = names.iter().flat_map(|name| key.keys(name));
                return put_all(output, keys);
            }
        }
        1
    }
}

/// Returns the number that an operation asks for, which a server that grants or confirms it has afterwards.
pub(super) fn number(op: &Op) -> Option<u64> {
    match op {
        Op::Acquire { proposal, .. } => *proposal,
        Op::Confirm { token, .. } => *token,
        _ => None,
    }
}

/// Returns the times that an operation names, and zero for those that it does not.
fn times(op: &Op) -> (Duration, Duration) {
    let time = match *op {
        Op::Acquire { ttl, retention, .. } | Op::Confirm { ttl, retention, .. } => {
            return (ttl, retention);
        }
        Op::Shared(SharedOp::Acquire { ttl } | SharedOp::Confirm { ttl }) => ttl,
        Op::Shared(SharedOp::Announce { patience }) => patience,
        Op::ReleaseAfter { left } => left,
        Op::Revoke { until, .. } => until,
        Op::Record { retention, .. } | Op::TopUp { retention, .. } => retention,
        _ => Duration::ZERO,
    };
    (time, Duration::ZERO)
}

fn payload(op: &Op) -> &[u8] {
    match op {
        Op::Record { record, .. } | Op::TopUp { record, .. } => record.as_bytes(),
        Op::Revoke { holder, .. } => holder.as_bytes(),
        Op::Scan { pattern, .. } => pattern,
        _ => b"",
    }
}

/// The beginning of scripts in cluster mode. Dragonfly, which can emulate it, refuses undeclared keys without the first line; for
/// others it is a comment.
const CLUSTER_MODE: &str = concat!(
    "--!df flags=allow-undeclared-keys\n",
    include_str!("scripts/cluster_mode.lua")
);

/// The most arguments of an operation.
const MAX_ARGUMENTS: usize = 7;

/// The size of an ordinary lock's command, for which the command has room.
const BYTES: usize = 224;

thread_local! {
    /// Where a command is written before its size is known.
    static WRITTEN: RefCell<BytesMut> = RefCell::default();
}

fn put_argument(output: &mut BytesMut, argument: &[u8]) {
    put_parts(output, &[argument]);
}

/// Appends an argument that consists of these parts.
fn put_parts(output: &mut BytesMut, parts: &[&[u8]]) {
    put_length(output, b'$', parts.iter().map(|part| part.len()).sum());
    parts.iter().for_each(|part| output.extend_from_slice(part));
    output.extend_from_slice(b"\r\n");
}

/// Appends arguments, and returns how many they are.
fn put_all<'a>(output: &mut BytesMut, all: impl Iterator<Item = &'a Arc<[u8]>>) -> usize {
    all.map(|argument| put_argument(output, argument)).count()
}

fn put_number(output: &mut BytesMut, number: u64) {
    put_argument(output, itoa::Buffer::new().format(number).as_bytes());
}

/// Appends a duration, in milliseconds.
fn put_millis(output: &mut BytesMut, duration: Duration) {
    let millis = u64::try_from(duration.as_millis());
    put_number(output, millis.unwrap_or(u64::MAX));
}

fn put_length(output: &mut BytesMut, kind: u8, length: usize) {
    output.put_u8(kind);
    match u8::try_from(length) {
        // Nearly all lengths are short, and a command has many.
        Ok(short @ 0..10) => output.put_u8(b'0' + short),
        Ok(short @ 10..100) => output.extend_from_slice(&[b'0' + short / 10, b'0' + short % 10]),
        _ => output.extend_from_slice(itoa::Buffer::new().format(length).as_bytes()),
    }
    output.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests;
