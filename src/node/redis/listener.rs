//! The listener: subscribes to the releases of locks at one server, on a separate connection.
//!
//! # Implementation details
//!
//! A process subscribes to a lock only while it waits for it. The listener therefore opens its connection for the
//! first subscription and closes it some time after the last. One task owns the connection and the subscriptions;
//! [`subscribe`] and the drop of a subscription send it commands through a channel, in order. The task writes what has
//! queued up together.
//!
//! Invariants:
//!
//! * A subscriber counts as subscribed from the confirmation of its `SUBSCRIBE` until the connection is lost, so it never
//!   relies on a server that does not publish to it.
//! * Each request has one reply, in the order of the requests. Messages come in between.
//! * A silent connection is detected by pings, at an interval that other commands do not extend.
//!
//! Without a connection, waiters poll the server as before; a lost message costs time only.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use deadpool::managed::Manager;
use deadpool_redis::redis::{Cmd, Value, cmd, from_redis_value};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use crate::node::redis::describe::{describe_refusal, describe_timeout};
use crate::node::redis::link::Link;
use crate::node::redis::server::{ListenerCommand, RedisServer};
use crate::node::release_signal::{Subscriber, Subscribers, Subscription};

struct Listener {
    server: Arc<RedisServer>,
    /// The subscribers of each lock: that of the waiting callers, and those of watches.
    subscribers: Subscribers,
    link: Option<Link>,
    /// The unanswered requests, oldest first: a subscription to this lock, or another.
    requests: VecDeque<Option<(Arc<[u8]>, Subscriber)>>,
    /// Whether there was no reply since the last ping.
    is_pinged: bool,
    /// When to ping the connection, to close it, or to open one.
    timer: Instant,
    /// When a connection may be closed, or another one opened, at the earliest.
    rests_until: Instant,
    /// Whether a missing permission to subscribe has been logged.
    has_warned: bool,
}

/// The interval of pings.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// How long a connection without subscriptions stays open.
const LINGER: Duration = Duration::from_secs(10);
/// The pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(500);
/// The number of commands that are written together.
const MAX_BATCH: usize = 128;

/// Subscribes to the releases of a lock.
pub(super) fn subscribe(
    server: &Arc<RedisServer>,
    lock: &Arc<[u8]>,
    subscriber: Subscriber,
) -> Subscription {
    let (server, lock) = (Arc::clone(server), Arc::clone(lock));
    let command = move |subscribes| (Arc::clone(&lock), subscriber.clone(), subscribes);
    send(&server, command(true));
    Subscription(Box::new(move || send(&server, command(false))))
}

fn send(server: &Arc<RedisServer>, command: ListenerCommand) {
    let mut commands = server.listener.lock();
    // Otherwise there is no task yet, or its home has ended. A subscription that ended with a task needs no new one.
    if let Err(mpsc::error::SendError(command)) = commands.send(command)
        && command.2
    {
        let (sender, receiver) = mpsc::unbounded_channel();
        drop(sender.send(command));
        *commands = sender;
        drop(commands);
        server.home.spawn(Listener::new(server).run(receiver));
    }
}

impl Listener {
    fn new(server: &Arc<RedisServer>) -> Self {
        let now = Instant::now();
        Self {
            server: Arc::clone(server),
            subscribers: Subscribers::default(),
            link: None,
            requests: VecDeque::new(),
            is_pinged: false,
            timer: now,
            rests_until: now,
            has_warned: false,
        }
    }

    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<ListenerCommand>) {
        let mut batch = Vec::new();
        loop {
            let timer = self.timer;
            tokio::select! {
                biased;
                received = commands.recv_many(&mut batch, MAX_BATCH) => {
                    if received == 0 {
                        return;
                    }
                    self.execute(&mut batch);
                }
                reply = poll_fn(|context| match &mut self.link {
                    Some(link) => link.poll_reply(context),
                    None => Poll::Pending,
                }) => match reply {
                    Ok(reply) => self.on_reply(&reply),
                    Err(why) => self.on_lost(&why),
                },
                () = sleep_until(timer) => self.on_timer().await,
            }
        }
    }

    /// Executes commands in order.
    fn execute(&mut self, batch: &mut Vec<ListenerCommand>) {
        for (lock, subscriber, subscribes) in batch.drain(..) {
            if subscribes {
                self.subscribe(&lock, &subscriber);
                self.subscribers.add(&lock, subscriber);
            } else if self.subscribers.remove(&lock, &subscriber) {
                // Other subscriptions to the same lock stay.
                self.send(cmd("UNSUBSCRIBE").arg(&*lock), None);
            }
        }
        if self.link.is_none() {
            self.timer = self.rests_until;
        } else if self.subscribers.0.is_empty() {
            // The timer stays as it is: the connection of subscriptions that come and go may be dead.
            self.rests_until = Instant::now() + LINGER;
        }
    }

    fn subscribe(&mut self, lock: &Arc<[u8]>, subscriber: &Subscriber) {
        let subscription = (Arc::clone(lock), subscriber.clone());
        self.send(cmd("SUBSCRIBE").arg(&**lock), Some(subscription));
    }

    /// Sends a request behind all earlier ones, if there is a connection.
    fn send(&mut self, command: &Cmd, subscription: Option<(Arc<[u8]>, Subscriber)>) {
        if let Some(link) = &mut self.link {
            let bytes = command.get_packed_command();
            link.send(1, |output| output.extend_from_slice(&bytes));
            self.requests.push_back(subscription);
        }
    }

    async fn on_timer(&mut self) {
        let now = Instant::now();
        self.timer = now + KEEPALIVE;
        let is_used = !self.subscribers.0.is_empty();
        if self.link.is_none() {
            if is_used {
                self.connect().await;
            }
        } else if !is_used && self.rests_until <= now {
            self.link = None;
        } else if self.is_pinged {
            self.on_lost("no answer");
        } else {
            self.is_pinged = true;
            self.send(&cmd("PING"), None);
        }
    }

    async fn connect(&mut self) {
        let connector = self.server.pool.manager();
        let limit = self.server.timeouts.connect + connector.login_limit();
        let opened = timeout(limit, connector.create()).await;
        match opened.unwrap_or_else(|_| Err(describe_timeout(limit))) {
            Ok(link) => {
                self.link = Some(link);
                self.requests.clear();
                self.is_pinged = false;
                for (lock, subscribers) in self.subscribers.0.clone() {
                    for subscriber in subscribers {
                        self.subscribe(&lock, &subscriber);
                    }
                }
            }
            Err(why) => self.on_lost(&why),
        }
    }

    fn on_reply(&mut self, reply: &Value) {
        if let Some((lock, subscribers)) = read_release(reply) {
            for subscriber in self.subscribers.of(lock) {
                subscriber.notify(subscribers);
            }
            return;
        }
        self.is_pinged = false;
        match (self.requests.pop_front(), describe_refusal(reply)) {
            (None, _) => self.on_lost("the server sent a reply without a request"),
            (Some(_), Some(why)) if !self.has_warned => {
                self.has_warned = true;
                tracing::warn!(
                    node = &*self.server.name,
                    why = &*why,
                    "redlock node refuses subscriptions to releases; waiters poll it"
                );
            }
            (Some(Some((lock, subscriber))), None) => {
                // Each subscriber of the same lock waits for its own confirmation, and may be gone by then.
                let mut of_lock = self.subscribers.of(&lock).iter();
                if of_lock.any(|ours| ours.shares_signal(&subscriber)) {
                    subscriber.set_subscribed(true);
                }
            }
            (Some(_), _) => {}
        }
    }

    fn on_lost(&mut self, why: &str) {
        tracing::debug!(
            node = &*self.server.name,
            why,
            "redlock node publishes no releases to this process; waiters poll it"
        );
        self.link = None;
        self.unsubscribe_all();
        self.rests_until = Instant::now() + PAUSE;
        self.timer = self.rests_until;
    }

    fn unsubscribe_all(&self) {
        for subscriber in self.subscribers.0.values().flatten() {
            subscriber.set_subscribed(false);
        }
    }
}

/// The task's runtime may end before its subscriptions.
impl Drop for Listener {
    fn drop(&mut self) {
        self.unsubscribe_all();
    }
}

/// Reads a message: the lock that was released, and the number of subscribers that the message was published to.
#[must_use]
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn read_release(reply: &Value) -> Option<(&[u8], usize)> {
    match reply.as_sequence()? {
        [Value::BulkString(kind), Value::BulkString(lock), payload] if kind == b"message" => {
            Some((lock, from_redis_value(payload.clone()).unwrap_or(1)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, duplex};
    use tokio::runtime::Handle;
    use tokio::time::sleep;

    use crate::protocol::Quorum;

    use super::*;
    use crate::node::redis::RedisNode;
    use crate::node::redis::server::tests::server;
    use crate::node::{Node, ReleaseSubscription, ReleaseWatch};

    #[tokio::test(start_paused = true)]
    async fn a_listener_ends_with_its_node_although_its_subscriptions_stay() {
        let alive = || Handle::current().metrics().num_alive_tasks();
        let node = RedisNode::new(Arc::into_inner(server()).unwrap());
        let lock = Arc::from(&b"k"[..]);
        let subscribe = |subscriber| node.subscribe(&lock, subscriber);
        let subscription = ReleaseSubscription::new(Quorum::new(1).unwrap(), subscribe);
        // It, and that of the home.
        assert_eq!(alive(), 2);
        sleep(KEEPALIVE).await;
        assert_eq!(alive(), 2);
        drop(node);
        sleep(PAUSE).await;
        assert_eq!(alive(), 1);
        drop(subscription);
        sleep(PAUSE).await;
        assert_eq!(alive(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_given_up_while_subscriptions_come_and_go() {
        let (ours, mut theirs) = duplex(1 << 16);
        tokio::spawn(async move {
            let mut swallowed = [0; 1024];
            while theirs.read(&mut swallowed).await.is_ok_and(|read| read > 0) {}
        });
        let mut task = Listener::new(&server());
        task.link = Some(Link::new(ours));
        let mut subscriber = None;
        let subscription = ReleaseSubscription::new(Quorum::new(1).unwrap(), |ours| {
            subscriber = Some(ours);
            None
        });
        let subscriber = subscriber.unwrap();
        let lock = Arc::from(&b"k"[..]);
        task.subscribers.add(&lock, subscriber.clone());
        subscriber.set_subscribed(true);
        let (commands, receiver) = mpsc::unbounded_channel();
        tokio::spawn(task.run(receiver));
        for _ in 0..8 {
            sleep(KEEPALIVE / 2).await;
            let command = |subscribes| (Arc::clone(&lock), subscriber.clone(), subscribes);
            commands.send(command(false)).unwrap();
            sleep(KEEPALIVE / 10).await;
            commands.send(command(true)).unwrap();
        }
        assert!(!ReleaseWatch::new(&subscription).is_subscribed());
    }
}
