//! Locks over scripted nodes.

use tower_redlock::Redlock;
use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};

/// Returns a `Redlock` over scripted nodes with the default settings.
pub fn redlock(nodes: &ScriptedNodes) -> Redlock {
    let builder = Redlock::builder().scripted(nodes);
    builder.build().expect("the default settings are valid")
}

/// Sets the gate of one kind of request on three nodes.
pub fn set_all(nodes: &ScriptedNodes, kind: OpKind, gate: Gate) {
    (0..3).for_each(|node| nodes.set_for(node, kind, gate));
}
