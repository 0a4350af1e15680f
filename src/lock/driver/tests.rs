//! Tests of the task of a lock, with nodes that a test answers for.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, advance};
use tokio_test::task::{Spawn, spawn};
use tokio_test::{assert_pending, assert_ready};
use tracing::Span;

use super::*;
use crate::lock::LockError;
use crate::lock::cluster::Cluster;
use crate::lock::guard::LockGuard;
use crate::lock::queue::{LocalQueue, Permit, Wait};
use crate::lock::state::LockSpec;
use crate::lock::state::tests::granted;
use crate::node::{Job, Mutex, Node, NodeFailure, Subscriber, Subscription};
use crate::protocol::lease::Access;
use crate::protocol::message::{Op, Reply};
use crate::protocol::{LockKey, Namespace, Quorum};

/// A node that keeps what it is asked.
#[derive(Debug)]
struct Waiting {
    name: Arc<str>,
    jobs: Mutex<Vec<Job>>,
    /// Whether it panics when it is to release.
    is_broken: bool,
}

impl Node for Waiting {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn submit(&self, job: Job) {
        assert!(!self.is_broken || !job.is_release(), "a broken node");
        self.jobs.lock().push(job);
    }

    fn subscribe(&self, _: &Arc<[u8]>, _: Subscriber) -> Option<Subscription> {
        None
    }
}

impl Waiting {
    /// Answers the request that it has had for longest.
    fn answer(&self, outcome: Result<Reply, NodeFailure>) {
        self.jobs.lock().remove(0).sender.send(outcome);
    }

    /// Does the same with a release that it has published.
    fn publish(&self, subscribers: usize) {
        let mut release = self.jobs.lock().remove(0);
        release.sender.set_subscribers(subscribers);
        release.sender.send(Ok(Reply::Released));
    }

    fn grant(&self, number: u64) {
        self.answer(Ok(Reply::Granted(number)));
    }

    fn disconnect(&self) {
        let (node, why) = (Arc::clone(&self.name), "it ended".into());
        self.answer(Err(NodeFailure::Disconnected { node, why }));
    }

    /// Returns what it was asked and has not answered.
    fn asked(&self) -> Vec<Op> {
        let jobs = self.jobs.lock();
        jobs.iter().map(|job| job.op().clone()).collect()
    }
}

type Acquired = Result<LockGuard, LockError>;

/// Returns that many nodes, and a caller that asks them for a lock. The first may be broken.
fn asking(
    count: usize,
    is_broken: bool,
) -> (Vec<Arc<Waiting>>, Spawn<impl Future<Output = Acquired>>) {
    asking_with(Permit::default(), count, is_broken)
}

fn asking_with(
    permit: Permit,
    count: usize,
    is_broken: bool,
) -> (Vec<Arc<Waiting>>, Spawn<impl Future<Output = Acquired>>) {
    let node = |number: usize| {
        Arc::new(Waiting {
            name: number.to_string().into(),
            jobs: Mutex::default(),
            is_broken: is_broken && number == 0,
        })
    };
    let nodes: Vec<_> = (0..count).map(node).collect();
    let (state, _guard) = granted("k");
    let mut spec = LockSpec::clone(&state.spec);
    let dynamic = nodes.iter().map(|node| Arc::clone(node) as Arc<dyn Node>);
    let (quorum, cluster) = (Quorum::new(count).unwrap(), &spec.cluster);
    spec.cluster = Cluster::new(dynamic.collect(), quorum, &cluster.settings, &cluster.home);
    spec.names = Namespace::default()
        .names(&LockKey::from("k").into(), |_| [0; 32])
        .unwrap();
    let wait = Wait::new(Instant::now(), [None, None], None);
    let task = LockTask::new(Arc::new(spec), None, permit, wait, Span::none()).unwrap();
    let mut acquiring = spawn(async { task.acquire().await.map_err(LockError::from) });
    assert_pending!(acquiring.poll());
    (nodes, acquiring)
}

/// Returns the nodes that voted, and the failures of the others.
fn without_quorum(acquired: Acquired) -> (Vec<Arc<str>>, Vec<NodeFailure>) {
    match acquired.unwrap_err() {
        LockError::Unavailable { voted, nodes, .. } => (voted, nodes),
        error => panic!("{error}"),
    }
}

#[tokio::test(start_paused = true)]
async fn caller_is_woken_once_by_the_vote_that_may_decide() {
    let (nodes, mut acquiring) = asking(5, false);
    nodes[4].grant(7);
    nodes[0].grant(7);
    assert!(!acquiring.is_woken());
    nodes[2].grant(7);
    assert!(acquiring.is_woken());
    let guard = assert_ready!(acquiring.poll()).unwrap();
    assert_eq!(guard.fencing_token().map(u64::from), Some(7));
}

#[tokio::test(start_paused = true)]
async fn nodes_that_granted_different_numbers_are_asked_to_confirm_the_highest() {
    let (nodes, mut acquiring) = asking(3, false);
    for (node, number) in nodes.iter().zip([7, 9, 8]) {
        node.grant(number);
    }
    assert_pending!(acquiring.poll());
    assert!(nodes[1].asked().is_empty());
    let token = |node: &Waiting| match node.asked()[..] {
        [Op::Confirm { token, .. }] => token,
        _ => None,
    };
    assert_eq!([token(&nodes[0]), token(&nodes[2])], [Some(9); 2]);
    nodes[2].answer(Ok(Reply::At(9)));
    let guard = assert_ready!(acquiring.poll()).unwrap();
    assert_eq!(guard.fencing_token().map(u64::from), Some(9));
}

#[tokio::test(start_paused = true)]
async fn release_of_a_caller_that_goes_away_follows_its_request_at_every_node() {
    let (nodes, acquiring) = asking(3, false);
    nodes[1].grant(7);
    drop(acquiring);
    let [first, second, third] = [0, 1, 2].map(|node: usize| nodes[node].asked());
    assert!(matches!(first[..], [Op::Acquire { .. }, Op::Release]));
    assert!(matches!(second[..], [Op::Release]));
    assert!(matches!(third[..], [Op::Acquire { .. }, Op::Release]));
}

#[tokio::test(start_paused = true)]
async fn node_that_panics_keeps_no_other_from_its_release() {
    let (nodes, acquiring) = asking(3, true);
    drop(acquiring);
    for node in &nodes[1..] {
        assert!(matches!(
            node.asked()[..],
            [Op::Acquire { .. }, Op::Release]
        ));
    }
}

#[tokio::test(start_paused = true)]
async fn error_names_each_node_that_failed_or_had_not_answered() {
    let (nodes, mut acquiring) = asking(3, false);
    nodes[0].disconnect();
    assert_pending!(acquiring.poll());
    nodes[2].disconnect();
    let (voted, failures) = without_quorum(assert_ready!(acquiring.poll()));
    assert!(voted.is_empty());
    let [first, second, third] = &failures[..] else {
        panic!("{failures:?}");
    };
    assert!(matches!(first, NodeFailure::Disconnected { node, .. } if **node == *"0"));
    assert!(matches!(second, NodeFailure::Unanswered { node } if **node == *"1"));
    assert!(matches!(third, NodeFailure::Disconnected { node, .. } if **node == *"2"));
}

#[tokio::test(start_paused = true)]
async fn nodes_that_are_silent_are_given_up_after_the_node_timeout() {
    let (nodes, mut acquiring) = asking(3, false);
    nodes[1].grant(7);
    advance(Duration::from_millis(49)).await;
    assert_pending!(acquiring.poll());
    advance(Duration::from_millis(2)).await;
    let (voted, failures) = without_quorum(assert_ready!(acquiring.poll()));
    assert_eq!(voted.iter().map(|name| &**name).collect::<Vec<_>>(), ["1"]);
    assert!(
        failures
            .iter()
            .all(|failure| matches!(failure, NodeFailure::TimedOut { .. })),
        "{failures:?}"
    );
    assert!(
        nodes
            .iter()
            .all(|node| node.asked().last() == Some(&Op::Release))
    );
}

/// Its lanes may have had no turn yet.
#[tokio::test(start_paused = true)]
async fn nodes_get_a_tick_more_if_their_end_is_found_late() {
    for answers in [true, false] {
        let (nodes, mut acquiring) = asking(3, false);
        advance(Duration::from_millis(60)).await;
        assert_pending!(acquiring.poll());
        if answers {
            nodes[0].grant(7);
            nodes[2].grant(7);
        } else {
            advance(Duration::from_millis(2)).await;
        }
        assert!(acquiring.is_woken());
        assert_eq!(assert_ready!(acquiring.poll()).is_ok(), answers);
    }
}

/// Nodes may know of different processes that wait for the key.
#[tokio::test(start_paused = true)]
async fn place_learns_how_many_subscribers_a_node_reported_last() {
    let (queue, keys) = (Arc::<LocalQueue>::default(), LockKey::from("k").into());
    let permit = queue.try_acquire(&keys, Access::Exclusive).unwrap();
    let place = Arc::clone(&permit.places[0]);
    let (nodes, mut acquiring) = asking_with(permit, 3, false);
    nodes.iter().for_each(|node| node.grant(7));
    let guard = assert_ready!(acquiring.poll()).unwrap();
    let mut releasing = spawn(guard.release());
    assert_pending!(releasing.poll());
    nodes[0].publish(0);
    nodes[1].publish(2);
    assert!(assert_ready!(releasing.poll()).is_ok());
    assert_eq!(place.notified(), Some(3));
}
