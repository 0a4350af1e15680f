//! Tests of the grouping, and of dealing out the replies.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::redis::Value;
use tokio::time::Instant;

use super::*;
use crate::node::job::{Packet, VoteReceiver};
use crate::node::redis::decode::deal;
use crate::node::redis::link::tests::parse_all;
use crate::protocol::message::{Command, Op};
use crate::protocol::{
    ExecutionId, Fingerprint, KeyNames, LockKey, LockKeys, Namespace, OwnerToken, Record,
};

const TTL: Duration = Duration::from_secs(10);

const FENCED: Op = acquire(Some(7), TTL, TTL);
const UNFENCED: Op = acquire(None, TTL, TTL);
const CONFIRM: Op = confirm(7, TTL, TTL);

const fn acquire(proposal: Option<u64>, ttl: Duration, retention: Duration) -> Op {
    Op::Acquire {
        proposal,
        ttl,
        retention,
    }
}

const fn confirm(token: u64, ttl: Duration, retention: Duration) -> Op {
    Op::Confirm {
        token: Some(token),
        ttl,
        retention,
    }
}

fn plain(keys: &[&str]) -> Arc<[KeyNames]> {
    let keys: LockKeys = keys.iter().copied().map(LockKey::from).collect();
    let names = Namespace::default().names(&keys, |_| [0; 32]);
    names.expect("the keys are valid")
}

fn recorded(key: &str, intents: Option<Duration>) -> Arc<[KeyNames]> {
    let names = Namespace::default().names_with_record(&key.into(), intents, |_| [0; 32]);
    [names.expect("the key is valid")].into()
}

/// The calls of a lane, and the replies to them that have arrived.
struct Bench {
    calls: Calls,
    replies: VecDeque<Value>,
    check: Option<GenerationCheck>,
    votes: VoteReceiver,
}

impl Bench {
    fn new() -> Self {
        Self {
            calls: Calls::default(),
            replies: VecDeque::new(),
            check: Some(GenerationCheck::default()),
            votes: VoteReceiver::new(&["n".into()].into()),
        }
    }

    /// For a server whose generation is known.
    fn guarded() -> Self {
        let check = GenerationCheck {
            key: Some(b"redlock:generation"[..].into()),
            generation: Some("r:100:999999:run".into()),
            ..GenerationCheck::default()
        };
        Self {
            check: Some(check),
            ..Self::new()
        }
    }

    fn add_named(&mut self, names: Arc<[KeyNames]>, op: Op, notifies: bool) {
        let command = Command {
            names,
            owner: OwnerToken::from_random([7; 16]),
            op,
        };
        let packet = Arc::new(Packet::new(command, notifies, None));
        self.add_packet(packet);
    }

    fn add_packet(&mut self, packet: Arc<Packet>) {
        let job = Job::new(packet, self.votes.sender(0), Instant::now() + TTL);
        self.calls.add(job, self.check.as_ref(), Instant::now());
    }

    fn add(&mut self, op: Op, keys: &[&str]) {
        self.add_named(plain(keys), op, true);
    }

    /// Ends the run and returns the calls of the batch, each as the names and keys of its requests.
    fn calls(&mut self) -> Vec<String> {
        let calls = self.calls.unsent(Instant::now());
        calls.map(describe_all).collect()
    }

    /// Sends the batch, and returns its jobs with the replies that it is given.
    fn answer(&mut self, replies: &str) -> Vec<(String, Value, bool)> {
        self.calls();
        self.calls.on_sent();
        self.replies.extend(parse_all(replies.as_bytes()));
        let answered = self.take_answered();
        assert!(self.calls.is_empty() && self.calls.jobs.is_empty());
        let told = |(job, reply, is_whole): (Job, _, _)| (describe(&job), reply, is_whole);
        answered.into_iter().map(told).collect()
    }

    /// Removes the jobs of the oldest calls, each with its reply and whether that is one for its whole call.
    fn take_answered(&mut self) -> Vec<(Job, Value, bool)> {
        let mut answered = Vec::new();
        for mut reply in self.replies.drain(..) {
            let count = self.calls.pop().expect("it was sent").jobs;
            let is_each = matches!(&reply, Value::Array(parts) if parts.len() == count);
            let is_whole = count > 1 && !is_each;
            for place in 0..count {
                let job = self.calls.jobs.pop_front();
                let job = job.expect("each reply is to jobs");
                let own = deal(&mut reply, count, place, job.op());
                answered.push((job, own, is_whole));
            }
        }
        answered
    }
}

fn describe_all<'a>(jobs: impl Iterator<Item = &'a Job>) -> String {
    let described: Vec<_> = jobs.map(describe).collect();
    described.join(", ")
}

/// Returns the name of a job and its keys, as `acquire a b`.
fn describe(job: &Job) -> String {
    let mut described = job.operation().name.to_owned();
    for name in job.packet.command.names.iter() {
        let lock = str::from_utf8(&name.lock).expect("the keys are text");
        let key = lock.trim_start_matches("redlock:{").trim_end_matches('}');
        described = format!("{described} {key}");
    }
    described
}

#[test]
fn jobs_of_one_kind_on_distinct_keys_share_a_call() {
    let mut bench = Bench::new();
    for (op, key) in [
        (FENCED, "a"),
        (Op::Release, "b"),
        (FENCED, "c"),
        (CONFIRM, "d"),
        (Op::Release, "e"),
        (CONFIRM, "f"),
        (acquire(Some(9), TTL, TTL), "g"),
        (Op::ReleaseExecuted, "h"),
    ] {
        bench.add(op, &[key]);
    }
    let expected = [
        "acquire a, acquire c, acquire g",
        "release b, release e, release h",
        "confirm d, confirm f",
    ];
    assert_eq!(bench.calls(), expected);
}

/// A release stays behind its acquisition, and an acquisition behind the release of the owner before.
#[test]
fn second_job_of_a_key_begins_a_new_run() {
    let mut bench = Bench::new();
    for (op, key) in [
        (FENCED, "a"),
        (FENCED, "b"),
        (Op::Release, "a"),
        (FENCED, "c"),
        (Op::Release, "d"),
        (FENCED, "a"),
        (FENCED, "e"),
        (CONFIRM, "e"),
        (Op::Look, "f"),
        (FENCED, "f"),
    ] {
        bench.add(op, &[key]);
    }
    let expected = [
        "acquire a, acquire b",
        "release a, release d",
        "acquire c",
        "acquire a, acquire e",
        "confirm e",
        "look f",
        "acquire f",
    ];
    assert_eq!(bench.calls(), expected);
}

#[test]
fn keys_of_an_ended_run_end_no_later_run() {
    let mut bench = Bench::new();
    bench.add(FENCED, &["a"]);
    assert_eq!(bench.calls(), ["acquire a"]);
    bench.answer(":7\r\n");
    for key in ["b", "a", "c"] {
        bench.add(FENCED, &[key]);
    }
    assert_eq!(bench.calls(), ["acquire b, acquire a, acquire c"]);
}

#[test]
fn a_call_has_at_most_64_jobs() {
    let mut bench = Bench::new();
    for number in 0..130 {
        bench.add(FENCED, &[&number.to_string()]);
        bench.add(Op::Release, &[&format!("other {number}")]);
    }
    let calls = bench.calls();
    let sizes = calls.iter().map(|call| call.split(", ").count());
    assert_eq!(sizes.collect::<Vec<_>>(), [64, 64, 64, 64, 2, 2]);
    let in_order: Vec<_> = calls.iter().step_by(2).map(String::as_str).collect();
    let submitted: Vec<_> = (0..130).map(|number| format!("acquire {number}")).collect();
    assert_eq!(in_order.join(", "), submitted.join(", "));
}

#[test]
fn a_call_has_at_most_32_kib_of_keys_and_owners() {
    let mut bench = Bench::new();
    // The calls of a batch do not count for the next.
    for _ in 0..2 {
        for number in 0..60 {
            bench.add(FENCED, &[&format!("{number:0500}")]);
        }
        let mut sizes = Vec::new();
        for call in bench.calls.unsent(Instant::now()) {
            let check = GenerationCheck::default();
            let parts = call.map(|request| request.encoded(&check).own.end);
            sizes.push(parts.sum::<usize>());
        }
        let [first, second] = sizes[..] else {
            panic!("not two calls: {sizes:?}");
        };
        let each = (first + second) / 60;
        assert!(first <= MAX_BYTES && first + each > MAX_BYTES, "{sizes:?}");
        assert_eq!(second % each, 0);
        bench.answer("*0\r\n*0\r\n");
    }
}

#[test]
fn jobs_with_other_times_or_notifications_share_no_call() {
    let mut bench = Bench::new();
    for (number, op) in [
        FENCED,
        acquire(Some(7), 2 * TTL, TTL),
        acquire(Some(7), TTL, 2 * TTL),
        CONFIRM,
        confirm(7, 2 * TTL, TTL),
        confirm(7, TTL, 2 * TTL),
    ]
    .into_iter()
    .enumerate()
    {
        for half in ["a", "b"] {
            bench.add(op.clone(), &[&format!("{number}{half}")]);
        }
    }
    for (notifies, key) in [(true, "c"), (false, "d"), (true, "e"), (false, "f")] {
        bench.add_named(plain(&[key]), Op::Release, notifies);
    }
    let expected = [
        "acquire 0a, acquire 0b",
        "acquire 1a, acquire 1b",
        "acquire 2a, acquire 2b",
        "confirm 3a, confirm 3b",
        "confirm 4a, confirm 4b",
        "confirm 5a, confirm 5b",
        "release c, release e",
        "release d, release f",
    ];
    assert_eq!(bench.calls(), expected);
}

#[test]
fn a_job_on_several_keys_is_a_run_of_its_own() {
    let mut bench = Bench::new();
    bench.add(FENCED, &["a"]);
    bench.add(FENCED, &["b", "c"]);
    bench.add(FENCED, &["d"]);
    bench.add(Op::Release, &["b", "c"]);
    bench.add_packet(Packet::ping());
    bench.add(FENCED, &["e"]);
    let expected = [
        "acquire a",
        "acquire b c",
        "acquire d",
        "release b c",
        "ping",
        "acquire e",
    ];
    assert_eq!(bench.calls(), expected);
}

#[test]
fn requests_on_records_and_intents_share_no_call() {
    let mut bench = Bench::guarded();
    let id = ExecutionId::from_random([1; 16]);
    let record = || Record::new(id, Fingerprint::from_digest([2; 32]), [3; 32], b"rest");
    let retention = TTL;
    let ops = || {
        [
            FENCED,
            CONFIRM,
            Op::Record {
                record: record(),
                retention,
            },
            Op::TopUp {
                record: record(),
                retention,
            },
            Op::Look,
            Op::Fetch,
        ]
    };
    for (number, op) in [ops(), ops()].into_iter().flatten().enumerate() {
        bench.add_named(recorded(&number.to_string(), None), op, true);
    }
    // Their locks are released as others are, unless an intent is taken back too.
    for (key, intents) in [("a", None), ("b", Some(TTL)), ("c", None), ("d", Some(TTL))] {
        bench.add_named(recorded(key, intents), Op::Release, true);
    }
    bench.add_named(recorded("e", Some(TTL)), Op::ReleaseExecuted, true);
    bench.add(Op::Release, &["f"]);
    let calls = bench.calls();
    let (records, releases) = calls.split_at(12);
    assert!(records.iter().all(|call| !call.contains(',')), "{calls:?}");
    let shared = "release a, release c, release e, release f";
    assert_eq!(releases, [shared, "release b", "release d"]);
}

/// Without the generation they are plain commands.
#[test]
fn acquisitions_without_fencing_share_a_call_with_the_generation() {
    let unknown = GenerationCheck {
        generation: None,
        ..Bench::guarded().check.expect("it has one")
    };
    let without = Bench {
        check: Some(unknown),
        ..Bench::new()
    };
    for (mut bench, shared) in [
        (Bench::guarded(), true),
        (Bench::new(), false),
        (without, false),
    ] {
        bench.add(UNFENCED, &["a"]);
        bench.add(UNFENCED, &["b"]);
        bench.add(acquire(None, 2 * TTL, TTL), &["c"]);
        // Without a fence there is no retention.
        bench.add(acquire(None, TTL, 2 * TTL), &["d"]);
        let alone = ["acquire a", "acquire b", "acquire c", "acquire d"];
        let together = ["acquire a, acquire b, acquire d", "acquire c"];
        let expected = if shared { &together[..] } else { &alone };
        assert_eq!(bench.calls(), expected);
    }
}

#[test]
fn no_jobs_share_a_call_without_a_check() {
    let mut bench = Bench {
        check: None,
        ..Bench::new()
    };
    for (op, key) in [
        (FENCED, "a"),
        (FENCED, "b"),
        (Op::Release, "a"),
        (Op::Release, "c"),
    ] {
        bench.add(op, &[key]);
    }
    let expected = ["acquire a", "acquire b", "release a", "release c"];
    assert_eq!(bench.calls(), expected);
}

#[test]
fn each_job_of_a_call_gets_its_own_reply() {
    let mut bench = Bench::new();
    for (op, key) in [
        (FENCED, "a"),
        (Op::Release, "b"),
        (FENCED, "c"),
        (FENCED, "d"),
        (CONFIRM, "e"),
        (Op::Release, "f"),
        (Op::Release, "a"),
    ] {
        bench.add(op, &[key]);
    }
    // A reply to a single job is not dealt out, whatever its form.
    let replies = "*3\r\n:9\r\n*2\r\n:0\r\n:50\r\n-OOM no memory\r\n\
        *2\r\n:-2\r\n:1\r\n*1\r\n:0\r\n:3\r\n";
    let held = Value::Array(vec![Value::Int(0), Value::Int(50)]);
    let full = parse_all(b"-OOM no memory\r\n").remove(0);
    let expected = [
        ("acquire a", Value::Int(9)),
        ("acquire c", held),
        ("acquire d", full),
        ("release b", Value::Int(-2)),
        ("release f", Value::Int(1)),
        ("confirm e", Value::Array(vec![Value::Int(0)])),
        ("release a", Value::Int(3)),
    ];
    let expected = expected.map(|(job, reply)| (job.to_owned(), reply, false));
    assert_eq!(bench.answer(replies), expected);
}

#[test]
fn reply_to_a_whole_call_is_the_reply_to_each_of_its_jobs() {
    let mut bench = Bench::guarded();
    let numbers = [7, 1_763_659_999_000_003];
    for (key, number) in numbers.into_iter().enumerate() {
        bench.add(acquire(Some(number), TTL, TTL), &[&format!("{key} fenced")]);
        bench.add(UNFENCED, &[&format!("{key} unfenced")]);
        bench.add(confirm(number, TTL, TTL), &[&format!("{key} confirmed")]);
        bench.add(Op::Release, &[&format!("{key} released")]);
    }
    let answered = bench.answer(":1\r\n:1\r\n:1\r\n:1\r\n");
    // What was granted as proposed, or confirmed as asked, got its own number; the others have none.
    let granted = [numbers[0], numbers[1], 0, 0, numbers[0], numbers[1], 1, 1];
    let granted = granted.map(|number| Value::Int(number.try_into().expect("it is small")));
    assert!(answered.iter().all(|(_, _, is_whole)| *is_whole));
    let replies: Vec<_> = answered.into_iter().map(|(_, reply, _)| reply).collect();
    assert_eq!(replies, granted);
}

#[test]
fn errors_lost_memories_and_replies_of_another_length_are_dealt_out_whole() {
    for reply in [
        "*1\r\n:3\r\n",
        "-NOSCRIPT No matching script.\r\n",
        "-NOPERM this user has no permissions to access one of the keys\r\n",
        ":-2\r\n",
        "$-1\r\n",
        "*0\r\n",
        "*3\r\n:1\r\n:1\r\n:1\r\n",
    ] {
        let mut bench = Bench::new();
        bench.add(FENCED, &["a"]);
        bench.add(FENCED, &["b"]);
        bench.add(CONFIRM, &["c"]);
        let whole = parse_all(reply.as_bytes()).remove(0);
        let expected = [
            ("acquire a".to_owned(), whole.clone(), true),
            ("acquire b".to_owned(), whole, true),
            // The next call is not affected.
            ("confirm c".to_owned(), Value::Int(5), false),
        ];
        assert_eq!(
            bench.answer(&format!("{reply}:5\r\n")),
            expected,
            "{reply:?}"
        );
    }
}

/// A batch that is about to be sent is neither answered nor sent together with those in flight.
#[test]
fn replies_are_dealt_out_to_the_oldest_call() {
    let mut bench = Bench::new();
    for keys in [["a", "b"], ["c", "d"]] {
        for key in keys {
            bench.add(FENCED, &[key]);
        }
        let call = format!("acquire {}, acquire {}", keys[0], keys[1]);
        assert_eq!(bench.calls(), [call]);
        bench.calls.on_sent();
    }
    bench.add(Op::Release, &["e"]);
    assert_eq!(bench.calls(), ["release e"]);
    for (granted, expected) in [(4, "acquire a, acquire b"), (5, "acquire c, acquire d")] {
        let parts = vec![Value::Int(granted); 2];
        bench.replies.push_back(Value::Array(parts));
        let answered = bench.take_answered();
        let jobs = describe_all(answered.iter().map(|(job, _, _)| job));
        assert_eq!(jobs, expected);
        assert!(
            answered
                .iter()
                .all(|(_, reply, _)| *reply == Value::Int(granted))
        );
    }
    assert_eq!(bench.calls(), ["release e"]);
}

/// Their replies may take as long as all that was sent before them.
#[test]
fn calls_are_in_flight_in_batches_until_the_last_reply_of_each() {
    let mut bench = Bench::new();
    for number in 0..MAX_BATCHES {
        assert!(!bench.calls.is_full(), "{number}");
        bench.add(FENCED, &["a"]);
        bench.add(CONFIRM, &["b"]);
        assert_eq!(bench.calls().len(), 2);
        bench.calls.on_sent();
    }
    assert!(bench.calls.is_full());
    assert!(bench.calls.pop().is_some() && bench.calls.is_full());
    assert!(bench.calls.pop().is_some() && !bench.calls.is_full());
}

#[tokio::test(start_paused = true)]
async fn oldest_reply_is_overdue_after_two_node_timeouts_and_the_transit_of_what_is_ahead() {
    let mut bench = Bench::new();
    assert_eq!(bench.calls.silent_at(TTL), None);
    let id = ExecutionId::from_random([1; 16]);
    let body = vec![0; 2 << 20];
    let record = Record::new(id, Fingerprint::from_digest([2; 32]), [3; 32], &body);
    let retention = TTL;
    let op = Op::Record { record, retention };
    bench.add_named(recorded("a", None), op.clone(), true);
    bench.add(CONFIRM, &["b"]);
    let sent = Instant::now();
    bench.calls();
    bench.calls.on_sent();
    let late = |bench: &Bench| bench.calls.silent_at(TTL).expect("it waits") - sent - 2 * TTL;
    assert_eq!(late(&bench).as_secs(), 2);
    bench.calls.pop();
    assert_eq!(late(&bench).as_secs(), 2);
    bench.calls.pop();
    let is_late = |bench: &mut Bench| {
        bench.add(CONFIRM, &["c"]);
        bench.calls();
        bench.calls.on_sent();
        bench.calls.silent_at(TTL).expect("it waits") > Instant::now() + 2 * TTL
    };
    assert!(!is_late(&mut bench));
    // What a connection that is gone had in flight delays nothing on the next one.
    bench.add_named(recorded("d", None), op, true);
    assert!(!is_late(&mut bench));
    bench.calls.drain();
    assert!(!is_late(&mut bench));
}
