//! Locks over several groups of nodes, and the CPU time that servers need for a lock.
//!
//! The client shares the machine with the servers of all groups, so more groups take no more locks per second here. The
//! figures show what does not depend on the number of cores: a lock costs the client the same over several embedded
//! groups, and a server of one of n groups gets 1/n of the commands. The CPU time of a server per lock then says how many
//! groups a number of locks needs, on servers with cores of their own.
//!
//! The CPU time of a server falls by less than its commands do. Requests that a process sends to a server at the same
//! time share a call, and locks that are spread over more groups share fewer. With one lock at a time no call is shared,
//! but a server and a connection that rest between two requests take longer for each.

use support::{Cluster, RedisServer};
use tower_redlock::{NodeGroup, Redlock, RestartGuard};

use crate::faults::flush;
use crate::figures::{Figures, Metric, Samples, Spread, quotients};
use crate::options::Options;
use crate::participants::{Participant, Who};
use crate::report::{Line, Target, print_figures};
use crate::uncontended::{own_cpu, run, warm_up};

pub(crate) async fn groups(options: &Options, samples: &mut Samples) -> Vec<Line> {
    println!(
        "the servers of all groups share the cores of this machine with the client, so more groups take no more locks \
         per second here: they show that the client's cost of a lock does not grow (embedded nodes), and that each \
         server gets 1/n of the commands (c=1). With more locks at once, requests to one server share a call, and over \
         more groups fewer do"
    );
    let cluster = Cluster::start(MOST_GROUPS * 3);
    for setups in compared() {
        let by_kind = |setup| KINDS.map(|who| (setup, who));
        let mut order: Vec<(Setup, Who)> = setups.iter().copied().flat_map(by_kind).collect();
        for _ in 0..options.rounds {
            fastrand::shuffle(&mut order);
            for (setup, who) in &order {
                // New each time: fences stay in the memory of embedded nodes, and idle connections cost CPU time.
                let participant = setup.service(*who, &cluster);
                warm_up(&participant, setup.concurrency).await;
                let figures = setup.measure(&participant, &cluster, options).await;
                samples.push(&setup.name(), *who, figures);
                drop(participant);
                flush(&cluster);
            }
        }
        for setup in setups {
            print_figures(&setup.name(), samples);
        }
    }
    print_plan(samples);
    lines(samples)
}

/// A number of groups of nodes, and of locks at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Setup {
    kind: Kind,
    groups: usize,
    /// The nodes of each group.
    nodes: usize,
    concurrency: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Embedded,
    Servers,
}

/// Returns the measured setups. Those that are compared with each other run in the same rounds.
fn compared() -> [Vec<Setup>; 4] {
    let three = |groups, concurrency| Setup::servers(groups, 3, concurrency);
    let alone = GROUPS.map(|groups| three(groups, 1));
    let many = GROUPS.map(|groups| three(groups, MANY));
    // One group has the same load in both.
    let many_in_each = [2, MOST_GROUPS].map(|groups| three(groups, MANY * groups));
    let measured = [alone, many].concat();
    let others = one_group().filter(|setup| !measured.contains(setup));
    [
        GROUPS.map(Setup::embedded).into(),
        alone.into(),
        many.into_iter().chain(many_in_each).collect(),
        others.collect(),
    ]
}

/// Returns the setups that say what a server needs for a lock.
fn one_group() -> impl Iterator<Item = Setup> {
    [3, 5].into_iter().flat_map(|nodes| {
        let loads = [1, 16, MANY].into_iter();
        loads.map(move |concurrency| Setup::servers(1, nodes, concurrency))
    })
}

impl Setup {
    fn embedded(groups: usize) -> Self {
        Self {
            kind: Kind::Embedded,
            groups,
            nodes: 3,
            concurrency: MANY,
        }
    }

    fn servers(groups: usize, nodes: usize, concurrency: usize) -> Self {
        Self {
            kind: Kind::Servers,
            groups,
            nodes,
            concurrency,
        }
    }

    fn name(self) -> String {
        let Self { groups, nodes, .. } = self;
        let kind = match self.kind {
            Kind::Embedded => "embedded",
            Kind::Servers => "servers",
        };
        let plural = if groups == 1 { "" } else { "s" };
        format!(
            "{groups} group{plural} of {nodes} {kind}, c={}",
            self.concurrency
        )
    }

    fn service(self, who: Who, cluster: &Cluster) -> Participant {
        let urls = cluster.urls();
        let groups = urls.chunks(self.nodes).take(self.groups);
        let builder = groups.fold(Redlock::builder(), |builder, urls| {
            builder.node_group(match self.kind {
                Kind::Embedded => NodeGroup::new().embedded(self.nodes),
                Kind::Servers => NodeGroup::new().urls(urls),
            })
        });
        let builder = builder.fencing(who.is_fenced());
        // Fresh servers refuse locks for their first 20 seconds.
        let built = builder.restart_guard(RestartGuard::Off).build();
        Participant::Ours(built.expect("the settings are valid"))
    }

    /// Measures, and adds the CPU time.
    async fn measure(
        self,
        participant: &Participant,
        cluster: &Cluster,
        options: &Options,
    ) -> Figures {
        let servers = match self.kind {
            Kind::Embedded => &[],
            Kind::Servers => &cluster.servers[..self.groups * self.nodes],
        };
        let (before, own) = (uses(servers), own_cpu());
        let (mut figures, locks) = run(participant, self.concurrency, options.time).await;
        let locks = locks as f64;
        figures.insert(Metric::ClientCpu, (own_cpu() - own) * 1e6 / locks);
        let after = uses(servers);
        let most_and_sum = |of: fn(&Use) -> f64| {
            let used = after.iter().zip(&before);
            let used = used.map(|(after, before)| of(after) - of(before));
            used.fold((0.0, 0.0), |(most, sum), used| (used.max(most), used + sum))
        };
        if self.kind == Kind::Servers {
            let (busiest, all) = most_and_sum(|of| of.cpu * 1e6);
            figures.insert(Metric::ServerCpu, all / locks);
            figures.insert(Metric::BusiestServerCpu, busiest / locks);
            let (busiest, _) = most_and_sum(|of| of.commands);
            figures.insert(Metric::BusiestServerCommands, busiest / locks);
        }
        figures
    }
}

/// What a server has done so far.
struct Use {
    cpu: f64,
    commands: f64,
}

fn uses(servers: &[RedisServer]) -> Vec<Use> {
    let of_one = |server: &RedisServer| Use {
        cpu: server.cpu_seconds(),
        commands: server.call_counts().into_values().sum::<u64>() as f64,
    };
    servers.iter().map(of_one).collect()
}

/// Compares several groups with one.
fn lines(samples: &Samples) -> Vec<Line> {
    let mut lines = Vec::new();
    for who in KINDS {
        for groups in [2, MOST_GROUPS] {
            let mut line = |setup: Setup, one: Setup, (metric, what), target: Option<Target>| {
                let name = setup.name();
                let what = format!("{name}, {}: {what}, x one group", who.short());
                let of = |setup: Setup| samples.of(&setup.name(), who, metric);
                lines.push(Line {
                    target,
                    ..Line::without_target(what, quotients(&of(setup), &of(one)))
                });
            };
            let (several, one) = (Setup::embedded(groups), Setup::embedded(1));
            line(several, one, RATE, Some(Target::AtLeast(0.9)));
            line(several, one, CLIENT, Some(Target::AtMost(1.1)));
            let (several, one) = (Setup::servers(groups, 3, 1), Setup::servers(1, 3, 1));
            // The keys are not spread evenly.
            let share = Target::AtMost(1.15 / groups as f64);
            line(several, one, COMMANDS, Some(share));
            line(several, one, CLIENT, None);
            line(several, one, BUSIEST, None);
            let one = Setup::servers(1, 3, MANY);
            for load in [MANY, MANY * groups] {
                let several = Setup::servers(groups, 3, load);
                for metric in [RATE, CLIENT, BUSIEST] {
                    line(several, one, metric, None);
                }
            }
        }
    }
    lines
}

/// Prints how many groups a number of locks needs.
fn print_plan(samples: &Samples) {
    let percent = SHARE_OF_A_CORE * 100.0;
    for who in KINDS {
        println!(
            "\ngroups for a number of locks per second, {}, if a server uses {percent:.0} % of a core; c is the number \
             of locks that one process acquires at once in one group",
            who.short()
        );
        print!("{:<32}", "");
        for title in ["server us/lock", "group us/lock", "locks/s of a group"] {
            print!("{title:>20}");
        }
        RATES.iter().for_each(|rate| print!("{rate:>8.0}"));
        println!();
        for setup in one_group() {
            let median = |metric| Spread::of(&samples.of(&setup.name(), who, metric));
            let server = median(Metric::BusiestServerCpu).unwrap_or_default().median;
            let group = median(Metric::ServerCpu).unwrap_or_default().median;
            let rate = SHARE_OF_A_CORE * 1e6 / server;
            print!(
                "  {:<30}{server:>20.1}{group:>20.1}{rate:>20.0}",
                setup.name()
            );
            RATES
                .iter()
                .for_each(|wanted| print!("{:>8.0}", (wanted / rate).ceil()));
            println!();
        }
    }
}

const KINDS: [Who; 2] = [Who::Ours, Who::OursFenced];

const GROUPS: [usize; 3] = [1, 2, MOST_GROUPS];
const MOST_GROUPS: usize = 4;

/// The locks at once, of all groups or of each.
const MANY: usize = 64;

/// The part of a core that a server may use; the rest is for bursts.
const SHARE_OF_A_CORE: f64 = 0.5;

const RATE: (Metric, &str) = (Metric::Rate, "locks/s");
const CLIENT: (Metric, &str) = (Metric::ClientCpu, "client CPU per lock");
const COMMANDS: (Metric, &str) = (
    Metric::BusiestServerCommands,
    "commands of the busiest server",
);
const BUSIEST: (Metric, &str) = (Metric::BusiestServerCpu, "CPU of the busiest server");

/// The locks per second to plan for.
const RATES: [f64; 6] = [1e3, 5e3, 1e4, 2e4, 5e4, 1e5];
