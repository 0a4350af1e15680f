//! Mistakes in the set-up, each logged once.

use std::collections::BTreeSet;

use crate::node::Mutex;

/// The mistakes that were logged. Every similar request meets a mistake again.
#[derive(Debug)]
pub(crate) struct LoggedMistakes(Mutex<BTreeSet<String>>);

impl LoggedMistakes {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeSet::new()))
    }

    /// Returns whether a mistake is to be logged now, because it was not logged before.
    pub(crate) fn is_new(&self, mistake: &str) -> bool {
        let mut logged = self.0.lock();
        logged.len() < MAX_LOGGED && logged.insert(mistake.to_owned())
    }
}

/// How many mistakes are logged. Keeps an extractor that puts the request into its error from filling the log.
const MAX_LOGGED: usize = 32;
