//! Tests of a lane's handlers, without its loop.

use tokio::net::TcpStream;

use crate::node::job::Request;
use crate::node::packet::{Packet, Trail};
use crate::node::redis::lane::connection::tests::{candidate, shared};
use crate::node::votes::VoteReceiver;
use crate::protocol::message::{Command, Op};
use crate::protocol::{KeyNames, LockKey, Namespace, OwnerToken};

use super::*;

const TTL: Duration = Duration::from_secs(10);

/// A lane and the servers that it is connected to.
struct Bench {
    lane: Lane,
    /// Keeps the senders of the jobs open.
    votes: VoteReceiver,
    servers: Vec<TcpStream>,
}

/// The owner of an attempt.
struct Owner {
    token: OwnerToken,
    trail: Trail,
}

impl Owner {
    fn new(id: u8) -> Self {
        Self {
            token: OwnerToken::from_random([id; 16]),
            trail: Trail::default(),
        }
    }
}

impl Bench {
    /// Creates a lane with a connection.
    async fn new() -> Self {
        let votes = VoteReceiver::new(&["n".into()].into());
        let mut bench = Self {
            lane: Lane::new(shared()),
            votes,
            servers: Vec::new(),
        };
        let candidate = bench.candidate().await;
        bench.lane.adopt(candidate);
        bench
    }

    /// Connects to a new server.
    async fn candidate(&mut self) -> Candidate {
        let (candidate, server) = candidate().await;
        self.servers.push(server);
        candidate
    }

    fn job(&self, owner: &Owner, op: Op) -> Job {
        let names = Namespace::default().names(&LockKey::from("k").into(), |_| [0; 32]);
        let names: Arc<[KeyNames]> = names.unwrap().into();
        let command = Command {
            names,
            owner: owner.token.clone(),
            op,
        };
        let packet = Packet::of_attempt(command, false, owner.trail.clone());
        let sender = self.votes.sender(0);
        Job::new(Request::Command(packet), sender, Instant::now() + TTL)
    }

    /// Returns the release of an attempt whose lock has expired, but not its intent.
    fn take_back(&self, owner: &Owner) -> Job {
        let mut job = self.job(owner, Op::Release);
        let Request::Command(packet) = &job.request else {
            unreachable!("it is a command");
        };
        let (command, now) = (packet.command.clone(), Instant::now());
        let trail = owner.trail.clone();
        job.request = Request::Command(Packet::taking_back(Some(now + TTL), command, false, trail));
        job.useful_until = now;
        job
    }

    fn acquire(&self, owner: &Owner) -> Job {
        let op = Op::Acquire {
            proposal: Some(1),
            ttl: TTL,
            retention: TTL,
        };
        self.job(owner, op)
    }

    /// Returns the owners and kinds of the jobs in flight, in order.
    fn in_flight(&self) -> Vec<(OwnerToken, &'static str)> {
        let jobs = self.lane.in_flight.jobs();
        jobs.map(|job| match &job.request {
            Request::Command(packet) => (packet.command.owner.clone(), job.request.name()),
            Request::Ping => unreachable!("no test sends a ping"),
        })
        .collect()
    }
}

/// As after a panic: the release is submitted while the acquisition's sender is still open.
#[tokio::test]
async fn on_jobs_sends_a_release_whose_acquisition_is_in_the_same_batch() {
    let mut bench = Bench::new().await;
    let owner = Owner::new(1);
    let jobs = [bench.acquire(&owner), bench.job(&owner, Op::Release)];
    bench.lane.on_jobs(jobs.into_iter());
    let token = || owner.token.clone();
    assert_eq!(
        bench.in_flight(),
        [(token(), "acquire"), (token(), "release")]
    );
}

/// Otherwise the previous owner's lock would refuse the next owner.
#[tokio::test]
async fn adopt_sends_unconfirmed_releases_before_parked_jobs() {
    for replaced in [false, true] {
        let mut bench = Bench::new().await;
        let (first, second) = (Owner::new(1), Owner::new(2));
        let jobs = [bench.acquire(&first), bench.job(&first, Op::Release)];
        bench.lane.on_jobs(jobs.into_iter());
        let waiting = bench.acquire(&second);
        bench.lane.parked.push_back(waiting);
        if !replaced {
            bench.lane.on_lost(&"it broke".into());
        }
        let candidate = bench.candidate().await;
        bench.lane.adopt(candidate);
        let expected = [(first.token, "release"), (second.token, "acquire")];
        assert_eq!(bench.in_flight(), expected, "replaced: {replaced}");
    }
}

#[tokio::test]
async fn releases_of_intents_are_kept_while_there_is_room_but_keep_no_lane_alive() {
    let mut bench = Bench::new().await;
    bench.lane.on_lost(&"it broke".into());
    let owner = Owner::new(1);
    for _ in 0..MAX_KEPT {
        let job = bench.take_back(&owner);
        bench.lane.parked.push_back(job);
    }
    bench.lane.on_timer();
    assert_eq!(bench.lane.parked.load().jobs, MAX_KEPT);
    assert!(!bench.lane.has_release());
    let of_lock = bench.job(&owner, Op::Release);
    bench.lane.parked.push_back(of_lock);
    assert!(bench.lane.has_release());
    bench.lane.on_timer();
    assert_eq!(bench.lane.parked.load().jobs, 1);
}
