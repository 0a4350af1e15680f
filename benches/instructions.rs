//! Takes a given number of locks on embedded nodes, for `benches/instructions.sh` to count instructions.

use std::env;

use tokio::runtime::Builder;
use tower_redlock::{NodeGroup, Redlock};

fn main() {
    let args: Vec<String> = env::args().collect();
    let [_, fencing, groups, locks, ..] = args.as_slice() else {
        // `cargo test -p benches --benches` only starts it.
        return;
    };
    let (Ok(groups), Ok(locks)) = (groups.parse::<usize>(), locks.parse::<u32>()) else {
        return;
    };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("the runtime starts");
    runtime.block_on(async {
        let builder = (0..groups).fold(Redlock::builder(), |builder, _| {
            builder.node_group(NodeGroup::new().embedded(NODES))
        });
        let redlock = builder.fencing(fencing == "on").build();
        let redlock = redlock.expect("the settings are valid");
        for _ in 0..locks {
            let guard = redlock.try_lock("instructions").await;
            let released = guard.expect("the lock is free").release().await;
            released.expect("embedded nodes always answer");
        }
    });
}

/// The nodes of each group.
const NODES: usize = 5;
