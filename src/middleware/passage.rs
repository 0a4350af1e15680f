//! Whether a request that is executed once has got past the layers and extractors that may refuse it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use http::Extensions;

/// What an [`IdempotencyLayer`](crate::IdempotencyLayer) learns about the calls that the layers and
/// extractors within make for one execution.
///
/// # Design
///
/// The response cannot tell: a layer in between may rebuild it, and with that our refusal looks like the
/// handler's answer. So every request carries a [`Passage`] in its extensions, which counts as a call of the
/// handler. The layer that gets it takes it over: the call was its own to pass on or to refuse. A layer that
/// calls several times, such as `tower::retry`, sends the request and keeps copies; only the request's own
/// passage is taken over, and every call that is passed on afterwards counts by itself. So the handler was
/// certainly not called if nothing is left to count.
///
/// A handler keeps the passage that came with its request. Where that was not taken over, a copy is of a
/// request that the handler makes itself, from its extensions: what becomes of it says nothing about the
/// handler, which was called.
#[derive(Debug, Default)]
struct Calls {
    /// Calls that went where none of our layers and extractors is known to have refused them.
    passed: AtomicUsize,
    /// Whether a handler was stopped midway because a lock was lost.
    stopped: AtomicBool,
    /// Whether that is what became of the last call that was passed on.
    stopped_last: AtomicBool,
}

/// The right to call the handler once, in the extensions of a request.
#[derive(Debug)]
pub(crate) struct Passage {
    calls: Arc<Calls>,
    /// Whether the passage, or that of which it is a copy, was taken over.
    taken: Arc<AtomicBool>,
    is_copy: bool,
}

/// By hand: a copy of the extensions is another request, with no right to a call of its own.
impl Clone for Passage {
    fn clone(&self) -> Self {
        Self {
            calls: Arc::clone(&self.calls),
            taken: Arc::clone(&self.taken),
            is_copy: true,
        }
    }
}

/// A passage that one of our layers has taken over.
#[derive(Debug, Clone)]
pub(crate) struct Taken(Arc<Calls>);

/// The other end of all passages of one execution.
#[cfg(feature = "idempotency")]
#[derive(Debug, Default)]
pub(crate) struct Passages(Arc<Calls>);

/// What may have become of the handler.
#[cfg(feature = "idempotency")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reached {
    /// It was not called.
    No,
    /// It may have been called, and answered.
    Perhaps,
    /// It was called, and stopped midway, and not called again after that.
    Stopped,
}

#[cfg(feature = "idempotency")]
impl Passages {
    /// Puts the first passage into the extensions of a request, in place of that of a layer outside.
    pub(crate) fn open(&self, extensions: &mut Extensions) {
        Taken(Arc::clone(&self.0)).pass(extensions);
    }

    /// Returns what may have become of the handler.
    pub(crate) fn reached(&self) -> Reached {
        let none_is_left = self.0.passed.load(Ordering::Acquire) == 0;
        let was_stopped = self.was_stopped();
        if was_stopped && (none_is_left || self.0.stopped_last.load(Ordering::Acquire)) {
            Reached::Stopped
        } else if none_is_left {
            Reached::No
        } else {
            Reached::Perhaps
        }
    }

    /// Returns whether any call of the handler was stopped midway, so that what it did is not known, whatever
    /// a later one says of itself.
    pub(crate) fn was_stopped(&self) -> bool {
        self.0.stopped.load(Ordering::Acquire)
    }
}

impl Passage {
    /// Takes the passage of a request over, if it has one.
    pub(crate) fn take(extensions: &mut Extensions) -> Option<Taken> {
        let passage = extensions.remove::<Self>()?;
        Some(passage.take_over())
    }

    /// Returns the passage of a request, for an extractor that may refuse it once it is gone.
    #[cfg(feature = "axum")]
    pub(crate) fn of(extensions: &Extensions) -> Option<Arc<Self>> {
        let passage = extensions.get::<Self>()?;
        Some(Arc::new(Self {
            is_copy: passage.is_copy,
            ..passage.clone()
        }))
    }

    /// Says that the request was refused: the handler is not called by this passage.
    pub(crate) fn refuse(extensions: &Extensions) {
        if let Some(passage) = extensions.get::<Self>() {
            passage.take_over();
        }
    }

    /// Says that the request was refused.
    #[cfg(feature = "axum")]
    pub(crate) fn refused(&self) {
        self.take_over();
    }

    fn take_over(&self) -> Taken {
        if self.is_copy {
            let is_retry = self.taken.load(Ordering::Acquire);
            // Of a request that a handler makes, what is passed on or refused counts for no one.
            let calls = is_retry.then(|| Arc::clone(&self.calls));
            return Taken(calls.unwrap_or_default());
        }
        if !self.taken.swap(true, Ordering::AcqRel) {
            self.calls.take_back();
        }
        Taken(Arc::clone(&self.calls))
    }
}

impl Taken {
    /// Passes a request on: whatever is within may call the handler.
    pub(crate) fn pass(&self, extensions: &mut Extensions) {
        self.0.pass();
        extensions.insert(Passage {
            calls: Arc::clone(&self.0),
            taken: Arc::default(),
            is_copy: false,
        });
    }

    /// Says that the handler may have been called.
    #[cfg(feature = "idempotency")]
    pub(crate) fn reached(&self) {
        self.0.pass();
    }

    /// Says what became of a call that was said to have [`reached`](Self::reached) the handler.
    #[cfg(feature = "idempotency")]
    pub(crate) fn follow(&self, reached: Reached) {
        match reached {
            Reached::No => self.0.take_back(),
            Reached::Perhaps => {}
            Reached::Stopped => self.stop(),
        }
    }

    /// Says that a handler that was called by this was stopped midway.
    pub(crate) fn stop(&self) {
        self.0.stopped.store(true, Ordering::Release);
        self.0.stopped_last.store(true, Ordering::Release);
        self.0.take_back();
    }
}

impl Calls {
    fn pass(&self) {
        self.passed.fetch_add(1, Ordering::AcqRel);
        self.stopped_last.store(false, Ordering::Release);
    }

    /// Counts a call less, unless a layer further in has taken it over and was about to pass it on.
    fn take_back(&self) {
        let less = |passed: usize| passed.checked_sub(1);
        self.passed
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less)
            .ok();
    }
}

#[cfg(all(test, feature = "idempotency"))]
mod tests {
    use super::*;

    fn opened() -> (Passages, Extensions) {
        let (passages, mut extensions) = (Passages::default(), Extensions::new());
        passages.open(&mut extensions);
        (passages, extensions)
    }

    #[test]
    fn a_request_that_a_layer_within_refuses_has_not_reached_its_handler() {
        let (passages, mut outer) = opened();
        assert_eq!(passages.reached(), Reached::Perhaps);
        let taken = Passage::take(&mut outer).unwrap();
        assert_eq!(passages.reached(), Reached::No);
        taken.pass(&mut outer);
        assert_eq!(passages.reached(), Reached::Perhaps);
        Passage::refuse(&outer);
        assert_eq!(passages.reached(), Reached::No);
    }

    #[test]
    fn of_several_calls_one_that_is_passed_on_has_reached_the_handler() {
        for refused_first in [true, false] {
            let (passages, request) = opened();
            let copy = request.clone();
            let mut calls = [request, copy];
            let taken = calls.each_mut().map(|call| Passage::take(call).unwrap());
            assert_eq!(passages.reached(), Reached::No);
            taken[usize::from(refused_first)].pass(&mut calls[0]);
            assert_eq!(passages.reached(), Reached::Perhaps);
        }
    }

    #[test]
    fn what_becomes_of_a_request_that_a_handler_makes_says_nothing_about_the_handler() {
        let (passages, handlers) = opened();
        let mut made = handlers.clone();
        Passage::refuse(&made);
        assert_eq!(passages.reached(), Reached::Perhaps);
        let taken = Passage::take(&mut made).unwrap();
        taken.pass(&mut made);
        taken.stop();
        Passage::refuse(&made);
        assert_eq!(passages.reached(), Reached::Perhaps);
        // The handler has its own until it ends.
        drop(handlers);
    }

    #[test]
    fn a_handler_that_was_stopped_stays_so_whatever_is_refused_later_until_one_answers() {
        let (passages, mut request) = opened();
        let mut retried = request.clone();
        let taken = Passage::take(&mut request).unwrap();
        taken.pass(&mut request);
        taken.stop();
        Passage::refuse(&retried);
        assert_eq!(passages.reached(), Reached::Stopped);
        // An extractor refuses what a layer has passed on.
        let mut refused = retried.clone();
        Passage::take(&mut refused).unwrap().pass(&mut refused);
        Passage::refuse(&refused);
        assert_eq!(passages.reached(), Reached::Stopped);
        Passage::take(&mut retried).unwrap().pass(&mut retried);
        assert_eq!(passages.reached(), Reached::Perhaps);
        assert!(passages.was_stopped());
    }
}
