//! Links by reference and in line, on repository pages and in rustdoc.

use crate::markdown::{Link, Page};
use crate::{exists, files, read};

/// The links of a page that lead nowhere.
pub(crate) fn broken(page: &Page) -> Vec<String> {
    let undefined = page.undefined.iter();
    let undefined = undefined.map(|name| format!("{}: [{name}] is not defined", page.path));
    let mut found: Vec<String> = undefined.collect();
    for link in page.links.iter().filter(|link| is_inside(link)) {
        let place = page.place(link.line);
        let (path, anchor) = link.target.split_once('#').unwrap_or((&link.target, ""));
        let (path, anchors) = match path {
            "" => (page.path.clone(), page.anchors.clone()),
            path => {
                let path = beside(&page.path, path);
                if !exists(&path) {
                    found.push(format!("{place}: {path} does not exist"));
                    continue;
                }
                let is_page = path.ends_with(".md");
                let anchors = is_page.then(|| Page::new(&path, &read(&path)).anchors);
                (path, anchors.unwrap_or_default())
            }
        };
        if !anchor.is_empty() && !anchors.iter().any(|known| known == anchor) {
            found.push(format!("{place}: {path} has no heading #{anchor}"));
        }
    }
    found
}

/// The links that rustdoc would resolve to a file that it does not copy.
pub(crate) fn without_rustdoc(page: &Page) -> Vec<String> {
    let known = read("src/guide/links.md");
    let pictures = files("src/guide/images");
    let links = page.links.iter();
    let links = links.filter(|link| is_inside(link) && !link.target.starts_with('#'));
    let mut found = Vec::new();
    for link in links {
        let place = page.place(link.line);
        let Some(name) = &link.name else {
            found.push(format!("{place}: ({}) is no reference", link.target));
            continue;
        };
        let definition = format!("[{name}]: ");
        let is_known = known.lines().any(|line| line.starts_with(&definition))
            || pictures.contains(&format!("src/guide/images/{name}.md"));
        if !is_known {
            found.push(format!("{place}: [{name}] is not in src/guide/links.md"));
        }
    }
    found
}

/// Whether it leads to a file of the repository.
fn is_inside(link: &Link) -> bool {
    !["https://", "http://"]
        .iter()
        .any(|scheme| link.target.starts_with(scheme))
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
[a](idempotency.md) [b](../README.md) [c](gone.md) [d](#here-is-code) [e](#there) `[f](gone.md)`
[g][known] [h
i][unknown] [`Known`] [`Unknown`] [j](https://example.com/gone) [k][bad_anchor]
# Here is `code`

[known]: settings.md#features
[`Known`]: ../src/gone.rs
[bad_anchor]: settings.md#gone
";
    let page = Page::new("docs/x.md", text);
    let expected = [
        "docs/x.md: [unknown] is not defined",
        "docs/x.md: [`Unknown`] is not defined",
        "docs/x.md:1: docs/gone.md does not exist",
        "docs/x.md:1: docs/x.md has no heading #there",
        "docs/x.md:3: src/gone.rs does not exist",
        "docs/x.md:3: docs/settings.md has no heading #gone",
    ];
    assert_eq!(broken(&page), expected);
    let expected = [
        "docs/x.md:1: (idempotency.md) is no reference",
        "docs/x.md:1: (../README.md) is no reference",
        "docs/x.md:1: (gone.md) is no reference",
        "docs/x.md:2: [known] is not in src/guide/links.md",
        "docs/x.md:3: [`Known`] is not in src/guide/links.md",
        "docs/x.md:3: [bad_anchor] is not in src/guide/links.md",
    ];
    assert_eq!(without_rustdoc(&page), expected);
}
