//! Servers that begin to answer with errors, and a proxy that mixes connections up: one clear failure of that node, while the
//! others give the lock.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use support::{Cluster, Log, ms, secs, until, until_all_up};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower_redlock::{NodeState, Redlock};

use crate::patient::{self, LONGEST, builder};

/// What becomes of the requests to a server.
#[derive(Debug, Clone, Copy)]
enum Fault {
    None,
    /// The server answers this to `EVALSHA`.
    RefusesScripts(&'static str),
    /// The server answers this to every request.
    Refuses(&'static str),
    /// The server says this to each new connection, and closes it.
    Closes(&'static str),
    /// The answers of two connections are exchanged.
    Mixes,
}

/// A proxy in front of a server, with a fault.
struct Wire {
    addr: SocketAddr,
    fault: watch::Sender<Fault>,
    accepting: JoinHandle<()>,
}

type Clients = Arc<Mutex<Vec<Arc<Mutex<OwnedWriteHalf>>>>>;

impl Wire {
    /// Returns one before the first server, and the URLs of all with its in the place of that one.
    async fn before_first(cluster: &Cluster) -> (Self, Vec<String>) {
        let wire = Self::start(cluster.servers[0].addr()).await;
        let mut urls = cluster.urls();
        urls[0] = format!("redis://{}", wire.addr);
        (wire, urls)
    }

    async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (fault, faults) = watch::channel(Fault::None);
        let clients = Clients::default();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, server, Arc::clone(&clients), faults.clone()));
            }
        });
        Self {
            addr,
            fault,
            accepting,
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Carries a connection until either side closes it.
async fn carry(
    client: TcpStream,
    server: SocketAddr,
    clients: Clients,
    fault: watch::Receiver<Fault>,
) -> std::io::Result<()> {
    if let Fault::Closes(why) = *fault.borrow() {
        return client.try_write(format!("-{why}\r\n").as_bytes()).map(drop);
    }
    client.set_nodelay(true)?;
    let server = TcpStream::connect(server).await?;
    server.set_nodelay(true)?;
    let (requests, client) = client.into_split();
    let (mut answers, server) = server.into_split();
    let client = Arc::new(Mutex::new(client));
    let place = {
        let mut clients = clients.lock().await;
        clients.push(Arc::clone(&client));
        clients.len() - 1
    };
    let answering = async {
        let mut answer = [0; 4096];
        loop {
            let length = answers.read(&mut answer).await?;
            if length == 0 {
                return client.lock().await.shutdown().await;
            }
            let mixes = matches!(*fault.borrow(), Fault::Mixes);
            let place = place ^ usize::from(mixes);
            let to = clients.lock().await.get(place).cloned();
            if let Some(to) = to {
                to.lock().await.write_all(&answer[..length]).await.ok();
            }
        }
    };
    tokio::select! {
        answered = answering => answered,
        asked = ask(BufReader::new(requests), server, &client, &fault) => asked,
    }
}

/// Passes requests on, or answers them.
async fn ask(
    mut requests: BufReader<OwnedReadHalf>,
    mut server: OwnedWriteHalf,
    client: &Mutex<OwnedWriteHalf>,
    fault: &watch::Receiver<Fault>,
) -> std::io::Result<()> {
    loop {
        let mut request = Vec::new();
        let arguments = read_number(&mut requests, &mut request).await?;
        for _ in 0..arguments {
            let length = read_number(&mut requests, &mut request).await?;
            let begin = request.len();
            request.resize(begin + length + 2, 0);
            requests.read_exact(&mut request[begin..]).await?;
        }
        let is_script = request.windows(7).any(|part| part == b"EVALSHA");
        let fault = *fault.borrow();
        match fault {
            Fault::RefusesScripts(why) if is_script => answer(client, why).await?,
            Fault::Refuses(why) => answer(client, why).await?,
            _ => server.write_all(&request).await?,
        }
    }
}

async fn answer(client: &Mutex<OwnedWriteHalf>, why: &str) -> std::io::Result<()> {
    let error = format!("-{why}\r\n");
    client.lock().await.write_all(error.as_bytes()).await
}

/// Reads a line with the number behind its first byte, and appends it to the request.
async fn read_number(
    requests: &mut BufReader<OwnedReadHalf>,
    request: &mut Vec<u8>,
) -> std::io::Result<usize> {
    let begin = request.len();
    if requests.read_until(b'\n', request).await? == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    let line = str::from_utf8(&request[begin + 1..]).expect("it is a number");
    Ok(line.trim_end().parse().expect("it is a number"))
}

/// Locks one key after the other for a while, all of which must be granted within an attempt. Returns how many.
async fn lock_for(redlock: &Redlock, name: &str, while_: Duration) -> usize {
    let (began, mut granted) = (Instant::now(), 0);
    while began.elapsed() < while_ {
        let asked = Instant::now();
        let guard = redlock.try_lock(format!("{name}-{granted}")).await;
        let guard = guard.unwrap_or_else(|error| panic!("lock {granted}: {error}"));
        let took = asked.elapsed();
        assert!(took < NODE_TIMEOUT + NOISE, "{took:?}");
        guard.release().await.unwrap();
        granted += 1;
        sleep(ms(5)).await;
    }
    granted
}

/// What the errors say of the first node when a second one is missing.
async fn failures(redlock: &Redlock, node: SocketAddr) -> Vec<String> {
    let refused = redlock.try_lock("no quorum").await.unwrap_err();
    let said = patient::failures(&refused).iter().map(ToString::to_string);
    said.filter(|said| said.contains(&node.to_string()))
        .collect()
}

#[tokio::test]
async fn server_that_begins_to_refuse_is_one_failure_while_the_others_give_the_lock() {
    let rights = "NOPERM User locker has no permissions to run the 'evalsha' command";
    let replica = "READONLY You can't write against a read only replica.";
    let stale = "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.";
    let cluster = "CLUSTERDOWN The cluster is down";
    let loading = "LOADING Redis is loading the dataset in memory";
    let login = "NOAUTH Authentication required.";
    let crowd = "ERR max number of clients reached";
    let in_crowd = format!(" gives no votes: {crowd}; raise its maxclients");
    for (fault, expected) in [
        (Fault::RefusesScripts(rights), "; its user needs +evalsha"),
        (Fault::RefusesScripts(replica), &replica[..24]),
        (Fault::RefusesScripts(stale), &stale[..35]),
        (Fault::RefusesScripts(cluster), cluster),
        (Fault::Refuses(loading), &loading[..24]),
        (
            Fault::Refuses(login),
            " gives no votes: the server requires a login (NOAUTH",
        ),
        (Fault::Closes(crowd), &in_crowd),
    ] {
        let mut cluster = Cluster::start(3);
        let (log, _subscribed) = Log::subscribed();
        let (wire, urls) = Wire::before_first(&cluster).await;
        let redlock = builder(urls).build().unwrap();
        until_all_up(&redlock, LONGEST).await;
        wire.fault.send_replace(fault);
        if matches!(fault, Fault::Closes(_)) {
            cluster.servers[0].command(&["CLIENT", "KILL", "TYPE", "normal"]);
        }
        assert!(lock_for(&redlock, "while", secs(1)).await > 20);
        cluster.servers[2].kill();
        let found = failures(&redlock, wire.addr).await;
        println!("{fault:?}: {found:?}");
        assert_eq!(found.len(), 1, "{fault:?}: {found:?}");
        assert!(found[0].contains(expected), "{fault:?}: {found:?}");
        let node = format!("node=\"{}\"", wire.addr);
        let text = log.text();
        let lines = text.lines().filter(|line| line.contains(&node));
        let downs = lines.filter(|line| line.contains("redlock node is down"));
        assert!(downs.count() <= 1, "{text}");
        wire.fault.send_replace(Fault::None);
        cluster.servers[2].restart();
        until_all_up(&redlock, LONGEST).await;
        lock_for(&redlock, "after", ms(100)).await;
        until("used", LONGEST, || async {
            drop(redlock.try_lock("used").await.unwrap());
            cluster.servers[0].exists("redlock:{used}:fence")
        })
        .await;
    }
}

/// Such a server repeats what it was given, and here it replies to no other command of the greeting.
#[tokio::test]
async fn login_that_is_refused_before_the_connection_ends_shows_no_password() {
    let (log, _subscribed) = Log::subscribed();
    let wire = Wire::start(([127, 0, 0, 1], 1).into()).await;
    let said = "ERR unknown command 'AUTH', with args beginning with: 'locker' 'hunter2'";
    wire.fault.send_replace(Fault::Closes(said));
    let url = format!("redis://locker:hunter2@{}/1", wire.addr);
    let redlock = builder([url]).build().unwrap();
    let refused = redlock.try_lock("k").await.unwrap_err().to_string();
    assert!(refused.contains("AUTH was refused (ERR)"), "{refused}");
    let shown = format!("{refused} {:?} {}", redlock.health().await, log.text());
    assert!(!shown.contains("hunter2"), "{shown}");
}

/// Two processes, whose connections to one node are those that are mixed up.
#[tokio::test]
async fn proxy_that_mixes_connections_up_is_a_failure_of_its_node_alone() {
    let cluster = Cluster::start(3);
    let (wire, urls) = Wire::before_first(&cluster).await;
    let redlocks = [(); 2].map(|()| builder(urls.clone()).build().unwrap());
    for redlock in &redlocks {
        until_all_up(redlock, LONGEST).await;
    }
    wire.fault.send_replace(Fault::Mixes);
    let [ours, theirs] = &redlocks;
    let (first, second) = tokio::join!(
        lock_for(ours, "ours", secs(2)),
        lock_for(theirs, "theirs", secs(2)),
    );
    assert!(first > 20 && second > 20);
    for redlock in &redlocks {
        until("down", LONGEST, || async {
            let state = &redlock.health().await.nodes[0].state;
            matches!(state, NodeState::Unreachable { .. })
        })
        .await;
    }
    wire.fault.send_replace(Fault::None);
    for redlock in &redlocks {
        until_all_up(redlock, LONGEST).await;
        lock_for(redlock, "after", ms(100)).await;
    }
}

/// That of the builder.
const NODE_TIMEOUT: Duration = ms(400);
/// What a busy machine may add.
const NOISE: Duration = ms(400);
