//! Words in texts, and names of types.

use std::collections::BTreeMap;

use crate::modules::Crate;
use crate::text::{File, is_word};

/// The places where one of `words` stands as a word of its own, in any case: `path:line: word`.
pub(crate) fn whole_words(files: &[File], words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (place, line) in lines(files) {
        let written = line.split(|c| !is_word(c));
        let matching = written.filter(|word| words.contains(&word.to_lowercase().as_str()));
        found.extend(matching.map(|word| format!("{place}: {word}")));
    }
    found
}

/// The places where one of `parts` stands, in any case, also within a longer word.
///
/// `exceptions` are taken out of the line first.
pub(crate) fn parts_of_words(files: &[File], parts: &[&str], exceptions: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (place, line) in lines(files) {
        let mut rest = line.to_lowercase();
        for exception in exceptions {
            rest = rest.replace(exception, "");
        }
        if parts.iter().any(|part| rest.contains(part)) {
            found.push(format!("{place}: {}", line.trim()));
        }
    }
    found
}

fn lines(files: &[File]) -> impl Iterator<Item = (String, &str)> {
    files.iter().flat_map(|file| {
        let lines = file.text.lines().enumerate();
        lines.map(|(at, line)| (format!("{}:{}", file.path.display(), at + 1), line))
    })
}

/// The structs, enums, traits and type aliases of one name, apart from those of an allowed name.
///
/// Two in one file that both have a `cfg` count as one: only one of them is compiled.
pub(crate) fn equal_types(krate: &Crate, allowed: &[&str]) -> Vec<String> {
    let mut places: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut conditional = Vec::new();
    for module in krate.modules.values() {
        for item in &module.items {
            let is_type =
                ["struct", "enum", "union", "trait", "type"].contains(&item.kind.as_str());
            let name = item.name.as_str();
            let is_alternative = item.is_conditional && conditional.contains(&(module.file, name));
            if !is_type || allowed.contains(&name) || is_alternative {
                continue;
            }
            if item.is_conditional {
                conditional.push((module.file, name));
            }
            let file = krate.files[module.file].display();
            let place = format!("{file}:{}", item.line);
            places.entry(name).or_default().push(place);
        }
    }
    let shared = places.into_iter().filter(|(_, places)| places.len() > 1);
    shared
        .map(|(name, places)| format!("{name}: {}", places.join(", ")))
        .collect()
}
