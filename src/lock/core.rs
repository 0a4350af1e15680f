//! The state that all clones of a `Redlock` share.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::lock::cluster::{Cluster, Settings};
use crate::lock::queue::LocalQueue;
use crate::lock::registry::Registry;
use crate::node::{Mutex, Node};

/// A lock service: the nodes and settings, the queue of this process, and its lease tasks.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) queue: Arc<LocalQueue>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) extensions: Extensions,
    /// Whether a second request of one task for a lock that is still held was logged.
    has_warned: AtomicBool,
}

/// State of higher floors for a lock service: one value of each type.
#[derive(Debug, Default)]
pub(crate) struct Extensions(Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl Core {
    pub(crate) fn new(nodes: Vec<Arc<dyn Node>>, settings: Settings) -> Arc<Self> {
        Arc::new(Self {
            cluster: Cluster::new(nodes, settings),
            queue: Arc::default(),
            registry: Registry::new(),
            extensions: Extensions::default(),
            has_warned: AtomicBool::new(false),
        })
    }

    /// Logs, once, that a task requests a lock which it requested before and which is still held: it may wait for
    /// itself.
    pub(crate) fn warn_of_reentry(&self, resource: &'static str) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                resource,
                "a task requests a lock again that it acquired and that is still held; redlock locks are not re-entrant, \
                 so it gets the lock only after its release"
            );
        }
    }
}

impl Extensions {
    /// Returns the value of a type, created at its first use.
    pub(crate) fn get<T: Any + Default + Send + Sync>(&self) -> Arc<T> {
        let mut values = self.0.lock();
        let value = values
            .entry(TypeId::of::<T>())
            .or_insert_with(|| Arc::new(T::default()));
        // Cannot fail: the entry of a type is a value of that type.
        Arc::clone(value).downcast().unwrap_or_default()
    }
}
