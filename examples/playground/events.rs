//! The stream of events that the page shows.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast;
use tokio::time::Instant;

/// All events of the playground, as JSON texts.
#[derive(Debug)]
pub(crate) struct Events {
    began: Instant,
    sender: broadcast::Sender<Arc<str>>,
    /// The number of the next event.
    serial: AtomicU64,
    /// What a page that connects later needs for its timeline and its ledger.
    kept: Mutex<VecDeque<Kept>>,
}

#[derive(Debug)]
struct Kept {
    instance: u64,
    at: Duration,
    text: Arc<str>,
}

/// The events of one instance.
#[derive(Debug, Clone)]
pub(crate) struct Feed {
    events: Arc<Events>,
    instance: u64,
}

impl Events {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            sender: broadcast::channel(BUFFER).0,
            serial: AtomicU64::new(1),
            kept: Mutex::default(),
        })
    }

    pub(crate) fn feed(self: &Arc<Self>, instance: u64) -> Feed {
        Feed {
            events: Arc::clone(self),
            instance,
        }
    }

    /// Returns the time since the playground began, in milliseconds.
    pub(crate) fn now(&self) -> u128 {
        self.began.elapsed().as_millis()
    }

    /// Subscribes to all events from now on.
    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Arc<str>> {
        self.sender.subscribe()
    }

    /// Returns the recent holds and writes of one instance.
    pub(crate) fn recent(&self, instance: u64) -> Vec<Arc<str>> {
        let kept = lock(&self.kept);
        let recent = kept.iter().filter(|event| event.instance == instance);
        recent.map(|event| Arc::clone(&event.text)).collect()
    }

    pub(crate) fn send(&self, event: &Value) {
        // Fails if no page is open.
        drop(self.sender.send(event.to_string().into()));
    }
}

impl Feed {
    /// Sends an event, which must be an object.
    pub(crate) fn send(&self, kind: &str, mut event: Value) {
        self.stamp(kind, &mut event);
        self.events.send(&event);
    }

    /// Sends an event that pages which connect later get too.
    pub(crate) fn send_and_keep(&self, kind: &str, mut event: Value) {
        self.stamp(kind, &mut event);
        let text: Arc<str> = event.to_string().into();
        let at = self.events.began.elapsed();
        let mut kept = lock(&self.events.kept);
        while kept.front().is_some_and(|first| at > first.at + HISTORY) {
            kept.pop_front();
        }
        kept.push_back(Kept {
            instance: self.instance,
            at,
            text: Arc::clone(&text),
        });
        drop(self.events.sender.send(text));
    }

    pub(crate) fn now(&self) -> u128 {
        self.events.now()
    }

    pub(crate) fn instance(&self) -> u64 {
        self.instance
    }

    fn stamp(&self, kind: &str, event: &mut Value) {
        event["type"] = json!(kind);
        event["instance"] = json!(self.instance);
        event["at"] = json!(self.now());
        // A page may get an event as news and as a part of the past.
        event["serial"] = json!(self.events.serial.fetch_add(1, Ordering::Relaxed));
    }
}

/// Locks a mutex also after a panic of another task: each of the playground's values is consistent between any two
/// statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many events a slow page may be behind before it misses some.
const BUFFER: usize = 4_096;

/// How much of the past a new page shows.
const HISTORY: Duration = Duration::from_secs(30);
