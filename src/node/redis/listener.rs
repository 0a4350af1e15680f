//! The listener: subscribes to the releases of locks at one server, on a separate connection.
//!
//! # Implementation details
//!
//! A process subscribes to a lock only while it waits for it. The listener therefore opens its connection for the
//! first subscription and closes it some time after the last. One task owns the connection and the subscriptions;
//! [`Listener::subscribe`] and the drop of a subscription send it commands through a channel, in order. The task
//! executes the commands that have queued up with one `SUBSCRIBE` and one `UNSUBSCRIBE` at most.
//!
//! Invariants:
//!
//! * A signal counts as subscribed at this server from the confirmation of its `SUBSCRIBE` until the connection is
//!   lost, so it never relies on a server that does not publish to it.
//! * Requests keep their order on the connection, although their replies are awaited concurrently: each is polled
//!   once when it is made, which enqueues it in redis-rs.
//! * A silent connection is detected by pings, at an interval that other commands do not extend.
//!
//! Without a connection, waiters poll the server as before; a lost message costs time only.

use std::collections::HashMap;
use std::future::{Future, pending, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use deadpool_redis::redis::aio::{PubSub, PubSubSink, PubSubStream};
use deadpool_redis::redis::{Msg, RedisError, Value};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::node::Mutex;
use crate::node::home::Home;
use crate::node::redis::address::Address;
use crate::node::redis::connector::within;
use crate::node::redis::describe::describe;
use crate::node::release_signal::{ReleaseSignal, Subscription};

/// Subscribes to releases at one server.
pub(super) struct Listener {
    name: Arc<str>,
    address: Arc<Address>,
    /// The time limit for connecting.
    limit: Duration,
    home: Arc<Home>,
    /// The channel to the task, once there is one. It has no bound of its own, because a command must not be lost. Its
    /// senders bound it: lease tasks of the same home, which rest when the listener rests. Each subscribes after an
    /// attempt that the lanes have answered, and unsubscribes once for that.
    commands: Mutex<Option<mpsc::UnboundedSender<ListenerCommand>>>,
}

enum ListenerCommand {
    /// Subscribes a signal, to which this server is the node with this number, to a lock.
    Subscribe(Arc<[u8]>, Arc<ReleaseSignal>, usize),
    Unsubscribe(Arc<[u8]>, Arc<ReleaseSignal>),
}

struct ListenerTask {
    name: Arc<str>,
    address: Arc<Address>,
    limit: Duration,
    /// The signal of each lock, with the number of this server.
    signals: HashMap<Arc<[u8]>, (Arc<ReleaseSignal>, usize)>,
    connection: Option<PubSubConnection>,
    /// When to ping the connection, to close it, or to open one.
    timer: Instant,
    /// When the connection may be closed at the earliest.
    close_at: Instant,
    /// When to connect at the earliest.
    connect_at: Instant,
    /// Whether a missing permission to subscribe has been logged.
    has_warned: bool,
}

struct PubSubConnection {
    sink: PubSubSink,
    messages: PubSubStream,
    requests: FuturesUnordered<PubSubRequest>,
    /// Whether a ping is unanswered.
    is_pinged: bool,
}

type PubSubRequest = Pin<Box<dyn Future<Output = Completed> + Send>>;

/// A completed request.
enum Completed {
    /// A subscription to these locks.
    Subscribed(Vec<(Arc<[u8]>, Arc<ReleaseSignal>)>, Result<(), RedisError>),
    /// The end of a subscription, or a ping.
    Other(Result<(), RedisError>),
}

/// An event on the connection.
enum PubSubEvent {
    Message(Msg),
    Completed(Completed),
    Closed,
}

/// The interval of pings.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// How long a connection without subscriptions stays open.
const LINGER: Duration = Duration::from_secs(10);
/// The pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(500);
/// The number of commands that are executed together.
const MAX_BATCH: usize = 128;

impl Listener {
    pub(super) fn new(
        name: &Arc<str>,
        address: Arc<Address>,
        limit: Duration,
        home: &Arc<Home>,
    ) -> Arc<Self> {
        Arc::new(Self {
            name: Arc::clone(name),
            address,
            limit,
            home: Arc::clone(home),
            commands: Mutex::default(),
        })
    }

    /// Subscribes a signal, to which this server is number `node`, to the releases of a lock.
    pub(super) fn subscribe(
        self: &Arc<Self>,
        lock: &Arc<[u8]>,
        signal: &Arc<ReleaseSignal>,
        node: usize,
    ) -> Subscription {
        let (key, signal) = (Arc::clone(lock), Arc::clone(signal));
        self.send(ListenerCommand::Subscribe(key, Arc::clone(&signal), node));
        let (listener, lock) = (Arc::clone(self), Arc::clone(lock));
        Subscription::new(move || listener.send(ListenerCommand::Unsubscribe(lock, signal)))
    }

    fn send(&self, command: ListenerCommand) {
        let mut commands = self.commands.lock();
        let command = match &*commands {
            Some(commands) => match commands.send(command) {
                Ok(()) => return,
                // The home of the task has ended.
                Err(mpsc::error::SendError(command)) => command,
            },
            None => command,
        };
        if matches!(command, ListenerCommand::Subscribe(..)) {
            let (sender, receiver) = mpsc::unbounded_channel();
            drop(sender.send(command));
            *commands = Some(sender);
            drop(commands);
            self.home.spawn(self.task().run(receiver));
        }
    }

    fn task(&self) -> ListenerTask {
        let now = Instant::now();
        ListenerTask {
            name: Arc::clone(&self.name),
            address: Arc::clone(&self.address),
            limit: self.limit,
            signals: HashMap::new(),
            connection: None,
            timer: now,
            close_at: now,
            connect_at: now,
            has_warned: false,
        }
    }
}

impl ListenerTask {
    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<ListenerCommand>) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                received = commands.recv_many(&mut batch, MAX_BATCH) => {
                    if received == 0 {
                        return;
                    }
                    self.execute(&mut batch);
                }
                event = next_event(&mut self.connection) => match event {
                    PubSubEvent::Message(message) => self.notify(&message),
                    PubSubEvent::Completed(completed) => self.on_completed(completed),
                    PubSubEvent::Closed => self.on_lost("the server closed the connection"),
                },
                () = sleep_until(self.timer) => self.on_timer().await,
            }
        }
    }

    /// Executes commands in order, with as few requests as possible.
    fn execute(&mut self, batch: &mut Vec<ListenerCommand>) {
        let (mut subscribed, mut unsubscribed) = (Vec::new(), Vec::new());
        for command in batch.drain(..) {
            match command {
                ListenerCommand::Subscribe(lock, signal, node) => {
                    unsubscribed.retain(|other| *other != lock);
                    subscribed.push((Arc::clone(&lock), Arc::clone(&signal)));
                    self.signals.insert(lock, (signal, node));
                }
                // A later subscription to the same lock stays.
                ListenerCommand::Unsubscribe(lock, signal) if !self.has(&lock, &signal) => {}
                ListenerCommand::Unsubscribe(lock, _) => {
                    subscribed.retain(|(other, _)| *other != lock);
                    self.signals.remove(&lock);
                    unsubscribed.push(lock);
                }
            }
        }
        match &mut self.connection {
            Some(connection) => {
                connection.subscribe(subscribed);
                connection.unsubscribe(unsubscribed);
            }
            None => self.timer = self.connect_at,
        }
        if self.signals.is_empty() {
            // The timer stays as it is: the connection of subscriptions that come and go may be dead.
            self.close_at = Instant::now() + LINGER;
        }
    }

    fn has(&self, lock: &Arc<[u8]>, signal: &Arc<ReleaseSignal>) -> bool {
        let signals = self.signals.get(lock);
        signals.is_some_and(|(ours, _)| Arc::ptr_eq(ours, signal))
    }

    async fn on_timer(&mut self) {
        let now = Instant::now();
        self.timer = now + KEEPALIVE;
        match &mut self.connection {
            None if self.signals.is_empty() => {}
            None => self.connect().await,
            Some(_) if self.signals.is_empty() && self.close_at <= now => self.connection = None,
            Some(connection) if connection.is_pinged => self.on_lost("no answer"),
            Some(connection) => connection.ping(),
        }
    }

    async fn connect(&mut self) {
        let opening = async {
            let stream = self.address.connect().await;
            let stream = stream.map_err(|error| error.to_string())?;
            let opened = PubSub::new(self.address.settings(), stream).await;
            opened.map_err(|error| Arc::<str>::from(describe(&error)))
        };
        match within(self.limit, opening).await {
            Ok(opened) => {
                let (sink, messages) = opened.split();
                let mut connection = PubSubConnection::new(sink, messages);
                let signals = self.signals.iter();
                let signals =
                    signals.map(|(lock, (signal, _))| (Arc::clone(lock), Arc::clone(signal)));
                connection.subscribe(signals.collect());
                self.connection = Some(connection);
            }
            Err(why) => self.on_lost(&why),
        }
    }

    fn on_completed(&mut self, completed: Completed) {
        match completed {
            Completed::Subscribed(locks, Ok(())) => {
                // A later signal of the same lock waits for its own confirmation.
                for (lock, _) in locks.iter().filter(|(lock, signal)| self.has(lock, signal)) {
                    if let Some((signal, node)) = self.signals.get(lock) {
                        signal.set_subscribed(*node, true);
                    }
                }
            }
            Completed::Subscribed(_, Err(error)) | Completed::Other(Err(error)) => {
                self.warn(&error);
            }
            Completed::Other(Ok(())) => {
                if let Some(connection) = &mut self.connection {
                    connection.is_pinged = false;
                }
            }
        }
    }

    fn notify(&self, message: &Msg) {
        let Some((lock, subscribers)) = read_release(message) else {
            return;
        };
        if let Some((signal, node)) = self.signals.get(lock.as_slice()) {
            signal.notify(*node, subscribers);
        }
    }

    fn on_lost(&mut self, why: &str) {
        tracing::debug!(
            node = &*self.name,
            why,
            "redlock node publishes no releases to this process; waiters poll it"
        );
        self.connection = None;
        self.unsubscribe_all();
        self.connect_at = Instant::now() + PAUSE;
        self.timer = self.connect_at;
    }

    fn unsubscribe_all(&self) {
        for (signal, node) in self.signals.values() {
            signal.set_subscribed(*node, false);
        }
    }

    /// Logs once that the server refuses subscriptions. Lost connections are handled elsewhere.
    fn warn(&mut self, error: &RedisError) {
        if !error.is_unrecoverable_error() && !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!(
                node = &*self.name,
                why = describe(error),
                "redlock node refuses subscriptions to releases; waiters poll it"
            );
        }
    }
}

/// The task's runtime may end before its subscriptions.
impl Drop for ListenerTask {
    fn drop(&mut self) {
        self.unsubscribe_all();
    }
}

/// Reads the lock that was released, and the number of subscribers that the message was published to.
pub(super) fn read_release(message: &Msg) -> Option<(Vec<u8>, usize)> {
    let lock = message.get_channel().ok()?;
    Some((lock, message.get_payload().unwrap_or(1)))
}

/// Waits for the next event on the connection; forever if there is none.
async fn next_event(connection: &mut Option<PubSubConnection>) -> PubSubEvent {
    let Some(connection) = connection else {
        return pending().await;
    };
    tokio::select! {
        Some(completed) = connection.requests.next() => PubSubEvent::Completed(completed),
        message = connection.messages.next() => message.map_or(PubSubEvent::Closed, PubSubEvent::Message),
    }
}

impl PubSubConnection {
    fn new(sink: PubSubSink, messages: PubSubStream) -> Self {
        Self {
            sink,
            messages,
            requests: FuturesUnordered::new(),
            is_pinged: false,
        }
    }

    fn subscribe(&mut self, locks: Vec<(Arc<[u8]>, Arc<ReleaseSignal>)>) {
        if !locks.is_empty() {
            let mut sink = self.sink.clone();
            self.start(async move {
                let names: Vec<&[u8]> = locks.iter().map(|(lock, _)| lock.as_ref()).collect();
                let subscribed = sink.subscribe(names).await;
                Completed::Subscribed(locks, subscribed)
            });
        }
    }

    fn unsubscribe(&mut self, locks: Vec<Arc<[u8]>>) {
        if !locks.is_empty() {
            let mut sink = self.sink.clone();
            self.start(async move {
                let names: Vec<&[u8]> = locks.iter().map(AsRef::as_ref).collect();
                Completed::Other(sink.unsubscribe(names).await)
            });
        }
    }

    fn ping(&mut self) {
        self.is_pinged = true;
        let mut sink = self.sink.clone();
        self.start(async move { Completed::Other(sink.ping::<Value>().await.map(drop)) });
    }

    /// Starts a request behind all earlier ones.
    fn start(&mut self, request: impl Future<Output = Completed> + Send + 'static) {
        let mut request: PubSubRequest = Box::pin(request);
        // The first poll enqueues the request in redis-rs, so polling in order keeps the order.
        let mut context = Context::from_waker(Waker::noop());
        match request.as_mut().poll(&mut context) {
            Poll::Ready(completed) => self.requests.push(Box::pin(ready(completed))),
            Poll::Pending => self.requests.push(request),
        }
    }
}

#[cfg(test)]
mod tests {
    use deadpool_redis::redis::{IntoConnectionInfo, RedisConnectionInfo};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::sleep;

    use crate::protocol::Quorum;

    use super::*;
    use crate::node::ReleaseWatch;

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_given_up_while_subscriptions_come_and_go() {
        let (ours, mut theirs) = duplex(1 << 16);
        tokio::spawn(async move {
            let (mut swallowed, mut introduced) = ([0; 1024], false);
            while theirs.read(&mut swallowed).await.is_ok_and(|read| read > 0) {
                if !std::mem::replace(&mut introduced, true) {
                    theirs.write_all(b"+OK\r\n+OK\r\n").await.unwrap();
                }
            }
        });
        let info = RedisConnectionInfo::default();
        let opened = PubSub::new(&info, ours).await.unwrap();
        let (sink, messages) = opened.split();
        let address = "redis://127.0.0.1:1".into_connection_info().unwrap();
        let address = Arc::new(Address::new(&address).unwrap());
        let listener = Listener::new(&Arc::from("n"), address, PAUSE, &Arc::default());
        let mut task = listener.task();
        task.connection = Some(PubSubConnection::new(sink, messages));
        let signal = ReleaseSignal::new(Quorum::new(1).unwrap());
        let lock = Arc::from(&b"k"[..]);
        task.signals
            .insert(Arc::clone(&lock), (Arc::clone(&signal), 0));
        signal.set_subscribed(0, true);
        let (commands, receiver) = mpsc::unbounded_channel();
        tokio::spawn(task.run(receiver));
        for _ in 0..8 {
            sleep(KEEPALIVE / 2).await;
            let command = ListenerCommand::Unsubscribe(Arc::clone(&lock), Arc::clone(&signal));
            commands.send(command).unwrap();
            let command = ListenerCommand::Subscribe(Arc::clone(&lock), Arc::clone(&signal), 0);
            sleep(KEEPALIVE / 10).await;
            commands.send(command).unwrap();
        }
        assert!(!ReleaseWatch::new(&signal).is_subscribed());
    }
}
