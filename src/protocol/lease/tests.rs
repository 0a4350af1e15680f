//! Tests of the machine, with a clock that is moved by hand and reference nodes.

use std::collections::HashSet;

use crate::protocol::acquire::{Contention, Refusal};
use world::*;

mod executing;
mod holding;
mod late;
mod world;

#[test]
fn majority_grants_a_lock_and_its_validity_counts_from_before_the_first_request() {
    let mut world = World::of(spec(7));
    let awaited = Awaited {
        number: 1,
        answers: 2,
    };
    assert_eq!(world.callers[0].lease.awaited(), Some(awaited));
    world.now += ms(20);
    world.serve(0, &[2]);
    assert_eq!(world.events(), []);
    world.serve(0, &[0]);
    assert_eq!(world.events(), [granted_at_once()]);
}

// Rules: lock.validity
#[test]
fn grant_that_comes_after_its_validity_is_given_up_everywhere() {
    let mut world = World::of(LeaseSpec {
        node_timeout: 2 * TTL,
        ..spec(7)
    });
    world.execute(0, 0);
    world.execute(0, 1);
    world.now += TTL - ms(5);
    world.answer(0, 0);
    world.answer(0, 1);
    let elapsed = TTL - ms(5);
    assert_eq!(world.events(), [Event::TooLate { elapsed }]);
    world.serve(0, &[0, 1]);
    world.serve(0, &[2, 2]);
    assert_eq!(world.events(), [Event::Settled]);
    assert_eq!(world.holders(), 0);
}

// Rules: lock.confirm
#[test]
fn numbers_that_differ_are_raised_to_the_highest() {
    let mut world = World::new();
    let first = world.call(spec(9));
    world.serve(first, &[0]);
    world.handle(first, dropped(false));
    world.execute(first, 0);
    let second = world.call(spec(3));
    world.serve(second, &[0, 1]);
    // Node 0 has a higher fence now.
    assert_eq!(world.callers[second].number(), None);
    // Any answer may decide now, also a late grant of that number.
    let any = Awaited::default();
    assert_eq!(world.callers[second].lease.awaited(), Some(any));
    world.serve(second, &[1]);
    assert_eq!(world.callers[second].number(), Some(10));
}

#[test]
fn refused_attempt_is_released_where_it_may_be_held_and_nowhere_else() {
    let mut world = World::new();
    let (first, second) = (world.call(spec(7)), world.call(spec(8)));
    world.serve(first, &[0, 1]);
    world.serve(second, &[2, 0, 1]);
    let [Event::Refused(Refusal::Contended(contention))] = &world.callers[second].events[..] else {
        panic!("{:?}", world.callers[second].events);
    };
    assert!(contention.is_split);
    assert_eq!(world.asked(second), [0, 0, 1]);
    // Others hold the key, so nobody waits for this.
    assert_eq!(world.callers[second].published, 0);
    world.serve(second, &[2]);
    assert_eq!(world.callers[second].events[1..], [Event::Settled]);
    assert_eq!(world.holders(), 2);
}

#[test]
fn nodes_that_are_silent_for_too_long_count_as_failed_and_are_released() {
    let mut world = World::of(spec(7));
    world.serve(0, &[1]);
    world.pass(START + NODE_TIMEOUT);
    let [Event::Refused(Refusal::Unavailable { voted, unanswered })] = &world.events()[..] else {
        panic!("it is not refused");
    };
    // Each of the others has failed.
    assert!(voted.iter().eq([1]) && unanswered.is_empty());
    world.execute(0, 0);
    world.answer(0, 0);
    world.serve(0, &[0, 1]);
    world.pass(START + 2 * NODE_TIMEOUT);
    assert_eq!(world.events(), [Event::Settled]);
    let left: Vec<_> = world.callers[0].lease.may_hold().iter().collect();
    assert_eq!(left, [2]);
    // It was silent, not gone.
    world.serve(0, &[2, 2]);
    assert!(world.callers[0].lease.may_hold().is_empty());
    assert_eq!(world.holders(), 0);
}

#[test]
fn node_without_connection_has_longer_for_its_first_answer() {
    let mut world = World::new();
    let quorum = Quorum::new(NODES).unwrap();
    let patience = |node| if node == 2 { ms(100) } else { Duration::ZERO };
    let lease = Lease::new(spec(7), quorum, world.now, patience);
    world.call(spec(7));
    world.callers[0].lease = lease;
    world.serve(0, &[0]);
    world.pass(START + NODE_TIMEOUT + ms(99));
    assert_eq!(world.events(), []);
    world.serve(0, &[2]);
    assert!(matches!(world.events()[..], [Event::Granted { .. }]));
}

// Rules: lock.release
#[test]
fn caller_that_goes_away_leaves_nothing_wherever_its_requests_are() {
    for executed in 0..=NODES {
        let mut world = World::of(spec(7));
        (0..executed).for_each(|node| world.execute(0, node));
        world.handle(0, dropped(false));
        assert_eq!(world.callers[0].published, 1);
        for node in 0..NODES {
            while !world.callers[0].links[node].requests.is_empty() {
                world.execute(0, node);
            }
            while !world.callers[0].links[node].answers.is_empty() {
                world.answer(0, node);
            }
        }
        assert_eq!(world.events(), [Event::Settled]);
        assert_eq!(world.holders(), 0);
    }
}

#[test]
fn node_that_was_never_asked_is_not_released() {
    let mut world = World::of(spec(7));
    world.callers[0].links[2].requests.clear();
    world.tell(2, 1, Answer::NeverSent);
    world.handle(0, dropped(false));
    assert_eq!(world.asked(0), [2, 2, 0]);
}

#[test]
fn release_is_told_by_a_majority_and_goes_on_at_the_others() {
    let mut world = held(spec(7));
    let publishes = true;
    world.handle(0, dropped(publishes));
    let awaited = |answers| Some(Awaited { number: 2, answers });
    assert_eq!(world.callers[0].lease.awaited(), awaited(2));
    world.serve(0, &[0]);
    assert_eq!(world.events(), []);
    world.serve(0, &[1]);
    assert_eq!(world.events(), [Event::Released(VoteStep::Agreed)]);
    assert_eq!(world.callers[0].lease.awaited(), awaited(1));
    world.pass(START + NODE_TIMEOUT);
    assert_eq!(world.events(), [Event::Settled]);
    assert_eq!(world.callers[0].lease.poll_timeout(), None);
}

#[test]
fn release_that_no_majority_confirms_is_told_after_the_node_timeout() {
    let mut world = held(spec(7));
    let publishes = false;
    world.handle(0, dropped(publishes));
    world.serve(0, &[0]);
    world.pass(START + NODE_TIMEOUT);
    let unconfirmed = Event::Released(VoteStep::Missed { reached: 1 });
    assert_eq!(world.events(), [unconfirmed, Event::Settled]);
}

/// Explores every order in which requests are executed, answers arrive, holders let go and callers go away.
///
/// No time passes here, so a caller that was granted the lock has it until it lets go. Answers to a caller that releases
/// decide nothing, so it gets them at once.
#[test]
fn two_callers_exclude_each_other_in_every_order_and_leave_nothing() {
    let mut world = World::new();
    world.call(spec(5));
    world.call(spec(5));
    let (mut seen, mut ahead) = (HashSet::new(), vec![world]);
    let (mut granted, mut refused, mut ends) = (0, 0, 0);
    while let Some(world) = ahead.pop() {
        if !seen.insert(world.clone()) {
            continue;
        }
        let is_holding = |caller: &&Caller| matches!(caller.lease.stage, LifeStage::Holding(_));
        let holding = world.callers.iter().filter(is_holding).count();
        assert!(holding <= 1, "two callers hold the lock");
        let numbers: Vec<_> = world.callers.iter().filter_map(Caller::number).collect();
        if let [one, other] = numbers[..] {
            assert_ne!(one, other, "two callers have one token");
        }
        let mut next = Vec::new();
        for (caller, of) in world.callers.iter().enumerate() {
            next.extend(world.after_messages(caller));
            let input = match of.lease.stage {
                LifeStage::Acquiring(_) if caller == 1 => dropped(false),
                LifeStage::Holding(_) => dropped(true),
                _ => continue,
            };
            let mut world = world.clone();
            world.handle(caller, input);
            world.finish(caller);
            next.push(world);
        }
        if next.is_empty() {
            assert_eq!(world.holders(), 0, "a lock is left");
            for caller in &world.callers {
                assert_eq!(caller.events.last(), Some(&Event::Settled));
                granted += usize::from(caller.number().is_some());
                let is_refused = |event: &Event| matches!(event, Event::Refused(_));
                refused += usize::from(caller.events.iter().any(is_refused));
            }
            ends += 1;
        }
        ahead.extend(next);
    }
    assert!(
        granted > 1 && refused > 1 && ends > 10,
        "{granted} {refused} {ends}"
    );
}

#[test]
fn refused_key_is_held_until_a_time_that_is_known() {
    let mut world = World::new();
    let (first, second) = (world.call(spec(7)), world.call(spec(8)));
    world.serve(first, &[0, 1, 2]);
    world.serve(second, &[0, 1]);
    let refused = Event::Refused(Refusal::Contended(Contention {
        expires_in: Some(TTL),
        ..Contention::default()
    }));
    assert_eq!(world.callers[second].events[0], refused);
}
