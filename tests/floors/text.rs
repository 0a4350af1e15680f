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

/// All files below `folder` with this extension, in the order of their names.
pub(crate) fn read_files(folder: &Path, extension: &str) -> Vec<File> {
    let mut files = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(inner) = open.pop() {
        for entry in fs::read_dir(inner).expect("a readable folder") {
            let path = entry.expect("a readable folder").path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                let below = path.strip_prefix(folder).expect("is below");
                files.push(File {
                    path: below.to_owned(),
                    text: read(&path),
                });
            }
        }
    }
    files.sort_by(|one, other| one.path.cmp(&other.path));
    files
}

pub(crate) fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
