//! `playground` without its page: the commands, the tour, and what is left of its servers.

use std::env;
use std::fs;
use std::net::{SocketAddr, TcpStream};

use nix::sys::signal::Signal;
use serde_json::Value;
use support::http::request;
use support::{Answer, ChildProcess, example_path, free_port, until, wait_until};

use crate::PATIENCE;

struct Playground {
    process: ChildProcess,
    addr: SocketAddr,
}

impl Playground {
    fn start(args: &[&str]) -> Self {
        let listen = format!("127.0.0.1:{}", free_port());
        let envs = [("LISTEN", listen.as_str())];
        let process = ChildProcess::start(example_path("playground"), args, &envs);
        let line = format!("Open http://{listen} in a browser; Ctrl-C ends it.");
        process.wait_for_line(&line, PATIENCE);
        let addr = listen.parse().unwrap();
        Self { process, addr }
    }

    async fn get(&self, path: &str) -> Answer {
        request(self.addr, "GET", path, &[], b"").await
    }

    async fn obey(&self, command: &str) {
        let headers = [("content-type", "application/json")];
        let answer = request(self.addr, "POST", "/commands", &headers, command.as_bytes());
        assert_eq!(answer.await.status, 204, "{command}");
    }

    async fn state(&self) -> Value {
        self.get("/state").await.json()
    }

    /// Takes a step of the tour, and returns the state at its end.
    async fn step(&self, step: usize) -> Value {
        let command = format!(r#"{{"do":"tour","step":{step}}}"#);
        self.obey(&command).await;
        let ended = async || self.state().await["tour"]["running"] == false;
        until("at its end", 3 * PATIENCE, ended).await;
        let state = self.state().await;
        let mut results = state["tour"]["results"].as_array().unwrap().iter();
        let is_ok = results.any(|result| result["step"] == step && result["ok"] == true);
        assert!(is_ok, "{state}");
        state
    }
}

#[tokio::test]
async fn playground_steps_show_a_refused_write_a_released_lock_and_a_replay() {
    let playground = Playground::start(&[]);
    let steps = playground.get("/tour").await.json();
    assert_eq!(steps.as_array().map(Vec::len), Some(8));
    assert!(playground.get("/").await.text().contains("<title>"));

    for (step, counter) in [(5, "refused_writes"), (7, "acquired"), (8, "replayed")] {
        let before = playground.state().await["counters"][counter].clone();
        let after = playground.step(step).await;
        assert!(
            after["counters"][counter].as_u64() > before.as_u64(),
            "{after}"
        );
        for never in ["two_holders", "token_regressions", "lost_updates"] {
            assert_eq!(after["counters"][never], 0, "{after}");
        }
    }

    playground.obey(r#"{"do":"reset"}"#).await;
    let fresh = playground.state().await;
    assert_eq!(fresh["tour"]["results"], serde_json::json!([]));
}

#[tokio::test]
async fn playground_that_is_killed_takes_its_servers_with_it() {
    let mut playground = Playground::start(&["--redis"]);
    let id = playground.process.id();
    // Of every kind: a server that hangs, one that is down, and one that was started again.
    for command in [
        r#"{"do":"hang","node":0}"#,
        r#"{"do":"kill","node":1}"#,
        r#"{"do":"kill","node":2}"#,
        r#"{"do":"restart","node":2}"#,
    ] {
        playground.obey(command).await;
    }
    let servers = servers_of(id);
    assert_eq!(servers.len(), 5);
    let is_alive = |addr: &&SocketAddr| TcpStream::connect(addr).is_ok();
    let alive = || servers.iter().filter(is_alive).count();
    assert_eq!(alive(), 4);

    playground.process.signal(Signal::SIGKILL);
    playground.process.wait(PATIENCE);
    let ended = || alive() == 0 && servers_of(id).is_empty();
    wait_until("without a server and a directory", PATIENCE, ended).await;
}

/// The addresses of a playground's servers, by the names of their directories.
fn servers_of(playground: u32) -> Vec<SocketAddr> {
    let prefix = format!("tower-redlock-playground-{playground}-");
    let all = fs::read_dir(env::temp_dir()).unwrap();
    let names = all.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let own = names.filter(|name| name.starts_with(&prefix));
    own.map(|name| {
        let (_, port) = name.rsplit_once('-').unwrap();
        SocketAddr::from(([127, 0, 0, 1], port.parse().unwrap()))
    })
    .collect()
}
