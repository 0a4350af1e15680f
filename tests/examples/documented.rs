//! An example as a user meets it: started, and tried with the commands that it shows.

use std::fs;
use std::net::SocketAddr;

use nix::sys::signal::Signal;
use support::{ChildProcess, example_path};

use crate::{PATIENCE, has_curl, paste_printed};

/// A server that an example runs.
pub(crate) struct Example {
    pub(crate) process: ChildProcess,
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

    /// Pastes the commands that the example prints, which are those of its header, and compares the
    /// answers with those that the header shows.
    fn answers_as_documented(&self, source: &str) {
        let said = self.process.stdout();
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
}

/// The examples that are servers.
const SERVERS: [&str; 10] = [
    "database/exactly_once_sql",
    "database/fenced_writes",
    "graceful_shutdown",
    "hyper_server",
    "idempotent_payments",
    "metrics/metrics",
    "openapi/openapi",
    "reverse_proxy",
    "transfer",
    "websocket",
];

#[test]
fn the_curl_lines_of_servers_answer_as_documented() {
    if !has_curl() {
        return;
    }
    for path in SERVERS {
        println!("the curl lines of {path}:");
        let name = path.rsplit('/').next().unwrap();
        Example::start(name, &[]).answers_as_documented(&source(path));
    }
}

#[test]
fn programs_print_the_lines_of_their_headers() {
    for (name, args) in [
        ("lock_without_http", &["report"][..]),
        ("paying_client", &[]),
        ("queue_consumer", &[]),
        ("synchronous_service", &["alice=5", "bob=1", "alice=7"]),
    ] {
        let shown = lines_behind("cargo run", &source(name)).join("\n");
        assert_eq!(masked(&printed(name, args, "")), masked(&shown), "{name}");
    }
}

/// Returns the source of an example, by its path below their folder.
fn source(path: &str) -> String {
    let file = format!("{}/../examples/{path}.rs", env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Returns what an example prints, which succeeds.
pub(crate) fn printed(name: &str, args: &[&str], listen: &str) -> String {
    let process = ChildProcess::start(example_path(name), args, &[("LISTEN", listen)]);
    output(process)
}

/// Returns what a process prints, which succeeds.
pub(crate) fn output(mut process: ChildProcess) -> String {
    let status = process.wait(PATIENCE);
    assert!(status.success(), "{}", process.stderr());
    process.stdout()
}

/// The lines of a block of code in an example's header, behind the one that begins so.
pub(crate) fn lines_behind<'a>(beginning: &str, source: &'a str) -> Vec<&'a str> {
    let header = source.lines().filter_map(|line| line.strip_prefix("//! "));
    let behind = header
        .skip_while(|line| !line.starts_with(beginning))
        .skip(1);
    behind.take_while(|line| *line != "```").collect()
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

/// Fencing tokens and latencies are other numbers each time.
fn masked(text: &str) -> String {
    let is_digit = u8::is_ascii_digit;
    let runs = text
        .as_bytes()
        .chunk_by(|one, next| is_digit(one) == is_digit(next));
    runs.fold(String::new(), |masked, run| {
        let varies = run.len() >= 16 || masked.ends_with("\"latency_us\":");
        let run = str::from_utf8(run).expect("digits are whole characters");
        masked
            + if is_digit(&run.as_bytes()[0]) && varies {
                "NUMBER"
            } else {
                run
            }
    })
}
