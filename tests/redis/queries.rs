//! The queries of the dashboard and of the alerts: they read what a service has.

use std::collections::BTreeSet;

use serde_json::Value;
use support::{Cluster, alone};

use crate::scrape::{Labels, Scrape, Server};

/// Otherwise a panel shows no data, and a rate misses the first event. Of a service with two groups, because one group has
/// no label.
#[tokio::test]
async fn dashboard_and_alerts_have_data_and_labels_after_one_lock() {
    let _alone = alone().await;
    let cluster = Cluster::start(2);
    let server = Server::start_on(&cluster.urls().join(";"), "off");
    assert_eq!(server.post("/accounts/alice/withdraw").await.status, 200);
    let scrape = server.scrape().await;
    let (panels, alerts) = (queries(), alerts());
    assert!(panels.len() > 10 && alerts.len() > 5, "{alerts:?}");
    for (expr, text) in panels.iter().chain(&alerts) {
        assert_is_known(expr, text, &scrape);
    }
    for choice in between(DASHBOARD, "label_values(", ")") {
        let (name, label) = choice.split_once(", ").unwrap();
        assert!(scrape.labels(name).contains(label), "{choice}");
    }
}

/// What begins with a dollar is chosen in Grafana.
fn is_fixed(value: &str) -> bool {
    !value.starts_with('$')
}

/// Asserts that there are samples of what a query reads, and of what the text names of its results.
fn assert_is_known(expr: &str, text: &str, scrape: &Scrape) {
    let mut known = BTreeSet::new();
    assert!(selectors(expr).next().is_some(), "{expr}");
    for (name, selected) in selectors(expr) {
        for (label, values) in &selected {
            for value in values.split('|').filter(|value| is_fixed(value)) {
                let mut samples = scrape.named(name);
                let is_seen = samples.any(|(sample, _)| sample[*label] == value);
                assert!(is_seen, "{name} has no {label} {value}: {expr}");
            }
        }
        let has_all = |sample: &Labels| {
            let mut selected = selected.iter().filter(|(_, values)| is_fixed(values));
            selected.all(|(label, values)| values.split('|').any(|value| sample[*label] == value))
        };
        let mut samples = scrape.named(name);
        assert!(
            samples.any(|(sample, _)| has_all(sample)),
            "no sample of {name}: {expr}"
        );
        known.extend(scrape.labels(name));
    }
    let by = between(expr, "by (", ")").flat_map(|by| by.split(", "));
    let by: BTreeSet<&str> = by.collect();
    assert!(by.is_subset(&known), "{expr}");
    for part in between(text, "{{", "}}") {
        let label = part.trim().trim_start_matches("$labels.");
        assert!(by.contains(label), "{text}: {expr}");
    }
}

#[test]
fn dashboard_leaves_the_data_source_to_the_import() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let is_source = |variable: &&Value| variable["name"] == "DS_PROMETHEUS";
    let source = variables.iter().find(is_source).unwrap();
    assert_eq!(
        (&source["type"], &source["query"]),
        (&"datasource".into(), &"prometheus".into())
    );
    let expected = serde_json::json!({"type": "prometheus", "uid": "${DS_PROMETHEUS}"});
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(
            ids.insert(panel["id"].as_u64().unwrap()),
            "two panels have one id"
        );
        assert_eq!(panel["datasource"], expected);
        for target in panel["targets"].as_array().unwrap() {
            assert_eq!(target["datasource"], expected);
        }
    }
}

/// The metrics that a query reads, each with its labels.
fn selectors(expr: &str) -> impl Iterator<Item = (&str, Vec<(&str, &str)>)> {
    let starts = expr.match_indices("redlock_").map(|(start, _)| start);
    starts.map(|start| {
        let rest = &expr[start..];
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_');
        let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
        let labels = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let labels = labels.map_or("", |(labels, _)| labels).split(',');
        let labels = labels.filter_map(|label| {
            let (label, value) = label.split_once('=')?;
            let value = value.trim_start_matches('~').trim_matches('"');
            Some((label.trim_end_matches('!'), value))
        });
        (name, labels.collect())
    })
}

/// The queries of all panels, and how each names its results.
fn queries() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let text = |target: &Value, field: &str| target[field].as_str().unwrap().to_owned();
    targets
        .map(|target| (text(target, "expr"), text(target, "legendFormat")))
        .collect()
}

/// The queries of all alerts, and what each says of its results.
fn alerts() -> Vec<(String, String)> {
    let rules = ALERTS.split("- alert: ").skip(1);
    let parts = rules.map(|rule| {
        let (_, rule) = rule.split_once(" expr: ").unwrap();
        let (rule, text) = rule.split_once(" annotations:").unwrap();
        let expr = rule.split(" labels:").next().unwrap();
        let expr = expr.split(" for: ").next().unwrap();
        (expr.to_owned(), text.to_owned())
    });
    parts.collect()
}

pub(crate) fn redlock_names(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_lowercase() && c != '_');
    words.filter(|word| word.starts_with("redlock_"))
}

fn between<'a>(text: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(open)
        .skip(1)
        .map(move |rest| rest.split_once(close).unwrap().0)
}

pub(crate) const DASHBOARD: &str = include_str!("../../examples/grafana_dashboard.json");

const ALERTS: &str = include_str!("../../examples/alerts.yaml");
