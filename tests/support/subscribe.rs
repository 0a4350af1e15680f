//! A tracing subscriber for one thread.

use std::sync::OnceLock;

use tracing::Dispatch;
use tracing::subscriber::{DefaultGuard, NoSubscriber};

/// Makes a subscriber this thread's own, until the guard is dropped.
///
/// tracing caches for the whole process whether a subscriber is interested in a callsite. While
/// it knows of one subscriber only, it asks the thread that comes by first, and that may be another
/// test's, which has none: then the place is silent for us too. A second subscriber, kept, makes it
/// ask them all.
pub fn subscribe(subscriber: impl Into<Dispatch>) -> DefaultGuard {
    static SECOND: OnceLock<Dispatch> = OnceLock::new();
    SECOND.get_or_init(|| Dispatch::new(NoSubscriber::new()));
    tracing::dispatcher::set_default(&subscriber.into())
}
