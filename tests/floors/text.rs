//! Reads the files of a folder, and blanks out what is no code of the crate.

use std::fs;
use std::path::{Path, PathBuf};

/// One file with its path below the folder it was read from.
pub(crate) struct File {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl File {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let (path, text) = (path.into(), text.to_owned());
        Self { path, text }
    }
}

/// All files below `folder` with this extension, in the order of their names; none without the folder.
pub(crate) fn read_files(folder: &Path, extension: &str) -> Vec<File> {
    let below = |path: &Path| path.strip_prefix(folder).expect("is below").to_owned();
    let mut paths = Vec::new();
    push_paths(folder, &mut paths);
    paths.sort();
    paths
        .iter()
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .map(|path| File {
            path: below(path),
            text: read(path),
        })
        .collect()
}

fn push_paths(folder: &Path, paths: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            push_paths(&path, paths);
        } else {
            paths.push(path);
        }
    }
}

pub(crate) fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The code of a Rust file: without comments, literals, tests and `cfg_attr`. Lines stay lines.
pub(crate) fn code(text: &str) -> String {
    without_gated_items(&without_comments_and_literals(text))
}

/// Blanks out comments and the insides of string and character literals.
fn without_comments_and_literals(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let follows_word = code.ends_with(is_word);
        let skipped = match c {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => block_comment(rest),
            '"' => string(rest),
            'r' if !follows_word => raw_string(rest),
            'b' if !follows_word && rest.starts_with("br") => raw_string(&rest[1..]),
            '\'' => char_literal(rest),
            _ => 0,
        };
        if skipped == 0 {
            code.push(c);
            rest = &rest[c.len_utf8()..];
        } else {
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
    let blanks: String = code[start..end].chars().map(blank).collect();
    code.replace_range(start..end, &blanks);
}

fn blank(c: char) -> char {
    if c == '\n' { '\n' } else { ' ' }
}

pub(crate) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
