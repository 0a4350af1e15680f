//! An example as a user meets it: started, and tried with the commands that it shows.

use std::net::SocketAddr;

use nix::sys::signal::Signal;
use support::ChildProcess;

use crate::{PATIENCE, has_curl, paste, paste_printed};

/// A server that an example runs.
pub(crate) struct Example {
    process: ChildProcess,
    pub(crate) addr: SocketAddr,
}

impl Example {
    pub(crate) fn start(name: &str, envs: &[(&str, &str)]) -> Self {
        let (process, addr) = ChildProcess::serve(name, envs, "Ctrl-C stops it");
        let address = format!("Listening on http://{addr}");
        assert!(process.stdout().contains(&address), "{}", process.stdout());
        Self { process, addr }
    }

    pub(crate) fn kill(&mut self) {
        self.process.signal(Signal::SIGKILL);
        self.process.wait(PATIENCE);
    }

    pub(crate) fn stdout(&self) -> String {
        self.process.stdout()
    }

    /// Pastes the commands that the example prints, which are those of its header, and compares the
    /// answers with those that the header shows.
    pub(crate) fn answers_as_documented(&self, source: &str) {
        if !has_curl() {
            return;
        }
        let said = self.stdout();
        let printed = said.lines().map(str::trim);
        let printed: Vec<&str> = printed.filter(|line| line.starts_with("curl ")).collect();
        let documented = transcript(source, self.addr);
        let commands: Vec<&str> = documented.iter().map(|(line, _)| line.as_str()).collect();
        assert_eq!(printed, commands);
        assert!(!commands.is_empty());
        for (command, answer) in &documented {
            assert_eq!(masked(&paste_printed(command)), masked(answer), "{command}");
        }
    }

    /// Pastes a command that a page shows, and compares its answer with that of the page.
    pub(crate) fn answers(&self, command: &str, answer: &str) {
        if has_curl() {
            let command = command.replace("127.0.0.1:3000", &self.addr.to_string());
            assert_eq!(masked(&paste(&command)), masked(answer), "{command}");
        }
    }
}

/// The commands in the code blocks of an example's header, each with the lines below it up to the
/// next empty one.
fn transcript(source: &str, addr: SocketAddr) -> Vec<(String, String)> {
    let header = source.lines().map_while(|line| line.strip_prefix("//!"));
    let header: Vec<&str> = header.map(str::trim).collect();
    let blocks = header.split(|line| line.starts_with("```"));
    let blocks = blocks.skip(1).step_by(2);
    let shown = blocks.flat_map(|block| block.split(|line| line.is_empty()));
    let commands = shown.filter_map(|lines| {
        let (command, answer) = lines.split_first()?;
        let answer = answer.iter().map(|line| format!("{line}\n"));
        let command = command.replace("127.0.0.1:3000", &addr.to_string());
        command
            .starts_with("curl ")
            .then(|| (command, answer.collect()))
    });
    commands.collect()
}

/// Fencing tokens are other numbers each time.
fn masked(text: &str) -> String {
    let words = text.lines().flat_map(|line| line.split(' ').chain(["\n"]));
    let is_token = |word: &str| word.len() >= 16 && word.bytes().all(|byte| byte.is_ascii_digit());
    let words = words.map(|word| if is_token(word) { "TOKEN" } else { word });
    words.collect::<Vec<_>>().join(" ")
}
