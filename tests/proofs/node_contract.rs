//! The Redis node mirrors the reference node: the same requests, sent as scripts to a real server and
//! applied to `protocol::Store`, get the same answers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use support::{Random, ScriptNode, assert_matches, ms, secs};
use tokio::time::Instant;
use tower_redlock::FencingToken;
use tower_redlock::protocol::admission::Generation;
use tower_redlock::protocol::message::{Command, Op, Reply};
use tower_redlock::protocol::{KeyNames, LockKeys, Namespace, OwnerToken, Shown, Store, holder};

/// All times are multiples of this, so that a difference in an expiry is no matter of speed.
pub(crate) const STEP: Duration = secs(100);
pub(crate) const TOLERANCE: Duration = secs(20);

const RETENTION: Duration = secs(100_000);

/// The scripts as the node loads them; the first six by the kind of request, for one key and for several.
const SCRIPTS: [&str; 11] = [
    include_str!("../../src/node/redis/scripts/acquire.lua"),
    include_str!("../../src/node/redis/scripts/confirm.lua"),
    include_str!("../../src/node/redis/scripts/release.lua"),
    include_str!("../../src/node/redis/scripts/acquire_all.lua"),
    include_str!("../../src/node/redis/scripts/confirm_all.lua"),
    include_str!("../../src/node/redis/scripts/release_all.lua"),
    include_str!("../../src/node/redis/scripts/admit.lua"),
    concat!(
        include_str!("../../src/node/redis/scripts/batch.lua"),
        include_str!("../../src/node/redis/scripts/acquire_batch.lua")
    ),
    concat!(
        include_str!("../../src/node/redis/scripts/batch.lua"),
        include_str!("../../src/node/redis/scripts/confirm_batch.lua")
    ),
    include_str!("../../src/node/redis/scripts/release_batch.lua"),
    include_str!("../../src/node/redis/scripts/acquire_batch_unfenced.lua"),
];

/// Starts a real server with the scripts, which is spoken to as the headers of the scripts say.
pub(crate) fn start_node() -> ScriptNode {
    ScriptNode::start(&SCRIPTS)
}

/// Sends a request, by the scripts for one key or by those for several.
///
/// An error is what the server said.
pub(crate) fn send(
    node: &mut ScriptNode,
    command: &Command,
    as_set: bool,
) -> Result<Reply, String> {
    let Command { names, owner, op } = command;
    assert!(as_set || names.len() == 1);
    let (script, number, times) = match *op {
        Op::Acquire {
            proposal,
            ttl,
            retention,
        } => (0, Some(proposal), vec![ttl, retention]),
        Op::Confirm {
            token,
            ttl,
            retention,
        } => (1, Some(token), vec![ttl, retention]),
        Op::Release => (2, None, vec![]),
        ref op => panic!("{op:?} is for keys that keep records"),
    };
    let mut keys: Vec<&[u8]> = names.iter().map(|name| &*name.lock).collect();
    if number.flatten().is_some() {
        keys.extend(names.iter().map(|name| &*name.fence));
    }
    let mut args = vec![owner.to_value()];
    args.extend(number.map(|number| number.map_or_else(String::new, |n| n.to_string())));
    args.extend(times.iter().map(|time| time.as_millis().to_string()));
    if as_set && number.is_some() {
        args.push(names.len().to_string());
        if matches!(op, Op::Acquire { .. }) {
            args.push("0".into());
        }
    }
    let args: Vec<&[u8]> = args.iter().map(|arg| arg.as_bytes()).collect();
    let reply = node.eval(script + if as_set { 3 } else { 0 }, &keys, &args)?;
    Ok(decode(op, &reply))
}

/// The answer to the release of a lock that the owner does not hold.
pub(crate) const NOT_HELD: i64 = -3;

pub(crate) fn decode(op: &Op, reply: &support::Reply) -> Reply {
    if let Some(number) = reply.as_int() {
        let fence = || u64::try_from(number).unwrap();
        return match op {
            Op::Acquire { .. } => Reply::Granted(fence()),
            Op::Confirm { .. } => Reply::At(fence()),
            Op::Release if number == NOT_HELD => Reply::Lost,
            Op::Release => Reply::Released,
            _ => panic!("{op:?} is answered {reply:?}"),
        };
    }
    let parts = reply.as_array().unwrap();
    let kind = parts[0].as_int().unwrap();
    match (op, kind, parts.len()) {
        (Op::Acquire { .. }, 0, 3) if parts[2].as_int().is_none() => held(parts),
        (Op::Acquire { .. }, 0, 3) => Reply::HeldShared {
            expires_in: u64::try_from(parts[1].as_int().unwrap())
                .ok()
                .map(Duration::from_millis),
        },
        (Op::Acquire { .. }, 2, 1) => Reply::Overflow,
        (Op::Acquire { .. } | Op::Confirm { .. }, 3, 1) => Reply::Amnesia,
        (Op::Confirm { .. }, 0, 1) => Reply::Lost,
        _ => panic!("{op:?} is answered {reply:?}"),
    }
}

/// Reads the refusal of an owner that holds the key alone.
pub(crate) fn held(parts: &[support::Reply]) -> Reply {
    let expires_in = u64::try_from(parts[1].as_int().unwrap()).ok();
    let shown = Shown::parse(parts[2].as_str().unwrap().as_bytes());
    Reply::Held {
        expires_in: expires_in.map(Duration::from_millis),
        shown: shown.map(Arc::new),
    }
}

/// Returns whether both nodes answered a request for so many keys the same, times within the tolerance. Of several keys,
/// either holder may be the last by a moment.
pub(crate) fn are_same(keys: usize, ours: &Reply, theirs: &Reply) -> bool {
    match (ours, theirs) {
        (
            Reply::Held {
                expires_in: Some(ours),
                shown: our,
            },
            Reply::Held {
                expires_in: Some(theirs),
                shown: their,
            },
        ) => (keys > 1 || our == their) && ours.abs_diff(*theirs) < TOLERANCE,
        (
            Reply::HeldShared {
                expires_in: Some(ours),
            },
            Reply::HeldShared {
                expires_in: Some(theirs),
            },
        ) => ours.abs_diff(*theirs) < TOLERANCE,
        (ours, theirs) => ours == theirs,
    }
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

pub(crate) fn names(keys: &[&str]) -> Arc<[KeyNames]> {
    let keys = LockKeys::from_iter(keys.iter().copied());
    Namespace::default().names(&keys, |_| [0; 32]).unwrap()
}

/// Every other one shows who it is.
pub(crate) fn owner(id: u8) -> OwnerToken {
    let holder = holder::parse(format!("{id} host/{id}\ta note").as_bytes());
    let holder = holder.filter(|_| id % 2 == 1);
    OwnerToken::showing([id; 16], Shown::new(None, holder))
}

pub(crate) fn command(keys: &[&str], id: u8, op: Op) -> Command {
    Command {
        names: names(keys),
        owner: owner(id),
        op,
    }
}

pub(crate) fn acquire(proposal: u64, ttl: Duration) -> Op {
    Op::Acquire {
        proposal: Some(proposal),
        ttl,
        retention: RETENTION,
    }
}

pub(crate) fn confirm(token: u64, ttl: Duration) -> Op {
    Op::Confirm {
        token: Some(token),
        ttl,
        retention: RETENTION,
    }
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
        Self::of(start_node())
    }

    pub(crate) fn of(node: ScriptNode) -> Self {
        Self {
            node,
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
    pub(crate) fn ask(&mut self, command: &Command, as_set: bool, what: &str) -> Reply {
        let theirs = send(&mut self.node, command, as_set).unwrap();
        let ours = self.store.apply(command, self.now());
        assert!(
            are_same(command.names.len(), &ours, &theirs),
            "{what}: {command:?}\nreference: {ours:?}\nscript: {theirs:?}"
        );
        theirs
    }
}

/// Sends random requests of several owners for keys and sets of keys to both nodes.
fn compare(seed: u64, first_number: u64, fencing: bool) {
    let mut pair = Pair::new();
    let mut random = Random(seed);
    let mut seen = BTreeSet::new();
    for round in 0..3 {
        pair.forget();
        let mut last_number = first_number;
        for step in 0..250 {
            let what = format!("seed {seed}, round {round}, step {step}");
            let id = u8::try_from(random.below(3)).unwrap();
            let keys = random.one_of::<&[&str]>(&[
                &["x"],
                &["y"],
                &["z"],
                &["x", "y"],
                &["y", "z"],
                &["x", "y", "z"],
            ]);
            // Without fencing, the node asks for single keys with plain commands or as sets.
            let as_set = keys.len() > 1 || !fencing || random.below(4) == 0;
            let ttl = STEP * u32::try_from(1 + random.below(9)).unwrap();
            // A fence outlives the locks under it.
            let retention = STEP * u32::try_from(10 + random.below(5)).unwrap();
            // Numbers around the last one, and now and then a jump.
            let near = (last_number + random.below(4)).saturating_sub(1);
            let number = match random.below(8) {
                0 => 0,
                1 => near + random.below(1_000),
                _ => near,
            };
            let op = match random.below(12) {
                0..4 => Op::Acquire {
                    proposal: fencing.then_some(number),
                    ttl,
                    retention,
                },
                4..7 => Op::Confirm {
                    // What is confirmed is never beyond what nodes grant.
                    token: fencing.then_some(number.min(FencingToken::MAX.as_u64())),
                    ttl,
                    retention,
                },
                7..9 => Op::Release,
                9..11 => {
                    pair.pass(STEP * u32::try_from(1 + random.below(6)).unwrap());
                    continue;
                }
                _ => {
                    // One key vanishes on both nodes.
                    let key = random.one_of(&["x", "y", "z"]);
                    let lock = text(&names(&[key])[0].lock);
                    pair.node.call(&["DEL", &lock]);
                    for id in 0..3 {
                        let now = pair.now();
                        pair.store.apply(&command(&[key], id, Op::Release), now);
                    }
                    continue;
                }
            };
            let reply = pair.ask(&command(keys, id, op), as_set, &what);
            if let Reply::Granted(number) | Reply::At(number) = reply {
                last_number = number;
            }
            seen.insert(match reply {
                Reply::Granted(_) => "granted",
                Reply::Held { .. } => "held",
                Reply::HeldShared { .. } => "held by readers",
                Reply::At(_) => "at",
                Reply::Lost => "lost",
                Reply::Released => "released",
                Reply::Overflow => "overflow",
                Reply::Amnesia => "amnesia",
                reply => panic!("{reply:?} is not an answer to these requests"),
            });
        }
    }
    assert!(seen.len() >= 5, "the requests are too tame: {seen:?}");
}

#[test]
fn random_requests_with_small_numbers_match_the_reference() {
    compare(1, 1, true);
}

#[test]
fn random_requests_with_current_numbers_match_the_reference() {
    compare(2, 1_763_659_999_000_003, true);
}

// Rules: node.digits
#[test]
fn random_requests_at_the_largest_numbers_match_the_reference() {
    compare(3, FencingToken::MAX.as_u64() - 300, true);
}

#[test]
fn random_requests_without_fencing_match_the_reference() {
    compare(4, 1, false);
}

/// Too short, the next token could be one that was; without an end, servers get full.
// Rules: node.release
#[test]
fn fence_lives_for_its_retention_from_the_last_request_of_its_lock() {
    let mut pair = Pair::new();
    for key in [&["k"][..], &["x", "y"]] {
        let as_set = key.len() > 1;
        let lives = |pair: &mut Pair, steps: u32, what: &str| {
            for name in names(key).iter() {
                let pttl = pair.node.call(&["PTTL", &text(&name.fence)]);
                let left = u64::try_from(pttl.as_int().unwrap());
                let left = ms(left.expect("it has an end"));
                let late = (steps * STEP).abs_diff(left);
                assert!(late < TOLERANCE, "{what}, {key:?}: {left:?}");
            }
        };
        let kept = |mut op, steps: u32| {
            if let Op::Acquire { retention, .. } | Op::Confirm { retention, .. } = &mut op {
                *retention = steps * STEP;
            }
            op
        };
        let mut ask = |op, steps, what| {
            pair.ask(&command(key, 1, kept(op, steps)), as_set, what);
            lives(&mut pair, steps, what);
            pair.pass(STEP);
            lives(&mut pair, steps - 1, what);
        };
        ask(acquire(5, 5 * STEP), 10, "granted");
        ask(confirm(7, 5 * STEP), 12, "raised");
        ask(confirm(7, 5 * STEP), 14, "confirmed");
        // Also one that vanished: it would be the first that it grants.
        for name in names(key).iter() {
            pair.node.call(&["DEL", &text(&name.fence)]);
        }
        let raised = command(key, 1, kept(confirm(9, STEP), 14));
        pair.ask(&raised, as_set, "vanished");
        lives(&mut pair, 14, "vanished");
        pair.pass(STEP);
        pair.ask(&command(key, 1, Op::Release), as_set, "release");
        lives(&mut pair, 13, "released");
        pair.ask(&command(key, 2, kept(acquire(1, STEP), 20)), as_set, "next");
        lives(&mut pair, 20, "granted again");
    }
}

/// A restart with its data, an old backup and a promoted replica bring back a generation that is another
/// process's: by its age alone, a server that forgot locks would vote at once.
// Rules: guard.process
#[test]
fn generation_identifies_one_memory_of_one_process() {
    let mut pair = Pair::new();
    let mut admit = |random: u8, run_id: &str| {
        let random = owner(random);
        let key = b"redlock:generation";
        let digits = random.to_value();
        let args = [&digits, run_id].map(str::as_bytes);
        let reply = pair.node.eval(6, &[key], &args).unwrap();
        let [generation, seconds, micros] = reply.as_array().unwrap() else {
            panic!("{reply:?}");
        };
        let number = |reply: &support::Reply| u64::try_from(reply.as_int().unwrap()).unwrap();
        let now = secs(number(seconds)) + Duration::from_micros(number(micros));
        let theirs = Generation::parse(generation.as_str().unwrap()).unwrap();
        let began = now - theirs.age(now);
        let ours = pair.store.admit(&random, run_id, began);
        assert_eq!(theirs, ours, "{run_id}");
        let left = pair.node.call(&["PTTL", "redlock:generation"]);
        assert_eq!(left.as_int(), Some(-1));
        theirs
    };
    let first = admit(1, "a");
    assert_eq!(admit(2, "a"), first);
    let second = admit(3, "b");
    assert_ne!(second, first);
    // Neither does it matter that the name begins alike, or ends so.
    for run_id in ["bb", "b"] {
        assert_ne!(admit(4, run_id), second, "{run_id}");
    }
    assert_ne!(admit(5, "a"), first);
}

#[test]
fn lock_key_without_expiry_is_held_without_a_remaining_time() {
    let mut node = start_node();
    node.call(&["SET", &text(&names(&["k"])[0].lock), "foreign"]);
    node.call(&["SET", &text(&names(&["l"])[0].lock), "foreign", "EX", "9"]);
    // Of several, one that never expires is the longest.
    for (keys, as_set) in [
        (&["k"][..], false),
        (&["k"], true),
        (&["k", "l"], true),
        (&["l", "k"], true),
    ] {
        let reply = send(&mut node, &command(keys, 1, acquire(1, STEP)), as_set);
        let held = Reply::Held {
            expires_in: None,
            shown: None,
        };
        assert_eq!(reply, Ok(held), "{keys:?}, as a set: {as_set}");
    }
}

// Rules: node.foreign
#[test]
fn lock_key_of_another_type_gives_no_vote_and_is_not_overwritten() {
    let mut node = start_node();
    for kind in ["list", "hash"] {
        for as_set in [false, true] {
            let what = format!("{kind}, as a set: {as_set}");
            let lock = text(&names(&["k"])[0].lock);
            node.put_foreign(&lock, kind);
            let before = node.dump(&lock);
            let error = send(&mut node, &command(&["k"], 1, acquire(1, STEP)), as_set);
            assert!(error.unwrap_err().contains("WRONGTYPE"), "{what}");
            // Not ours: lost, or an error, but never confirmed.
            let confirmed = send(&mut node, &command(&["k"], 1, confirm(9, STEP)), as_set);
            assert_matches!(confirmed, Ok(Reply::Lost) | Err(_), "{what}");
            drop(send(&mut node, &command(&["k"], 1, Op::Release), as_set));
            assert_eq!(node.dump(&lock), before, "{what}");
        }
    }
    // A set with one such key gets none of its keys.
    let all = command(&["j", "k", "l"], 1, acquire(1, STEP));
    let error = send(&mut node, &all, true).unwrap_err();
    assert!(error.contains("WRONGTYPE"), "{error}");
    for key in ["j", "l"] {
        assert!(!node.server.exists(&text(&names(&[key])[0].lock)), "{key}");
    }
}

#[test]
fn fence_key_of_another_type_gives_no_vote_and_is_not_overwritten() {
    let mut node = start_node();
    let names = names(&["k"]);
    let (lock, fence) = (text(&names[0].lock), text(&names[0].fence));
    let [acquire, confirm] = [acquire(1, STEP), confirm(9, STEP)].map(|op| command(&["k"], 1, op));
    for kind in ["list", "hash", "string"] {
        for as_set in [false, true] {
            let what = format!("{kind}, as a set: {as_set}");
            node.put_foreign(&fence, kind);
            let before = node.dump(&fence);
            let error = send(&mut node, &acquire, as_set);
            assert!(error.unwrap_err().contains("WRONGTYPE"), "{what}");
            assert!(!node.server.exists(&lock), "{what}");
            assert_eq!(node.dump(&fence), before, "{what}");
            node.call(&["DEL", &fence]);
            assert_eq!(send(&mut node, &acquire, as_set), Ok(Reply::Granted(1)));
            node.put_foreign(&fence, kind);
            let answer = send(&mut node, &confirm, as_set);
            assert!(answer.is_err(), "{what}: {answer:?}");
            assert_eq!(node.dump(&fence), before, "{what}");
            node.call(&["DEL", &lock, &fence]);
        }
    }
}
