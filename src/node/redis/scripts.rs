//! The Lua scripts, and the commands that load them.

use std::sync::LazyLock;

use deadpool_redis::redis::{Cmd, Pipeline, Script, cmd};

/// A Lua script and its SHA-1 hash, by which commands name it.
pub(super) struct Lua {
    pub(super) code: &'static str,
    pub(super) hash: String,
}

/// Defines the scripts, each by its files, of which it consists in this order.
macro_rules! scripts {
    ($($name:ident: [$($file:literal),+],)+) => {
        /// All scripts.
        pub(super) struct Scripts {
            $(pub(super) $name: Lua,)+
        }

        pub(super) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts {
            $($name: Lua::new(concat!($(include_str!(concat!("scripts/", $file, ".lua"))),+)),)+
        });

        impl Scripts {
            fn all(&self) -> impl Iterator<Item = &Lua> {
                [$(&self.$name),+].into_iter()
            }
        }
    };
}

scripts! {
    acquire: ["acquire"],
    confirm: ["confirm"],
    release: ["notify", "release"],
    acquire_all: ["acquire_all"],
    confirm_all: ["confirm_all"],
    release_all: ["notify", "release_all"],
    acquire_once: ["once", "acquire_once"],
    confirm_once: ["once", "confirm_once"],
    release_once: ["notify", "release_once"],
    record: ["notify", "record"],
    top_up: ["top_up"],
    look: ["once", "look"],
    acquire_batch: ["batch", "acquire_batch"],
    acquire_batch_unfenced: ["acquire_batch_unfenced"],
    confirm_batch: ["batch", "confirm_batch"],
    release_batch: ["release_batch"],
    acquire_shared: ["shared", "acquire_shared"],
    confirm_shared: ["shared", "confirm_shared"],
    release_shared: ["shared", "notify", "release_shared"],
    announce: ["shared", "announce"],
    withdraw: ["withdraw"],
    release_after: ["notify", "release_after"],
    inspect: ["inspect"],
    revoke: ["notify", "revoke"],
    admit: ["admit"],
}

impl Lua {
    fn new(code: &'static str) -> Self {
        Self {
            code,
            hash: Script::new(code).get_hash().to_owned(),
        }
    }
}

/// Returns the pipeline that loads all scripts, so that commands can name them by hash. Also used after a server has
/// forgotten them (`SCRIPT FLUSH`).
pub(super) fn load_all() -> Pipeline {
    let mut pipeline = Pipeline::new();
    for script in SCRIPTS.all() {
        pipeline.cmd("SCRIPT").arg("LOAD").arg(script.code).ignore();
    }
    pipeline
}

/// Returns the command that reads a server's generation, and starts a new one if the server process has none.
pub(super) fn admit(generation_key: &[u8], random: &str, run_id: &str) -> Cmd {
    let mut admit = cmd("EVALSHA");
    admit.arg(&SCRIPTS.admit.hash).arg(1).arg(generation_key);
    admit.arg(random).arg(run_id);
    admit
}
