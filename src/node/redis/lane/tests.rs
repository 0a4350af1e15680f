//! What a lane does with jobs, looked at between two of its steps.

use tokio::net::{TcpListener, TcpStream};

use crate::node::VoteReceiver;
use crate::node::job::{Packet, Trail};
use crate::node::redis::socket::Socket;
use crate::node::redis::{RedisNode, Timeouts, pool_for};
use crate::protocol::message::{Command, Op};
use crate::protocol::{KeyNames, LockKey, Namespace, OwnerToken};

use super::*;

const TTL: Duration = Duration::from_secs(10);

/// A lane, and what it sends to.
struct Bench {
    lane: Lane,
    /// As long as it is there, the jobs are of use.
    votes: VoteReceiver,
    servers: Vec<TcpStream>,
}

/// What one owner asks.
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
    /// A lane with a connection.
    async fn new() -> Self {
        let limit = Duration::from_secs(1);
        let endpoint = pool_for("redis://127.0.0.1:1", limit).unwrap();
        let timeouts = Timeouts {
            node: limit,
            connect: limit,
        };
        let node = RedisNode::new(endpoint, timeouts, None);
        let votes = VoteReceiver::new(&["n".into()].into());
        let mut bench = Self {
            lane: Lane::new(Arc::clone(&node.shared)),
            votes,
            servers: Vec::new(),
        };
        let opened = bench.opened().await;
        bench.lane.adopt(opened);
        bench
    }

    async fn opened(&mut self) -> Opened {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, server) = tokio::join!(client, listener.accept());
        self.servers.push(server.unwrap().0);
        Opened {
            link: Link::Own(Socket::new(client.unwrap())),
            admission: None,
        }
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

    /// The release of an attempt whose lock has expired, and whose intent has not.
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

    /// Returns what is on the connection, in order.
    fn out(&self) -> Vec<(OwnerToken, &'static str)> {
        let out = self.lane.out.iter();
        out.map(|job| match &job.request {
            Request::Command(packet) => (packet.command.owner.clone(), job.request.name()),
            Request::Ping => unreachable!("no test asks that here"),
        })
        .collect()
    }
}

/// As it is after a panic: the release comes while the ballots of the attempt are still open.
#[tokio::test]
async fn a_release_is_not_called_off_whose_acquisition_is_in_the_same_batch() {
    let mut bench = Bench::new().await;
    let owner = Owner::new(1);
    let jobs = [bench.acquire(&owner), bench.job(&owner, Op::Release)];
    bench.lane.on_jobs(jobs.into_iter());
    let token = || owner.token.clone();
    assert_eq!(bench.out(), [(token(), "acquire"), (token(), "release")]);
}

/// Else the next owner of the key would be refused by the one before.
#[tokio::test]
async fn releases_that_are_sent_again_go_out_before_what_waited() {
    for replaced in [false, true] {
        let mut bench = Bench::new().await;
        let (first, second) = (Owner::new(1), Owner::new(2));
        let jobs = [bench.acquire(&first), bench.job(&first, Op::Release)];
        bench.lane.on_jobs(jobs.into_iter());
        let waiting = bench.acquire(&second);
        bench.lane.parked.push_back(waiting);
        if !replaced {
            bench.lane.on_link_lost(&"it broke".into());
        }
        let opened = bench.opened().await;
        bench.lane.adopt(opened);
        let expected = [(first.token, "release"), (second.token, "acquire")];
        assert_eq!(bench.out(), expected, "replaced: {replaced}");
    }
}

#[tokio::test]
async fn releases_of_intents_are_kept_while_there_is_room_and_do_not_keep_a_lane_alive() {
    let mut bench = Bench::new().await;
    bench.lane.on_link_lost(&"it broke".into());
    let owner = Owner::new(1);
    for _ in 0..MAX_KEPT {
        let job = bench.take_back(&owner);
        bench.lane.parked.push_back(job);
    }
    bench.lane.on_alarm();
    assert_eq!(bench.lane.parked.load().jobs, MAX_KEPT);
    assert!(!bench.lane.has_release());
    let of_lock = bench.job(&owner, Op::Release);
    bench.lane.parked.push_back(of_lock);
    assert!(bench.lane.has_release());
    bench.lane.on_alarm();
    assert_eq!(bench.lane.parked.load().jobs, 1);
}
