//! Tests of a lock while it is held.

use super::world::*;
use crate::protocol::{Namespace, Store};

#[test]
fn first_renewal_counts_from_before_the_first_request() {
    let mut world = World::of(spec(7));
    world.now += ms(40);
    world.serve(0, &[0, 1]);
    let at = START + TTL / 3;
    world.pass(at - ms(1));
    assert!(!world.callers[0].lease.is_extending());
    world.pass(at);
    assert!(world.callers[0].lease.is_extending());
}

/// A renewal may lock the key at a node that the first request did not reach.
#[test]
fn node_that_was_asked_for_a_renewal_only_is_released_too() {
    let mut world = World::of(spec(7));
    world.callers[0].links[2].requests.clear();
    world.tell(2, 1, Answer::NeverSent);
    world.serve(0, &[0, 1]);
    assert_eq!(world.callers[0].lease.may_hold().len(), 2);
    world.pass(START + TTL / 3);
    world.serve(0, &[2, 0, 1]);
    world.handle(0, dropped(true));
    assert_eq!(world.asked(0), [1, 1, 1]);
}

#[test]
fn lock_is_renewed_after_each_third_of_its_ttl() {
    let mut world = held(spec(7));
    for third in 1..=9 {
        let at = START + third * TTL / 3;
        world.pass(at);
        assert!(world.callers[0].lease.is_extending());
        world.serve(0, &[0, 2]);
        let valid_until = at + validity::lifetime(TTL).unwrap();
        let extended = Event::Extended {
            valid_until,
            token: Some(7),
            is_asked: false,
        };
        assert_eq!(world.events(), [extended]);
        world.serve(0, &[1]);
    }
    assert_eq!(world.events(), []);
}

#[test]
fn failed_renewal_is_repeated_after_a_tenth_and_the_lock_ends_a_tick_early() {
    let mut world = held(spec(7));
    world.pass(START + TTL / 3);
    world.callers[0]
        .links
        .iter_mut()
        .for_each(|link| link.requests.clear());
    world.pass(START + TTL / 3 + NODE_TIMEOUT + TTL / 10 - TICK);
    assert!(!world.callers[0].lease.is_extending());
    world.pass(START + TTL / 3 + NODE_TIMEOUT + TTL / 10);
    assert!(world.callers[0].lease.is_extending());
    let end = START + validity::lifetime(TTL).unwrap();
    world.pass(end - 2 * TICK);
    assert_eq!(world.events(), []);
    world.pass(end - TICK);
    assert_eq!(world.events(), [Event::Lost(LostReason::Expired)]);
    world.pass(end + TTL);
    assert!(!world.callers[0].lease.is_extending());
}

/// Its nodes may have set that expiry and a shorter one since.
// Rules: lock.extension
#[test]
fn answer_to_an_extension_before_the_current_one_does_not_count() {
    let mut world = held(spec(7));
    world.pass(START + TTL / 3);
    (0..NODES).for_each(|node| world.execute(0, node));
    world.pass(START + TTL / 3 + NODE_TIMEOUT + TTL / 10);
    assert!(world.callers[0].lease.is_extending());
    (0..NODES).for_each(|node| world.answer(0, node));
    assert_eq!(world.events(), []);
    world.serve(0, &[0, 1]);
    assert!(matches!(world.events()[..], [Event::Extended { .. }]));
}

// Rules: lock.extension
#[test]
fn extension_by_a_holder_sets_the_ttl_and_the_token_and_never_cuts_the_validity() {
    let mut world = held(spec(7));
    let before = START + validity::lifetime(TTL).unwrap();
    let (ttl, token) = (Some(TTL / 3), Some(20));
    world.handle(0, Input::Extend { ttl, token });
    world.serve(0, &[0, 1]);
    let extended = Event::Extended {
        valid_until: before,
        token: Some(20),
        is_asked: true,
    };
    assert_eq!(world.events(), [extended]);
    world.pass(START + TTL / 9);
    assert_eq!(world.callers[0].links[0].requests.len(), 1);
    let (_, op) = &world.callers[0].links[0].requests[0];
    let Op::Confirm { token, ttl, .. } = op else {
        panic!("{op:?}");
    };
    assert_eq!((*token, *ttl), (Some(20), TTL / 3));
}

// Rules: lock.loss
#[test]
fn lock_that_a_majority_does_not_have_is_gone() {
    let mut world = held(spec(7));
    for node in &mut world.nodes {
        *node = Store::new();
    }
    world.pass(START + TTL / 3);
    world.serve(0, &[0]);
    assert_eq!(world.events(), []);
    world.serve(0, &[1]);
    assert_eq!(world.events(), [Event::Lost(LostReason::Gone)]);
    let publishes = false;
    world.handle(0, dropped(publishes));
    world.serve(0, &[0, 1]);
    assert_eq!(world.events(), [Event::Released(VoteStep::Lost)]);
}

#[test]
fn longest_hold_ends_the_renewals_and_the_validity() {
    let max_hold = Some(3 * TTL);
    let mut world = held(LeaseSpec {
        max_hold,
        ..spec(7)
    });
    let end = START + 3 * TTL;
    let mut lost = None;
    for at in 0..=4_000 {
        world.pass(START + ms(at));
        for node in 0..NODES {
            while !world.callers[0].links[node].requests.is_empty() {
                world.serve(0, &[node]);
            }
        }
        for event in world.events() {
            if let Event::Lost(loss) = event {
                lost = lost.or(Some((world.now, loss)));
            }
        }
    }
    let (at, loss) = lost.unwrap();
    assert_eq!(loss, LostReason::MaxHold);
    assert!(end - 2 * TICK <= at && at <= end + 2 * TICK, "{at:?}");
}

#[test]
fn revoked_lock_is_not_renewed_and_its_keys_stay_until_the_holder_is_gone() {
    let mut world = held(spec(7));
    world.handle(0, Input::Revoked);
    world.handle(0, Input::Revoked);
    assert_eq!(world.events(), [Event::Lost(LostReason::Revoked)]);
    world.pass(START + TTL / 2);
    assert_eq!(world.asked(0), [0; NODES]);
    let publishes = true;
    world.handle(0, dropped(publishes));
    assert_eq!(world.asked(0), [1; NODES]);
}

#[test]
fn lock_that_is_renewed_no_longer_lives_to_the_end_of_its_validity() {
    let mut world = held(spec(7));
    world.handle(0, Input::StopRenewing);
    world.pass(START + 2 * TTL);
    assert_eq!(world.events(), [Event::Lost(LostReason::Expired)]);
    assert_eq!(world.asked(0), [0; NODES]);
}

#[test]
fn partial_lock_is_renewed_until_it_is_delivered_and_held_from_then_on() {
    let mut world = held(LeaseSpec {
        renews: false,
        is_partial: true,
        max_hold: Some(TTL),
        ..spec(7)
    });
    for _ in 0..5 {
        world.pass(world.now + TTL / 3);
        assert!(world.callers[0].lease.is_extending());
        world.serve(0, &[0, 1, 2]);
    }
    let at = world.now;
    world.handle(0, Input::Delivered { at });
    world.events();
    world.pass(at + TTL);
    assert_eq!(world.events(), [Event::Lost(LostReason::Expired)]);
    assert_eq!(world.asked(0), [0; NODES]);
}

#[test]
fn released_keys_stay_taken_for_as_long_as_they_are_to() {
    let hold_at_least = Some(ms(500));
    for (held_for, left) in [(200, Some(ms(300))), (600, None)] {
        let mut world = held(LeaseSpec {
            hold_at_least,
            ..spec(7)
        });
        world.handle(0, Input::Delivered { at: START });
        world.handle(0, Input::StopRenewing);
        world.pass(START + ms(held_for));
        world.handle(0, dropped(true));
        let (_, op) = &world.callers[0].links[0].requests[0];
        let expected = match left {
            Some(left) => Op::ReleaseAfter { left },
            None => Op::Release,
        };
        assert_eq!(*op, expected);
    }
    // Lost, it may have another holder.
    let mut world = held(LeaseSpec {
        hold_at_least,
        ..spec(7)
    });
    world.handle(0, Input::Delivered { at: START });
    world.handle(0, Input::Revoked);
    world.handle(0, dropped(true));
    assert_eq!(world.callers[0].links[0].requests[0].1, Op::Release);
}

#[test]
fn readers_share_a_lock_and_exclude_a_writer_until_the_last_one_is_gone() {
    let mut world = World::new();
    world.names = {
        let namespace = Namespace::default();
        let names = world.names.iter().cloned();
        names.map(|name| namespace.with_shared(name)).collect()
    };
    let reader = || LeaseSpec {
        access: Access::Shared,
        proposal: None,
        ..spec(0)
    };
    let readers = [world.call(reader()), world.call(reader())];
    for reader in readers {
        world.serve(reader, &[0, 1, 2]);
        assert_eq!(world.callers[reader].number(), Some(0));
    }
    world.now += TTL / 3;
    world.handle(readers[0], Input::TimedOut);
    world.serve(readers[0], &[0, 1, 2]);
    let is_extended = |event: &Event| matches!(event, Event::Extended { .. });
    assert!(world.callers[0].events.iter().any(is_extended));
    let refused = world.call(spec(7));
    world.serve(refused, &[0, 1]);
    assert_eq!(world.callers[refused].number(), None);
    for reader in readers {
        world.handle(reader, dropped(true));
        world.serve(reader, &[0, 1, 2]);
        let freed = Event::Released(VoteStep::Agreed);
        assert!(world.callers[reader].events.contains(&freed));
    }
    world.handle(refused, dropped(false));
    while !world.callers[refused].links[2].requests.is_empty() {
        world.execute(refused, 2);
    }
    let writer = world.call(spec(8));
    world.serve(writer, &[0, 1, 2]);
    assert!(world.callers[writer].number().is_some());
}

/// A renewal that the nodes execute after the release must not bring the lock back.
#[test]
fn holder_that_goes_during_a_renewal_leaves_nothing_in_any_order_of_answers() {
    for executed in 0..=NODES {
        for answered in 0..=executed.min(1) {
            let mut world = held(spec(7));
            world.pass(START + TTL / 3);
            (0..executed).for_each(|node| world.execute(0, node));
            (0..answered).for_each(|node| world.answer(0, node));
            world.handle(0, dropped(true));
            for node in 0..NODES {
                while !world.callers[0].links[node].requests.is_empty() {
                    world.serve(0, &[node]);
                }
                while !world.callers[0].links[node].answers.is_empty() {
                    world.answer(0, node);
                }
            }
            assert_eq!(world.holders(), 0);
            let freed = Event::Released(VoteStep::Agreed);
            assert_eq!(world.events(), [freed, Event::Settled]);
        }
    }
}

/// The driver tells the holder what it lost, and nothing of the extension.
#[test]
fn extension_of_a_lost_lock_is_not_told() {
    let mut world = held(spec(7));
    let (ttl, token) = (None, None);
    world.handle(0, Input::Extend { ttl, token });
    world.handle(0, Input::Revoked);
    assert_eq!(world.events(), [Event::Lost(LostReason::Revoked)]);
    assert!(!world.callers[0].lease.is_extending());
    world.serve(0, &[0, 1, 2]);
    world.handle(0, Input::Extend { ttl, token });
    assert_eq!(world.events(), []);
    assert_eq!(world.asked(0), [0; NODES]);
}

#[test]
fn extension_without_a_majority_leaves_the_lock_as_valid_as_before() {
    let mut world = held(spec(7));
    let (ttl, token) = (Some(TTL), None);
    world.now += ms(10);
    world.handle(0, Input::Extend { ttl, token });
    world.serve(0, &[1]);
    let late = world.now + NODE_TIMEOUT;
    assert!(world.callers[0].lease.overdue(late - TICK).is_empty());
    assert!(world.callers[0].lease.overdue(late).iter().eq([0, 2]));
    world.pass(late);
    let silent = NodeSet::default();
    let missed = |silent| Event::NotExtended { reached: 1, silent };
    // One more would not have decided it.
    let [event] = &world.events()[..] else {
        panic!("it is told once");
    };
    assert!(*event == missed(silent) || *event == missed([2].into_iter().collect()));
    world.handle(0, Input::StopRenewing);
    world.pass(START + validity::lifetime(TTL).unwrap() - 2 * TICK);
    assert_eq!(world.events(), []);
}
