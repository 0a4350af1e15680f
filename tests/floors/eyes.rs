//! What the proofs see of texts in which something is planted.

use crate::duplicates::duplicates;
use crate::modules::Crate;
use crate::text::File;
use crate::{dependencies, equal_types, external_paths, floor_circles, mentions, upward};

fn files(texts: &[(&str, &str)]) -> Vec<File> {
    let files = texts.iter();
    files.map(|(path, text)| File::new(path, text)).collect()
}

fn krate(texts: &[(&str, &str)]) -> Crate {
    Crate::new(&files(texts))
}

#[test]
fn a_protocol_that_names_another_crate_is_seen() {
    let external = dependencies("[package]\nname = \"x\"\n[dev-dependencies]\ntokio-util = \"1\"");
    assert_eq!(external, ["tokio_util"]);
    let text =
        "use std::fmt;\nuse tokio_util::{sync::A, time as t};\nfn f() { assert!(tokio_util::x()) }";
    let krate = krate(&[
        ("lib.rs", "mod protocol; mod node;"),
        ("node.rs", text),
        ("protocol.rs", text),
    ]);
    let expected = [
        "protocol.rs:2: tokio_util::sync::A",
        "protocol.rs:2: tokio_util::time",
        "protocol.rs:3: tokio_util::x",
    ];
    assert_eq!(external_paths(&krate, "protocol", &external), expected);
}

#[test]
fn an_import_of_a_higher_floor_is_seen() {
    let krate = krate(&[
        (
            "lib.rs",
            "mod lock; mod once; mod guide; pub use once::Record as Renamed;",
        ),
        ("guide.rs", "pub fn g() {}"),
        (
            "lock.rs",
            "use crate::Renamed;\npub struct A;\nfn f() { crate::once::record::g(); crate::guide::g() }",
        ),
        ("once/mod.rs", "pub mod record; pub use self::record::*;"),
        (
            "once/record.rs",
            "pub struct Record; pub fn g() { super::super::lock::A::new() }",
        ),
    ]);
    let expected = [
        "lock.rs:3: g of guide.rs",
        "lock.rs:1: Record of once/record.rs",
        "lock.rs:3: g of once/record.rs",
    ];
    assert_eq!(upward(&krate), expected);
}

#[test]
fn a_circle_is_seen_however_it_is_written() {
    let circle = |a: &str| {
        let b = "use crate::lock::C;\npub struct B(C);\nimpl B { fn f() { crate::lock::A::new() } pub fn g() {} }";
        floor_circles(&krate(&[
            ("lib.rs", "mod lock;"),
            (
                "lock/mod.rs",
                "mod a; mod b; mod c; pub use self::{a::A, b::B, c::C};",
            ),
            ("lock/a.rs", a),
            ("lock/b.rs", b),
            ("lock/c.rs", "pub struct C;"),
        ]))
    };
    for a in [
        "use crate::lock::B; pub struct A;",
        "use crate::{lock::{B as Other}}; pub struct A;",
        "use super::b::{self}; pub struct A(b::B);",
        "pub struct A(crate::lock::B);",
        "pub use super::b::B; pub struct A(B);",
        "pub struct A; fn f() { use crate::lock::B; B::new() }",
        "pub struct A; fn f() { call!(x, crate::lock::B::new()) }",
        "pub mod inner { use super::super::B; } pub struct A;",
    ] {
        let expected = ["lock/a.rs:1: B of lock/b.rs", "lock/b.rs:3: A of lock/a.rs"];
        assert_eq!(circle(a), expected, "{a}");
    }
    // Not for a test, not for a re-export alone, not from a comment or a text.
    for a in [
        "#[cfg(test)] mod tests { use crate::lock::B; } pub struct A;",
        "pub use super::b::B; pub struct A;",
        "/// [`crate::lock::B`]\npub struct A; const B: &str = \"crate::lock::B\";",
    ] {
        assert_eq!(circle(a), [""; 0], "{a}");
    }
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
    let seen = floor_circles(&krate);
    assert!(
        seen.contains(&"lock/task.rs:3: Task::hold of lock/hold.rs".to_owned()),
        "{seen:?}"
    );
}

#[test]
fn equal_lines_are_seen_whatever_surrounds_them() {
    let run = "a();\n\n  b();\nc();\n}\n// e\n#[f]\ng();\nh();\n";
    let files = files(&[
        ("one.rs", &format!("first();\n{run}last();\n")),
        ("two.rs", &format!("pub use {{\n  y,\n}};\n    {run}i();\n")),
        ("three.rs", "g();\nh();\n"),
    ]);
    assert_eq!(duplicates(&files, 8), ["one.rs:2 and two.rs:4"]);
    assert_eq!(duplicates(&files, 9), [""; 0]);
}

#[test]
fn words_and_types_of_one_name_are_seen() {
    let files = files(&[("a.md", "// Whoever waits,\nspan.record(x);\nre-Recorded")]);
    let seen = mentions(&files, &["whoever"], None);
    assert_eq!(seen, ["a.md:1: // Whoever waits,"]);
    let seen = mentions(&files, &["record"], Some(".record("));
    assert_eq!(seen, ["a.md:3: re-Recorded"]);
    let krate = krate(&[
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "pub struct Same; enum Config {}"),
        (
            "b.rs",
            "mod inner { trait Same {} } struct Config; fn a() {}",
        ),
    ]);
    assert_eq!(equal_types(&krate), ["Same: {\"a.rs\", \"b.rs\"}"]);
}
