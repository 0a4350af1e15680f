//! Files and tests that a page mentions, and code that no reader sees or no check compiles.

use crate::markdown::Page;
use crate::{FOLDERS, exists, files, read};

const EXTENSIONS: [&str; 10] = [
    ".rs", ".sh", ".md", ".toml", ".yaml", ".json", ".lua", ".svg", ".png", ".js",
];

/// Files of the reader, not of the repository.
const OF_THE_READER: [&str; 5] = [
    "src/main.rs",
    "main.rs",
    "ca.pem",
    "package.json",
    "Cargo.lock",
];

/// The files and tests that do not exist.
pub(crate) fn missing(page: &Page) -> Vec<String> {
    let all: Vec<String> = FOLDERS.into_iter().flat_map(files).collect();
    let mut found = Vec::new();
    for (line, span) in &page.spans {
        let words = span.split_whitespace();
        let files = words.filter(|word| is_file(word) && !is_there(word, &all));
        found.extend(files.map(|word| format!("{}: no file `{word}`", page.place(*line))));
        if is_test(span) && !is_function(span, &all) {
            found.push(format!("{}: no test `{span}`", page.place(*line)));
        }
    }
    found
}

/// The lines of Rust that rustdoc hides and a repository page shows, and the blocks of code that no check compiles. Those
/// of recipes are followed by a script.
pub(crate) fn unseen_code(page: &Page) -> Vec<String> {
    let mut found = Vec::new();
    for block in &page.blocks {
        let (place, language) = (page.place(block.line), block.language.as_str());
        let is_unchecked = ["js", "java"].contains(&language) || language.contains("ignore");
        if is_unchecked && !page.path.starts_with("docs/recipes/") {
            found.push(format!("{place}: {language}"));
        }
        let mut lines = block.text.lines().map(str::trim_start);
        let is_hidden = |line: &str| line == "#" || line.starts_with("# ");
        if language.starts_with("rust") && lines.any(is_hidden) {
            found.push(format!("{place}: hidden lines"));
        }
    }
    found
}

fn is_file(word: &str) -> bool {
    let has_extension = EXTENSIONS.iter().any(|end| word.ends_with(end));
    let is_below = FOLDERS.iter().any(|folder| {
        word.strip_prefix(folder)
            .is_some_and(|rest| rest.starts_with('/'))
    });
    // Placeholders, addresses, and files outside of the repository.
    let is_other = word.starts_with(['/', '.'])
        || word.contains(['{', '<', '(', ':', '"', '=', '$', '*'])
        || word.contains("NAME")
        || OF_THE_READER.contains(&word);
    (has_extension || is_below) && !is_other
}

/// A page names a file from the root, from `src`, or by its name alone after another one of its folder.
fn is_there(word: &str, all: &[String]) -> bool {
    let word = word.trim_end_matches('/');
    exists(word) || exists(&format!("src/{word}")) || {
        let end = format!("/{word}");
        !word.contains('/') && all.iter().any(|path| path.ends_with(&end))
    }
}

/// No setting or metric has such a long name.
fn is_test(span: &str) -> bool {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    span.matches('_').count() > 3 && span.chars().all(is_name)
}

fn is_function(name: &str, all: &[String]) -> bool {
    let function = format!("fn {name}(");
    let mut sources = all.iter().filter(|path| path.ends_with(".rs"));
    sources.any(|path| read(path).contains(&function))
}

#[test]
fn planted_missing_files_and_tests_are_found() {
    let text = "\
`tests/run.sh` `tests/gone.sh` `lock/guard.rs` `gone.rs` `guard.rs` `src/main.rs`
`planted_missing_files_and_tests_are_found` `no_test_has_this_name_at_all` `redlock_node_call_seconds`
";
    let found = missing(&Page::new("p.md", text));
    let expected = [
        "p.md:1: no file `tests/gone.sh`",
        "p.md:1: no file `gone.rs`",
        "p.md:2: no test `no_test_has_this_name_at_all`",
    ];
    assert_eq!(found, expected);
}

#[test]
fn planted_unseen_code_is_found() {
    let text = "# Heading\n```rust\n#[test]\n # fn main() {}\n```\n```sh\n# a comment\n```\n```rust,ignore\n```\n";
    let found = unseen_code(&Page::new("p.md", text));
    assert_eq!(found, ["p.md:2: hidden lines", "p.md:9: rust,ignore"]);
}
