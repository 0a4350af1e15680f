//! Requests and replies as the headers of the scripts describe them.

use std::time::Duration;

use bytes::BytesMut;
use deadpool_redis::redis::{Cmd, from_redis_value, parse_redis_value};
use tokio::time::Instant;

use super::*;
use crate::node::job::{Job, Packet, VoteReceiver};
use crate::node::redis::describe::is_temporary_refusal;
use crate::node::redis::table::{self, GenerationCheck, Operation, encode_call_into};
use crate::protocol::{
    ExecutionId, Fingerprint, KeyNames, LockKey, LockKeys, Namespace, OwnerToken,
};

const TIME: Duration = Duration::from_secs(1);
const GENERATION: &[u8] = b"redlock:generation";

fn recorded(intents: bool) -> Arc<[KeyNames]> {
    let intents = intents.then_some(TIME * 4);
    let names = Namespace::default().names_with_record(&"k".into(), intents, |_| [0; 32]);
    [names.unwrap()].into()
}

fn plain(keys: &[&str]) -> Arc<[KeyNames]> {
    let keys: LockKeys = keys.iter().map(|key| LockKey::from(*key)).collect();
    let names = Namespace::default().names(&keys, |_| [0; 32]);
    names.unwrap()
}

fn acquire(proposal: Option<u64>) -> Op {
    Op::Acquire {
        proposal,
        ttl: TIME,
        retention: TIME * 2,
    }
}

fn confirm(token: Option<u64>) -> Op {
    Op::Confirm {
        token,
        ttl: TIME,
        retention: TIME * 2,
    }
}

fn record() -> Record {
    let id = ExecutionId::from_random([1; 16]);
    Record::new(id, Fingerprint::from_digest([2; 32]), [3; 32], b"rest")
}

fn keep() -> Op {
    Op::Record {
        record: record(),
        retention: TIME * 3,
    }
}

fn top_up() -> Op {
    Op::TopUp {
        record: record(),
        retention: TIME * 3,
    }
}

fn job(names: &Arc<[KeyNames]>, op: Op) -> Job {
    let command = Command {
        names: Arc::clone(names),
        owner: OwnerToken::from_random([7; 16]),
        op,
    };
    job_of(Arc::new(Packet::new(command, false, None)))
}

fn job_of(packet: Arc<Packet>) -> Job {
    let votes = VoteReceiver::new(&["n".into()].into());
    Job::new(packet, votes.sender(0), Instant::now())
}

/// The check of a connection to a server whose generation is unknown, so that requests name none.
fn check() -> GenerationCheck {
    GenerationCheck {
        key: Some(GENERATION.into()),
        ..GenerationCheck::default()
    }
}

fn arguments(job: &Job) -> Vec<Vec<u8>> {
    let mut written = BytesMut::new();
    encode_into(job, &check(), &mut written);
    arguments_in(&written)
}

fn encode_into(job: &Job, check: &GenerationCheck, output: &mut BytesMut) {
    encode_call_into([job.encoded(check)].into_iter(), check, output);
}

fn hash_of(operation: &'static Operation) -> &'static [u8] {
    operation.verb.word(false).as_bytes()
}

fn arguments_in(written: &[u8]) -> Vec<Vec<u8>> {
    let arguments: Vec<Vec<u8>> = from_redis_value(parse_redis_value(written).unwrap()).unwrap();
    arguments
}

fn read(job: &Job, parts: Vec<Value>) -> Result<Reply, NodeFailure> {
    decode(&job.packet.command, &Value::Array(parts), &"node".into())
}

/// The scripts compare the generation as soon as they are given its key.
#[test]
fn requests_with_the_generation_key_end_with_the_generation() {
    let names = [
        plain(&["k"]),
        plain(&["k", "l"]),
        recorded(false),
        recorded(true),
    ];
    for names in &names {
        for number in [None, Some(5)] {
            let others = [Op::Release, Op::Look, Op::Fetch];
            for op in [acquire(number), confirm(number)].into_iter().chain(others) {
                let job = job(names, op.clone());
                let has_key = arguments(&job).iter().any(|part| part == GENERATION);
                assert_eq!(op.is_vote(), has_key, "{op:?}");
            }
        }
    }
}

#[test]
fn encode_into_writes_what_redis_rs_would_write() {
    let admitted = GenerationCheck {
        generation: Some("r:100:999999:run".into()),
        ..check()
    };
    assert!(admitted.generation.is_some());
    let votes = [acquire(None), acquire(Some(5)), confirm(Some(5))];
    let once = [Op::Release, keep(), top_up(), Op::Look, Op::Fetch];
    let set = plain(&["a", "b", "c", "d", "e"]);
    let requests = votes.iter().chain(&once).map(|op| (recorded(true), op));
    let others = votes.iter().chain(&once[..1]).map(|op| (set.clone(), op));
    for check in [&GenerationCheck::default(), &check(), &admitted] {
        let requests = requests.clone().chain(others.clone());
        let requests = requests.map(|(names, op)| job(&names, op.clone()));
        for job in requests.chain([job_of(Packet::ping())]) {
            let mut written = BytesMut::from(&b"before"[..]);
            encode_into(&job, check, &mut written);
            let (before, command) = written.split_at(6);
            let mut expected = Cmd::new();
            expected.arg(arguments_in(command));
            assert_eq!(before, b"before");
            assert_eq!(command, expected.get_packed_command(), "{job:?}");
        }
    }
}

#[test]
fn requests_on_keys_with_records_have_the_arguments_of_the_script_headers() {
    let (owner, record) = (OwnerToken::from_random([7; 16]).to_value(), record());
    let part = |word: &'static str| -> &[u8] {
        match word {
            "L" => b"redlock:{k}",
            "F" => b"redlock:{k}:fence",
            "D" => b"redlock:{k}:done",
            "I" => b"redlock:{k}:intent",
            "G" => GENERATION,
            "owner" => owner.as_bytes(),
            "record" => record.as_bytes(),
            "none" => b"",
            number => number.as_bytes(),
        }
    };
    let (keep, top_up) = (keep(), top_up());
    let (once, release) = (&table::ACQUIRE_ONCE, &table::RELEASE);
    let acquire = acquire(Some(5));
    let confirmed = "4 L F D G owner 5 1000 2000";
    let cases: [(_, _, _, &'static str); 11] = [
        (false, &acquire, once, "4 L F D G owner 5 1000 2000 none"),
        (true, &acquire, once, "5 L F D I G owner 5 1000 2000 4000"),
        (true, &confirm(Some(5)), &table::CONFIRM_ONCE, confirmed),
        (false, &Op::Release, release, "1 L owner"),
        (true, &Op::Release, &table::RELEASE_ONCE, "2 L I owner"),
        (true, &Op::ReleaseExecuted, release, "1 L owner"),
        (false, &keep, &table::RECORD, "3 L F D owner record 3000"),
        (true, &keep, &table::RECORD, "4 L F D I owner record 3000"),
        (false, &top_up, &table::TOP_UP, "1 D record 3000"),
        (true, &top_up, &table::TOP_UP, "2 D I record 3000"),
        (true, &Op::Look, &table::LOOK, "1 D"),
    ];
    for (intents, op, row, rest) in cases {
        let mut expected: Vec<&[u8]> = vec![b"EVALSHA", hash_of(row)];
        expected.extend(rest.split(' ').map(part));
        let sent = arguments(&job(&recorded(intents), op.clone()));
        assert_eq!(sent, expected, "{op:?}, intents: {intents}");
    }
}

#[test]
fn decode_reads_the_replies_of_the_script_headers_on_keys_with_records() {
    let (int, text) = (Value::Int, |text: &str| Value::BulkString(text.into()));
    let digits = "0a".repeat(16);
    let held = |fingerprint| Reply::Held {
        expires_in: Some(TIME),
        shown: Shown::new(fingerprint, None).map(Arc::new),
    };
    let asked = Fingerprint::from_hex(digits.as_bytes());
    assert!(asked.is_some());
    let (acquire, confirm) = (acquire(Some(1)), confirm(Some(1)));
    let refusal = |asked: &str| vec![int(0), int(1_000), text(asked)];
    let cases = [
        (&acquire, refusal(&digits), held(asked)),
        (&acquire, refusal(""), held(None)),
        (&acquire, refusal("another client's"), held(None)),
        (&acquire, vec![int(3)], Reply::Amnesia),
        (&acquire, vec![int(5)], Reply::Intended),
        (&confirm, vec![int(0)], Reply::Lost),
        (&confirm, vec![int(3)], Reply::Amnesia),
        (&keep(), vec![int(0)], Reply::Lost),
        (&Op::Look, vec![int(0)], Reply::NotDone),
    ];
    for (op, parts, expected) in cases {
        let reply = read(&job(&recorded(true), op.clone()), parts);
        assert_eq!(reply, Ok(expected), "{op:?}");
    }
    let numbers = [
        (&acquire, 5, Reply::Granted(5)),
        (&confirm, 5, Reply::At(5)),
        (&Op::Release, -2, Reply::Released),
        (&Op::Release, -3, Reply::Lost),
        (&Op::ReleaseExecuted, 3, Reply::Released),
    ];
    for (op, reply, expected) in numbers {
        let reply = decode(
            &job(&recorded(true), op.clone()).packet.command,
            &int(reply),
            &"n".into(),
        );
        assert_eq!(reply, Ok(expected), "{op:?}");
    }
    let ours = record();
    let kept = Value::BulkString(ours.as_bytes().into());
    let head = Value::BulkString(ours.as_bytes()[..Record::HEAD].into());
    for op in [&acquire, &confirm, &keep(), &top_up(), &Op::Look] {
        let job = job(&recorded(true), op.clone());
        for (kept, whole) in [(&kept, true), (&head, false)] {
            // In the second case another client removed the expiry.
            for (left, expected) in [(1_000, TIME), (-1, Duration::ZERO)] {
                let reply = read(&job, vec![int(4), kept.clone(), int(left)]);
                let Ok(Reply::Done { record, expires_in }) = reply else {
                    panic!("{op:?}: {reply:?}");
                };
                assert_eq!((record.is_whole(), expires_in), (whole, expected), "{op:?}");
                assert_eq!(record.execution(), ours.execution());
            }
        }
        // A foreign value is neither a record nor the absence of one.
        let long = "x".repeat(200);
        for foreign in ["", "foreign data", &long] {
            let reply = read(&job, vec![int(4), text(foreign), int(-1)]);
            let why = reply.expect_err("it is no record").to_string();
            let (key, remedy) = ("record key (NAMESPACE:{KEY}:done)", "delete it there");
            assert!(why.contains(key) && why.contains(remedy), "{why}");
        }
    }
}

#[test]
fn is_temporary_refusal_distinguishes_temporary_from_permanent_errors() {
    let refusal = |line: &str| parse_redis_value(line.as_bytes()).expect("it is a reply");
    for (line, is_temporary) in [
        (
            "-BUSY Redis is busy running a script. You can only call SCRIPT KILL\r\n",
            true,
        ),
        ("-LOADING Redis is loading the dataset in memory\r\n", true),
        (
            "-MISCONF Errors writing to the AOF file: No space left on device\r\n",
            true,
        ),
        (
            "-READONLY You can't write against a read only replica.\r\n",
            true,
        ),
        (
            "-NOREPLICAS Not enough good replicas to write. script: f, on @user_script:5.\r\n",
            true,
        ),
        (
            "-ERR Error running script (call to f_1): @user_script:5: @user_script: 5: -READONLY You can't write\r\n",
            true,
        ),
        (
            "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
            false,
        ),
        (
            "-NOPERM this user has no permissions to run the 'del' command\r\n",
            true,
        ),
        (
            "-ERR The user executing the script can't run this command or subcommand script: f, on @user_script:5.\r\n",
            true,
        ),
        (
            "-NOPERM this user has no permissions to access one of the keys used as arguments\r\n",
            false,
        ),
        ("-NOPERM No permissions to access a key\r\n", false),
        (
            "-ERR The user executing the script can't access at least one of the keys mentioned in the command arguments script: f, on @user_script:5.\r\n",
            false,
        ),
        (
            "-ERR unknown command 'BUSY', with args beginning with:\r\n",
            false,
        ),
        (":1\r\n", false),
    ] {
        assert_eq!(is_temporary_refusal(&refusal(line)), is_temporary, "{line}");
    }
}

#[test]
fn fetch_reads_a_whole_record_without_a_script() {
    let fetch = job(&recorded(true), Op::Fetch);
    let sent = arguments(&fetch);
    assert_eq!(sent, [&b"GET"[..], b"redlock:{k}:done"]);
    let read = |value| decode(&fetch.packet.command, &value, &"node".into());
    let kept = Value::BulkString(record().as_bytes().into());
    assert_eq!(read(kept), Ok(Reply::Whole(record())));
    assert_eq!(read(Value::Nil), Ok(Reply::NotDone));
    let foreign = read(Value::BulkString(b"foreign data".to_vec()));
    let why = foreign.expect_err("it is no record").to_string();
    assert!(why.contains("delete it there"), "{why}");
}

#[test]
fn scan_goes_on_where_the_server_says_until_it_says_zero() {
    let scan = |position: &[u8]| {
        let (position, pattern) = (position.into(), b"r:{*k*}"[..].into());
        job(&[].into(), Op::Scan { position, pattern })
    };
    for (position, sent) in [(&b""[..], &b"0"[..]), (b"17", b"17")] {
        let sent = [&b"SCAN"[..], sent, b"MATCH", b"r:{*k*}", b"COUNT"];
        let arguments = arguments(&scan(position));
        assert_eq!(arguments[..5], sent);
        assert_eq!(arguments[5..], [&b"50"[..], b"TYPE", b"string"]);
    }
    let text = |text: &[u8]| Value::BulkString(text.into());
    let read = |next: &[u8], names| read(&scan(b""), vec![text(next), Value::Array(names)]);
    let scanned = |names: &[&[u8]], next: Option<&[u8]>| {
        Reply::Scanned(Box::new(Scanned {
            names: names.iter().map(|name| Arc::from(*name)).collect(),
            next: next.map(Arc::from),
        }))
    };
    assert_eq!(read(b"0", vec![]), Ok(scanned(&[], None)));
    let some = read(b"40", vec![text(b"r:{k}"), text(b"\xff")]);
    assert_eq!(some, Ok(scanned(&[b"r:{k}", b"\xff"], Some(b"40"))));
    assert!(read(b"0", vec![Value::Int(1)]).is_err());
}
