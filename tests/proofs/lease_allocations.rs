//! A lease that no node refuses allocates when it is created, and never again: a driver may hold thousands.

use std::time::Duration;

use support::secs;
use tower_redlock::protocol::lease::{
    Access, Effect, Event, Input, Lease, LeaseRequest, LeaseSpec,
};
use tower_redlock::protocol::message::{Answer, Op, Reply};
use tower_redlock::protocol::round::VoteStep;

use crate::round_cases::quorum;

const TTL: Duration = secs(9);

/// Answers a request as nodes that grant everything, but with different numbers at first.
fn reply(request: &LeaseRequest, node: usize) -> Reply {
    match request.op {
        Op::Acquire { .. } => Reply::Granted(node as u64),
        Op::Confirm { token, .. } => Reply::At(token.unwrap()),
        _ => Reply::Released,
    }
}

#[test]
fn lease_of_five_nodes_allocates_nothing_after_its_creation() {
    let spec = LeaseSpec {
        access: Access::Exclusive,
        ttl: TTL,
        proposal: Some(1),
        retention: TTL,
        node_timeout: TTL,
        renews: true,
        is_partial: false,
        max_hold: None,
        hold_at_least: None,
        once: None,
    };
    let mut now = TTL;
    let mut lease = Lease::new(spec, quorum(5), now, |_| Duration::ZERO);
    let (mut confirmed, mut renewed, mut freed) = (0, 0, false);
    let allocated = allocation_counter::measure(|| {
        for _ in 0..10 {
            while let Some(request) = lease.poll_request() {
                for node in request.nodes.iter() {
                    let answer = Answer::Replied(reply(&request, node));
                    let number = request.number;
                    let input = Input::Answered {
                        node,
                        number,
                        answer,
                    };
                    lease.handle(input, now);
                    // A later request waits until this one has all its answers.
                    if matches!(request.op, Op::Acquire { .. })
                        && lease.awaited().is_some_and(|a| a.answers == 0)
                    {
                        confirmed += 1;
                        break;
                    }
                }
            }
            while let Some(event) = lease.poll_event() {
                renewed += usize::from(matches!(event, Event::Extended { .. }));
                freed |= event == Event::Released(VoteStep::Agreed);
            }
            if renewed == 3 && !freed {
                lease.handle(
                    Input::Dropped {
                        publishes: true,
                        effect: Effect::default(),
                    },
                    now,
                );
            } else if let Some(at) = lease.poll_timeout() {
                now = at;
                lease.handle(Input::TimedOut, now);
            }
        }
    });
    assert_eq!((confirmed, renewed, freed), (1, 3, true));
    assert_eq!(allocated.count_total, 0);
}
