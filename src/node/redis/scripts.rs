//! The Lua scripts, and the commands that load them.

use std::sync::LazyLock;

use deadpool_redis::redis::{Cmd, Pipeline, Script, cmd};

/// A Lua script and its SHA-1 hash, by which commands name it.
pub(super) struct Lua {
    pub(super) code: &'static str,
    pub(super) hash: String,
}

/// All scripts.
pub(super) struct Scripts {
    pub(super) acquire: Lua,
    pub(super) confirm: Lua,
    pub(super) release: Lua,
    pub(super) acquire_all: Lua,
    pub(super) confirm_all: Lua,
    pub(super) release_all: Lua,
    pub(super) acquire_once: Lua,
    pub(super) confirm_once: Lua,
    pub(super) release_once: Lua,
    pub(super) record: Lua,
    pub(super) top_up: Lua,
    pub(super) look: Lua,
    pub(super) acquire_batch: Lua,
    pub(super) acquire_batch_unfenced: Lua,
    pub(super) confirm_batch: Lua,
    pub(super) release_batch: Lua,
    pub(super) acquire_shared: Lua,
    pub(super) confirm_shared: Lua,
    pub(super) release_shared: Lua,
    pub(super) announce: Lua,
    pub(super) withdraw: Lua,
    pub(super) release_after: Lua,
    pub(super) inspect: Lua,
    pub(super) revoke: Lua,
    pub(super) admit: Lua,
}

pub(super) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts {
    acquire: Lua::new(include_str!("scripts/acquire.lua")),
    confirm: Lua::new(include_str!("scripts/confirm.lua")),
    release: Lua::new(concat!(
        include_str!("scripts/notify.lua"),
        include_str!("scripts/release.lua")
    )),
    acquire_all: Lua::new(include_str!("scripts/acquire_all.lua")),
    confirm_all: Lua::new(include_str!("scripts/confirm_all.lua")),
    release_all: Lua::new(concat!(
        include_str!("scripts/notify.lua"),
        include_str!("scripts/release_all.lua")
    )),
    acquire_once: Lua::new(concat!(
        include_str!("scripts/once.lua"),
        include_str!("scripts/acquire_once.lua")
    )),
    confirm_once: Lua::new(concat!(
        include_str!("scripts/once.lua"),
        include_str!("scripts/confirm_once.lua")
    )),
    release_once: Lua::new(concat!(
        include_str!("scripts/notify.lua"),
        include_str!("scripts/release_once.lua")
    )),
    record: Lua::new(concat!(
        include_str!("scripts/notify.lua"),
        include_str!("scripts/record.lua")
    )),
    top_up: Lua::new(include_str!("scripts/top_up.lua")),
    look: Lua::new(concat!(
        include_str!("scripts/once.lua"),
        include_str!("scripts/look.lua")
    )),
    acquire_batch: Lua::new(concat!(
        include_str!("scripts/batch.lua"),
        include_str!("scripts/acquire_batch.lua")
    )),
    acquire_batch_unfenced: Lua::new(include_str!("scripts/acquire_batch_unfenced.lua")),
    confirm_batch: Lua::new(concat!(
        include_str!("scripts/batch.lua"),
        include_str!("scripts/confirm_batch.lua")
    )),
    release_batch: Lua::new(include_str!("scripts/release_batch.lua")),
    acquire_shared: Lua::new(concat!(
        include_str!("scripts/shared.lua"),
        include_str!("scripts/acquire_shared.lua")
    )),
    confirm_shared: Lua::new(concat!(
        include_str!("scripts/shared.lua"),
        include_str!("scripts/confirm_shared.lua")
    )),
    release_shared: Lua::new(concat!(
        include_str!("scripts/shared.lua"),
        include_str!("scripts/notify.lua"),
        include_str!("scripts/release_shared.lua")
    )),
    announce: Lua::new(concat!(
        include_str!("scripts/shared.lua"),
        include_str!("scripts/announce.lua")
    )),
    withdraw: Lua::new(include_str!("scripts/withdraw.lua")),
    release_after: Lua::new(concat!(
        include_str!("scripts/notify.lua"),
        include_str!("scripts/release_after.lua")
    )),
    inspect: Lua::new(include_str!("scripts/inspect.lua")),
    revoke: Lua::new(concat!(
        include_str!("scripts/notify.lua"),
        include_str!("scripts/revoke.lua")
    )),
    admit: Lua::new(include_str!("scripts/admit.lua")),
});

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
    let scripts = &*SCRIPTS;
    let mut pipeline = Pipeline::new();
    for script in [
        &scripts.acquire,
        &scripts.confirm,
        &scripts.release,
        &scripts.acquire_all,
        &scripts.confirm_all,
        &scripts.release_all,
        &scripts.acquire_once,
        &scripts.confirm_once,
        &scripts.release_once,
        &scripts.record,
        &scripts.top_up,
        &scripts.look,
        &scripts.acquire_batch,
        &scripts.acquire_batch_unfenced,
        &scripts.confirm_batch,
        &scripts.release_batch,
        &scripts.acquire_shared,
        &scripts.confirm_shared,
        &scripts.release_shared,
        &scripts.announce,
        &scripts.withdraw,
        &scripts.release_after,
        &scripts.inspect,
        &scripts.revoke,
        &scripts.admit,
    ] {
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
