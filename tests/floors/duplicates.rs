//! Places that share lines.

use std::collections::BTreeMap;

use crate::text::File;

struct Line<'a> {
    file: &'a File,
    number: usize,
    text: &'a str,
}

/// The pairs of places at which the same `least` lines begin: several for a longer run.
///
/// Lines are compared without the spaces around them. Blank lines and `use` statements do not count and do not
/// end a run. All others count, also comments, attributes, tests and lines with nothing but a bracket.
/// A run does not go from one file into the next.
pub(crate) fn duplicates(files: &[File], least: usize) -> Vec<String> {
    let mut found = Vec::new();
    let lines: Vec<Line<'_>> = files.iter().flat_map(counted).collect();
    let mut places: BTreeMap<Vec<&str>, usize> = BTreeMap::new();
    for (second, window) in lines.windows(least).enumerate() {
        let texts: Vec<&str> = window.iter().map(|line| line.text).collect();
        let is_inside = !texts.contains(&"");
        let first = *places.entry(texts).or_insert(second);
        if is_inside && first + least <= second {
            let place =
                |at: usize| format!("{}:{}", lines[at].file.path.display(), lines[at].number);
            found.push(format!("{} and {}", place(first), place(second)));
        }
    }
    found
}

/// The lines of a file that count, and an empty one behind them.
fn counted(file: &File) -> Vec<Line<'_>> {
    let mut lines = Vec::new();
    let mut is_import = false;
    for (at, text) in file.text.lines().enumerate() {
        let text = text.trim();
        let words = text.trim_start_matches("pub(crate) ");
        is_import |= words.trim_start_matches("pub ").starts_with("use ");
        if !text.is_empty() && !is_import {
            let number = at + 1;
            lines.push(Line { file, number, text });
        }
        is_import &= !text.ends_with(';');
    }
    let (number, text) = (0, "");
    lines.push(Line { file, number, text });
    lines
}
