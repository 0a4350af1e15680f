//! The architecture: which file of `src` may know which other, and how its files look.
//!
//! The crate is built in floors, each of which knows only those below it. The compiler accepts a floor that
//! reaches upwards, and files that import each other in a circle; these tests read the source text and do not.
//! They find nothing wrong also if they cannot read, so `eyes` plants what they must find.

mod duplicates;
mod eyes;
mod imports;
mod modules;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::imports::Arrow;
use crate::modules::Crate;
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
    assert_none(&external_paths(&krate(), FLOORS[0], &external));
}

#[test]
fn no_floor_imports_one_above_it() {
    assert_none(&upward(&krate()));
}

#[test]
fn no_file_of_a_floor_imports_another_in_a_circle() {
    assert_none(&floor_circles(&krate()));
}

#[test]
fn every_source_file_is_read() {
    let krate = krate();
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
    assert_none(&duplicates::duplicates(&sources_and_scripts(), EQUAL_LINES));
}

#[test]
fn no_two_types_have_one_name() {
    assert_none(&equal_types(&krate()));
}

#[test]
fn subjects_without_a_name_stand_at_most_five_times_in_source_and_documentation() {
    let readme = File::new("../README.md", &read(&root().join("README.md")));
    let mut files = sources_and_scripts();
    files.extend(read_files(&root().join("docs"), "md"));
    files.push(readme);
    let found = mentions(&files, &NAMELESS, None);
    assert!(found.len() <= MAX_NAMELESS, "\n{}", found.join("\n"));
}

#[test]
fn the_lock_floor_mentions_no_records_fingerprints_or_replays() {
    let files = read_files(&root().join("src/lock"), "rs");
    // A span of `tracing` has fields that are recorded.
    let found = mentions(
        &files,
        &["record", "fingerprint", "replay"],
        Some(".record("),
    );
    assert_none(&found);
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
    for file in sources_and_scripts() {
        let lines = file.text.lines().count();
        assert!(lines <= MAX_LINES, "{}: {lines} lines", file.path.display());
    }
}

#[track_caller]
fn assert_none(found: &[String]) {
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// What the files of a floor name of other crates.
fn external_paths(krate: &Crate, floor: &str, external: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for module in krate.modules.values() {
        let imports = module.imports.iter();
        let imports = imports.map(|import| (import.line, &import.path));
        let paths = module.paths.iter().map(|(line, path)| (*line, path));
        for (line, path) in imports.chain(paths) {
            if floor_of(krate, module.file) == Some(floor) && external.contains(&path[0]) {
                let file = krate.files[module.file].display();
                found.push(format!("{file}:{line}: {}", path.join("::")));
            }
        }
    }
    found
}

/// The arrows from a floor to one above it, and to what belongs to no floor.
fn upward(krate: &Crate) -> Vec<String> {
    let level = |file| {
        let floor = floor_of(krate, file);
        floor.and_then(|floor| FLOORS.iter().position(|name| *name == floor))
    };
    let arrows = imports::arrows(krate).into_iter().filter(|arrow| {
        let (from, to) = (level(arrow.from), level(arrow.to));
        from.is_some() && to.is_none_or(|to| from < Some(to))
    });
    arrows.map(|arrow| shown(krate, &arrow)).collect()
}

/// The imports inside of each floor that are part of circles.
fn floor_circles(krate: &Crate) -> Vec<String> {
    let mut inside: BTreeMap<&str, Vec<Arrow>> = BTreeMap::new();
    for arrow in imports::arrows(krate) {
        let floor = floor_of(krate, arrow.from);
        if floor == floor_of(krate, arrow.to) {
            inside
                .entry(floor.unwrap_or("beside"))
                .or_default()
                .push(arrow);
        }
    }
    let circular = inside.into_values().flat_map(imports::circular);
    circular.map(|arrow| shown(krate, &arrow)).collect()
}

/// `a.rs:3: Item of b.rs`.
fn shown(krate: &Crate, arrow: &Arrow) -> String {
    let [from, to] = [arrow.from, arrow.to].map(|file| krate.files[file].display());
    format!("{from}:{}: {} of {to}", arrow.line, arrow.item)
}

/// The places where one of `words` stands, in any case, also within a longer word, but not in `exception`.
fn mentions(files: &[File], words: &[&str], exception: Option<&str>) -> Vec<String> {
    let mut found = Vec::new();
    for file in files {
        for (at, line) in file.text.lines().enumerate() {
            let mut rest = line.to_lowercase();
            if let Some(exception) = exception {
                rest = rest.replace(exception, " ");
            }
            if words.iter().any(|word| rest.contains(word)) {
                found.push(format!(
                    "{}:{}: {}",
                    file.path.display(),
                    at + 1,
                    line.trim()
                ));
            }
        }
    }
    found
}

/// The structs, enums, traits and type aliases of one name in several files, apart from those of an allowed name.
fn equal_types(krate: &Crate) -> Vec<String> {
    let mut places: BTreeMap<&str, BTreeSet<&Path>> = BTreeMap::new();
    for module in krate.modules.values() {
        for item in module.items.iter().filter(|item| item.is_type) {
            let files = places.entry(&item.name).or_default();
            files.insert(&krate.files[module.file]);
        }
    }
    places.retain(|name, files| files.len() > 1 && !SHARED_NAMES.contains(name));
    let shared = places.iter();
    shared
        .map(|(name, files)| format!("{name}: {files:?}"))
        .collect()
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

fn krate() -> Crate {
    Crate::new(&sources())
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
