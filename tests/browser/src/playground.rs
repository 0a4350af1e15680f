//! The example as a child process.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use crate::process::Process;

/// A running playground.
#[derive(Debug)]
pub struct Playground {
    process: Process,
    url: String,
    arguments: Vec<&'static str>,
}

impl Playground {
    pub(crate) fn start(arguments: &[&'static str], listen: &str) -> Self {
        let program = program();
        let mut command = Command::new(&program);
        command.args(arguments).env("LISTEN", listen);
        let started = Process::start(&mut command, "Open http://");
        let (process, line) = started.expect("the playground starts");
        let url = line
            .split_whitespace()
            .find(|word| word.starts_with("http://"));
        let url = url
            .expect("the line has a URL")
            .trim_end_matches('/')
            .to_owned();
        let arguments = arguments.to_vec();
        Self {
            process,
            url,
            arguments,
        }
    }

    /// The page's URL, without a slash at the end.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Ends the playground and starts it again at the same address.
    pub fn restart(&mut self) {
        self.end();
        let listen = self.url.trim_start_matches("http://").to_owned();
        *self = Self::start(&self.arguments, &listen);
    }

    /// Ends the playground under the page.
    pub fn end(&mut self) {
        self.process.end();
    }
}

/// Returns the example, which cargo puts beside the programs that it tests.
fn program() -> PathBuf {
    let this = env::current_exe().expect("a program knows its own path");
    let mut places = this.ancestors().map(|dir| dir.join("examples/playground"));
    let found = places.find(|place| place.is_file());
    found.expect("`cargo build --workspace --all-features --examples` builds the playground")
}
