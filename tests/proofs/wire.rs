//! Requests as the headers of the scripts describe them, and a real server beside the reference node.

use std::sync::Arc;
use std::time::Duration;

use support::Reply::{Array, Bulk, Int};
use support::{self, ScriptNode, ms, secs};
use tokio::time::Instant;
use tower_redlock::protocol::admission::Generation;
use tower_redlock::protocol::message::{Command, HolderMark, KeyState, Op, Reply, Seen, SharedOp};
use tower_redlock::protocol::{KeyNames, Record, Shown, Store};

/// All times are multiples of this, so that a difference in an expiry is no matter of speed.
pub(crate) const STEP: Duration = secs(100);

/// By how much expiries may differ because requests take a while.
pub(crate) const TOLERANCE: Duration = secs(20);

pub(crate) const RETENTION: Duration = secs(100_000);

pub(crate) const GENERATION: &str = "redlock:generation";

macro_rules! script {
    ($($file:literal),+) => {
        concat!($(include_str!(concat!("../../src/node/redis/scripts/", $file, ".lua"))),+)
    };
}

/// The scripts as the node loads them.
const SCRIPTS: [(&str, &str); 24] = [
    ("acquire", script!("acquire")),
    ("acquire_all", script!("acquire_all")),
    ("acquire_batch", script!("batch", "acquire_batch")),
    ("acquire_batch_unfenced", script!("acquire_batch_unfenced")),
    ("acquire_once", script!("once", "acquire_once")),
    ("acquire_shared", script!("shared", "acquire_shared")),
    ("admit", script!("admit")),
    ("announce", script!("shared", "announce")),
    ("confirm", script!("confirm")),
    ("confirm_all", script!("confirm_all")),
    ("confirm_batch", script!("batch", "confirm_batch")),
    ("confirm_once", script!("once", "unrecorded", "confirm")),
    ("confirm_shared", script!("shared", "confirm_shared")),
    ("inspect", script!("inspect")),
    ("look", script!("once", "look")),
    ("record", script!("notify", "record")),
    ("release", script!("notify", "release")),
    ("release_after", script!("notify", "release_after")),
    ("release_batch", script!("release_batch")),
    ("release_once", script!("notify", "release_once")),
    (
        "release_shared",
        script!("shared", "notify", "release_shared"),
    ),
    ("revoke", script!("notify", "revoke")),
    ("top_up", script!("top_up")),
    ("withdraw", script!("withdraw")),
];

/// Starts a real server with the scripts.
pub(crate) fn start_node() -> ScriptNode {
    ScriptNode::start(&SCRIPTS.map(|(_, code)| code))
}

fn place_of(script: &str) -> usize {
    let place = SCRIPTS.iter().position(|(name, _)| *name == script);
    place.unwrap_or_else(|| panic!("no script {script}"))
}

/// Runs a script by its name; an error is what the server said.
#[track_caller]
pub(crate) fn eval(
    node: &mut ScriptNode,
    script: &str,
    keys: &[&[u8]],
    args: &[&[u8]],
) -> Result<support::Reply, String> {
    node.eval(place_of(script), keys, args)
}

/// Sends a request, by the scripts for one key or by those for several. An error is what the server said, or that there is
/// something under the name of the record that is none.
pub(crate) fn send(
    node: &mut ScriptNode,
    command: &Command,
    as_set: bool,
) -> Result<Reply, String> {
    let reply = send_raw(node, command, as_set, None)?;
    decode(command, &reply)
}

/// Sends a request like [`send`], also in the name of a client that was told a generation.
pub(crate) fn send_raw(
    node: &mut ScriptNode,
    command: &Command,
    as_set: bool,
    known: Option<&Generation>,
) -> Result<support::Reply, String> {
    let Command { names, owner, op } = command;
    let keys = |part: fn(&KeyNames) -> Option<&Arc<[u8]>>| {
        let keys = names.iter().filter_map(part);
        keys.map(|key| &**key).collect::<Vec<&[u8]>>()
    };
    let locks = keys(|name| Some(&name.lock));
    let fences: Vec<_> = names.iter().map(KeyNames::fence).collect();
    let mut fences: Vec<&[u8]> = fences.iter().map(|fence| &**fence).collect();
    let records = keys(|name| name.record.as_ref());
    let intents = keys(|name| Some(&name.intent.as_ref()?.name));
    let readers = keys(|name| Some(&name.shared.as_ref()?.readers));
    let writers = keys(|name| Some(&name.shared.as_ref()?.writer));
    let slots = names.iter().filter_map(|name| name.slots.as_deref());
    let slots = slots.flat_map(|slots| &slots.locks);
    let slots: Vec<&[u8]> = slots.map(|slot| &**slot).collect();
    let as_set = as_set || names.len() > 1 || !slots.is_empty();
    let is_recorded = !records.is_empty();

    let number = |number: usize| number.to_string().into_bytes();
    let millis = |time: &Duration| time.as_millis().to_string().into_bytes();
    let (owner, count) = (owner.to_value().into_bytes(), number(names.len()));
    let fence = number_of(op).map_or_else(Vec::new, |number| number.to_string().into_bytes());
    let (script, mut keys, mut args) = match op {
        Op::Acquire { ttl, retention, .. } | Op::Confirm { ttl, retention, .. } => {
            let is_acquire = matches!(op, Op::Acquire { .. });
            if fence.is_empty() {
                fences.clear();
            }
            let mut keys = [locks, fences, records].concat();
            let mut args = vec![owner, fence, millis(ttl), millis(retention)];
            if is_recorded && is_acquire {
                keys.extend(intents);
                let intent = names[0].intent_retention();
                args.push(intent.as_ref().map(millis).unwrap_or_default());
            } else if as_set && !is_recorded {
                args.push(count);
                if is_acquire {
                    args.push(number(slots.len() / names.len()));
                    keys.extend(slots);
                }
            }
            let script = match (is_acquire, is_recorded, as_set) {
                (true, true, _) => "acquire_once",
                (true, _, true) => "acquire_all",
                (true, ..) => "acquire",
                (false, true, _) => "confirm_once",
                (false, _, true) => "confirm_all",
                (false, ..) => "confirm",
            };
            (script, keys, args)
        }
        Op::Release if !intents.is_empty() => {
            ("release_once", [locks, intents].concat(), vec![owner])
        }
        Op::Release | Op::ReleaseExecuted if as_set => {
            ("release_after", locks, vec![owner, number(0)])
        }
        Op::Release | Op::ReleaseExecuted => ("release", locks, vec![owner]),
        Op::ReleaseAfter { left } => ("release_after", locks, vec![owner, millis(left)]),
        Op::Shared(SharedOp::Acquire { ttl }) => {
            let keys = [locks, readers, writers].concat();
            ("acquire_shared", keys, vec![owner, millis(ttl), count])
        }
        Op::Shared(SharedOp::Confirm { ttl }) => {
            let keys = [locks, readers].concat();
            ("confirm_shared", keys, vec![owner, millis(ttl), count])
        }
        Op::Shared(SharedOp::Release) => ("release_shared", [locks, readers].concat(), vec![owner]),
        Op::Shared(SharedOp::Announce { patience }) => {
            let keys = [locks, writers].concat();
            ("announce", keys, vec![owner, millis(patience)])
        }
        Op::Shared(SharedOp::Withdraw) => ("withdraw", writers, vec![owner]),
        Op::Record { record, retention } => {
            let keys = [locks, fences, records, intents].concat();
            let record = record.as_bytes().to_vec();
            ("record", keys, vec![owner, record, millis(retention)])
        }
        Op::TopUp { record, retention } => {
            let record = record.as_bytes().to_vec();
            let args = vec![record, millis(retention)];
            ("top_up", [records, intents].concat(), args)
        }
        Op::Look => ("look", records, vec![]),
        Op::Fetch => {
            return match node.call(&["GET", std::str::from_utf8(records[0]).unwrap()]) {
                support::Reply::Error(error) => Err(error),
                reply => Ok(reply),
            };
        }
        Op::Inspect => {
            let keys = [locks, readers, fences, records].concat();
            ("inspect", keys, vec![])
        }
        Op::Revoke { holder, until } => {
            let args = vec![holder.as_bytes().to_vec(), millis(until)];
            ("revoke", [locks, readers].concat(), args)
        }
        Op::Scan { .. } | Op::Ping => panic!("{op:?} has no script"),
    };
    if let Some(known) = known.filter(|_| matches!(op, Op::Acquire { .. } | Op::Confirm { .. })) {
        keys.push(GENERATION.as_bytes());
        args.push(known.as_str().as_bytes().to_vec());
    }
    let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
    eval(node, script, &keys, &args)
}

/// Returns the number that a request asks for.
pub(crate) fn number_of(op: &Op) -> Option<u64> {
    match *op {
        Op::Acquire { proposal, .. } => proposal,
        Op::Confirm { token, .. } => token,
        _ => None,
    }
}

/// Reads the answer to a request; an error says that a record is none.
pub(crate) fn decode(command: &Command, reply: &support::Reply) -> Result<Reply, String> {
    let op = &command.op;
    let left = |pttl: &i64| u64::try_from(*pttl).ok().map(Duration::from_millis);
    let record = |bytes: &[u8]| Record::from_bytes(bytes.into()).ok_or("no record");
    let has_slots = command.names.iter().any(|name| name.slots.is_some());
    let parts = match (op, reply) {
        (Op::Fetch, Bulk(Some(bytes))) => return Ok(Reply::Whole(record(bytes)?)),
        (Op::Fetch, Bulk(None)) => return Ok(Reply::NotDone),
        (Op::Acquire { .. } | Op::Shared(SharedOp::Acquire { .. }), Int(fence)) => {
            return Ok(Reply::Granted(u64::try_from(*fence).unwrap()));
        }
        (Op::Confirm { .. } | Op::Shared(SharedOp::Confirm { .. }), Int(fence)) => {
            return Ok(Reply::At(u64::try_from(*fence).unwrap()));
        }
        (Op::Shared(SharedOp::Announce { .. }), Int(0)) => return Ok(Reply::Released),
        // What the owner does not hold.
        (op, Int(-3)) if op.is_release() => return Ok(Reply::Lost),
        (op, Int(_)) if op.is_release() => return Ok(Reply::Released),
        (_, Array(Some(parts))) => parts.as_slice(),
        _ => panic!("{op:?} is answered {reply:?}"),
    };
    Ok(match (op, parts) {
        (Op::Acquire { .. }, [Int(0), Int(pttl), Int(1)]) => Reply::HeldShared {
            expires_in: left(pttl),
        },
        (Op::Acquire { .. }, [Int(0), Int(pttl), Bulk(Some(digits))]) if has_slots => {
            let digits = digits.iter().rev();
            Reply::HeldSlot {
                expires_in: left(pttl),
                free: digits.fold(0, |free, digit| 2 * free + u64::from(*digit == b'1')),
            }
        }
        (
            Op::Acquire { .. } | Op::Shared(SharedOp::Acquire { .. }),
            [Int(0), Int(pttl), Bulk(Some(shown))],
        ) => Reply::Held {
            expires_in: left(pttl),
            shown: Shown::parse(shown).map(Arc::new),
        },
        (Op::Acquire { .. }, [Int(2)]) => Reply::Overflow,
        (Op::Acquire { .. } | Op::Confirm { .. }, [Int(3)]) => Reply::Amnesia,
        (
            Op::Acquire { .. }
            | Op::Confirm { .. }
            | Op::Record { .. }
            | Op::TopUp { .. }
            | Op::Look,
            [Int(4), Bulk(Some(bytes)), Int(pttl)],
        ) => Reply::Done {
            record: record(bytes)?,
            expires_in: left(pttl).unwrap_or_default(),
        },
        (Op::Acquire { .. }, [Int(5)]) => Reply::Intended,
        (
            Op::Confirm { .. } | Op::Shared(SharedOp::Confirm { .. }) | Op::Record { .. },
            [Int(0)],
        ) => Reply::Lost,
        (Op::Look, [Int(0)]) => Reply::NotDone,
        (Op::Revoke { .. }, [Int(-1)]) => Reply::TooLate,
        (Op::Revoke { .. }, [Int(was_held)]) => Reply::Revoked {
            was_held: *was_held == 1,
        },
        (
            Op::Inspect,
            [
                Int(is_held),
                Int(pttl),
                Int(readers),
                Int(fence),
                Int(records),
                Int(at),
                Bulk(Some(mark)),
                Array(Some(holders)),
            ],
        ) => Reply::Seen(Box::new(Seen {
            state: match (is_held, usize::try_from(*readers)) {
                (0, _) => KeyState::Free,
                (_, Ok(readers)) => KeyState::Shared {
                    readers,
                    left: left(pttl),
                },
                _ => KeyState::Held { left: left(pttl) },
            },
            fence: u64::try_from(*fence).ok(),
            is_recorded: *records > 0,
            at: ms(u64::try_from(*at).unwrap()),
            mark: (!mark.is_empty()).then(|| HolderMark::from_bytes(mark)),
            holders: holders
                .iter()
                .filter_map(|shown| Shown::parse(shown.as_str()?.as_bytes())?.holder)
                .collect(),
        })),
        _ => panic!("{op:?} is answered {reply:?}"),
    })
}

/// Returns an answer to a request for so many keys without that in which two nodes differ: times are rounded, because
/// requests take a while.
pub(crate) fn rounded(keys: usize, reply: &Reply) -> Reply {
    let round = |left: &mut Duration| {
        let steps = (*left + STEP / 2).as_secs() / STEP.as_secs();
        *left = STEP * u32::try_from(steps).unwrap();
    };
    let mut reply = reply.clone();
    match &mut reply {
        Reply::Held { expires_in, shown } => {
            expires_in.iter_mut().for_each(round);
            // Of several keys, either holder may be the last by a moment.
            shown.take_if(|_| keys > 1);
        }
        Reply::HeldShared { expires_in } | Reply::HeldSlot { expires_in, .. } => {
            expires_in.iter_mut().for_each(round);
        }
        Reply::Done { expires_in, .. } => round(expires_in),
        Reply::Seen(seen) => {
            // Each node marks holders in its own way, and has an order and a clock of its own.
            seen.mark = seen.mark.take().map(|_| HolderMark::from_bytes(b"some"));
            seen.holders.sort();
            seen.at = Duration::ZERO;
            if let KeyState::Held { left } | KeyState::Shared { left, .. } = &mut seen.state {
                left.iter_mut().for_each(round);
            }
        }
        _ => {}
    }
    reply
}

/// Brings every key of a server nearer to its end, and the readers, which have no expiry of their own.
pub(crate) fn age(node: &mut ScriptNode, time: Duration) {
    let millis = i64::try_from(time.as_millis()).unwrap();
    for readers in node.server.keys("*:readers") {
        let members = node.call(&["ZRANGE", &readers, "0", "-1"]);
        for member in members.as_array().unwrap() {
            let back = (-millis).to_string();
            node.call(&["ZINCRBY", &readers, &back, member.as_str().unwrap()]);
        }
    }
    for name in node.server.keys("*") {
        match node.call(&["PTTL", &name]).as_int().unwrap() {
            // What has no end has none later either.
            -1 => continue,
            left if left <= millis => node.call(&["DEL", &name]),
            left => node.call(&["PEXPIRE", &name, &(left - millis).to_string()]),
        };
    }
}

pub(crate) fn text(name: &[u8]) -> String {
    String::from_utf8(name.to_vec()).unwrap()
}

/// The two nodes side by side. Time passes on both by as much as a test says.
pub(crate) struct Pair {
    pub(crate) node: ScriptNode,
    pub(crate) store: Store,
    epoch: Instant,
    passed: Duration,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self {
            node: start_node(),
            store: Store::new(),
            epoch: Instant::now(),
            passed: Duration::ZERO,
        }
    }

    /// Lets a time pass that is a multiple of [`STEP`].
    pub(crate) fn pass(&mut self, time: Duration) {
        age(&mut self.node, time);
        self.passed += time;
    }

    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed() + self.passed
    }

    pub(crate) fn forget(&mut self) {
        self.node.call(&["FLUSHALL"]);
        self.store = Store::new();
    }

    /// Asks both; panics if they do not answer the same.
    #[track_caller]
    pub(crate) fn ask(&mut self, command: &Command, what: &str) -> Reply {
        self.ask_as(command, false, what)
    }

    /// Asks both, also for one key by the scripts for several.
    #[track_caller]
    pub(crate) fn ask_as(&mut self, command: &Command, as_set: bool, what: &str) -> Reply {
        let theirs = send(&mut self.node, command, as_set).unwrap();
        let ours = self.store.apply(command, self.now());
        assert_same(command, &ours, &theirs, what);
        theirs
    }

    /// Asks both in the name of a client that was told a generation.
    #[track_caller]
    pub(crate) fn ask_in(&mut self, known: &Generation, command: &Command, what: &str) -> Reply {
        let theirs = send_raw(&mut self.node, command, false, Some(known)).unwrap();
        let theirs = decode(command, &theirs).unwrap();
        let now = self.now();
        let ours = self.store.apply_in(known, command, now);
        assert_same(command, &ours, &theirs, what);
        theirs
    }
}

/// Compares the answer of the reference node with that of the real one.
#[track_caller]
pub(crate) fn assert_same(command: &Command, ours: &Reply, theirs: &Reply, what: &str) {
    let keys = command.names.len();
    assert_eq!(
        rounded(keys, ours),
        rounded(keys, theirs),
        "{what}: {command:?}\nreference: {ours:?}\nscript: {theirs:?}"
    );
}
