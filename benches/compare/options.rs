//! The workloads and their durations, from the command line.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The options of the command line.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) workloads: Vec<Workload>,
    pub(crate) rounds: usize,
    /// The duration of each participant in each round.
    pub(crate) time: Duration,
    /// How long processes compete for one key.
    pub(crate) storm: Duration,
    /// How long to watch the memory.
    pub(crate) watch: Duration,
    /// The file of the chart.
    pub(crate) chart: Option<PathBuf>,
}

impl Options {
    /// Reads the arguments; `Err` has the text to print instead.
    pub(crate) fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            workloads: Vec::new(),
            rounds: ROUNDS,
            time: TIME,
            storm: STORM,
            watch: WATCH,
            chart: None,
        };
        let mut args = args;
        let mut is_bench = false;
        while let Some(arg) = args.next() {
            match arg.as_str() {
                // Cargo's own argument, which `cargo test -p benches --benches` does not give.
                "--bench" => is_bench = true,
                "--list" | "--help" => return Err(help()),
                "--quick" => {
                    options.rounds = 3;
                    options.time /= 2;
                    options.storm /= 6;
                    options.watch /= 6;
                }
                "--chart" => options.chart = args.next().map(PathBuf::from),
                "--rounds" => options.rounds = number(&arg, args.next())?,
                "--seconds" => {
                    options.time = Duration::from_secs_f64(number(&arg, args.next())?);
                }
                name => options.workloads.push(name.parse()?),
            }
        }
        if !is_bench {
            options.rounds = 1;
            options.time = Duration::from_millis(50);
            options.workloads = vec![Workload::W1];
        }
        if options.workloads.is_empty() {
            options.workloads = Workload::ALL.to_vec();
        }
        Ok(options)
    }
}

/// The work of the participants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Workload {
    W1,
    W2,
    Slowlog,
    W3,
    W3b,
    W4,
    W5,
    Memory,
    W6,
    Far,
    W7,
    Groups,
    Commands,
}

impl Workload {
    const ALL: [Self; 13] = [
        Self::W1,
        Self::W2,
        Self::Slowlog,
        Self::W3b,
        Self::W3,
        Self::W4,
        Self::W5,
        Self::Memory,
        Self::W6,
        Self::Far,
        Self::W7,
        Self::Groups,
        Self::Commands,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::W1 => "w1",
            Self::W2 => "w2",
            Self::Slowlog => "slowlog",
            Self::W3 => "w3",
            Self::W3b => "w3b",
            Self::W4 => "w4",
            Self::W5 => "w5",
            Self::Memory => "memory",
            Self::W6 => "w6",
            Self::Far => "far",
            Self::W7 => "w7",
            Self::Groups => "groups",
            Self::Commands => "commands",
        }
    }

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::W1 => "W1: one lock after the other, each of its own key",
            Self::W2 => "W2: many concurrent locks, each of its own key",
            Self::Slowlog => "slowlog: commands that occupy a server for more than a millisecond",
            Self::W3 => "W3: eight processes whose tasks return to one key at once",
            Self::W3b => {
                "W3b: a burst of tasks that take one key once, in one process and in several"
            }
            Self::W4 => "W4: one node of five is stopped",
            Self::W5 => "W5: one node of five is killed",
            Self::Memory => "memory of a process while one node of five is stopped or killed",
            Self::W6 => "W6: one node only",
            Self::Far => "far: as W2, with servers that are 1 ms and 20 ms away",
            Self::W7 => "W7: requests to an axum server, each with a lock of its own key",
            Self::Groups => {
                "groups: as W2, over 1, 2 and 4 groups of nodes; CPU of the servers per lock, for planning"
            }
            Self::Commands => "commands on the wire of an uncontended lock",
        }
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|known| known.name() == name);
        found.ok_or_else(|| format!("unknown workload {name:?}\n\n{}", help()))
    }
}

fn help() -> String {
    let mut help = "cargo bench -p benches --bench compare -- [WORKLOAD...] [--quick] [--rounds N] [--seconds S] [--chart FILE.svg]\n\
        --quick    fewer and shorter rounds\n\
        --rounds   number of rounds (default 7)\n\
        --seconds  duration of each participant in a round (default 0.6)\n\
        --chart    file for the chart of w1 and w2\n"
        .to_owned();
    for workload in Workload::ALL {
        help += &format!("\n{:<10}{}", workload.name(), workload.title());
    }
    help
}

fn number<T: FromStr>(option: &str, value: Option<String>) -> Result<T, String> {
    let value = value.and_then(|value| value.parse().ok());
    value.ok_or_else(|| format!("{option} needs a number\n\n{}", help()))
}

const ROUNDS: usize = 7;
const TIME: Duration = Duration::from_millis(600);
const STORM: Duration = Duration::from_secs(30);
const WATCH: Duration = Duration::from_secs(60);
