//! Ears: how a process that waits for a lock hears of its release.
//!
//! What is heard is a hint to try again, and nothing more: a message can be lost, and a lock that expires
//! sends none. So whoever waits asks the nodes from time to time all the same.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::protocol::Quorum;

/// What one process has heard from the nodes about one lock.
#[derive(Debug)]
pub(crate) struct Ear {
    majority: usize,
    heard: Mutex<Heard>,
    news: Notify,
}

#[derive(Debug)]
struct Heard {
    /// By node, whether it would tell.
    attentive: Vec<bool>,
    /// By node, whether it has told of a release.
    told: Vec<bool>,
    /// To how many processes, itself included, the last message went.
    listeners: usize,
}

/// An ear at a node; dropped, it hears nothing any more.
pub(crate) struct Listening(Option<Box<dyn FnOnce() + Send + Sync>>);

/// The ears at a node in this process, by the name of the lock.
#[derive(Debug, Default)]
pub(crate) struct Audience(Mutex<HashMap<Arc<[u8]>, Vec<(Arc<Ear>, usize)>>>);

impl Ear {
    pub(crate) fn new(quorum: Quorum) -> Arc<Self> {
        Arc::new(Self {
            majority: quorum.majority(),
            heard: Mutex::new(Heard {
                attentive: vec![false; quorum.nodes()],
                told: vec![false; quorum.nodes()],
                listeners: 1,
            }),
            news: Notify::new(),
        })
    }

    /// Notes whether a node would tell of a release from now on.
    pub(crate) fn set_attentive(&self, node: usize, attentive: bool) {
        let mut heard = self.heard();
        let was_enough = heard.is_attentive(self.majority);
        heard.attentive[node] = attentive;
        if was_enough != heard.is_attentive(self.majority) {
            // The lock may have been released before anybody listened, or after. And whoever is not going to
            // be told has to ask more often.
            heard.told.fill(true);
            self.news.notify_one();
        }
    }

    /// Notes that a node told of a release.
    pub(crate) fn tell(&self, node: usize, listeners: usize) {
        let mut heard = self.heard();
        heard.told[node] = true;
        heard.listeners = listeners;
        if heard.is_told(self.majority) {
            self.news.notify_one();
        }
    }

    /// Forgets what was told: it is asked anyway.
    pub(crate) fn forget(&self) {
        self.heard().told.fill(false);
    }

    /// Whether a release would be heard of.
    pub(crate) fn is_attentive(&self) -> bool {
        self.heard().is_attentive(self.majority)
    }

    /// Waits until a majority has told of a release, forgets that, and returns how many processes heard
    /// of it.
    pub(crate) async fn news(&self) -> usize {
        loop {
            {
                let mut heard = self.heard();
                if heard.is_told(self.majority) {
                    heard.told.fill(false);
                    return heard.listeners;
                }
            }
            self.news.notified().await;
        }
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Heard {
    fn is_attentive(&self, majority: usize) -> bool {
        self.attentive.iter().filter(|is| **is).count() >= majority
    }

    fn is_told(&self, majority: usize) -> bool {
        self.told.iter().filter(|told| **told).count() >= majority
    }
}

impl Listening {
    pub(crate) fn new(end: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(end)))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(end) = self.0.take() {
            end();
        }
    }
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listening").finish_non_exhaustive()
    }
}

impl Audience {
    /// Adds an ear, which hears this node as number `node`.
    pub(crate) fn join(&self, lock: &Arc<[u8]>, ear: &Arc<Ear>, node: usize) {
        let mut ears = self.ears();
        let listeners = ears.entry(Arc::clone(lock)).or_default();
        listeners.push((Arc::clone(ear), node));
        drop(ears);
        ear.set_attentive(node, true);
    }

    pub(crate) fn leave(&self, lock: &Arc<[u8]>, ear: &Arc<Ear>) {
        let mut ears = self.ears();
        if let Some(listeners) = ears.get_mut(lock) {
            listeners.retain(|(other, _)| !Arc::ptr_eq(other, ear));
            if listeners.is_empty() {
                ears.remove(lock);
            }
        }
    }

    /// Tells of a release, and returns how many ears heard of it.
    pub(crate) fn tell(&self, lock: &Arc<[u8]>) -> usize {
        let ears = self.ears().get(lock).cloned().unwrap_or_default();
        for (ear, node) in &ears {
            ear.tell(*node, ears.len());
        }
        ears.len()
    }

    fn ears(&self) -> MutexGuard<'_, HashMap<Arc<[u8]>, Vec<(Arc<Ear>, usize)>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio_test::task::spawn;
    use tokio_test::{assert_pending, assert_ready_eq};

    use super::*;

    #[test]
    fn a_majority_must_tell_of_a_release() {
        let ear = Ear::new(Quorum::new(5).unwrap());
        ear.tell(0, 4);
        ear.tell(0, 4);
        ear.tell(3, 4);
        let mut news = spawn(ear.news());
        assert_pending!(news.poll());
        ear.tell(4, 4);
        assert!(news.is_woken());
        assert_ready_eq!(news.poll(), 4);
        drop(news);
        ear.tell(2, 4);
        ear.tell(1, 4);
        // A wake-up that was left over says nothing.
        assert_pending!(spawn(ear.news()).poll());
    }

    #[test]
    fn what_was_missed_before_a_majority_listened_is_asked_for() {
        let ear = Ear::new(Quorum::new(3).unwrap());
        let mut news = spawn(ear.news());
        assert_pending!(news.poll());
        ear.set_attentive(2, true);
        assert!(!ear.is_attentive());
        assert!(!news.is_woken());
        ear.set_attentive(0, true);
        assert!(ear.is_attentive());
        assert_ready_eq!(news.poll(), 1);
    }

    #[test]
    fn whoever_will_not_be_told_any_more_asks_at_once() {
        let ear = Ear::new(Quorum::new(3).unwrap());
        (0..3).for_each(|node| ear.set_attentive(node, true));
        assert_ready_eq!(spawn(ear.news()).poll(), 1);
        let mut news = spawn(ear.news());
        ear.set_attentive(0, false);
        assert_pending!(news.poll());
        ear.set_attentive(1, false);
        assert!(!ear.is_attentive());
        assert_ready_eq!(news.poll(), 1);
    }

    #[test]
    fn an_audience_is_told_until_it_leaves() {
        let (audience, lock) = (Arc::new(Audience::default()), Arc::from(&b"k"[..]));
        let ears = [(); 2].map(|()| Ear::new(Quorum::new(1).unwrap()));
        let listening = ears.each_ref().map(|ear| {
            audience.join(&lock, ear, 0);
            let (audience, lock, ear) = (Arc::clone(&audience), Arc::clone(&lock), Arc::clone(ear));
            Listening::new(move || audience.leave(&lock, &ear))
        });
        assert_eq!(audience.tell(&lock), 2);
        assert_ready_eq!(spawn(ears[1].news()).poll(), 2);
        drop(listening);
        assert_eq!(audience.tell(&lock), 0);
        assert!(audience.ears().is_empty());
    }
}
