//! A refusal is no status.

use tower_redlock::{Redlock, RedlockLayer};

fn main() {
    let layer = RedlockLayer::new(Redlock::in_memory(3), "everything");
    let _: RedlockLayer = layer.rejection(409);
}
