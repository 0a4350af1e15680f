//! The way from one server of the bank to one node: a TCP proxy that delays or cuts it.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use crate::board::{Board, Reach};
use crate::events::lock;
use crate::monitor::Seen;

/// A proxy, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    task: AbortHandle,
}

#[derive(Debug, Clone)]
struct Route {
    server: usize,
    node: usize,
    upstream: SocketAddr,
    board: Arc<Board>,
    seen: Arc<Mutex<Seen>>,
}

impl Proxy {
    pub(crate) async fn start(
        server: usize,
        node: usize,
        upstream: SocketAddr,
        board: &Arc<Board>,
        seen: &Arc<Mutex<Seen>>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let route = Route {
            server,
            node,
            upstream,
            board: Arc::clone(board),
            seen: Arc::clone(seen),
        };
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                // Forgets the connections that have ended.
                while connections.try_join_next().is_some() {}
                match listener.accept().await {
                    Ok((client, _)) => drop(connections.spawn(route.clone().serve(client))),
                    Err(_) => sleep(PROBE).await,
                }
            }
        });
        Ok(Self {
            address,
            task: task.abort_handle(),
        })
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Route {
    async fn serve(self, client: TcpStream) -> io::Result<()> {
        if self.is_cut() {
            return Ok(());
        }
        let upstream = TcpStream::connect(self.upstream).await?;
        client.set_nodelay(true)?;
        upstream.set_nodelay(true)?;
        // Before the first byte passes, so that the monitor knows whose commands it sees.
        lock(&self.seen).connected(self.node, upstream.local_addr()?.port(), self.server);
        let (from_client, to_client) = client.into_split();
        let (from_node, to_node) = upstream.into_split();
        let delay = || self.board.delay(self.node);
        tokio::select! {
            copied = copy(from_client, to_node, delay) => copied,
            copied = copy(from_node, to_client, || Duration::ZERO) => copied,
            () = self.cut() => Ok(()),
        }
    }

    async fn cut(&self) {
        while !self.is_cut() {
            sleep(PROBE).await;
        }
    }

    fn is_cut(&self) -> bool {
        matches!(self.board.reach(self.node, self.server), Reach::Broken(_))
    }
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    delay: impl Fn() -> Duration,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1_024];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        let delay = delay();
        if !delay.is_zero() {
            sleep(delay).await;
        }
        to.write_all(&buffer[..length]).await?;
    }
}

const PROBE: Duration = Duration::from_millis(20);
