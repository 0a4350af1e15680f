//! Tests of the reference node.

use super::*;
use crate::protocol::{LockKey, LockKeys, Namespace};

const TTL: Duration = Duration::from_secs(10);
const RETENTION: Duration = Duration::from_secs(3_600);
const NOW: Duration = Duration::from_secs(1);

struct Client {
    names: Arc<[KeyNames]>,
    owner: OwnerToken,
}

fn client(id: u8, keys: &[&str]) -> Client {
    let keys: LockKeys = keys.iter().map(|key| LockKey::from(*key)).collect();
    let names = Namespace::default().names(&keys, |_| [0; 32]).unwrap();
    Client {
        names,
        owner: OwnerToken::from_random([id; 16]),
    }
}

impl Client {
    fn command(&self, op: Op) -> Command {
        Command {
            names: Arc::clone(&self.names),
            owner: self.owner.clone(),
            op,
        }
    }

    fn acquire(&self, store: &mut Store, proposal: u64, now: Duration) -> Reply {
        let op = Op::Acquire {
            proposal: Some(proposal),
            ttl: TTL,
            retention: RETENTION,
        };
        store.apply(&self.command(op), now)
    }

    fn confirm(&self, store: &mut Store, token: u64, ttl: Duration, now: Duration) -> Reply {
        let op = Op::Confirm {
            token: Some(token),
            ttl,
            retention: RETENTION,
        };
        store.apply(&self.command(op), now)
    }
}

// Rules: node.fence
#[test]
fn acquire_raises_the_fence_for_a_new_grant_and_not_for_a_repeated_one() {
    let mut store = Store::new();
    let (a, b) = (client(1, &["k"]), client(2, &["k"]));
    assert_eq!(a.acquire(&mut store, 5, NOW), Reply::Granted(5));
    assert_eq!(a.acquire(&mut store, 9, NOW), Reply::Granted(5));
    let held = Reply::Held {
        expires_in: Some(TTL),
        shown: None,
    };
    assert_eq!(b.acquire(&mut store, 9, NOW), held);
    store.apply(&a.command(Op::Release), NOW);
    assert_eq!(b.acquire(&mut store, 3, NOW), Reply::Granted(6));
}

// Rules: node.confirm
#[test]
fn confirm_returns_the_fence_after_the_write() {
    let mut store = Store::new();
    let a = client(1, &["k"]);
    a.acquire(&mut store, 5, NOW);
    assert_eq!(a.confirm(&mut store, 8, TTL, NOW), Reply::At(8));
    assert_eq!(a.confirm(&mut store, 7, TTL, NOW), Reply::At(8));
    assert_eq!(a.confirm(&mut store, 8, TTL, NOW + TTL), Reply::Lost);
}

// Rules: node.never_shorter
#[test]
fn confirm_never_shortens_a_lock() {
    let mut store = Store::new();
    let (a, b) = (client(1, &["k"]), client(2, &["k"]));
    a.acquire(&mut store, 5, NOW);
    a.confirm(&mut store, 5, TTL / 10, NOW);
    let held = Reply::Held {
        expires_in: Some(TTL - TTL / 2),
        shown: None,
    };
    assert_eq!(b.acquire(&mut store, 6, NOW + TTL / 2), held);
}

// Rules: node.set
#[test]
fn acquire_of_a_set_raises_the_fences_of_all_its_keys() {
    let mut store = Store::new();
    let (both, x) = (client(1, &["x", "y"]), client(2, &["x"]));
    assert_eq!(both.acquire(&mut store, 1, NOW), Reply::Granted(1));
    store.apply(&client(1, &["y"]).command(Op::Release), NOW);
    // The retry finds y free, so the whole set gets a new number, including x's fence.
    assert_eq!(both.acquire(&mut store, 1, NOW), Reply::Granted(2));
    store.apply(&both.command(Op::Release), NOW);
    assert_eq!(x.acquire(&mut store, 1, NOW), Reply::Granted(3));
}

// Rules: node.set
#[test]
fn acquire_of_a_set_is_granted_all_or_nothing() {
    let mut store = Store::new();
    let (y, both) = (client(1, &["y"]), client(2, &["x", "y"]));
    y.acquire(&mut store, 1, NOW);
    assert!(matches!(
        both.acquire(&mut store, 1, NOW),
        Reply::Held { .. }
    ));
    assert_eq!(store.held(NOW), 1);
}

// Rules: node.digits
#[test]
fn acquire_overflows_below_the_range_of_json() {
    let mut store = Store::new();
    let (a, max) = (client(1, &["k"]), FencingToken::MAX.as_u64());
    assert_eq!(a.acquire(&mut store, max, NOW), Reply::Granted(max));
    store.apply(&a.command(Op::Release), NOW);
    assert_eq!(a.acquire(&mut store, 1, NOW), Reply::Overflow);
}

#[test]
fn generation_ends_with_the_memory_and_with_the_process() {
    let (mut store, random) = (Store::new(), |id| OwnerToken::from_random([id; 16]));
    let first = store.admit(&random(1), "a", NOW);
    assert_eq!(store.admit(&random(2), "a", NOW + TTL), first);
    assert_eq!(first.age(NOW + TTL), TTL);
    // The same data in another process, as after a restart with persistence.
    let second = store.admit(&random(3), "b", NOW);
    assert_ne!(second, first);
    assert_ne!(Store::new().admit(&random(4), "b", NOW), second);
}

// Rules: node.memory
#[test]
fn store_with_a_new_generation_refuses_votes_and_still_releases() {
    let (mut store, a) = (Store::new(), client(1, &["k"]));
    let generation = store.admit(&OwnerToken::from_random([1; 16]), "run", NOW);
    let acquire = a.command(Op::Acquire {
        proposal: Some(5),
        ttl: TTL,
        retention: RETENTION,
    });
    let granted = store.apply_in(&generation, &acquire, NOW);
    assert_eq!(granted, Reply::Granted(5));
    store = Store::new();
    store.admit(&OwnerToken::from_random([2; 16]), "run", NOW);
    assert_eq!(store.apply_in(&generation, &acquire, NOW), Reply::Amnesia);
    let release = a.command(Op::Release);
    assert_eq!(store.apply_in(&generation, &release, NOW), Reply::Lost);
}

#[test]
fn sweep_frees_the_memory_of_expired_keys() {
    let mut store = Store::new();
    for i in 0..1_000_u64 {
        let now = NOW + RETENTION * u32::try_from(i).unwrap();
        client(1, &[&i.to_string()]).acquire(&mut store, 1, now);
    }
    assert!(store.entries() < 200);
}
