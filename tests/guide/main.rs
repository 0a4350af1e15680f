//! The guide: rustdoc has its pictures, and it names the messages and codes of the source.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]

use std::fs;
use std::path::{Path, PathBuf};

/// `tests/images.sh` writes these files.
#[test]
fn pictures_of_rustdoc_are_those_of_the_repository() {
    let pictures = files("docs/images", &["svg", "png"]);
    assert!(pictures.len() > 3, "{pictures:?}");
    for picture in pictures {
        let name = picture.file_stem().unwrap().to_str().unwrap();
        let is_svg = picture.extension().is_some_and(|kind| kind == "svg");
        let kind = if is_svg { "svg+xml" } else { "png" };
        let data = base64(&fs::read(&picture).unwrap());
        let expected = format!("[{name}]: data:image/{kind};base64,{data}\n");
        let written = read(&format!("src/guide/images/{name}.md"));
        assert!(written == expected, "run tests/images.sh: {name} differs");
    }
}

#[test]
fn messages_of_the_troubleshooting_chapter_are_those_of_the_source() {
    let source = unwrapped(&sources("src"));
    let chapter = read("docs/troubleshooting.md");
    let messages = chapter
        .split("\n# ")
        .find(|part| part.starts_with("By message"));
    let rows = messages
        .unwrap()
        .lines()
        .filter_map(|line| line.strip_prefix("| `"));
    let mut found = 0;
    for row in rows {
        let (message, _) = row.split_once("` |").unwrap();
        assert!(source.contains(message), "{message:?} is not in the source");
        found += 1;
    }
    assert!(found > 50, "{found}");
}

#[test]
fn codes_of_the_troubleshooting_chapter_are_all_codes_of_rejections() {
    let source = read("src/middleware/rejection.rs");
    let (_, code) = source.split_once("\ntable! {\n").unwrap();
    let (code, _) = code.split_once("\n}\n").unwrap();
    let codes = code.split('"').skip(1).step_by(2);
    // The titles begin with a capital letter.
    let codes = codes.filter(|text| text.starts_with(|c: char| c.is_ascii_lowercase()));
    let codes: Vec<&str> = codes.collect();
    assert!(codes.len() > 10, "{codes:?}");
    let chapter = read("docs/troubleshooting.md");
    let rows = chapter.lines().filter_map(|line| line.split(" | ").nth(1));
    let listed: Vec<&str> = rows
        .filter_map(|cell| cell.strip_prefix('`')?.strip_suffix('`'))
        .collect();
    for code in &codes {
        assert!(listed.contains(code), "{code} has no row");
    }
    for code in listed.iter().filter(|code| !code.contains(' ')) {
        assert!(codes.contains(code), "{code} is no code");
    }
}

/// String literals that go on in the next line, as the compiler reads them.
fn unwrapped(source: &str) -> String {
    let mut pieces = source.split("\\\n");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| text + piece.trim_start())
}

fn sources(folder: &str) -> String {
    let texts = files(folder, &["rs"]).into_iter();
    texts
        .map(|path| fs::read_to_string(path).unwrap())
        .collect()
}

fn files(folder: &str, extensions: &[&str]) -> Vec<PathBuf> {
    let mut folders = vec![root().join(folder)];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path
                .extension()
                .is_some_and(|kind| extensions.iter().any(|e| kind == *e))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or_default());
        let group = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let digit = DIGITS[(group >> (18 - 6 * at)) as usize & 63];
            text.push(if at > chunk.len() {
                '='
            } else {
                char::from(digit)
            });
        }
    }
    text
}
