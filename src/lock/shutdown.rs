//! Graceful shutdown: a server runs until a signal, and leaves no locks behind.

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
    /// Returns the result of the server, `None` if it was dropped at the end of the grace period, and the locks that were
    /// left.
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
    /// use axum::{Router, serve::ListenerExt};
    /// use tokio::net::TcpListener;
    /// use tower_redlock::Redlock;
    ///
    /// async fn serve(app: Router, redlock: Redlock) -> std::io::Result<()> {
    ///     let listener = TcpListener::bind("0.0.0.0:3000").await?;
    ///     // The end of a response follows the release of its lock, in a packet of its own.
    ///     let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap_or_default());
    ///     let ctrl_c = async { drop(tokio::signal::ctrl_c().await) };
    ///     let grace = Duration::from_secs(20);
    ///     let (output, drained) = redlock
    ///         .serve_until(ctrl_c, grace, |stopping| {
    ///             axum::serve(listener, app).with_graceful_shutdown(stopping)
    ///         })
    ///         .await;
    ///     if output.is_none() || !drained.is_clean() {
    ///         eprintln!("not ended: {drained:?}");
    ///     }
    ///     output.unwrap_or(Ok(()))
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
    ) -> (Option<S::Output>, Drained) {
        let (stop, stopping) = oneshot::channel();
        let mut server = pin!(server(Stopping(stopping)).into_future());
        let ended = tokio::select! {
            output = &mut server => Some(output),
            () = signal => None,
        };
        // Also a server that ignores this is dropped at the end of the grace period.
        drop(stop);
        let end_of_server = async {
            match ended {
                Some(output) => Some(output),
                None => timeout(grace, server).await.ok(),
            }
        };
        // At the same time: the drain waits for the requests that only the server can finish.
        tokio::join!(end_of_server, self.drain(grace))
    }
}

/// Future of [`Redlock::serve_until`] that resolves when the server must stop accepting connections. Not boxed, because
/// axum's `with_graceful_shutdown` with a boxed one cannot be spawned.
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
#[expect(unnameable_types, reason = "closures get it, and pass it on")]
pub struct Stopping(oneshot::Receiver<()>);

impl Future for Stopping {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(context).map(drop)
    }
}
