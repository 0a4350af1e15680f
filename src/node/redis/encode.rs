//! Requests as they go over the wire.
//!
//! # Implementation details
//!
//! A command is encoded once and shared by all nodes of the attempt. Only the generation differs between the nodes; it
//! is written with the command.
//!
//! A server takes much longer for many script calls than for one that does the work of all. Requests whose row has a
//! [`SharedCall`](crate::node::redis::table::SharedCall) can therefore share a call: each is granted or refused on its
//! own, as if it had been sent alone. The scripts read all keys by one `MGET` before the first write, so no key may come
//! twice in a call. A call for a single request would take longer than its own script, which is used instead.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::Duration;

use crate::node::redis::table::{Operation, PING, Part, Verb, number};
use crate::protocol::KeyNames;
use crate::protocol::admission::Generation;
use crate::protocol::message::{Command, Op, SharedOp};

/// The generation that a request for a vote names, so that it counts only in the memory that was admitted.
#[derive(Debug, Default)]
pub(crate) struct GenerationCheck {
    /// The key of the generation, if the restart guard is on.
    pub(super) key: Option<Arc<[u8]>>,
    /// The generation of the server on this connection.
    pub(super) generation: Option<Generation>,
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
    bytes: Vec<u8>,
    keys_end: usize,
    /// In a shared call: the end of its own arguments, and the beginning and the end of the common ones.
    shared: [usize; 3],
}

/// A health check.
pub(crate) static ENCODED_PING: EncodedCommand = EncodedCommand {
    operation: &PING,
    key_hash: None,
    asks_for_vote: false,
    counts: (0, 0),
    bytes: Vec::new(),
    keys_end: 0,
    shared: [0; 3],
};

impl EncodedCommand {
    pub(crate) fn new(command: &Command, notifies: bool, check: &GenerationCheck) -> Self {
        let Command { names, op, .. } = command;
        let operation = Operation::of(command, notifies, check.key.is_some());
        let mut bytes = Vec::with_capacity(BYTES);
        let mut keys = 0;
        for part in operation.keys {
            keys += part.put(command, notifies, &mut bytes);
        }
        let (keys_end, mut arguments, mut shared) = (bytes.len(), 0, [0; 3]);
        let bounds = operation.shared.as_ref();
        let bounds = bounds.map_or([0; 3], |call| {
            [call.own, call.common.start, call.common.end]
        });
        for (argument, place) in operation.arguments.iter().zip(1..) {
            arguments += argument.put(command, notifies, &mut bytes);
            for (_, end) in bounds
                .iter()
                .zip(&mut shared)
                .filter(|(bound, _)| **bound == place)
            {
                *end = bytes.len();
            }
        }
        let hash =
            |name: &KeyNames| BuildHasherDefault::<DefaultHasher>::default().hash_one(&name.lock);
        Self {
            operation,
            key_hash: match &**names {
                [name] => Some(hash(name)),
                _ => None,
            },
            asks_for_vote: op.is_vote(),
            counts: (keys, arguments),
            bytes,
            keys_end,
            shared,
        }
    }

    /// Returns whether the command can share a call with others like it.
    pub(super) fn is_shareable(&self, check: &GenerationCheck) -> bool {
        let shared = self.operation.shared.as_ref();
        shared.is_some_and(|call| !call.is_guarded || check.generation.is_some())
    }

    /// Returns whether two commands that can share calls can share the same one.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        std::ptr::eq(self.operation, other.operation) && self.common() == other.common()
    }

    /// Returns the length of its part of a shared call.
    pub(super) fn own_bytes(&self) -> usize {
        self.shared[0]
    }

    fn keys(&self) -> &[u8] {
        &self.bytes[..self.keys_end]
    }

    /// Returns the arguments that all commands of a shared call have in common.
    fn common(&self) -> &[u8] {
        &self.bytes[self.shared[1]..self.shared[2]]
    }
}

/// Appends the call for some commands, which are alike if there are several, to `output`.
pub(super) fn encode_call_into<'a>(
    commands: impl ExactSizeIterator<Item = &'a EncodedCommand> + Clone,
    check: &GenerationCheck,
    output: &mut Vec<u8>,
) {
    let count = commands.len();
    let Some(first) = commands.clone().next() else {
        return;
    };
    let of_vote = first.asks_for_vote;
    let key = check.key.as_deref().filter(|_| of_vote);
    let generation = check.generation.as_ref().filter(|_| of_vote);
    let generation = generation.map(|generation| generation.as_str().as_bytes());
    let (keys, arguments) = first.counts;
    let keys = count * keys + usize::from(key.is_some());
    let shared = first.operation.shared.as_ref().filter(|_| count > 1);
    let (verb, arguments) = match shared {
        Some(call) => {
            let common = call.common.len() + usize::from(of_vote);
            (&call.script, common + count * call.own)
        }
        None => {
            let arguments = arguments + usize::from(generation.is_some());
            (&first.operation.verb, arguments)
        }
    };
    // A script is called by a command, and told which of the words behind it are keys.
    let is_script = matches!(verb, Verb::Lua { .. });
    put_length(
        output,
        b'*',
        keys + arguments + if is_script { 3 } else { 1 },
    );
    if is_script {
        put_argument(output, b"EVALSHA");
    }
    put_argument(output, verb.word().as_bytes());
    if is_script {
        put_number(output, keys as u64);
    }
    commands
        .clone()
        .for_each(|command| output.extend(command.keys()));
    if let Some(key) = key {
        put_argument(output, key);
    }
    if shared.is_none() {
        output.extend(&first.bytes[first.keys_end..]);
        if let Some(generation) = generation {
            put_argument(output, generation);
        }
        return;
    }
    match first.common() {
        b"" => put_argument(output, b""),
        common => output.extend(common),
    }
    if of_vote {
        put_argument(output, generation.unwrap_or_default());
    }
    commands.for_each(|command| output.extend(&command.bytes[command.keys_end..command.shared[0]]));
}

impl Part {
    /// Appends the part, and returns how many keys or arguments it is.
    fn put(self, command: &Command, notifies: bool, output: &mut Vec<u8>) -> usize {
        let Command { names, owner, op } = command;
        let slots = || names.first().and_then(|name| name.slots.as_deref());
        match self {
            Self::Word(word) => put_argument(output, word.as_bytes()),
            Self::Owner => put_argument(output, owner.as_str().as_bytes()),
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
            Self::Notify if notifies => put_argument(output, b"1"),
            Self::Channels if notifies => {
                let channels = names.iter().map(KeyNames::channel);
                return channels
                    .map(|channel| put_argument(output, channel))
                    .count();
            }
            Self::Notify | Self::Channels => return 0,
            key => {
                let keys = names.iter().flat_map(|name| key.keys(name, op));
                return keys.map(|key| put_argument(output, key)).count();
            }
        }
        1
    }
}

/// Returns the times that an operation names, and zero for those that it does not.
fn times(op: &Op) -> (Duration, Duration) {
    match *op {
        Op::Acquire { ttl, retention, .. } | Op::Confirm { ttl, retention, .. } => (ttl, retention),
        Op::Shared(
            SharedOp::Acquire { ttl: time }
            | SharedOp::Confirm { ttl: time }
            | SharedOp::Announce { patience: time },
        )
        | Op::ReleaseAfter { left: time }
        | Op::Revoke { until: time, .. }
        | Op::Record {
            retention: time, ..
        }
        | Op::TopUp {
            retention: time, ..
        } => (time, Duration::ZERO),
        _ => (Duration::ZERO, Duration::ZERO),
    }
}

fn payload(op: &Op) -> &[u8] {
    match op {
        Op::Record { record, .. } | Op::TopUp { record, .. } => record.as_bytes(),
        Op::Revoke { holder, .. } => holder.as_bytes(),
        _ => b"",
    }
}

/// The size of an ordinary lock's command, or more.
const BYTES: usize = 384;

fn put_argument(output: &mut Vec<u8>, argument: &[u8]) {
    put_length(output, b'$', argument.len());
    output.extend(argument);
    output.extend(b"\r\n");
}

fn put_number(output: &mut Vec<u8>, number: u64) {
    put_argument(output, write_decimal(number, &mut [0; 20]));
}

/// Appends a duration, in milliseconds.
fn put_millis(output: &mut Vec<u8>, duration: Duration) {
    let millis = u64::try_from(duration.as_millis());
    put_number(output, millis.unwrap_or(u64::MAX));
}

fn put_length(output: &mut Vec<u8>, kind: u8, length: usize) {
    output.push(kind);
    match u8::try_from(length) {
        // Nearly all lengths are short, and a command has many.
        Ok(short @ 0..10) => output.push(b'0' + short),
        Ok(short @ 10..100) => output.extend([b'0' + short / 10, b'0' + short % 10]),
        _ => output.extend(write_decimal(length as u64, &mut [0; 20])),
    }
    output.extend(b"\r\n");
}

/// Writes the decimal digits of a number to the end of a buffer.
fn write_decimal(mut number: u64, buffer: &mut [u8; 20]) -> &[u8] {
    let mut from = buffer.len() - 1;
    buffer[from] = b'0';
    while number > 0 {
        buffer[from] = b'0' + (number % 10) as u8;
        number /= 10;
        from -= usize::from(number > 0);
    }
    &buffer[from..]
}

#[cfg(test)]
mod tests {
    use deadpool_redis::redis::Value;
    use tokio::time::Instant;

    use super::*;
    use crate::node::job::{Job, Packet};
    use crate::node::redis::socket::tests::parse_all;
    use crate::node::redis::table;
    use crate::node::votes::VoteReceiver;
    use crate::protocol::{LockKey, Namespace, OwnerToken};

    const TTL: Duration = Duration::from_secs(1);
    const RETENTION: Duration = Duration::from_secs(2);
    const GENERATION: &str = "r:100:999999:run";

    /// Returns a request of the owner with this number on a key of its own.
    fn request(number: u8, op: Op, notifies: bool) -> Job {
        let key = LockKey::from(format!("k{number}"));
        let names = Namespace::default().names(&key.into(), |_| [0; 32]);
        let command = Command {
            names: names.expect("the key is valid").into(),
            owner: OwnerToken::from_random([number; 16]),
            op,
        };
        let votes = VoteReceiver::new(&["n".into()].into());
        let packet = Packet::new(command, notifies, None);
        Job::new(Some(packet), votes.sender(0), Instant::now())
    }

    fn acquire(proposal: Option<u64>) -> Op {
        Op::Acquire {
            proposal,
            ttl: TTL,
            retention: RETENTION,
        }
    }

    fn confirm(token: u64) -> Op {
        Op::Confirm {
            token: Some(token),
            ttl: TTL,
            retention: RETENTION,
        }
    }

    fn encode(requests: &[Job], check: &GenerationCheck, output: &mut Vec<u8>) {
        let commands = requests.iter().map(|request| request.encoded(check));
        encode_call_into(commands, check, output);
    }

    fn arguments(requests: &[Job], check: &GenerationCheck) -> Vec<String> {
        let mut written = Vec::new();
        encode(requests, check, &mut written);
        let Value::Array(arguments) = parse_all(&written).remove(0) else {
            panic!("a command is an array");
        };
        let text = |argument| match argument {
            Value::BulkString(bytes) => String::from_utf8(bytes).expect("all of them are text"),
            other => panic!("no argument: {other:?}"),
        };
        arguments.into_iter().map(text).collect()
    }

    /// The restart guard off; on with a server whose generation is unknown; and with one that is known.
    fn checks() -> [GenerationCheck; 3] {
        let key = || Some(b"redlock:generation"[..].into());
        let check = |key, generation| GenerationCheck { key, generation };
        let known = Generation::parse(GENERATION);
        assert!(known.is_some());
        [check(None, None), check(key(), None), check(key(), known)]
    }

    #[test]
    fn calls_have_the_arguments_of_the_script_headers() {
        let [off, unknown, known] = &checks();
        let large = 1_763_659_999_000_003;
        let acquires = [acquire(Some(5)), acquire(Some(large))];
        let confirms = [confirm(5), confirm(large)];
        let unfenced = [acquire(None), acquire(None)];
        let releases = [Op::Release, Op::ReleaseExecuted];
        let (lock, check) = (&table::ACQUIRE, &table::CONFIRM);
        let (plain, release) = (&table::ACQUIRE_UNFENCED, &table::RELEASE);
        let without = "4 L1 F1 L2 F2 1000 2000 none O1 5 O2 1763659999000003";
        let guarded = "5 L1 F1 L2 F2 G 1000 2000 none O1 5 O2 1763659999000003";
        let compared = "5 L1 F1 L2 F2 G 1000 2000 generation O1 5 O2 1763659999000003";
        let cases = [
            (off, &acquires, false, lock, without),
            (unknown, &acquires, false, lock, guarded),
            (known, &acquires, false, lock, compared),
            (off, &confirms, false, check, without),
            (unknown, &confirms, false, check, guarded),
            (known, &confirms, false, check, compared),
            (
                known,
                &unfenced,
                false,
                plain,
                "3 L1 L2 G 1000 generation O1 O2",
            ),
            (off, &releases, false, release, "2 L1 L2 none O1 O2"),
            (known, &releases, false, release, "2 L1 L2 none O1 O2"),
            (known, &releases, true, release, "2 L1 L2 1 O1 O2"),
        ];
        for (check, ops, notifies, row, rest) in cases {
            let script = &row.shared.as_ref().expect("it can share a call").script;
            let [first, second] = ops.clone();
            let requests = [request(1, first, notifies), request(2, second, notifies)];
            let owners = [1, 2].map(|id| OwnerToken::from_random([id; 16]));
            let part = |word: &str| match word {
                "L1" => "redlock:{k1}".to_owned(),
                "F1" => "redlock:{k1}:fence".to_owned(),
                "L2" => "redlock:{k2}".to_owned(),
                "F2" => "redlock:{k2}:fence".to_owned(),
                "G" => "redlock:generation".to_owned(),
                "O1" => owners[0].as_str().to_owned(),
                "O2" => owners[1].as_str().to_owned(),
                "generation" => GENERATION.to_owned(),
                "none" => String::new(),
                number => number.to_owned(),
            };
            let mut expected = vec!["EVALSHA".to_owned(), script.word().to_owned()];
            expected.extend(rest.split(' ').map(part));
            assert_eq!(arguments(&requests, check), expected, "{ops:?}, {check:?}");
        }
    }

    /// A request may be in a call of each kind of check: its nodes share what is encoded.
    #[test]
    fn a_single_request_is_sent_by_its_own_script() {
        let ops = [acquire(Some(5)), acquire(None), confirm(5), Op::Release];
        for (op, check) in ops.iter().flat_map(|op| checks().map(|check| (op, check))) {
            let of = |number| request(number, op.clone(), true);
            let (alone, shared, other) = (of(1), of(1), of(2));
            let mut expected = Vec::new();
            encode(&[alone], &check, &mut expected);
            // As part of a call before.
            let requests = [shared, other];
            encode(&requests, &check, &mut Vec::new());
            let mut written = Vec::new();
            encode(&requests[..1], &check, &mut written);
            assert_eq!(written, expected, "{op:?}, {check:?}");
        }
    }

    #[test]
    fn a_call_of_64_requests_has_lengths_of_three_digits() {
        let check = &checks()[2];
        let requests: Vec<_> = (0..64)
            .map(|number| request(number, acquire(Some(5)), false))
            .collect();
        let sent = arguments(&requests, check);
        assert_eq!(sent.len(), 3 + 129 + 3 + 128);
        assert_eq!(sent[2], "129");
        assert_eq!(sent[3 + 2 * 63], "redlock:{k63}");
        assert_eq!(sent[3 + 128..][..2], ["redlock:generation", "1000"]);
        let last = OwnerToken::from_random([63; 16]);
        assert_eq!(sent[3 + 129 + 3 + 126..], [last.as_str(), "5"]);
    }

    #[test]
    fn decimals_and_lengths_are_written_as_the_standard_library_writes_them() {
        let tens = (0..20).map(|zeros| 10_u64.pow(zeros));
        let around = |ten: u64| [ten - 1, ten, ten + 1, ten.wrapping_mul(9)];
        for number in tens.flat_map(around).chain([0, u64::MAX]) {
            let written = write_decimal(number, &mut [b'x'; 20]).to_vec();
            assert_eq!(written, number.to_string().as_bytes());
        }
        for length in [0, 9, 10, 99, 100, 12_345] {
            let mut written = Vec::new();
            put_length(&mut written, b'$', length);
            assert_eq!(written, format!("${length}\r\n").as_bytes());
        }
    }
}
