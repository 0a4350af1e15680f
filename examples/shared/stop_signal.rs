//! The signal that stops a server: Ctrl-C or SIGTERM.

use std::io;

/// Resolves at the first Ctrl-C or SIGTERM after the call, also if it came before the first poll.
#[cfg(unix)]
pub(crate) fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};

    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// Resolves at the first Ctrl-C after the call, also if it came before the first poll.
#[cfg(windows)]
pub(crate) fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let mut ctrl_c = tokio::signal::windows::ctrl_c()?;
    Ok(async move {
        ctrl_c.recv().await;
    })
}
