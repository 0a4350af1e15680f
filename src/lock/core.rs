//! The state that all clones of a `Redlock` share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::lock::layout::Layout;
use crate::lock::queue::WaiterCap;
use crate::lock::registry::Registry;
use crate::lock::settings::Settings;

/// A lock service: the settings, the groups of nodes, and the lease tasks.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) settings: Arc<Settings>,
    pub(crate) layout: Layout,
    pub(crate) registry: Arc<Registry>,
    /// The cap on all calls that wait.
    pub(crate) cap: Option<Arc<WaiterCap>>,
    /// Whether a second request of one task for a lock that is still held was logged.
    has_warned: AtomicBool,
}

impl Core {
    pub(crate) fn new(settings: Arc<Settings>, layout: Layout) -> Arc<Self> {
        Arc::new(Self {
            cap: settings.max_waiters.map(WaiterCap::new),
            settings,
            layout,
            registry: Registry::new(),
            has_warned: AtomicBool::new(false),
        })
    }

    /// Logs, once, that a task requests a lock which it requested before and which is still held: it may wait for
    /// itself.
    pub(crate) fn warn_of_reentry(&self, resource: &'static str) {
        // Relaxed: one swap decides who logs.
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                resource,
                "a task requests a lock again that it acquired and that is still held; redlock locks are not re-entrant, \
                 so it gets the lock only after its release"
            );
        }
    }
}
