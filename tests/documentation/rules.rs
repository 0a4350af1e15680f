//! Rules without a test: `tests/rules.md` has the rules, and a line above a test names those that it shows.

use std::collections::BTreeMap;

use crate::{assert_none, files, read};

const MARK: &str = "// Rules: ";

#[test]
fn every_rule_has_a_test() {
    let sources = ["src", "tests"].map(files).concat();
    let sources = sources.iter().filter(|path| path.ends_with(".rs"));
    let sources: Vec<_> = sources.map(|path| (path.as_str(), read(path))).collect();
    let rules = read("tests/rules.md");
    let (map, found) = map(&rules, &sources);
    for (rule, tests) in map {
        println!("{rule}\n    {}", tests.join("\n    "));
    }
    assert_none(&found);
}

type Map<'a> = BTreeMap<&'a str, Vec<String>>;

/// Returns the tests of each rule, and what is wrong.
fn map<'a>(rules: &'a str, sources: &[(&str, String)]) -> (Map<'a>, Vec<String>) {
    let rows = rules.lines().filter_map(|line| line.strip_prefix("| `"));
    let rules = rows.filter_map(|row| Some((row.split_once('`')?.0, Vec::new())));
    let mut map: Map<'_> = rules.collect();
    let mut found = Vec::new();
    for (path, text) in sources {
        let mut lines = text.lines().map(str::trim_start);
        while let Some(line) = lines.next() {
            let Some(rules) = line.strip_prefix(MARK) else {
                continue;
            };
            let mut is_test = false;
            let name = lines.by_ref().find_map(|line| {
                is_test |= line.starts_with("#[") && line.contains("test");
                Some(line.split_once("fn ")?.1.split_once('(')?.0)
            });
            let Some(name) = name.filter(|_| is_test) else {
                found.push(format!("{path}: no test below `{line}`"));
                continue;
            };
            for rule in rules.split(", ") {
                match map.get_mut(rule) {
                    Some(tests) => tests.push(format!("{path}: {name}")),
                    None => found.push(format!("{path}: no rule `{rule}`, which {name} shows")),
                }
            }
        }
    }
    let without = map.iter().filter(|(_, tests)| tests.is_empty());
    found.extend(without.map(|(rule, _)| format!("no test shows `{rule}`")));
    (map, found)
}

#[test]
fn planted_gaps_are_found() {
    let rules = "| rule | |\n| `a` | .. |\n| `b` | .. |\n";
    let marks = [
        "    // Rules: a, c\n    #[test]\n    fn shows() {}\n",
        "// Rules: b\nfn helper() {}\n",
    ];
    let text = marks.concat();
    let (map, found) = map(rules, &[("x.rs", text)]);
    assert_eq!(map["a"], ["x.rs: shows"]);
    let expected = [
        "x.rs: no rule `c`, which shows shows",
        "x.rs: no test below `// Rules: b`",
        "no test shows `b`",
    ];
    assert_eq!(found, expected);
}
