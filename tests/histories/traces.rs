//! What a lease of a shipped driver may be told, by rules that the models keep.
//!
//! The proofs of `tests/model` hold for leases that get their inputs as a model gives them. A recorded life of a lease is
//! replayed through the same code, so that a driver that breaks a rule is found. Not every step that the rules allow is a
//! step of a model: none delivers a lock or stops its renewal, and executions are neither renewed nor lost there.

use std::collections::BTreeSet;
use std::time::Duration;

use tower_redlock::protocol::lease::{Event, Input, Lease, LeaseOutput, Trace};

/// How far a lease has come.
#[derive(Default)]
struct Life {
    now: Duration,
    /// The nodes and numbers of requests without an answer.
    asked: BTreeSet<(usize, u32)>,
    /// Each happens once.
    done: BTreeSet<&'static str>,
    unread: usize,
    unrepaired: usize,
}

/// Returns the first input that no client of the models would get, if there is one, and whether the lease was granted its lock.
#[must_use]
pub fn not_of_the_model(trace: &Trace) -> (Option<String>, bool) {
    let (mut life, mut found) = (Life::default(), None);
    let did = trace.replay_seen(|lease, did, now, input| {
        if let Some(why) = life.refuses(lease, did, now, input) {
            found.get_or_insert_with(|| format!("{why}: {input:?} at {now:?}\n{trace}"));
        }
    });
    let is_grant = |output: &_| matches!(output, LeaseOutput::Event(Event::Granted { .. }));
    (found, did.iter().flatten().any(is_grant))
}

/// Whether a client of the models may be told this by now, as far as its lease says. Each step of a model is one of these, which
/// `tests/model` asserts, so that what is refused here is no step of a model.
#[must_use]
pub fn allows(lease: &Lease, input: &Input, now: Duration) -> bool {
    match input {
        Input::Answered { number, .. } => (1..=lease.number()).contains(number),
        Input::TimedOut => lease.poll_timeout().is_some_and(|at| at <= now),
        Input::Delivered { at } => lease.is_holding() && *at <= now,
        Input::Extend { .. } => lease.is_holding() && !lease.is_extending(),
        Input::Begin | Input::Record { .. } | Input::Revoked => lease.is_holding(),
        Input::Dropped { .. } => !lease.is_releasing(),
        Input::StopRenewing | Input::Read(_) | Input::Repaired(_) => true,
    }
}

impl Life {
    /// Returns why the model would not tell a lease this, after what it did.
    fn refuses(
        &mut self,
        lease: &Lease,
        did: &[LeaseOutput],
        now: Duration,
        input: &Input,
    ) -> Option<&'static str> {
        for output in did {
            match output {
                LeaseOutput::Request(request) => {
                    let asked = request.nodes.iter().map(|node| (node, request.number));
                    self.asked.extend(asked);
                }
                LeaseOutput::Event(Event::Unread(_)) => self.unread += 1,
                LeaseOutput::Event(Event::Unrepaired) => self.unrepaired += 1,
                LeaseOutput::Event(_) => {}
            }
        }
        if now < std::mem::replace(&mut self.now, now) {
            return Some("time goes back");
        }
        let is_answer = matches!(input, Input::Answered { .. });
        let mut after = lease.clone();
        after.handle(input.clone(), now);
        // What changes nothing is no step.
        if !is_answer && after == *lease {
            return None;
        }
        let has_holder = !self.done.contains("dropped");
        let is_allowed = match input {
            Input::Answered { node, number, .. } => self.asked.remove(&(*node, *number)),
            Input::Delivered { .. } => self.done.insert("delivered") && has_holder,
            Input::Record { .. } => self.done.insert("recorded") && has_holder,
            Input::Extend { .. } | Input::Begin => has_holder,
            Input::Dropped { .. } => self.done.insert("dropped"),
            Input::Read(_) => take(&mut self.unread),
            Input::Repaired(_) => take(&mut self.unrepaired),
            _ => true,
        };
        let is_allowed = is_allowed && allows(lease, input, now);
        (!is_allowed).then_some("the model has no such step")
    }
}

/// Takes one away, if there is one.
fn take(left: &mut usize) -> bool {
    let less = left.checked_sub(1);
    less.map(|less| *left = less).is_some()
}

#[cfg(test)]
mod tests {
    use tower_redlock::protocol::Quorum;
    use tower_redlock::protocol::lease::{Access, Effect, LeaseSpec};
    use tower_redlock::protocol::message::{Answer, Reply};

    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn granted(node: usize, number: u32) -> Input {
        let answer = Answer::Replied(Reply::Granted(7));
        Input::Answered {
            node,
            number,
            answer,
        }
    }

    const DROPPED: Input = Input::Dropped {
        publishes: false,
        effect: Effect::Unknown,
    };

    /// Returns whether a lease of three nodes may be told these, at these times in milliseconds.
    fn is_allowed(inputs: &[(u64, Input)]) -> bool {
        let spec = LeaseSpec {
            access: Access::Exclusive,
            ttl: ms(1_000),
            proposal: Some(7),
            retention: ms(60_000),
            node_timeout: ms(50),
            renews: true,
            is_partial: false,
            max_hold: None,
            hold_at_least: None,
            once: None,
        };
        let quorum = Quorum::new(3).unwrap();
        let mut trace = Trace::new(Lease::new(spec, quorum, ms(0), |_| Duration::ZERO));
        for (at, input) in inputs {
            trace.push(input.clone(), ms(*at));
        }
        not_of_the_model(&trace).0.is_none()
    }

    #[test]
    fn planted_differences_are_found() {
        let held = vec![(1, granted(0, 1)), (2, granted(1, 1))];
        let life = |more: &[(u64, Input)]| is_allowed(&[&*held, more].concat());
        let extend = || Input::Extend {
            ttl: None,
            token: None,
        };
        for allowed in [
            vec![(3, granted(2, 1)), (9, DROPPED)],
            // The renewal, and answers to it.
            vec![
                (900, Input::TimedOut),
                (901, granted(0, 2)),
                (902, granted(2, 1)),
            ],
            vec![(3, extend()), (4, DROPPED), (5, granted(1, 2))],
        ] {
            assert!(life(&allowed), "{allowed:?}");
        }
        for planted in [
            // An answer twice, to a request that was not made, and of a node that was not asked.
            vec![(3, granted(0, 1))],
            vec![(3, granted(2, 2))],
            vec![(3, granted(3, 1))],
            // Time that goes back.
            vec![(1, DROPPED)],
            // A second extension under the first one, and a lock that is delivered before its time.
            vec![(3, extend()), (4, extend())],
            vec![(3, Input::Delivered { at: ms(4) })],
        ] {
            assert!(!life(&planted), "{planted:?}");
        }
    }
}
