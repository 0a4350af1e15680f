//! The state that all clones of a `Redlock` share.

use std::sync::Arc;

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
}

impl Core {
    pub(crate) fn new(settings: Arc<Settings>, layout: Layout) -> Arc<Self> {
        Arc::new(Self {
            cap: settings.max_waiters.map(WaiterCap::new),
            settings,
            layout,
            registry: Registry::new(),
        })
    }
}
