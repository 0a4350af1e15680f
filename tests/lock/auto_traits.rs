//! Auto traits of the public lock types, checked by the compiler: they are part of the interface.

use support::secs;
use tower_redlock::Redlock;

fn is_send_future<T: Future + Send>(future: T) -> T {
    future
}

#[tokio::test(start_paused = true)]
async fn futures_of_all_lock_operations_are_send() {
    let redlock = Redlock::in_memory(3);
    let guard = is_send_future(redlock.lock("k").into_future())
        .await
        .unwrap();
    let handle = guard.handle();
    let ttl = secs(5);
    is_send_future(guard.extend(ttl)).await.unwrap();
    is_send_future(handle.extend(ttl)).await.unwrap();
    is_send_future(guard.release()).await.unwrap();
    is_send_future(redlock.health()).await;
    is_send_future(redlock.drain(ttl)).await;
    let serving = redlock.serve_until(async {}, ttl, |stopping| stopping);
    let _served = is_send_future(serving).await;
}
