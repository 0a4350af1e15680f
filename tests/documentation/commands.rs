//! Commands in blocks of code and in the text: programs, tests, features and scripts that they name.

use crate::markdown::{Page, Place};
use crate::{exists, files, packages, read};

/// The commands of a page that name what does not exist.
pub(crate) fn missing(page: &Page) -> Vec<String> {
    let mut found = Vec::new();
    for (place, command) in commands(page) {
        let missing = missing_names(&command);
        found.extend(missing.map(|what| format!("{place}: no {what} ({command})")));
    }
    found
}

/// The lines of shell blocks and the pieces of code in the text, with the lines joined that end with `\`.
fn commands(page: &Page) -> Vec<(String, String)> {
    let mut commands = Vec::new();
    let mut begun: Option<(String, String)> = None;
    for line in &page.lines {
        match &line.place {
            Place::Prose => {
                let spans = line.code_spans().map(str::to_owned);
                commands.extend(spans.map(|span| (page.place(line), span)));
            }
            Place::Code(language) if ["sh", "text", "console"].contains(&language.as_str()) => {
                let (place, mut text) = begun
                    .take()
                    .unwrap_or_else(|| (page.place(line), String::new()));
                // A comment ends with its line.
                let line = line.text.split(" #").next().unwrap_or_default();
                match line.strip_suffix('\\') {
                    Some(part) => {
                        text += part;
                        begun = Some((place, text));
                    }
                    None => commands.push((place, text + line)),
                }
            }
            Place::Code(_) => {}
        }
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
fn missing_names(command: &str) -> impl Iterator<Item = String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let packages = packages::selected(&words);
    let is_target = |kind, name| packages.iter().any(|package| package.has(kind, name));
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
                packages.iter().any(|package| package.is_named(name)),
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
                    let is_there = read(script).contains(&format!("    step {step} "));
                    expect(is_there, format!("step {step} in {script}"));
                }
            }
            "--manifest-path" => expect(exists(pair[1]), format!("file {}", pair[1])),
            "--features" => {
                for feature in pair[1].split(',') {
                    expect(is_feature(feature), format!("feature {feature}"));
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
    missing.into_iter()
}

fn is_name(word: &str) -> bool {
    word.chars().all(|c| c.is_ascii_lowercase())
}

fn is_feature(name: &str) -> bool {
    let manifest = read("Cargo.toml");
    let (_, features) = manifest.split_once("[features]").unwrap();
    let (features, _) = features.split_once("\n[").unwrap();
    features.lines().any(|line| {
        line.split_once(" = ")
            .is_some_and(|(feature, _)| feature == name)
    })
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
    files(&format!("tests/{program}")).iter().any(|path| {
        let in_module = module.is_empty() || path.contains(module);
        in_module
            && (path.contains(function)
                || read(path).split("fn ").any(|name| {
                    name.split('(')
                        .next()
                        .is_some_and(|name| name.contains(function))
                }))
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
    let found: Vec<&str> = found
        .iter()
        .map(|line| line.split(" (").next().unwrap())
        .collect();
    let expected = [
        "p.md:1: no example gone",
        "p.md:1: no script tests/gone.sh",
        "p.md:2: no step gone in .ci/run",
        "p.md:5: no test no_such_test in http",
        "p.md:6: no test program gone",
        "p.md:8: no feature gone",
        "p.md:10: no benchmark compare",
        "p.md:11: no package gone",
    ];
    assert_eq!(found, expected);
}
