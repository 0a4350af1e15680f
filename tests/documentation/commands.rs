//! Commands in blocks of code and in the text: programs, tests, features and scripts that they name.

use crate::markdown::Page;
use crate::{exists, files, packages, read};

/// The commands of a page that name what does not exist.
pub(crate) fn missing(page: &Page) -> Vec<String> {
    let mut found = Vec::new();
    for (line, command) in commands(page) {
        let place = page.place(line);
        let missing = missing_names(&command).into_iter();
        found.extend(missing.map(|what| format!("{place}: no {what} ({command})")));
    }
    found
}

/// The lines of shell blocks, with the line of their block, and the pieces of code in the text.
fn commands(page: &Page) -> Vec<(usize, String)> {
    let mut commands = page.spans.clone();
    let is_shell = |language: &str| ["sh", "text", "console"].contains(&language);
    for block in page.blocks.iter().filter(|block| is_shell(&block.language)) {
        let joined = block.text.replace("\\\n", "");
        // A comment ends with its line.
        let lines = joined.lines().filter_map(|line| line.split(" #").next());
        commands.extend(lines.map(|line| (block.line, line.to_owned())));
    }
    commands.retain(|(_, command)| command.split_whitespace().any(is_program));
    commands
}

fn is_program(word: &str) -> bool {
    word == "cargo" || is_script(word)
}

fn is_script(word: &str) -> bool {
    let is_below = ["tests/", "benches/", "./tests/"]
        .iter()
        .any(|folder| word.starts_with(folder));
    is_check(word) || is_below && word.ends_with(".sh")
}

/// The scripts whose arguments are names of their steps.
fn is_check(word: &str) -> bool {
    [".ci/run", ".ci/weekly"].contains(&word)
}

/// What a command names that does not exist.
fn missing_names(command: &str) -> Vec<String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let packages = packages::selected(&words);
    let is_target = |kind, name| {
        packages
            .iter()
            .any(|package| packages::has(package, kind, name))
    };
    let mut missing = Vec::new();
    let mut expect = |is_there: bool, what: String| {
        if !is_there {
            missing.push(what);
        }
    };
    let mut tests = Vec::new();
    for pair in words.windows(2) {
        let name = pair[1].trim_matches(|c: char| !c.is_alphanumeric());
        match pair[0] {
            "-p" => expect(
                packages.iter().any(|package| package["name"] == name),
                format!("package {name}"),
            ),
            "--example" => expect(is_target("example", name), format!("example {name}")),
            "--bench" => expect(is_target("bench", name), format!("benchmark {name}")),
            "--test" => {
                expect(is_target("test", name), format!("test program {name}"));
                tests.push(name);
            }
            script if is_check(script) && is_name(pair[1]) => {
                let steps = words.iter().skip_while(|word| **word != script).skip(1);
                for step in steps.take_while(|word| is_name(word)) {
                    let is_there = ["step", "step_beside"]
                        .iter()
                        .any(|command| read(script).contains(&format!("    {command} {step} ")));
                    expect(is_there, format!("step {step} in {script}"));
                }
            }
            "--manifest-path" => expect(exists(pair[1]), format!("file {}", pair[1])),
            "--features" => {
                for feature in pair[1].split(',') {
                    expect(packages::is_feature(feature), format!("feature {feature}"));
                }
            }
            _ => {}
        }
    }
    for word in words.iter().filter(|word| is_script(word)) {
        expect(
            exists(word.trim_start_matches("./")),
            format!("script {word}"),
        );
    }
    if words.contains(&"test") && !tests.is_empty() {
        for filter in filters(&words) {
            let is_there = tests.iter().any(|test| has_test(test, filter));
            expect(is_there, format!("test {filter} in {}", tests.join(", ")));
        }
    }
    missing
}

fn is_name(word: &str) -> bool {
    word.chars().all(|c| c.is_ascii_lowercase())
}

/// The names of tests that `cargo test` is to run: words that belong to no option.
fn filters<'a>(words: &[&'a str]) -> Vec<&'a str> {
    let with_value = [
        "--test",
        "--features",
        "--example",
        "--bench",
        "--manifest-path",
        "-p",
    ];
    let start = words.iter().position(|word| *word == "test").unwrap() + 1;
    let mut filters = Vec::new();
    let mut words = words[start..].iter();
    while let Some(word) = words.next() {
        if with_value.contains(word) {
            words.next();
        } else if !word.starts_with('-')
            && word
                .chars()
                .all(|c| c.is_alphanumeric() || c == '_' || c == ':')
        {
            filters.push(*word);
        }
    }
    filters
}

/// Whether a program of tests has a module or a function with this in its name.
fn has_test(program: &str, filter: &str) -> bool {
    let filter = filter.trim_end_matches(':');
    let (module, function) = filter.rsplit_once("::").unwrap_or(("", filter));
    let has_function = |text: &str| {
        let mut names = text.split("fn ").filter_map(|item| item.split('(').next());
        names.any(|name| name.contains(function))
    };
    let mut files = files(&format!("tests/{program}")).into_iter();
    files.any(|path| {
        path.contains(module) && (path.contains(function) || has_function(&read(&path)))
    })
}

#[test]
fn planted_missing_names_are_found() {
    let text = "\
`cargo run --example quickstart` `cargo run -q --example gone` `tests/run.sh` `tests/gone.sh --all`
`.ci/run docs gone` `.ci/weekly typos`
```sh
cargo test -p tests --test http rejections   # --example comment
cargo test -p tests --test http no_such_test
cargo test \\
--test gone -- --nocapture
cargo check --no-default-features --features redis,gone
cargo bench -p benches --bench compare -- w1
cargo bench --bench compare -- w1
cargo test -p gone
```
```rust
// cargo run --example in_rust
```
";
    let found = missing(&Page::new("p.md", text));
    let expected = [
        "1: no example gone (cargo run -q --example gone)",
        "1: no script tests/gone.sh (tests/gone.sh --all)",
        "2: no step gone in .ci/run (.ci/run docs gone)",
        "3: no test no_such_test in http (cargo test -p tests --test http no_such_test)",
        "3: no test program gone (cargo test --test gone -- --nocapture)",
        "3: no feature gone (cargo check --no-default-features --features redis,gone)",
        "3: no benchmark compare (cargo bench --bench compare -- w1)",
        "3: no package gone (cargo test -p gone)",
    ];
    assert_eq!(found, expected.map(|line| format!("p.md:{line}")));
}
