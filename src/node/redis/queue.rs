//! How much may wait to be sent to one server, or be on its way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What waits for one server.
///
/// Releases are counted by no one: a lock whose acquisition had a place must be given back whatever else
/// waits, and there is at most one for each.
#[derive(Debug, Default)]
pub(super) struct Queue {
    jobs: AtomicUsize,
    bytes: AtomicUsize,
}

/// A place in the queue, given up when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    queue: Arc<Queue>,
    bytes: usize,
}

/// Most requests, beyond which a server is so far behind that no more of them would be answered in time.
const MAX_JOBS: usize = 1 << 16;
/// Most bytes of records.
const MAX_BYTES: usize = 64 << 20;

impl Queue {
    /// Takes a place for a request with a record of so many bytes; none is left if it is `None`.
    pub(super) fn place(self: &Arc<Self>, bytes: usize) -> Option<Place> {
        // Counted first, so that of two who come at once not both find the last place.
        let place = Place {
            queue: Arc::clone(self),
            bytes,
        };
        let jobs = self.jobs.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        (jobs <= MAX_JOBS && bytes <= MAX_BYTES).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queue.jobs.fetch_sub(1, Ordering::Relaxed);
        self.queue.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_so_many_places_and_they_are_given_up() {
        let queue = Arc::new(Queue::default());
        let places: Vec<_> = (0..MAX_JOBS).map(|_| queue.place(0)).collect();
        assert!(places.iter().all(Option::is_some));
        assert!(queue.place(0).is_none());
        drop(places);
        assert!(queue.place(0).is_some());
        assert_eq!(queue.jobs.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn there_is_so_much_room_for_records() {
        let queue = Arc::new(Queue::default());
        let most = queue.place(MAX_BYTES);
        assert!(most.is_some());
        assert!(queue.place(1).is_none());
        assert!(queue.place(0).is_some());
        drop(most);
        assert!(queue.place(1).is_some());
        assert_eq!(queue.bytes.load(Ordering::Relaxed), 0);
    }
}
