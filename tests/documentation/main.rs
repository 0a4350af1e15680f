//! The documentation names only what exists: links, anchors, pictures, files, tests, commands and settings.
//!
//! Each check has a second test, which plants what it must find.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

mod alerts;
mod commands;
mod guide;
mod links;
mod manifests;
mod markdown;
mod mentions;
mod packages;
mod rules;
mod settings;
mod workflow;

use std::fs;
use std::path::{Path, PathBuf};

use crate::markdown::{Block, Page};

const README_LINES: usize = 150;

/// The folders with files that pages mention.
const FOLDERS: [&str; 7] = [
    ".ci",
    "benches",
    "docs",
    "examples",
    "src",
    "tests",
    "docs/images",
];

#[test]
fn links_anchors_and_pictures_of_all_pages_exist() {
    check(&pages(), links::broken);
}

#[test]
fn links_of_the_readme_and_the_guide_work_in_rustdoc_too() {
    check(&guide_pages(), links::without_rustdoc);
}

#[test]
fn files_and_tests_that_pages_mention_exist() {
    check(&pages(), mentions::missing);
}

#[test]
fn commands_of_all_pages_name_existing_programs_tests_and_features() {
    check(&pages(), commands::missing);
}

#[test]
fn commands_of_all_scripts_name_existing_programs_tests_and_features() {
    let scripts = [".ci", "benches", "tests"].map(files).concat();
    let scripts = scripts.iter().filter(|path| is_script(path));
    let scripts: Vec<Page> = scripts.map(|path| as_page(path)).collect();
    check(&scripts, commands::missing);
}

#[test]
fn snippets_have_no_hidden_lines_and_are_compiled() {
    check(&guide_pages(), mentions::unseen_code);
}

#[test]
fn the_readme_has_at_most_150_lines() {
    let lines = read("README.md").lines().count();
    assert!(lines <= README_LINES, "{lines} lines");
}

#[test]
fn every_file_of_the_guide_is_a_chapter_and_a_followed_recipe() {
    let guide = read("src/guide.rs");
    let followed = read("tests/getting_started.sh") + &read("tests/examples/recipes.rs");
    for page in guide_pages() {
        let path = page.path.as_str();
        if path == "README.md" {
            continue;
        }
        assert!(
            guide.contains(&format!("\"../{path}\"")),
            "src/guide.rs lacks {path}"
        );
        if path.starts_with("docs/recipes/") {
            assert!(followed.contains(path), "no test follows {path}");
        }
    }
}

#[test]
fn the_chapter_on_settings_lists_every_setter_and_nothing_else() {
    let [chapter, api] = ["docs/settings.md", "tests/public_api.txt"].map(read);
    let found = settings::differences(&chapter, &api);
    assert_none(&found);
}

#[test]
fn every_alert_has_a_runbook_entry_and_a_firing_and_a_quiet_test() {
    let [rules, tests] =
        ["alerts", "alerts_test"].map(|name| read(&format!("examples/{name}.yaml")));
    assert!(rules.matches("- alert: ").count() > 5);
    let path = "docs/troubleshooting.md";
    let found = alerts::incomplete(&rules, &tests, &Page::new(path, &read(path)));
    assert_none(&found);
}

fn is_script(path: &str) -> bool {
    path.starts_with(".ci/") || path.ends_with(".sh") && !path.contains("node_modules")
}

/// The commands of a script: its lines, and of its comments those that are indented, up to their explanations.
fn as_page(path: &str) -> Page {
    let script = read(path);
    let commands = script.lines().map(|line| match line.split_once('#') {
        Some(("", comment)) => {
            let example = comment.strip_prefix("   ").unwrap_or_default();
            example.split("  ").next().unwrap_or_default()
        }
        // What the shell computes is no name.
        _ if line.contains(['*', '$']) && line.contains('/') => "",
        _ => line,
    });
    let block = Block {
        line: 1,
        language: "sh".to_owned(),
        text: Vec::from_iter(commands).join("\n"),
    };
    Page {
        path: path.to_owned(),
        blocks: vec![block],
        ..Page::default()
    }
}

/// Runs a check over all pages.
#[track_caller]
fn check(pages: &[Page], check: fn(&Page) -> Vec<String>) {
    assert!(!pages.is_empty());
    let found: Vec<String> = pages.iter().flat_map(check).collect();
    assert_none(&found);
}

#[track_caller]
fn assert_none(found: &[String]) {
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

fn pages() -> Vec<Page> {
    let mut pages = guide_pages();
    let others = [
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "examples/kubernetes/README.md",
    ];
    pages.extend(others.map(|path| Page::new(path, &read(path))));
    pages
}

/// The README, the pages beside it and the chapters, which rustdoc shows as well.
fn guide_pages() -> Vec<Page> {
    let beside = ["README.md", "CHANGELOG.md", "SECURITY.md"];
    let mut pages: Vec<Page> = beside.map(|path| Page::new(path, &read(path))).into();
    let chapters = files("docs");
    let chapters = chapters.iter().filter(|path| path.ends_with(".md"));
    pages.extend(chapters.map(|path| Page::new(path, &read(path))));
    pages
}

/// Returns the paths of all files below a folder of the repository, relative to the root.
fn files(folder: &str) -> Vec<String> {
    let mut paths = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        // A folder need not exist: a chapter may have no pictures.
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let path = path.strip_prefix(root()).unwrap().to_owned();
                paths.push(path.into_os_string().into_string().unwrap());
            }
        }
    }
    paths.sort();
    paths
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn exists(path: &str) -> bool {
    root().join(path).exists()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
