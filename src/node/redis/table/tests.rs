//! Tests of requests as they go over the wire.

use deadpool_redis::redis::Value;
use tokio::time::Instant;

use super::*;
use crate::node::job::{Job, Packet, VoteReceiver};
use crate::node::redis::link::tests::parse_all;
use crate::protocol::{LockKey, Namespace, OwnerToken};

const TTL: Duration = Duration::from_secs(1);
const RETENTION: Duration = Duration::from_secs(2);
const GENERATION: &str = "r:100:999999:run";

/// Returns a request of the owner with this number on a key of its own.
fn request(number: u8, op: Op, notifies: bool) -> Job {
    let key = LockKey::from(format!("k{number}"));
    let names = Namespace::default().names(&key.into(), |_| [0; 32]);
    let command = Command {
        names: names.expect("the key is valid"),
        owner: OwnerToken::from_random([number; 16]),
        op,
    };
    let votes = VoteReceiver::new(&["n".into()].into());
    let packet = Arc::new(Packet::new(command, notifies, None));
    Job::new(packet, votes.sender(0), Instant::now())
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

fn encode(requests: &[Job], check: &GenerationCheck, output: &mut BytesMut) {
    let commands = requests.iter().map(|request| request.encoded(check));
    encode_call_into(commands, check, output);
}

fn arguments(requests: &[Job], check: &GenerationCheck) -> Vec<String> {
    let mut written = BytesMut::new();
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
    let check = |key, generation| GenerationCheck {
        key,
        generation,
        in_cluster_mode: false,
    };
    let known = Some(GENERATION.into());
    [
        check(None, known.clone()),
        check(key(), None),
        check(key(), known),
    ]
}

#[test]
fn calls_have_the_arguments_of_the_script_headers() {
    let [off, unknown, known] = &checks();
    let large = 1_763_659_999_000_003;
    let acquires = [acquire(Some(5)), acquire(Some(large))];
    let confirms = [confirm(5), confirm(large)];
    let unfenced = [acquire(None), acquire(None)];
    let releases = [Op::Release, Op::ReleaseExecuted];
    let (lock, check) = (&ACQUIRE, &CONFIRM);
    let (plain, release) = (&ACQUIRE_UNFENCED, &RELEASE);
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
            "O1" => owners[0].to_value(),
            "O2" => owners[1].to_value(),
            "generation" => GENERATION.to_owned(),
            "none" => String::new(),
            number => number.to_owned(),
        };
        let mut expected = vec!["EVALSHA".to_owned(), script.word(false).to_owned()];
        expected.extend(rest.split(' ').map(part));
        assert_eq!(arguments(&requests, check), expected, "{ops:?}, {check:?}");
    }
}

/// Nothing else differs: servers that are not in cluster mode get declared keys.
#[test]
fn scripts_get_their_keys_as_arguments_in_cluster_mode() {
    let ops = [
        acquire(Some(5)),
        acquire(None),
        confirm(5),
        Op::Release,
        Op::Look,
    ];
    for (op, check) in ops.iter().flat_map(|op| checks().map(|check| (op, check))) {
        for count in 1..3 {
            let requests = || (0..count).map(|number| request(number, op.clone(), false));
            let declared = arguments(&requests().collect::<Vec<_>>(), &check);
            let there = GenerationCheck {
                key: check.key.clone(),
                generation: check.generation.clone(),
                in_cluster_mode: true,
            };
            let undeclared = arguments(&requests().collect::<Vec<_>>(), &there);
            if declared[0] == "EVALSHA" {
                assert_ne!(undeclared[1], declared[1], "{op:?}");
                assert_eq!(undeclared[2], "0", "{op:?}");
                assert_eq!(undeclared[3..], declared[2..], "{op:?}");
            } else {
                assert_eq!(undeclared, declared);
            }
        }
    }
}

/// A request may be in a call of each kind of check: its nodes share what is encoded.
#[test]
fn a_single_request_is_sent_by_its_own_script() {
    let ops = [acquire(Some(5)), acquire(None), confirm(5), Op::Release];
    for (op, check) in ops.iter().flat_map(|op| checks().map(|check| (op, check))) {
        let of = |number| request(number, op.clone(), true);
        let (alone, shared, other) = (of(1), of(1), of(2));
        let mut expected = BytesMut::new();
        encode(&[alone], &check, &mut expected);
        // As part of a call before.
        let requests = [shared, other];
        encode(&requests, &check, &mut BytesMut::new());
        let mut written = BytesMut::new();
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
    assert_eq!(sent[3 + 129 + 3 + 126..], [&last.to_value(), "5"]);
}

#[test]
fn lengths_are_written_as_the_standard_library_writes_them() {
    for length in [0, 9, 10, 99, 100, 12_345] {
        let mut written = BytesMut::new();
        put_length(&mut written, b'$', length);
        assert_eq!(written, format!("${length}\r\n").as_bytes());
    }
}
