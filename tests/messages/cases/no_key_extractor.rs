//! The key of a layer is text that is known at start-up.

use tower_redlock::{Redlock, RedlockLayer};

fn main() {
    let shard = format!("shard-{}", 7);
    let _: RedlockLayer = RedlockLayer::new(Redlock::in_memory(3), shard);
}
