//! Tests of a lane's handlers, without its loop.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tokio::net::TcpStream;
use tokio::time::advance;

use crate::node::job::{Packet, VoteReceiver};
use crate::node::redis::lane::state::tests::candidate;
use crate::node::redis::link::tests::parse_all;
use crate::node::redis::server::tests::server;
use crate::protocol::message::{Command, Op};
use crate::protocol::{KeyNames, LockKey, Namespace, OwnerToken};

use super::*;

const TTL: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(1);

const ACQUIRE: Op = Op::Acquire {
    proposal: Some(1),
    ttl: TTL,
    retention: TTL,
};

const NOSCRIPT: &str = "-NOSCRIPT No matching script. Please use EVAL.\r\n";
/// What Redis 7.0 and later say of a key; of a command in a script, 7.2 and later; and 7.0; and 6.2.
const DENIED: [&str; 4] = [
    "-NOPERM this user has no permissions to access one of the keys used as arguments\r\n",
    "-NOPERM User u has no permissions to run the 'mget' command script: f, on @user_script:6.\r\n",
    "-ERR The user executing the script can't run this command or subcommand script: f, on @user_script:6.\r\n",
    "-ERR Error running script (call to f_1): @user_script:6: @user_script: 6: The user executing the script can't run this command or subcommand\r\n",
];
const CROSSSLOT: &str = "-CROSSSLOT Keys in request don't hash to the same slot\r\n";

/// A lane and the servers that it is connected to.
struct Bench {
    lane: Lane,
    /// Keeps the senders of the jobs open, by owner.
    votes: RefCell<BTreeMap<u8, VoteReceiver>>,
    servers: Vec<TcpStream>,
}

/// The owner of an attempt.
struct Owner {
    id: u8,
    token: OwnerToken,
}

impl Owner {
    fn new(id: u8) -> Self {
        Self {
            id,
            token: OwnerToken::from_random([id; 16]),
        }
    }
}

impl Bench {
    /// Creates a lane with a connection.
    async fn new() -> Self {
        let mut bench = Self {
            lane: Lane::new(server()),
            votes: RefCell::default(),
            servers: Vec::new(),
        };
        let candidate = bench.candidate().await;
        bench.lane.adopt(candidate);
        bench
    }

    /// Connects to a new server.
    async fn candidate(&mut self) -> Live {
        let (candidate, server) = candidate().await;
        self.servers.push(server);
        candidate
    }

    fn job(&self, owner: &Owner, op: Op) -> Job {
        self.job_on("k", owner, op)
    }

    fn job_on(&self, key: &str, owner: &Owner, op: Op) -> Job {
        let names = Namespace::default().names(&LockKey::from(key).into(), |_| [0; 32]);
        let names: Arc<[KeyNames]> = names.unwrap();
        let command = Command {
            names,
            owner: owner.token.clone(),
            op,
        };
        let packet = Arc::new(Packet::new(command, false, None));
        let new = || VoteReceiver::new(&["n".into()].into());
        let mut votes = self.votes.borrow_mut();
        let sender = votes.entry(owner.id).or_insert_with(new).sender(0);
        Job::new(packet, sender, Instant::now() + TTL)
    }

    /// Returns the release of an attempt whose lock has expired, but not its intent.
    fn take_back(&self, owner: &Owner) -> Job {
        let mut job = self.job(owner, Op::Release);
        let (command, now) = (command_of(&job).clone(), Instant::now());
        job.packet = Arc::new(Packet::new(command, false, Some(now + TTL)));
        job.useful_until = now;
        job
    }

    fn acquire(&self, owner: &Owner) -> Job {
        self.job(owner, ACQUIRE)
    }

    /// Returns a job of each owner, on a key of its own.
    fn jobs(&self, owners: &[Owner], op: &Op) -> Vec<Job> {
        let owners = owners.iter().enumerate();
        let jobs = owners.map(|(key, owner)| self.job_on(&key.to_string(), owner, op.clone()));
        jobs.collect()
    }

    /// Submits acquisitions of distinct keys, which share a call.
    fn acquire_together(&mut self, owners: &[Owner]) {
        self.lane.on_jobs(self.jobs(owners, &ACQUIRE).into_iter());
        assert_eq!(self.calls(), [owners.len()]);
    }

    /// Answers the oldest batch, as the server would.
    fn answer(&mut self, replies: &str) {
        let replies = parse_all(replies.as_bytes());
        self.lane.on_replied(replies, Ok(()));
    }

    /// Returns what the jobs have been answered so far: the reply, or the error in words.
    fn outcomes(&mut self) -> Vec<Result<Reply, String>> {
        let votes = self.votes.get_mut().values_mut();
        let outcomes = votes.flat_map(|votes| std::iter::from_fn(move || votes.try_recv()));
        let outcomes = outcomes.map(|vote| vote.outcome.map_err(|error| error.to_string()));
        outcomes.collect()
    }

    /// Returns the numbers of jobs in the calls in flight, in order, but for the commands of the lane itself.
    fn calls(&self) -> Vec<usize> {
        self.lane.calls.sizes().filter(|jobs| *jobs > 0).collect()
    }

    /// Returns the owners and kinds of the jobs in flight, in order.
    fn in_flight(&self) -> Vec<(OwnerToken, &'static str)> {
        let jobs = self.lane.calls.jobs.iter();
        jobs.map(|job| (command_of(job).owner.clone(), job.operation().name))
            .collect()
    }
}

fn command_of(job: &Job) -> &Command {
    &job.packet.command
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
    assert_eq!(bench.lane.parked.len(), MAX_KEPT);
    assert!(!bench.lane.has_release());
    let of_lock = bench.job(&owner, Op::Release);
    bench.lane.parked.push_back(of_lock);
    assert!(bench.lane.has_release());
    bench.lane.on_timer();
    assert_eq!(bench.lane.parked.len(), 1);
}

fn owners<const COUNT: usize>() -> [Owner; COUNT] {
    std::array::from_fn(|id| Owner::new(u8::try_from(id).expect("there are few")))
}

#[tokio::test(start_paused = true)]
async fn jobs_of_a_call_that_is_refused_unexecuted_are_sent_again_one_by_one() {
    for refusal in DENIED.into_iter().chain([CROSSSLOT]) {
        let mut bench = Bench::new().await;
        let owners = owners::<3>();
        bench.acquire_together(&owners);
        bench.answer(refusal);
        assert_eq!(bench.calls(), [1, 1, 1], "{refusal}");
        let again = bench.in_flight().into_iter().map(|(token, _)| token);
        let expected = owners.iter().map(|owner| owner.token.clone());
        assert!(again.eq(expected), "{refusal}");
        assert_eq!(bench.outcomes(), []);
        // The refusal of a single job is its own.
        bench.answer(&format!(":5\r\n{refusal}:7\r\n"));
        let outcomes = bench.outcomes();
        let [Ok(Reply::Granted(5)), Err(why), Ok(Reply::Granted(7))] = &outcomes[..] else {
            panic!("{outcomes:?}");
        };
        let refused = refusal.trim_end().trim_start_matches('-');
        assert!(why.contains(refused), "{why}");
        assert!(bench.lane.calls.is_empty() && bench.lane.parked.is_empty());
        // Another call would probably be refused as well.
        advance(SHARING_PAUSE - TICK).await;
        let jobs = bench.jobs(&owners, &ACQUIRE);
        bench.lane.on_jobs(jobs.into_iter());
        assert_eq!(bench.calls(), [1, 1, 1], "{refusal}");
        bench.answer(":5\r\n:6\r\n:7\r\n");
        advance(TICK).await;
        bench.acquire_together(&owners);
    }
}

#[tokio::test]
async fn jobs_of_a_call_without_its_script_share_calls_behind_the_scripts() {
    let mut bench = Bench::new().await;
    let owners = owners::<3>();
    bench.acquire_together(&owners);
    bench.answer(NOSCRIPT);
    assert_eq!(bench.calls(), [3]);
    assert_eq!(bench.outcomes(), []);
    bench.answer(&"$1\r\nx\r\n".repeat(load_all(false).len()));
    assert_eq!(bench.calls(), [3]);
    bench.answer(":1\r\n");
    assert_eq!(
        bench.outcomes(),
        [1; 3].map(|fence| Ok(Reply::Granted(fence)))
    );
}

/// The server would grant what nobody releases any more.
// Rules: lock.scripts
#[tokio::test]
async fn acquisition_of_a_refused_call_is_not_sent_again_behind_its_release() {
    for refusal in [NOSCRIPT, DENIED[0], DENIED[2], CROSSSLOT] {
        let mut bench = Bench::new().await;
        let owners = owners::<3>();
        bench.acquire_together(&owners);
        let release = bench.job_on("1", &owners[1], Op::Release);
        bench.lane.on_jobs([release].into_iter());
        bench.answer(refusal);
        let in_flight = bench.in_flight();
        let sent = in_flight
            .iter()
            .filter(|(token, _)| *token == owners[1].token);
        let sent: Vec<_> = sent.map(|(_, name)| *name).collect();
        assert_eq!(sent, ["release"], "{refusal}");
        assert_eq!(in_flight.len(), 3, "{refusal}");
        let outcomes = bench.outcomes();
        let refused = refusal.trim_end().trim_start_matches('-');
        assert!(
            matches!(&outcomes[..], [Err(why)] if why.contains(refused)),
            "{outcomes:?}"
        );
    }
}

#[tokio::test]
async fn releases_of_a_refused_call_are_sent_again_until_they_are_executed() {
    for refusal in [NOSCRIPT, DENIED[0], DENIED[2], CROSSSLOT] {
        let mut bench = Bench::new().await;
        let owners = owners::<3>();
        let mut jobs = bench.jobs(&owners, &Op::Release);
        // Something was sent before, so they are not called off.
        jobs.iter_mut().for_each(Job::mark_sent);
        bench.lane.on_jobs(jobs.into_iter());
        assert_eq!(bench.calls(), [3]);
        bench.answer(refusal);
        assert_eq!(bench.in_flight().len(), 3, "{refusal}");
        assert_eq!(bench.outcomes(), []);
    }
}

#[tokio::test]
async fn releases_of_a_call_that_a_busy_server_refuses_are_kept_in_order() {
    let mut bench = Bench::new().await;
    let owners = owners::<3>();
    bench.acquire_together(&owners);
    bench.answer(":1\r\n");
    assert_eq!(bench.outcomes().len(), 3);
    let jobs = bench.jobs(&owners, &Op::Release);
    bench.lane.on_jobs(jobs.into_iter());
    bench.answer("-BUSY Redis is busy running a script.\r\n");
    assert_eq!(bench.outcomes().len(), 3);
    let kept = bench.lane.refused.iter().map(|job| &command_of(job).owner);
    assert!(kept.eq(owners.iter().map(|owner| &owner.token)));
    // A call of which the server executes some releases is one that it executes.
    let mut next = bench.job_on("next", &Owner::new(9), Op::Release);
    next.mark_sent();
    bench.lane.on_jobs([next].into_iter());
    bench.answer(":0\r\n");
    assert_eq!(bench.calls(), [3]);
}

/// The home has ended: the server may have executed what was sent, and the next lane sends the releases.
#[tokio::test]
async fn lane_that_is_dropped_answers_its_jobs_and_leaves_only_releases() {
    let mut bench = Bench::new().await;
    let (first, second) = (Owner::new(1), Owner::new(2));
    let sent = bench.jobs(&[first, second], &ACQUIRE);
    bench.lane.on_jobs(sent.into_iter());
    let release = bench.job(&Owner::new(3), Op::ReleaseExecuted);
    bench.lane.parked.push_back(release);
    let server = Arc::clone(&bench.lane.server);
    server.set_down(&"it is down".into());
    let Bench { lane, votes, .. } = bench;
    assert!(server.failure().is_some());
    drop(lane);
    assert!(
        server.failure().is_none(),
        "nothing would start the next lane"
    );
    for votes in votes.into_inner().values_mut().take(2) {
        let failure = votes.try_recv().unwrap().outcome.unwrap_err();
        assert!(!failure.never_sent(), "{failure}");
    }
    let mut left = VecDeque::new();
    server.inbox.take(9, &mut left);
    assert!(left.len() == 1 && left[0].is_release());
}

/// The lane was late, because its home was not run: the server may be quarantined for longer by now.
#[tokio::test(start_paused = true)]
async fn job_waits_while_it_is_not_known_whether_a_quarantine_is_over() {
    let mut bench = Bench::new().await;
    bench.lane.server.set_answering(Some(Instant::now()));
    let asked_at = bench.lane.knows_more_at();
    bench.lane.server.set_asked_at(asked_at);
    advance(2 * TTL).await;
    let job = bench.acquire(&Owner::new(1));
    bench.lane.on_jobs([job].into_iter());
    assert_eq!((bench.calls(), bench.outcomes()), (vec![], vec![]));
    bench.lane.server.set_answering(None);
    bench.lane.send_parked();
    assert_eq!(bench.calls(), [1]);
}

/// The time counts from the grant, and not from when the server executes the release.
#[tokio::test(start_paused = true)]
async fn releases_that_leave_keys_taken_are_sent_with_the_rest_of_the_time() {
    let mut bench = Bench::new().await;
    let owner = Owner::new(1);
    let mut job = bench.job(&owner, Op::ReleaseAfter { left: TTL });
    let command = command_of(&job).clone();
    let until = Some(Instant::now() + TTL);
    job.packet = Arc::new(Packet::new(command, false, until));
    job.useful_until = Instant::now() + 2 * TTL;
    let left = |bench: &Bench| {
        let jobs = bench.lane.calls.jobs.iter();
        jobs.map(|job| command_of(job).op.clone())
            .collect::<Vec<_>>()
    };
    let after = |seconds| {
        [Op::ReleaseAfter {
            left: Duration::from_secs(seconds),
        }]
    };
    // It waits for a connection; is sent again on the next; and is answered late.
    bench.lane.on_lost(&"it broke".into());
    bench.lane.parked.push_back(job);
    for left_then in [8, 6] {
        advance(2 * Duration::from_secs(1)).await;
        let candidate = bench.candidate().await;
        bench.lane.adopt(candidate);
        assert_eq!(left(&bench), after(left_then));
    }
    advance(4 * Duration::from_secs(1)).await;
    bench.answer(":-2\r\n");
    assert_eq!(left(&bench), after(2));
    advance(4 * Duration::from_secs(1)).await;
    bench.answer(":-2\r\n");
    assert_eq!(left(&bench), after(0));
    advance(4 * Duration::from_secs(1)).await;
    bench.answer(":-2\r\n");
    assert!(bench.lane.calls.is_empty() && bench.lane.parked.is_empty());
    assert_eq!(bench.outcomes(), [const { Ok(Reply::Released) }; 3]);
}

/// The server may have executed a release whose reply is lost.
#[tokio::test]
async fn a_release_finds_its_lock_gone_only_if_it_was_sent_once() {
    for is_repeated in [false, true] {
        let mut bench = Bench::new().await;
        let owner = Owner::new(1);
        let mut jobs = [bench.acquire(&owner), bench.job(&owner, Op::Release)];
        jobs[0].mark_sent();
        let [_, release] = jobs;
        bench.lane.on_jobs([release].into_iter());
        if is_repeated {
            let candidate = bench.candidate().await;
            bench.lane.adopt(candidate);
        }
        bench.outcomes();
        bench.answer(":-3\r\n");
        let outcome = if is_repeated {
            Reply::Released
        } else {
            Reply::Lost
        };
        assert_eq!(bench.outcomes(), [Ok(outcome)]);
    }
}

#[tokio::test]
async fn calls_of_one_batch_are_refused_independently() {
    let mut bench = Bench::new().await;
    let owners = owners::<4>();
    let ops = [ACQUIRE, Op::Release, ACQUIRE, Op::Release];
    let jobs = owners.iter().zip(ops).enumerate();
    let mut jobs: Vec<_> = jobs
        .map(|(key, (owner, op))| bench.job_on(&key.to_string(), owner, op))
        .collect();
    jobs.iter_mut().for_each(Job::mark_sent);
    bench.lane.on_jobs(jobs.into_iter());
    assert_eq!(bench.calls(), [2, 2]);
    bench.answer(&format!("{}*2\r\n:-2\r\n:0\r\n", DENIED[0]));
    assert_eq!(bench.outcomes(), [Ok(Reply::Released), Ok(Reply::Released)]);
    let again = bench.in_flight();
    let expected = [0, 2].map(|place: usize| (owners[place].token.clone(), "acquire"));
    assert_eq!(again, expected);
}

/// What the lane believes of every later reply would be wrong.
#[tokio::test]
async fn connection_is_given_up_when_a_reply_comes_without_a_request() {
    let mut bench = Bench::new().await;
    let owner = Owner::new(1);
    bench.lane.on_jobs([bench.acquire(&owner)].into_iter());
    // Behind one with a request, which counts.
    bench.answer(":5\r\n:6\r\n");
    assert_eq!(bench.outcomes(), [Ok(Reply::Granted(5))]);
    assert!(bench.lane.live.is_none());
}

/// Otherwise the inbox would fill up although the server answers.
#[tokio::test]
async fn jobs_give_their_room_in_the_inbox_back_however_they_end() {
    let mut bench = Bench::new().await;
    let owners = owners::<4>();
    let mut expected = 0;
    let mut ended = |bench: &Bench, jobs: usize| {
        expected += jobs * weight(&bench.acquire(&Owner::new(9)));
        assert_eq!(bench.lane.finished, expected);
    };
    // Answered; refused for good; disconnected; called off; not wanted; dropped while parked.
    bench
        .lane
        .on_jobs(bench.jobs(&owners[..2], &ACQUIRE).into_iter());
    bench.answer("*2\r\n:1\r\n-OOM no memory\r\n");
    ended(&bench, 2);
    bench.acquire_together(&owners);
    bench.lane.on_lost(&"it broke".into());
    ended(&bench, 4);
    bench
        .lane
        .on_jobs([bench.job(&Owner::new(8), Op::Release)].into_iter());
    ended(&bench, 1);
    bench.lane.on_jobs([bench.acquire(&owners[0])].into_iter());
    ended(&bench, 0);
    let late = bench.acquire(&owners[1]);
    bench.votes.borrow_mut().clear();
    bench.lane.on_jobs([late].into_iter());
    ended(&bench, 1);
    bench.lane.on_timer();
    ended(&bench, 1);
}

/// Its releases must reach the server, and a lane that takes no jobs would not notice that its node was dropped.
#[tokio::test(start_paused = true)]
async fn a_lane_with_all_its_batches_in_flight_takes_jobs_of_a_server_that_is_down() {
    let mut bench = Bench::new().await;
    let owner = Owner::new(1);
    while bench.lane.has_room() {
        bench.lane.on_jobs([bench.acquire(&owner)].into_iter());
    }
    bench.lane.server.inbox.close();
    // Nothing listens where it tries to connect again.
    let ended = tokio::time::timeout(TTL, bench.lane.run()).await;
    ended.expect("it ends with its node");
}

#[tokio::test(start_paused = true)]
async fn a_new_connection_stands_by_while_the_silent_one_may_still_answer() {
    let mut bench = Bench::new().await;
    bench.acquire_together(&[Owner::new(1)]);
    advance(TTL / 2).await;
    bench.lane.start_attempt();
    let opened = bench.candidate().await;
    bench.lane.on_attempted(Ok(opened));
    assert!(matches!(bench.lane.next, Some(Next::Standby(..))));
    // A release would overtake the request on the old one.
    assert_eq!(bench.calls(), [1]);
}
