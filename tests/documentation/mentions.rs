//! Files and tests that a page mentions, and lines that only rustdoc hides.

use crate::markdown::{Page, Place};
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
    for line in page.prose() {
        for span in line.code_spans() {
            let words = span.split_whitespace();
            let files = words.filter(|word| is_file(word) && !is_there(word, &all));
            found.extend(files.map(|word| format!("{}: no file `{word}`", page.place(line))));
            if is_test(span) && !is_function(span, &all) {
                found.push(format!("{}: no test `{span}`", page.place(line)));
            }
        }
    }
    found
}

/// The lines of Rust that rustdoc hides and a repository page shows.
pub(crate) fn hidden_lines(page: &Page) -> Vec<String> {
    let is_rust =
        |place: &Place| matches!(place, Place::Code(language) if language.starts_with("rust"));
    let hidden = page.lines.iter().filter(|line| {
        let text = line.text.trim_start();
        is_rust(&line.place) && (text == "#" || text.starts_with("# "))
    });
    hidden
        .map(|line| format!("{}: {}", page.place(line), line.text))
        .collect()
}

/// The blocks of code that no check compiles, and whose introduction does not call them a sketch. Recipes are followed
/// by a script.
pub(crate) fn unmarked_sketches(page: &Page) -> Vec<String> {
    let is_sketch = |place: &Place| match place {
        Place::Code(language) => {
            ["js", "java"].contains(&language.as_str()) || language.contains("ignore")
        }
        Place::Prose => false,
    };
    let mut found = Vec::new();
    let mut introduction = "";
    let mut before = &Place::Prose;
    for line in &page.lines {
        let begins = is_sketch(&line.place) && *before != line.place;
        if begins && !introduction.contains("sketch") && !page.path.starts_with("docs/recipes/") {
            found.push(format!("{}: {}", page.place(line), line.text));
        }
        if line.place == Place::Prose && !line.text.is_empty() {
            introduction = &line.text;
        }
        before = &line.place;
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
        || word.contains(['{', '<', '(', ':', '"', '=', '$'])
        || word.contains("NAME")
        || OF_THE_READER.contains(&word);
    (has_extension || is_below) && !is_other
}

/// A page names a file from the root, from `src`, or by its name alone after another one of its folder.
fn is_there(word: &str, all: &[String]) -> bool {
    if let Some((before, after)) = word.split_once('*') {
        let matches = |path: &String| {
            let path = path
                .strip_prefix("src/")
                .filter(|_| !word.starts_with("src/"))
                .unwrap_or(path);
            path.starts_with(before) && path.ends_with(after.trim_start_matches(['*', '/']))
        };
        return all.iter().any(matches);
    }
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
`tests/run.sh` `tests/gone.sh` `lock/guard.rs` `gone.rs` `guard.rs` `src/main.rs` `src/*/mod.rs` `src/*.gone`
`planted_missing_files_and_tests_are_found` `no_test_has_this_name_at_all` `redlock_node_call_seconds`
";
    let found = missing(&Page::new("p.md", text));
    let expected = [
        "p.md:1: no file `tests/gone.sh`",
        "p.md:1: no file `gone.rs`",
        "p.md:1: no file `src/*.gone`",
        "p.md:2: no test `no_test_has_this_name_at_all`",
    ];
    assert_eq!(found, expected);
}

#[test]
fn planted_hidden_lines_are_found() {
    let text = "# Heading\n```rust\n# fn main() {}\n#[test]\n#\n```\n```sh\n# a comment\n```\n";
    let found = hidden_lines(&Page::new("p.md", text));
    assert_eq!(found, ["p.md:3: # fn main() {}", "p.md:5: #"]);
}

#[test]
fn planted_unmarked_sketches_are_found() {
    let text = "\
Before, as a sketch:

```js
const lock;
await lock;
```
After:

```rust
let lock;
```
Before:

```rust,ignore
let other;
```
";
    let found = unmarked_sketches(&Page::new("p.md", text));
    assert_eq!(found, ["p.md:15: let other;"]);
}
