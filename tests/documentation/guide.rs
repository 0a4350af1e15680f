//! The guide: rustdoc has its pictures, and the troubleshooting chapter names the messages and codes of the source.

use std::fs;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::{files, read, root};

/// `tests/images.sh` writes these files.
#[test]
fn pictures_of_rustdoc_are_those_of_the_repository() {
    let pictures = files("docs/images");
    assert!(pictures.len() > 3, "{pictures:?}");
    for picture in pictures {
        let (path, extension) = picture.rsplit_once('.').unwrap();
        let name = path.strip_prefix("docs/images/").unwrap();
        let kind = match extension {
            "svg" => "svg+xml",
            "png" => "png",
            _ => continue,
        };
        let data = STANDARD.encode(fs::read(root().join(&picture)).unwrap());
        let expected = format!("[{name}]: data:image/{kind};base64,{data}\n");
        let written = read(&format!("src/guide/images/{name}.md"));
        assert!(written == expected, "run tests/images.sh: {name} differs");
    }
}

#[test]
fn messages_of_the_troubleshooting_chapter_are_those_of_the_source() {
    let sources = files("src").into_iter();
    let sources = sources.filter(|path| path.ends_with(".rs"));
    let sources: Vec<String> = sources.map(|path| read(&path)).collect();
    let source = unwrapped(&sources.concat());
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
