//! The architecture: which file of `src` may know which other, and how its files look.
//!
//! The crate is built in floors, each of which knows only those below it. The compiler accepts a floor that
//! reaches upwards, and files that import each other in a circle; these tests read the source text and do not.
//! They find nothing wrong also if they cannot read, so each proof has a second test, which plants what it
//! must find.

mod circles;
mod duplicates;
mod eyes;
mod imports;
mod modules;
mod text;
mod tokens;
mod words;

use std::path::{Path, PathBuf};

use crate::imports::Arrow;
use crate::modules::{Crate, Target};
use crate::text::{File, read, read_files};

/// From the bottom to the top.
const FLOORS: [&str; 8] = [
    "protocol",
    "node",
    "lock",
    "once",
    "middleware",
    "client",
    "extract",
    "idempotency",
];

/// A file that does not fit on a few screens wants to be two.
const MAX_LINES: usize = 600;

/// As many equal lines in two places are one function too few.
const EQUAL_LINES: usize = 8;

/// Subjects without a name. A few are right, such as the keyword of a quotation.
const NAMELESS: [&str; 4] = ["whoever", "somebody", "nobody", "anybody"];
const MAX_NAMELESS: usize = 5;

/// What several types may be called: the usual names inside a module, and the one that every middleware of tower
/// gives the public future of its service.
const SHARED_NAMES: [&str; 4] = ["Config", "Error", "State", "ResponseFuture"];

#[test]
fn the_protocol_imports_only_itself_and_std() {
    let external = dependencies(&read(&root().join("Cargo.toml")));
    assert!(external.iter().any(|name| name == "tokio"), "{external:?}");
    let krate = Crate::new(&sources());
    assert_eq!(foreign_imports(&krate, "protocol", &external), NONE);
}

#[test]
fn no_floor_imports_one_above_it() {
    let krate = Crate::new(&sources());
    assert_eq!(upward(&krate), NONE);
}

#[test]
fn no_file_of_a_floor_imports_another_in_a_circle() {
    let krate = Crate::new(&sources());
    let found = floor_circles(&krate);
    assert!(
        found.is_empty(),
        "{} circles:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn every_source_file_is_read() {
    let krate = Crate::new(&sources());
    let mut read: Vec<&PathBuf> = krate
        .modules
        .values()
        .map(|module| &krate.files[module.file])
        .collect();
    read.sort();
    read.dedup();
    // A file of tests belongs to a module that is compiled for tests only.
    let written: Vec<&PathBuf> = krate
        .files
        .iter()
        .filter(|path| !path.ends_with("tests.rs") && !path.iter().any(|name| name == "tests"))
        .collect();
    assert_eq!(read, written);
    assert!(imports::arrows(&krate).len() > written.len());
}

#[test]
fn no_two_places_share_eight_lines() {
    let files = sources_and_scripts();
    let found = duplicates::duplicates(&files, EQUAL_LINES);
    let shown = found.iter().map(|duplicate| {
        let (first, second) = (&duplicate.first, &duplicate.second);
        format!("{first} and {second}: {} lines", duplicate.lines)
    });
    let shown: Vec<String> = shown.collect();
    assert!(shown.is_empty(), "\n{}", shown.join("\n"));
}

#[test]
fn no_two_types_have_one_name() {
    let found = words::equal_types(&Crate::new(&sources()), &SHARED_NAMES);
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn subjects_without_a_name_stand_at_most_five_times_in_source_and_documentation() {
    let readme = File::new("../README.md", &read(&root().join("README.md")));
    let mut files = sources_and_scripts();
    files.extend(read_files(&root().join("docs"), "md"));
    files.push(readme);
    let found = words::whole_words(&files, &NAMELESS);
    assert!(
        found.len() <= MAX_NAMELESS,
        "{} times:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn the_lock_floor_mentions_no_records_fingerprints_or_replays() {
    let found = words::parts_of_words(
        &read_files(&root().join("src/lock"), "rs"),
        &["record", "fingerprint", "replay"],
        // A span of `tracing` has fields that are recorded.
        &[".record("],
    );
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn every_source_file_says_what_it_is_for() {
    for file in sources_and_scripts() {
        let is_script = file.path.extension().is_some_and(|found| found == "lua");
        let opening = if is_script { "-- " } else { "//! " };
        assert!(
            file.text.starts_with(opening),
            "{} does not begin with `{opening}`",
            file.path.display()
        );
    }
}

#[test]
fn no_source_file_is_longer_than_six_hundred_lines() {
    let files = sources_and_scripts();
    for file in files {
        let lines = file.text.lines().count();
        assert!(lines <= MAX_LINES, "{}: {lines} lines", file.path.display());
    }
}

/// Nothing found: tests compare with it, so that a failure prints what was found.
const NONE: [String; 0] = [];

/// What the files of a floor name that is neither on this floor nor in std.
fn foreign_imports(krate: &Crate, floor: &str, external: &[String]) -> Vec<String> {
    let mut wrong = Vec::new();
    for (path, module) in &krate.modules {
        if path.first().is_none_or(|first| first != floor) {
            continue;
        }
        let imports = module.imports.iter();
        let imports = imports.map(|import| (import.line, &import.path, true));
        let paths = module.paths.iter().map(|(line, path)| (*line, path, false));
        for (line, written, is_import) in imports.chain(paths) {
            let first = written[0].as_str();
            let is_wrong = match krate.resolve(path, written) {
                Some(Target::Item { file, .. }) => floor_of(krate, file) != Some(floor),
                Some(Target::Module(module) | Target::Hidden(module)) => {
                    module.first().is_none_or(|first| first != floor)
                }
                // A name in code may be a local one, so the list of the crates decides about it.
                None if is_import => !["std", "core"].contains(&first),
                None => external.iter().any(|name| name == first),
            };
            if is_wrong {
                let file = krate.files[module.file].display();
                wrong.push(format!("{file}:{line}: {}", written.join("::")));
            }
        }
    }
    wrong
}

/// The arrows from a floor to one above it, and to what belongs to no floor.
fn upward(krate: &Crate) -> Vec<String> {
    let level = |file| {
        let floor = floor_of(krate, file);
        floor.and_then(|floor| FLOORS.iter().position(|name| *name == floor))
    };
    let arrows = imports::arrows(krate);
    let upward = arrows.iter().filter(|arrow| {
        let (from, to) = (level(arrow.from), level(arrow.to));
        from.is_some() && to.is_none_or(|to| from < Some(to))
    });
    upward
        .map(|arrow| circles::shown_arrow(arrow, |file| krate.files[file].display().to_string()))
        .collect()
}

/// The circles in each floor, in words.
fn floor_circles(krate: &Crate) -> Vec<String> {
    let arrows = imports::arrows(krate);
    let mut shown = Vec::new();
    for floor in FLOORS {
        let is_inside = |file| floor_of(krate, file) == Some(floor);
        let inside = |arrow: &&Arrow| is_inside(arrow.from) && is_inside(arrow.to);
        let inside: Vec<Arrow> = arrows.iter().filter(inside).cloned().collect();
        let name = |file: usize| krate.files[file].display().to_string();
        let circles = circles::circles(&inside);
        shown.extend(circles.iter().map(|circle| circles::shown(circle, name)));
    }
    shown
}

/// The floor that a file is on; none for a file beside the floors.
fn floor_of(krate: &Crate, file: usize) -> Option<&'static str> {
    let first = krate.files[file].components().next()?;
    let name = Path::new(first.as_os_str()).file_stem()?;
    FLOORS.into_iter().find(|floor| name == *floor)
}

/// The names, as code spells them, of the crates that `Cargo.toml` lists.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut section = "";
    let mut names = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line.trim_matches(['[', ']']);
        } else if section.ends_with("dependencies")
            && let Some((name, _)) = line.split_once('=')
        {
            names.push(name.trim().replace('-', "_"));
        }
    }
    names
}

fn sources_and_scripts() -> Vec<File> {
    let mut files = sources();
    files.extend(read_files(&root().join("src"), "lua"));
    files
}

fn sources() -> Vec<File> {
    read_files(&root().join("src"), "rs")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
