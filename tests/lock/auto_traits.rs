//! Auto traits of the public lock types, checked by the compiler: they are part of the interface.

use std::error::Error;
use std::fmt::{Debug, Display};
use std::hash::Hash;

use support::secs;
use tower_redlock::{
    AlreadyReleased, BuildError, Drained, ExtendError, FencingToken, Health, KeyError, LockError,
    LockFuture, LockGuard, LockHandle, LockKey, LockKeys, LockRequest, Lost, LostReason,
    NodeFailure, NodeHealth, NodeState, Redlock, RedlockBuilder, RedlockConfig, ReleaseError,
    Released, RestartGuard, Retry, Unconfirmed,
};

const fn is_send<T: Send + 'static>() {}
const fn is_shared<T: Send + Sync + Unpin + Debug + 'static>() {}
const fn is_clone<T: Clone>() {}
const fn is_copy<T: Copy + PartialEq>() {}
const fn is_key<T: Clone + Eq + Hash>() {}
const fn is_error<T: Error + Display + Clone + PartialEq + Send + Sync + 'static>() {}
const fn is_future<T: Future + Send + Unpin + 'static>() {}

fn is_send_future<T: Future + Send>(future: T) -> T {
    future
}

#[test]
fn handles_keys_and_settings_are_send_and_sync() {
    is_shared::<Redlock>();
    is_shared::<RedlockBuilder>();
    is_shared::<RedlockConfig>();
    is_shared::<LockRequest>();
    is_shared::<LockGuard>();
    is_shared::<LockHandle>();
    is_shared::<Lost>();
    is_shared::<FencingToken>();
    is_shared::<LockKey>();
    is_shared::<LockKeys>();
    is_shared::<Health>();
    is_shared::<NodeHealth>();
    is_shared::<NodeState>();
    is_shared::<Drained>();
    is_shared::<Unconfirmed>();
    is_shared::<Released>();
    is_shared::<RestartGuard>();
    is_shared::<Retry>();
}

#[test]
fn handles_keys_and_settings_are_clone() {
    is_clone::<Redlock>();
    is_clone::<RedlockBuilder>();
    is_clone::<RedlockConfig>();
    is_clone::<LockHandle>();
    is_clone::<Health>();
    is_clone::<Drained>();
    is_key::<LockKey>();
    is_key::<LockKeys>();
    is_copy::<FencingToken>();
    is_copy::<LostReason>();
    is_copy::<Released>();
    is_copy::<RestartGuard>();
    is_copy::<Retry>();
}

#[test]
fn lock_errors_can_be_boxed_compared_and_cloned() {
    is_error::<LockError>();
    is_error::<ExtendError>();
    is_error::<ReleaseError>();
    is_error::<BuildError>();
    is_error::<KeyError>();
    is_error::<NodeFailure>();
    is_error::<AlreadyReleased>();
}

#[test]
fn lock_futures_can_be_named_spawned_stored_and_selected_on() {
    is_send::<LockFuture>();
    is_future::<LockFuture>();
    is_future::<Lost>();
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

#[tokio::test(start_paused = true)]
async fn lock_request_is_owned_and_can_be_awaited_in_another_task() {
    let job = {
        let redlock = Redlock::in_memory(3);
        let key = String::from("k");
        tokio::spawn(redlock.lock(&key).into_future())
    };
    assert!(job.await.unwrap().is_ok());
}
