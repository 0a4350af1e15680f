//! Links by reference and in line, on repository pages and in rustdoc.

use crate::markdown::Page;
use crate::{exists, files, read};

/// The links of a page that lead nowhere.
pub(crate) fn broken(page: &Page) -> Vec<String> {
    let mut found = Vec::new();
    for (line, name, target) in page.definitions() {
        if let Some(reason) = broken_target(page, target) {
            found.push(format!("{}: [{name}]: {reason}", page.place(line)));
        }
    }
    for line in page.prose() {
        if line.text.starts_with('[') && line.text.contains("]: ") {
            continue;
        }
        let text = line.without_code();
        for target in inline_targets(&text) {
            if let Some(reason) = broken_target(page, target) {
                found.push(format!("{}: {reason}", page.place(line)));
            }
        }
    }
    // A link's text may begin on another line than it ends.
    for name in references(page) {
        if !page.definitions().any(|(_, defined, _)| defined == name) {
            found.push(format!("{}: [{name}] is not defined", page.path));
        }
    }
    found
}

/// The links that rustdoc would resolve to a file that it does not copy.
pub(crate) fn without_rustdoc(page: &Page) -> Vec<String> {
    let mut found = Vec::new();
    let known = Page::new("src/guide/links.md", &read("src/guide/links.md"));
    let pictures = files("src/guide/images");
    for name in references(page) {
        let mut targets = page
            .definitions()
            .filter(|(_, defined, _)| *defined == name);
        let is_relative =
            targets.any(|(_, _, target)| !is_elsewhere(target) && !target.starts_with('#'));
        let is_known = known.definitions().any(|(_, defined, _)| defined == name)
            || pictures.contains(&format!("src/guide/images/{name}.md"));
        if is_relative && !is_known {
            found.push(format!(
                "{}: [{name}] is not in src/guide/links.md",
                page.path
            ));
        }
    }
    for line in page.prose() {
        let text = line.without_code();
        let relative = inline_targets(&text).into_iter();
        let relative = relative.filter(|target| !is_elsewhere(target) && !target.starts_with('#'));
        found.extend(relative.map(|target| {
            let place = page.place(line);
            format!("{place}: ({target}) is no reference, which rustdoc needs")
        }));
    }
    found
}

/// The names of references: `[text][name]`, and `[name]` if it is code.
fn references(page: &Page) -> Vec<String> {
    let lines = page
        .prose()
        .filter(|line| !(line.text.starts_with('[') && line.text.contains("]: ")));
    let text: Vec<String> = lines.map(|line| line.without_code()).collect();
    let text = text.join("\n");
    let mut names = Vec::new();
    let mut rest = text.as_str();
    while let Some((_, behind)) = rest.split_once('[') {
        let Some((content, after)) = behind.split_once(']') else {
            break;
        };
        // Brackets within brackets, such as a picture that is a link.
        let content = content.rsplit('[').next().unwrap_or(content);
        if let Some(name) = after.strip_prefix('[') {
            names.extend(name.split_once(']').map(|(name, _)| name.to_owned()));
            rest = name;
            continue;
        }
        let is_code = content.starts_with('`') && content.ends_with('`');
        if is_code && !after.starts_with('(') {
            names.push(content.to_owned());
        }
        rest = after;
    }
    names.retain(|name| !name.is_empty());
    names.sort();
    names.dedup();
    names
}

fn inline_targets(text: &str) -> Vec<&str> {
    let behind = text.split("](").skip(1);
    behind
        .filter_map(|behind| Some(behind.split_once(')')?.0))
        .collect()
}

fn broken_target(page: &Page, target: &str) -> Option<String> {
    if is_elsewhere(target) {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if path.is_empty() {
        page.path.clone()
    } else {
        beside(&page.path, path)
    };
    if !exists(&path) {
        return Some(format!("{path} does not exist"));
    }
    let has_anchor = || {
        let anchors = if path == page.path {
            page.anchors()
        } else {
            Page::new(&path, &read(&path)).anchors()
        };
        anchors.iter().any(|known| known == anchor)
    };
    (!anchor.is_empty() && !has_anchor()).then(|| format!("{path} has no heading #{anchor}"))
}

fn is_elsewhere(target: &str) -> bool {
    target.starts_with("https://") || target.starts_with("http://")
}

/// Resolves a path from the folder of a page.
fn beside(page: &str, path: &str) -> String {
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[test]
fn planted_broken_links_are_found() {
    let text = "\
[a](docs/idempotency.md) [b](docs/gone.md) [c](#here) [d](#there)
[e][known] [f
g][unknown] [`Known`] [`Unknown`] `[h](gone.md)` [i](https://example.com/gone)
# Here

[known]: docs/settings.md#features
[`Known`]: src/gone.rs
[bad_anchor]: docs/settings.md#gone
";
    let found = broken(&Page::new("README.md", text));
    let expected = [
        "README.md:7: [`Known`]: src/gone.rs does not exist",
        "README.md:8: [bad_anchor]: docs/settings.md has no heading #gone",
        "README.md:1: docs/gone.md does not exist",
        "README.md:1: README.md has no heading #there",
        "README.md: [`Unknown`] is not defined",
        "README.md: [unknown] is not defined",
    ];
    assert_eq!(found, expected);
}

#[test]
fn planted_links_without_a_rustdoc_target_are_found() {
    let text = "\
[a](settings.md) [b](#here) [c][settings] [d][own_name] [e][elsewhere]

[settings]: settings.md
[own_name]: settings.md
[elsewhere]: https://example.com
";
    let found = without_rustdoc(&Page::new("docs/x.md", text));
    let expected = [
        "docs/x.md: [own_name] is not in src/guide/links.md",
        "docs/x.md:1: (settings.md) is no reference, which rustdoc needs",
    ];
    assert_eq!(found, expected);
}

#[test]
fn paths_are_resolved_from_the_folder_of_the_page() {
    assert_eq!(beside("README.md", "docs/a.md"), "docs/a.md");
    assert_eq!(beside("docs/recipes/a.md", "../b.md"), "docs/b.md");
    assert_eq!(beside("docs/recipes/a.md", "../../src/c.rs"), "src/c.rs");
}
