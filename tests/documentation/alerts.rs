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
        for (has, what) in [
            (rule.contains(&link), "link to its runbook"),
            (chapter.anchors().contains(&anchor), "heading"),
            (test.contains(&fires), "test in which it fires"),
            (
                test.contains("exp_samples: []"),
                "test in which it is quiet",
            ),
        ] {
            if !has {
                found.push(format!("{name} has no {what}"));
            }
        }
    }
    found
}

#[test]
fn planted_incomplete_alerts_are_found() {
    let rules = format!(
        "- alert: Whole\n runbook_url: {RUNBOOK}#whole\n- alert: Bare\n runbook_url: {RUNBOOK}#bar\n"
    );
    let tests = "\
- name: Whole
  exp_samples: []
  ALERTS{alertname=\"Whole\",alertstate=\"firing\"}
- name: Other
  exp_samples: []
  ALERTS{alertname=\"Bare\",alertstate=\"firing\"}
";
    let chapter = Page::new("p.md", "## Whole\n");
    let found = incomplete(&rules, tests, &chapter);
    let lacks = [
        "link to its runbook",
        "heading",
        "test in which it fires",
        "test in which it is quiet",
    ];
    assert_eq!(found, lacks.map(|what| format!("Bare has no {what}")));
}
