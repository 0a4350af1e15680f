//! The architecture: which part of `src` may know which other, and how its files look.
//!
//! The crate is built in floors, each of which knows only those below it:
//! `protocol` < `node` < `lock` < `middleware` < `extract` < `idempotency`. The compiler does not mind a floor that
//! reaches upwards, so these tests read the source text and do.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// From the bottom to the top.
const FLOORS: [&str; 6] = [
    "protocol",
    "node",
    "lock",
    "middleware",
    "extract",
    "idempotency",
];

/// A file that does not fit on a few screens wants to be two.
const MAX_LINES: usize = 600;

#[test]
fn the_protocol_imports_only_itself_and_std() {
    let external = dependencies();
    assert!(external.iter().any(|name| name == "tokio"), "{external:?}");
    let allowed = ["crate", "self", "super", "std", "core"];
    let mut wrong = Vec::new();
    for file in rust_files("protocol") {
        for (line, path) in file.crate_paths() {
            if first_segment(&path) != "protocol" {
                wrong.push(format!("{}:{line}: crate::{path}", file.shown()));
            }
        }
        for (line, path) in file.imports() {
            let root = first_segment(path.trim_start_matches("::"));
            if !allowed.contains(&root) && !file.declares(root) {
                wrong.push(format!("{}:{line}: use {path}", file.shown()));
            }
        }
        // A crate can also be named where it is used.
        for (line, root) in file.path_roots() {
            if external.contains(&root) {
                wrong.push(format!("{}:{line}: {root}::", file.shown()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_floor_imports_one_above_it() {
    let reexports = reexports(&read(&src().join("lib.rs")));
    let mut wrong = Vec::new();
    for (level, floor) in FLOORS.iter().enumerate() {
        for file in rust_files(floor) {
            for (line, path) in file.crate_paths() {
                let name = first_segment(&path);
                // What the crate root re-exports still lives on its floor.
                let home = reexports.get(name).map_or(name, String::as_str);
                if FLOORS[level + 1..].contains(&home) {
                    wrong.push(format!("{}:{line}: crate::{path}", file.shown()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_source_file_says_what_it_is_for() {
    for path in files(&src()) {
        let opening = match extension(&path) {
            "rs" => "//! ",
            "lua" => "-- ",
            _ => continue,
        };
        let text = read(&path);
        assert!(
            text.starts_with(opening),
            "{} does not begin with `{opening}`",
            path.display()
        );
    }
}

#[test]
fn no_source_file_is_longer_than_six_hundred_lines() {
    for path in files(&src()) {
        let lines = read(&path).lines().count();
        assert!(lines <= MAX_LINES, "{}: {lines} lines", path.display());
    }
}

/// These tests find nothing wrong also if they cannot read; so their eyes are tested first.
#[test]
fn the_reader_sees_code_and_overlooks_comments_texts_and_tests() {
    let text = r##"
//! [`crate::comment`] and use crate::comment;
use crate::{alpha::Item, beta::{self, Other}, Gamma};
use crate::delta;
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
fn f<'a>(c: char) -> &'a str { /* crate::comment /* crate::nested */ */ crate::epsilon::g("crate::text") }
const RAW: &str = r#"crate::raw " crate::raw"#; const Q: char = '"'; fn h() { super::super::zeta::k(tokio::x) }
pub(crate) use super::super::eta;
#[cfg(test)]
use crate::for_tests;
#[cfg(test)]
mod tests { use crate::tests; fn x() { "}" } }
mod theta { pub(in crate::iota) fn y() { std::mem::drop::<crate::kappa::T>(1) } }
"##;
    let file = Source::new("protocol/some.rs".into(), text);
    let seen: Vec<String> = file
        .crate_paths()
        .into_iter()
        .map(|(line, path)| format!("{line} {}", first_segment(&path)))
        .collect();
    let expected = [
        "3 alpha",
        "3 beta",
        "3 Gamma",
        "4 delta",
        "6 epsilon",
        "7 zeta",
        "8 eta",
        "13 iota",
        "13 kappa",
    ];
    assert_eq!(seen, expected);
    let roots: Vec<String> = file
        .path_roots()
        .into_iter()
        .map(|(_, root)| root)
        .collect();
    assert!(roots.contains(&"tokio".to_owned()) && roots.contains(&"std".to_owned()));
    assert!(!roots.contains(&"serde".to_owned()) && !roots.contains(&"zeta".to_owned()));
    let imports: Vec<String> = file.imports().into_iter().map(|(_, path)| path).collect();
    assert_eq!(imports.len(), 3, "{imports:?}");

    let names = reexports("pub use lock::{guard::Guard, Lock as Mutex};\npub use crate::node::N;");
    let homes = |name: &str| names.get(name).map(String::as_str);
    assert_eq!(homes("Guard"), Some("lock"));
    assert_eq!(homes("Mutex"), Some("lock"));
    assert_eq!(homes("N"), Some("node"));
}

/// One Rust file, with everything blanked out that is not code of the crate itself.
struct Source {
    /// The path below `src`.
    path: PathBuf,
    code: String,
}

impl Source {
    fn new(path: PathBuf, text: &str) -> Self {
        let code = without_gated_items(&without_comments_and_texts(text));
        Self { path, code }
    }

    fn shown(&self) -> String {
        format!("src/{}", self.path.display())
    }

    /// All paths from the crate's root with their line, however they are spelled.
    fn crate_paths(&self) -> Vec<(usize, String)> {
        let mut paths = Vec::new();
        for (at, _) in self.code.match_indices("crate::") {
            if !continues_a_word(&self.code, at) {
                self.push_paths(at, at + "crate::".len(), &mut paths);
            }
        }
        // `super::super::…` reaches the root as well, once there are enough of them.
        let mut at = 0;
        while let Some(found) = self.code[at..].find("super::") {
            let start = at + found;
            let mut end = start;
            let mut supers = 0;
            while self.code[end..].starts_with("super::") {
                end += "super::".len();
                supers += 1;
            }
            at = end;
            if supers >= self.depth() {
                self.push_paths(start, end, &mut paths);
            }
        }
        paths.sort_by_key(|(line, _)| *line);
        paths
    }

    /// How many `super`s lead from this file's module to the root.
    fn depth(&self) -> usize {
        let stem = self.path.file_stem().and_then(|stem| stem.to_str());
        self.path.components().count() - usize::from(stem == Some("mod"))
    }

    /// Takes the path that goes on at `rest`, or each one of a group in braces.
    fn push_paths(&self, at: usize, rest: usize, paths: &mut Vec<(usize, String)>) {
        let line = self.line(at);
        let rest = &self.code[rest..];
        if let Some(group) = rest.strip_prefix('{') {
            paths.extend(members(group).into_iter().map(|member| (line, member)));
        } else {
            let end = rest.find(|c: char| !is_word(c) && c != ':');
            paths.push((line, rest[..end.unwrap_or(rest.len())].to_owned()));
        }
    }

    /// What follows each `use`, up to the semicolon.
    fn imports(&self) -> Vec<(usize, String)> {
        self.code
            .match_indices("use ")
            .filter(|(at, _)| !continues_a_word(&self.code, *at))
            .filter_map(|(at, _)| {
                let path = self.code[at + "use ".len()..].split(';').next()?.trim();
                // `impl Trait + use<'a>` has no path.
                (!path.starts_with('<')).then(|| (self.line(at), path.to_owned()))
            })
            .collect()
    }

    /// Whether the file has a module of that name; an import of one may leave out `self::`.
    fn declares(&self, module: &str) -> bool {
        [';', ' ']
            .iter()
            .any(|end| self.code.contains(&format!("mod {module}{end}")))
    }

    /// The first words of all paths.
    fn path_roots(&self) -> Vec<(usize, String)> {
        self.code
            .match_indices("::")
            .filter_map(|(at, _)| {
                let before = &self.code[..at];
                let start = before.rfind(|c| !is_word(c)).map_or(0, |end| end + 1);
                let inner = before[..start].ends_with("::")
                    && before[..start - 2].ends_with(|c: char| is_word(c) || c == '>');
                (!inner && start < at).then(|| (self.line(at), before[start..].to_owned()))
            })
            .collect()
    }

    fn line(&self, at: usize) -> usize {
        self.code[..at].matches('\n').count() + 1
    }
}

/// The members of a group in braces, whose opening one is gone, without going into nested ones.
fn members(group: &str) -> Vec<String> {
    let mut members = vec![String::new()];
    let mut depth = 0;
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => members.push(String::new()),
            _ => {}
        }
        if c != ',' || depth > 0 {
            members.last_mut().expect("starts with one").push(c);
        }
    }
    let members = members.iter().map(|member| member.trim().to_owned());
    members.filter(|member| !member.is_empty()).collect()
}

/// Which floor each name comes from that the crate root re-exports.
fn reexports(lib: &str) -> BTreeMap<String, String> {
    let lib = Source::new("lib.rs".into(), lib);
    let mut homes = BTreeMap::new();
    for (_, path) in lib.imports() {
        let path = path
            .trim_start_matches("crate::")
            .trim_start_matches("self::");
        let home = first_segment(path).to_owned();
        for name in path.split([',', '{', '}']) {
            let name = name.rsplit([':', ' ']).find(|word| !word.is_empty());
            homes.extend(name.map(|name| (name.to_owned(), home.clone())));
        }
    }
    homes
}

/// The names, as code spells them, of the crates that `Cargo.toml` lists.
fn dependencies() -> Vec<String> {
    let manifest = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"));
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

/// Blanks out comments and the insides of string and character literals; lines stay lines.
fn without_comments_and_texts(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let word_before = code.ends_with(is_word);
        let skipped = match c {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => block_comment(rest),
            '"' => string(rest),
            'r' if !word_before => raw_string(rest),
            'b' if !word_before && rest.starts_with("br") => raw_string(&rest[1..]),
            '\'' => char_literal(rest),
            _ => 0,
        };
        if skipped == 0 {
            code.push(c);
            rest = &rest[c.len_utf8()..];
        } else {
            let blank = |c: char| if c == '\n' { '\n' } else { ' ' };
            code.extend(rest[..skipped].chars().map(blank));
            rest = &rest[skipped..];
        }
    }
    code
}

/// The length of the comment that the text begins with; they nest.
fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    for (at, _) in text.char_indices() {
        if text[at..].starts_with("/*") {
            depth += 1;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            if depth == 0 {
                return at + 2;
            }
        }
    }
    text.len()
}

fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !escaped => return at + 1,
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

/// The length of the raw string that the text begins with; 0 if it is only a word with an `r`.
fn raw_string(text: &str) -> usize {
    let body = text[1..].trim_start_matches('#');
    if !body.starts_with('"') {
        return 0;
    }
    let hashes = text.len() - 1 - body.len();
    let close = format!("\"{}", "#".repeat(hashes));
    let start = 1 + hashes + 1;
    let end = text[start..].find(&close);
    end.map_or(text.len(), |end| start + end + close.len())
}

/// The length of the character that the text begins with; 0 if it is a lifetime.
fn char_literal(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((at, _))) => {
            let rest = &text[at + 1..];
            at + 1 + rest.find('\'').map_or(rest.len(), |end| end + 1)
        }
        (_, Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

/// Blanks out what is compiled for tests only, and attributes with `cfg_attr`: those may name a
/// crate that an optional feature brings.
fn without_gated_items(code: &str) -> String {
    let mut code = code.to_owned();
    // Text inside of literals is blank by now, so brackets match.
    while let Some(start) = code.find("#[cfg_attr(") {
        let end = start + closing(&code[start + 1..], '[', ']') + 1;
        blank_out(&mut code, start, end);
    }
    while let Some(start) = code.find("#[cfg(test)]") {
        let rest = &code[start..];
        let semicolon = rest.find(';').unwrap_or(rest.len());
        let brace = rest.find('{').unwrap_or(rest.len());
        let end = if brace < semicolon {
            start + brace + closing(&rest[brace..], '{', '}')
        } else {
            start + semicolon
        };
        blank_out(&mut code, start, end);
    }
    code
}

/// Where the bracket closes that the text begins with.
fn closing(text: &str, open: char, close: char) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        if c == open {
            depth += 1;
        } else if c == close {
            depth -= 1;
            if depth == 0 {
                return at + 1;
            }
        }
    }
    text.len()
}

fn blank_out(code: &mut String, start: usize, end: usize) {
    let end = end.min(code.len());
    let blank: String = code[start..end]
        .chars()
        .map(|c| if c == '\n' { '\n' } else { ' ' })
        .collect();
    code.replace_range(start..end, &blank);
}

fn first_segment(path: &str) -> &str {
    path.split(|c| !is_word(c)).next().unwrap_or_default()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn continues_a_word(code: &str, at: usize) -> bool {
    code[..at].ends_with(is_word)
}

/// The files of one floor, without those that hold only tests; none if the folder does not exist.
fn rust_files(floor: &str) -> Vec<Source> {
    let src = src();
    files(&src.join(floor))
        .into_iter()
        .filter(|path| extension(path) == "rs" && !path.ends_with("tests.rs"))
        .map(|path| {
            let text = read(&path);
            let below = path.strip_prefix(&src).expect("is in src");
            Source::new(below.into(), &text)
        })
        .collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn extension(path: &Path) -> &str {
    path.extension()
        .and_then(|ext| ext.to_str())
        .unwrap_or_default()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
