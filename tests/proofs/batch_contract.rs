//! A script for several requests answers each of them as the reference node and the script for one do, and leaves
//! the same state: whatever the keys hold, and also on a full server.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use support::{self, Connection, Random, ScriptNode, ms};
use tower_redlock::FencingToken;
use tower_redlock::protocol::OwnerToken;
use tower_redlock::protocol::message::{Command, Op, Reply, SharedOp};

use crate::node_contract::{acquire, command, confirm, names, owner};
use crate::shared_contract::shared_names;
use crate::wire::{
    GENERATION, Pair, STEP, TOLERANCE, age, assert_same, code_of, decode, eval, number_of, rounded,
    send, start_node, text,
};

type Answer = Result<Reply, String>;

/// The keys that requests are about: so few that most meet what others have left.
const POOL: usize = 80;

const KNOWN: &str = "r:100:999999:run";

/// Sends requests of one kind as one call, which compares the generation if that is known.
fn send_batch(node: &mut ScriptNode, commands: &[Command], known: Option<&str>) -> Vec<Answer> {
    let (script, times) = match commands[0].op {
        Op::Acquire {
            proposal: Some(_),
            ttl,
            retention,
        } => ("acquire_batch", vec![ttl, retention]),
        Op::Confirm { ttl, retention, .. } => ("confirm_batch", vec![ttl, retention]),
        Op::Acquire { ttl, .. } => ("acquire_batch_unfenced", vec![ttl]),
        _ => ("release_batch", vec![]),
    };
    let mut keys: Vec<&[u8]> = Vec::new();
    let mut own = Vec::new();
    for Command { names, owner, op } in commands {
        keys.push(&names[0].lock);
        own.push(owner.to_value());
        if let Some(number) = number_of(op) {
            keys.push(&names[0].fence);
            own.push(number.to_string());
        }
    }
    // Releases need no vote.
    let known = known.filter(|_| script != "release_batch");
    keys.extend(known.map(|_| GENERATION.as_bytes()));
    let mut args: Vec<_> = times.iter().map(|t| t.as_millis().to_string()).collect();
    args.push(known.unwrap_or_default().to_owned());
    args.extend(own);
    let args: Vec<&[u8]> = args.iter().map(|arg| arg.as_bytes()).collect();
    let whole = match eval(node, script, &keys, &args) {
        Ok(whole) => whole,
        Err(error) => return vec![Err(error); commands.len()],
    };
    let parts = whole.as_array();
    if let Some(parts) = parts.filter(|parts| parts.len() == commands.len()) {
        let answer = |(command, part): (&Command, &support::Reply)| match part {
            support::Reply::Error(error) => Err(error.clone()),
            part => decode(command, part),
        };
        return commands.iter().zip(parts).map(answer).collect();
    }
    let is_as_asked = whole.as_int() == Some(1);
    let answers = commands.iter().map(|command| match &command.op {
        op @ Op::Acquire { .. } if is_as_asked => Ok(Reply::Granted(number_of(op).unwrap_or(0))),
        op @ Op::Confirm { .. } if is_as_asked => Ok(Reply::At(number_of(op).unwrap_or(0))),
        _ => decode(command, &whole),
    });
    answers.collect()
}

/// Two servers with the same contents, and the reference node.
struct Nodes {
    /// Is sent batches.
    node: ScriptNode,
    /// Are sent the same requests one by one.
    alone: Pair,
    /// The keys that hold foreign data or once did, which the reference node knows nothing of.
    foreign: BTreeSet<String>,
    is_full: bool,
}

impl Nodes {
    fn new() -> Self {
        Self {
            node: start_node(),
            alone: Pair::new(),
            foreign: BTreeSet::new(),
            is_full: false,
        }
    }

    fn forget(&mut self) {
        self.alone.forget();
        self.foreign.clear();
        self.node.call(&["FLUSHALL"]);
        self.call(&["SET", GENERATION, KNOWN]);
    }

    /// Runs a command on both servers.
    fn call(&mut self, command: &[&str]) {
        for node in [&mut self.node, &mut self.alone.node] {
            let reply = node.call(command);
            assert!(!matches!(reply, support::Reply::Error(_)), "{reply:?}");
        }
    }

    fn set_full(&mut self, is_full: bool) {
        self.is_full = is_full;
        let limit = if is_full { "1" } else { "0" };
        self.call(&["CONFIG", "SET", "maxmemory", limit]);
    }

    fn put_foreign(&mut self, key: &str, is_lock: bool, kind: &str) {
        let name = &names(&[key])[0];
        let name = text(if is_lock { &name.lock } else { &name.fence });
        self.node.put_foreign(&name, kind);
        self.alone.node.put_foreign(&name, kind);
        self.foreign.insert(key.to_owned());
    }

    /// Gives a free key to a reader.
    fn put_reader(&mut self, key: &str, ttl: Duration) {
        let names = shared_names(&[key]);
        if self.foreign.contains(key) || !self.is_free(key) {
            return;
        }
        let millis = ttl.as_millis().to_string();
        self.call(&["SET", &text(&names[0].lock), "shared", "NX", "PX", &millis]);
        let command = Command {
            names,
            ..command(&[key], 0, Op::Shared(SharedOp::Acquire { ttl }))
        };
        let granted = self.alone.store.apply(&command, self.alone.now());
        assert_eq!(granted, Reply::Granted(0), "{key} is free");
    }

    fn is_free(&self, key: &str) -> bool {
        let now = self.alone.now();
        self.alone.store.is_free(&names(&[key])[0], now)
    }

    fn pass(&mut self, time: Duration) {
        self.alone.pass(time);
        age(&mut self.node, time);
    }

    fn holder(&self, key: &str) -> Option<OwnerToken> {
        let holder = self.alone.store.holder(&names(&[key])[0], self.alone.now());
        holder.cloned()
    }

    /// Sends a batch, compares each answer, and then the servers. Returns the answers.
    #[track_caller]
    fn ask(&mut self, commands: &[Command], known: Option<&str>, what: &str) -> Vec<Answer> {
        let theirs = send_batch(&mut self.node, commands, known);
        let is_vote = !matches!(commands[0].op, Op::Release);
        let ours = if is_vote && known.is_some_and(|known| known != KNOWN) {
            vec![Ok(Reply::Amnesia); commands.len()]
        } else {
            self.ask_alone(commands, what)
        };
        for ((command, ours), theirs) in commands.iter().zip(&ours).zip(&theirs) {
            let same = match (ours, theirs) {
                (Ok(ours), Ok(theirs)) => rounded(1, ours) == rounded(1, theirs),
                (Err(ours), Err(theirs)) => kind_of_error(ours) == kind_of_error(theirs),
                // Foreign data is not an owner's: no error when others are released.
                (Err(ours), Ok(Reply::Lost)) => kind_of_error(ours) == "WRONGTYPE",
                _ => false,
            };
            assert!(
                same,
                "{what}: {command:?}\nalone: {ours:?}\nin the batch: {theirs:?}"
            );
        }
        self.assert_equal(commands, what);
        theirs
    }

    #[track_caller]
    fn ask_alone(&mut self, commands: &[Command], what: &str) -> Vec<Answer> {
        let mut has_written = false;
        let answers = commands.iter().map(|command| {
            let mut answer = self.ask_one(command, what);
            if has_written && matches!(&answer, Err(error) if kind_of_error(error) == "OOM") {
                // A server refuses no memory to a script that has written something.
                let node = &mut self.alone.node;
                node.call(&["CONFIG", "SET", "maxmemory", "0"]);
                answer = self.ask_one(command, what);
                self.alone.node.call(&["CONFIG", "SET", "maxmemory", "1"]);
            }
            has_written |= match &answer {
                Ok(Reply::Granted(_)) => number_of(&command.op).is_some(),
                Ok(Reply::At(number)) => number_of(&command.op) == Some(*number),
                _ => false,
            };
            answer
        });
        answers.collect()
    }

    #[track_caller]
    fn ask_one(&mut self, command: &Command, what: &str) -> Answer {
        let key = key_of(command);
        let is_unfenced = matches!(command.op, Op::Acquire { proposal: None, .. });
        if !self.is_full && !self.foreign.contains(&key) {
            return Ok(self.alone.ask_as(command, is_unfenced, what));
        }
        let answer = send(&mut self.alone.node, command, is_unfenced)?;
        if !self.foreign.contains(&key) {
            let reference = self.alone.store.apply(command, self.alone.now());
            assert_same(command, &reference, &answer, what);
        }
        Ok(answer)
    }

    /// Compares the servers with each other, and the locks with the reference node.
    #[track_caller]
    fn assert_equal(&mut self, commands: &[Command], what: &str) {
        let [theirs, ours] = [&mut self.node, &mut self.alone.node].map(contents);
        let names = |all: &Contents| all.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&ours), names(&theirs), "{what}");
        for (name, (value, left)) in &ours {
            let (their_value, their_left) = &theirs[name];
            assert_eq!(value, their_value, "{what}: {name}");
            let apart = ms(left.abs_diff(*their_left));
            let is_endless = *left < 0;
            assert!(
                apart < TOLERANCE && is_endless == (*their_left < 0),
                "{what}: {name} has {left} ms left alone, {their_left} ms in the batch"
            );
        }
        for command in commands {
            let key = key_of(command);
            if !self.foreign.contains(&key) {
                let lock = theirs.get(&text(&command.names[0].lock));
                let held = lock.map(|(value, _)| value.clone());
                let holder = self.holder(&key);
                let holder = holder.map(|owner| owner.to_value());
                let by_readers = (!self.is_free(&key)).then(|| "shared".to_owned());
                let expected = holder.or(by_readers).map(|holder| vec![holder]);
                assert_eq!(held, expected, "{what}: {key}");
            }
        }
    }
}

fn key_of(command: &Command) -> String {
    let lock = text(&command.names[0].lock);
    let key = lock.trim_start_matches("redlock:{");
    key.trim_end_matches('}').to_owned()
}

/// Returns what distinguishes errors for a client; the words around it name scripts and lines.
#[track_caller]
fn kind_of_error(error: &str) -> &'static str {
    let mut codes = ["WRONGTYPE", "OOM"].into_iter();
    let code = codes.find(|code| error.contains(code));
    code.unwrap_or_else(|| panic!("an error of no kind that was provoked: {error}"))
}

/// What each key holds, with its remaining time in milliseconds.
type Contents = BTreeMap<String, (Vec<String>, i64)>;

fn contents(node: &mut ScriptNode) -> Contents {
    let all = node.call(&["EVAL", READ_ALL, "0"]);
    let entries = all.as_array().unwrap().iter().map(|entry| {
        let [name, value, left] = entry.as_array().unwrap() else {
            panic!("{entry:?}");
        };
        let value = value.as_array().unwrap().iter();
        let value = value.map(|part| part.as_str().unwrap().to_owned());
        let held = (value.collect(), left.as_int().unwrap());
        (name.as_str().unwrap().to_owned(), held)
    });
    entries.collect()
}

const READ_ALL: &str = "
    local all = {}
    for i, name in ipairs(redis.call('KEYS', '*')) do
        local kind, value = redis.call('TYPE', name).ok
        if kind == 'list' then value = redis.call('LRANGE', name, 0, -1)
        elseif kind == 'hash' then value = redis.call('HGETALL', name)
        else value = {redis.call('GET', name)} end
        all[i] = {name, value, redis.call('PTTL', name)}
    end
    return all
";

/// Chooses the requests of a batch.
struct Chooser {
    random: Random,
    /// The last number that was heard of each key.
    numbers: BTreeMap<String, u64>,
    base: u64,
}

impl Chooser {
    fn key(&mut self) -> String {
        format!("key {}", self.random.index(POOL))
    }

    fn keys(&mut self) -> Vec<String> {
        let mut keys = BTreeMap::new();
        for number in 0..POOL {
            keys.insert(self.random.next_number(), format!("key {number}"));
        }
        let count = match self.random.below(3) {
            0 => 2,
            1 => 64,
            _ => 2 + self.random.index(63),
        };
        keys.into_values().take(count).collect()
    }

    fn steps(&mut self, least: u64, count: u64) -> Duration {
        STEP * u32::try_from(least + self.random.below(count)).unwrap()
    }

    fn last(&self, key: &str) -> u64 {
        self.numbers.get(key).copied().unwrap_or(self.base)
    }

    /// Returns a number around the last one of the key, and now and then another one.
    fn number(&mut self, key: &str) -> u64 {
        let last = self.last(key);
        match self.random.below(24) {
            0 => 0,
            1 => self.random.below(10_000),
            2 => last + self.random.below(1_000),
            3 => FencingToken::MAX.as_u64() - 1 + self.random.below(4),
            _ => (last + self.random.below(4)).saturating_sub(1),
        }
    }

    /// Returns requests of one kind. They are *tame* if each of them is to succeed as it was asked.
    fn batch(&mut self, nodes: &Nodes, is_tame: bool) -> Vec<Command> {
        let kind = self.random.below(8);
        let (ttl, retention) = (self.steps(1, 9), self.steps(10, 5));
        let mut commands = Vec::new();
        for key in self.keys() {
            let holder = nodes.holder(&key);
            let succeeds = match kind {
                0..4 => nodes.is_free(&key),
                _ => holder.is_some(),
            };
            if is_tame && (nodes.foreign.contains(&key) || !succeeds) {
                continue;
            }
            let any = owner(u8::try_from(self.random.below(3)).unwrap());
            // Half of the locks are asked for by their owner.
            let is_own = is_tame || self.random.is_one_in(2);
            let owner = holder.filter(|_| is_own).unwrap_or(any);
            let number = match is_tame {
                // Above the others that this test asks for.
                true => (self.last(&key) + 1_001).min(FencingToken::MAX.as_u64()),
                false => self.number(&key),
            };
            let op = match kind {
                0..4 => Op::Acquire {
                    proposal: (kind < 3).then_some(number),
                    ttl,
                    retention,
                },
                4..6 => Op::Confirm {
                    // What is confirmed is never beyond what nodes grant.
                    token: Some(number.min(FencingToken::MAX.as_u64())),
                    ttl,
                    retention,
                },
                _ => Op::Release,
            };
            commands.push(Command {
                owner,
                ..command(&[&key], 0, op)
            });
        }
        commands
    }

    fn hear(&mut self, command: &Command, answer: &Answer) {
        if let Ok(Reply::Granted(number) | Reply::At(number)) = answer
            && *number > 0
        {
            self.numbers.insert(key_of(command), *number);
        }
    }
}

fn kind_of(command: &Command, answer: &Answer) -> &'static str {
    let asked = number_of(&command.op);
    match answer {
        Ok(Reply::Granted(number)) => match asked {
            None => "granted without a fence",
            Some(asked) if asked == *number => "granted as proposed",
            Some(_) => "granted another number",
        },
        Ok(Reply::Held { .. }) => "held",
        Ok(Reply::HeldShared { .. }) => "held by readers",
        Ok(Reply::Overflow) => "overflow",
        Ok(Reply::Amnesia) => "amnesia",
        Ok(Reply::At(number)) if asked == Some(*number) => "confirmed",
        Ok(Reply::At(_)) => "beyond the token",
        Ok(Reply::Lost) => "lost",
        Ok(Reply::Released) => "released",
        Ok(other) => panic!("a record: {other:?}"),
        Err(error) => kind_of_error(error),
    }
}

fn compare(seed: u64, base: u64) {
    let mut nodes = Nodes::new();
    nodes.forget();
    let mut chooser = Chooser {
        random: Random(seed),
        numbers: BTreeMap::new(),
        base,
    };
    let mut seen = BTreeMap::new();
    let mut whole = 0;
    for step in 0..240 {
        let what = format!("seed {seed}, step {step}");
        if step % 60 == 59 {
            nodes.forget();
            chooser.numbers.clear();
        }
        match chooser.random.below(8) {
            0 => nodes.pass(chooser.steps(1, 6)),
            1 => {
                let key = chooser.key();
                let is_lock = chooser.random.is_one_in(2);
                let kinds = ["list", "hash", "string", "empty", "number"];
                let kinds = if is_lock { &kinds[..3] } else { &kinds };
                let kind = chooser.random.one_of(kinds);
                nodes.put_foreign(&key, is_lock, kind);
            }
            2 => {
                for key in chooser.keys().iter().take(8) {
                    nodes.put_reader(key, chooser.steps(1, 9));
                }
            }
            _ => {}
        }
        let is_tame = chooser.random.is_one_in(2);
        let commands = chooser.batch(&nodes, is_tame);
        if commands.len() < 2 {
            continue;
        }
        nodes.set_full(!is_tame && chooser.random.is_one_in(6));
        if chooser.random.is_one_in(12) {
            nodes.node.call(&["SCRIPT", "FLUSH"]);
            let answers = send_batch(&mut nodes.node, &commands, None);
            let all_unknown = |answer: &Answer| matches!(answer, Err(e) if e.contains("NOSCRIPT"));
            assert!(answers.iter().all(all_unknown), "{what}: {answers:?}");
            nodes.assert_equal(&commands, &what);
            nodes.node.load_scripts();
        }
        let is_unfenced = matches!(commands[0].op, Op::Acquire { proposal: None, .. });
        let known = match chooser.random.below(6) {
            0 => Some("r:100:999999:another"),
            1..4 => Some(KNOWN),
            // Without the generation, such requests are sent as plain commands.
            _ => is_unfenced.then_some(KNOWN),
        };
        let answers = nodes.ask(&commands, known, &what);
        nodes.set_full(false);
        let mut kinds = BTreeSet::new();
        for (command, answer) in commands.iter().zip(&answers) {
            chooser.hear(command, answer);
            kinds.insert(kind_of(command, answer));
        }
        let as_asked = [
            "granted as proposed",
            "granted without a fence",
            "confirmed",
        ];
        let is_whole = kinds.len() == 1 && as_asked.iter().any(|kind| kinds.contains(kind));
        whole += usize::from(is_whole);
        for kind in kinds {
            *seen.entry(kind).or_insert(0) += 1;
        }
    }
    println!("seed {seed}: {whole} batches were answered as asked; batches by answer: {seen:?}");
    assert!(whole >= 10, "{whole}");
    let least = "granted as proposed, granted another number, granted without a fence, held, held by readers, \
                 overflow, amnesia, confirmed, beyond the token, lost, released, WRONGTYPE, OOM";
    for kind in least.split(", ") {
        assert!(seen.contains_key(kind), "never seen: {kind}");
    }
}

#[test]
fn batches_with_small_numbers_match_the_scripts_for_one_key() {
    compare(1, 1);
}

// Rules: node.never_shorter
#[test]
fn batches_with_current_numbers_match_the_scripts_for_one_key() {
    compare(2, 1_763_659_999_000_003);
}

#[test]
fn batches_with_numbers_of_fifteen_and_sixteen_digits_match_the_scripts_for_one_key() {
    compare(3, 999_999_999_995_000);
}

#[test]
fn batches_at_the_largest_numbers_match_the_scripts_for_one_key() {
    compare(4, FencingToken::MAX.as_u64() - 30_000);
}

/// A number that no fence is must not be raised: it is another application's.
#[test]
fn fence_keys_that_hold_other_numbers_are_not_overwritten() {
    let mut nodes = Nodes::new();
    let numbers = "42,-42,1763659999,1763659999.00001,1e15,0x1234,nan,inf, 42,1763659999000003,42\n,, ,42 ours";
    let foreign: Vec<_> = numbers.split(',').collect();
    for acquires in [true, false] {
        nodes.forget();
        let mut commands = Vec::new();
        for (number, value) in foreign.iter().enumerate() {
            let key = format!("key {number}");
            let name = names(&[&key]);
            nodes.call(&["SET", &text(&name[0].fence), value]);
            nodes.foreign.insert(key.clone());
            let op = if acquires {
                acquire(1_763_659_999_000_009, STEP)
            } else {
                let (lock, ours) = (text(&name[0].lock), owner(1).to_value());
                nodes.call(&["SET", &lock, &ours, "PX", "100000"]);
                confirm(1_763_659_999_000_009, STEP)
            };
            commands.push(command(&[&key], 1, op));
        }
        let answers = nodes.ask(&commands, None, &format!("acquires: {acquires}"));
        let (last, others) = answers.split_last().unwrap();
        assert!(last.is_ok(), "{last:?}");
        assert!(others.iter().all(Result::is_err), "{others:?}");
    }
}

/// Subscribers of each lock are counted, and notified of its release, as by the script for one lock.
#[test]
fn release_batch_notifies_the_subscribers_of_each_lock() {
    let mut node = start_node();
    let locks: Vec<_> = (0..5).map(|key| format!("redlock:{{{key}}}")).collect();
    let mut subscribers = Vec::new();
    for lock in [1, 1, 3] {
        let mut connection = Connection::open(node.server.addr()).unwrap();
        connection.call(&["SUBSCRIBE", &locks[lock]]).unwrap();
        subscribers.push((lock, connection));
    }
    let ours = owner(1).to_value();
    let mut notified = 0;
    let (none, all): (&[usize], &[usize]) = (&[], &[0, 1, 2, 3, 4]);
    for (held, asked) in [
        (&all[..4], 0..5),
        (all, 0..5),
        (all, 1..2),
        (all, 2..5),
        (none, 0..5),
        (&all[..2], 1..4),
        (&[1, 3, 4], 0..5),
    ] {
        // The others belong to another owner.
        let lock_all = |node: &mut ScriptNode| {
            for (place, lock) in locks.iter().enumerate() {
                let is_ours = held.contains(&place);
                let holder = if is_ours { &*ours } else { "theirs" };
                node.call(&["SET", lock, holder, "PX", "100000"]);
            }
        };
        for notifies in ["1", ""] {
            let what = format!("{held:?} held, {asked:?} asked, notifies: {notifies:?}");
            lock_all(&mut node);
            let mut alone = Vec::new();
            for lock in &locks[asked.clone()] {
                let mut eval = vec!["EVAL", code_of("release"), "1", lock, &ours];
                eval.extend((!notifies.is_empty()).then_some(notifies));
                alone.push(node.call(&eval).as_int().unwrap());
            }
            lock_all(&mut node);
            let keys = locks[asked.clone()].iter().map(String::as_bytes);
            let keys: Vec<_> = keys.collect();
            let mut args = vec![notifies.as_bytes()];
            args.extend(keys.iter().map(|_| ours.as_bytes()));
            let reply = eval(&mut node, "release_batch", &keys, &args).unwrap();
            let together: Vec<_> = match reply.as_array() {
                Some(parts) => parts.iter().map(|part| part.as_int().unwrap()).collect(),
                None => vec![reply.as_int().unwrap(); keys.len()],
            };
            assert_eq!(together, alone, "{what}");
            for (lock, connection) in &mut subscribers {
                let is_told = !notifies.is_empty() && held.contains(lock) && asked.contains(lock);
                // Once for each of the two; an unexpected message would be the next one's.
                let expected = if *lock == 1 { 2 } else { 1 };
                for _ in 0..2 * usize::from(is_told) {
                    let message = connection.read_reply().expect(&what);
                    let count = message.as_array().unwrap()[2].as_int();
                    assert_eq!(count, Some(expected), "{what}");
                    notified += 1;
                }
            }
        }
    }
    assert_eq!(notified, 28);
}
