//! Locks over scripted nodes.

use tower_redlock::test_util::{Gate, OpKind, ScriptedNodes};
use tower_redlock::{Redlock, RedlockBuilder};

/// Returns a `Redlock` over scripted nodes with the default settings.
pub fn redlock(nodes: &ScriptedNodes) -> Redlock {
    let builder = Redlock::builder().scripted(nodes);
    builder.build().expect("the default settings are valid")
}

/// Returns three scripted nodes, and a `Redlock` over them with the default settings.
pub fn three_nodes() -> (ScriptedNodes, Redlock) {
    three_nodes_with(|builder| builder)
}

/// Returns three scripted nodes, and a `Redlock` over them with some settings.
pub fn three_nodes_with(
    set: impl FnOnce(RedlockBuilder) -> RedlockBuilder,
) -> (ScriptedNodes, Redlock) {
    let nodes = ScriptedNodes::new(3);
    let redlock = set(Redlock::builder().scripted(&nodes)).build();
    (nodes, redlock.expect("the settings are valid"))
}

/// Sets the gate of one kind of request on three nodes.
pub fn set_all(nodes: &ScriptedNodes, kind: OpKind, gate: Gate) {
    (0..3).for_each(|node| nodes.set_for(node, kind, gate));
}
