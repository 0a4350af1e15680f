//! Mistakes in the set-up, each logged once.

use std::collections::BTreeSet;

use crate::node::Mutex;

/// The places of the mistakes that were logged. Every similar request meets a mistake again.
#[derive(Debug)]
pub(crate) struct LoggedMistakes(Mutex<BTreeSet<String>>);

impl LoggedMistakes {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeSet::new()))
    }

    /// Returns whether a mistake is to be logged now, because none was logged at this place before.
    ///
    /// The place is a text of the program, such as a route, and never that of an error, which may name the request.
    pub(crate) fn is_new(&self, place: &str) -> bool {
        let mut logged = self.0.lock();
        let is_new = logged.len() < MAX_LOGGED && !logged.contains(place);
        is_new && logged.insert(place.to_owned())
    }
}

/// How many mistakes are logged.
const MAX_LOGGED: usize = 32;
