//! The metrics that Prometheus scrapes: they match the responses, and their names match the documentation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex as StdMutex;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use support::{Cluster, alone, until};
use tower_redlock::Redlock;

use crate::queries::{DASHBOARD, redlock_names};
use crate::scrape::{PARTS, PATIENCE, Scrape, Server};

/// Makes everything happen that is counted: each assertion is one thing that has happened.
async fn make_everything_happen(cluster: &mut Cluster, server: &Server) -> Scrape {
    let holder = server.post_beside("/accounts/alice/withdraw?hold_ms=500");
    let held = |scrape: &Scrape| scrape.count("redlock_held", &[]);
    server
        .scrape_until("held", |scrape| held(scrape) == 1)
        .await;
    let refused = server.post("/accounts/alice/withdraw").await;
    assert_eq!(refused.status, 423);
    assert_eq!(holder.await.unwrap().status, 200);
    let seen = server.scrape().await;
    let waited = seen.count("redlock_wait_seconds_count", &[]);
    assert_eq!(waited, 1, "in vain: {seen:#?}");

    let holder = server.post_beside("/reports/7?hold_ms=20000");
    server
        .scrape_until("held", |scrape| held(scrape) == 1)
        .await;
    let waiting = [(); 3].map(|()| server.post_beside("/reports/7"));
    let waiters = |scrape: &Scrape| scrape.count("redlock_waiters", &[]);
    server
        .scrape_until("waiting", |scrape| waiters(scrape) == 3)
        .await;
    let [gone, second, third] = waiting;
    gone.abort();
    // One scrape does not read all metrics at one time: what it reads first may be from before.
    server
        .scrape_until("gone", |scrape| waiters(scrape) == 2)
        .await;
    let seen = server.scrape().await;
    let reports = seen.count("redlock_acquire_total", &[("resource", "report")]);
    assert_eq!(reports, 2, "one granted, one abandoned: {seen:#?}");
    assert_eq!(
        seen.moved_by("redlock_acquire_total", "outcome")["abandoned"],
        1
    );

    // The lock is deleted on a majority; the next renewal detects it.
    for key in cluster.lock_keys() {
        for server in &cluster.servers[..2] {
            server.command(&["DEL", &key]);
        }
    }
    let lost = holder.await.unwrap();
    assert_eq!(
        (lost.status.as_u16(), lost.json()["code"].as_str()),
        (503, Some("lock-lost"))
    );
    assert_eq!(second.await.unwrap().status, 200);
    assert_eq!(third.await.unwrap().status, 200);
    let seen = server.scrape().await;
    assert_eq!(
        seen.moved_by("redlock_lost_total", "reason"),
        [("gone", 1)].into()
    );
    // Of the client that went away, too.
    assert_eq!(
        seen.count("redlock_wait_seconds_count", &[("resource", "report")]),
        3
    );
    assert_eq!(
        seen.count("redlock_hold_seconds_count", &[("resource", "report")]),
        3
    );

    assert_eq!(server.get("/healthz").await.status, 200);
    for server in &mut cluster.servers[..2] {
        server.kill();
    }
    assert_eq!(server.post("/reports/7").await.status, 200);
    assert_eq!(server.post("/accounts/alice/withdraw").await.status, 503);
    let scrape = server.scrape().await;
    assert_eq!(
        scrape.moved_by("redlock_unprotected_total", "resource"),
        [("report", 1)].into()
    );
    let outcomes = [
        ("abandoned", 1),
        ("contended", 1),
        ("granted", 4),
        ("unavailable", 2),
    ];
    assert_eq!(
        scrape.moved_by("redlock_acquire_total", "outcome"),
        outcomes.into()
    );
    assert_eq!((held(&scrape), waiters(&scrape)), (0, 0));
    scrape
}

#[tokio::test]
async fn scraped_metrics_match_chapter_and_dashboard() {
    let _alone = alone().await;
    let mut cluster = Cluster::start(3);
    let server = Server::start(&cluster, "off");
    let scrape = make_everything_happen(&mut cluster, &server).await;

    let listed: BTreeSet<&str> = documented().keys().copied().collect();
    assert_eq!(scrape.metrics(), listed);
    let drawn = redlock_names(DASHBOARD);
    let drawn = drawn.map(|name| name.trim_end_matches("_bucket").trim_end_matches("_count"));
    assert_eq!(BTreeSet::from_iter(drawn), listed);
    assert_labels_are_listed(&scrape);
    let ops = ["acquire", "confirm", "ping", "release"];
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
    let recorder = Descriptions::default();
    metrics::with_local_recorder(&recorder, || drop(Redlock::in_memory(1)));
    let described = recorder.0.into_inner().unwrap();
    let names = described.keys().map(String::as_str);
    assert_eq!(
        Vec::from_iter(names),
        Vec::from_iter(documented().into_keys())
    );
    for (name, (kind, unit, text)) in described {
        let expected = match name.rsplit('_').next() {
            Some("total") => ("counter", Unit::Count),
            Some("seconds") => ("histogram", Unit::Seconds),
            _ => ("gauge", Unit::Count),
        };
        assert_eq!((kind, unit), (expected.0, Some(expected.1)), "{name}");
        assert!(!text.is_empty(), "{name}");
    }
}

/// Notes what a recorder is told before anything is counted.
#[derive(Default)]
struct Descriptions(StdMutex<BTreeMap<String, (&'static str, Option<Unit>, String)>>);

impl Descriptions {
    fn note(&self, kind: &'static str, name: &KeyName, unit: Option<Unit>, text: &str) {
        let described = (kind, unit, text.to_owned());
        let before = self
            .0
            .lock()
            .unwrap()
            .insert(name.as_str().to_owned(), described);
        assert_eq!(before, None, "described twice: {name:?}");
    }
}

impl Recorder for Descriptions {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.note("counter", &name, unit, &text);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.note("gauge", &name, unit, &text);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.note("histogram", &name, unit, &text);
    }

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
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
