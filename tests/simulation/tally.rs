//! How often what happened.

use std::collections::BTreeMap;

/// Counts by name.
#[derive(Debug, Default, Clone)]
pub(crate) struct Tally(BTreeMap<&'static str, usize>);

impl Tally {
    pub(crate) fn count(&mut self, what: &'static str) {
        self.add(what, 1);
    }

    pub(crate) fn add(&mut self, what: &'static str, times: usize) {
        *self.0.entry(what).or_default() += times;
    }

    pub(crate) fn add_all(&mut self, other: Self) {
        for (what, times) in other.0 {
            self.add(what, times);
        }
    }

    pub(crate) fn of(&self, what: &str) -> usize {
        self.0.get(what).copied().unwrap_or_default()
    }

    /// Whether each of these, whose names are separated by commas, happened more often than this.
    pub(crate) fn all_exceed(&self, least: usize, names: &str) -> bool {
        names.split(", ").all(|name| self.of(name) > least)
    }
}
