//! Tests of executions: found, begun, recorded, and repaired.

use std::collections::HashSet;

use super::world::*;
use crate::protocol::message::Reply;
use crate::protocol::{ExecutionId, Fingerprint, Record};

pub(super) const KEPT: Duration = ms(60_000);

fn fingerprint(number: u8) -> Fingerprint {
    Fingerprint::from_digest([number; 32])
}

pub(super) fn once(proposal: u64) -> LeaseSpec {
    LeaseSpec {
        once: Some(OnceSpec::of_request(0)),
        ..spec(proposal)
    }
}

pub(super) fn record(number: u8) -> Record {
    let id = ExecutionId::from_random([number; 16]);
    Record::new(id, fingerprint(0), [0; 32], &[number])
}

/// One whose rest nodes do not send with their answers.
pub(super) fn large(number: u8) -> Record {
    let id = ExecutionId::from_random([number; 16]);
    let rest = vec![number; Record::MAX_INLINE + 1];
    Record::new(id, fingerprint(0), [0; 32], &rest)
}

/// What nodes send of it.
pub(super) fn head(number: u8) -> Record {
    Record::from_bytes(large(number).as_bytes()[..Record::HEAD].into()).unwrap()
}

pub(super) fn store(record: Record) -> Input {
    let retention = KEPT;
    Input::Record { record, retention }
}

pub(super) fn begin() -> Input {
    Input::Begin
}

pub(super) fn decided(decided: Decided) -> Event {
    Event::Decided(decided)
}

pub(super) fn recorded(record: Option<Record>) -> Event {
    Event::Recorded(record)
}

/// Returns a world whose first caller holds the key by the grants of two nodes, while its request to the third is on
/// its way.
pub(super) fn granted() -> World {
    let mut world = World::executing();
    world.call(once(7));
    world.serve(0, &[0, 1]);
    assert!(matches!(world.events()[..], [Event::Granted { .. }]));
    world
}

pub(super) fn begun() -> World {
    let mut world = granted();
    world.serve(0, &[2]);
    world.handle(0, begin());
    assert_eq!(world.events(), [Event::Begun]);
    world
}

/// Has some nodes store a record of another execution, which wrote it before the world began.
pub(super) fn stored(nodes: &[usize], record: Record) -> World {
    let mut world = World::executing();
    world.now = Duration::ZERO;
    let other = world.call(once(1));
    world.serve(other, &[0, 1, 2]);
    let retention = KEPT + START;
    let store = Input::Record { record, retention };
    world.handle(other, store);
    for node in nodes {
        world.execute(other, *node);
    }
    // Its lock has expired where it was not recorded.
    world.now = START;
    world.callers.clear();
    world
}

/// Returns the last request to each node that is on its way.
pub(super) fn asks(world: &World, caller: usize) -> Vec<(usize, Op)> {
    let links = world.callers[caller].links.iter().enumerate();
    let last = |(node, link): (usize, &Link)| Some((node, link.requests.back()?.1.clone()));
    links.filter_map(last).collect()
}

#[test]
fn outcome_is_told_by_a_majority_and_written_to_the_rest() {
    let mut world = begun();
    world.handle(0, store(record(1)));
    // A record ends the lock, for which others wait.
    assert_eq!(world.callers[0].published, 1);
    world.serve(0, &[0]);
    assert_eq!(world.events(), []);
    world.serve(0, &[2]);
    let told = recorded(Some(record(1)));
    assert_eq!(world.events(), [told]);
    // The third is overdue, and gets the record as one that is known.
    world.callers[0].links[1].requests.clear();
    world.pass(START + NODE_TIMEOUT);
    // It did not answer the `RECORD`, and may still have the lock.
    ends_with_a_copy(&mut world, 1, KEPT - NODE_TIMEOUT, Op::ReleaseExecuted);
    assert_eq!(world.callers[0].published, 1);
}

/// With an outcome of its own, a lease ends when its task dies, also if it copies the record of another.
#[test]
fn only_a_replay_outlives_its_caller() {
    let mut copies = granted();
    copies.serve(0, &[2]);
    copies.handle(0, store(record(1)));
    assert!(!copies.callers[0].lease.outlives_caller());
    let mut replays = stored(&[0, 1, 2], record(1));
    replays.call(once(7));
    assert!(!replays.callers[0].lease.outlives_caller());
    replays.serve(0, &[0, 1]);
    assert!(replays.callers[0].lease.outlives_caller());
    replays.serve(0, &[2]);
    assert!(!replays.callers[0].lease.outlives_caller());
}

/// The lease copies the record to the last node, and then releases what that may have locked.
fn ends_with_a_copy(world: &mut World, node: usize, retention: Duration, release: Op) {
    let record = record(1);
    for op in [Op::TopUp { record, retention }, release] {
        assert_eq!(asks(world, 0), [(node, op)]);
        world.serve(0, &[node]);
    }
    assert_eq!(world.events(), [Event::Settled]);
    assert_eq!(world.holders(), 0);
}

// Rules: once.replay
#[test]
fn later_caller_gets_the_outcome_and_copies_it_to_a_node_without_one() {
    let mut world = stored(&[0, 1], record(1));
    world.call(once(8));
    world.serve(0, &[2, 0]);
    assert_eq!(world.events(), []);
    world.serve(0, &[1]);
    assert_eq!(world.events(), [decided(Decided::Recorded(record(1)))]);
    // Granted there, and not begun.
    ends_with_a_copy(&mut world, 2, KEPT, Op::Release);
}

// Rules: once.repair
#[test]
fn record_of_a_minority_is_written_to_a_majority_before_it_is_replayed() {
    let mut world = stored(&[0], record(1));
    world.call(once(8));
    world.serve(0, &[0, 1]);
    assert_eq!(world.events(), []);
    world.serve(0, &[2]);
    let repair = Op::Record {
        record: record(1),
        retention: KEPT,
    };
    assert_eq!(asks(&world, 0), [(1, repair.clone()), (2, repair)]);
    assert_eq!(world.events(), []);
    world.serve(0, &[2]);
    assert_eq!(world.events()[0], decided(Decided::Recorded(record(1))));
}

#[test]
fn large_record_is_read_before_it_is_repaired_and_the_read_has_its_own_time() {
    for is_readable in [true, false] {
        let mut world = stored(&[0], large(1));
        world.call(once(8));
        world.serve(0, &[0, 1, 2]);
        assert_eq!(world.events(), [Event::Unread(head(1))]);
        // No node is waited for meanwhile.
        assert_eq!(world.callers[0].lease.poll_timeout(), None);
        world.now += ms(500);
        let read = is_readable.then(|| large(1));
        world.handle(0, Input::Read(read));
        if !is_readable {
            assert_eq!(world.events()[0], decided(Decided::Undecided));
            assert!(matches!(
                asks(&world, 0)[..],
                [(1, Op::Release), (2, Op::Release)]
            ));
            continue;
        }
        let due = START + NODE_TIMEOUT + ms(500) + asks(&world, 0)[0].1.transit();
        assert_eq!(world.callers[0].lease.poll_timeout(), Some(due));
        world.serve(0, &[1]);
        assert!(matches!(
            world.events()[..],
            [Event::Decided(Decided::Recorded(_)), ..]
        ));
    }
}

// Rules: once.begin
#[test]
fn record_that_arrives_before_the_execution_begins_decides() {
    // Two nodes granted the key, and the third has a record of an execution that they have lost.
    let mut world = stored(&[2], record(1));
    world.call(once(8));
    world.serve(0, &[0, 1]);
    assert!(matches!(world.events()[..], [Event::Granted { .. }]));
    world.serve(0, &[2]);
    world.now += 3 * NODE_TIMEOUT;
    world.handle(0, begin());
    assert_eq!(world.events(), []);
    assert!(!world.callers[0].lease.is_holding());
    // The time between does not count.
    let due = world.now + NODE_TIMEOUT;
    assert_eq!(world.callers[0].lease.poll_timeout(), Some(due));
    assert!(matches!(
        asks(&world, 0)[..],
        [(0, Op::Record { .. }), (1, Op::Record { .. })]
    ));
    world.serve(0, &[0]);
    assert_eq!(world.events(), [decided(Decided::Recorded(record(1)))]);
}

/// With a record, the answers to the first request matter even in the second phase.
#[test]
fn node_that_is_silent_in_a_second_phase_with_a_record_is_not_waited_for() {
    let mut world = World::executing();
    let other = world.call(once(20));
    world.execute(other, 0);
    world.handle(other, dropped(false));
    world.execute(other, 0);
    world.callers.clear();
    world.call(once(7));
    world.serve(0, &[0, 1]);
    assert!(matches!(
        asks(&world, 0)[..],
        [(1, Op::Confirm { .. }), (2, _)]
    ));
    world.tell_record(1, record(1), KEPT);
    assert_eq!(world.events(), []);
    world.pass(START + NODE_TIMEOUT);
    assert!(matches!(asks(&world, 0)[0], (0, Op::Record { .. })));
    // What it asks for then has time of its own.
    let due = world.now + NODE_TIMEOUT;
    assert_eq!(world.callers[0].lease.poll_timeout(), Some(due));
    world.callers[0].links[0].requests.clear();
    world.tell_record(0, record(1), KEPT);
    assert_eq!(world.events()[0], decided(Decided::Recorded(record(1))));
}

#[test]
fn old_grant_is_confirmed_once_before_the_execution_begins() {
    let mut world = granted();
    world.now += NODE_TIMEOUT + ms(1);
    world.handle(0, begin());
    assert_eq!(world.events(), []);
    assert!(world.callers[0].lease.is_extending());
    world.callers[0].links[2].requests.pop_front();
    world.serve(0, &[0, 1]);
    assert!(matches!(world.events()[..], [Event::Extended { .. }]));
    world.now += NODE_TIMEOUT + ms(1);
    world.handle(0, begin());
    assert_eq!(world.events(), [Event::Begun]);
    // And in that answer a record decides, too.
    let mut world = stored(&[2], record(1));
    world.call(once(8));
    world.serve(0, &[0, 1]);
    world.callers[0].links[2].requests.clear();
    world.now += NODE_TIMEOUT + ms(1);
    world.handle(0, begin());
    world.serve(0, &[2, 0, 1]);
    world.events();
    world.handle(0, begin());
    assert!(!world.callers[0].lease.is_holding());
    assert!(!world.events().contains(&Event::Begun));
}

#[test]
fn execution_does_not_begin_when_its_lock_is_lost() {
    let mut world = granted();
    world.now = START + TTL;
    world.handle(0, begin());
    assert_eq!(world.events(), [Event::Lost(LostReason::Expired)]);
    world.handle(0, begin());
    assert_eq!(world.events(), []);
    world.handle(0, dropped(true));
    assert!(matches!(asks(&world, 0)[..], [(0, Op::Release), ..]));
}

// Rules: once.kept
#[test]
fn execution_without_a_record_keeps_its_key_unless_it_says_that_it_had_no_effect() {
    let drop_with = |effect| Input::Dropped {
        publishes: true,
        effect,
    };
    let mut world = begun();
    world.handle(0, drop_with(Effect::Unknown));
    assert_eq!(asks(&world, 0), []);
    assert_eq!(world.events(), [Event::Settled]);
    assert_eq!(world.callers[0].lease.may_hold().len(), NODES);
    assert_eq!(world.holders(), NODES);
    for (effect, op) in [
        (Effect::WithoutEffect, Op::ReleaseExecuted),
        (Effect::NotBegun, Op::Release),
    ] {
        let mut world = begun();
        world.handle(0, drop_with(effect));
        assert_eq!(asks(&world, 0)[0], (0, op));
    }
    let mut world = granted();
    world.serve(0, &[2]);
    world.handle(0, drop_with(Effect::Unknown));
    assert_eq!(asks(&world, 0)[0], (0, Op::Release));
}

impl World {
    /// Has a node answer the last request with a record.
    fn tell_record(&mut self, node: usize, record: Record, expires_in: Duration) {
        let number = self.callers[0].lease.number();
        let answer = Answer::Replied(Reply::Done { record, expires_in });
        self.tell(node, number, answer);
    }
}

/// Has the nodes fail at the last request, until that decides.
pub(super) fn fail_all(world: &mut World) {
    let number = world.callers[0].lease.number();
    for link in &mut world.callers[0].links {
        link.requests.clear();
        link.answers.clear();
    }
    for node in 0..NODES {
        if world.callers[0].lease.number() == number {
            world.tell(node, number, Answer::Failed);
        }
    }
}

#[test]
fn outcome_that_no_node_has_is_not_recorded_and_the_key_stays() {
    let mut world = begun();
    world.handle(0, store(record(1)));
    fail_all(&mut world);
    assert_eq!(asks(&world, 0)[0], (0, Op::Look));
    world.serve(0, &[0, 1, 2]);
    let told = recorded(None);
    assert_eq!(world.events(), [told, Event::Settled]);
    assert_eq!(world.holders(), NODES);
}

/// A node has it, which the others do not know and which cannot be reached any more.
#[test]
fn outcome_that_a_node_said_to_have_is_written_again_although_no_node_answers() {
    let mut world = begun();
    world.handle(0, store(record(1)));
    world.serve(0, &[1]);
    fail_all(&mut world);
    assert_eq!(asks(&world, 0)[0], (0, Op::Look));
    fail_all(&mut world);
    let again = Op::Record {
        record: record(1),
        retention: KEPT,
    };
    assert_eq!(asks(&world, 0)[0], (0, again));
    world.serve(0, &[0, 2]);
    let told = recorded(Some(record(1)));
    assert_eq!(world.events(), [told]);
}

// Rules: once.again
#[test]
fn outcome_of_a_minority_is_written_again_under_the_old_owner() {
    let mut world = begun();
    world.handle(0, store(record(1)));
    world.execute(0, 1);
    fail_all(&mut world);
    world.now += ms(10);
    world.serve(0, &[0, 1, 2]);
    let again = Op::Record {
        record: record(1),
        retention: KEPT - ms(10),
    };
    assert_eq!(asks(&world, 0)[0], (0, again));
    world.serve(0, &[0, 1]);
    let told = recorded(Some(record(1)));
    assert_eq!(world.events(), [told]);
    world.serve(0, &[2]);
    assert_eq!(world.events(), [Event::Settled]);
    assert_eq!(world.holders(), 0);
}

/// Otherwise each attempt to write it could lengthen the life of a record.
#[test]
fn outcome_that_is_written_again_is_kept_as_long_as_where_it_is() {
    let mut world = begun();
    world.handle(0, store(record(1)));
    fail_all(&mut world);
    world.serve(0, &[1, 2]);
    let left = ms(5_000);
    world.tell_record(0, record(1), left);
    let (record, retention) = (record(1), left);
    assert_eq!(asks(&world, 0)[1], (1, Op::Record { record, retention }));
}

#[test]
fn outcome_of_another_that_leads_is_written_instead() {
    let mut world = begun();
    world.handle(0, store(record(1)));
    fail_all(&mut world);
    world.serve(0, &[1, 2]);
    world.tell_record(0, record(2), KEPT);
    let other = Op::Record {
        record: record(2),
        retention: KEPT,
    };
    assert_eq!(asks(&world, 0)[1], (1, other));
    (0..2).for_each(|node| world.tell_record(node, record(2), KEPT));
    let told = recorded(Some(record(2)));
    assert_eq!(world.events(), [told]);
}

// Rules: once.again
#[test]
fn outcome_that_the_old_owner_cannot_write_is_repaired_by_another() {
    let another = Decided::Recorded(record(2));
    let cases = [
        (Decided::Recorded(record(1)), Some(record(1))),
        (another, Some(record(2))),
        (Decided::Undecided, None),
    ];
    for (found, record_of_majority) in cases {
        let mut world = begun();
        world.handle(0, store(record(1)));
        world.execute(0, 1);
        fail_all(&mut world);
        world.serve(0, &[0, 1, 2]);
        fail_all(&mut world);
        assert_eq!(world.events(), [Event::Unrepaired]);
        assert_eq!(world.callers[0].lease.awaited(), None);
        let is_recorded = record_of_majority.is_some();
        world.handle(0, Input::Repaired(found));
        let told = recorded(record_of_majority);
        assert_eq!(world.events()[0], told);
        // What may still be locked is released only if the outcome is known.
        assert_eq!(!asks(&world, 0).is_empty(), is_recorded);
    }
}

#[test]
fn lease_that_only_repairs_is_granted_nothing() {
    let mut world = World::executing();
    let mut spec = once(7);
    spec.once = spec.once.map(|once| OnceSpec {
        executes: false,
        ..once
    });
    world.call(spec);
    world.serve(0, &[0, 1]);
    assert_eq!(world.events(), [decided(Decided::Undecided)]);
    assert!(world.callers[0].lease.is_releasing());
}

/// Each order in which the requests and answers of two executing callers can arrive, where each may go at any time
/// before it begins: a caller never begins once an outcome is known, and all outcomes are one.
#[test]
fn no_order_of_messages_leads_to_two_outcomes() {
    let mut world = World::executing();
    world.call(once(7));
    world.call(once(5));
    let (mut seen, mut ahead) = (HashSet::new(), vec![world]);
    let (mut executed, mut replayed, mut both) = (0, 0, 0);
    while let Some(world) = ahead.pop() {
        if !seen.insert(world.clone()) {
            continue;
        }
        let told = |caller: &Caller| {
            caller.events.iter().find_map(|event| match event {
                Event::Recorded(record) => record.clone(),
                Event::Decided(Decided::Recorded(record)) => Some(record.clone()),
                _ => None,
            })
        };
        let outcomes: Vec<_> = world.callers.iter().filter_map(told).collect();
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
        let mut next = Vec::new();
        for (number, caller) in world.callers.iter().enumerate() {
            next.extend(world.after_messages(number));
            if !caller.lease.is_holding() {
                continue;
            }
            let is_begun = caller.events.contains(&Event::Begun);
            let mut after = world.clone();
            if is_begun {
                let record = record(u8::try_from(number).unwrap() + 1);
                after.handle(number, store(record));
            } else {
                after.handle(number, begin());
                let begins = after.callers[number].events.contains(&Event::Begun);
                assert!(!begins || outcomes.is_empty(), "begun after an outcome");
            }
            after.finish(number);
            next.push(after);
        }
        if next.is_empty() {
            let is_begun = |caller: &&Caller| {
                let begun = Event::Begun;
                caller.events.contains(&begun)
            };
            let begun = world.callers.iter().filter(is_begun).count();
            executed += usize::from(begun == 1);
            both += usize::from(begun == 2);
            replayed += usize::from(outcomes.len() > begun);
        }
        ahead.extend(next);
    }
    assert!(executed > 0 && replayed > 0, "{executed} {replayed}");
    assert_eq!(both, 0);
}
