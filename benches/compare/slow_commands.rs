//! The slow logs of the servers: a command that takes long delays the commands of all other clients.
//!
//! The logs contain the time of the wall clock, and on a busy machine most entries are commands during which
//! the server was suspended. A script as `REDIS_SERVER` that runs `exec chrt -f 1 redis-server "$@"` gives the
//! servers precedence, and leaves the commands that take long themselves.

use support::{Cluster, Reply};

use crate::faults::flush;
use crate::figures::{Metric, Samples};
use crate::options::Options;
use crate::participants::Who;
use crate::report::{Line, Target, print_figures};
use crate::same::NODES;
use crate::uncontended::{measure, warm_up};

pub(crate) async fn slowlog(options: &Options, samples: &mut Samples) -> Vec<Line> {
    println!(
        "a server that the machine suspends during a command logs it too: compare with the loops by hand"
    );
    let name = format!("slow log, {NODES} nodes, c={CONCURRENCY}");
    let cluster = Cluster::start(NODES);
    for server in &cluster.servers {
        server.command(&["CONFIG", "SET", "slowlog-log-slower-than", THRESHOLD_US]);
        server.command(&["CONFIG", "SET", "slowlog-max-len", "100000"]);
    }
    let mut participants = Vec::new();
    for who in KINDS {
        let participant = who.connect(&cluster.urls()).await;
        warm_up(&participant, 64).await;
        participants.push((who, participant));
    }
    let mut slowest: Option<(Slow, Who)> = None;
    for _ in 0..options.rounds {
        fastrand::shuffle(&mut participants);
        for (who, participant) in &participants {
            flush(&cluster);
            for server in &cluster.servers {
                server.command(&["SLOWLOG", "RESET"]);
            }
            let mut figures = measure(participant, CONCURRENCY, options.time).await;
            let slow = slow_commands(&cluster);
            figures.insert(Metric::SlowCommands, slow.len() as f64);
            let longest = slow.into_iter().max_by_key(|slow| slow.micros);
            let micros = longest.as_ref().map_or(0, |slow| slow.micros);
            figures.insert(Metric::SlowestCommand, micros as f64);
            samples.push(&name, *who, figures);
            let known = slowest.as_ref().map_or(0, |(slow, _)| slow.micros);
            slowest = longest
                .filter(|slow| slow.micros > known)
                .map(|slow| (slow, *who))
                .or(slowest);
        }
    }
    print_figures(&name, samples);
    if let Some((Slow { micros, command }, who)) = slowest {
        println!("the slowest took {micros} us, of {}: {command}", who.name());
    }
    let lines = KINDS.map(|who| {
        let what = format!(
            "commands of more than 1 ms at c={CONCURRENCY}, {}",
            who.name()
        );
        let counts = samples.of(&name, who, Metric::SlowCommands);
        match who {
            Who::Ours | Who::OursFenced => Line::new(what, Target::Exactly(0.0), counts),
            _ => Line::without_target(what, counts),
        }
    });
    lines.into()
}

/// An entry of a slow log.
struct Slow {
    micros: i64,
    command: String,
}

fn slow_commands(cluster: &Cluster) -> Vec<Slow> {
    let logs = cluster
        .servers
        .iter()
        .map(|server| server.command(&["SLOWLOG", "GET", "-1"]));
    let entries = logs.flat_map(|log| log.as_array().unwrap_or_default().to_vec());
    let slow = entries.filter_map(|entry| {
        let [_, _, micros, command, ..] = entry.as_array()? else {
            return None;
        };
        // Scripts have their number of keys as the third argument.
        let command = command.as_array()?.iter().take(3).filter_map(Reply::as_str);
        Some(Slow {
            micros: micros.as_int()?,
            command: command.collect::<Vec<_>>().join(" "),
        })
    });
    slow.collect()
}

const KINDS: [Who; 6] = [
    Who::Ours,
    Who::OursFenced,
    Who::ByHand,
    Who::ByHandFenced,
    Who::Batched,
    Who::BatchedFenced,
];

const CONCURRENCY: usize = 256;
const THRESHOLD_US: &str = "1000";
