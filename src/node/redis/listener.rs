//! The listener: one more connection to a server, while somebody in this process waits for a lock.
//!
//! On it the releases of these locks are heard of. It is opened for the first who waits and closed some time
//! after the last; if it cannot be had, those who wait ask the server from time to time as before.

use std::collections::HashMap;
use std::future::{Future, pending, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use deadpool_redis::redis::aio::{PubSubSink, PubSubStream};
use deadpool_redis::redis::{Client, Msg, RedisError, Value};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::node::redis::connection::{describe, within};
use crate::node::{ReleaseSignal, Subscription};

/// Hears of releases at one server.
pub(super) struct Listener {
    name: Arc<str>,
    client: Client,
    /// How long connecting and asking may take.
    limit: Duration,
    /// The way to the task, once there is one.
    orders: Mutex<Option<mpsc::UnboundedSender<Order>>>,
}

enum Order {
    Join(Arc<[u8]>, Arc<ReleaseSignal>, usize),
    Leave(Arc<[u8]>),
}

type Asking = Pin<Box<dyn Future<Output = Asked> + Send>>;

/// What became of a request on the connection.
enum Asked {
    /// To hear of these locks.
    Joined(Vec<Arc<[u8]>>, Result<(), RedisError>),
    /// To hear of some no more, or whether it still stands.
    Other(Result<(), RedisError>),
}

struct Task {
    name: Arc<str>,
    client: Client,
    limit: Duration,
    /// By the name of the lock, who wants to hear of it, and what it knows this server as.
    signals: HashMap<Arc<[u8]>, (Arc<ReleaseSignal>, usize)>,
    link: Option<Link>,
    /// When to ask whether the connection stands, or to close it, or to open one.
    alarm: Instant,
    /// Not to be closed before.
    close_at: Instant,
    /// Not to be tried before.
    connect_at: Instant,
    /// Whether it was told that the user lacks the right to listen.
    warned: bool,
}

struct Link {
    sink: PubSubSink,
    messages: PubSubStream,
    asking: FuturesUnordered<Asking>,
    /// Whether a question whether it stands is unanswered.
    unanswered: bool,
}

/// A connection on which nothing was to be heard this long is asked whether it still stands; one that
/// nobody needs is closed.
const KEEPALIVE: Duration = Duration::from_secs(5);
const LINGER: Duration = Duration::from_secs(10);
/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(500);
/// Most orders that are carried out by one command.
const MAX_BATCH: usize = 128;

impl Listener {
    pub(super) fn new(name: &Arc<str>, client: Client, limit: Duration) -> Arc<Self> {
        Arc::new(Self {
            name: Arc::clone(name),
            client,
            limit,
            orders: Mutex::default(),
        })
    }

    pub(super) fn listen(
        self: &Arc<Self>,
        lock: &Arc<[u8]>,
        signal: &Arc<ReleaseSignal>,
        node: usize,
    ) -> Subscription {
        self.order(Order::Join(Arc::clone(lock), Arc::clone(signal), node));
        let (listener, lock) = (Arc::clone(self), Arc::clone(lock));
        Subscription::new(move || listener.order(Order::Leave(lock)))
    }

    fn order(&self, order: Order) {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let order = match &*orders {
            Some(orders) => match orders.send(order) {
                Ok(()) => return,
                // The runtime that the task ran on is gone; go on in the one that we are in.
                Err(mpsc::error::SendError(order)) => order,
            },
            None => order,
        };
        if let Ok(runtime) = Handle::try_current()
            && matches!(order, Order::Join(..))
        {
            let (sender, received) = mpsc::unbounded_channel();
            runtime.spawn(self.task().run(received));
            drop(sender.send(order));
            *orders = Some(sender);
        }
    }

    fn task(&self) -> Task {
        let now = Instant::now();
        Task {
            name: Arc::clone(&self.name),
            client: self.client.clone(),
            limit: self.limit,
            signals: HashMap::new(),
            link: None,
            alarm: now,
            close_at: now,
            connect_at: now,
            warned: false,
        }
    }
}

impl Task {
    async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                received = orders.recv_many(&mut batch, MAX_BATCH) => {
                    if received == 0 {
                        return;
                    }
                    self.take(&mut batch);
                }
                heard = hear(&mut self.link) => match heard {
                    Notified::Message(message) => self.tell(&message),
                    Notified::Asked(asked) => self.on_asked(asked),
                    Notified::End => self.lose_link("the server closed the connection"),
                },
                () = sleep_until(self.alarm) => self.on_alarm().await,
            }
        }
    }

    /// Takes orders in their sequence, with as few commands as may be.
    fn take(&mut self, batch: &mut Vec<Order>) {
        let (mut joined, mut left) = (Vec::new(), Vec::new());
        for order in batch.drain(..) {
            match order {
                Order::Join(lock, signal, node) => {
                    left.retain(|other| *other != lock);
                    joined.push(Arc::clone(&lock));
                    self.signals.insert(lock, (signal, node));
                }
                Order::Leave(lock) => {
                    joined.retain(|other| *other != lock);
                    self.signals.remove(&lock);
                    left.push(lock);
                }
            }
        }
        match &mut self.link {
            Some(link) => {
                link.join(joined);
                link.leave(left);
            }
            None => self.alarm = self.connect_at,
        }
        if self.signals.is_empty() {
            // Nothing else is put off: those who come and go may do so on a connection that is dead.
            self.close_at = Instant::now() + LINGER;
        }
    }

    async fn on_alarm(&mut self) {
        let now = Instant::now();
        self.alarm = now + KEEPALIVE;
        match &mut self.link {
            None if self.signals.is_empty() => {}
            None => self.connect().await,
            Some(_) if self.signals.is_empty() && self.close_at <= now => self.link = None,
            Some(link) if link.unanswered => self.lose_link("no answer"),
            Some(link) => link.ask_whether_it_stands(),
        }
    }

    async fn connect(&mut self) {
        let opening = async {
            let opened = self.client.get_async_pubsub().await;
            opened.map_err(|error| Arc::<str>::from(describe(&error)))
        };
        match within(self.limit, opening).await {
            Ok(opened) => {
                let (sink, messages) = opened.split();
                let mut link = Link {
                    sink,
                    messages,
                    asking: FuturesUnordered::new(),
                    unanswered: false,
                };
                link.join(self.signals.keys().cloned().collect());
                self.link = Some(link);
            }
            Err(why) => self.lose_link(&why),
        }
    }

    fn on_asked(&mut self, asked: Asked) {
        match asked {
            Asked::Joined(locks, Ok(())) => {
                for (signal, node) in locks.iter().filter_map(|lock| self.signals.get(lock)) {
                    signal.set_subscribed(*node, true);
                }
            }
            Asked::Joined(_, Err(error)) | Asked::Other(Err(error)) => self.warn(&error),
            Asked::Other(Ok(())) => {
                if let Some(link) = &mut self.link {
                    link.unanswered = false;
                }
            }
        }
    }

    fn tell(&self, message: &Msg) {
        let Ok(lock) = message.get_channel::<Vec<u8>>() else {
            return;
        };
        if let Some((signal, node)) = self.signals.get(lock.as_slice()) {
            signal.notify(*node, message.get_payload().unwrap_or(1));
        }
    }

    fn lose_link(&mut self, why: &str) {
        tracing::debug!(
            node = &*self.name,
            why,
            "releases at this redlock node are not heard of"
        );
        self.link = None;
        for (signal, node) in self.signals.values() {
            signal.set_subscribed(*node, false);
        }
        self.connect_at = Instant::now() + PAUSE;
        self.alarm = self.connect_at;
    }

    /// Says once that the server does not let this process listen. A connection that ended is seen
    /// elsewhere.
    fn warn(&mut self, error: &RedisError) {
        if !error.is_unrecoverable_error() && !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                node = &*self.name,
                why = describe(error),
                "redlock node does not tell of releases; those who wait ask it from time to time"
            );
        }
    }
}

/// The runtime may end before those who listen do.
impl Drop for Task {
    fn drop(&mut self) {
        for (signal, node) in self.signals.values() {
            signal.set_subscribed(*node, false);
        }
    }
}

/// What is heard on a connection.
enum Notified {
    Message(Msg),
    Asked(Asked),
    End,
}

/// Waits for what comes on the connection; for ever, if there is none.
async fn hear(link: &mut Option<Link>) -> Notified {
    let Some(link) = link else {
        return pending().await;
    };
    tokio::select! {
        Some(asked) = link.asking.next() => Notified::Asked(asked),
        message = link.messages.next() => message.map_or(Notified::End, Notified::Message),
    }
}

impl Link {
    fn join(&mut self, locks: Vec<Arc<[u8]>>) {
        if !locks.is_empty() {
            let mut sink = self.sink.clone();
            self.ask(async move {
                let names: Vec<&[u8]> = locks.iter().map(AsRef::as_ref).collect();
                let joined = sink.subscribe(names).await;
                Asked::Joined(locks, joined)
            });
        }
    }

    fn leave(&mut self, locks: Vec<Arc<[u8]>>) {
        if !locks.is_empty() {
            let mut sink = self.sink.clone();
            self.ask(async move {
                let names: Vec<&[u8]> = locks.iter().map(AsRef::as_ref).collect();
                Asked::Other(sink.unsubscribe(names).await)
            });
        }
    }

    fn ask_whether_it_stands(&mut self) {
        self.unanswered = true;
        let mut sink = self.sink.clone();
        self.ask(async move { Asked::Other(sink.ping::<Value>().await.map(drop)) });
    }

    /// Sends a request behind all that were sent.
    fn ask(&mut self, asking: impl Future<Output = Asked> + Send + 'static) {
        let mut asking: Asking = Box::pin(asking);
        // The first poll takes the place in redis-rs's queue; polling in order keeps the order.
        let mut context = Context::from_waker(Waker::noop());
        match asking.as_mut().poll(&mut context) {
            Poll::Ready(asked) => self.asking.push(Box::pin(ready(asked))),
            Poll::Pending => self.asking.push(asking),
        }
    }
}

#[cfg(test)]
mod tests {
    use deadpool_redis::redis::RedisConnectionInfo;
    use deadpool_redis::redis::aio::PubSub;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::sleep;

    use crate::protocol::Quorum;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_given_up_however_often_somebody_comes_and_goes() {
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
        let listener = Listener::new(
            &Arc::from("n"),
            Client::open("redis://127.0.0.1:1").unwrap(),
            PAUSE,
        );
        let mut task = listener.task();
        task.link = Some(Link {
            sink,
            messages,
            asking: FuturesUnordered::new(),
            unanswered: false,
        });
        let signal = ReleaseSignal::new(Quorum::new(1).unwrap());
        let lock = Arc::from(&b"k"[..]);
        task.signals
            .insert(Arc::clone(&lock), (Arc::clone(&signal), 0));
        signal.set_subscribed(0, true);
        let (orders, received) = mpsc::unbounded_channel();
        tokio::spawn(task.run(received));
        for _ in 0..8 {
            sleep(KEEPALIVE / 2).await;
            orders.send(Order::Leave(Arc::clone(&lock))).unwrap();
            let order = Order::Join(Arc::clone(&lock), Arc::clone(&signal), 0);
            sleep(KEEPALIVE / 10).await;
            orders.send(order).unwrap();
        }
        assert!(!signal.is_subscribed());
    }
}
