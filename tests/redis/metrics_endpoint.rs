//! The metrics that Prometheus scrapes: their names and labels match the documentation.

use std::collections::{BTreeMap, BTreeSet};

use metrics::Unit;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use support::{Cluster, alone, lock_and_release, until};
use tower_redlock::Redlock;

use crate::patient::one_thread;
use crate::queries::{DASHBOARD, redlock_names};
use crate::scrape::{PARTS, PATIENCE, Scrape, Server};

/// Each is there before what it counts has happened.
#[tokio::test]
async fn scraped_metrics_match_chapter_and_dashboard() {
    let _alone = alone().await;
    let cluster = Cluster::start(3);
    let server = Server::start(&cluster, "off");
    assert_eq!(server.post("/accounts/alice/withdraw").await.status, 200);
    assert_eq!(server.get("/healthz").await.status, 200);
    let scrape = server.scrape().await;
    let granted = scrape.moved_by("redlock_acquire_total", "outcome");
    assert_eq!(granted, [("granted", 1)].into());

    let listed: BTreeSet<&str> = documented().keys().copied().collect();
    assert_eq!(scrape.metrics(), listed);
    let drawn = redlock_names(DASHBOARD);
    let drawn = drawn.map(|name| name.trim_end_matches("_bucket").trim_end_matches("_count"));
    assert_eq!(BTreeSet::from_iter(drawn), listed);
    assert_labels_are_listed(&scrape);
    let ops = ["acquire", "ping", "release"];
    assert_eq!(scrape.label_values("op"), ops.into());
    let seen = scrape.label_values("node").into_iter().map(str::to_owned);
    assert_eq!(
        BTreeSet::from_iter(seen),
        BTreeSet::from_iter(nodes(&cluster))
    );
}

fn assert_labels_are_listed(scrape: &Scrape) {
    for (name, row) in documented() {
        assert!(scrape.help.contains_key(name), "{name}");
        let is_part = |sample: &str| {
            sample
                .strip_prefix(name)
                .is_some_and(|part| PARTS.contains(&part))
        };
        for sample in scrape
            .sample_names()
            .into_iter()
            .filter(|sample| is_part(sample))
        {
            let labels = &scrape.labels(sample) - &["le"].into();
            assert_eq!(labels, row.labels, "{sample}");
        }
        if let Some((label, values)) = &row.values {
            let seen = scrape.label_values(label);
            assert!(seen.is_subset(values), "{label}: {seen:?}");
        }
    }
}

fn nodes(cluster: &Cluster) -> Vec<String> {
    let servers = cluster.servers.iter();
    servers.map(|server| server.addr().to_string()).collect()
}

#[tokio::test]
async fn down_or_quarantined_node_shows_in_metrics() {
    let _alone = alone().await;
    let mut cluster = Cluster::start(3);
    let nodes = nodes(&cluster);
    // Asks for the health, which finds out about a node that nothing else is asked of.
    let until_up = async |server: &Server, is_up: fn(usize) -> bool| {
        let numbered = nodes.iter().enumerate();
        let up = numbered.map(|(number, node)| (node.as_str(), u64::from(is_up(number))));
        let up: BTreeMap<&str, u64> = up.collect();
        until(&format!("{up:?}"), PATIENCE, || async {
            server.get("/healthz").await;
            server.scrape().await.by("redlock_node_up", "node") == up
        })
        .await;
    };
    // They were started just now: not for as long as the restart guard wants it.
    until_up(&Server::start(&cluster, "auto"), |_| false).await;
    let server = Server::start(&cluster, "off");
    until_up(&server, |_| true).await;
    cluster.servers[0].kill();
    until_up(&server, |number| number > 0).await;
    cluster.servers[1].kill();
    until_up(&server, |number| number > 1).await;
    for server in &mut cluster.servers[..2] {
        server.restart();
    }
    until_up(&server, |_| true).await;
}

#[test]
fn metrics_are_described_with_kind_and_unit() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        one_thread().block_on(lock_and_release(&Redlock::in_memory(1), "k"));
    });
    let described = snapshotter.snapshot().into_vec();
    assert!(described.len() > 10, "{described:?}");
    for (metric, unit, text, value) in described {
        let name = metric.key().name();
        let (ending, expected) = match value {
            DebugValue::Counter(_) => ("total", Unit::Count),
            DebugValue::Histogram(_) => ("seconds", Unit::Seconds),
            DebugValue::Gauge(_) => ("", Unit::Count),
        };
        let ends = ["total", "seconds"]
            .into_iter()
            .find(|it| name.ends_with(it));
        assert_eq!(
            (ends.unwrap_or_default(), unit),
            (ending, Some(expected)),
            "{name}"
        );
        assert!(text.is_some_and(|text| !text.is_empty()), "{name}");
    }
}

/// What a row of the chapter's table says of its metrics.
#[derive(Clone)]
struct Row {
    labels: BTreeSet<&'static str>,
    /// Of the last label, where the row lists them.
    values: Option<(&'static str, BTreeSet<&'static str>)>,
}

/// The chapter's table, by metric.
fn documented() -> BTreeMap<&'static str, Row> {
    let (_, table) = CHAPTER.split_once(TABLE).unwrap();
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    rows.flat_map(|row| {
        let mut columns = row.split('|').skip(1);
        let (names, labels) = (columns.next().unwrap(), columns.next().unwrap());
        let (labels, values) = labels.split_once(':').unwrap_or((labels, ""));
        let (labels, values) = (quoted(labels), quoted(values));
        let last = labels
            .clone()
            .last()
            .filter(|_| values.clone().next().is_some());
        let row = Row {
            labels: labels.collect(),
            values: last.map(|label| (label, values.collect())),
        };
        quoted(names).map(move |name| (name, row.clone()))
    })
    .collect()
}

/// What stands in backticks.
fn quoted(text: &'static str) -> impl Iterator<Item = &'static str> + Clone {
    text.split('`').skip(1).step_by(2)
}

const CHAPTER: &str = include_str!("../../docs/observability.md");

/// The head of the table of metrics in the chapter on observability.
const TABLE: &str = "| metric | labels |\n|---|---|\n";
