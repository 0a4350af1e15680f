//! What the proofs see of texts in which something is planted.

use crate::circles;
use crate::duplicates::{Duplicate, duplicates};
use crate::modules::{Crate, Target};
use crate::text::File;
use crate::words::{equal_types, parts_of_words, whole_words};
use crate::{NONE, dependencies, floor_circles, foreign_imports, upward};

fn files(texts: &[(&str, &str)]) -> Vec<File> {
    let files = texts.iter();
    files.map(|(path, text)| File::new(path, text)).collect()
}

fn krate(texts: &[(&str, &str)]) -> Crate {
    Crate::new(&files(texts))
}

#[test]
fn the_reader_sees_code_and_overlooks_comments_literals_and_tests() {
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
mod theta { pub(in crate::iota) fn y() { std::mem::drop::<crate::kappa::T>(1); let q = '\''; } }
"##;
    let krate = krate(&[
        ("lib.rs", "mod protocol;"),
        ("protocol/mod.rs", "mod some;"),
        ("protocol/some.rs", text),
    ]);
    let mut seen = Vec::new();
    for module in krate.modules.values().filter(|module| module.file == 2) {
        let imports = module.imports.iter();
        let imports = imports.map(|import| (import.line, import.path.join("::")));
        seen.extend(imports);
        let paths = module.paths.iter();
        seen.extend(paths.map(|(line, path)| (*line, path.join("::"))));
    }
    seen.sort();
    let seen: Vec<String> = seen
        .iter()
        .map(|(line, path)| format!("{line} {path}"))
        .collect();
    let expected = [
        "3 crate::Gamma",
        "3 crate::alpha::Item",
        "3 crate::beta",
        "3 crate::beta::Other",
        "4 crate::delta",
        "6 crate::epsilon::g",
        "7 super::super::zeta::k",
        "7 tokio::x",
        "8 super::super::eta",
        "13 crate::iota",
        "13 crate::kappa::T",
        "13 std::mem::drop",
    ];
    assert_eq!(seen, expected);
}

#[test]
fn the_reader_follows_re_exports_renames_globs_and_modules() {
    let krate = krate(&[
        (
            "lib.rs",
            "mod lock; mod node; pub use lock::{guard::Guard, Lock as Mutex}; pub mod key { pub use crate::node::Node as Key; }",
        ),
        (
            "lock/mod.rs",
            "mod guard; pub use self::inner::*; mod inner { pub use super::guard::*; pub struct Inner; }",
        ),
        (
            "lock/guard.rs",
            "pub struct Guard; pub type Lock = Guard; pub(crate) fn guard() {}",
        ),
        (
            "node.rs",
            "pub mod redis; pub use crate::node::redis::lane::Node; pub trait Own {}",
        ),
        ("node/redis.rs", "pub(crate) mod lane { pub struct Node; }"),
        ("unused.rs", "pub struct Unused;"),
    ]);
    let names = [
        ("crate::Guard", "lock/guard.rs Guard"),
        ("crate::Mutex", "lock/guard.rs Lock"),
        ("crate::Mutex::new", "lock/guard.rs Lock"),
        ("crate::lock::Inner", "lock/mod.rs Inner"),
        ("crate::lock::guard", "module lock::guard"),
        ("crate::lock::guard::guard", "lock/guard.rs guard"),
        ("crate::lock::inner::Guard", "lock/guard.rs Guard"),
        ("crate::lock::Guard::is_valid", "lock/guard.rs Guard"),
        ("crate::key::Key", "node/redis.rs Node"),
        ("super::node::Node", "node/redis.rs Node"),
        ("self::guard::macro_made", "hidden lock::guard"),
        ("std::fmt", "none"),
        ("unused::Unused", "none"),
    ];
    for (written, expected) in names {
        let path: Vec<String> = written.split("::").map(str::to_owned).collect();
        let seen = match krate.resolve(&["lock".to_owned()], &path) {
            Some(Target::Item { file, name }) => {
                format!("{} {name}", krate.files[file].display())
            }
            Some(Target::Module(module)) => format!("module {}", module.join("::")),
            Some(Target::Hidden(module)) => format!("hidden {}", module.join("::")),
            None => "none".to_owned(),
        };
        assert_eq!(seen, expected, "{written}");
    }
}

#[test]
fn a_protocol_that_names_another_floor_or_crate_is_seen() {
    let external = dependencies("[package]\nname = \"x\"\n[dev-dependencies]\ntokio-util = \"1\"");
    assert_eq!(external, ["tokio_util"]);
    let krate = krate(&[
        ("lib.rs", "mod protocol; mod node; pub use node::Node;"),
        ("node.rs", "pub struct Node;"),
        (
            "protocol.rs",
            "use std::fmt;\nuse inner::A;\nuse bytes::Bytes;\nuse crate::Node;\nuse super::node as n;\n\
             fn f() { tokio_util::x(); fmt::y(); A::z() }\nmod inner { pub struct A; }",
        ),
    ]);
    let expected = [
        "protocol.rs:3: bytes::Bytes",
        "protocol.rs:4: crate::Node",
        "protocol.rs:5: super::node",
        "protocol.rs:6: tokio_util::x",
    ];
    assert_eq!(foreign_imports(&krate, "protocol", &external), expected);
}

#[test]
fn an_import_of_a_higher_floor_is_seen() {
    let krate = krate(&[
        (
            "lib.rs",
            "mod lock; mod once; mod guide; pub use once::Record as Renamed;",
        ),
        ("guide.rs", "pub fn g() {}"),
        ("lock/mod.rs", "mod a; pub use a::A;"),
        (
            "lock/a.rs",
            "use crate::Renamed;\npub struct A;\nfn f() { crate::once::record::g(); crate::guide::g() }",
        ),
        (
            "once/mod.rs",
            "pub mod record; pub use record::Record; use crate::lock::A;",
        ),
        (
            "once/record.rs",
            "pub struct Record; pub fn g() { super::super::lock::A::new() }",
        ),
    ]);
    let expected = ["lock/a.rs:3 g", "lock/a.rs:1 Record", "lock/a.rs:3 g"];
    let mut seen = upward(&krate);
    seen.sort();
    let mut expected = expected.map(str::to_owned);
    expected.sort();
    assert_eq!(seen, expected);
}

#[test]
fn a_circle_is_seen_through_re_exports_groups_inline_paths_and_globs() {
    let circle = |a: &str, b: &str| {
        let krate = krate(&[
            ("lib.rs", "mod lock;"),
            (
                "lock/mod.rs",
                "mod a; mod b; mod c; pub use self::{a::A, b::B, c::C};",
            ),
            ("lock/a.rs", a),
            ("lock/b.rs", b),
            ("lock/c.rs", "use crate::lock::A;\npub struct C(A);"),
        ]);
        floor_circles(&krate)
    };
    let direct = "lock/a.rs -> lock/b.rs -> lock/a.rs (lock/a.rs:1 B, lock/b.rs:2 A)";
    let b_needs_a = "pub struct B;\nfn f() { crate::lock::A::new() }";
    for a in [
        "use crate::lock::B; pub struct A;",
        "use crate::{lock::{B as Other}}; pub struct A;",
        "use super::b::B; pub struct A;",
        "use super::b; pub struct A(b::B);",
        "use crate::lock::*; pub struct A(B);",
        "pub struct A(crate::lock::B);",
        "pub struct A(super::B);",
        "pub use super::b::B; pub struct A(B);",
        "pub struct A; fn f() { use crate::lock::B; B::new() }",
        "pub mod inner { use super::super::B; } pub struct A;",
    ] {
        assert_eq!(circle(a, b_needs_a), [direct], "{a}");
    }
    // Not for a test, not for a re-export alone, not from a comment.
    for a in [
        "#[cfg(test)] mod tests { use crate::lock::B; } pub struct A;",
        "pub use super::b::B; pub struct A;",
        "// crate::lock::B\npub struct A;",
        "use super::b; pub struct A;",
    ] {
        assert_eq!(circle(a, b_needs_a), NONE, "{a}");
    }
    // Through a third file.
    let through = "lock/a.rs -> lock/b.rs -> lock/c.rs -> lock/a.rs \
                   (lock/a.rs:1 B, lock/b.rs:1 C, lock/c.rs:1 A)";
    let seen = circle(
        "use crate::lock::B; pub struct A;",
        "pub struct B(super::C);",
    );
    assert_eq!(seen, [through]);
}

#[test]
fn a_module_that_has_items_is_part_of_a_circle_with_its_children_and_a_title_page_is_not() {
    let circle = |parent: &str| {
        let krate = krate(&[
            ("lib.rs", "mod lock;"),
            ("lock/mod.rs", "pub mod lane;"),
            ("lock/lane.rs", parent),
            (
                "lock/lane/status.rs",
                "use super::timer::Timer;\npub struct Status;",
            ),
            ("lock/lane/timer.rs", "use super::Lane;\npub struct Timer;"),
        ]);
        floor_circles(&krate)
    };
    let seen = circle("mod status; mod timer;\npub use timer::Lane; pub use status::Status;");
    assert_eq!(seen, NONE);
    let seen = circle("mod status; mod timer;\nuse status::Status; pub struct Lane(Status);");
    let expected = "lock/lane.rs -> lock/lane/status.rs -> lock/lane/timer.rs -> lock/lane.rs \
                    (lock/lane.rs:2 Status, lock/lane/status.rs:1 Timer, lock/lane/timer.rs:1 Lane)";
    assert_eq!(seen, [expected]);
}

#[test]
fn a_type_whose_methods_call_each_other_across_files_is_a_circle() {
    let krate = krate(&[
        ("lib.rs", "mod lock;"),
        ("lock/mod.rs", "mod task; mod hold;"),
        (
            "lock/task.rs",
            "pub struct Task<T>(T);\nimpl<T: Fn() -> u8> Task<T> { fn run(&self) {\nself.hold() } }",
        ),
        (
            "lock/hold.rs",
            "use crate::lock::task::Task;\nimpl<T> Task<T> where T: Copy { pub fn hold(&self) {} }",
        ),
    ]);
    let expected = "lock/task.rs -> lock/hold.rs -> lock/task.rs \
                    (lock/task.rs:3 Task::hold, lock/hold.rs:1 Task)";
    assert_eq!(floor_circles(&krate), [expected]);
}

#[test]
fn equal_lines_are_seen_whatever_surrounds_them() {
    let run = "a();\n\n  b();\nc();\n}\n// e\n#[f]\ng();\nh();\n";
    let texts = [
        ("one.rs", &*format!("first();\n{run}last();\n{run}")),
        (
            "two.rs",
            &*format!("use x;\npub use {{\n  y,\n}};\n    {run}i();\n"),
        ),
        ("three.rs", "g();\nh();\n"),
    ];
    let duplicate = |first: &str, second: &str| Duplicate {
        first: first.to_owned(),
        second: second.to_owned(),
        lines: 8,
    };
    let expected = [
        duplicate("one.rs:2", "one.rs:12"),
        duplicate("one.rs:2", "two.rs:5"),
        duplicate("one.rs:12", "two.rs:5"),
    ];
    assert_eq!(duplicates(&files(&texts), 8), expected);
    assert_eq!(duplicates(&files(&texts), 9), []);
}

#[test]
fn words_are_seen_in_any_case_and_place() {
    let text =
        "// Whoever waits,\n`nobody`. everybody\nspan.record(x); re-Recorded\n.record( Replay";
    let files = files(&[("a.md", text)]);
    let whole = whole_words(&files, &["whoever", "nobody", "body"]);
    assert_eq!(whole, ["a.md:1: Whoever", "a.md:2: nobody"]);
    let parts = parts_of_words(&files, &["record", "replay"], &[".record("]);
    let expected = [
        "a.md:3: span.record(x); re-Recorded",
        "a.md:4: .record( Replay",
    ];
    assert_eq!(parts, expected);
}

#[test]
fn types_of_one_name_are_seen_and_variants_of_one_type_for_features_are_not() {
    let krate = krate(&[
        ("lib.rs", "mod a; mod b; mod tests;"),
        (
            "a.rs",
            "pub struct Same; enum Config {} impl X { type Item = u8; }\n\
             #[cfg(feature = \"x\")] type Cfg = u8; #[cfg(not(feature = \"x\"))] mod n { type Cfg = u16; }",
        ),
        (
            "b.rs",
            "mod inner {\npub(crate) trait Same {} } struct Config; impl Y { type Item = u8; }\n\
             #[cfg(test)] mod tests { struct Same; } fn Same() {}",
        ),
    ]);
    let seen = equal_types(&krate, &["Config"]);
    assert_eq!(seen, ["Same: a.rs:1, b.rs:2"]);
}

#[test]
fn a_circle_names_each_file_and_reason_once() {
    let arrow = |from, to, line, item: &str| crate::imports::Arrow {
        from,
        to,
        line,
        item: item.to_owned(),
    };
    let arrows = [
        arrow(0, 1, 1, "B"),
        arrow(0, 1, 2, "C"),
        arrow(1, 2, 3, "D"),
        arrow(2, 0, 4, "A"),
        arrow(2, 3, 5, "E"),
    ];
    let circles = circles::circles(&arrows);
    let names = |file: usize| format!("{file}.rs");
    let shown: Vec<String> = circles
        .iter()
        .map(|circle| circles::shown(circle, names))
        .collect();
    assert_eq!(
        shown,
        ["0.rs -> 1.rs -> 2.rs -> 0.rs (0.rs:1 B, 1.rs:3 D, 2.rs:4 A)"]
    );
}
