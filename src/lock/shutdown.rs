//! Graceful shutdown: a server runs until a signal, and leaves no locks behind.

use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::lock::redlock::Redlock;
use crate::lock::registry::Drained;

impl Redlock {
    /// Runs a server until the signal, and then shuts it down without leaving locks behind.
    ///
    /// The closure makes the server. It gets a future that resolves when the server must stop accepting connections, as
    /// axum's `with_graceful_shutdown` and tonic's `serve_with_shutdown` take it. After the signal, three things happen
    /// within the grace period:
    ///
    /// 1. The server accepts no more connections.
    /// 2. [`drain`](Self::drain) refuses new locks and waits for the holders. A request that waits for a lock gets 503
    ///    `shutting-down`.
    /// 3. The server sends the responses of the requests that it has, and ends.
    ///
    /// A server that has not ended by then is dropped; its requests run on until the program ends if they have tasks of
    /// their own, as those of axum. A lock that is still held is not renewed any more, is never released under its
    /// holder, and ends by its ttl. If the server ends before the signal, as after an error, the locks are drained all
    /// the same.
    ///
    /// Choose a grace period that is longer than the longest request, and shorter than the time after which the
    /// orchestrator kills the process (30 s in Kubernetes). The rest of that time is for the program's own clean-up.
    ///
    #[cfg_attr(feature = "axum", doc = "```no_run")]
    #[cfg_attr(not(feature = "axum"), doc = "```ignore")]
    /// use std::time::Duration;
    /// use axum::Router;
    /// use tokio::net::TcpListener;
    /// use tower_redlock::Redlock;
    ///
    /// async fn serve(app: Router, redlock: Redlock) -> std::io::Result<()> {
    ///     let listener = TcpListener::bind("0.0.0.0:3000").await?;
    ///     let ctrl_c = async { drop(tokio::signal::ctrl_c().await) };
    ///     let grace = Duration::from_secs(20);
    ///     let served = redlock
    ///         .serve_until(ctrl_c, grace, |stopping| {
    ///             axum::serve(listener, app).with_graceful_shutdown(stopping)
    ///         })
    ///         .await;
    ///     if !served.is_clean() {
    ///         eprintln!("not ended: {served:?}");
    ///     }
    ///     served.output.unwrap_or(Ok(()))
    /// }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime with a timer.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the server. After the signal, new locks stay refused.
    pub async fn serve_until<S: IntoFuture>(
        &self,
        signal: impl Future<Output = ()>,
        grace: Duration,
        server: impl FnOnce(Stopping) -> S,
    ) -> Served<S::Output> {
        let (stop, stopping) = oneshot::channel();
        let mut server = pin!(server(Stopping(stopping)).into_future());
        let ended = tokio::select! {
            output = &mut server => Some(output),
            () = signal => None,
        };
        drop(stop);
        let end_of_server = async {
            match ended {
                Some(output) => Some(output),
                None => timeout(grace, server).await.ok(),
            }
        };
        let (output, drained) = tokio::join!(end_of_server, self.drain(grace));
        Served { output, drained }
    }
}

/// Future of [`Redlock::serve_until`] that resolves when the server must stop accepting connections.
///
/// # Cancel safety
///
/// May be dropped at any point; the server then gets no signal.
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Stopping(oneshot::Receiver<()>);

impl Future for Stopping {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(context).map(drop)
    }
}

/// Report of [`Redlock::serve_until`].
#[derive(Debug)]
#[must_use = "it says whether the server has failed, and which locks are left"]
#[non_exhaustive]
pub struct Served<T> {
    /// The result of the server; `None` if it had not ended at the end of the grace period, and was dropped.
    pub output: Option<T>,
    /// The locks that ended while draining, and those that did not.
    pub drained: Drained,
}

impl<T> Served<T> {
    /// Returns whether the server has ended, and no key of this process is left on any node.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.output.is_some() && self.drained.is_clean()
    }
}
