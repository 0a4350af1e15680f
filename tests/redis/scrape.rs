//! The `metrics` example as a process, and what Prometheus scrapes from it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use support::http::request;
use support::{Answer, ChildProcess, Cluster, secs};

/// A running `metrics` example.
pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    pub(crate) _process: ChildProcess,
}

impl Server {
    pub(crate) fn start(cluster: &Cluster, guard: &str) -> Self {
        Self::start_on(&cluster.urls().join(","), guard)
    }

    /// Starts it with these URLs, which may be of several groups.
    pub(crate) fn start_on(urls: &str, guard: &str) -> Self {
        let envs = [("REDLOCK_URLS", urls), ("REDLOCK_RESTART_GUARD", guard)];
        let (_process, addr) = ChildProcess::serve("metrics", &envs, "Ctrl-C stops it");
        Self { addr, _process }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        request(self.addr, "GET", path, &[], b"").await
    }

    pub(crate) async fn post(&self, path: &str) -> Answer {
        request(self.addr, "POST", path, &[], b"").await
    }

    pub(crate) async fn scrape(&self) -> Scrape {
        let response = self.get("/metrics").await;
        assert_eq!(response.status, 200);
        assert_eq!(
            response.header("content-type"),
            Some("text/plain; version=0.0.4")
        );
        Scrape::parse(&response.text())
    }
}

/// The text that Prometheus gets, taken apart.
#[derive(Debug)]
pub(crate) struct Scrape {
    pub(crate) help: BTreeMap<String, String>,
    pub(crate) kinds: BTreeMap<String, String>,
    pub(crate) samples: BTreeMap<(String, Labels), String>,
}

pub(crate) type Labels = BTreeMap<String, String>;

impl Scrape {
    pub(crate) fn parse(text: &str) -> Self {
        let (mut help, mut kinds) = (BTreeMap::new(), BTreeMap::new());
        let mut samples = BTreeMap::new();
        for line in text.lines().filter(|line| !line.is_empty()) {
            let about = |start| line.strip_prefix(start)?.split_once(' ');
            if let Some((name, text)) = about("# HELP ") {
                help.insert(name.to_owned(), text.to_owned());
            } else if let Some((name, kind)) = about("# TYPE ") {
                kinds.insert(name.to_owned(), kind.to_owned());
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let before = samples.insert(series_of(series), value.to_owned());
                assert_eq!(before, None, "twice: {series}");
            }
        }
        Self {
            help,
            kinds,
            samples,
        }
    }

    /// Counts by one label; what has not moved yet is not there.
    pub(crate) fn moved_by<'a>(&'a self, name: &str, label: &str) -> BTreeMap<&'a str, u64> {
        let mut counts = self.by(name, label);
        counts.retain(|_, count| *count > 0);
        counts
    }

    /// Counts by one label.
    pub(crate) fn by<'a>(&'a self, name: &str, label: &str) -> BTreeMap<&'a str, u64> {
        let mut counts = BTreeMap::new();
        for (labels, value) in self.named(name) {
            *counts.entry(labels[label].as_str()).or_default() += value.parse::<u64>().unwrap();
        }
        counts
    }

    pub(crate) fn named(&self, name: &str) -> impl Iterator<Item = (&Labels, &String)> {
        let named = self.samples.iter().filter(move |((own, _), _)| own == name);
        named.map(|((_, labels), value)| (labels, value))
    }

    /// Names of metrics, as they were described.
    pub(crate) fn metrics(&self) -> BTreeSet<&str> {
        self.kinds.keys().map(String::as_str).collect()
    }

    /// Names with labels, as queries know them; a histogram has three.
    pub(crate) fn sample_names(&self) -> BTreeSet<&str> {
        self.samples.keys().map(|(name, _)| name.as_str()).collect()
    }

    pub(crate) fn labels(&self, name: &str) -> BTreeSet<&str> {
        let labels = self.named(name).flat_map(|(labels, _)| labels.keys());
        labels.map(String::as_str).collect()
    }

    pub(crate) fn label_values(&self, label: &str) -> BTreeSet<&str> {
        let samples = self.samples.keys();
        let values = samples.filter_map(|(_, labels)| labels.get(label));
        values.map(String::as_str).collect()
    }
}

pub(crate) fn series_of(series: &str) -> (String, Labels) {
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let labels = labels.strip_suffix('}').unwrap().split(',');
    let labels = labels.filter(|label| !label.is_empty()).map(|label| {
        let (name, value) = label.split_once('=').unwrap();
        (name.to_owned(), value.trim_matches('"').to_owned())
    });
    (name.to_owned(), labels.collect())
}

/// What follows a metric's name in the names of its samples.
pub(crate) const PARTS: [&str; 4] = ["", "_bucket", "_count", "_sum"];

pub(crate) const PATIENCE: Duration = secs(20);
