//! A function returns something else than a key.

use tower_redlock::{Redlock, RedlockLayer, key};

fn main() {
    let weight = key::from_fn(|_| 1.5);
    let _: RedlockLayer = RedlockLayer::new(Redlock::in_memory(3), weight);
}
