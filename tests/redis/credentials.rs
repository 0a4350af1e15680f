//! Credentials that change while the service runs, and providers of them that fail.

use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, fs, process};

use support::{
    Cluster, Log, RedisServer, lock_and_release, ms, secs, until_all_up, use_every_connection,
    why_unreachable,
};
use tokio::time::{Instant, sleep};
use tower::BoxError;
use tower_redlock::deadpool_redis::Config;
use tower_redlock::{Credentials, CredentialsProvider, NodeState, Redlock};

use crate::patient::{LONGEST, builder, until_locked};

/// Gives the password that the test has set last, and counts how often it was asked.
#[derive(Clone, Default)]
struct Rotating(Arc<(Mutex<String>, AtomicUsize)>);

impl Rotating {
    fn set(&self, password: &str) {
        password.clone_into(&mut self.0.0.lock().unwrap());
    }

    fn asked(&self) -> usize {
        self.0.1.load(Ordering::Relaxed)
    }
}

impl CredentialsProvider for Rotating {
    async fn credentials(&self, _: &str) -> Result<Credentials, BoxError> {
        self.0.1.fetch_add(1, Ordering::Relaxed);
        let password = self.0.0.lock().unwrap().clone();
        Ok(Credentials::new(password).username("locker"))
    }
}

/// What the provider does for the first node. The others get the right password.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Hangs,
    Errs,
    Panics,
    IsWrong,
    HasNoFile,
}

struct Faulty(Fault, String);

impl CredentialsProvider for Faulty {
    async fn credentials(&self, node: &str) -> Result<Credentials, BoxError> {
        let right = Credentials::new(SECRET).username("locker");
        match self.0 {
            _ if node != self.1 => Ok(right),
            Fault::Hangs => pending().await,
            Fault::Errs => Err("the vault is sealed".into()),
            Fault::Panics => panic!("{SECRET} is no token"),
            Fault::IsWrong => Ok(Credentials::new(WRONG).username("locker")),
            Fault::HasNoFile => Ok(Credentials::from_file("/no/such/file")),
        }
    }
}

/// Changes the user of the locks, whose rights are all.
fn set_user(server: &RedisServer, rules: &[&str]) {
    let user = ["ACL", "SETUSER", "locker", "on", "~*", "&*", "+@all"];
    let reply = server.command(&[&user, rules].concat());
    assert_eq!(reply.as_str(), Some("OK"), "{rules:?}: {reply:?}");
}

/// Closes the connections of the locks, and returns how many there were.
fn kill(server: &RedisServer) -> i64 {
    let killed = server.command(&["CLIENT", "KILL", "USER", "locker"]);
    killed.as_int().unwrap()
}

fn start(count: usize, password: &str) -> Cluster {
    let cluster = Cluster::start(count);
    for server in &cluster.servers {
        set_user(server, &[&format!(">{password}")]);
    }
    cluster
}

async fn why_first_is_down(redlock: &Redlock) -> Option<Arc<str>> {
    match &redlock.health().await.nodes[0].state {
        NodeState::Unreachable { why, .. } => Some(Arc::clone(why)),
        _ => None,
    }
}

/// Locks for a while, and none is refused.
async fn lock_for(redlock: &Redlock, duration: Duration) {
    let began = Instant::now();
    while began.elapsed() < duration {
        lock_and_release(redlock, "k").await;
        sleep(ms(10)).await;
    }
}

fn downs(log: &Log) -> usize {
    log.text().matches("redlock node is down").count()
}

/// A token of 15 minutes is enough for a connection of 12 hours: it counts when the connection logs in.
#[tokio::test]
async fn connection_outlives_its_token_and_the_next_one_gets_another() {
    let cluster = start(1, "token-0");
    let server = &cluster.servers[0];
    let provider = Rotating::default();
    provider.set("token-0");
    let redlock = builder(cluster.urls()).credentials(provider.clone());
    let redlock = redlock.build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    let asked = provider.asked();
    set_user(server, &["<token-0", ">token-1"]);
    provider.set("token-1");
    lock_for(&redlock, ms(500)).await;
    assert_eq!(provider.asked(), asked);
    assert!(kill(server) > 0);
    until_all_up(&redlock, LONGEST).await;
    lock_for(&redlock, ms(100)).await;
    assert_eq!(provider.asked(), asked + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_rotated_under_load_refuse_no_lock() {
    let cluster = start(3, "password-0");
    let provider = Rotating::default();
    provider.set("password-0");
    // Two, so that releases are published and subscribed to.
    let redlocks = [(); 2].map(|()| {
        let builder = builder(cluster.urls()).credentials(provider.clone());
        builder.build().unwrap()
    });
    for redlock in &redlocks {
        until_all_up(redlock, LONGEST).await;
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let load: Vec<_> = (0..4)
        .map(|caller| {
            let (redlock, is_over) = (redlocks[caller % 2].clone(), Arc::clone(&is_over));
            tokio::spawn(async move {
                let mut granted = 0;
                while !is_over.load(Ordering::Relaxed) {
                    let guard = redlock.lock(format!("key-{}", caller / 2)).await;
                    let guard = guard.unwrap_or_else(|error| panic!("lock {granted}: {error}"));
                    granted += 1;
                    drop(guard);
                    sleep(ms(1)).await;
                }
                granted
            })
        })
        .collect();
    let mut killed = 0;
    for number in 1..=3 {
        let began = Instant::now();
        let [old, new] = [number - 1, number].map(|number| format!("password-{number}"));
        for server in &cluster.servers {
            set_user(server, &[&format!(">{new}")]);
        }
        for is_old_removed in [false, true] {
            for server in &cluster.servers {
                if is_old_removed {
                    set_user(server, &[&format!("<{old}")]);
                }
                killed += kill(server);
                sleep(ms(160)).await;
            }
            provider.set(&new);
        }
        assert!(began.elapsed() < secs(3), "the machine is too slow");
    }
    is_over.store(true, Ordering::Relaxed);
    let mut granted = 0;
    for caller in load {
        granted += caller.await.expect("no lock is refused");
    }
    for redlock in &redlocks {
        until_all_up(redlock, LONGEST).await;
    }
    let asked = provider.asked();
    println!("{granted} locks, {killed} connections killed, {asked} askings");
    assert!(granted > 100 && killed >= 36 && asked >= 36);
}

#[tokio::test]
async fn all_connections_log_in_with_the_credentials_of_the_provider() {
    let server = RedisServer::start();
    set_user(&server, &[&format!(">{SECRET}")]);
    let admin = "ACL SETUSER admin on >ADMIN ~* &* +@all";
    server.command(&admin.split(' ').collect::<Vec<_>>());
    server.command(&["ACL", "SETUSER", "default", "off"]);
    let admin = server.url().replace("://", "://admin:ADMIN@");
    let credentials = Credentials::new(SECRET).username("locker");
    let as_locker = || builder([server.url()]).credentials(credentials.clone());
    use_every_connection(&admin, as_locker).await;
    // The password of the URL is replaced, and its user if the provider names one.
    for (user, credentials) in [
        ("admin", credentials.clone()),
        ("locker", Credentials::new(SECRET)),
    ] {
        let url = server.url().replace("://", &format!("://{user}:{WRONG}@"));
        let redlock = builder([url]).credentials(credentials).build().unwrap();
        until_all_up(&redlock, LONGEST).await;
    }
    // A pool has its own.
    let pool = Config::from_url(admin).create_pool(None).unwrap();
    let redlock = builder([]).pool(pool).credentials(Credentials::new(WRONG));
    until_all_up(&redlock.build().unwrap(), LONGEST).await;

    let builder = as_locker();
    let shown = format!("{builder:?} {credentials:?} {:?}", builder.clone().build());
    let is_safe = shown.contains("locker") && !shown.contains(SECRET);
    assert!(is_safe, "{shown}");
}

#[tokio::test]
async fn provider_that_fails_for_one_node_is_one_failure_of_that_node() {
    let login =
        "check the user and the password in its URL, or what its CredentialsProvider returns";
    let provider = "check the provider in RedlockBuilder::credentials";
    let asking = |why: &str| format!("asking for credentials failed ({why}); {provider}");
    let wrong = "AUTH was refused (WRONGPASS invalid username-password pair or user is disabled)";
    let silent = "no answer within 300ms, the connect_timeout";
    let missing = "/no/such/file: No such file or directory (os error 2)";
    for (fault, why) in [
        (Fault::Hangs, asking(silent)),
        (Fault::Errs, asking("the vault is sealed")),
        (Fault::Panics, asking("the provider panicked")),
        (Fault::IsWrong, format!("{wrong}; {login}")),
        (Fault::HasNoFile, asking(missing)),
    ] {
        let cluster = start(3, SECRET);
        let (log, _subscribed) = Log::subscribed();
        let faulty = Faulty(fault, cluster.servers[0].addr().to_string());
        let redlock = builder(cluster.urls()).credentials(faulty);
        let redlock = redlock.connect_timeout(CONNECT_TIMEOUT).build().unwrap();
        let began = Instant::now();
        let guard = redlock.try_lock("k").await.unwrap();
        let took = began.elapsed();
        assert!(took < CONNECT_TIMEOUT, "{fault:?}: {took:?}");
        guard.release().await.unwrap();
        let mut found = None;
        while found.is_none() {
            found = why_first_is_down(&redlock).await;
            let in_time = began.elapsed() < CONNECT_TIMEOUT + NOISE;
            assert!(in_time, "{fault:?}: not down");
        }
        assert_eq!(found.as_deref(), Some(&*why));
        lock_for(&redlock, 2 * CONNECT_TIMEOUT).await;
        let text = log.text();
        assert_eq!(downs(&log), 1, "{text}");
        assert!(text.contains(&why), "{text}");
        assert!(!text.contains(SECRET) && !text.contains(WRONG), "{text}");
    }
}

/// The password was replaced after the provider had returned it.
#[tokio::test]
async fn refused_login_asks_the_provider_once_more_before_the_node_is_down() {
    struct Late(Arc<AtomicUsize>);
    impl CredentialsProvider for Late {
        async fn credentials(&self, _: &str) -> Result<Credentials, BoxError> {
            let is_first = self.0.fetch_add(1, Ordering::Relaxed) == 0;
            let password = if is_first { WRONG } else { SECRET };
            Ok(Credentials::new(password).username("locker"))
        }
    }
    let cluster = start(1, SECRET);
    let (log, _subscribed) = Log::subscribed();
    let asked = Arc::new(AtomicUsize::new(0));
    let redlock = builder(cluster.urls()).credentials(Late(Arc::clone(&asked)));
    let guard = redlock.build().unwrap().try_lock("k").await.unwrap();
    guard.release().await.unwrap();
    assert_eq!((asked.load(Ordering::Relaxed), downs(&log)), (2, 0));
}

#[tokio::test]
async fn file_is_read_again_at_each_connection() {
    let file = env::temp_dir().join(format!("tower-redlock-password-{}", process::id()));
    fs::write(&file, "first\r\n").unwrap();
    let cluster = start(1, "first");
    let (log, _subscribed) = Log::subscribed();
    let credentials = Credentials::from_file(&file).username("locker");
    let redlock = builder(cluster.urls()).credentials(credentials.clone());
    let redlock = redlock.build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    fs::write(&file, "second\n").unwrap();
    set_user(&cluster.servers[0], &["resetpass", ">second"]);
    assert_eq!(kill(&cluster.servers[0]), 1);
    until_locked(&redlock, "k").await;
    assert_eq!(downs(&log), 0, "{}", log.text());
    fs::remove_file(&file).unwrap();
    let why = why_unreachable(builder(cluster.urls()).credentials(credentials)).await;
    assert!(why.contains(&file.display().to_string()), "{why}");
}

const CONNECT_TIMEOUT: Duration = ms(300);
/// What a busy machine may add.
const NOISE: Duration = secs(1);

const SECRET: &str = "hunter2";
const WRONG: &str = "letmein";
