//! A service whose readiness is delayed.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Sleep, sleep};
use tower::Service;

/// A service that takes a while to become ready, each time it is called.
#[derive(Debug)]
pub struct SlowReadiness<S> {
    inner: S,
    after: Duration,
    is_ready: bool,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> SlowReadiness<S> {
    /// Delays the readiness of a service and of its clones.
    pub fn new(inner: S, after: Duration) -> Self {
        Self {
            inner,
            after,
            is_ready: false,
            waiting: None,
        }
    }

    /// Delays the readiness of the clones of a service, and not its own.
    pub fn of_clones(inner: S, after: Duration) -> Self {
        Self {
            is_ready: true,
            ..Self::new(inner, after)
        }
    }
}

/// By hand: a clone is not ready.
impl<S: Clone> Clone for SlowReadiness<S> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone(), self.after)
    }
}

impl<S: Service<R>, R> Service<R> for SlowReadiness<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        if self.is_ready {
            return self.inner.poll_ready(context);
        }
        let after = self.after;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(after)));
        ready!(waiting.as_mut().poll(context));
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: R) -> S::Future {
        self.waiting = None;
        self.inner.call(request)
    }
}
