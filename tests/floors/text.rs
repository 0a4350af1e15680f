//! Reads the files of a folder.

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

pub(crate) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
