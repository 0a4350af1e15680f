//! Admission: decides which nodes may vote, from their introduction on each new connection.
//!
//! A node that lost its memory may have forgotten locks that are still valid, so it must not vote
//! until all of them have ended ("delayed restarts" in the [Redlock description]). No operator
//! enforces this: every client asks every node, on every connection, for the age of its memory, and
//! sends the answer with every request for a vote, so that the node can detect an outdated answer.
//!
//! [Redlock description]: https://redis.io/docs/latest/develop/use/patterns/distributed-locks/

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub use crate::protocol::token::Generation;

/// A node's report of itself on a connection, before the first request for a vote.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Introduction {
    /// The id of the process.
    pub run_id: Arc<str>,
    /// The id of the data set that it replicates.
    pub replication_id: Arc<str>,
    /// The uptime of the process, in whole seconds.
    pub uptime: Duration,
    /// The generation of its memory.
    pub generation: Generation,
    /// Its clock when it reported the generation.
    pub now: Duration,
}

/// One client's knowledge of its nodes, by their names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Admissions {
    window: Duration,
    nodes: BTreeMap<Arc<str>, Known>,
    /// The memories to which names led before, each until an instant.
    former: Vec<(Arc<str>, Known, Duration)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Known {
    said: Introduction,
    /// The time, by the client's own clock, at which it saw the node lose its memory.
    lost_memory: Option<Duration>,
    /// Whether the connection of this introduction is still open.
    is_connected: bool,
}

impl Admissions {
    /// Creates the admissions of a client that quarantines nodes for `window` after a loss of memory.
    /// `window` must be longer than the life of any lock.
    pub fn new(window: Duration) -> Self {
        Self {
            window,
            nodes: BTreeMap::new(),
            former: Vec::new(),
        }
    }

    /// Returns the length of the quarantine.
    pub fn window(&self) -> Duration {
        self.window
    }

    /// Stores the introduction of `node` on a new connection, and returns the time for which it may not
    /// vote on this connection; afterwards it must introduce itself again. `now` is the client's own
    /// monotonic clock.
    pub fn admit(&mut self, node: &Arc<str>, said: Introduction, now: Duration) -> Duration {
        let age = said.generation.age(said.now);
        let by_generation = self.window.saturating_sub(age);
        // Uptime counts whole seconds, and the first may be shorter.
        let rounding = Duration::from_nanos(1_999_999_999);
        let least_uptime = Duration::from_secs(self.window.saturating_add(rounding).as_secs());
        let by_uptime = least_uptime.saturating_sub(said.uptime);
        let before = self.nodes.get(node);
        let forgot = before.is_some_and(|before| {
            before.said.run_id != said.run_id
                || before.said.replication_id != said.replication_id
                || before.said.generation != said.generation
        });
        // A second check, against steps of the node's clock.
        let lost_before = before.and_then(|before| before.lost_memory);
        let lost_memory = if forgot { Some(now) } else { lost_before };
        let by_own_clock = lost_memory.map_or(Duration::ZERO, |at| {
            self.window.saturating_sub(now.saturating_sub(at))
        });
        let known = Known {
            said,
            lost_memory,
            is_connected: true,
        };
        let is_left = |before: &&Known| before.is_connected && !before.is_same(&known);
        if let Some(before) = before.filter(is_left) {
            self.former.push((Arc::clone(node), before.clone(), now));
        }
        self.nodes.insert(Arc::clone(node), known);
        by_generation.max(by_uptime).max(by_own_clock)
    }

    /// Marks `node` as disconnected. A new connection needs a new admission, because another node may be
    /// behind the name by then; until then `node` is no twin of any node.
    pub fn disconnect(&mut self, node: &Arc<str>, now: Duration) {
        let known = self.nodes.get_mut(node);
        if let Some(known) = known.filter(|known| known.is_connected) {
            known.is_connected = false;
            self.former.push((Arc::clone(node), known.clone(), now));
        }
    }

    /// Returns how long `node`, which has just been admitted, must not vote because another name leads to its memory, or led
    /// there: an attempt to acquire a lock, which takes no longer than `attempt`, may have counted its vote under that name.
    pub fn moved(&mut self, node: &str, attempt: Duration, now: Duration) -> Duration {
        let left = |until: Duration| attempt.saturating_sub(now.saturating_sub(until));
        self.former.retain(|(_, _, until)| !left(*until).is_zero());
        let Some(known) = self.nodes.get(node) else {
            return Duration::ZERO;
        };
        if self.twin_of(node).is_some() {
            return attempt;
        }
        let former = self.former.iter();
        let same = former.filter(|(name, former, _)| **name != *node && former.is_same(known));
        same.map(|(_, _, until)| left(*until))
            .max()
            .unwrap_or_default()
    }

    /// Returns another name of the server behind `node`, or the name of a copy of it. Neither may vote,
    /// because together they would give one memory two votes.
    pub fn twin_of(&self, node: &str) -> Option<&Arc<str>> {
        let known = self.nodes.get(node)?;
        let mut others = self.nodes.iter().filter(|(name, _)| &***name != node);
        let is_twin = |other: &Known| other.is_connected && other.is_same(known);
        let (name, _) = others.find(|(_, other)| known.is_connected && is_twin(other))?;
        Some(name)
    }

    /// Returns whether any two names lead to one server.
    pub fn has_twins(&self) -> bool {
        self.nodes.keys().any(|node| self.twin_of(node).is_some())
    }
}

impl Known {
    /// Returns whether both are one memory, or one is a copy of the other.
    fn is_same(&self, other: &Self) -> bool {
        self.said.run_id == other.said.run_id || self.said.generation == other.said.generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::OwnerToken;

    const fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn generation(id: u8, run_id: &str) -> Generation {
        Generation::new(&OwnerToken::from_random([id; 16]), secs(1_000), run_id)
    }

    fn introduction(run_id: &str, uptime: u64, generation: &Generation, age: u64) -> Introduction {
        Introduction {
            run_id: run_id.into(),
            replication_id: "data".into(),
            uptime: secs(uptime),
            generation: generation.clone(),
            now: secs(1_000 + age),
        }
    }

    // Rules: guard.window
    #[test]
    fn admit_quarantines_by_generation_by_uptime_and_by_the_clients_own_observation() {
        let (mut guard, node): (_, Arc<str>) = (Admissions::new(secs(20)), "n".into());
        let g = generation(1, "a");
        for (uptime, age, left) in [(100, 100, 0), (20, 100, 1), (100, 5, 15)] {
            let introduction = introduction("a", uptime, &g, age);
            assert_eq!(guard.admit(&node, introduction, secs(0)), secs(left));
        }
        // Another process with an old generation: this client saw the change.
        let old = introduction("b", 100, &g, 100);
        assert_eq!(guard.admit(&node, old.clone(), secs(0)), secs(20));
        assert_eq!(guard.admit(&node, old.clone(), secs(19)), secs(1));
        assert_eq!(guard.admit(&node, old, secs(20)), secs(0));
        // Another data set, in the same process.
        let mut promoted = introduction("b", 100, &g, 100);
        promoted.replication_id = "other data".into();
        assert_eq!(guard.admit(&node, promoted, secs(30)), secs(20));
    }

    // Rules: guard.window
    #[test]
    fn window_with_a_fraction_of_a_second_is_rounded_up_for_the_uptime() {
        let window = Duration::from_millis(2_001);
        let (mut guard, node): (_, Arc<str>) = (Admissions::new(window), "n".into());
        let g = generation(1, "a");
        for (uptime, left) in [(3, 1), (4, 0)] {
            let introduction = introduction("a", uptime, &g, 100);
            assert_eq!(guard.admit(&node, introduction, secs(0)), secs(left));
        }
    }

    #[test]
    fn twin_of_finds_one_node_under_both_of_its_names() {
        let mut guard = Admissions::new(secs(20));
        let (a, b, c): (Arc<str>, Arc<str>, Arc<str>) = ("a".into(), "b".into(), "c".into());
        let (g1, g2) = (generation(1, "same"), generation(2, "same"));
        guard.admit(&a, introduction("same", 100, &g1, 0), secs(0));
        assert!(guard.twin_of("a").is_none() && !guard.has_twins());
        guard.admit(&b, introduction("same", 100, &g2, 0), secs(0));
        guard.admit(&c, introduction("other", 100, &g2, 0), secs(0));
        assert_eq!(guard.twin_of("a"), Some(&b));
        assert!(guard.twin_of("b").is_some() && guard.twin_of("c").is_some());
        assert!(guard.has_twins());
    }

    #[test]
    fn disconnected_node_is_no_twin_until_its_next_admission() {
        let mut guard = Admissions::new(secs(20));
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let (g, other) = (generation(1, "same"), generation(2, "other"));
        let same = || introduction("same", 100, &g, 100);
        guard.admit(&a, same(), secs(0));
        guard.admit(&b, same(), secs(0));
        guard.disconnect(&b, secs(0));
        assert!(guard.twin_of("a").is_none() && guard.twin_of("b").is_none());
        assert!(!guard.has_twins());
        guard.admit(&b, same(), secs(1));
        assert_eq!(guard.twin_of("a"), Some(&b));
        // The node behind the name may have lost its memory since.
        let left = guard.admit(&b, introduction("other", 100, &other, 100), secs(2));
        assert!(!guard.has_twins());
        assert_eq!(left, secs(20));
    }

    #[test]
    fn name_that_leads_to_the_memory_of_another_waits_for_an_attempt() {
        let (mut guard, attempt) = (Admissions::new(Duration::ZERO), secs(3));
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let (g1, g2) = (generation(1, "one"), generation(2, "two"));
        let one = || introduction("one", 100, &g1, 100);
        guard.admit(&a, one(), secs(0));
        assert_eq!(guard.moved("a", attempt, secs(0)), secs(0));
        guard.disconnect(&a, secs(1));
        guard.admit(&b, one(), secs(2));
        assert_eq!(guard.moved("b", attempt, secs(2)), secs(2));
        // It may come back to a memory that it has left itself.
        guard.admit(&b, introduction("two", 100, &g2, 100), secs(3));
        assert_eq!(guard.moved("b", attempt, secs(3)), secs(0));
        guard.admit(&b, one(), secs(3));
        assert_eq!(guard.moved("b", attempt, secs(3)), secs(1));
        assert_eq!(guard.moved("b", attempt, secs(4)), secs(0));
        // It was left by changing, and is now led to by both.
        guard.admit(&b, introduction("two", 100, &g2, 100), secs(4));
        guard.admit(&a, one(), secs(5));
        assert_eq!(guard.moved("a", attempt, secs(5)), secs(2));
        guard.admit(&b, one(), secs(9));
        assert_eq!(guard.moved("b", attempt, secs(9)), attempt);
    }
}
