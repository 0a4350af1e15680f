//! Places that share lines.

use std::collections::BTreeMap;

use crate::text::File;

/// A run of equal lines in two places.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Duplicate {
    pub(crate) first: String,
    pub(crate) second: String,
    pub(crate) lines: usize,
}

struct Line<'a> {
    file: &'a File,
    number: usize,
    text: &'a str,
}

/// The longest runs of at least `least` equal lines, wherever they begin.
///
/// Lines are compared without the spaces around them. Blank lines and `use` statements do not count and do not
/// end a run. All others count, also comments, attributes, tests and lines with nothing but a bracket.
/// A run does not go from one file into the next.
pub(crate) fn duplicates(files: &[File], least: usize) -> Vec<Duplicate> {
    let mut lines = Vec::new();
    for file in files {
        lines.extend(counted(file));
    }
    let equal = |one: usize, other: usize| {
        let (one, other) = (&lines[one], &lines[other]);
        one.text == other.text && !one.text.is_empty()
    };
    let mut places: BTreeMap<Vec<&str>, Vec<usize>> = BTreeMap::new();
    let mut found = Vec::new();
    for (second, window) in lines.windows(least).enumerate() {
        let texts: Vec<&str> = window.iter().map(|line| line.text).collect();
        if texts.contains(&"") {
            continue;
        }
        let firsts = places.entry(texts).or_default();
        for &first in firsts.iter() {
            let is_begun = first > 0 && equal(first - 1, second - 1);
            if is_begun || first + least > second {
                continue;
            }
            let rest =
                (0..lines.len() - second).take_while(|ahead| equal(first + ahead, second + ahead));
            found.push(Duplicate {
                first: lines[first].place(),
                second: lines[second].place(),
                lines: rest.count(),
            });
        }
        firsts.push(second);
    }
    found
}

impl Line<'_> {
    fn place(&self) -> String {
        format!("{}:{}", self.file.path.display(), self.number)
    }
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
