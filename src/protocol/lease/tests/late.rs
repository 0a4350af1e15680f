//! Tests of answers that come late, of requests that were never sent, and of callers that go at an odd time.

use super::executing::*;
use super::world::*;
use crate::protocol::message::Reply;

impl World {
    fn reply(&mut self, node: usize, number: u32, reply: Reply) {
        self.tell(node, number, Answer::Replied(reply));
    }
}

/// Returns a world whose caller confirms the number 9, because node 0 granted that, and the others 7.
fn confirming() -> World {
    let mut world = World::of(spec(7));
    world.reply(0, 1, Reply::Granted(9));
    world.reply(1, 1, Reply::Granted(7));
    assert_eq!(world.callers[0].lease.number(), 2);
    world
}

#[test]
fn node_that_got_no_confirm_may_still_hold_the_lock() {
    let mut world = confirming();
    world.tell(1, 2, Answer::NeverSent);
    assert_eq!(world.callers[0].lease.may_hold().len(), NODES);
}

#[test]
fn answer_to_an_earlier_confirm_does_not_count() {
    let mut world = confirming();
    // Node 1 granted the key to another owner meanwhile, and back, so that the numbers must be raised once more.
    world.reply(1, 2, Reply::At(12));
    world.reply(2, 2, Reply::At(12));
    let confirm = world.callers[0].lease.number();
    assert_eq!((confirm, world.callers[0].number()), (3, None));
    (0..2).for_each(|node| world.reply(node, 2, Reply::At(12)));
    assert_eq!(world.callers[0].number(), None);
    (0..2).for_each(|node| world.reply(node, 3, Reply::At(12)));
    assert_eq!(world.callers[0].number(), Some(12));
}

#[test]
fn second_phase_has_the_time_of_a_node_without_connection() {
    let quorum = Quorum::new(NODES).unwrap();
    let patience = |node| if node == 2 { ms(100) } else { Duration::ZERO };
    let mut world = World::of(spec(7));
    world.callers[0].lease = Lease::new(spec(7), quorum, world.now, patience);
    world.reply(0, 1, Reply::Granted(9));
    world.reply(1, 1, Reply::Granted(7));
    let due = START + NODE_TIMEOUT + ms(100);
    assert_eq!(world.callers[0].lease.poll_timeout(), Some(due));
}

// Rules: lock.straggler
#[test]
fn answer_to_the_acquisition_is_none_to_the_release() {
    let mut world = held(spec(7));
    world.handle(0, dropped(false));
    for node in 0..NODES {
        world.reply(node, 1, Reply::Granted(7));
    }
    assert_eq!(world.events(), []);
    assert_eq!(
        world.callers[0].lease.release_round().1.silent().len(),
        NODES
    );
}

#[test]
fn late_extension_is_followed_by_one_that_counts_from_its_request() {
    let mut world = held(spec(7));
    let at = START + TTL / 3;
    world.pass(at);
    (0..2).for_each(|node| world.execute(0, node));
    world.now += ms(40);
    (0..2).for_each(|node| world.answer(0, node));
    assert!(matches!(world.events()[..], [Event::Extended { .. }]));
    assert_eq!(world.callers[0].lease.poll_timeout(), Some(at + TTL / 3));
}

#[test]
fn lock_whose_loss_was_not_told_yet_is_released_at_once() {
    let mut world = held(LeaseSpec {
        hold_at_least: Some(2 * TTL),
        ..spec(7)
    });
    world.handle(0, Input::Delivered { at: START });
    world.now = START + TTL;
    world.handle(0, dropped(true));
    assert_eq!(world.callers[0].links[0].requests[0].1, Op::Release);
}

/// The request may take as long as a ttl until the node executes it, and the key ends a ttl after that.
#[test]
fn lock_is_gone_two_ttls_after_its_last_request() {
    let mut world = held(spec(7));
    assert_eq!(world.callers[0].lease.gone_at(), START + 2 * TTL);
    world.pass(START + TTL / 3);
    assert_eq!(world.callers[0].lease.gone_at(), START + TTL / 3 + 2 * TTL);
    // A shorter extension takes nothing back.
    world.serve(0, &[0, 1]);
    let (ttl, token) = (Some(TTL / 10), None);
    world.handle(0, Input::Extend { ttl, token });
    assert_eq!(world.callers[0].lease.gone_at(), START + TTL / 3 + 2 * TTL);
}

#[test]
fn answer_to_the_acquisition_is_none_to_the_recording() {
    let mut world = granted();
    world.callers[0].links[2].requests.clear();
    world.handle(0, begin());
    world.events();
    world.handle(0, store(record(1)));
    let number = world.callers[0].lease.number();
    world.reply(2, 1, Reply::Granted(7));
    world.tell(1, number, Answer::Failed);
    // It still waits for two nodes.
    assert_eq!(world.callers[0].lease.number(), number);
    world.reply(0, number, done(1));
    assert_eq!(world.events(), []);
    world.reply(2, number, done(1));
    assert_eq!(world.events(), [recorded(Some(record(1)))]);
}

fn done(number: u8) -> Reply {
    Reply::Done {
        record: record(number),
        expires_in: KEPT,
    }
}

/// Returns a world whose caller replays the record of two nodes, while the third has not answered.
fn replaying() -> World {
    let mut world = stored(&[0, 1], record(1));
    world.call(once(8));
    world.serve(0, &[0, 1]);
    assert_eq!(world.events(), [decided(Decided::Recorded(record(1)))]);
    world
}

#[test]
fn replay_asks_nothing_of_a_node_that_may_have_the_record() {
    let mut world = replaying();
    assert_eq!(world.asked(0), [0, 0, 1]);
    world.reply(2, 1, done(1));
    assert_eq!(world.events(), [Event::Settled]);
}

#[test]
fn replay_whose_caller_goes_away_is_released_at_once() {
    let mut world = replaying();
    world.handle(0, dropped(false));
    assert!(world.callers[0].lease.is_releasing());
    assert!(asks(&world, 0).contains(&(2, Op::Release)));
}

#[test]
fn replay_whose_record_cannot_be_read_is_released_without_a_copy() {
    let mut world = stored(&[0, 1], large(1));
    world.call(once(8));
    world.serve(0, &[2, 0, 1]);
    assert!(matches!(world.events()[..], [_, Event::Unread(_)]));
    world.handle(0, Input::Read(None));
    assert_eq!(asks(&world, 0), [(2, Op::Release)]);
}

/// A node whose grant is older than a record of it says so when the lock is renewed, before another node has answered.
#[test]
fn last_answer_before_the_execution_begins_decides_about_a_record() {
    let mut world = granted();
    world.pass(START + TTL / 3);
    world.reply(0, 2, done(1));
    world.reply(2, 1, Reply::Granted(7));
    world.handle(0, begin());
    let write = |(_, op): &(usize, Op)| matches!(op, Op::Record { .. });
    assert!(asks(&world, 0).iter().any(write));
}

#[test]
fn answers_count_until_the_execution_begins() {
    let mut world = stored(&[2], record(1));
    world.call(once(8));
    world.serve(0, &[0, 1]);
    assert!(world.callers[0].lease.counts(1));
    world.events();
    // The second record that arrives makes the majority.
    world.reply(2, 1, done(1));
    world.now += NODE_TIMEOUT + ms(1);
    world.callers[0].links[2].requests.clear();
    world.handle(0, begin());
    let repair = world.callers[0].lease.number();
    world.reply(0, repair, done(1));
    assert_eq!(world.events(), [decided(Decided::Recorded(record(1)))]);
}

/// Returns a world whose caller cannot record its outcome, and finds a large one of another at a node.
fn led_by_a_large_record() -> World {
    let mut world = begun();
    world.handle(0, store(record(1)));
    fail_all(&mut world);
    world.serve(0, &[1, 2]);
    let number = world.callers[0].lease.number();
    let expires_in = KEPT;
    let record = head(2);
    world.reply(0, number, Reply::Done { record, expires_in });
    assert_eq!(world.events(), [Event::Unread(head(2))]);
    world.callers[0].links[0].requests.clear();
    assert_eq!(asks(&world, 0), []);
    world
}

#[test]
fn large_record_that_leads_is_read_before_it_is_written() {
    let mut world = led_by_a_large_record();
    world.handle(0, Input::Read(Some(large(2))));
    let (record, retention) = (large(2), KEPT);
    assert_eq!(asks(&world, 0)[0], (0, Op::Record { record, retention }));
}

#[test]
fn large_record_that_leads_and_cannot_be_read_is_left_to_another_lease() {
    let mut world = led_by_a_large_record();
    world.handle(0, Input::Read(None));
    assert_eq!(world.events(), [Event::Unrepaired]);
}
