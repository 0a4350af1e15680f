//! Futures that a test leaves unfinished.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use tokio::task::yield_now;
use tokio::time::sleep;

use crate::durations::ms;

/// Polls a future so many times, then gives it back unfinished, or its output if it has finished.
///
/// Between polls the other tasks get a turn, and every few times 10 ms pass. If all delays are multiples of
/// that, the future is left at each moment at which something happens, before, amid and after it.
pub async fn poll_times<F>(future: &mut F, times: usize, rest_after: usize) -> Option<F::Output>
where
    F: Future + Unpin,
{
    for poll in 1..=times {
        let polled = poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context)));
        if let Poll::Ready(output) = polled.await {
            return Some(output);
        }
        if poll % rest_after == 0 {
            sleep(ms(10)).await;
        } else {
            yield_now().await;
        }
    }
    None
}
