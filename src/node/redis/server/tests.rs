//! Tests of what a server's node, lane and reader share.

use std::future::poll_fn;

use tokio::time::advance;
use tokio_test::task::spawn;
use tokio_test::{assert_pending, assert_ready};

use super::*;
use crate::node::job::{Packet, VoteReceiver};
use crate::protocol::admission::{Generation, Introduction};
use crate::protocol::message::{Command, Op};
use crate::protocol::{ExecutionId, Fingerprint, KeyNames, OwnerToken, Quorum, Record};

#[cfg(shuttle)]
mod schedules;

/// A server at which nothing listens.
pub(in super::super) fn server() -> Arc<RedisServer> {
    let limit = Duration::from_secs(1);
    let config = deadpool_redis::Config::from_url("redis://127.0.0.1:1");
    let endpoint = Endpoint::from_config(&config, None).unwrap();
    let timeouts = Timeouts {
        node: limit,
        connect: limit,
    };
    Arc::new(RedisServer::new(
        endpoint,
        timeouts,
        Guard::new(Duration::ZERO, None),
        &Arc::default(),
        &Arc::new(Peers::new(Quorum::new(3).unwrap(), None)),
    ))
}

#[tokio::test]
async fn a_server_that_stays_down_or_up_is_counted_once() {
    let server = server();
    let up = || server.set_answering(None);
    let down = || server.set_down(&"Connection refused".into());
    let quarantined = || server.set_answering(Some(Instant::now()));
    let steps: [(&dyn Fn(), usize); 7] = [
        (&up, 3),
        (&down, 2),
        (&down, 2),
        (&quarantined, 2),
        (&up, 3),
        (&up, 3),
        (&down, 2),
    ];
    for (report, voting) in steps {
        report();
        let effect = server.peers.effect();
        assert!(
            effect.contains(&format!("({voting} of 3 vote)")),
            "{effect}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_begins_with_its_first_failure() {
    let server = server();
    let down = |why: &str| server.set_down(&why.into());
    for _ in 0..2 {
        down("Connection refused");
        advance(Duration::from_secs(5)).await;
        down("Connection reset");
        advance(Duration::from_secs(2)).await;
        let NodeState::Unreachable { why, since } = server.state() else {
            panic!("{:?}", server.state());
        };
        assert_eq!((&*why, since.as_secs()), ("Connection reset", 7));
        server.set_answering(None);
    }
}

/// The lane of the first asks no guard any more, and would go on to send what it gets.
#[tokio::test]
async fn both_names_of_one_server_are_refused_once_the_second_is_admitted() {
    let (server, other) = (server(), Arc::from("other"));
    let generation = Generation::new(&OwnerToken::from_random([1; 16]), Duration::ZERO, "run");
    let admits = |node: &Arc<str>| {
        let said = Introduction {
            run_id: "run".into(),
            replication_id: "data".into(),
            uptime: Duration::ZERO,
            generation: generation.clone(),
            now: Duration::ZERO,
        };
        server.guard.meet(node, said, Duration::ZERO);
    };
    admits(&server.name);
    server.set_answering(None);
    assert_eq!(server.failure(), None);
    admits(&other);
    let why = format!("{} and other are one server; list it once", server.name);
    assert_eq!(server.failure(), Some(server.unreachable(why)));
    server.guard.forget(&other);
    assert_eq!(server.failure(), None);
}

const MAX_JOBS: usize = 1 << 16;

fn job(op: Op) -> Job {
    let names: Arc<[KeyNames]> = Arc::new([]);
    let command = Command {
        names,
        owner: OwnerToken::from_random([0; 16]),
        op,
    };
    let packet = Arc::new(Packet::new(command, false, None));
    let votes = VoteReceiver::new(&["n".into()].into());
    Job::new(packet, votes.sender(0), Instant::now())
}

fn record(bytes: usize) -> Job {
    let id = ExecutionId::from_random([1; 16]);
    let body = vec![0; bytes];
    let record = Record::new(id, Fingerprint::from_digest([2; 32]), [3; 32], &body);
    let retention = Duration::from_secs(1);
    job(Op::Record { record, retention })
}

#[tokio::test]
async fn post_counts_jobs_that_the_lane_has_taken_and_accepts_every_release() {
    let inbox = Inbox::default();
    assert!(matches!(inbox.post(job(Op::Look)), Ok(true)));
    for _ in 1..MAX_JOBS {
        assert!(matches!(inbox.post(job(Op::Look)), Ok(false)));
    }
    let is_full = |job| inbox.post(job).is_err();
    assert!(is_full(job(Op::Look)));
    assert!(!is_full(job(Op::Release)));
    let mut taken = VecDeque::new();
    inbox.take(MAX_JOBS + 1, &mut taken);
    assert_eq!(taken.len(), MAX_JOBS + 1);
    assert!(is_full(job(Op::Look)));
    // The lane has finished them and looks for more.
    let mut finished = taken.iter().map(weight).sum();
    let mut ready = spawn(poll_fn(|context| inbox.poll_ready(context, &mut finished)));
    assert_pending!(ready.poll());
    assert!(!is_full(job(Op::Look)));
}

#[tokio::test]
async fn post_bounds_the_size_of_records() {
    let inbox = Inbox::default();
    let is_full = |job| inbox.post(job).is_err();
    assert!(!is_full(record(MAX_WEIGHT / 2)));
    assert!(is_full(record(MAX_WEIGHT / 2)));
    assert!(!is_full(job(Op::Look)));
    let mut taken = VecDeque::new();
    inbox.take(1, &mut taken);
    assert!(is_full(record(MAX_WEIGHT / 2)));
    drop(taken);
    inbox.detach(Vec::new());
    assert!(!is_full(record(MAX_WEIGHT / 2)));
}

#[tokio::test]
async fn post_wakes_the_lane_once_and_a_closed_inbox_ends_it_when_empty() {
    let inbox = Inbox::default();
    let ready = || poll_fn(|context| inbox.poll_ready(context, &mut 0));
    let post = || assert!(inbox.post(job(Op::Look)).is_ok());
    post();
    assert!(ready().await);
    inbox.take(1, &mut VecDeque::new());
    let mut lane = spawn(ready());
    assert_pending!(lane.poll());
    post();
    assert!(lane.is_woken());
    post();
    assert!(assert_ready!(lane.poll()));
    inbox.close();
    assert!(ready().await);
    inbox.take(2, &mut VecDeque::new());
    assert!(!ready().await);
}

#[test]
fn jobs_that_a_lane_leaves_are_before_those_that_wait_for_the_next() {
    let inbox = Inbox::default();
    assert!(matches!(inbox.post(job(Op::Release)), Ok(true)));
    let mut taken = VecDeque::new();
    inbox.take(9, &mut taken);
    assert!(matches!(inbox.post(job(Op::Look)), Ok(false)));
    inbox.detach(taken.drain(..).collect());
    assert!(matches!(inbox.post(job(Op::Look)), Ok(true)));
    assert!(matches!(inbox.post(job(Op::Look)), Ok(false)));
    inbox.take(9, &mut taken);
    assert!(taken.len() == 4 && taken[0].is_release());
}
