//! Locks on embedded nodes, as many as told, for `benches/instructions.sh` to count instructions.

use std::env;

use tokio::runtime::Builder;
use tower_redlock::Redlock;

fn main() {
    let args: Vec<String> = env::args().collect();
    let [_, fencing, locks, ..] = args.as_slice() else {
        // `cargo test --benches` only wants to know that it runs.
        return;
    };
    let Ok(locks) = locks.parse::<u32>() else {
        return;
    };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime can be started");
    runtime.block_on(async {
        let builder = Redlock::builder().embedded(NODES);
        let redlock = builder.fencing(fencing == "on").build();
        let redlock = redlock.expect("the settings make sense");
        for _ in 0..locks {
            let guard = redlock.try_lock("instructions").await;
            let released = guard.expect("nobody else wants it").release().await;
            released.expect("embedded nodes always answer");
        }
    });
}

const NODES: usize = 5;
