//! Several independent servers.

use std::time::Duration;

use crate::deadline::{Deadline, POLL};
use crate::proxy::Proxy;
use crate::redis_server::RedisServer;

/// Independent servers, all of them empty at first.
#[derive(Debug)]
pub struct Cluster {
    pub servers: Vec<RedisServer>,
}

/// The environment of a program that locks over servers whose URLs are given, without a restart guard.
pub fn quorum(urls: &str) -> [(&'static str, &str); 2] {
    [("REDLOCK_URLS", urls), ("REDLOCK_RESTART_GUARD", "off")]
}

impl Cluster {
    /// Starts `count` servers and waits until all of them answer.
    pub fn start(count: usize) -> Self {
        let mut servers: Vec<_> = (0..count).map(|_| RedisServer::launch()).collect();
        for server in &mut servers {
            server.wait_until_ready();
        }
        Self { servers }
    }

    /// Gives a command to all servers.
    #[track_caller]
    pub fn command(&self, command: &[&str]) {
        for server in &self.servers {
            server.command(command);
        }
    }

    /// Counts the servers that have a key.
    #[track_caller]
    pub fn holders(&self, key: &str) -> usize {
        let servers = self.servers.iter();
        servers.filter(|server| server.exists(key)).count()
    }

    /// Returns the URLs of all servers.
    pub fn urls(&self) -> Vec<String> {
        self.servers.iter().map(RedisServer::url).collect()
    }

    /// Returns a proxy before one of the servers, and the URLs of all with the proxy's in its place.
    pub async fn behind_proxy(&self, node: usize) -> (Proxy, Vec<String>) {
        let proxy = Proxy::start(self.servers[node].addr()).await;
        let mut urls = self.urls();
        urls[node] = proxy.url();
        (proxy, urls)
    }

    /// Returns a proxy before each server.
    pub async fn proxies(&self) -> Vec<Proxy> {
        let mut proxies = Vec::new();
        for server in &self.servers {
            proxies.push(Proxy::start(server.addr()).await);
        }
        proxies
    }

    /// Returns the locks on all servers that are neither killed nor stopped, once per server.
    #[track_caller]
    pub fn lock_keys(&self) -> Vec<String> {
        let running = self.servers.iter().filter(|server| server.is_running());
        running
            .flat_map(|server| server.keys("*"))
            .filter(|key| is_lock(key))
            .collect()
    }

    /// Waits until no running server holds a lock; panics with the left-over names.
    ///
    /// The runtime goes on meanwhile, so lease tasks on the test's own thread can release.
    pub async fn wait_until_free(&self, timeout: Duration) {
        let deadline = Deadline::after(timeout);
        loop {
            let left = self.lock_keys();
            if left.is_empty() {
                return;
            }
            assert!(
                !deadline.is_over(),
                "still locked after {timeout:?}: {left:?}"
            );
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits like [`Cluster::wait_until_free`], for tests whose holders are other processes.
    #[track_caller]
    pub fn wait_until_free_blocking(&self, timeout: Duration) {
        let deadline = Deadline::after(timeout);
        loop {
            let left = self.lock_keys();
            if left.is_empty() {
                return;
            }
            assert!(deadline.pause(), "still locked after {timeout:?}: {left:?}");
        }
    }
}

/// Tells locks from what stays on a node after a release.
fn is_lock(key: &str) -> bool {
    let suffixes = [":fence", ":generation", ":done", ":intent"];
    let prefixes = ["redlock:fence:", "redlock:done:", "redlock:intent:"];
    let stays = suffixes.iter().any(|suffix| key.ends_with(suffix));
    !stays && !prefixes.iter().any(|prefix| key.starts_with(prefix))
}
