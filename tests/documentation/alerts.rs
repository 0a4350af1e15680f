//! The alerts: a runbook entry for each, and a test in which it fires and one in which it does not.

use crate::markdown::Page;

/// Where rustdoc shows the chapter with the runbook.
const RUNBOOK: &str =
    "https://docs.rs/tower-redlock/latest/tower_redlock/guide/troubleshooting/index.html";

/// The alerts that lack something.
pub(crate) fn incomplete(rules: &str, tests: &str, chapter: &Page) -> Vec<String> {
    let mut found = Vec::new();
    for rule in rules.split("- alert: ").skip(1) {
        let name = rule.lines().next().unwrap_or_default();
        let anchor = name.to_lowercase();
        let link = format!("runbook_url: {RUNBOOK}#{anchor}\n");
        let tests = tests.split("- name: ");
        let test = tests.filter(|test| test.lines().next() == Some(name));
        let test: String = test.collect();
        let fires = format!("alertname=\"{name}\",alertstate=\"firing\"");
        let wanted = [
            (rule.contains(&link), "link to its runbook"),
            (chapter.anchors.contains(&anchor), "heading"),
            (test.contains(&fires), "test in which it fires"),
            (
                test.contains("exp_samples: []"),
                "test in which it is quiet",
            ),
        ];
        let lacks = wanted.into_iter().filter(|(has, _)| !has);
        found.extend(lacks.map(|(_, what)| format!("{name} has no {what}")));
    }
    found
}

#[test]
fn planted_incomplete_alerts_are_found() {
    let rules = format!(
        "- alert: Whole\n runbook_url: {RUNBOOK}#whole\n- alert: Bare\n runbook_url: {RUNBOOK}#bar\n"
    );
    let whole = "ALERTS{alertname=\"Whole\",alertstate=\"firing\"}";
    let tests = format!("- name: Whole\n exp_samples: []\n {whole}\n- name: Bare\n {whole}\n");
    let found = incomplete(&rules, &tests, &Page::new("p.md", "## Whole\n"));
    let lacks = [
        "link to its runbook",
        "heading",
        "test in which it fires",
        "test in which it is quiet",
    ];
    assert_eq!(found, lacks.map(|what| format!("Bare has no {what}")));
}
