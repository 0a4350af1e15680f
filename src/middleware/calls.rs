//! Tracks whether the handler of an idempotent request was called.
//!
//! # Implementation details
//!
//! An [`IdempotencyLayer`](crate::IdempotencyLayer) gives the key back at once if the handler was certainly not
//! called. The response does not show that: a layer in between may rebuild it, and then a refusal looks like an
//! answer of the handler. So the request carries a [`CallToken`] in its extensions, and a [`CallTracker`], shared
//! by all tokens of one execution, counts the calls that may have reached the handler.
//!
//! * Each token counts as one call while it travels inwards.
//! * A layer or extractor of this crate takes the token of its request, which removes that call from the count.
//!   It puts in a new token when it passes the request on, and none when it refuses the request.
//! * A layer that calls several times, such as `tower::retry`, sends the request and keeps copies. A copy has no
//!   call of its own to take back until a layer or an extractor passes it on, which counts as a call again.
//! * A copy whose original was never taken belongs to a request that the handler makes itself from its own
//!   extensions. The handler was called, so that request does not change the count.
//!
//! Hence a count of zero proves that the handler was not called, or that every call of it was stopped.
//!
//! *Orderings.* The answer or the error of a call orders what was noted about it before what its reader does next. Calls
//! may run beside each other, though: a layer may answer with the first of two. The count is therefore changed last when
//! a call is stopped and first when one begins, with release, and read first, with acquire: a reader that finds no call
//! left finds the stop that took the last one. The flags are relaxed: the count, or the answer, orders them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use http::Extensions;

/// Counts the calls that may have reached the handler of one execution.
#[derive(Debug, Default)]
pub(crate) struct CallTracker {
    /// Calls that no layer or extractor of this crate has refused.
    passed_on: AtomicUsize,
    /// Whether a lost lock stopped a handler midway.
    is_stopped: AtomicBool,
    /// Whether that happened to the last call that was passed on.
    is_last_stopped: AtomicBool,
    /// Whether a token was copied, as by a layer that calls several times.
    is_copied: AtomicBool,
}

/// Permission to call the handler once; an extension of the request.
#[derive(Debug)]
pub(crate) struct CallToken {
    tracker: Arc<CallTracker>,
    /// Whether this token, or the one it was copied from, was taken.
    is_taken: Arc<AtomicBool>,
    /// Whether the count has a call of this request.
    has_call: Arc<AtomicBool>,
}

/// By hand: cloned extensions belong to another request, which has no call of its own.
impl Clone for CallToken {
    fn clone(&self) -> Self {
        self.tracker.is_copied.store(true, Ordering::Relaxed);
        Self {
            tracker: Arc::clone(&self.tracker),
            is_taken: Arc::clone(&self.is_taken),
            has_call: Arc::default(),
        }
    }
}

/// What is known about the calls of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandlerState {
    /// The handler was not called.
    NotCalled,
    /// The handler may have been called, and may have answered.
    MaybeCalled,
    /// The last call of the handler was stopped midway.
    Stopped,
}

impl CallTracker {
    /// Counts a call and puts a token for it into the extensions of the request.
    pub(crate) fn pass_on(self: &Arc<Self>, extensions: &mut Extensions) {
        self.count_call();
        extensions.insert(CallToken {
            tracker: Arc::clone(self),
            is_taken: Arc::default(),
            has_call: Arc::new(true.into()),
        });
    }

    /// Counts a call without a token.
    pub(crate) fn count_call(&self) {
        self.passed_on.fetch_add(1, Ordering::AcqRel);
        self.is_last_stopped.store(false, Ordering::Relaxed);
    }

    /// Records that a call that was passed on was stopped midway.
    pub(crate) fn mark_stopped(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.is_last_stopped.store(true, Ordering::Relaxed);
        // Last: who finds the call gone must find it stopped.
        self.take_back();
    }

    /// Returns whether a call may have reached the handler and was neither taken back nor stopped.
    pub(super) fn has_calls(&self) -> bool {
        self.passed_on.load(Ordering::Acquire) > 0
    }

    /// Returns what is known about the calls of the handler.
    pub(crate) fn handler_state(&self) -> HandlerState {
        let is_none_left = !self.has_calls();
        let is_last_stopped = self.is_last_stopped.load(Ordering::Relaxed);
        if self.is_stopped() && (is_none_left || is_last_stopped) {
            HandlerState::Stopped
        } else if is_none_left {
            HandlerState::NotCalled
        } else {
            HandlerState::MaybeCalled
        }
    }

    /// Returns whether any call was stopped midway. Its effect is unknown even if a later call answered.
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Returns whether there was one call at most, as far as a layer that is not of this crate could make several.
    pub(crate) fn is_single(&self) -> bool {
        !self.is_stopped() && !self.is_copied.load(Ordering::Relaxed)
    }

    /// Removes a call, unless a layer further in has removed it and is about to pass the request on.
    pub(crate) fn take_back(&self) {
        let less = |passed_on: usize| passed_on.checked_sub(1);
        self.passed_on
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less)
            .ok();
    }
}

impl CallToken {
    /// Returns the token of a request, for an extractor that may refuse the request after it is consumed.
    pub(crate) fn from_extensions(extensions: &Extensions) -> Option<Self> {
        let token = extensions.get::<Self>()?;
        Some(Self {
            tracker: Arc::clone(&token.tracker),
            is_taken: Arc::clone(&token.is_taken),
            has_call: Arc::clone(&token.has_call),
        })
    }

    /// Records that the request may reach the handler, of an extractor that does not refuse it.
    pub(crate) fn accept(&self) {
        // The call that a retry repeats may have been taken back. Several extractors of a request count one call.
        if self.is_taken.load(Ordering::Relaxed) && !self.has_call.swap(true, Ordering::Relaxed) {
            self.tracker.count_call();
        }
    }

    /// Records that a request is refused, if it has a token.
    pub(crate) fn refuse_request(extensions: &Extensions) {
        if let Some(token) = extensions.get::<Self>() {
            token.take_over();
        }
    }

    /// Takes back the call of a request that is refused, or is passed on with a token of its own: a layer that may do either
    /// removes the token that it finds.
    pub(crate) fn take_over(&self) -> Arc<CallTracker> {
        // One swap decides who takes the call back, and the count has an order of its own.
        if self.has_call.swap(false, Ordering::Relaxed) {
            self.is_taken.store(true, Ordering::Relaxed);
            self.tracker.take_back();
        }
        // Relaxed: a layer that calls again has the answer to the call that took the token, or has passed it on before.
        match self.is_taken.load(Ordering::Relaxed) {
            true => Arc::clone(&self.tracker),
            // A request that the handler makes gets a tracker of its own, which is not read.
            false => Arc::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracked() -> (Arc<CallTracker>, Extensions) {
        let (tracker, mut extensions) = (Arc::<CallTracker>::default(), Extensions::new());
        tracker.pass_on(&mut extensions);
        (tracker, extensions)
    }

    fn take(request: &mut Extensions) -> Arc<CallTracker> {
        request.remove::<CallToken>().unwrap().take_over()
    }

    #[test]
    fn a_request_refused_by_an_inner_layer_has_not_called_its_handler() {
        let (tracker, mut outer) = tracked();
        assert_eq!(tracker.handler_state(), HandlerState::MaybeCalled);
        let taken = take(&mut outer);
        assert_eq!(tracker.handler_state(), HandlerState::NotCalled);
        taken.pass_on(&mut outer);
        assert_eq!(tracker.handler_state(), HandlerState::MaybeCalled);
        CallToken::refuse_request(&outer);
        assert_eq!(tracker.handler_state(), HandlerState::NotCalled);
    }

    #[test]
    fn one_of_several_calls_passed_on_may_have_called_the_handler() {
        for refused_first in [true, false] {
            let (tracker, request) = tracked();
            let copy = request.clone();
            let mut calls = [request, copy];
            let taken = calls.each_mut().map(take);
            assert_eq!(tracker.handler_state(), HandlerState::NotCalled);
            taken[usize::from(refused_first)].pass_on(&mut calls[0]);
            assert_eq!(tracker.handler_state(), HandlerState::MaybeCalled);
        }
    }

    #[test]
    fn a_request_made_by_the_handler_does_not_change_the_handler_state() {
        let (tracker, handlers) = tracked();
        let mut made = handlers.clone();
        CallToken::refuse_request(&made);
        assert_eq!(tracker.handler_state(), HandlerState::MaybeCalled);
        let taken = take(&mut made);
        taken.pass_on(&mut made);
        taken.mark_stopped();
        CallToken::refuse_request(&made);
        assert_eq!(tracker.handler_state(), HandlerState::MaybeCalled);
        // The handler keeps its token until it ends.
        drop(handlers);
    }

    #[test]
    fn a_stopped_handler_stays_stopped_after_refusals_until_another_call_is_passed_on() {
        let (tracker, mut request) = tracked();
        let mut retried = request.clone();
        let taken = take(&mut request);
        taken.pass_on(&mut request);
        taken.mark_stopped();
        CallToken::refuse_request(&retried);
        assert_eq!(tracker.handler_state(), HandlerState::Stopped);
        // An extractor refuses a request that a layer passed on.
        let mut refused = retried.clone();
        take(&mut refused).pass_on(&mut refused);
        CallToken::refuse_request(&refused);
        assert_eq!(tracker.handler_state(), HandlerState::Stopped);
        take(&mut retried).pass_on(&mut retried);
        assert_eq!(tracker.handler_state(), HandlerState::MaybeCalled);
        assert!(tracker.is_stopped());
    }

    /// The two extractors of a request that was sent again share its call.
    #[test]
    fn a_retried_request_that_an_extractor_refuses_after_another_has_not_called_its_handler() {
        let (tracker, request) = tracked();
        let retried = request.clone();
        CallToken::refuse_request(&request);
        let token = || CallToken::from_extensions(&retried).unwrap();
        let [first, second] = [token(), token()];
        first.accept();
        assert_eq!(tracker.handler_state(), HandlerState::MaybeCalled);
        second.take_over();
        assert_eq!(tracker.handler_state(), HandlerState::NotCalled);
    }
}
