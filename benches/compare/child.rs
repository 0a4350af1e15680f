//! The child processes of this program.

use std::env;
use std::io::stdin;
use std::process::ChildStdin;
use std::time::Duration;

use support::ChildProcess;
use tokio::runtime::{Builder, Runtime};

use crate::contended::{Hold, Waiters, burst, storm};
use crate::http_load;
use crate::memory;
use crate::participants::Who;
use crate::uncontended::warm_up;

/// The first argument of a child process.
pub(crate) const FLAG: &str = "--child";

/// Starts a process for a participant; it ends with its stdin.
pub(crate) fn start(task: &str, who: Who, urls: &[String]) -> (ChildProcess, ChildStdin) {
    let program = env::current_exe().expect("the path of this program");
    let args = [FLAG, task, who.name(), &urls.join(",")];
    ChildProcess::start_to_talk(program, &args, &[])
}

/// Starts the process that sends requests.
pub(crate) fn start_load(args: &[&str]) -> ChildProcess {
    let program = env::current_exe().expect("the path of this program");
    ChildProcess::start(program, &[&[FLAG, "load"], args].concat(), &[])
}

/// Runs a child process.
pub(crate) fn run(args: &[String]) {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["crowd", who, urls] => crowd(Who::named(who), &split(urls)),
        ["memory", who, urls] => memory::run(Who::named(who), &split(urls)),
        ["load", load @ ..] => {
            // One thread: the server and the nodes need the rest.
            let runtime = Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("the runtime starts");
            runtime.block_on(http_load::run(load));
        }
        other => panic!("this program does not start itself with {other:?}"),
    }
}

/// Reads orders line by line: take part in a burst, or in a storm.
fn crowd(who: Who, urls: &[String]) {
    let runtime = Runtime::new().expect("the runtime starts");
    let participant = runtime.block_on(who.connect(urls));
    runtime.block_on(warm_up(&participant, 4));
    println!("ready");
    for line in stdin().lines() {
        let line = line.expect("orders are UTF-8");
        let words: Vec<&str> = line.split(' ').collect();
        let (key, waiters) = match words.as_slice() {
            ["burst", key, tasks] => (
                *key,
                runtime.block_on(burst(&participant, key, parse(tasks))),
            ),
            ["storm", key, tasks, millis] => {
                let time = Duration::from_millis(parse(millis));
                let storm = storm(&participant, key, parse(tasks), time);
                (*key, runtime.block_on(storm))
            }
            other => panic!("there is no order {other:?}"),
        };
        for Hold { asked, from, to } in waiters.holds {
            println!("hold {asked} {from} {to}");
        }
        for waited in waiters.in_vain {
            println!("in-vain {waited}");
        }
        println!("done {key}");
    }
}

/// Reads the output of a process of a crowd.
pub(crate) fn parse_waiters(output: &str) -> Waiters {
    let mut waiters = Waiters::default();
    for line in output.lines() {
        match line.split(' ').collect::<Vec<_>>().as_slice() {
            ["hold", asked, from, to] => waiters.holds.push(Hold {
                asked: parse(asked),
                from: parse(from),
                to: parse(to),
            }),
            ["in-vain", waited] => waiters.in_vain.push(parse(waited)),
            _ => {}
        }
    }
    waiters
}

pub(crate) fn parse<T: std::str::FromStr>(text: &str) -> T {
    let number = text.parse().ok();
    number.unwrap_or_else(|| panic!("{text:?} is no number"))
}

fn split(urls: &str) -> Vec<String> {
    urls.split(',').map(str::to_owned).collect()
}
