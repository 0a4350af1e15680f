//! `Traces`: what happened to a lease, shown and repeated.

use support::{assert_matches, secs};
use tokio::time::sleep;
use tower_redlock::LockError;
use tower_redlock::protocol::lease::{Event, LeaseOutput, Trace};
use tower_redlock::protocol::message::Op;
use tower_redlock::protocol::round::VoteStep;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes, Traces};

use crate::common::builder;

fn events(trace: &Trace) -> Vec<Event> {
    let outputs = trace.replay().into_iter().flatten();
    let events = outputs.filter_map(|output| match output {
        LeaseOutput::Event(event) => Some(event),
        LeaseOutput::Request(_) => None,
    });
    events.collect()
}

#[tokio::test(start_paused = true)]
async fn trace_repeats_the_life_of_a_lock_and_of_an_attempt_that_was_refused() {
    let nodes = ScriptedNodes::new(3);
    let traces = Traces::default();
    let redlock = builder(&nodes).ttl(secs(3)).traces(&traces).build();
    let redlock = redlock.unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    sleep(secs(2)).await;
    guard.release().await.unwrap();
    // The other key is refused by the nodes, which another service holds.
    let other = builder(&nodes).build().unwrap();
    let _held = other.try_lock("other").await.unwrap();
    let refused = redlock.try_lock("other").await.unwrap_err();
    assert_matches!(refused, LockError::Contended { .. });

    let [trace] = &traces.of(&"k".into())[..] else {
        panic!("{traces:?}");
    };
    let events = events(trace);
    assert_matches!(events[0], Event::Granted { .. }, "{events:?}");
    let is_renewal = |event: &&Event| matches!(event, Event::Extended { .. });
    let renewals = events.iter().filter(is_renewal).count();
    let confirms = nodes.sent(0, OpKind::Confirm);
    assert!(confirms > 0);
    assert_eq!(renewals, confirms);
    let end = [Event::Released(VoteStep::Agreed), Event::Settled];
    assert_eq!(events[events.len() - 2..], end);

    let text = trace.to_string();
    assert_eq!(text.matches("=> Granted").count(), 1, "{text}");
    assert_eq!(text.matches("-> ").count(), 2 + confirms, "{text}");

    let [trace] = &traces.of(&"other".into())[..] else {
        panic!("{traces:?}");
    };
    assert_matches!(self::events(trace)[0], Event::Refused(_));
    assert_eq!(traces.all().len(), 2);
}

/// What the lease asks for first is told by its beginning alone, and what no node answers by the time.
#[tokio::test(start_paused = true)]
async fn trace_of_silent_nodes_shows_their_time_out() {
    let nodes = ScriptedNodes::new(3);
    (0..3).for_each(|node| nodes.set(node, Gate::Never));
    let traces = Traces::default();
    let redlock = builder(&nodes).traces(&traces).build().unwrap();
    redlock.try_lock("k").await.unwrap_err();
    let trace = &traces.of(&"k".into())[0];
    let replayed = trace.replay();
    let LeaseOutput::Request(first) = &replayed[0][0] else {
        panic!("{trace}");
    };
    assert_matches!(first.op, Op::Acquire { .. });
    assert_eq!(first.nodes.len(), 3);
    assert!(trace.to_string().contains(" TimedOut\n"), "{trace}");
}
