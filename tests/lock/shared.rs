//! Locks that readers share, with embedded nodes on a paused clock.

use std::future::IntoFuture;
use std::time::Duration;

use support::{ms, secs, set_all};
use tokio::time::{Instant, sleep};
use tower_redlock::Retry;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

use crate::common::{builder, held_for, is_contended, polling, processes};

#[tokio::test(start_paused = true)]
async fn readers_of_one_and_of_several_processes_share_a_key() {
    let (_nodes, [one, other]) = processes();
    let first = one.try_lock("k").shared().await.unwrap();
    let second = one.try_lock("k").shared().await.unwrap();
    let third = other.try_lock("k").shared().await.unwrap();
    for guard in [&first, &second, &third] {
        assert!(guard.is_valid());
        assert_eq!(guard.fencing_token(), None);
    }
    for redlock in [&one, &other] {
        assert!(is_contended(&redlock.try_lock("k").await));
    }
    for guard in [first, second, third] {
        assert!(other.try_lock("k").await.is_err());
        guard.release().await.unwrap();
    }
    let alone = one.try_lock("k").await.unwrap();
    assert!(alone.fencing_token().is_some());
    for redlock in [&one, &other] {
        assert!(redlock.try_lock("k").shared().await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn readers_are_renewed_and_end_when_they_are_dropped() {
    let (nodes, [one, other]) = processes();
    let reader = one.try_lock("k").shared().await.unwrap();
    sleep(secs(45)).await;
    assert!(reader.is_valid());
    assert!(other.try_lock("k").await.is_err());
    drop(reader);
    let waited = Instant::now();
    drop(other.lock("k").wait(secs(5)).await.unwrap());
    assert!(waited.elapsed() < ms(50), "{:?}", waited.elapsed());
    sleep(ms(20)).await;
    assert_eq!(nodes.locks(), [0; 3]);
}

/// Not only where the writer waits, but at every process that asks the nodes.
#[tokio::test(start_paused = true)]
async fn writer_that_waits_keeps_new_readers_out_and_is_next() {
    let (_nodes, [readers, writers, others]) = processes();
    let reader = readers.try_lock("k").shared().await.unwrap();
    let writer = tokio::spawn(writers.lock("k").wait(secs(60)).into_future());
    sleep(ms(20)).await;
    for redlock in [&others, &readers] {
        assert!(is_contended(&redlock.try_lock("k").shared().await));
    }
    assert!(reader.is_valid());
    let left = Instant::now();
    drop(reader);
    let writer = writer.await.unwrap().unwrap();
    assert!(left.elapsed() < ms(50), "{:?}", left.elapsed());
    drop(writer);
    // It does not wait any more, so readers may come.
    sleep(ms(20)).await;
    assert!(others.try_lock("k").shared().await.is_ok());
}

/// Its announcement outlives the way of its next request to nodes that are slow.
#[tokio::test(start_paused = true)]
async fn writer_keeps_new_readers_out_while_it_asks_again() {
    let nodes = ScriptedNodes::new(3);
    let patient = || builder(&nodes).node_timeout(ms(200)).build().unwrap();
    let [readers, writers, others] = [(), (), ()].map(|()| patient());
    let reader = readers.try_lock("k").shared().await.unwrap();
    (0..3).for_each(|node| nodes.set(node, Gate::Slow(ms(50))));
    let writer = tokio::spawn(writers.lock("k").wait(secs(60)).into_future());
    sleep(ms(200)).await;
    let before = nodes.sent(0, OpKind::Announce);
    let mut asking = Vec::new();
    for _ in 0..1_000 {
        asking.push(tokio::spawn(others.try_lock("k").shared().into_future()));
        sleep(ms(3)).await;
    }
    assert!(nodes.sent(0, OpKind::Announce) > before + 3);
    for reader in asking {
        assert!(is_contended(&reader.await.unwrap()));
    }
    drop(reader);
    drop(writer.await.unwrap().unwrap());
}

/// Of several readers, the last one counts, whichever came first and wherever the writer asks.
#[tokio::test(start_paused = true)]
async fn refusal_of_a_writer_says_when_the_last_reader_ends() {
    for ttls in [[5, 10], [10, 5]] {
        let (_nodes, [one, other]) = processes();
        let mut readers = Vec::new();
        for ttl in ttls {
            readers.push(one.lock("k").shared().ttl(secs(ttl)).await.unwrap());
        }
        let ends = async |expected| {
            for (redlock, wait) in [(&one, 0), (&other, 0), (&one, 20), (&other, 20)] {
                let left = held_for(redlock.lock("k").wait(ms(wait))).await;
                let expected = expected - ms(300)..=expected;
                assert!(expected.contains(&left), "{ttls:?}: {left:?}");
            }
        };
        ends(secs(10)).await;
        let long = readers.remove(usize::from(ttls[1] == 10));
        long.release().await.unwrap();
        ends(secs(5)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn writer_that_gives_up_lets_readers_in_again() {
    let (_nodes, [readers, writers]) = processes();
    let reader = readers.try_lock("k").shared().await.unwrap();
    assert!(is_contended(&writers.lock("k").wait(ms(300)).await));
    sleep(ms(20)).await;
    assert!(readers.try_lock("k").shared().await.is_ok());
    let waiting = tokio::spawn(writers.lock("k").wait(secs(60)).into_future());
    sleep(ms(20)).await;
    assert!(readers.try_lock("k").shared().await.is_err());
    waiting.abort();
    sleep(ms(20)).await;
    assert!(readers.try_lock("k").shared().await.is_ok());
    drop(reader);
}

#[tokio::test(start_paused = true)]
async fn exclusive_locks_announce_nothing_without_readers() {
    let (nodes, [one, other]) = processes();
    let guard = one.try_lock("k").await.unwrap();
    let waiting = tokio::spawn(other.lock("k").wait(secs(60)).into_future());
    sleep(secs(5)).await;
    drop(guard);
    drop(waiting.await.unwrap().unwrap());
    let sent = [OpKind::Announce, OpKind::Withdraw].map(|kind| nodes.sent(0, kind));
    assert_eq!(sent, [0, 0]);
}

/// Each of them waits at the nodes, and one message is for all.
#[tokio::test(start_paused = true)]
async fn readers_of_one_process_are_all_woken_by_a_release() {
    let nodes = ScriptedNodes::new(3);
    let [readers, writers] = polling(&nodes, secs(8));
    for _ in 0..5 {
        let writer = writers.try_lock("k").await.unwrap();
        let waiting: Vec<_> = (0..5)
            .map(|number| {
                // One of them gives up, and must not end the subscription of the others.
                let wait = if number == 2 { ms(300) } else { secs(60) };
                tokio::spawn(readers.lock("k").shared().wait(wait).into_future())
            })
            .collect();
        sleep(secs(1)).await;
        writer.release().await.unwrap();
        let released = Instant::now();
        let mut guards = Vec::new();
        for waiting in waiting {
            guards.extend(waiting.await.unwrap());
        }
        assert_eq!(guards.len(), 4);
        assert!(released.elapsed() < ms(100), "{:?}", released.elapsed());
        drop(guards);
        sleep(ms(50)).await;
    }
}

/// Although the next poll of the writer would come after a minute, when the reader ends: without a limit, because the
/// time of a poll is drawn from zero up to it, and the writer keeps readers out until its next poll.
#[tokio::test(start_paused = true)]
async fn writer_that_died_keeps_new_readers_out_for_no_longer_than_its_ttl() {
    let nodes = ScriptedNodes::new(3);
    let rarely = || {
        builder(&nodes)
            .max_ttl(secs(60))
            .retry(Retry::default().poll_interval(Duration::MAX))
    };
    let [readers, writers, others] = [(), (), ()].map(|()| rarely().build().unwrap());
    let reader = readers.try_lock("k").shared().ttl(secs(60)).await.unwrap();
    let writer = tokio::spawn(writers.lock("k").wait(secs(600)).into_future());
    sleep(ms(20)).await;
    set_all(&nodes, OpKind::Withdraw, Gate::Never);
    writer.abort();
    sleep(secs(1)).await;
    assert!(others.try_lock("k").shared().await.is_err());
    sleep(secs(10)).await;
    assert!(others.try_lock("k").shared().await.is_ok());
    assert!(reader.is_valid());
}
