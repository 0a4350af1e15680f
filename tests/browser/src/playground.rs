//! The example as a child process.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::Process;

/// A running playground.
#[derive(Debug)]
pub(crate) struct Playground {
    process: Process,
    url: String,
}

impl Playground {
    pub(crate) fn start(arguments: &[&str], listen: &str) -> Self {
        let program = program();
        let mut command = Command::new(&program);
        command.args(arguments).env("LISTEN", listen);
        let started = Process::start(&mut command, "Open http://");
        let (process, line) = started.unwrap_or_else(|| {
            panic!(
                "{} is missing: run `cargo build --all-features --example playground` first",
                program.display()
            )
        });
        let url = line
            .split_whitespace()
            .find(|word| word.starts_with("http://"));
        let url = url
            .expect("the line has a URL")
            .trim_end_matches('/')
            .to_owned();
        Self { process, url }
    }

    /// The page's URL, without a slash at the end.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Ends the playground and starts it again at the same address.
    pub(crate) fn restart(&mut self, arguments: &[&str]) {
        self.process.end();
        let listen = self.url.trim_start_matches("http://").to_owned();
        *self = Self::start(arguments, &listen);
    }

    pub(crate) fn end(&mut self) {
        self.process.end();
    }
}

/// `TOWER_REDLOCK_PLAYGROUND`, or where cargo puts the example of the root package.
fn program() -> PathBuf {
    env::var_os("TOWER_REDLOCK_PLAYGROUND").map_or_else(
        || {
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
            let root = root.expect("the package lies in tests/browser");
            root.join("target/debug/examples/playground")
        },
        PathBuf::from,
    )
}
