//! A TCP proxy in front of a server that can be slow, silent or broken.

use std::future::pending;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

/// A TCP proxy on a port of its own, whose behaviour can be switched at any time.
///
/// It runs on a thread and a runtime of its own: a test that pauses tokio's clock or blocks its
/// thread changes nothing for the wire.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    wire: watch::Sender<Wire>,
    upstream: watch::Sender<SocketAddr>,
    accepted: Arc<AtomicUsize>,
    /// Dropping it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy that passes everything to `upstream`, which need not listen yet.
    pub async fn start(upstream: SocketAddr) -> Self {
        let (wire, observed) = watch::channel(Wire {
            mode: Mode::Pass,
            cuts: 0,
        });
        let (upstream, leads_to) = watch::channel(upstream);
        let accepted = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&accepted);
        let (stop, stopped) = oneshot::channel();
        let (bound, addr) = oneshot::channel();
        let thread = thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime can be built");
            runtime.block_on(async {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
                    .await
                    .expect("127.0.0.1 has a free port");
                let addr = listener.local_addr().expect("a bound listener has one");
                // A failed send means that the test has ended; `stopped` ends all.
                bound.send(addr).ok();
                tokio::select! {
                    _ = stopped => {}
                    () = accept(&listener, leads_to, observed, &counter) => {}
                }
            });
        });
        Self {
            addr: addr.await.expect("the proxy's thread starts"),
            wire,
            upstream,
            accepted,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Returns the proxy's own address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the URL with which a client reaches the server through the proxy.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// Returns how many connections were accepted so far, in all modes.
    pub fn connections(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Passes everything at once, on new connections and on those that lost nothing.
    pub fn pass(&self) {
        self.switch(Mode::Pass);
    }

    /// Delivers what the server sends `delay` later than it came; requests are not delayed.
    ///
    /// Chunks wait side by side, not one after the other. What is already under way keeps the delay
    /// it was read with, and nothing overtakes it.
    pub fn delay(&self, delay: Duration) {
        self.switch(Mode::Delay(delay));
    }

    /// Passes requests as a wire does that carries so many bytes a second on each connection; answers
    /// are not delayed.
    pub fn narrow(&self, bytes_per_second: u32) {
        self.switch(Mode::Narrow(bytes_per_second));
    }

    /// Swallows everything in both directions and closes nothing.
    ///
    /// A connection that was opened meanwhile, or from which something was swallowed (the end of
    /// the stream included), stays silent for ever; the others work again after [`Proxy::pass`].
    pub fn black_hole(&self) {
        self.switch(Mode::BlackHole);
    }

    /// Closes all connections, and new ones as soon as they are accepted, until [`Proxy::pass`].
    pub fn cut(&self) {
        self.switch(Mode::Cut);
    }

    /// Leads new connections to another server, as a name does whose address was changed; those that
    /// stand go on.
    pub fn lead_to(&self, upstream: SocketAddr) {
        self.upstream.send_replace(upstream);
    }

    fn switch(&self, mode: Mode) {
        self.wire.send_modify(|wire| {
            wire.mode = mode;
            wire.cuts += u64::from(mode == Mode::Cut);
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Pass,
    Delay(Duration),
    Narrow(u32),
    BlackHole,
    Cut,
}

#[derive(Debug, Clone, Copy)]
struct Wire {
    mode: Mode,
    /// Counted, so that a connection also notices a cut that is already over when it looks.
    cuts: u64,
}

/// One connection's view of the wire.
struct Line {
    wire: watch::Receiver<Wire>,
    dead: AtomicBool,
}

impl Line {
    fn new(wire: watch::Receiver<Wire>, at_accept: Wire) -> Self {
        Self {
            wire,
            dead: AtomicBool::new(at_accept.mode == Mode::BlackHole),
        }
    }

    /// Returns whether what is in hand now is lost; if it is, so is all that follows.
    fn swallows(&self) -> bool {
        // Of a wire that is cut, a connection may read one more piece before it is closed.
        if matches!(self.wire.borrow().mode, Mode::BlackHole | Mode::Cut) {
            self.dead.store(true, Ordering::Relaxed);
        }
        self.is_dead()
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    fn delay(&self) -> Duration {
        match self.wire.borrow().mode {
            Mode::Delay(delay) => delay,
            Mode::Pass | Mode::Narrow(_) | Mode::BlackHole | Mode::Cut => Duration::ZERO,
        }
    }

    /// Returns how long a request of so many bytes is on the wire.
    fn transit(&self, length: usize) -> Duration {
        match self.wire.borrow().mode {
            Mode::Narrow(bytes_per_second) => {
                let length = u32::try_from(length).expect("chunks are small");
                Duration::from_secs(1) * length / bytes_per_second
            }
            Mode::Pass | Mode::Delay(_) | Mode::BlackHole | Mode::Cut => Duration::ZERO,
        }
    }
}

/// A piece of what the server sent; an empty one is the end of its stream.
struct Chunk {
    due: Instant,
    bytes: Bytes,
}

async fn accept(
    listener: &TcpListener,
    upstream: watch::Receiver<SocketAddr>,
    wire: watch::Receiver<Wire>,
    accepted: &AtomicUsize,
) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                accepted.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(carry(client, *upstream.borrow(), wire.clone()));
            }
            // Out of file descriptors, most likely: others close theirs soon.
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

/// Carries one connection until either side closes it or the wire is cut.
async fn carry(client: TcpStream, upstream: SocketAddr, mut wire: watch::Receiver<Wire>) {
    let at_accept = *wire.borrow();
    if at_accept.mode == Mode::Cut {
        return;
    }
    let line = Line::new(wire.clone(), at_accept);
    let cut = async {
        wire.wait_for(|now| now.cuts != at_accept.cuts)
            .await
            .is_ok()
    };
    tokio::select! {
        _ = cut => {}
        () = relay(client, upstream, &line) => {}
    }
}

async fn relay(mut client: TcpStream, upstream: SocketAddr, line: &Line) {
    if line.is_dead() {
        // The server never hears of it. An error ends it like the client's close.
        tokio::io::copy(&mut client, &mut tokio::io::sink())
            .await
            .ok();
        return;
    }
    let Ok(Ok(server)) = tokio::time::timeout(CONNECT, TcpStream::connect(upstream)).await else {
        return;
    };
    client.set_nodelay(true).ok();
    server.set_nodelay(true).ok();
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();

    let requests = pass_requests(from_client, to_server, line);
    let answers = pass_answers(from_server, to_client, line);
    tokio::pin!(requests, answers);
    tokio::select! {
        () = &mut answers => {}
        () = &mut requests => if !line.is_dead() {
            answers.await;
        }
    }
}

/// Passes what the client sends until it closes.
async fn pass_requests(mut client: OwnedReadHalf, mut server: OwnedWriteHalf, line: &Line) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = client.read(&mut buffer).await.unwrap_or(0);
        let transit = line.transit(length);
        if !transit.is_zero() {
            tokio::time::sleep(transit).await;
        }
        let lost = line.swallows();
        if length == 0 {
            // Dropping the half closes it for the server, unless `relay` ends as a whole.
            return;
        }
        if !lost && server.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

/// Passes what the server sends, each chunk when it is due, until the server closes.
async fn pass_answers(server: OwnedReadHalf, client: OwnedWriteHalf, line: &Line) {
    let (queue, due) = mpsc::channel(QUEUE);
    tokio::select! {
        () = read_answers(server, &queue, line) => {}
        () = deliver_answers(due, client, line) => {}
    }
}

/// Queues what the server sends; never ends, because the queue's end is for the other side to see.
async fn read_answers(mut server: OwnedReadHalf, queue: &mpsc::Sender<Chunk>, line: &Line) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = server.read(&mut buffer).await.unwrap_or(0);
        if !line.swallows() {
            let chunk = Chunk {
                due: Instant::now() + line.delay(),
                bytes: Bytes::copy_from_slice(&buffer[..length]),
            };
            // Refused only when the client's side has ended, and this future with it.
            queue.send(chunk).await.ok();
        }
        if length == 0 {
            return pending().await;
        }
    }
}

async fn deliver_answers(
    mut queue: mpsc::Receiver<Chunk>,
    mut client: OwnedWriteHalf,
    line: &Line,
) {
    while let Some(chunk) = queue.recv().await {
        // Without the comparison, tokio would round even a past instant up to the next millisecond.
        if chunk.due > Instant::now() {
            tokio::time::sleep_until(chunk.due).await;
        }
        if line.swallows() {
            continue;
        }
        if chunk.bytes.is_empty() || client.write_all(&chunk.bytes).await.is_err() {
            return;
        }
    }
}

const CONNECT: Duration = Duration::from_secs(5);
const CHUNK: usize = 16 * 1024;

/// How many chunks may be under way per connection before the proxy stops reading.
const QUEUE: usize = 1024;
